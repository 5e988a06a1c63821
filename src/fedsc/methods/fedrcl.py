"""FedRCL: relaxed contrastive learning at every level of the network.

Seo et al., Relaxed Contrastive Learning for Federated Learning, CVPR 2024.

Each level's output is pooled and scaled to length 1; S = Z Z^T over the batch. For anchor i the
published code takes its farthest positive p_i (itself included) and its two nearest negatives,

    L_i = -log( e^(p_i/tau) / (e^(p_i/tau) + sum_n e^(n/tau)) )
          + beta -log( e^(1/tau) / (e^(1/tau) + e^(t_i/tau)) )

where t_i, the farthest other positive, is relaxed to -1 below the threshold lambda: positives that
are close enough already are pushed apart, so that features do not collapse. `form=paper` sums over
all positives instead. Loss: CE + the mean over levels. Server: FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..losses import LOG_ZERO, mean_over
from ..method import Batch, Method
from ..options import option
from ..prototypes import unit

NUM_LEVELS = 5
# MobileNetV2 gives eight outputs: the stem and those with 24, 32, 96 and 320 channels are used.
MOBILENET_LEVELS = (0, 2, 3, 5, 7)


@dataclass(frozen=True)
class FedRCL(Method):
    name: ClassVar[str] = "fedrcl"
    private_units: ClassVar = ("client",)  # its loss compares samples of a batch
    uses_stages: ClassVar[bool] = True

    weight: float = option(1.0, "weight of the contrastive loss", at_least=0)
    tau: float = option(0.05, "temperature", above=0)
    threshold: float = option(0.7, "lambda: similarity from which positives repel", at_most=1)
    beta: float = option(1.0, "weight of the repulsion between positives", at_least=0)
    form: Literal["code", "paper"] = option(
        "code", "farthest positive and two nearest negatives, or the paper's sum over all"
    )
    levels: Literal["stages", "code"] = option(
        "stages", "of MobileNetV2's stages: five spread over its depth, or the first five"
    )

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(batch)}
        if self.weight:
            level_loss = contrast_code if self.form == "code" else contrast_paper
            losses = [
                level_loss(pooled(stage), batch.labels, self.tau, self.threshold, self.beta)
                for stage in self.pick_levels(batch.student.stages or (batch.student.features,))
            ]
            terms["contrast"] = self.weight * torch.stack(losses).mean()
        return terms

    def pick_levels(self, stages: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(stages) <= NUM_LEVELS:
            return stages
        if self.levels == "stages" and len(stages) == MOBILENET_LEVELS[-1] + 1:
            return tuple(stages[i] for i in MOBILENET_LEVELS)
        return stages[:NUM_LEVELS]


def pooled(stage: Tensor) -> Tensor:
    """A stage's output averaged over its pixels, if it has any, in float32: (B, c)."""
    if stage.ndim == 2:
        return stage.float()
    # Channels are last in memory: this order reads it straight through (30 times faster on a CPU).
    return stage.movedim(1, -1).flatten(1, -2).float().mean(1)


def contrast_code(
    features: Tensor, labels: Tensor, tau: float, threshold: float, beta: float
) -> Tensor:
    """The loss of one level as the published code has it; features (B, c)."""
    z = unit(features)
    similarity = z @ z.T
    same = labels[:, None] == labels
    other = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)

    farthest = similarity.masked_fill(~same, torch.inf).amin(1)  # p_i
    negatives = similarity.masked_fill(same, LOG_ZERO).topk(min(2, len(labels)), dim=1).values
    scores = torch.cat([farthest[:, None], negatives], 1) / tau
    attract = torch.logsumexp(scores, 1) - scores[:, 0]

    # A lone sample has no other positive: 2 is farther than any similarity, and then relaxed.
    nearest_rival = similarity.masked_fill(~other, 2.0).amin(1)  # t_i
    relaxed = (nearest_rival < threshold) | ~other.any(1)
    rival = torch.where(relaxed, -torch.ones_like(nearest_rival), nearest_rival)
    repel = F.softplus((rival - 1) / tau)
    return (attract + beta * repel).mean()


def contrast_paper(
    features: Tensor, labels: Tensor, tau: float, threshold: float, beta: float
) -> Tensor:
    """The loss of one level as the paper prints it: a sum over positives, mean over anchors."""
    z = unit(features)
    scores = z @ z.T / tau
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    other = (labels[:, None] == labels) & ~itself
    everything = torch.logsumexp(scores.masked_fill(itself, LOG_ZERO), 1)
    too_close = other & (scores > threshold / tau)
    constant = torch.full_like(scores[:, :1], 1 / tau)
    repel = torch.logsumexp(torch.cat([scores.masked_fill(~too_close, LOG_ZERO), constant], 1), 1)
    number = other.sum(1)
    attract = number * everything - torch.where(other, scores, 0).sum(1)
    return mean_over(attract + beta * number * repel, number > 0)
