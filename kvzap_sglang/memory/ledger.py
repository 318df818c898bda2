"""The CPU's conservative count of free cells.

Cells are popped and freed on the forward stream, one step ahead of what the CPU knows. The
ledger starts from the last count a step reported and applies what was launched since.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class LaunchedStep(NamedTuple):
    """What a launched step will have done to the free count when it reports."""

    step: int
    popped: int
    drained: int


class CellLedger:
    """Lower bound of the free cells that the next launch will find.

    Attributes:
        launches: steps launched so far.
        overpromised: most cells ever promised that were not there when the truth was known. A bug if not 0.
    """

    def __init__(self, cells_total: int) -> None:
        self.cells_total = cells_total
        self.launches = self.overpromised = 0
        self.reset()

    def reset(self) -> None:
        """Everything free, nothing in flight (flush)."""
        self._reported = self.cells_total
        self._queued = 0
        self._in_flight: deque[LaunchedStep] = deque()

    @property
    def available(self) -> int:
        """Free cells: last report, less pops launched since, plus frees queued or launched since.

        Conservative: what settling frees counts only once its step has reported.
        """
        launched = sum(step.drained - step.popped for step in self._in_flight)
        return self._reported + launched + self._queued

    @property
    def idle(self) -> bool:
        """No launched step is waiting to report."""
        return not self._in_flight

    def credit(self, cells: int) -> None:
        """Token slots holding `cells` known cells were queued for the next drain."""
        if cells < 0:
            raise ValueError(f"negative credit {cells}")
        self._queued += cells

    def launch(self, step: int, popped: int) -> None:
        """`step` drains all that is queued and pops `popped` cells."""
        self.launches += 1
        self._in_flight.append(LaunchedStep(step, popped, self._queued))
        self._queued = 0

    def report(self, step: int, free_cells: int) -> None:
        """`step` ended with `free_cells` free. Raises `RuntimeError` if that is impossible."""
        if not 0 <= free_cells <= self.cells_total:
            raise RuntimeError(f"step {step} reports {free_cells} free cells of {self.cells_total}")
        promised = self._reported
        while self._in_flight and self._in_flight[0].step <= step:
            launched = self._in_flight.popleft()
            promised += launched.drained - launched.popped
        self._compare(promised, free_cells)
        self._reported = free_cells

    def resync(self, free_cells: int) -> None:
        """Exact count after a drain with nothing in flight."""
        self._compare(self.available, free_cells)
        self._in_flight.clear()
        self._queued = 0
        self._reported = free_cells

    def check(self) -> list[str]:
        """Violations of "never more than there is" since the last time asked."""
        worst, self.overpromised = self.overpromised, 0
        return [f"the ledger promised {worst} cells more than were free"] if worst else []

    def _compare(self, promised: int, free_cells: int) -> None:
        self.overpromised = max(self.overpromised, promised - free_cells)
