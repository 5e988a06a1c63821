"""Convolutions on the tensor cores of Hopper GPUs, in Triton. `hopper.py` launches them.

A convolution is a matrix product: one row for each output pixel, one column for each output
channel, summed over the taps of the kernel and the input channels. A program computes one tile of
it. Tiles are read by the tensor memory accelerator, which gives zeros outside of an image, so
padding costs nothing, and go to the tensor cores without a detour through registers.

All tensors are NHWC; sums are float32. The rows of a tile are NB x HB x W pixels: HB whole rows of
NB images. With a stride of 2, images are seen as (N, H/2, 2, W/2, 2C): the parity of a row is an
axis of its own, that of a column is in the channel, and what a tap sees is a plain tile again.
"""

import triton
import triton.language as tl


@triton.jit
def seen_by(tap, row, channel, C: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Where in x the tile lies that a tap of the kernel sees: row, its parity, column, channel."""
    down = 1 if SIZE == 1 else tap // 3
    right = 1 if SIZE == 1 else tap % 3
    if STRIDE == 1:
        seen = row + down - 1, 0, right - 1, channel
    else:
        seen = row - (down == 0), (down + 1) % 2, 0 - (right == 0), (right + 1) % 2 * C + channel
    return seen


@triton.jit
def convolve_kernel(
    x,  # (N, H, STRIDE, W, STRIDE * C), where H and W are those of y
    w,  # (O, SIZE * SIZE * C)
    y,  # (N, H, W, O)
    sums,  # (tiles, 2, O): of y and of its squares, over the rows of a tile
    C: tl.constexpr,
    O: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    NB: tl.constexpr,
    HB: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WITH_SUMS: tl.constexpr,
):
    o = tl.program_id(0) * BLOCK_O
    tile = tl.program_id(1)
    n, h = tile // (H // HB) * NB, tile % (H // HB) * HB
    total = tl.zeros((NB * HB * W, BLOCK_O), tl.float32)
    for k in tl.range(SIZE * SIZE * C // BLOCK_C):
        tap, c = k // (C // BLOCK_C), k % (C // BLOCK_C) * BLOCK_C
        row, parity, column, channel = seen_by(tap, h, c, C, SIZE, STRIDE)
        pixels = x.load([n, row, parity, column, channel]).reshape(NB * HB * W, BLOCK_C)
        total = tl.dot(pixels, w.load([o, k * BLOCK_C]).T, total)
    rounded = total.to(y.dtype)
    y.store([n, h, 0, o], rounded.reshape(NB, HB, W, BLOCK_O))
    if WITH_SUMS:  # images beyond the last are zeros, and add nothing
        total = rounded.to(tl.float32)
        here = sums + tile * 2 * O + o + tl.arange(0, BLOCK_O)
        tl.store(here, tl.sum(total, 0))
        tl.store(here + O, tl.sum(total * total, 0))


@triton.jit
def input_grad_kernel(
    dy,  # (N, H, W, O)
    w,  # (O, SIZE * SIZE * C)
    dx,  # (N, H, STRIDE, W, STRIDE * C)
    dy_1x1,  # like dy, of a 1x1 convolution that sees the same x; or None, as the next five
    w_1x1,  # (O, C)
    added,  # like dx: a gradient of x from elsewhere
    x,  # like dx: the output of a ReLU, for the gradient of what went into it
    a,  # like dx: what was normalised and went into the ReLU
    b,  # like a
    sums,  # (STRIDE^2 * tiles, 2 or 3, C): of dx, dx * a and dx * b over the rows of a tile
    C: tl.constexpr,
    O: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    NB: tl.constexpr,
    HB: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    c = tl.program_id(0) * BLOCK_C
    tile = tl.program_id(1)
    n, h = tile // (H // HB) * NB, tile % (H // HB) * HB
    # With a stride of 2, pixels of an even row are seen by the middle row of taps only, those of an
    # odd row by the first (from the next row of y) and the last. For columns it is the same.
    down, right = tl.program_id(2) // 2, tl.program_id(2) % 2  # the parities
    if STRIDE == 1:
        taps, taps_right = SIZE * SIZE, SIZE
    elif SIZE == 1:
        taps, taps_right = (1 - down) * (1 - right), 1
    else:
        taps, taps_right = (1 + down) * (1 + right), 1 + right
    total = tl.zeros((NB * HB * W, BLOCK_C), tl.float32)
    for k in tl.range(taps * (O // BLOCK_O)):
        i, o = k // (O // BLOCK_O), k % (O // BLOCK_O) * BLOCK_O
        i_down, i_right = i // taps_right, i % taps_right
        if SIZE == 1:
            tap, row, column = 0, h, 0
        elif STRIDE == 1:
            tap, row, column = i, h + 1 - i_down, 1 - i_right
        else:
            tap = (1 + down * (2 * i_down - 1)) * 3 + 1 + right * (2 * i_right - 1)
            row, column = h + down * (1 - i_down), right * (1 - i_right)
        pixels = dy.load([n, row, column, o]).reshape(NB * HB * W, BLOCK_O)
        total = tl.dot(pixels, w.load([o, tap * C + c]), total)
    if dy_1x1 is not None:  # with a stride of 2 it sees even rows and columns only
        for k in tl.range((1 - down) * (1 - right) * (O // BLOCK_O)):
            pixels = dy_1x1.load([n, h, 0, k * BLOCK_O]).reshape(NB * HB * W, BLOCK_O)
            total = tl.dot(pixels, w_1x1.load([k * BLOCK_O, c]), total)
    column = right * C + c
    if added is not None:
        total += added.load([n, h, down, 0, column]).reshape(NB * HB * W, BLOCK_C).to(tl.float32)
    if x is not None:
        seen = x.load([n, h, down, 0, column]).reshape(NB * HB * W, BLOCK_C)
        total = tl.where(seen > 0, total, 0.0)
    rounded = total.to(dx.dtype)
    dx.store([n, h, down, 0, column], rounded.reshape(NB, HB, 1, W, BLOCK_C))
    if a is not None:
        total = rounded.to(tl.float32)
        place = tl.program_id(2) * tl.num_programs(1) + tile
        here = sums + place * (2 if b is None else 3) * C + c + tl.arange(0, BLOCK_C)
        tl.store(here, tl.sum(total, 0))
        other = a.load([n, h, down, 0, column]).reshape(NB * HB * W, BLOCK_C).to(tl.float32)
        tl.store(here + C, tl.sum(total * other, 0))
        if b is not None:
            other = b.load([n, h, down, 0, column]).reshape(NB * HB * W, BLOCK_C).to(tl.float32)
            tl.store(here + 2 * C, tl.sum(total * other, 0))


@triton.jit
def weight_grad_kernel(
    dy,  # (N, H, W, O)
    x,  # (N, H, STRIDE, W, STRIDE * C)
    dw,  # (PARTS, O, SIZE * SIZE * C), float32: sums over a part of the pixels each
    N,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    NB: tl.constexpr,
    HB: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PARTS: tl.constexpr,
):
    k, o, part = tl.program_id(0), tl.program_id(1) * BLOCK_O, tl.program_id(2)
    tap, c = k // (C // BLOCK_C), k % (C // BLOCK_C) * BLOCK_C
    tiles = tl.cdiv(N, NB) * (H // HB)
    total = tl.zeros((BLOCK_O, BLOCK_C), tl.float32)
    for tile in tl.range(tiles * part // PARTS, tiles * (part + 1) // PARTS):
        n, h = tile // (H // HB) * NB, tile % (H // HB) * HB
        row, parity, column, channel = seen_by(tap, h, c, C, SIZE, STRIDE)
        outputs = dy.load([n, h, 0, o]).reshape(NB * HB * W, BLOCK_O)
        inputs = x.load([n, row, parity, column, channel]).reshape(NB * HB * W, BLOCK_C)
        total = tl.dot(outputs.T, inputs, total)
    dw.store([part, o, k * BLOCK_C], total.reshape(1, BLOCK_O, BLOCK_C))


@triton.jit
def statistics_kernel(
    sums,  # (tiles, 2, O) float32, from convolve_kernel
    found,  # (2, O) float32: the mean, and 1 / standard deviation
    running_mean,  # (O,)
    running_var,  # (O,)
    batches,  # () int64
    tiles,
    count,  # pixels
    epsilon,
    momentum,
    O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    total = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for first in tl.range(0, tiles, BLOCK_T):
        tile = first + tl.arange(0, BLOCK_T)
        here = sums + tile[:, None] * 2 * O + o[None, :]
        there = tile[:, None] < tiles
        total += tl.load(here, mask=there, other=0.0)
        squares += tl.load(here + O, mask=there, other=0.0)
    mean = tl.sum(total, 0) / count
    variance = tl.maximum(tl.sum(squares, 0) / count - mean * mean, 0.0)
    tl.store(found + o, mean)
    tl.store(found + O + o, 1 / tl.sqrt(variance + epsilon))
    # As BatchNorm does it: what is remembered is the unbiased variance.
    old = tl.load(running_mean + o)
    tl.store(running_mean + o, old + momentum * (mean - old))
    old = tl.load(running_var + o)
    tl.store(running_var + o, old + momentum * (variance * count / (count - 1) - old))
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)
