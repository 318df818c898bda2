"""Small numbers that the CPU decided, on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of `values` on `device`, in their dtype. To a GPU it is started, not waited for."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)
