"""What is compared: the full cache, kvzap at thresholds, and baselines that remove as much."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvzap_sglang.config import BASELINE_SINKS
from kvzap_sglang.evaluate.results import FULL

MethodName = Literal["full", "kvzap", "random", "streaming"]
DEFAULT_WINDOW = 128
SERVER = "server"  # the surrogate of a server that was given by its address, or the model's default


@dataclass(frozen=True)
class Method:
    """`surrogate`: folder or hub id (kvzap only). `level`: kvzap's and random's threshold, streaming's window.

    `matches`: label of the kvzap method whose removed fraction a baseline was set to.
    """

    name: MethodName
    surrogate: str | None = None
    level: float | None = None
    matches: str = ""

    @property
    def label(self) -> str:
        if self.name == "full":
            return FULL
        if self.name == "kvzap":
            return f"kvzap {Path(self.surrogate or SERVER).name} {self.level:g}"
        return f"{self.name} as {self.matches}"

    @property
    def asked(self) -> Any:
        """The request's `custom_params["kv_press"]`."""
        if self.name == "full":
            return "off"
        return None if self.name == "streaming" else {"threshold": self.level}

    def window(self, window: int) -> int:
        """The press's window: streaming's is its level, the others have the run's."""
        return int(self.level or 0) if self.name == "streaming" else window

    def server_flags(self, window: int) -> tuple[str, ...]:
        """What a server needs to run it; methods of equal flags share a server. Thresholds come with the requests."""
        flags = (f"--kv-press-window={self.window(window)}", "--kv-press")
        if self.name == "streaming":
            return (*flags, "streaming")
        if self.name == "random":
            return (*flags, "random", "--kv-press-threshold=-1")
        surrogate = () if self.surrogate is None else ("--kv-press-model", self.surrogate)
        return (*flags, "kvzap", *surrogate)


def matched_random(removed: float, length: int, matches: str, window: int = DEFAULT_WINDOW) -> Method:
    """Random pruning that removes the fraction `removed` of `length` tokens' pairs, window and sinks included."""
    outside = max(1, length - window - BASELINE_SINKS)
    share = min(max(removed * length / outside, 1e-9), 1.0)
    return Method("random", level=round(math.log(share), 6), matches=matches)


def matched_streaming(removed: float, length: int, matches: str) -> Method:
    """Window and sinks that leave the fraction `1 - removed` of `length` tokens."""
    return Method("streaming", level=max(1, round((1 - removed) * length) - BASELINE_SINKS), matches=matches)
