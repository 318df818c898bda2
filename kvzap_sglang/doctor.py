"""The guard's checks without a server."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import TextIO

from kvzap_sglang import guard


def run_doctor(out: TextIO) -> int:
    """Print one line per check. Returns 0 when all pass, 1 otherwise."""
    checks: tuple[tuple[str, Callable[[], str]], ...] = (
        ("python", platform.python_version),
        ("sglang", _version),
        ("plugin", _plugin),
        ("hooks", _hooks),
        ("refusals", _refusals),
        ("kernels", _kernels),
    )
    failed = 0
    for name, check in checks:
        try:
            print(f"ok    {name}: {check()}", file=out)
        except Exception as error:  # every fault is a finding: printed, counted, exit status 1
            failed += 1
            print(f"FAIL  {name}: {error}", file=out)
    return 1 if failed else 0


def _version() -> str:
    fault = guard.version_fault()
    if fault:
        raise guard.GuardError(fault)
    return f"{guard.SGLANG_VERSION} as pinned"


def _plugin() -> str:
    from importlib.metadata import entry_points

    if "kvzap" not in {entry.name for entry in entry_points(group="sglang.srt.plugins")}:
        raise guard.GuardError("entry point kvzap is missing: pip install kvzap-sglang again")
    return "entry point sglang.srt.plugins: kvzap"


def _hooks() -> str:
    from sglang.srt.plugins import load_plugins

    from kvzap_sglang.plugin import HOOKS

    load_plugins()
    missing = guard.missing_hooks()
    if missing:
        raise guard.GuardError("not applied: " + ", ".join(missing))
    return f"{len(HOOKS)} of {len(HOOKS)} applied"


def _refusals() -> str:
    from sglang.srt.server_args import ServerArgs

    faults = list(guard.refused(ServerArgs(model_path="none")))
    if faults:
        raise guard.GuardError("; ".join(faults))
    return f"{len(guard.REFUSALS)} settings are refused by name, none by default"


def _kernels() -> str:
    from kvzap_sglang.kernels.cpu import describe

    return describe()
