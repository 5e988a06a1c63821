"""Values for tests of the kernels for Hopper GPUs.

Without a GPU they run in Triton's interpreter (`conftest.py`), in float16, since it has no products
of bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

ON_GPU = torch.cuda.is_available()
DEVICE, PRECISION = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float16)
ROUNDING = torch.finfo(PRECISION).eps
OF_KERNELS = [
    pytest.mark.skipif(
        ON_GPU and torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
    ),
    pytest.mark.usefixtures("low_precision"),
]


def values(*shape: int, seed: int) -> Tensor:
    """Random and exactly representable, `channels_last`."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(PRECISION)
    return drawn.to(DEVICE, memory_format=torch.channels_last)


def distance(ours: Tensor | None, theirs: Tensor | None) -> float:
    """Relative; of gradients, which may not be there."""
    assert ours is not None
    assert theirs is not None
    difference = ours.detach().double() - theirs.detach().double()
    return float(difference.norm() / theirs.detach().double().norm().clamp_min(1e-9))


def wild(norm: nn.Module) -> nn.Module:
    """The norm with weights and memory that are not those of a fresh one."""
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in norm.state_dict().items():
            if tensor.is_floating_point():
                positive = name.endswith("var")
                drawn = torch.rand(tensor.shape, generator=rng) if positive else None
                tensor.copy_(
                    drawn + 0.5 if drawn is not None else torch.randn(tensor.shape, generator=rng)
                )
    return norm
