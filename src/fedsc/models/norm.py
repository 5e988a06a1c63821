"""Normalisation layers by name, and the convolution that goes before one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import unknown

NORMS = ("batch", "fixed", "group", "none")


def norm_layer(kind: str, channels: int, dims: Literal[1, 2] = 2) -> nn.Module:
    """Normalise (B, channels, h, w) maps (`dims=2`) or (B, channels) vectors (`dims=1`)."""
    if kind == "batch":
        return nn.BatchNorm2d(channels) if dims == 2 else nn.BatchNorm1d(channels)
    if kind == "fixed":
        return FixedBatchNorm(channels)
    if kind == "group":
        return nn.GroupNorm(group_count(channels), channels)
    if kind == "none":
        return nn.Identity()
    raise unknown("norm", kind, NORMS)


class FixedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm whose statistics are fixed for the second half of the rounds.

    FixBN (Zhong et al. 2023, arXiv:2303.06530). BatchNorm trains a client under the statistics of
    its own few classes, and is used afterwards under averaged ones. Once the statistics are fixed,
    a client trains, and takes its prototypes, under those with which the global model is used.
    """

    fixed: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        # A tensor, since a captured step cannot branch; not part of the state: see `fix_norms`.
        self.register_buffer("fixed", torch.zeros((), dtype=torch.bool), persistent=False)

    def _check_input_dim(self, input: Tensor) -> None:
        """Maps and vectors alike."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Of (B, channels, h, w) or (B, channels)."""
        if not self.training:
            return super().forward(inputs)
        if inputs.numel() == inputs.shape[1]:
            raise ValueError("BatchNorm needs more than one value per channel in training")
        # Only a BatchNorm without running statistics lacks these.
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        each = (1, -1, *[1] * (inputs.dim() - 2))
        over = [dim for dim in range(inputs.dim()) if dim != 1]
        batch_var, batch_mean = torch.var_mean(inputs.float(), over, correction=0)
        mean = torch.where(self.fixed, self.running_mean, batch_mean)
        var = torch.where(self.fixed, self.running_var, batch_var)
        slope = self.weight * (var + self.eps).rsqrt()
        offset = self.bias - mean * slope
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            n = inputs.numel() / inputs.shape[1]
            step = self.momentum * ~self.fixed
            self.running_mean.add_(step * (batch_mean - self.running_mean))
            self.running_var.add_(step * (batch_var * n / (n - 1) - self.running_var))
        return (inputs * slope.view(each) + offset.view(each)).to(inputs.dtype)


def fix_norms(model: nn.Module, round: int, num_rounds: int) -> None:
    """Fix the statistics of FixedBatchNorm layers in the second half of the rounds."""
    for layer in model.modules():
        if isinstance(layer, FixedBatchNorm):
            layer.fixed.fill_(round > max(1, num_rounds / 2))  # measured at least once


def group_count(channels: int) -> int:
    """The usual 32 groups, or the most below it that divide `channels`.

    A group has at least two channels: one channel alone on a 1x1 map would become exactly 0.
    """
    most = max(1, min(32, channels // 2))
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)


ConvNormAtOnce = Callable[[nn.Conv2d, nn.Module, Tensor], Tensor]


class ConvNorm(nn.Sequential):
    """A convolution, then the norm.

    An engine may give a faster way to compute both at once. It is for compiled networks: one by
    one, its launches take Python longer than they save.
    """

    at_once: ConvNormAtOnce | None = None

    def forward(self, x: Tensor) -> Tensor:
        conv, norm = self.children()
        if self.at_once is not None and torch.compiler.is_compiling():
            return self.at_once(conv, norm, x)  # type: ignore[arg-type]
        normalised: Tensor = norm(conv(x))
        return normalised


def conv_norm(
    inputs: int, outputs: int, kernel: int, norm: str, stride: int = 1, groups: int = 1
) -> ConvNorm:
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
    return ConvNorm(conv, norm_layer(norm, outputs))
