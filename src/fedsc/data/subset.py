"""Which training images a run uses, before they are dealt to clients: a limit, a long tail."""

from __future__ import annotations

import numpy as np

from ..errors import FedscError
from .partition import Indices
from .randomness import generator


def first_of_each_class(labels: Indices, limit: int) -> Indices:
    """The first images of each class, in proportion, `limit` in all.

    In proportion, because some data sets are stored class by class.
    """
    if not 1 <= limit <= len(labels):
        raise FedscError(f"train limit {limit} (allowed: 1 to {len(labels)})")
    counts = np.bincount(labels)
    wanted = counts * (limit / len(labels))
    take = np.floor(wanted).astype(np.int64)
    # What rounding down left over goes to the classes with the largest remainders.
    for label in np.argsort(-(wanted - take), kind="stable")[: limit - take.sum()]:
        take[label] += 1
    members = [np.flatnonzero(labels == j)[:n] for j, n in enumerate(take)]
    return np.sort(np.concatenate(members))


def long_tail_counts(largest: int, num_classes: int, rho: float) -> list[int]:
    """n_j = floor(n_max rho^(-j / (C - 1))): class 0 keeps all, the last 1 / rho of it."""
    if num_classes == 1:
        return [largest]
    shares = (1 / rho) ** (np.arange(num_classes, dtype=np.float64) / (num_classes - 1))
    return [int(np.floor(largest * share)) for share in shares]


def long_tail(labels: Indices, rho: float, seed: int) -> Indices:
    """A random subset of each class, its size falling exponentially in the order of the labels."""
    if not 1 <= rho < np.inf:
        raise FedscError(f"long tail rho = {rho:g} is out of range (allowed: at least 1)")
    counts = np.bincount(labels)
    wanted = long_tail_counts(int(counts.max()), len(counts), rho)
    if min(wanted) == 0:
        raise FedscError(
            f"long tail rho = {rho:g} leaves a class without images: "
            f"the largest class has {counts.max()}; take a smaller rho"
        )
    rng = generator("long_tail", seed)
    kept = [rng.permutation(np.flatnonzero(labels == j))[:n] for j, n in enumerate(wanted)]
    return np.sort(np.concatenate(kept))
