"""FlashInfer's own planner on a CPU: found, compiled once per machine, called.

The headers come from an installed `flashinfer` of the pinned version, or out of its wheel where `make setup` or a user
has put it (`WHEELS`); CUDA's come from Triton. A C++ compiler is enough, and takes seconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from kvzap_sglang.attention.flashinfer_wrappers import FLASHINFER_VERSION
from kvzap_sglang.kernels.cpu.build import BuildError, cache_dir, compiler

SOURCE = Path(__file__).with_name("flashinfer_plan.cpp")
WHEELS = cache_dir() / "wheels"
GET = f"pip download --no-deps --dest {WHEELS} flashinfer-python=={FLASHINFER_VERSION}"
CUDA = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
INCLUDE, NV = "flashinfer/data/include/", "flashinfer/data/cccl/libcudacxx/include/"
HEADERS = (
    *(f"{INCLUDE}flashinfer/{name}" for name in ("allocator.h", "exception.h", "pos_enc.cuh", "utils.cuh")),
    *(f"{INCLUDE}flashinfer/attention/{name}" for name in ("heap.h", "scheduler.cuh")),
    *(f"{NV}nv/{name}" for name in ("target", "detail/__preprocessor", "detail/__target_macros")),
)
FLAGS = ("-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-Bsymbolic", "-Wl,--no-undefined")


class Unavailable(RuntimeError):
    """FlashInfer's planner cannot be had here; the message says why."""


def reader() -> Callable[[str], bytes]:
    """Reads a file of FlashInfer's package by its path there. Raises `Unavailable`."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is not None and spec.origin and metadata.version("flashinfer-python") == FLASHINFER_VERSION:
        root = Path(spec.origin).parents[1]
        return lambda name: (root / name).read_bytes()
    for wheel in WHEELS.glob(f"flashinfer_python-{FLASHINFER_VERSION}-*.whl"):
        return zipfile.ZipFile(wheel).read
    raise Unavailable(f"no flashinfer-python {FLASHINFER_VERSION}: {GET}")


def python_source(name: str) -> str:
    """A module of FlashInfer, as text. Raises `Unavailable`."""
    return reader()(f"flashinfer/{name}").decode()


@cache
def library() -> ctypes.CDLL:
    """The compiled planner. Raises `Unavailable`."""
    read = reader()
    headers = {name: read(name) for name in HEADERS}
    content = hashlib.sha256(repr(FLAGS).encode() + SOURCE.read_bytes() + b"".join(headers.values())).hexdigest()[:20]
    built = cache_dir() / f"flashinfer_plan_{content}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory() as folder:
            for name, text in headers.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text)
            _compile([Path(folder, INCLUDE), Path(folder, NV), CUDA], built)
    return ctypes.CDLL(str(built))


def _compile(includes: list[Path], built: Path) -> None:
    built.parent.mkdir(parents=True, exist_ok=True)
    partial = built.with_suffix(f".{os.getpid()}")
    try:
        command = [*compiler(), *FLAGS, *(f"-I{path}" for path in includes), str(SOURCE), "-o", str(partial)]
    except BuildError as error:
        raise Unavailable(str(error)) from error
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"FlashInfer's planner does not compile:\n{done.stderr[-3000:]}")
    os.replace(partial, built)


class Schedule(NamedTuple):
    """A plan as the kernel reads it (`PrefillPlanInfo` and the int workspace). Tensors are int32.

    tile: rows of queries of a CTA, each a (token, head of the group). request, q_tile, kv_tile: `[CTAs]`, what each
    CTA does. valid: `[CTAs]`, False where one only pads. o_indptr: `[requests + 1]`, where a request's partial results
    begin. merge_indptr: `[tokens + 1]`, which of them make up a token; None where lists are not split. chunk: keys of
    a part. info, workspace: as FlashInfer gave them.
    """

    tile: int
    request: torch.Tensor
    q_tile: torch.Tensor
    kv_tile: torch.Tensor
    valid: torch.Tensor
    o_indptr: torch.Tensor
    merge_indptr: torch.Tensor | None
    chunk: int
    info: tuple[int, ...]
    workspace: torch.Tensor

    def works(self) -> Iterator[tuple[int, int, int]]:
        """(request, tile of queries, part of the list) of every CTA that does something."""
        works = torch.stack([self.request, self.q_tile, self.kv_tile], dim=1)[self.valid].tolist()
        yield from map(tuple, works)


def plan(
    q_lengths: torch.Tensor,
    kv_lengths: torch.Tensor,
    group: int,
    dim: int,
    *,
    graph: bool = False,
    disable_split_kv: bool = False,
    multiprocessors: int = 132,
    int_bytes: int = 8 << 20,
    float_bytes: int = 128 << 20,
) -> Schedule:
    """Plan requests of one KV head and `group` query heads, in workspaces of these sizes. Raises `ValueError`."""
    offsets = [torch.cat([torch.zeros(1), lengths.cumsum(0)]).int() for lengths in (q_lengths, kv_lengths)]
    workspace = torch.zeros(int_bytes, dtype=torch.uint8)
    info = plan_into(
        workspace, float_bytes, *offsets, (group, 1), dim,
        graph=graph, disable_split_kv=disable_split_kv, multiprocessors=multiprocessors,
    )  # fmt: skip
    return schedule(info, workspace, len(q_lengths))


def plan_into(
    workspace: torch.Tensor,
    float_bytes: int,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    heads: tuple[int, int],
    dim: int,
    *,
    graph: bool,
    disable_split_kv: bool,
    multiprocessors: int,
) -> tuple[int, ...]:
    """FlashInfer's plan() itself. workspace: uint8. offsets: int32. heads: of queries, of keys. Raises `ValueError`."""
    info, error = (ctypes.c_int64 * 15)(), ctypes.create_string_buffer(1000)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
    failed = library().prefill_plan(
        pointer(0x1000),  # floats: the planner only measures them out
        size(float_bytes), pointer(workspace.data_ptr()), size(len(workspace)), pointer(qo_indptr.data_ptr()),
        pointer(kv_indptr.data_ptr()), number(int(qo_indptr[-1])), number(len(qo_indptr) - 1), number(heads[0]),
        number(heads[1]), number(dim), int(graph), int(disable_split_kv), multiprocessors, info, error,
        size(len(error)),
    )  # fmt: skip
    if failed:
        raise ValueError(error.value.decode())
    return tuple(info)


def schedule(info: Sequence[int], workspace: torch.Tensor, requests: int) -> Schedule:
    """What a plan means. info: as plan() returned it. workspace: as plan() filled it."""
    ctas, rows, _, tile, request, q_tile, kv_tile, merge, o, chunk, _, _, mask, graph, split = info

    def numbers(offset: int, count: int) -> torch.Tensor:
        return workspace[offset : offset + 4 * count].view(torch.int32)

    valid = workspace[mask : mask + ctas].bool() if graph else torch.ones(ctas, dtype=torch.bool)
    return Schedule(
        tile, numbers(request, ctas), numbers(q_tile, ctas), numbers(kv_tile, ctas), valid, numbers(o, requests + 1),
        numbers(merge, rows + 1) if split else None, int(numbers(chunk, 1)), tuple(info), workspace,
    )  # fmt: skip
