"""What the tests of the kernels for Hopper GPUs share, beside `low_precision.py`."""

from __future__ import annotations

import pytest
import torch

from .low_precision import PRECISION


@pytest.fixture
def low_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels in what they can be tested in, PyTorch in no less than float32."""
    from fedsc.engines import hopper  # which needs Triton

    monkeypatch.setattr(hopper, "PRECISION", PRECISION)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
