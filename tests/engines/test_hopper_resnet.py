"""The fused steps of ResNet-10 against PyTorch's own layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsc.models.norm import ConvNorm
from fedsc.models.resnet import BasicBlock, ResNet10

pytest.importorskip("triton.tools.tensor_descriptor", reason="needs Triton 3.4")
from fedsc.engines import hopper
from fedsc.engines.hopper_resnet import ReluConvolve, resnet_at_once, takes

from .low_precision import DEVICE, OF_KERNELS, PRECISION, ROUNDING, distance, values

pytestmark = OF_KERNELS


class Step(NamedTuple):
    """A step of the network: what is summed before the ReLU, and who sees what comes out."""

    inputs: int
    outputs: int
    pixels: int = 8
    images: int = 3
    stride: int = 1
    second: str | None = None  # beside a normalised map: another, or a plain one
    shortcut: str | None = None  # beside a 3x3 convolution: a 1x1 one, or the map itself


STEPS = {
    "inside a block": Step(64, 64),
    "128 channels, half a tile": Step(128, 64, pixels=4),
    "after the stem": Step(64, 64, shortcut="plain"),
    "into the second block": Step(64, 128, stride=2, second="plain", shortcut="normed"),
    "into the third": Step(128, 64, stride=2, second="normed", shortcut="normed"),
    "four pixels become one": Step(64, 64, pixels=2, stride=2, second="normed", shortcut="normed"),
    "1x1 without a stride": Step(64, 128, shortcut="normed"),
    "two plain ways": Step(64, 64, second="plain", shortcut="plain"),
    # Several tiles of an image, of each parity, and of the channels.
    "rows, stride 2": Step(
        64, 64, pixels=32, images=1, stride=2, second="normed", shortcut="normed"
    ),
    "rows": Step(64, 64, pixels=16, images=1, second="normed", shortcut="plain"),
    "channels": Step(192, 64, pixels=4, second="normed", shortcut="normed"),
}


def leaves(step: Step, kind: torch.dtype) -> dict[str, Tensor]:
    """Two maps with their norms' weights, and the weights of two convolutions."""
    n, c, o, side = step.images, step.inputs, step.outputs, step.pixels
    found = {
        "a": values(n, c, side, side, seed=0).to(kind),
        "b": values(n, c, side, side, seed=1).to(kind),
        "weight": values(o, c, 3, 3, seed=2).float() / 8,
        "weight_1x1": values(o, c, 1, 1, seed=3).float() / 8,
    }
    draw = torch.Generator().manual_seed(4)
    for name in ("slope_a", "bias_a", "slope_b", "bias_b"):
        found[name] = torch.randn(c, generator=draw).to(DEVICE)
    return {name: tensor.clone().requires_grad_() for name, tensor in found.items()}


def ours(step: Step, given: dict[str, Tensor]) -> list[Tensor]:
    def statistics(y: Tensor) -> Tensor:
        var, mean = torch.var_mean(y.detach().float(), (0, 2, 3), correction=0)
        return torch.stack([mean, (var + 1e-5).rsqrt()])

    summands = [given["a"], statistics(given["a"]), given["slope_a"], given["bias_a"]]
    if step.second is not None:
        summands.append(given["b"])
    if step.second == "normed":
        summands += [statistics(given["b"]), given["slope_b"], given["bias_b"]]
    weight, weight_1x1 = given["weight"], given["weight_1x1"]
    beside = step.shortcut == "normed"
    outputs = ReluConvolve.apply(  # type: ignore[no-untyped-call]
        step.stride,
        weight,
        weight.detach().to(PRECISION),
        weight_1x1 if beside else None,
        weight_1x1.detach().to(PRECISION) if beside else None,
        step.shortcut == "plain",
        *summands,
    )
    return [outputs[0], *outputs[2:3]]  # without the sums


def theirs(step: Step, given: dict[str, Tensor]) -> list[Tensor]:
    def batch_norm(name: str) -> Tensor:
        slope, bias = given[f"slope_{name}"], given[f"bias_{name}"]
        return F.batch_norm(given[name], None, None, slope, bias, training=True)

    total = batch_norm("a")
    if step.second is not None:
        total = total + (batch_norm("b") if step.second == "normed" else given["b"])
    relu = F.relu(total)
    x = relu + (relu.to(PRECISION).float() - relu).detach()  # rounded, for the gradient not
    outputs = [F.conv2d(x, given["weight"], stride=step.stride, padding=1)]
    if step.shortcut == "normed":
        outputs.append(F.conv2d(x, given["weight_1x1"], stride=step.stride))
    if step.shortcut == "plain":
        outputs.append(x)
    return outputs


@pytest.mark.parametrize("name", STEPS)
def test_a_step_and_its_gradients(name: str) -> None:
    step = STEPS[name]
    low, exact = leaves(step, PRECISION), leaves(step, torch.float32)
    for got, expected in zip(ours(step, low), theirs(step, exact), strict=True):
        assert distance(got, expected) < 2 * ROUNDING
        grad = values(*expected.shape, seed=9)
        got.backward(grad, retain_graph=True)
        expected.backward(grad.float(), retain_graph=True)
    for leaf, tensor in low.items():
        if exact[leaf].grad is None:
            assert tensor.grad is None
        else:
            assert distance(tensor.grad, exact[leaf].grad) < 4 * ROUNDING, leaf


