"""Cells taken, written and freed, the step's report and the scores, against plain torch (bit for bit) or fp64."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.gpu_check.checked import FULL, Check
from benchmarks.gpu_check.comparing import TOLERANCE, Case, Wrong, equal, error
from benchmarks.gpu_check.kernels import torch_forms
from benchmarks.gpu_check.problems import normal
from kvzap_sglang.kernels.counters import COUNTERS, FAULT, FREE, HEADER_BYTES, HOMELESS, TICKET, report_bytes
from kvzap_sglang.kernels.encoding import CELL_MASK, CONDEMNED, NONE
from kvzap_sglang.kernels.triton.cells import PAIRS
from kvzap_sglang.kernels.triton.report import BYTES
from kvzap_sglang.kernels.triton.score import ROWS, WIDTH
from kvzap_sglang.kernels.triton.write import TOKENS

LAYERS = 3


def write_cases(check: Check) -> Iterator[Case]:
    for tokens in (1, TOKENS - 1, TOKENS, TOKENS + 1, 100):
        for heads, dim in ((1, 64), (3, 96), (8, 128), (2, 256)):
            run = functools.partial(_write, check, tokens, heads, dim, "")
            yield Case("write_cells", f"{tokens} tokens, {heads} heads, head dim {dim}", run)
    for what in ("padding", "a token without a cell"):
        yield Case("write_cells", what, functools.partial(_write, check, 20, 2, 64, what))


def _write(check: Check, tokens: int, heads: int, dim: int, what: str, rng: torch.Generator) -> float:
    """Table, pools (NaN where nothing is written), kept bits and counters, all equal to torch's."""
    device = check.device
    table = torch.full((tokens + 9, heads), NONE, dtype=torch.int32)
    slots = 1 + torch.randperm(tokens + 5, generator=rng)[:tokens]
    cells = torch.randperm(tokens * heads + 4, generator=rng)[: tokens * heads]
    table[slots] = cells.view(tokens, heads).to(torch.int32)
    if what == "padding":
        slots[17:] = 0
    elif what:
        table[slots[7], 1] = NONE
    fused = normal((tokens, 2 * heads * dim + 8), check.dtype, device, rng)
    k, v = (fused[:, at : at + heads * dim].view(tokens, heads, dim) for at in (0, heads * dim))
    scores = normal((tokens, heads + 2), check.dtype, device, rng)[:, :heads]
    limits = torch.randn(tokens, generator=rng)
    limits[::5], limits[:1] = -torch.inf, scores[0, 0].float().cpu()  # equal to the limit: kept
    results = []
    for write in (check.kernels.write_cells, torch_forms().write_cells):
        own, kept = table.to(device), torch.full((tokens, LAYERS, heads), 7, dtype=torch.int8, device=device)
        pools = [torch.full((tokens * heads + 4, dim), torch.nan, dtype=check.dtype, device=device) for _ in range(2)]
        counters = torch.zeros(COUNTERS, dtype=torch.int64, device=device)
        write(own, slots.to(device), k, v, *pools, scores, limits.to(device), kept[:, 1], counters)
        results.append([own, *pools, kept, counters])
    if int(results[0][4][FAULT]) != (HOMELESS if what.startswith("a token") else 0):
        raise Wrong(f"faults {int(results[0][4][FAULT])}")
    return max(equal(ours, theirs, "result") for ours, theirs in zip(*results, strict=True))


