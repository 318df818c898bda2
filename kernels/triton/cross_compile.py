"""Compile every kernel for GPUs that are not here, and read off what it takes: registers, spills, shared memory.

    python -m kvzap_sglang.kernels.triton.cross_compile [--markdown FILE]

Exits with 1 when a kernel does not compile, or spills more than it may. `--markdown` replaces the table between the
markers in FILE (kernels/README.md). Triton caches by source hash; what ptxas says of a kernel is cached beside it, so a
second run is quick. Must not run in a process where triton was imported for its interpreter.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError
from triton.runtime.cache import get_cache_manager

from . import cells, compact, decode, report, score, visible, write
from .extend import _extend_kernel, tile

ARCHITECTURES = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# (head dim, group, KV heads): SmolLM2, Qwen3-8B and Llama-3.1-8B, an odd one, a large one.
SHAPES = ((64, 3, 3), (128, 4, 8), (96, 7, 4), (256, 16, 2))
MAIN = SHAPES[1]
"""Also compiled for fp16, for large batches, and for one token (Triton makes a constant of every argument that is 1)."""
CHUNK, OTHER_CHUNK = 512, 1024
"""Positions of a list: of the server's, and of decode lists that `benchmarks/gpu_check` also times."""
BATCH, LARGE_BATCH = 64, 512
NOT_A_BYTE = {"chunk_kernel", "merge_kernel", "visible_kernel"}
"""Kernels that may not spill; others may this much:"""
SPILLS_ALLOWED = 32
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
    def name(self) -> str:
        return str(self.kernel.__name__).strip("_")

    @property
    def label(self) -> str:
        shown = {name: value for name, value in self.constants.items() if not name.endswith("PADDED")}
        return ", ".join(f"{name} {value}" for name, value in shown.items())


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes. spills: bytes stored and loaded again; shared: bytes of dynamic shared memory.

    failure: why it does not compile; empty when it does.
    """

    kernel: str
    label: str
    architecture: str
    warps: int
    registers: int = 0
    spills: int = 0
    shared: int = 0
    instructions: tuple[str, ...] = ()
    failure: str = ""

    @property
    def summary(self) -> str:
        return "does not compile" if self.failure else f"{self.registers} / {self.spills} / {self.shared}"

    @property
    def complaint(self) -> str:
        """What is wrong with it, if anything."""
        if self.failure:
            return f"does not compile for {self.architecture}: {self.kernel} ({self.label}): {self.failure}"
        allowed = 0 if self.kernel in NOT_A_BYTE else SPILLS_ALLOWED
        return f"spills more than {allowed} bytes: {self}" if self.spills > allowed else ""


def variants(capability: int) -> Iterator[Variant]:
    """Every kernel at the shapes that are served, as it is launched on an architecture."""
    for dim, group, heads in SHAPES:
        padded = {"GROUP_PADDED": max(16, triton.next_power_of_2(group)), "DIM_PADDED": triton.next_power_of_2(dim)}
        sizes = {"HEADS": heads, "GROUP": group, "DIM": dim, **padded}
        main = (dim, group, heads) == MAIN
        for dtype in ("*bf16", "*fp16") if main else ("*bf16",):
            yield from decode_variants(dtype, sizes, main)
            if dtype == "*bf16" and dim != 96:  # the slowest to compile; 96 is padded to 128, fp16 takes the same
                yield from extend_variants(capability, dtype, sizes)
            yield from write_variants(dtype, sizes, main)
            yield from score_variants(dtype, heads, main)
        yield from visible_variants(heads, main)
        yield from compact_variants(heads, main)
        yield from cell_variants(heads, main)
    places = {"lengths": "*i64", "first": "*i32", "dense_from": "*i64"}
    for batch in ({"BATCH": BATCH}, {"BATCH": LARGE_BATCH}, {"BATCH": visible.batch_size(1), "batch": 1}):
        yield Variant(visible._place_kernel, places, batch, num_warps=4)
    yield Variant(report._report_kernel, {"kept": "*i8", "counters": "*i64", "out": "*u8"}, {"BYTES": report.BYTES}, 4)


def decode_variants(dtype: str, sizes: dict[str, int], main: bool) -> Iterator[Variant]:
    """Chunks and their merge."""
    lists = dict.fromkeys(("first", "cells", "counts"), "*i32")
    parts = {"part": "*fp32", "part_lse": "*fp32"}
    pools = {"q": dtype, "k_pool": dtype, "v_pool": dtype, "scale_log2e": "fp32"}
    constants = {**sizes, "CHUNK": CHUNK, "KEYS": decode.KEYS}
    batches: list[dict[str, int]] = [{"BATCH": BATCH}]
    if main:
        batches += [{"BATCH": LARGE_BATCH}, {"BATCH": visible.batch_size(1), "batch": 1}]
    for batch in batches:
        yield Variant(decode._chunk_kernel, {**pools, **lists, **parts}, constants | batch, num_warps=4)
    yield Variant(decode._merge_kernel, {**lists, **parts, "out": dtype, "lse": "*fp32"}, sizes, num_warps=4)


def extend_variants(capability: int, dtype: str, sizes: dict[str, int]) -> Iterator[Variant]:
    """Dense and sparse."""
    tensors = dict.fromkeys(("q", "k", "v", "k_pool", "v_pool", "out"), dtype)
    lists = dict.fromkeys(("first", "cells", "counts", "positions"), "*i32")
    bounds = dict.fromkeys(("starts", "begins", "tokens_of"), "*i64")
    types = {**tensors, **lists, **bounds, "kept": "*i8", "scale_log2e": "fp32"}
    own = {name: value for name, value in sizes.items() if name != "GROUP_PADDED"}
    for sparse in (0, 1):
        rows, keys, warps = tile(sizes["DIM"], capability, bool(sparse))
        constants = {**own, "CHUNK": CHUNK, "SPARSE": sparse, "ROWS": rows, "KEYS": keys}
        yield Variant(_extend_kernel, types, constants, num_warps=warps, num_stages=2)


def write_variants(dtype: str, sizes: dict[str, int], main: bool) -> Iterator[Variant]:
    types = dict.fromkeys(("k", "v", "k_pool", "v_pool", "scores"), dtype)
    types |= {"limits": "*fp32", "kept": "*i8", "counters": "*i64", "table": "*i32", "slots": "*i64"}
    constants = {name: sizes[name] for name in ("HEADS", "DIM", "DIM_PADDED")} | {"TOKENS": write.TOKENS}
    for one in one_token(main):
        yield Variant(write._write_kernel, types, constants | one, num_warps=4)


def score_variants(dtype: str, heads: int, main: bool) -> Iterator[Variant]:
    types = dict.fromkeys(("hidden", "weight", "bias", "out"), dtype)
    constants = {"HEADS": heads, "HEADS_PADDED": max(16, triton.next_power_of_2(heads))}
    constants |= {"ROWS": score.ROWS, "WIDTH": score.WIDTH}
    for one in one_token(main):
        yield Variant(score._score_kernel, types, constants | one, num_warps=4)


def visible_variants(heads: int, main: bool) -> Iterator[Variant]:
    """By chunk size, with and without positions."""
    types = dict.fromkeys(("first", "cells", "counts", "positions", "table", "req_to_token"), "*i32")
    types |= dict.fromkeys(("dense_from", "rows", "lengths"), "*i64")
    for chunk in (CHUNK, OTHER_CHUNK):
        constants = {"HEADS": heads, "HEADS_PADDED": triton.next_power_of_2(heads), "CHUNK": chunk}
        batches: list[dict[str, int]] = [{"BATCH": BATCH, "DETAIL": 0}]
        if chunk == CHUNK:
            batches.append({"BATCH": BATCH, "DETAIL": 1})
        if main:
            batches += [{"BATCH": LARGE_BATCH, "DETAIL": 0}, {"BATCH": visible.batch_size(1), "batch": 1, "DETAIL": 0}]
        for batch in batches:
            yield Variant(visible._visible_kernel, types, constants | batch, visible.warps(chunk, heads))


def compact_variants(heads: int, main: bool) -> Iterator[Variant]:
    """Lists put behind one another, in two launches."""
    types = dict.fromkeys(("first", "cells", "counts", "before", "sizes", "indptr", "indices"), "*i32")
    constants = {"HEADS": heads, "HEADS_PADDED": triton.next_power_of_2(heads)}
    yield Variant(compact._sizes_kernel, types, constants | {"BLOCK": compact.BLOCK}, num_warps=4)
    batches: list[dict[str, int]] = [{"BATCH": BATCH}]
    if main:
        batches += [{"BATCH": LARGE_BATCH}, {"BATCH": visible.batch_size(1), "batch": 1}]
    for batch in batches:
        segments = {"SEGMENTS": triton.next_power_of_2(batch["BATCH"] * heads), "CHUNK": CHUNK}
        warps = visible.warps(CHUNK, heads)
        yield Variant(compact._compact_kernel, types, constants | segments | batch, warps)


def cell_variants(heads: int, main: bool) -> Iterator[Variant]:
    """Taking, releasing and settling."""
    types = {"table": "*i32", "slots": "*i64", "stack": "*i32", "counters": "*i64", "req_to_token": "*i32"}
    constants = {"HEADS": heads, "PAIRS": cells.PAIRS}
    for one in one_token(main):
        yield Variant(cells._take_kernel, types, constants | one, num_warps=4)
        for settle, places in ((0, 0), (1, 0), (1, 1)):
            kind = {"SETTLE": settle, "PLACES": places}
            yield Variant(cells._free_kernel, types, constants | kind | one, num_warps=4)


def one_token(main: bool) -> list[dict[str, int]]:
    return [{}, {"tokens": 1}] if main else [{}]


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
    registers, spills = assembler_numbers(compiled.asm["ptx"], capability)
    found = re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", compiled.asm["ptx"])
    return Usage(
        variant.name, variant.label, ARCHITECTURES[capability], variant.num_warps, registers, spills,
        compiled.metadata.shared, tuple(sorted(set(found))),
    )  # fmt: skip


def assembler_numbers(ptx: str, capability: int) -> tuple[int, int]:
    """Registers and spilled bytes that ptxas reports, with the options Triton gives it; cached as Triton's own files are."""
    key = hashlib.sha256(f"{triton.__version__} {ARCHITECTURES[capability]} {ptx}".encode()).hexdigest()
    cache = get_cache_manager(key)
    known = cache.get_file("ptxas.txt")
    report = Path(known).read_text() if known else _assembler_report(ptx, capability)
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    if registers is None or spilled is None:
        raise RuntimeError(f"ptxas said nothing of registers and spills:\n{report}")
    if not known:
        cache.put(report, "ptxas.txt", binary=False)
    return int(registers[1]), int(spilled[1]) + int(spilled[2])


