"""The losses of FedSC, Equations 13 to 15, and what other methods share with them.

Masked throughout: `exists` says which prototype rows are there, `valid` which samples count, so
that shapes never change from batch to batch. Shapes: B samples, Q prototype rows, d features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .prototypes import unit

U_FLOOR = 1e-6
# Stands for log 0 in a masked log-sum-exp. Finite, because -inf - (-inf) is NaN, and so is its
# gradient even where a mask throws the value away.
LOG_ZERO = -1e30


def mean_over(values: Tensor, valid: Tensor) -> Tensor:
    """Mean of values (B,) over the valid samples; 0, with zero gradient, where there are none."""
    kept = torch.where(valid, values, torch.zeros_like(values))
    return kept.sum() / valid.sum().clamp_min(1)


def prototype_distances(features: Tensor, prototypes: Tensor) -> Tensor:
    """||z_i - P_q||_2, (B, Q), by differences: exact also where the two nearly coincide."""
    mode = "donot_use_mm_for_euclid_dist"
    return torch.cdist(features, prototypes, compute_mode=mode)


def rpcl(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    prototype_class: Tensor,
    exists: Tensor,
    spread: Tensor,
    tau: float,
    center: Tensor | None = None,
    outside: bool = False,
    prior: Tensor | None = None,
) -> Tensor:
    """Relational Prototypes Contrastive Learning, Eq. 13-14.

    s_iq = cos(z_i, P_q) / U_q
    L_i  = logsumexp_q(s_iq / tau) - logsumexp_{q of class y_i}(s_iq / tau)

    `spread` is U (Q,) or (B, Q) where rows differ between samples, `exists` likewise. `outside`
    puts the sum over positives outside the logarithm: the mean over them of
    logsumexp(s / tau) - s_p / tau. `center` (d,) is subtracted from both sides of the cosine;
    `prior` (Q,) is added to s / tau.
    Samples whose class has no prototype do not count.
    """
    if center is not None:
        features, prototypes = features - center, prototypes - center
    scores = unit(features) @ unit(prototypes).T / (spread * tau)  # (B, Q)
    if prior is not None:
        scores = scores + prior
    positive = exists & (prototype_class == labels[:, None])
    everything = torch.logsumexp(scores.masked_fill(~exists, LOG_ZERO), -1)
    if outside:
        num_positive = positive.sum(-1).clamp_min(1)
        own = torch.where(positive, scores, torch.zeros_like(scores)).sum(-1) / num_positive
    else:
        own = torch.logsumexp(scores.masked_fill(~positive, LOG_ZERO), -1)
    return mean_over(everything - own, positive.any(-1))


def cpdr(
    features: Tensor, labels: Tensor, consistent: Tensor, exists: Tensor, form: str = "mse_mean"
) -> Tensor:
    """Consistent Prototypes Discrepancy Regularization, Eq. 15: the pull of z_i to o^{y_i}.

    `consistent` (C, d), `exists` (C,). `form` is how the distance is measured: mse_mean, mse_sum,
    l1_mean, l1_sum (Eq. 15 to the letter) or l2.
    """
    gap = features - consistent[labels]  # (B, d)
    if form == "l2":
        # The norm's own subgradient at 0 is 0, so a feature on its prototype stays put.
        size = torch.linalg.vector_norm(gap, dim=-1)
    else:
        each = gap.abs() if form.startswith("l1") else gap.square()
        size = each.mean(-1) if form.endswith("mean") else each.sum(-1)
    return mean_over(size, exists[labels])
