"""Faults that must never pass unseen, planted one by one. `python -O -m tests.planted` prints what each raised."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvzap_sglang import guard
from kvzap_sglang.attach import UnsupportedModel, attention_modules
from kvzap_sglang.attention.cpu import KVPressCPUBackend
from kvzap_sglang.config import KVPressConfigError, build_config
from kvzap_sglang.kernels.bits import pack_bits
from kvzap_sglang.kernels.cpu import ragged_decode, visible_cells, write_cells
from kvzap_sglang.kernels.encoding import CELL_MASK, NONE, VisibleCells
from kvzap_sglang.memory.cell_pool import CellPool, CellUnderflow
from kvzap_sglang.memory.head_token_sets import SetShape
from kvzap_sglang.memory.layout import CellLayout
from kvzap_sglang.memory.ledger import CellLedger
from kvzap_sglang.memory.row_state import RowState
from kvzap_sglang.presses.surrogate import SurrogateConfig, SurrogateError, check_fits
from kvzap_sglang.request_options import OptionError, check_options, parse_options
from kvzap_sglang.sharing.checks import scan_faults
from tests.memory.simulator import CONFIG, Request, Simulator

NO_TOKEN = torch.empty(0, dtype=torch.int64)


def pool_of(tokens: int) -> CellPool:
    """Ten dense tokens of room, the slots 1..tokens in use."""
    pool = CellPool(CellLayout(2, 2, 16, 16, 4, 10, 30), torch.float32, "cpu")
    pool.pop(torch.arange(1, tokens + 1))
    return pool


def reported(faults: list[str]) -> None:
    """An idle check that returns its findings: SGLang raises them."""
    if faults:
        raise RuntimeError("; ".join(faults))


def cell_owned_twice() -> None:
    pool = pool_of(3)
    pool.table[0, 1, 0] = pool.table[0, 2, 0]
    reported(pool.check())


def cell_lost() -> None:
    pool = pool_of(3)
    pool.table[0, 1, 0] = NONE
    reported(pool.check())


def cell_freed_twice() -> None:
    pool = pool_of(0)
    pool._push(torch.ones(1, dtype=torch.int32))


def cell_freed_while_owned() -> None:
    pool = pool_of(3)
    pool._push(pool.table[0, 1, :1] & CELL_MASK)
    reported(pool.check())


def node_says_more_than_the_table() -> None:
    simulator = idle_simulator()
    (node,) = simulator.tree.nodes()
    simulator.pool.settle(node.value)
    reported(scan_faults(simulator.tree))


def idle_simulator() -> Simulator:
    """One finished request of 20 tokens in the tree, all of its window condemned and in memory."""
    simulator = Simulator(physical=60, headroom=2, window=30, lag=0, removed=1.0, sparse=False)
    simulator.admit(Request(1, list(range(20)), 1))
    simulator.prefill_chunk(99)
    return simulator


def tokens_inserted_outside_a_checkpoint() -> None:
    tree = idle_simulator().tree
    tree.insert(InsertParams(key=RadixKey(array("q", [7, 8, 9]), None), value=torch.arange(3)))


def backend() -> KVPressCPUBackend:
    runtime: Any = idle_simulator().runtime
    runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=SimpleNamespace(start_layer=0))
    return KVPressCPUBackend(runner, runtime)


def attend(save_kv_cache: bool) -> None:
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False), out_cache_loc=NO_TOKEN)
    layer = SimpleNamespace(tp_q_head_num=1, tp_k_head_num=1, tp_v_head_num=1, qk_head_dim=1, v_head_dim=1, layer_id=0)
    found = backend()
    found._runtime.step.write = lambda layer, slots, k, v: (k, v)  # type: ignore[method-assign]
    found.forward(*[torch.zeros(0, 1)] * 3, layer, batch, save_kv_cache=save_kv_cache)


def press_half_installed() -> None:
    parts = ("token_to_kv_pool", "token_to_kv_pool_allocator", "attn_backend")
    runner = SimpleNamespace(
        **dict.fromkeys(parts), device="cpu", kv_press_layers=1, model_config=SimpleNamespace(num_hidden_layers=2)
    )
    guard.self_check(CONFIG, runner, None)


def surrogate_of_another_model() -> None:
    check_fits(SurrogateConfig(64, 2, None, 2), hidden_size=64, num_layers=3, num_kv_heads=2, source="s")


def rows(slots: int) -> torch.Tensor:
    return torch.zeros(slots, 1, 16)


def table(*entries: int) -> torch.Tensor:
    return torch.tensor(entries, dtype=torch.int32)[:, None]


def cell_outside_the_pool() -> None:
    visible = VisibleCells(torch.tensor([0, 1]), torch.tensor([9], dtype=torch.int32))
    ragged_decode(torch.zeros(1, 1, 16), torch.zeros(9, 16), torch.zeros(9, 16), visible, 1.0)


PLANTED: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "a cell owned twice": (cell_owned_twice, RuntimeError),
    "a cell lost": (cell_lost, RuntimeError),
    "a cell freed twice": (cell_freed_twice, RuntimeError),
    "a cell freed while owned": (cell_freed_while_owned, RuntimeError),
    "more cells than there are": (lambda: pool_of(11), CellUnderflow),
    "a node that says more than the table": (node_says_more_than_the_table, RuntimeError),
    "tokens inserted outside a checkpoint": (tokens_inserted_outside_a_checkpoint, RuntimeError),
    "a ledger report above the total": (lambda: CellLedger(10).report(1, 11), RuntimeError),
    "a ledger report below zero": (lambda: CellLedger(10).report(1, -1), RuntimeError),
    "a negative credit": (lambda: CellLedger(10).credit(-1), ValueError),
    "positions that the tree owns": (lambda: RowState(5, 9, SetShape(4), 0.0, 2).sets(4, 6), RuntimeError),
    "a forward that nobody planned": (lambda: idle_simulator().runtime.begin(NO_TOKEN), RuntimeError),
    "a launched batch that ran no forward": (lambda: idle_simulator().runtime.take_decisions(), RuntimeError),
    "attention without metadata": (lambda: attend(save_kv_cache=True), RuntimeError),
    "attention that writes nothing": (lambda: attend(save_kv_cache=False), RuntimeError),
    "a press half installed": (press_half_installed, guard.GuardError),
    "a surrogate of another model": (surrogate_of_another_model, SurrogateError),
    "a model of unknown layers": (lambda: attention_modules(torch.nn.Linear(1, 1)), UnsupportedModel),
    "a threshold that is no number": (
        lambda: build_config({"kv_press": "kvzap", "kv_press_threshold": math.nan}),
        KVPressConfigError,
    ),
    "an unknown request option": (lambda: parse_options({"kv_press": {"treshold": 1}}), OptionError),
    "a request option and its opposite": (
        lambda: check_options(parse_options({"kv_press": {"off": True, "threshold": 1.0}}), CONFIG),
        OptionError,
    ),
    "a write without a cell": (
        lambda: write_cells(table(NONE), torch.tensor([0]), rows(1), rows(1), torch.zeros(3, 16), torch.zeros(3, 16)),
        RuntimeError,
    ),
    "a write outside the pool": (
        lambda: write_cells(table(3), torch.tensor([0]), rows(1), rows(1), torch.zeros(3, 16), torch.zeros(3, 16)),
        RuntimeError,
    ),
    "a slot outside the table": (
        lambda: visible_cells(table(0, 1), torch.tensor([2]), torch.tensor([0, 1]), torch.tensor([0])),
        IndexError,
    ),
    "a cell outside the pool": (cell_outside_the_pool, IndexError),
    "bits that are none": (lambda: pack_bits(torch.zeros(1, 8)), TypeError),
}


def outcome(plant: Callable[[], Any]) -> str:
    """Name of what `plant` raised; empty if it passed unseen."""
    try:
        plant()
    except Exception as error:
        return type(error).__name__
    return ""


if __name__ == "__main__":
    print(json.dumps({"debug": __debug__} | {name: outcome(plant) for name, (plant, _) in PLANTED.items()}))
