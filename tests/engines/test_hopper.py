"""The kernels for Hopper GPUs against PyTorch's own convolutions.

Without a GPU they run in Triton's interpreter (`conftest.py`), in float16, since it has no products
of bfloat16.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs Triton")
from fedsc.engines import hopper

ON_GPU = torch.cuda.is_available()
DEVICE, PRECISION = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float16)
ROUNDING = torch.finfo(PRECISION).eps
pytestmark = pytest.mark.skipif(
    ON_GPU and torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)


@pytest.fixture(autouse=True)
def precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "PRECISION", PRECISION)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def values(*shape: int, seed: int) -> Tensor:
    """Random and exactly representable, `channels_last`."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(PRECISION)
    return drawn.to(DEVICE, memory_format=torch.channels_last)


def distance(ours: Tensor | None, theirs: Tensor | None) -> float:
    """Relative; of gradients, which may not be there."""
    assert ours is not None
    assert theirs is not None
    difference = ours.detach().double() - theirs.detach().double()
    return float(difference.norm() / theirs.detach().double().norm())


@pytest.mark.parametrize(
    ("images", "pixels", "inputs", "outputs", "size", "stride"),
    [
        (2, 32, 64, 64, 3, 1),
        (2, 32, 64, 128, 3, 2),
        (2, 32, 64, 128, 1, 2),
        (3, 8, 128, 64, 3, 1),  # a tile holds two images: the last is half empty
        (5, 8, 64, 192, 3, 2),
        (5, 8, 128, 64, 1, 2),
        (9, 4, 64, 64, 3, 1),
        (3, 4, 128, 128, 1, 1),
        (3, 2, 64, 64, 3, 2),  # one pixel is left
        (1, 64, 64, 64, 3, 1),
    ],
)
def test_a_convolution_and_its_gradients(
    images: int, pixels: int, inputs: int, outputs: int, size: int, stride: int
) -> None:
    x = values(images, inputs, pixels, pixels, seed=0)
    weight = values(outputs, inputs, size, size, seed=1).float()
    ours, theirs = (
        (x.clone().to(kind).requires_grad_(), weight.clone().requires_grad_())
        for kind in (PRECISION, torch.float32)
    )
    y, sums = hopper.convolve(*ours, weight.to(PRECISION), stride, True)
    expected = F.conv2d(*theirs, stride=stride, padding=size // 2)
    grad = values(*expected.shape, seed=2)
    y.backward(grad)
    expected.backward(grad.float())

    assert distance(y, expected) < ROUNDING
    assert distance(ours[0].grad, theirs[0].grad) < ROUNDING
    assert distance(ours[1].grad, theirs[1].grad) < 1e-5  # never rounded
    over = (0, 2, 3)
    assert distance(sums[:, 0].sum(0), y.float().sum(over)) < 1e-4
    assert distance(sums[:, 1].sum(0), y.float().square().sum(over)) < 1e-4


@pytest.mark.parametrize("channels", [3, 64])
def test_convolution_and_batch_norm_together(channels: int) -> None:
    """Two steps, so that what BatchNorm remembers counts; three channels are images, which need
    no gradient."""
    conv = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    norm = nn.BatchNorm2d(64)
    nn.init.uniform_(norm.weight)
    nn.init.normal_(norm.bias)
    own = copy.deepcopy(conv).to(DEVICE), copy.deepcopy(norm).to(DEVICE)
    conv.to(DEVICE)
    norm.to(DEVICE)
    for step in range(2):
        x = values(6, channels, 16, 16, seed=step)
        grad = values(6, 64, 16, 16, seed=9)
        ours, theirs = (x.float().requires_grad_(channels == 64) for _ in range(2))
        hopper.conv_norm(*own, ours).backward(grad)
        norm(conv(theirs)).backward(grad.float())
        if channels == 64:
            assert distance(ours.grad, theirs.grad) < 5 * ROUNDING
    for layer, expected in zip(own, (conv, norm), strict=True):
        for name, parameter in layer.named_parameters():
            assert distance(parameter.grad, expected.get_parameter(name).grad) < 5 * ROUNDING
        for name, buffer in layer.named_buffers():
            assert distance(buffer, expected.get_buffer(name)) < 2 * ROUNDING


def test_a_norm_in_evaluation_mode_and_a_convolution_with_a_bias() -> None:
    x = values(4, 64, 8, 8, seed=0).float()
    for conv, norm in (
        (nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64).eval()),
        (nn.Conv2d(64, 128, 3, padding=1), nn.Identity()),
    ):
        conv.to(DEVICE)
        norm.to(DEVICE, PRECISION)
        got = hopper.conv_norm(conv, norm, x)
        assert distance(got, norm(conv(x).to(PRECISION))) < 3 * ROUNDING


@pytest.mark.parametrize(
    ("conv", "pixels"),
    [
        (nn.Conv2d(64, 64, 3, padding=1, groups=2), 8),
        (nn.Conv2d(64, 64, 5, padding=2), 8),
        (nn.Conv2d(64, 64, 3), 8),
        (nn.Conv2d(64, 64, 3, padding=1, stride=2), 7),
        (nn.Conv2d(64, 64, 3, padding=1), 28),
        (nn.Conv2d(64, 64, 3, padding=1, dilation=2), 8),
        (nn.Conv2d(64, 64, 3, padding=1, padding_mode="reflect"), 8),
        (nn.Conv2d(24, 64, 3, padding=1), 8),
        (nn.Conv2d(64, 24, 3, padding=1), 8),
    ],
)
def test_what_the_kernels_cannot_do_is_left_to_pytorch(conv: nn.Conv2d, pixels: int) -> None:
    x = values(2, conv.in_channels, pixels, pixels, seed=0).float()
    conv.to(DEVICE)
    assert not hopper.fits(conv, x)
    torch.testing.assert_close(hopper.conv_norm(conv, nn.Identity(), x), conv(x))
