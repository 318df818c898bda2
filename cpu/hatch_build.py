"""Ship `kvzap_sglang_cpu.pth` in the root of site-packages, in an ordinary and in an editable install."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PTH = "kvzap_sglang_cpu.pth"


class PthHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the .pth file to both of hatchling's include tables."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is "standard" or "editable"; `build_data` is changed in place."""
        build_data["force_include"][PTH] = PTH
        build_data.setdefault("force_include_editable", {})[PTH] = PTH
