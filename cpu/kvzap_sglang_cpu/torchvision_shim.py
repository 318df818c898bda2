"""Let a CPU build of torch import PyPI's torchvision, which is built for CUDA.

torchvision's `_C.so` needs CUDA libraries, so it does not load and its operators are not declared; then
`torchvision/_meta_registrations.py` fails with "operator torchvision::nms does not exist". SGLang imports torchvision at
module level but calls none of these operators for text models, so declaring their schemas is enough.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`, whose import would cost every Python start here 15 ms
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_library: Any = None  # torch withdraws the declarations when the Library object dies


def declare_operators() -> bool:
    """Declare the schemas of OPERATORS unless torch has CUDA or they are declared; whether it declared them."""
    global _library
    import torch

    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, OPERATORS[0]):
        return False
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        _library.define(name + SCHEMA)
    return True


class TorchvisionShim:
    """A `sys.meta_path` finder that runs `declare_operators` just before the code of torchvision."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The ordinary spec of torchvision with a loader that declares first; None for every other module."""
        if fullname != "torchvision":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(fullname, path, target)
        # A "+cpu" wheel declares its own operators, and torch refuses a second declaration.
        if spec is None or spec.loader is None or _is_cpu_build():
            return spec
        # By duck typing: the base class is in importlib.abc, whose import every Python start here would pay for.
        spec.loader = _DeclareFirst(spec.loader)  # type: ignore[assignment]
        return spec


class _DeclareFirst:
    """Loader: `declare_operators`, then what the wrapped loader does."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        declare_operators()
        self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source, get_resource_reader, ... for inspect and importlib.resources


def _is_cpu_build() -> bool:
    from importlib import metadata

    try:
        return metadata.version("torchvision").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False
