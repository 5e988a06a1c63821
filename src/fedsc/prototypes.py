"""Prototypes on the server: Equations 3 to 12 of FedSC (KDD 2025), one function per step.

Shapes: K clients, C classes, d features. `held` (K, C) says who holds what: client k has a
prototype of class j where `held[k, j]`. Rows that are not held carry no meaning and are never
read. Everything here is computed in float64 on the CPU, so that near-ties between neighbours fall
the same way on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .state import State

NORM_FLOOR = 1e-8


def class_sums(features: Tensor, labels: Tensor, weight: Tensor, num_classes: int) -> Tensor:
    """Sum of features per class, (C, d), each sample (B, d) counted `weight` (B,) times."""
    one_hot = F.one_hot(labels, num_classes).to(features.dtype) * weight[:, None].to(features.dtype)
    return one_hot.T @ features


def class_counts(labels: Tensor, weight: Tensor, num_classes: int) -> Tensor:
    """Number of samples per class, (C,), each sample counted `weight` (B,) times."""
    return F.one_hot(labels, num_classes).to(weight.dtype).T @ weight


def empty_sums(num_classes: int, dim: int) -> State:
    """The totals behind prototypes before the first batch."""
    return {"sums": torch.zeros(num_classes, dim), "counts": torch.zeros(num_classes)}


def add_sums(totals: State, features: Tensor, labels: Tensor, weight: Tensor) -> State:
    """The totals after one more batch."""
    num_classes = len(totals["counts"])
    return {
        "sums": totals["sums"] + class_sums(features, labels, weight, num_classes),
        "counts": totals["counts"] + class_counts(labels, weight, num_classes),
    }


def client_prototypes(sums: Tensor, counts: Tensor) -> Tensor:
    """Eq. 3: c^j, the mean feature of class j (C, d); zero where the class has no samples."""
    return sums / counts.clamp_min(1)[:, None].to(sums.dtype)


def sent_prototypes(totals: State, min_count: int) -> State:
    """What a client sends: c^j, zero where it has fewer than `min_count` samples, and counts."""
    enough = totals["counts"] >= min_count
    prototypes = client_prototypes(totals["sums"], totals["counts"]) * enough[:, None]
    return {"prototypes": prototypes, "counts": totals["counts"]}


def unit(vectors: Tensor) -> Tensor:
    """Vectors scaled to length 1 along the last dimension.

    A vector shorter than the floor becomes zero, and so does its gradient: dividing by a clamped
    norm instead would let a gradient of 1e8 through.
    """
    long_enough = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True) > NORM_FLOOR
    safe = torch.where(long_enough, vectors, torch.ones_like(vectors))
    scaled = safe / torch.linalg.vector_norm(safe, dim=-1, keepdim=True)
    return torch.where(long_enough, scaled, torch.zeros_like(vectors))


def global_prototypes(
    c: Tensor,
    held: Tensor,
    counts: Tensor | None = None,
    zero_fill: bool = False,
) -> Tensor:
    """Eq. 5: g^j, the mean of its holders' prototypes c (K, C, d) -> (C, d).

    `counts` (K, C) weighs the clients by their samples of the class; `zero_fill` divides by K as
    the paper prints it, as if a missing prototype were a zero vector.
    """
    weight = held.to(c.dtype) if counts is None else counts.to(c.dtype) * held
    total = weight.sum(0)
    if zero_fill and counts is None:
        total = torch.full_like(total, len(c))
    summed = torch.einsum("kc,kcd->cd", weight, torch.where(held[..., None], c, 0))
    return summed / torch.where(total > 0, total, 1)[:, None]


def angular_similarity(g: Tensor, c: Tensor) -> Tensor:
    """Eq. 7: phi_k^j = cos(g^j, c_k^j), (K, C)."""
    return (unit(g)[None] * unit(c)).sum(-1)


def pairwise_distance(c: Tensor, metric: str) -> Tensor:
    """Table 5's point-wise metrics between c_k and c_q, (C, K, K): cosine, l1, l2 or kl."""
    rows = c.transpose(0, 1)  # (C, K, d)
    if metric == "cosine":
        return 1 - unit(rows) @ unit(rows).transpose(1, 2)
    if metric == "kl":  # KL(softmax(c_k) || softmax(c_q))
        log_p = torch.log_softmax(rows, -1)
        p = log_p.exp()
        return (p * log_p).sum(-1)[:, :, None] - p @ log_p.transpose(1, 2)
    power = {"l1": 1.0, "l2": 2.0}[metric]
    # Never by a matrix product, which for many clients would break ties.
    return torch.cdist(rows, rows, power, compute_mode="donot_use_mm_for_euclid_dist")


