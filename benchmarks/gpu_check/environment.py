"""Where this runs: a GPU, or Triton's interpreter on a CPU, which has to be chosen before triton is imported."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from typing import Any

import torch

NO_GPU = (
    "gpu_check: no NVIDIA GPU is visible to torch, so nothing was run.\n"
    "`--tiny` runs the same code on tiny shapes in Triton's interpreter on the CPU; its times mean nothing."
)
INTERPRETED = "Triton's interpreter on a CPU: NOT a GPU result, and every time is meaningless"


def prepare(tiny: bool) -> str:
    """The device to run on: "cuda", or with `tiny` "cpu". Exits where there is neither.

    Must come before anything that imports triton.
    """
    if torch.cuda.is_available():
        return "cuda"
    if not tiny:
        raise SystemExit(NO_GPU)
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before its interpreter could be chosen")
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.experimental.gluon  # noqa: F401 (else imported at the first launch, when the choice is gone)

    return "cpu"


def describe(device: str) -> dict[str, Any]:
    """Machine, software and date of a run."""
    import triton

    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cores": os.cpu_count(),
    }
    if device != "cuda":
        return facts | {"gpu": None, "times": INTERPRETED}
    properties = torch.cuda.get_device_properties(0)
    return facts | {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": l2_bytes(),
        "cuda": torch.version.cuda,
        "times": "CUDA events",
    }


def l2_bytes() -> int:
    """Size of the GPU's second-level cache; 64 MiB where torch does not tell."""
    return int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0)) or 64 << 20
