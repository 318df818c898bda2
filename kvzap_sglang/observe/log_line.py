"""What the press adds to SGLang's batch log lines."""

from __future__ import annotations

import dataclasses

from sglang.srt.managers.scheduler_components.pool_stats_observer import PoolStats

from kvzap_sglang.memory.allocator import KVPressAllocator


@dataclasses.dataclass
class PressPoolStats(PoolStats):
    """SGLang's pool statistics with one more part for the log lines."""

    press_message: str = ""

    def get_prefill_usage_msg_parts(self) -> list[str]:
        return [*super().get_prefill_usage_msg_parts(), self.press_message]

    def get_decode_usage_msg_parts(self) -> list[str]:
        return [*super().get_decode_usage_msg_parts(), self.press_message]


def with_press(stats: PoolStats, allocator: KVPressAllocator) -> PressPoolStats:
    """`stats` whose log parts end with the kept fraction and the tokens that are held in how much room."""
    values = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    return PressPoolStats(**values, press_message=press_message(allocator))


def press_message(allocator: KVPressAllocator) -> str:
    """For instance `kv press: kept 0.31, 9210 tokens in 3100 of 4096`, the last two in dense tokens."""
    layout = allocator.cells.layout
    held = layout.cells_total - allocator.ledger.available
    tokens = allocator.size - allocator.available_size()
    kept = allocator.kept_fractions.served()
    return f"kv press: kept {kept:.2f}, {tokens} tokens in {held // layout.cells_per_token} of {layout.physical_tokens}"
