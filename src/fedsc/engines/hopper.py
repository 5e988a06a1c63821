"""Convolutions for Hopper GPUs (H100, H200), together with BatchNorm's statistics.

With several clients at once, in batches of 64, cuDNN does the convolutions of ResNet-10 at 36% of
what the tensor cores can, these at 56% (docs/performance.md). In training the sums of y and y^2
that BatchNorm wants are taken while y is still on the chip. What surrounds them, ReLU and
additions, is left to PyTorch's compiler; for a whole ResNet-10, `hopper_resnet.py` goes further.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from .hopper_kernels import (
    convolve_kernel,
    input_grad_kernel,
    statistics_kernel,
    weight_grad_kernel,
)

ROWS = 128  # output pixels in a tile
PATCH = 32  # values of a 3x3 patch of an image with three channels, filled up with zeros
PRECISION = torch.bfloat16
PROGRAMS = 72  # to share a gradient of weights among: half a card, and others run beside it
MOST_TILES = 65_535  # CUDA's limit of the axis that they are on


# Launching. Block sizes are those that were fastest with five clients at once on an H200. ---------


def described(tensor: Tensor, *block: int) -> Any:
    """For the tensor memory accelerator, which reads and writes such blocks of it.

    The tensor is contiguous, but where an axis has the length 1 its stride can be any number, and
    the accelerator takes multiples of 16 bytes only.
    """
    strides = [math.prod(tensor.shape[axis + 1 :]) for axis in range(tensor.dim())]
    return TensorDescriptor(tensor, list(tensor.shape), strides, list(block))


def nhwc(images: Tensor) -> Tensor:
    """(N, C, H, W) as (N, H, W, C), which for `channels_last` is only another view."""
    return images.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)


def by_parity(images: Tensor, stride: int) -> Tensor:
    """(N, H, W, C) as (N, H/2, 2, W/2, 2C), or with a stride of 1 as (N, H, 1, W, C)."""
    n, h, w, c = images.shape
    return images.view(n, h // stride, stride, w // stride, stride * c)


def tiling(n: int, h: int, w: int, pixels: int = ROWS) -> tuple[int, int, int]:
    """How many images, and how many rows of each, make a tile of so many pixels; how many tiles."""
    rows = min(h, pixels // w)
    images = pixels // (rows * w)
    return images, rows, triton.cdiv(n, images) * (h // rows)


def launch_options(channels: int, fused: bool = False) -> dict[str, int]:
    """Of the kernels whose tiles have so many columns, or 128 of them.

    Where much follows the products, two programs on a multiprocessor do better than longer pipes.
    """
    return {"num_warps": 4, "num_stages": 4 if channels % 128 == 0 and not fused else 3}


@torch.library.custom_op("fedsc::convolve", mutates_args=())
def convolve(
    x: Tensor, weight: Tensor, rounded: Tensor, stride: int, with_sums: bool
) -> tuple[Tensor, Tensor]:
    """y (N, O, H, W) and, for each tile of its pixels, the sums of y and y^2 (tiles, 2, O).

    `rounded` (O, C, k, k) is `weight` in bf16. It is `weight` that gets the gradient, in float32.
    """
    pixels, taps = nhwc(x), nhwc(rounded)
    n, height, width, c = pixels.shape
    o, size = taps.shape[:2]
    h, w = height // stride, width // stride
    images, rows, tiles = tiling(n, h, w)
    y = pixels.new_empty(n, h, w, o)
    sums = pixels.new_empty(tiles if with_sums else 0, 2, o, dtype=torch.float32)
    block_o, block_c = 128 if o % 128 == 0 else 64, min(c, 64)
    convolve_kernel[o // block_o, tiles](
        described(by_parity(pixels, stride), images, rows, 1, w, block_c),
        described(taps.view(o, -1), block_o, block_c),
        described(y, images, rows, w, block_o),
        sums,
        *(c, o, size, stride, h, w, images, rows, block_o, block_c, with_sums),
        **launch_options(o),
    )
    return y.permute(0, 3, 1, 2), sums


@convolve.register_fake
def _(
    x: Tensor, weight: Tensor, rounded: Tensor, stride: int, with_sums: bool
) -> tuple[Tensor, Tensor]:
    n, o, h, w = len(x), len(weight), x.shape[2] // stride, x.shape[3] // stride
    tiles = tiling(n, h, w)[2] if with_sums else 0
    y = x.new_empty(n, h, w, o).permute(0, 3, 1, 2)
    return y, x.new_empty(tiles, 2, o, dtype=torch.float32)


@torch.library.custom_op("fedsc::convolve_input_grad", mutates_args=())
def convolve_input_grad(grad: Tensor, rounded: Tensor, stride: int) -> Tensor:
    """The gradient of x, (N, C, H, W)."""
    return input_grad(grad, rounded, stride)[0]


@convolve_input_grad.register_fake
def _(grad: Tensor, rounded: Tensor, stride: int) -> Tensor:
    n, _, h, w = grad.shape
    return grad.new_empty(n, h * stride, w * stride, rounded.shape[1]).permute(0, 3, 1, 2)


@torch.library.custom_op("fedsc::grad_before_relu", mutates_args=())
def grad_before_relu(
    grad: Tensor,
    rounded: Tensor,
    stride: int,
    grad_1x1: Tensor | None,
    rounded_1x1: Tensor | None,
    added: Tensor | None,
    x: Tensor,
    a: Tensor,
    b: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradient of what went into the ReLU that gave x, (N, C, H, W), and sums for BatchNorm.

    x is seen by a convolution and, where there is a `grad_1x1`, by a 1x1 convolution too; `added`
    is what x gets from elsewhere. The sums (stride^2 tiles, 2 or 3, C) are of the gradient and of
    its products with a and b, for each tile of pixels.
    """
    return input_grad(grad, rounded, stride, grad_1x1, rounded_1x1, added, x, a, b)