def _assembler_report(ptx: str, capability: int) -> str:
    blackwell = TOOLS / "ptxas-blackwell"
    assembler = blackwell if capability >= 100 and blackwell.exists() else TOOLS / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        target = f"--gpu-name={ARCHITECTURES[capability]}"
        command = [str(assembler), "-lineinfo", "-v", "--regAllocOptLevel=2", target, file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def measure() -> list[Usage]:
    """Every variant on every architecture."""
    found = []
    for capability, architecture in ARCHITECTURES.items():
        for variant in variants(capability):
            try:
                found.append(compile_variant(variant, capability))
            except CompilationError as error:
                found.append(Usage(variant.name, variant.label, architecture, variant.num_warps, failure=str(error)))
    return found


def table(usages: list[Usage]) -> str:
    """Markdown, one line per variant: registers / spilled bytes / bytes of shared memory per architecture."""
    architectures = list(ARCHITECTURES.values())
    lines = [
        "| kernel | variant | warps | " + " | ".join(architectures) + " |",
        "|---|---|---|" + "---|" * len(architectures),
    ]
    rows: dict[tuple[str, str, int], dict[str, str]] = {}
    for usage in usages:  # bf16 comes first, and fp16 takes the same
        rows.setdefault((usage.kernel, usage.label, usage.warps), {}).setdefault(usage.architecture, usage.summary)
    for (kernel, label, warps), numbers in rows.items():
        line = [kernel, label, str(warps), *(numbers.get(architecture, "") for architecture in architectures)]
        lines.append("| " + " | ".join(line) + " |")
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
    if complaints := [usage.complaint for usage in usages if usage.complaint]:
        raise SystemExit("\n".join(complaints))


if __name__ == "__main__":
    main()
