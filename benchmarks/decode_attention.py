"""Decode attention over a pruned cache on the CPU: `python -m benchmarks.decode_attention`.

Compares, in one run and with interleaved rounds, the C++ kernel with (a) a pure read of the same rows, which bounds any
kernel that reads these rows, and (b) torch's scaled dot-product attention over the dense cache. Every call works on
another layer, so that no data is left in a cache. Ratios are the result; times depend on what else the machine does.
On a busy machine `--threads 1 --clock cpu` is the steadier measurement: wall time then counts waiting for a core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.machine import describe_machine
from kvzap_sglang.kernels.cpu import describe, ragged_decode, read_rows
from kvzap_sglang.kernels.encoding import VisibleCells
from kvzap_sglang.memory.huge_pages import empty_in_huge_pages

LAYOUTS = ("compact", "head-major", "scattered")


@dataclass(frozen=True)
class Shape:
    """One decode step: sizes are counts, `kept` the visible fraction of every head's positions."""

    batch: int
    q_heads: int
    kv_heads: int
    dim: int
    context: int
    kept: float

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads


@dataclass(frozen=True)
class Layer:
    """Inputs of one layer: q `[B, Hq, D]`, k and v dense `[B, H, context, D]`, cells per layout over their flat rows.

    k_pool, v_pool: these rows once more, in memory as the server's pool is (`memory.huge_pages`).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    visible: dict[str, VisibleCells]


def make_layer(shape: Shape, dtype: torch.dtype) -> Layer:
    """Random inputs. Head lengths vary by up to half around the mean.

    compact: the visible rows of a head are one run. head-major: a random subset, in order, of a run that the head got
    when the prompt was dense (what pruning leaves). scattered: rows at random places of the whole pool.
    """
    segments = shape.batch * shape.kv_heads
    k, v = (torch.randn(shape.batch, shape.kv_heads, shape.context, shape.dim).to(dtype) for _ in range(2))
    spread = torch.linspace(0.5, 1.5, segments)[torch.randperm(segments)]
    lengths = (spread * shape.kept * shape.context).long().clamp(max=shape.context).tolist()
    indptr = torch.tensor([0, *lengths]).cumsum(0)
    places: dict[str, list[torch.Tensor]] = {name: [] for name in LAYOUTS}
    anywhere = torch.randperm(segments * shape.context)
    for s, n in enumerate(lengths):
        start = s * shape.context
        places["compact"].append(start + torch.arange(n))
        places["head-major"].append(start + torch.randperm(shape.context)[:n].sort().values)
        places["scattered"].append(anywhere[int(indptr[s]) : int(indptr[s]) + n])
    cells = {name: torch.cat(rows).to(torch.int32) for name, rows in places.items()}
    visible = {name: VisibleCells(indptr, rows) for name, rows in cells.items()}
    k_pool, v_pool = (as_pool(dense.view(-1, shape.dim)) for dense in (k, v))
    return Layer(torch.randn(shape.batch, shape.q_heads, shape.dim).to(dtype), k, v, k_pool, v_pool, visible)


def as_pool(rows: torch.Tensor) -> torch.Tensor:
    """A copy of `[N, D]` rows in memory as the server's pool has it."""
    return empty_in_huge_pages(*rows.shape, dtype=rows.dtype, device="cpu").copy_(rows)


def contestants(shape: Shape) -> dict[str, Callable[[Layer], object]]:
    """What is timed, by name."""
    scale = shape.dim**-0.5

    def kernel(layout: str) -> Callable[[Layer], object]:
        def run(x: Layer) -> object:
            return ragged_decode(x.q, x.k_pool, x.v_pool, x.visible[layout], scale)

        return run

    def read(layout: str) -> Callable[[Layer], object]:
        return lambda x: read_rows(x.k_pool, x.v_pool, x.visible[layout])

    def sdpa_rows(x: Layer) -> object:
        q = x.q.view(shape.batch, shape.kv_heads, shape.group, shape.dim)
        return F.scaled_dot_product_attention(q, x.k, x.v, scale=scale)

    def sdpa_gqa(x: Layer) -> object:
        return F.scaled_dot_product_attention(x.q[:, :, None], x.k, x.v, scale=scale, enable_gqa=True)

    timed: dict[str, Callable[[Layer], object]] = {
        "sdpa, group as rows": sdpa_rows,
        "sdpa, enable_gqa": sdpa_gqa,
    }
    for layout in LAYOUTS:
        timed[f"read {layout}"] = read(layout)
        timed[f"kernel {layout}"] = kernel(layout)
    return timed


def measure(
    shape: Shape, dtype: torch.dtype, layers: int, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of every call by name, `rounds` each, interleaved; the first two rounds are not counted."""
    data = [make_layer(shape, dtype) for _ in range(layers)]
    timed = contestants(shape)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    turn = 0
    for round_ in range(-2, rounds):
        for name, run in timed.items():
            turn += 1
            begin = clock()
            run(data[turn % layers])
            if round_ >= 0:
                seconds[name].append(clock() - begin)
    return seconds


def report(shape: Shape, dtype: torch.dtype, seconds: dict[str, list[float]]) -> None:
    """Print the medians, the bandwidth of K and V rows, and the ratios."""
    row_bytes = 2 * shape.dim * (torch.finfo(dtype).bits // 8)
    dense = shape.batch * shape.kv_heads * shape.context * row_bytes
    median = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"\n{str(dtype).removeprefix('torch.')}: dense {dense / 1e6:.1f} MB, {shape.kept:.0%} visible")
    for name, middle in median.items():
        size = dense if name.startswith("sdpa") else dense * shape.kept
        print(
            f"  {name:20s} {middle * 1e3:7.3f} ms  (best {min(seconds[name]) * 1e3:7.3f})  {size / middle / 1e9:5.1f} GB/s"
        )
    for layout in LAYOUTS:
        own = median[f"kernel {layout}"]
        print(
            f"  {layout:10s}: {median[f'read {layout}'] / own:.2f} of a pure read's bandwidth, "
            f"{median['sdpa, group as rows'] / own:.1f}x sdpa (group as rows), "
            f"{median['sdpa, enable_gqa'] / own:.1f}x sdpa (enable_gqa)"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--q-heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--kept", type=float, default=0.35, help="visible fraction of the positions")
    parser.add_argument("--layers", type=int, default=7, help="data sets in rotation; more than the caches hold")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: process time / threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shape = Shape(options.batch, options.q_heads, options.kv_heads, options.dim, options.context, options.kept)
    clock = time.perf_counter if options.clock == "wall" else lambda: time.process_time() / options.threads
    print(
        f"{describe_machine(options.threads)}, load {os.getloadavg()[0]:.1f}, {options.clock} time, torch {torch.__version__}, {describe()}\n{shape}"
    )
    for dtype in (torch.float32, torch.bfloat16):
        report(shape, dtype, measure(shape, dtype, options.layers, options.rounds, clock))


if __name__ == "__main__":
    main()
