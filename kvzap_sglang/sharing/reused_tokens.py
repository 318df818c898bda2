"""Recomputed tokens that the tree has: its decisions and what is left of its cells stay in force."""

from __future__ import annotations

import torch

from kvzap_sglang.kernels.encoding import CELL_MASK, CONDEMNED
from kvzap_sglang.memory.cell_pool import CellPool
from kvzap_sglang.step_plan import StepPlan


class ReusedTokens:
    """The tokens of a step that are recomputed only for the cells that the tree pruned.

    A decision is final, so theirs is the tree's; where the tree still has a cell, that cell is used. All on the
    device: what was settled by a step that is still running is seen as it will be.
    """

    def __init__(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        """tokens: int64 `[m]`, indices into the step. slots: int64 `[m]`, the tree's slots of these tokens."""
        self._tokens, self._slots = tokens, slots

    @classmethod
    def of(cls, plan: StepPlan, device: torch.device) -> ReusedTokens:
        """Those of a planned step."""
        tokens, slots, offset = [], [], 0
        for row in plan.rows:
            if len(row.reused):
                tokens.append(torch.arange(offset, offset + len(row.reused)))
                slots.append(row.reused)
            offset += row.end - row.start
        if not tokens:
            return NO_REUSE
        return cls(torch.cat(tokens).to(device), torch.cat(slots).to(device))

    def decide(self, table: torch.Tensor, condemned: torch.Tensor) -> None:
        """Overwrite a layer's decisions, bool `[tokens, heads]`, with the tree's. table: int32 `[slots, heads]`."""
        if len(self._tokens):
            entries = table[self._slots]
            condemned[self._tokens] = (entries < 0) | (entries >= CONDEMNED)

    def decide_scores(self, table: torch.Tensor, scores: torch.Tensor) -> None:
        """As `decide`, on scores `[tokens, heads]`: the lowest there is for what the tree condemned, else the highest."""
        if len(self._tokens):
            entries = table[self._slots]
            condemned = (entries < 0) | (entries >= CONDEMNED)
            scores[self._tokens] = torch.where(condemned, -torch.inf, torch.inf).to(scores.dtype)

    def take(self, cells: CellPool, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[tokens, heads, dim]` of a layer with the tree's own in their places."""
        if not len(self._tokens):
            return k, v
        entries = cells.table[layer][self._slots]
        there = (entries >= 0)[:, :, None]
        rows = (entries.clamp(min=0) & CELL_MASK).long()
        return self._put(k, cells.k[rows], there), self._put(v, cells.v[rows], there)

    def _put(self, new: torch.Tensor, own: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        merged = new.clone()
        merged[self._tokens] = torch.where(there, own.to(new.dtype), new[self._tokens])
        return merged


NO_REUSE = ReusedTokens(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