def test_what_pytorch_is_told_of_the_operator_is_true() -> None:
    grad, weight = values(3, 64, 2, 2, seed=0), values(64, 64, 3, 3, seed=1)
    a, b, x = (values(3, 64, 4, 4, seed=seed) for seed in (2, 3, 4))
    for more in ((grad, weight[:, :, :1, :1].contiguous(), None, x, a, b), (None, None, b, x, a)):
        arguments = (grad, weight, 2, *more, *[None] * (6 - len(more)))
        torch.library.opcheck(hopper.grad_before_relu, arguments)


@pytest.fixture(scope="module")
def network() -> ResNet10:
    """A narrow one, with norms that are not fresh."""
    torch.manual_seed(0)
    made = ResNet10((3, 16, 16), 10, widths=(64, 128, 64))
    for layer in made.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias)
    return made.to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload]


def step_of(network: ResNet10, images: Tensor, compiled: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Features, the gradients of all weights, and what the norms remember, after one step."""
    torch.compiler.reset()
    forward = torch.compile(network, backend="aot_eager") if compiled else network
    with torch.autocast(DEVICE, PRECISION, enabled=compiled):
        outputs = forward(images)
    labels = torch.arange(len(images), device=DEVICE)
    F.cross_entropy(outputs.logits.to(images.dtype), labels).backward()
    grads = [weight.grad.flatten() for weight in network.parameters() if weight.grad is not None]
    remembered = [buffer.flatten().double() for buffer in network.buffers()]
    return outputs.features, torch.cat(grads), torch.cat(remembered)


def test_a_network_at_once_is_as_near_to_float64_as_one_by_layers(network: ResNet10) -> None:
    fused_ones = []

    def at_once(network: ResNet10, images: Tensor) -> Tensor | None:
        found = resnet_at_once(network, images)
        fused_ones.append(found is not None)
        return found

    exact, by_layers, fused = (copy.deepcopy(network) for _ in range(3))
    exact.double()
    for layer in by_layers.modules():
        if isinstance(layer, ConvNorm):
            layer.at_once = hopper.conv_norm_at_once
    fused.at_once = at_once
    images = values(4, 3, 8, 8, seed=6).float()
    expected = step_of(exact, images.double(), compiled=False)
    layers, ours = step_of(by_layers, images, compiled=True), step_of(fused, images, compiled=True)
    assert fused_ones == [True]
    for theirs, own, right in zip(layers, ours, expected, strict=True):
        assert own.shape == right.shape
        assert distance(own, right) < 3 * distance(theirs, right)


class Scaled(BasicBlock):
    """What a subclass computes is its own affair."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class OtherStages(ResNet10):
    def stages(self, images: Tensor) -> tuple[Tensor, ...]:
        return super().stages(images / 2)


def with_plain_shortcut(network: ResNet10) -> None:
    block: Any = network.blocks[1]
    block.shortcut = nn.Sequential(*block.shortcut)


def changed(change: Callable[[ResNet10], Any]) -> Callable[[ResNet10], ResNet10]:
    def made(network: ResNet10) -> ResNet10:
        copied = copy.deepcopy(network)
        change(copied)
        return copied

    return made


@pytest.mark.parametrize(
    "variant",
    [
        changed(lambda network: network.eval()),
        changed(lambda network: network.get_submodule("blocks.1.shortcut.1").eval()),
        changed(lambda network: setattr(network.stem[1], "momentum", None)),
        changed(lambda network: network.blocks.append(Scaled(64, 64, 1, "batch"))),
        changed(with_plain_shortcut),
        lambda network: OtherStages((3, 16, 16), 10, widths=(64, 128)),
        lambda network: ResNet10((3, 16, 16), 10, norm="group", widths=(64, 128)),
        lambda network: ResNet10((3, 16, 16), 10, widths=(64, 96)),
    ],
    ids=[
        *("eval", "one norm in eval", "cumulative", "another block", "another shortcut"),
        *("another network", "group norm", "96 channels"),
    ],
)
def test_other_networks_are_left_to_their_layers(
    network: ResNet10, variant: Callable[[ResNet10], ResNet10]
) -> None:
    images = torch.zeros(2, 3, 16, 16, device=DEVICE)
    assert takes(network, images)
    assert resnet_at_once(variant(network).to(DEVICE), images) is None


def test_other_images_are_left_to_the_layers(network: ResNet10) -> None:
    assert not takes(network, torch.zeros(2, 3, 12, 12))
    assert not takes(network, torch.zeros(2, 64, 16, 16))
    needs_grad = torch.zeros(2, 3, 16, 16, device=DEVICE, requires_grad=True)
    assert resnet_at_once(network, needs_grad) is None


def test_an_uncompiled_network_is_left_to_its_layers(network: ResNet10) -> None:
    """Launched from Python one by one, the kernels cost more than they save."""
    own = copy.deepcopy(network)
    own.at_once = lambda network, images: pytest.fail("asked for")
    own(torch.zeros(2, 3, 16, 16, device=DEVICE))
