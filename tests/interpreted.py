"""Tests that run Triton kernels on CPU tensors, in its interpreter, whatever else the machine has."""

from __future__ import annotations

import pytest
import torch

INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="uses Triton's interpreter, which is chosen only where there is no GPU"
)
