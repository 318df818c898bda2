"""SGLang's test kits that import packages which nothing run here uses."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType


class StandIn(ModuleType):
    """A package that is not installed: importable by name, every use of it raises `ModuleNotFoundError`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> None:
            raise ModuleNotFoundError(f"{self.__name__}.{name}: {self.__name__} is not installed")

        return missing


@contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """Lets modules be imported that import `names`; installed packages stay themselves."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    sys.modules.update({name: StandIn(name) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


# `datasets` downloads prompts (the tests bring their own), `anthropic` is a client (one test of its kit is left out).
with stand_ins("anthropic", "datasets"):
    from sglang.test.kits.anthropic_messages_kit import AnthropicMessagesMixin
    from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
    from sglang.test.kits.spec_server_kits import (
        SpecHiddenStatesKit,
        SpecLogprobKit,
        SpecPenaltyKit,
        SpecSamplingMaskKit,
    )
    from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase

__all__ = [
    "AnthropicMessagesMixin",
    "SpecEagleServerBase",
    "SpecHiddenStatesKit",
    "SpecLogprobKit",
    "SpecPenaltyKit",
    "SpecSamplingMaskKit",
    "run_multiturn_cache_hit_test",
]
