"""The few numbers of a cell pool that live where its cells are, and the report that a step brings them to the CPU in.

A report is the counters' bytes followed by the packed kept bits of the step's tokens (`bits.pack_bits`).
"""

from __future__ import annotations

FREE, PRUNED, FAULT, TICKET = range(4)
"""Cells on the free stack; cells freed by settling so far; bits of what went wrong; programs done (scratch)."""

COUNTERS = 4
HEADER_BYTES = 8 * COUNTERS

UNDERFLOW, OVERFLOW, HOMELESS = 1, 2, 4
"""Bits of `FAULT`."""

_MEANING = {
    UNDERFLOW: "more cells were taken than were free",
    OVERFLOW: "more cells were freed than there are",
    HOMELESS: "a token was written that has no cell",
}


def faults(bits: int) -> list[str]:
    """What the bits of `FAULT` mean."""
    return [text for bit, text in _MEANING.items() if bits & bit]


def report_bytes(tokens: int, pairs: int) -> int:
    """Size of the report of `tokens` tokens of `pairs` (layer, head) pairs each."""
    return HEADER_BYTES + tokens * ((pairs + 7) // 8)
