"""Calibration: a linear discriminant of class statistics beside the averaged classifier.

    client:  of the features z of the model it received, in evaluation mode and unaugmented:
             the sum of z (C, d) and the number of images (C,) of each class, and the sum of z z^T
             over all of them (d, d). Classes with fewer than `min_count` images are left out.
    server:  the sums over the clients, smoothed over the rounds, T <- s T(before) + (1 - s) T;
             from them class means m_j, their mean m, and one covariance S within the classes:
             W_j = S^-1 (m_j - m),  b_j = -W_j (m_j + m) / 2

Fisher's discriminant: the best classifier of equally frequent Gaussian classes with one covariance.
CCVR (Luo et al. 2021, arXiv:2106.05001) trains a classifier on features drawn from such Gaussians,
one covariance per class; here it is in closed form.

`fedsc+` is tested with its sum with the averaged classifier. Of every method `--calibrated`
measures what both would give.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import prototypes as eq
from .losses import LOG_ZERO
from .method import Task
from .state import State

STATISTICS = "class_sums", "class_counts", "products"  # (C, d), (C,) and (d, d)
SMOOTHING = 0.8  # s: the share of the rounds before
SHRINKAGE = 0.1  # of the covariance towards a multiple of the identity, so that it has an inverse


def empty_statistics(task: Task) -> State:
    """Before the first image, and on the server before the first round."""
    size, dim = task.num_classes, task.feature_dim
    shapes = (size, dim), (size,), (dim, dim)
    return {name: torch.zeros(shape) for name, shape in zip(STATISTICS, shapes, strict=True)}


def add_statistics(totals: State, features: Tensor, labels: Tensor, weight: Tensor) -> State:
    """After one more batch of features (B, d), each counted `weight` (B,) times."""
    num_classes = len(totals["class_counts"])
    sums = eq.class_sums(features, labels, weight, num_classes)
    return {
        "class_sums": totals["class_sums"] + sums,
        "class_counts": totals["class_counts"] + eq.class_counts(labels, weight, num_classes),
        "products": totals["products"] + features.T @ (features * weight[:, None]),
    }


def smoothed(before: State, now: State, share: float) -> State:
    """The server's statistics after a round: `share` of those before, the rest this round's."""
    return {name: torch.lerp(now[name], before[name], share) for name in STATISTICS}


def linear_discriminant(statistics: State) -> tuple[Tensor, Tensor]:
    """W (C, d) and b (C,). A class without images is never guessed."""
    sums, counts, products = (statistics[name] for name in STATISTICS)
    n, known = counts.double(), counts > 0
    means = sums.double() / n.where(known, 1)[:, None]
    covariance = (products.double() - (means.T * n) @ means) / n.sum()
    covariance.diagonal().add_(SHRINKAGE * covariance.diagonal().mean())
    center = means[known].mean(0)
    # solve_ex: features that are all alike, or no numbers, give no error but a useless classifier.
    weight = torch.linalg.solve_ex(covariance, (means - center).T)[0].T
    bias = -(weight * (means + center)).sum(1) / 2
    return weight.to(sums), bias.masked_fill(~known, LOG_ZERO).to(sums)