@grad_before_relu.register_fake
def _(grad: Tensor, rounded: Tensor, stride: int, *others: Any) -> tuple[Tensor, Tensor]:
    n, _, h, w = grad.shape
    c, b = rounded.shape[1], others[-1]
    dx = grad.new_empty(n, h * stride, w * stride, c).permute(0, 3, 1, 2)
    tiles = tiling(n, h, w)[2] * stride**2
    return dx, grad.new_empty(tiles, 2 if b is None else 3, c, dtype=torch.float32)


def input_grad(
    grad: Tensor,
    rounded: Tensor,
    stride: int,
    grad_1x1: Tensor | None = None,
    rounded_1x1: Tensor | None = None,
    added: Tensor | None = None,
    x: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What the two operators above share: the kernel leaves out what is None."""
    dy, taps = nhwc(grad), nhwc(rounded)
    n, h, w, o = dy.shape
    size, c = taps.shape[1], taps.shape[3]
    images, rows, tiles = tiling(n, h, w)
    dx = dy.new_empty(n, h * stride, w * stride, c)
    summed = 0 if a is None else tiles * stride**2
    sums = dy.new_empty(summed, 2 if b is None else 3, c, dtype=torch.float32)
    block_c = 128 if c % 128 == 0 else 64

    def by_tiles(like_dx: Tensor) -> Any:
        return described(by_parity(like_dx, stride), images, rows, 1, w, block_c)

    more = (None if each is None else by_tiles(nhwc(each)) for each in (added, x, a, b))
    beside: Any = (None, None)
    if grad_1x1 is not None and rounded_1x1 is not None:
        beside = (
            described(nhwc(grad_1x1), images, rows, w, 64),
            described(nhwc(rounded_1x1).view(o, c), 64, block_c),
        )
    input_grad_kernel[c // block_c, tiles, stride**2](
        described(dy, images, rows, w, 64),
        described(taps.view(o, -1), 64, block_c),
        by_tiles(dx),
        *(*beside, *more, sums),
        *(c, o, size, stride, h, w, images, rows, block_c, 64),
        **launch_options(c, fused=a is not None),
    )
    return dx.permute(0, 3, 1, 2), sums


@torch.library.custom_op("fedsc::convolve_weight_grad", mutates_args=())
def convolve_weight_grad(grad: Tensor, x: Tensor, size: int, stride: int) -> Tensor:
    """The gradient of the weight in parts, (parts, O, C, k, k), float32; it is their sum."""
    dy, pixels = nhwc(grad), nhwc(x)
    n, h, w, o = dy.shape
    c = pixels.shape[3]
    images, rows, _ = tiling(n, h, w, pixels=64)
    block_o, block_c, parts = sharing(n * h * w, o, c, size)
    programs = size * size * c // block_c, o // block_o
    dw = dy.new_empty(parts, o, size * size * c, dtype=torch.float32)
    weight_grad_kernel[*programs, parts](
        described(dy, images, rows, w, block_o),
        described(by_parity(pixels, stride), images, rows, 1, w, block_c),
        described(dw, 1, block_o, block_c),
        *(n, c, size, stride, h, w, images, rows, block_c, block_o, parts),
        num_warps=8 if block_o == block_c == 128 else 4,
        num_stages=4,
    )
    return dw.view(parts, o, size, size, c).permute(0, 1, 4, 2, 3)


@convolve_weight_grad.register_fake
def _(grad: Tensor, x: Tensor, size: int, stride: int) -> Tensor:
    n, o, h, w = grad.shape
    c = x.shape[1]
    parts = sharing(n * h * w, o, c, size)[2]
    dw = grad.new_empty(parts, o, size, size, c, dtype=torch.float32)
    return dw.permute(0, 1, 4, 2, 3)


def sharing(pixels: int, o: int, c: int, size: int) -> tuple[int, int, int]:
    """The blocks of a gradient of weights, and in how many parts the pixels are shared out: few
    weights are few tiles."""
    block_o, block_c = min(o & -o, 128), min(c & -c, 128)  # x & -x: the power of two in x
    programs = (size * size * c // block_c) * (o // block_o)
    return block_o, block_c, max(1, min(pixels // 256, PROGRAMS // programs))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, rounded, ctx.stride, _ = inputs
    ctx.save_for_backward(x, rounded)


def _grads(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """The sums get no gradient: `Normalise` knows what of it runs through mean and deviation."""
    x, rounded = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = convolve_input_grad(grad, rounded, ctx.stride)
    if ctx.needs_input_grad[1]:
        dw = convolve_weight_grad(grad, x, rounded.shape[2], ctx.stride).sum(0)
    return dx, dw, None, None, None


convolve.register_autograd(_grads, setup_context=_keep)


# In a network -------------------------------------------------------------------------------------


def normalised(y: Tensor, mean: Tensor, scale: Tensor, norm_weight: Tensor, bias: Tensor) -> Tensor:
    """BatchNorm of y (N, C, H, W) by its mean and 1 / standard deviation (C,), in float32."""
    slope = (norm_weight * scale).view(-1, 1, 1)
    return (y.float() - mean.view(-1, 1, 1)) * slope + bias.view(-1, 1, 1)


class Normalise(torch.autograd.Function):
    """The same in y's precision, with the gradients of BatchNorm."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, mean: Tensor, scale: Tensor, norm_weight: Tensor, bias: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y, mean, scale, norm_weight)
        return normalised(y, mean, scale, norm_weight, bias).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """PyTorch's own, which counts in that mean and deviation depend on y: none for them."""
        y, mean, scale, norm_weight = ctx.saved_tensors
        of_y, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            grad, y, norm_weight, None, None, mean, scale, True, 0.0, [True, True, True]
        )
        return of_y, None, None, of_weight, of_bias


