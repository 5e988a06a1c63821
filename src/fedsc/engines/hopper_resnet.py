"""ResNet-10 in training on Hopper GPUs: what lies between two convolutions goes into one of them.

Layer by layer (`hopper.py`), the backward pass reads every gradient and every map twice for
BatchNorm: once for its sums, once for the result. Here a step of the network is the ReLU of a sum
of maps that are normalised on the way, together with the convolutions that see it. Backward, the
kernel of the input gradient adds what comes through the shortcut, goes on through the ReLU and
takes BatchNorm's sums while the gradient is still on the chip (docs/performance.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models.norm import ConvNorm
from ..models.resnet import BasicBlock, ResNet10
from . import hopper
from .hopper import (
    batch_norm,
    convolve,
    convolve_weight_grad,
    fits,
    grad_before_relu,
    normalised,
    patches,
    statistics_of,
    takes_sums,
)


class Normed(NamedTuple):
    """What BatchNorm makes of y, not computed yet."""

    y: Tensor  # (N, C, H, W)
    found: Tensor  # (2, C): its mean and 1 / standard deviation
    weight: Tensor  # (C,)
    bias: Tensor  # (C,)

    def computed(self) -> Tensor:
        """In float32."""
        mean, scale = self.found
        return normalised(self.y, mean, scale, self.weight, self.bias)

    def grads(self, g: Tensor, sum_g: Tensor, sum_gy: Tensor) -> tuple[Tensor | None, ...]:
        """Of the four above, from that of the result, g (N, C, H, W), and sums over its pixels:

        of weight  =  sum of g (y - mean) / std
        of y       =  weight / std (g - mean of g - (y - mean) / std^2 * mean of g (y - mean))
        """
        mean, scale = self.found
        pixels = self.y.numel() // len(scale)
        of_weight = (sum_gy - mean * sum_g) * scale
        share_of_y = of_weight * scale / pixels
        constant = sum_g / pixels - mean * share_of_y
        slope, share_of_y, constant = (
            each.view(-1, 1, 1) for each in (self.weight * scale, share_of_y, constant)
        )
        of_y = slope * (g.float() - constant - self.y.float() * share_of_y)
        return of_y.to(self.y.dtype), None, of_weight, sum_g


class ReluConvolve(torch.autograd.Function):
    """x = relu(first summand + second summand), and the convolutions that see x."""

    @staticmethod
    def forward(
        ctx: Any,
        stride: int,
        weight: Tensor,
        rounded: Tensor,
        weight_1x1: Tensor | None,
        rounded_1x1: Tensor | None,
        gives_x: bool,
        *flat: Tensor,
    ) -> tuple[Tensor, ...]:
        """For each convolution y (N, O, H, W) and the sums that `convolve` takes; x if asked for.

        `flat` is a `Normed`, and perhaps another or a plain map.
        """
        first, second = two_summands(*flat)
        total = first.computed()
        if second is not None:
            total = total + (second.computed() if isinstance(second, Normed) else second)
        x = F.relu(total).to(first.y.dtype)
        given: tuple[Tensor, ...] = convolve(x, weight, rounded, stride, True)
        kept: tuple[Tensor, ...] = (x, rounded)
        if weight_1x1 is not None and rounded_1x1 is not None:
            given += convolve(x, weight_1x1, rounded_1x1, stride, True)
            kept += (rounded_1x1,)
        ctx.save_for_backward(*kept, *flat)
        ctx.stride, ctx.kept, ctx.gives_x = stride, len(kept), gives_x
        return (*given, x) if gives_x else given

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, rounded, *kept_1x1 = ctx.saved_tensors[: ctx.kept]
        first, second = two_summands(*ctx.saved_tensors[ctx.kept :])
        grad, grad_1x1 = grads[0], grads[2] if kept_1x1 else None
        g, sums = grad_before_relu(
            grad,
            rounded,
            ctx.stride,
            grad_1x1,
            kept_1x1[0] if kept_1x1 else None,
            grads[-1] if ctx.gives_x else None,
            x,
            first.y,
            second.y if isinstance(second, Normed) else None,
        )
        sum_g, *sums_gy = sums.sum(0)
        of_summands = first.grads(g, sum_g, sums_gy[0])
        if isinstance(second, Normed):
            of_summands += second.grads(g, sum_g, sums_gy[1])
        elif second is not None:
            of_summands += (g,)
        dw = convolve_weight_grad(grad, x, rounded.shape[2], ctx.stride).sum(0)
        dw_1x1 = None
        if grad_1x1 is not None:
            dw_1x1 = convolve_weight_grad(grad_1x1, x, 1, ctx.stride).sum(0)
        return None, dw, None, dw_1x1, None, None, *of_summands


def two_summands(*flat: Tensor) -> tuple[Normed, Normed | Tensor | None]:
    first, rest = Normed(*flat[:4]), flat[4:]
    if not rest:
        return first, None
    return first, rest[0] if len(rest) == 1 else Normed(*rest)


class Convolved(NamedTuple):
    """A convolution's output, which the norm after it has not seen yet."""

    norm: Any
    y: Tensor
    sums: Tensor  # from `convolve`


