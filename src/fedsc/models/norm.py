"""Normalisation layers by name, and the convolution that goes before one."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import unknown

NORMS = ("batch", "renorm", "group", "none")


def norm_layer(kind: str, channels: int, dims: Literal[1, 2] = 2) -> nn.Module:
    """Normalise (B, channels, h, w) maps (`dims=2`) or (B, channels) vectors (`dims=1`)."""
    if kind == "batch":
        return nn.BatchNorm2d(channels) if dims == 2 else nn.BatchNorm1d(channels)
    if kind == "renorm":
        return BatchRenorm(channels)
    if kind == "group":
        return nn.GroupNorm(group_count(channels), channels)
    if kind == "none":
        return nn.Identity()
    raise unknown("norm", kind, NORMS)


class BatchRenorm(nn.modules.batchnorm._BatchNorm):
    """Batch renormalisation (Ioffe 2017) by the statistics that came with the global model.

    BatchNorm trains a client under the statistics of its own few classes, and is used afterwards
    under averaged ones. Here a client sees in training what evaluation sees: the output is
    normalised by the received mean m and variance v, and only its gradient is BatchNorm's, through
    the mean and variance of the batch:

        y = weight (r (x - m_B) / s_B + d) + bias,   r = s_B / s,  d = (m_B - m) / s,  both constant

    The running statistics go on as in BatchNorm, for the next round. Before anything was received,
    in the first round, this is BatchNorm. A state of one fits the other.
    """

    received_mean: Tensor
    received_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        # Not part of the state: made from it by `receive`.
        self.register_buffer("received_mean", torch.zeros(channels), persistent=False)
        self.register_buffer("received_var", torch.zeros(channels), persistent=False)

    def _check_input_dim(self, input: Tensor) -> None:
        """Maps and vectors alike."""

    @torch.no_grad()
    def receive(self) -> None:
        """Take the running statistics as those to normalise by until the next call."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.received_mean.copy_(self.running_mean)
        # A variance of 0 stands for none: the running one is still the 1 it began with.
        self.received_var.copy_(self.running_var * (self.num_batches_tracked > 0))

    def forward(self, inputs: Tensor) -> Tensor:
        """Of (B, channels, h, w) or (B, channels)."""
        if not self.training:
            return super().forward(inputs)
        if inputs.numel() == inputs.shape[1]:
            raise ValueError("BatchRenorm needs more than one value per channel in training")
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        normal, mean, inverse_deviation = torch.native_batch_norm(
            inputs, None, None, self.running_mean, self.running_var, True, self.momentum, self.eps
        )
        with torch.no_grad():
            received = self.received_var > 0
            scale = (self.received_var + self.eps).rsqrt()
            r = torch.where(received, scale / inverse_deviation, 1.0)
            d = torch.where(received, (mean - self.received_mean) * scale, 0.0)
        each = (1, -1, *[1] * (inputs.dim() - 2))
        slope, offset = r * self.weight, d * self.weight + self.bias
        return (normal * slope.view(each) + offset.view(each)).to(inputs.dtype)


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