@torch.library.custom_op(
    "fedsc::statistics", mutates_args=("running_mean", "running_var", "batches")
)
def statistics(
    sums: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    count: int,
    epsilon: float,
    momentum: float,
) -> Tensor:
    """The mean and 1 / standard deviation (2, O) of `count` pixels; BatchNorm's memory of them."""
    tiles, _, o = sums.shape
    found = torch.empty_like(sums[0])
    block = min(512, triton.next_power_of_2(tiles))
    statistics_kernel[(o // 16,)](
        *(sums, found, running_mean, running_var, batches),
        *(tiles, count, epsilon, momentum, o, block, 16),
        num_warps=8,
    )
    return found


@statistics.register_fake
def _(sums: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(sums[0])


def takes_sums(conv: nn.Conv2d, norm: nn.Module, pixels: int) -> bool:
    """Whether `norm` is the usual BatchNorm in training, which one pixel would not do for."""
    return (
        type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and conv.bias is None
        and pixels > 1
    )


def statistics_of(norm: Any, y: Tensor, sums: Tensor) -> Tensor:
    """The mean and 1 / standard deviation (2, O) of y, which `norm` takes note of."""
    return statistics(
        sums.detach(),
        norm.running_mean,
        norm.running_var,
        norm.num_batches_tracked,
        y.numel() // y.shape[1],
        norm.eps,
        norm.momentum,
    )


def batch_norm(norm: Any, y: Tensor, sums: Tensor) -> Tensor:
    """What `norm(y)` does in training, from the sums over y's pixels."""
    mean, scale = statistics_of(norm, y, sums)
    return Normalise.apply(y, mean, scale, norm.weight, norm.bias)  # type: ignore[no-untyped-call]


def patches(images: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Images (N, c, H, W) and a 3x3 kernel (O, c, 3, 3) such that a 1x1 convolution of what comes
    out, with PATCH channels, is their 3x3 convolution: three channels are too few for a tile."""
    h, w = images.shape[2:]
    wide = F.pad(images, (1, 1, 1, 1))
    # Nine at once would be nine kernels, three and three are one.
    across = torch.cat([wide[..., j : j + w] for j in range(3)], 1)
    around = torch.cat([across[:, :, i : i + h] for i in range(3)], 1)
    missing = PATCH - 9 * images.shape[1]
    flat = F.pad(weight.permute(0, 2, 3, 1).flatten(1), (0, missing))
    stacked = F.pad(around, (0, 0, 0, 0, 0, missing))
    return stacked.contiguous(memory_format=torch.channels_last), flat[:, :, None, None]


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def fits(conv: nn.Conv2d, shape: Sequence[int], needs_grad: bool) -> bool:
    """Whether the kernels can do this convolution of a map of that shape."""
    size, stride = conv.kernel_size[0], conv.stride[0]
    n, _, height, width = shape
    h, w = height // stride, width // stride
    first = size == 3 and stride == 1 and 9 * conv.in_channels <= PATCH and not needs_grad
    return (
        type(conv) is nn.Conv2d
        and conv.kernel_size in ((1, 1), (3, 3))
        and conv.stride in ((1, 1), (2, 2))
        and conv.padding == (size // 2, size // 2)
        and conv.padding_mode == "zeros"
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and (conv.in_channels % 64 == 0 or first)
        and conv.out_channels % 64 == 0
        and height % stride == width % stride == 0
        and is_power_of_two(h)
        and is_power_of_two(w)
        and w <= 64  # the smallest tile has a whole row
        and 0 < n * h * w <= MOST_TILES * ROWS
    )


def conv_norm_at_once(conv: nn.Conv2d, norm: nn.Module, x: Tensor) -> Tensor:
    """`norm(conv(x))` in bf16."""
    if not fits(conv, x.shape, x.requires_grad):
        return norm(conv(x))
    weight: Tensor = conv.weight
    stride = conv.stride[0]
    x = x.to(PRECISION)
    if conv.in_channels % 64:
        x, weight = patches(x, weight)
    rounded = weight.detach().to(PRECISION)
    if takes_sums(conv, norm, x.numel() // x.shape[1] // stride**2):
        return batch_norm(norm, *convolve(x, weight, rounded, stride, True))
    y, _ = convolve(x, weight, rounded, stride, False)
    if conv.bias is not None:
        y = y + conv.bias.to(y.dtype)[:, None, None]
    return norm(y)
