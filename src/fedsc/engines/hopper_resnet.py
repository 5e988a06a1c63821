"""ResNet-10 in training on Hopper GPUs: what lies between two convolutions goes into one of them.

Layer by layer (`hopper.py`), the backward pass reads every gradient and every map twice more for
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
from ..models.resnet import ResNet10
from . import hopper
from .hopper import (
    Normalise,
    convolve,
    convolve_weight_grad,
    fits,
    grad_before_relu,
    patches,
    statistics_of,
    takes_sums,
)


class Normed(NamedTuple):
    """What BatchNorm gives for y, not computed yet."""

    y: Tensor  # (N, C, H, W)
    found: Tensor  # (2, C): its mean and 1 / standard deviation
    weight: Tensor  # (C,)
    bias: Tensor  # (C,)

    def computed(self) -> Tensor:
        """In float32."""
        mean, scale = self.found.view(2, -1, 1, 1)
        slope = self.weight.view(-1, 1, 1) * scale
        return (self.y.float() - mean) * slope + self.bias.view(-1, 1, 1)

    def grads(self, g: Tensor, sum_g: Tensor, sum_gy: Tensor) -> tuple[Tensor | None, ...]:
        """Of the four above, from that of the result, g (N, C, H, W), and sums over its pixels:

        of weight  =  sum of g (y - mean) / std
        of y       =  weight / std (g - mean of g - (y - mean) / std^2 * mean of g (y - mean))
        """
        mean, scale = self.found
        pixels = self.y.numel() // len(scale)
        of_weight = (sum_gy - mean * sum_g) * scale
        of_y = of_weight * scale / pixels
        constant = sum_g / pixels - mean * of_y
        slope, of_y, constant = (
            each.view(-1, 1, 1) for each in (self.weight * scale, of_y, constant)
        )
        dy = slope * (g.float() - constant - self.y.float() * of_y)
        return dy.to(self.y.dtype), None, of_weight, sum_g


class ReluConvolve(torch.autograd.Function):
    """x = relu(sum of the summands), and the convolutions that see x."""

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

        `flat` are one or two summands, the first a `Normed`, the second perhaps a plain map.
        """
        first, *others = summands(*flat)
        total = first.computed()
        for other in others:
            total = total + (other.computed() if isinstance(other, Normed) else other)
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
        first, *others = summands(*ctx.saved_tensors[ctx.kept :])
        stride = ctx.stride
        grad, grad_1x1 = grads[0], grads[2] if kept_1x1 else None
        g, sums = grad_before_relu(
            grad,
            rounded,
            stride,
            grad_1x1,
            kept_1x1[0] if kept_1x1 else None,
            grads[-1] if ctx.gives_x else None,
            x,
            first.y,
            others[0].y if others and isinstance(others[0], Normed) else None,
        )
        sum_g, *sums_gy = sums.sum(0)
        of_summands = first.grads(g, sum_g, sums_gy[0])
        for other in others:
            normed = isinstance(other, Normed)
            of_summands += other.grads(g, sum_g, sums_gy[1]) if normed else (g,)
        dw = convolve_weight_grad(grad, x, rounded.shape[2], stride).sum(0)
        dw_1x1 = None if grad_1x1 is None else convolve_weight_grad(grad_1x1, x, 1, stride).sum(0)
        return None, dw, None, dw_1x1, None, None, *of_summands


def summands(*flat: Tensor) -> list[Any]:
    """The first four tensors are a `Normed`, and so is what follows, if it is not one plain map."""
    first, rest = Normed(*flat[:4]), flat[4:]
    return [first, Normed(*rest)] if len(rest) == 4 else [first, *rest]


def normed(layer: ConvNorm, y: Tensor, sums: Tensor) -> Normed:
    norm: Any = layer[1]
    return Normed(y, statistics_of(norm, y, sums), norm.weight, norm.bias)


def relu_convolve(
    flat: tuple[Tensor, ...], layer: ConvNorm, shortcut: nn.Module | None = None
) -> tuple[Tensor, ...]:
    """The summands of the next sum, one after another: the layer's and the shortcut's."""
    weight: Any = layer[0].weight
    weight_1x1: Any = shortcut[0].weight if isinstance(shortcut, ConvNorm) else None
    y, sums, *more = ReluConvolve.apply(  # type: ignore[no-untyped-call]
        layer[0].stride[0],  # type: ignore[index]
        weight,
        weight.detach().to(hopper.PRECISION),
        weight_1x1,
        None if weight_1x1 is None else weight_1x1.detach().to(hopper.PRECISION),
        isinstance(shortcut, nn.Identity),
        *flat,
    )
    beside = normed(shortcut, *more) if isinstance(shortcut, ConvNorm) else more
    return (*normed(layer, y, sums), *beside)


def resnet_at_once(network: ResNet10, images: Tensor) -> Tensor | None:
    """The last stage of the network in training, in bf16; None where the kernels cannot do it."""
    if not network.training or images.requires_grad or not takes(network, images):
        return None
    x, weight = patches(images.to(hopper.PRECISION), network.stem[0].weight)  # type: ignore[arg-type]
    y, sums = convolve(x, weight, weight.detach().to(hopper.PRECISION), 1, True)
    flat: tuple[Tensor, ...] = normed(network.stem, y, sums)
    block: Any
    for block in network.blocks:
        inside = relu_convolve(flat, block.conv1, block.shortcut)
        flat = (*relu_convolve(inside[:4], block.conv2), *inside[4:])
    first, second = summands(*flat)
    return batch_normed(first) + (batch_normed(second) if isinstance(second, Normed) else second)


def batch_normed(summand: Normed) -> Tensor:
    y, found, weight, bias = summand
    computed: Tensor = Normalise.apply(y, *found, weight, bias)  # type: ignore[no-untyped-call]
    return computed


def takes(network: ResNet10, images: Tensor) -> bool:
    """Whether every convolution fits, and a usual BatchNorm follows it."""
    n, channels, h, w = images.shape
    if channels % 64 == 0:
        return False  # the first is seen by patches
    smaller = 1
    layers: list[tuple[Any, int]] = [(network.stem, smaller)]
    block: Any
    for block in network.blocks:
        layers += [(block.conv1, smaller), (block.shortcut, smaller)]
        smaller *= block.conv1[0].stride[0]
        layers += [(block.conv2, smaller)]
    for layer, factor in layers:
        if isinstance(layer, nn.Identity):
            continue
        conv, norm = layer
        x = torch.empty(n, conv.in_channels, h // factor, w // factor, device="meta")
        if not fits(conv, x) or not takes_sums(conv, norm, n * h * w // factor**2):
            return False
    return True