def neighbour_groups(distance: Tensor, held: Tensor, num_neighbours: int) -> Tensor:
    """Eq. 8: A^j(k, q) = 1 where q is k itself or one of its M nearest holders, (C, K, K) bool.

    `distance` (C, K, K) between the holders of each class; ties go to the lower client.
    """
    num_clients = distance.shape[-1]
    holds = held.T  # (C, K)
    itself = torch.eye(num_clients, dtype=torch.bool)
    other_holder = holds[:, None, :] & ~itself
    far = torch.where(other_holder, distance, torch.inf)
    nearest = torch.argsort(far, dim=-1, stable=True)[..., :num_neighbours]  # (C, K, M)
    chosen = torch.zeros_like(other_holder).scatter_(-1, nearest, True)
    return ((chosen & other_holder) | itself) & holds[:, :, None]


def relational_prototypes(c: Tensor, groups: Tensor, divisor: int | None = None) -> Tensor:
    """Eq. 9: r_k^j, the mean over k's group, (K, C, d).

    `divisor`: divide by this (the paper's M + 1) instead of the size of the group.
    """
    weight = groups.to(c.dtype)  # (C, K, K)
    size = weight.sum(-1) if divisor is None else torch.full(groups.shape[:2], float(divisor))
    summed = torch.einsum("ckq,qcd->kcd", weight, torch.where(_any_group(groups), c, 0))
    return summed / size.to(c.dtype).clamp_min(1).T[..., None]


def _any_group(groups: Tensor) -> Tensor:
    """(K, C, 1): prototypes that some group reads; the rest may hold anything, NaN included."""
    return groups.any(1).T[..., None]


def class_imbalance(counts: Tensor) -> Tensor:
    """Eq. 10: d_k, the distance of client k's class shares from the uniform ones, (K,)."""
    share = counts / counts.sum(1, keepdim=True).clamp_min(1)
    return (0.5 * (share - 1 / counts.shape[1]).square().sum(1)).sqrt()


def client_weights(counts: Tensor, all_counts: Tensor | None = None) -> Tensor:
    """Eq. 11: e_k, larger for clients with more and better balanced data, (K,).

    `all_counts`: take N and the sum of d over these clients instead of over the pool's.
    """
    known = counts if all_counts is None else all_counts
    total_imbalance = class_imbalance(known).sum()
    imbalance = class_imbalance(counts)
    imbalance = imbalance / total_imbalance if total_imbalance > 0 else torch.zeros_like(imbalance)
    t = counts.sum(1) / known.sum() - imbalance
    return torch.sigmoid(t) / torch.sigmoid(t).sum()


def consistent_prototypes(r: Tensor, held: Tensor, e: Tensor, renormalise: bool = True) -> Tensor:
    """Eq. 12: o^j, the e-weighted mean of the holders' relational prototypes, (C, d)."""
    weight = e[:, None] * held  # (K, C)
    summed = torch.einsum("kc,kcd->cd", weight, torch.where(held[..., None], r, 0))
    if not renormalise:
        return summed
    total = weight.sum(0)
    return summed / torch.where(total > 0, total, 1)[:, None]


def mean_change(old: Tensor, new: Tensor, both: Tensor) -> Tensor:
    """How far prototypes (C, d) moved, relative to their length: ||new - old|| / ||old||.

    The mean over the classes `both` (C,) that had one before and have one now; NaN without any.
    """
    length = torch.linalg.vector_norm(old, dim=-1).clamp_min(NORM_FLOOR)
    change = torch.linalg.vector_norm(new - old, dim=-1) / length
    return torch.where(both, change, 0).sum() / both.sum()
