"""Running estimate of how much of a dense cache a press keeps: what admission plans with."""

from __future__ import annotations

# Weight (tokens) of the initial belief that nothing is pruned, and the memory of the mean.
PRIOR_TOKENS = 256
MEMORY_TOKENS = 65536
SAFETY = 1.1
# Thresholds that requests chose for themselves, kept apart: beyond this many the oldest is forgotten.
MAX_CLASSES = 16


class KeptFraction:
    """Mean kept fraction over recent decisions, starting from 1. `tokens`: the weight of the mean."""

    def __init__(self) -> None:
        self._kept = float(PRIOR_TOKENS)
        self.tokens = float(PRIOR_TOKENS)

    @property
    def mean(self) -> float:
        return self._kept / self.tokens

    @property
    def planned(self) -> float:
        """The mean with a safety margin, at most 1: what admission plans with."""
        return min(1.0, self.mean * SAFETY)

    def observe(self, kept_cells: int, dense_cells: int, tokens: int) -> None:
        """`tokens` decisions kept `kept_cells` of `dense_cells`."""
        if tokens <= 0:
            return
        if self.tokens > MEMORY_TOKENS:
            self._kept *= 0.5
            self.tokens *= 0.5
        self._kept += tokens * kept_cells / dense_cells
        self.tokens += tokens


class KeptFractions:
    """One `KeptFraction` per effective threshold: what one class of requests keeps says little about another."""

    def __init__(self) -> None:
        self._classes: dict[float, KeptFraction] = {}

    def of(self, threshold: float) -> KeptFraction:
        """The estimate for requests of `threshold`."""
        found = self._classes.pop(threshold, None) or KeptFraction()
        self._classes[threshold] = found
        while len(self._classes) > MAX_CLASSES:
            del self._classes[next(iter(self._classes))]
        return found

    def served(self) -> float:
        """Mean over all classes, each weighted with its recent tokens."""
        classes = self._classes.values()
        tokens = sum(estimate.tokens for estimate in classes)
        return sum(estimate.mean * estimate.tokens for estimate in classes) / tokens if tokens else 1.0

    def means(self) -> dict[float, float]:
        """Mean kept fraction by threshold."""
        return {threshold: estimate.mean for threshold, estimate in self._classes.items()}
