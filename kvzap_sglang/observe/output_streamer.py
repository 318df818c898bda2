"""SGLang's output streamer with press statistics on the last chunk of a request."""

from __future__ import annotations

from typing import Any

STATS_ATTRIBUTE = "kv_press_stats"
"""Attribute of a finished `Req`: its statistics, set when its row is released."""


def press_streamer(base: type) -> type:
    """A subclass of SGLang's streamer class `base`."""

    class KVPressOutputStreamer(base):
        __slots__ = ()
        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
            info = base.build_additional_customized_info(self, reqs)  # type: ignore[attr-defined]
            info["kv_press"] = [getattr(req, STATS_ATTRIBUTE, None) for req in reqs]
            return info

        def is_request_level_customized_info_key(self, key: str) -> bool:
            return key == "kv_press" or base.is_request_level_customized_info_key(self, key)  # type: ignore[attr-defined]

    return KVPressOutputStreamer
