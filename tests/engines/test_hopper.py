"""The kernels for Hopper GPUs against PyTorch's own convolutions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsc.models import build_model
from fedsc.models.norm import ConvNorm, FixedBatchNorm

pytest.importorskip("triton.tools.tensor_descriptor", reason="needs Triton 3.4")
from fedsc.engines import hopper

from .low_precision import DEVICE, OF_KERNELS, ON_GPU, PRECISION, ROUNDING, distance, values, wild

pytestmark = OF_KERNELS


class Doubled(nn.Conv2d):
    """What a subclass computes is its own affair."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


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


def test_a_gradient_with_odd_strides() -> None:
    """As PyTorch may hand it over where maps have one pixel; in memory it is contiguous."""
    x = values(3, 64, 1, 1, seed=0).float().requires_grad_()
    weight = values(64, 64, 1, 1, seed=1)
    grad = torch.empty(3 * 64, dtype=PRECISION, device=DEVICE).as_strided(
        (3, 64, 1, 1), (64, 1, 1, 1)
    )
    grad.copy_(values(3, 64, 1, 1, seed=2))
    F.conv2d(x, weight.float()).backward(grad.float())
    assert distance(hopper.convolve_input_grad(grad, weight, 1), x.grad) < ROUNDING


@pytest.mark.parametrize("operator", ["convolve", "statistics"])
def test_what_pytorch_is_told_of_an_operator_is_true(operator: str) -> None:
    """That its results have the shapes announced, what it changes and how it is differentiated."""
    x, weight = values(3, 64, 4, 4, seed=0), values(64, 64, 3, 3, seed=1)
    sums = hopper.convolve(x, weight.float(), weight, 1, True)[1]
    memory = [torch.zeros(64, device=DEVICE), torch.ones(64, device=DEVICE)]
    batches = torch.zeros((), dtype=torch.int64, device=DEVICE)
    arguments: dict[str, tuple[Any, ...]] = {
        "convolve": (x.requires_grad_(), weight.float().requires_grad_(), weight, 1, True),
        "statistics": (sums, *memory, batches, 48, 0.1, 0.1),
    }
    torch.library.opcheck(getattr(hopper, operator), arguments[operator])


NORMS: dict[str, Callable[[], nn.Module]] = {
    "usual": lambda: nn.BatchNorm2d(64, eps=0.1, momentum=0.9),
    "eval": lambda: nn.BatchNorm2d(64).eval(),
    "plain": lambda: nn.BatchNorm2d(64, affine=False),
    "without memory": lambda: nn.BatchNorm2d(64, track_running_stats=False),
    "cumulative": lambda: nn.BatchNorm2d(64, momentum=None),
    "fixed": lambda: FixedBatchNorm(64),
    "group": lambda: nn.GroupNorm(8, 64),
    "none": nn.Identity,
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("channels", [3, 64])
@pytest.mark.parametrize("kind", NORMS)
def test_convolution_and_norm_together(kind: str, channels: int, bias: bool) -> None:
    """Two steps, so that what a norm remembers counts. Few pixels, so that the unbiased variance
    is another. Three channels are images, which need no gradient."""
    conv = nn.Conv2d(channels, 64, 3, padding=1, bias=bias).to(DEVICE)
    norm = wild(NORMS[kind]()).to(DEVICE)
    own = copy.deepcopy(conv), copy.deepcopy(norm)
    for step in range(2):
        x = values(2, channels, 4, 4, seed=step)
        grad = values(2, 64, 4, 4, seed=9)
        ours, theirs = (x.float().requires_grad_(channels == 64) for _ in range(2))
        # As in a run: convolutions in low precision, norms in float32 on what they give.
        with torch.autocast(DEVICE, PRECISION, enabled=ON_GPU):
            y = hopper.conv_norm_at_once(*own, ours)
        expected = norm(conv(theirs))
        assert distance(y, expected) < 4 * ROUNDING
        y.backward(grad.to(y.dtype))
        expected.backward(grad.float())
        if channels == 64:
            assert distance(ours.grad, theirs.grad) < 10 * ROUNDING
    for layer, like in zip(own, (conv, norm), strict=True):
        for name, parameter in layer.named_parameters():
            theirs_grad = like.get_parameter(name).grad
            assert theirs_grad is not None
            if theirs_grad.norm() > 1e-3:  # a bias before BatchNorm has none
                assert distance(parameter.grad, theirs_grad) < 10 * ROUNDING
        for name, buffer in layer.named_buffers():
            assert distance(buffer, like.get_buffer(name)) < 4 * ROUNDING


def test_one_pixel_is_too_few_for_batch_norm() -> None:
    conv, norm = nn.Conv2d(64, 64, 1, bias=False).to(DEVICE), nn.BatchNorm2d(64).to(DEVICE)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        hopper.conv_norm_at_once(conv, norm, values(1, 64, 1, 1, seed=0))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # PyTorch 2.11, with a GPU
def test_frozen_weights_cost_no_gradient() -> None:
    x, weight = values(2, 64, 4, 4, seed=0), values(64, 64, 1, 1, seed=1)
    y, _ = hopper.convolve(x.requires_grad_(), weight.float(), weight, 1, False)
    with torch.profiler.profile() as profile:
        y.sum().backward()
    called = {event.key for event in profile.key_averages()}
    assert "fedsc::convolve_input_grad" in called
    assert "fedsc::convolve_weight_grad" not in called


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
        (nn.Conv2d(64, 64, 3, padding=1), 128),
        (nn.Conv2d(3, 64, 3, padding=1, stride=2), 8),
        (nn.Conv2d(3, 64, 1), 8),
        (Doubled(64, 64, 3, padding=1), 8),
    ],
)
def test_what_the_kernels_cannot_do_is_left_to_pytorch(conv: nn.Conv2d, pixels: int) -> None:
    x = values(2, conv.in_channels, pixels, pixels, seed=0).float()
    conv.to(DEVICE)
    assert not hopper.fits(conv, x.shape, needs_grad=False)
    torch.testing.assert_close(hopper.conv_norm_at_once(conv, nn.Identity(), x), conv(x))


def test_images_that_need_a_gradient_are_left_to_pytorch() -> None:
    conv = nn.Conv2d(3, 64, 3, padding=1)
    shape = 2, 3, 8, 8
    assert hopper.fits(conv, shape, needs_grad=False)
    assert not hopper.fits(conv, shape, needs_grad=True)


def test_every_convolution_of_resnet10_fits() -> None:
    seen: list[bool] = []

    def look(conv: nn.Conv2d, norm: nn.Module, x: Tensor) -> Tensor:
        seen.append(hopper.fits(conv, x.shape, x.requires_grad))
        return norm(conv(x))

    network = build_model("resnet10", (3, 32, 32), 10)
    for layer in network.modules():
        if isinstance(layer, ConvNorm):
            layer.at_once = look
    images = torch.zeros(2, 3, 32, 32)
    network(images)
    assert not seen  # one by one it would only cost
    torch.compile(network, backend="eager")(images)
    assert seen == [True] * 12
