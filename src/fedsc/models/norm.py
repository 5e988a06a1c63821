"""Normalisation layers by name, and the convolution that goes before one."""

from __future__ import annotations

from typing import Literal

from torch import nn

from ..errors import unknown

NORMS = ("batch", "group", "none")


def norm_layer(kind: str, channels: int, dims: Literal[1, 2] = 2) -> nn.Module:
    """Normalise (B, channels, h, w) maps (`dims=2`) or (B, channels) vectors (`dims=1`)."""
    if kind == "batch":
        return nn.BatchNorm2d(channels) if dims == 2 else nn.BatchNorm1d(channels)
    if kind == "group":
        return nn.GroupNorm(group_count(channels), channels)
    if kind == "none":
        return nn.Identity()
    raise unknown("norm", kind, NORMS)


def group_count(channels: int) -> int:
    """The usual 32 groups, or the most below it that divide `channels`.

    A group has at least two channels: one channel alone on a 1x1 map would become exactly 0.
    """
    most = max(1, min(32, channels // 2))
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)


def conv_norm(
    inputs: int, outputs: int, kernel: int, norm: str, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """A convolution that keeps the image size (but for `stride`), then the norm.

    The convolution has a bias only without a norm: a norm has its own.
    """
    conv = nn.Conv2d(
        inputs,
        outputs,
        kernel,
        stride=stride,
        padding=kernel // 2,
        groups=groups,
        bias=norm == "none",
    )
    return nn.Sequential(conv, norm_layer(norm, outputs))