def relu_convolve(
    summands: list[Convolved | Tensor], layer: ConvNorm, shortcut: nn.Module | None = None
) -> list[Convolved | Tensor]:
    """The ReLU of the sum goes into the layer and, where there is one, into the shortcut beside it:
    what comes out of either."""
    flat: list[Tensor] = []
    for summand in summands:
        if isinstance(summand, Convolved):
            norm = summand.norm
            flat += [summand.y, statistics_of(*summand), norm.weight, norm.bias]
        else:
            flat.append(summand)
    conv: Any = layer[0]
    conv_1x1: Any = shortcut[0] if isinstance(shortcut, ConvNorm) else None
    y, sums, *beside = ReluConvolve.apply(  # type: ignore[no-untyped-call]
        conv.stride[0],
        conv.weight,
        conv.weight.detach().to(hopper.PRECISION),
        None if conv_1x1 is None else conv_1x1.weight,
        None if conv_1x1 is None else conv_1x1.weight.detach().to(hopper.PRECISION),
        isinstance(shortcut, nn.Identity),
        *flat,
    )
    if isinstance(shortcut, ConvNorm):
        beside = [Convolved(shortcut[1], *beside)]
    return [Convolved(layer[1], y, sums), *beside]


def resnet_at_once(network: ResNet10, images: Tensor) -> Tensor | None:
    """The last stage of the network in training, in bf16; None where the kernels cannot do it."""
    if not takes(network, images):
        return None
    stem: Any = network.stem[0]
    x, weight = patches(images.to(hopper.PRECISION), stem.weight)
    rounded = weight.detach().to(hopper.PRECISION)
    total: list[Any] = [Convolved(network.stem[1], *convolve(x, weight, rounded, 1, True))]
    block: Any
    for block in network.blocks:
        inner, *beside = relu_convolve(total, block.conv1, block.shortcut)
        total = [*relu_convolve([inner], block.conv2), *beside]
    first, second = (batch_norm(*each) if isinstance(each, Convolved) else each for each in total)
    return first + second


def takes(network: ResNet10, images: Tensor) -> bool:
    """Whether the network is a plain ResNet-10 in training: every convolution fits, and the usual
    BatchNorm follows it."""
    n, channels, h, w = images.shape
    if type(network) is not ResNet10 or images.requires_grad or channels % 64 == 0:
        return False
    layers: list[tuple[Any, int, int, int]] = [(network.stem, 3, 1, 1)]
    shrunk = 1  # by how much the map is smaller than the image
    block: Any
    for block in network.blocks:
        if type(block) is not BasicBlock:
            return False
        conv1: Any = block.conv1[0]
        stride: int = conv1.stride[0]
        layers.append((block.conv1, 3, stride, shrunk))
        if type(block.shortcut) is not nn.Identity:
            layers.append((block.shortcut, 1, stride, shrunk))
        shrunk *= stride
        layers.append((block.conv2, 3, 1, shrunk))
    for layer, size, stride, factor in layers:
        if type(layer) is not ConvNorm:
            return False
        conv: Any = layer[0]
        shape = n, conv.in_channels, h // factor, w // factor
        pixels = n * h * w // (factor * stride) ** 2
        as_expected = conv.kernel_size[0] == size and conv.stride[0] == stride
        if not (as_expected and fits(conv, shape, False) and takes_sums(conv, layer[1], pixels)):
            return False
    return True
