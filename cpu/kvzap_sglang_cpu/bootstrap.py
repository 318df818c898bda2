"""Prepare a Python process for SGLang on a CPU. Run at every start of Python by `kvzap_sglang_cpu.pth`: keep it cheap.

A .pth file, and not an `sglang.srt.plugins` entry point, because SGLang reads SGLANG_USE_CPU_ENGINE and imports
torchvision at module level, in every spawned process, before it loads plugins.
"""

from __future__ import annotations

import os
import sys

from .torchvision_shim import TorchvisionShim

TYPE_CHECKING = False  # as in `typing`, whose import would cost every Python start here 15 ms
if TYPE_CHECKING:
    from collections.abc import MutableMapping

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Spinning OpenMP threads starve SGLang's other processes when cores are few: decode becomes 10-20 times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
}
NVIDIA_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
REAL_KERNEL_DISTRIBUTIONS = ("sglang-kernel", "sgl-kernel")


def has_nvidia_driver() -> bool:
    """Whether the kernel driver of NVIDIA GPUs is loaded here."""
    return any(os.path.exists(path) for path in NVIDIA_DRIVER_FILES)


def has_real_sgl_kernel() -> bool:
    """Whether a distribution of SGLang's own kernels is installed."""
    from importlib import metadata  # 20 ms, and needed only where there is a driver

    for name in REAL_KERNEL_DISTRIBUTIONS:
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        return True
    return False


def bootstrap(environ: MutableMapping[str, str]) -> bool:
    """Set what `environ` does not set yet and install the torchvision shim; a second call changes nothing.

    Returns False, having done nothing, on a GPU machine (NVIDIA driver and real sgl_kernel).
    """
    if has_nvidia_driver() and has_real_sgl_kernel():
        return False
    for name, value in ENVIRONMENT.items():
        environ.setdefault(name, value)
    if not any(isinstance(finder, TorchvisionShim) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionShim())
    return True


bootstrap(os.environ)
