"""Running estimate of how much of a dense cache a press keeps: what admission plans with."""

from __future__ import annotations

# Weight (tokens) of the initial belief that nothing is pruned, and the memory of the mean.
PRIOR_TOKENS = 256
MEMORY_TOKENS = 65536
SAFETY = 1.1


class KeptFraction:
    """Mean kept fraction over recent decisions, starting from 1."""

    def __init__(self) -> None:
        self._kept = float(PRIOR_TOKENS)
        self._tokens = float(PRIOR_TOKENS)

    @property
    def mean(self) -> float:
        return self._kept / self._tokens

    @property
    def planned(self) -> float:
        """The mean with a safety margin, at most 1."""
        return min(1.0, self.mean * SAFETY)

    def observe(self, kept_cells: int, dense_cells: int, tokens: int) -> None:
        """`tokens` decisions kept `kept_cells` of `dense_cells`."""
        if tokens <= 0:
            return
        if self._tokens > MEMORY_TOKENS:
            self._kept *= 0.5
            self._tokens *= 0.5
        self._kept += tokens * kept_cells / dense_cells
        self._tokens += tokens
