"""Compile every kernel for GPUs that are not here, and read off what it takes: registers, spills, shared memory.

    python -m kvzap_sglang.kernels.triton.cross_compile [--markdown FILE]

Exits with 1 when a kernel spills more than it may. `--markdown` replaces the table between the markers in FILE
(kernels/README.md). Triton caches by source, so a second run is quick. Must not run in a process where triton was
imported for its interpreter.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import decode, visible, write
from .extend import _extend_kernel, tile

ARCHITECTURES = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# (head dim, group, KV heads): SmolLM2, Qwen3-8B and Llama-3.1-8B, an odd one, a large one.
SHAPES = ((64, 3, 3), (128, 4, 8), (96, 7, 4), (256, 16, 2))
CHUNKS = (512, 1024)
SPILLS_ALLOWED = {"chunk_kernel": 0, "merge_kernel": 0, "extend_kernel": 32, "visible_kernel": 0, "write_kernel": 32}
BEGIN, END = "<!-- cross_compile: begin -->", "<!-- cross_compile: end -->"


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel. types: of its other parameters (Triton's names), by parameter."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, int]
    num_warps: int
    num_stages: int = 3

    @property
    def label(self) -> str:
        shown = {name: value for name, value in self.constants.items() if not name.endswith("PADDED")}
        return ", ".join(f"{name} {value}" for name, value in shown.items())


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes. spills: bytes stored and loaded again; shared: bytes of dynamic shared memory."""

    kernel: str
    label: str
    architecture: str
    registers: int
    spills: int
    shared: int
    warps: int
    instructions: tuple[str, ...] = field(default=())


def variants(capability: int) -> Iterator[Variant]:
    """Every kernel at the shapes that are served, as it is launched on an architecture."""
    for dim, group, heads in SHAPES:
        padded = {"GROUP_PADDED": max(16, triton.next_power_of_2(group)), "DIM_PADDED": triton.next_power_of_2(dim)}
        sizes = {"HEADS": heads, "GROUP": group, "DIM": dim, **padded}
        lists = {"first": "*i32", "cells": "*i32", "counts": "*i32"}
        parts = {"part": "*fp32", "part_lse": "*fp32"}
        for dtype in ("*bf16", "*fp16") if dim == 128 else ("*bf16",):
            pools = {"q": dtype, "k_pool": dtype, "v_pool": dtype, "scale_log2e": "fp32"}
            constants = {**sizes, "CHUNK": CHUNKS[-1], "KEYS": decode.KEYS}
            yield Variant(decode._chunk_kernel, {**pools, **lists, **parts}, constants, num_warps=4)
            yield Variant(decode._merge_kernel, {**lists, **parts, "out": dtype, "lse": "*fp32"}, sizes, num_warps=4)
            if dtype == "*bf16" and dim != 96:  # the slowest to compile; 96 is padded to 128, fp16 takes the same
                yield from extend_variants(capability, dtype, sizes)
            new = {"k": dtype, "v": dtype, "k_pool": dtype, "v_pool": dtype, "scores": dtype}
            marks = {"limits": "*fp32", "kept": "*i8", "fault": "*i32", "table": "*i32", "slots": "*i64"}
            constants = {"HEADS": heads, "DIM": dim, "DIM_PADDED": padded["DIM_PADDED"], "TOKENS": write.TOKENS}
            yield Variant(write._write_kernel, {**new, **marks}, constants, num_warps=4)
        for chunk in CHUNKS:
            constants = {"HEADS": heads, "HEADS_PADDED": triton.next_power_of_2(heads), "CHUNK": chunk}
            types = {
                **lists,
                "positions": "*i32",
                "dense_from": "*i64",
                "table": "*i32",
                "req_to_token": "*i32",
                "rows": "*i64",
                "lengths": "*i64",
            }
            for detail in (0, 1):
                detailed = constants | {"DETAIL": detail}
                yield Variant(visible._visible_kernel, types, detailed, num_warps=visible.warps(chunk, heads))


