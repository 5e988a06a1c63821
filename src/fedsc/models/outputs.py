"""What a model gives: the one convention every network follows, built in or the user's own."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Outputs(NamedTuple):
    """Result of `model(images)`.

    A model is any `nn.Module` whose `forward(images)` returns this and whose attribute
    `classifier` is the module that maps features to logits (methods may replace it).
    """

    features: Tensor  # (B, d): f(u; x), after pooling, before the classifier
    logits: Tensor  # (B, C): h(v; features)
    stages: tuple[Tensor, ...] = ()  # outputs of the stages before their last ReLU, (B, c, ...)
