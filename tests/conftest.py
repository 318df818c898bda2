"""Without a GPU our Triton kernels run in Triton's interpreter, which has to be chosen before triton is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.experimental.gluon  # noqa: F401 (else imported at the first launch, when the choice is gone)

    import kvzap_sglang.kernels.triton  # noqa: F401

    # Not for the processes that tests start: a server's kernels are no concern of ours here.
    del os.environ["TRITON_INTERPRET"]