def extend_variants(capability: int, dtype: str, sizes: dict[str, int]) -> Iterator[Variant]:
    """Dense and sparse."""
    tensors = dict.fromkeys(("q", "k", "v", "k_pool", "v_pool", "out"), dtype)
    lists = dict.fromkeys(("first", "cells", "counts", "positions", "q_indptr"), "*i32")
    types = {**tensors, **lists, "starts": "*i64", "kept": "*i8", "scale_log2e": "fp32"}
    own = {name: value for name, value in sizes.items() if name != "GROUP_PADDED"}
    for sparse in (0, 1):
        rows, keys, warps = tile(sizes["DIM"], capability, bool(sparse))
        constants = {**own, "CHUNK": CHUNKS[-1], "SPARSE": sparse, "ROWS": rows, "KEYS": keys}
        yield Variant(_extend_kernel, types, constants, num_warps=warps, num_stages=2)


def compile_variant(variant: Variant, capability: int) -> Usage:
    """Compile as a launch would: pointers and strides divisible by 16. Raises what Triton raises."""
    names = variant.kernel.arg_names
    signature = {n: "constexpr" if n in variant.constants else variant.types.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name.startswith("stride")
    }
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spills = _assembler_report(compiled.asm["ptx"], capability)
    found = re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", compiled.asm["ptx"])
    name = variant.kernel.__name__.strip("_")
    return Usage(
        name, variant.label, ARCHITECTURES[capability], registers, spills, compiled.metadata.shared,
        variant.num_warps, tuple(sorted(set(found))),
    )  # fmt: skip


def _assembler_report(ptx: str, capability: int) -> tuple[int, int]:
    """Registers and spilled bytes that ptxas reports, with the options Triton gives it."""
    blackwell = TOOLS / "ptxas-blackwell"
    assembler = blackwell if capability >= 100 and blackwell.exists() else TOOLS / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        target = f"--gpu-name={ARCHITECTURES[capability]}"
        command = [str(assembler), "-lineinfo", "-v", "--regAllocOptLevel=2", target, file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = done.stdout + done.stderr
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    if registers is None or spilled is None:
        raise RuntimeError(f"ptxas said nothing of registers and spills:\n{report}")
    return int(registers[1]), int(spilled[1]) + int(spilled[2])


def measure() -> list[Usage]:
    """Every variant on every architecture."""
    return [compile_variant(variant, capability) for capability in ARCHITECTURES for variant in variants(capability)]


def table(usages: list[Usage]) -> str:
    """Markdown, one line per variant: registers / spilled bytes / bytes of shared memory per architecture."""
    architectures = list(ARCHITECTURES.values())
    lines = [
        "| kernel | variant | warps | " + " | ".join(architectures) + " |",
        "|---|---|---|" + "---|" * len(architectures),
    ]
    rows: dict[tuple[str, str, int], dict[str, str]] = {}
    for usage in usages:  # bf16 comes first, and fp16 takes the same
        cells = rows.setdefault((usage.kernel, usage.label, usage.warps), {})
        cells.setdefault(usage.architecture, f"{usage.registers} / {usage.spills} / {usage.shared}")
    for (kernel, label, warps), cells in rows.items():
        numbers = (cells.get(architecture, "") for architecture in architectures)
        lines.append(f"| {kernel} | {label} | {warps} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--markdown", type=Path, help="replace the table in this file")
    args = parser.parse_args()
    usages = measure()
    text = table(usages)
    print(text)
    if args.markdown:
        head, rest = args.markdown.read_text().split(BEGIN)
        tail = rest.split(END)[1]
        args.markdown.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")
    spilling = [usage for usage in usages if usage.spills > SPILLS_ALLOWED[usage.kernel]]
    if spilling:
        raise SystemExit("\n".join(f"spills more than allowed: {usage}" for usage in spilling))


if __name__ == "__main__":
    main()