def cell_cases(check: Check) -> Iterator[Case]:
    """Independent of the dtype."""
    for heads in (1, 3, 8):
        for tokens in (0, 1, 2, PAIRS // heads, PAIRS // heads + 1, 2 * PAIRS + 1):
            name = f"{tokens} tokens, {heads} heads"
            yield Case("take_cells", name, functools.partial(_take, check, tokens, heads, 5))
            for settle in (False, True):
                run = functools.partial(_free, check, tokens, heads, settle)
                yield Case("free_cells", f"{name}, {'settle' if settle else 'release'}", run)
    yield Case("take_cells", "more than there is", functools.partial(_take, check, 10, 2, -7))
    size = (3000, 36) if check.sizes is FULL else (40, LAYERS)
    yield Case("take_cells", "rounds with free_cells", functools.partial(_rounds, check, *size))


class _Pool:
    """A free stack and a table. spare: cells more than `tokens` take."""

    def __init__(self, tokens: int, layers: int, heads: int, spare: int, rng: torch.Generator, device: str) -> None:
        cells = tokens * layers * heads + spare
        self.table = torch.full((layers, tokens + 4, heads), NONE, dtype=torch.int32, device=device)
        self.stack = (1 + torch.randperm(cells, generator=rng)).to(device, torch.int32)
        self.counters = torch.zeros(COUNTERS, dtype=torch.int64, device=device)
        self.counters[FREE] = cells
        self.slots = (1 + torch.randperm(tokens + 3, generator=rng)[:tokens]).to(device)

    def state(self) -> list[torch.Tensor]:
        """Without the order of the stack, and what lies above it."""
        free = self.stack[: int(self.counters[FREE])].sort().values
        return [self.table, self.counters[:TICKET], free]


def _take(check: Check, tokens: int, heads: int, spare: int, rng: torch.Generator) -> float:
    seed, states = int(torch.randint(1 << 30, (), generator=rng)), []
    for take in (check.kernels.take_cells, torch_forms().take_cells):
        pool = _Pool(tokens, LAYERS, heads, spare, torch.Generator().manual_seed(seed), check.device)
        take(pool.table, pool.slots, pool.stack, pool.counters)
        states.append(pool.state())
    return max(equal(ours, theirs, "result") for ours, theirs in zip(*states, strict=True))


def _free(check: Check, tokens: int, heads: int, settle: bool, rng: torch.Generator) -> float:
    """Slots given twice, slots without cells."""
    seed, states = int(torch.randint(1 << 30, (), generator=rng)), []
    for free in (check.kernels.free_cells, torch_forms().free_cells):
        own = torch.Generator().manual_seed(seed)
        pool = _Pool(tokens, LAYERS, heads, 5, own, check.device)
        torch_forms().take_cells(pool.table, pool.slots[1:], pool.stack, pool.counters)
        marked = (torch.rand(pool.table.shape, generator=own) < 0.4).to(check.device)
        pool.table[(pool.table >= 0) & marked] |= CONDEMNED
        twice = torch.cat([pool.slots, pool.slots[: tokens // 2]])
        free(pool.table, twice, pool.stack, pool.counters, settle=settle)
        states.append(pool.state())
    return max(equal(ours, theirs, "result") for ours, theirs in zip(*states, strict=True))


def _rounds(check: Check, tokens: int, layers: int, rng: torch.Generator) -> float:
    """Many cells taken and freed by many programs at once: every cell stays free once or owned once."""
    pool = _Pool(tokens, layers, 8, 0, rng, check.device)
    every = int(pool.counters[FREE])
    for _ in range(20 if check.sizes is FULL else 4):
        chosen = pool.slots[torch.randperm(tokens, generator=rng)[: tokens // 2].to(check.device)]
        check.kernels.free_cells(pool.table, chosen, pool.stack, pool.counters, settle=False)
        check.kernels.take_cells(pool.table, chosen, pool.stack, pool.counters)
        owned = pool.table[pool.table >= 0].int() & CELL_MASK
        free = pool.stack[: int(pool.counters[FREE])]
        found = torch.bincount(torch.cat([owned, free]).long(), minlength=every + 1)
        if int(pool.counters[FAULT]) or not bool((found[1:] == 1).all()):
            raise Wrong(f"faults {int(pool.counters[FAULT])}, {int((found[1:] != 1).sum())} cells lost or doubled")
    return 0.0


def report_cases(check: Check) -> Iterator[Case]:
    """Independent of the dtype."""
    for pairs in (1, 7, 8, 9, 90, 288):
        for tokens in (0, 1, BYTES, BYTES + 1):
            run = functools.partial(_report, check, tokens, pairs)
            yield Case("step_report", f"{tokens} tokens, {pairs} pairs", run)


def _report(check: Check, tokens: int, pairs: int, rng: torch.Generator) -> float:
    """Against numpy's packing; the bytes after it stay."""
    kept = (torch.rand(tokens, pairs, generator=rng) < 0.4).to(check.device)
    counters = torch.randint(-(2**62), 2**62, (COUNTERS,), generator=rng).to(check.device)
    size = report_bytes(tokens, pairs)
    out = torch.full((size + 3,), 0xA5, dtype=torch.uint8, device=check.device)
    check.kernels.step_report(kept, counters, out[:size])
    told = out.cpu().numpy()
    packed = np.packbits(kept.cpu().numpy(), axis=1).ravel()
    if told[:HEADER_BYTES].tobytes() != counters.cpu().numpy().tobytes():
        raise Wrong("the counters are not what was told")
    return equal(torch.from_numpy(told[HEADER_BYTES:]), torch.from_numpy(np.append(packed, [0xA5] * 3)), "bits")


def score_cases(check: Check) -> Iterator[Case]:
    for heads, units in ((1, 1), (3, WIDTH), (8, 2 * WIDTH + 1), (8, 512), (17, 640)):
        for tokens in (0, 1, ROWS - 1, ROWS, ROWS + 1):
            run = functools.partial(_score, check, tokens, heads, units)
            yield Case("mlp_scores", f"{tokens} tokens, {heads} heads, {units} units", run)


def _score(check: Check, tokens: int, heads: int, units: int, rng: torch.Generator) -> float:
    """Against fp64; what lies between the rows of `out` stays NaN."""
    hidden = normal((tokens, units + 5), check.dtype, check.device, rng)[:, :units]
    weight = (torch.randn(heads, units, generator=rng) / units**0.5).to(check.device, check.dtype)
    bias = normal((heads,), check.dtype, check.device, rng)
    out = torch.full((tokens, 2, heads), torch.nan, dtype=check.dtype, device=check.device)
    check.kernels.mlp_scores(hidden, weight, bias, out[:, 1])
    exact = torch.nn.functional.gelu(hidden.double()) @ weight.double().T + bias.double()
    if not bool(out[:, 0].isnan().all()):
        raise Wrong("rows that are not the kernel's were written")
    return error(out[:, 1], exact, TOLERANCE[check.dtype])
