"""Aggregation that a minority of wrong clients cannot carry away: medians, trimmed means, bounds.

Weights: K models, each a dict of tensors. Prototypes: c (K, C, d) of K clients and C classes, with
`held` (K, C) as in `prototypes.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .state import State

# Not trained but measured: a step towards them means nothing, and a variance must stay positive.
RUNNING_STATISTICS = ("running_mean", "running_var")
LONGEST = 2.0  # a prototype may be this many times as long as is usual among the clients
FEWEST_HOLDERS = 3  # of a class: a median of two has no majority


def coordinate_median(values: Tensor) -> Tensor:
    """The median over the first dimension; the mean of the middle two of an even number.

    Whole numbers cannot be averaged: of them, the lower of the two.
    """
    ordered = values.sort(0).values
    lower, upper = ordered[(len(values) - 1) // 2], ordered[len(values) // 2]
    return torch.lerp(lower, upper, 0.5) if values.is_floating_point() else lower


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """The mean over the first dimension without the `trim` lowest and highest shares of it.

    The number left out on each side is rounded up, and at least one value is kept.
    """
    if not values.is_floating_point():
        return coordinate_median(values)
    cut = min(math.ceil(trim * len(values) - 1e-9), (len(values) - 1) // 2)
    return values.sort(0).values[cut : len(values) - cut].mean(0)


def combine(models: list[State], rule: Callable[[Tensor], Tensor]) -> State:
    """One model of many: each tensor by a rule over the clients."""
    return {name: rule(torch.stack([model[name] for model in models])) for name in models[0]}


def is_weight(name: str, value: Tensor) -> bool:
    """Whether a tensor of a model is neither a statistic nor a counter of BatchNorm."""
    return value.is_floating_point() and not name.endswith(RUNNING_STATISTICS)


def update_norm(model: State, received: State) -> float:
    """||w_k - w|| over all weights, without BatchNorm's statistics and counters."""
    squares = [
        (value.double() - received[name].double()).square().sum()
        for name, value in model.items()
        if is_weight(name, value)
    ]
    return math.sqrt(float(torch.stack(squares).sum()))


def clip_updates(models: list[State], received: State) -> list[State]:
    """The models with no update w_k - w longer than the median of them all.

    BatchNorm's statistics and counters are replaced by their medians over the clients.
    """
    norms = [update_norm(model, received) for model in models]
    longest = float(coordinate_median(torch.tensor(norms, dtype=torch.float64)))
    measured = [name for name, value in received.items() if not is_weight(name, value)]
    medians = {
        name: coordinate_median(torch.stack([model[name] for model in models])) for name in measured
    }
    return [
        {**(model if norm <= longest else scale_update(model, received, longest / norm)), **medians}
        for model, norm in zip(models, norms, strict=True)
    ]


def scale_update(model: State, received: State, scale: float) -> State:
    """w + scale (w_k - w) for the weights; BatchNorm's statistics and counters stay as they are."""
    return {
        name: torch.lerp(received[name], value, scale) if is_weight(name, value) else value
        for name, value in model.items()
    }


def bounded_prototypes(c: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """Prototypes (K, C, d) that no single client can throw far, and which of them moved (K, C).

    First, none is longer than twice the usual length: the median over clients of the median over
    their classes. Then, in a class that at least three clients hold, none is further from the
    holders' coordinate median than the holders' median distance to it. So while fewer than half of
    a class's holders are wrong, all its prototypes lie in a ball that the others fix; with one or
    two holders only their length is bounded.
    """
    c = torch.where(held[..., None], c.double(), 0)
    length = torch.linalg.vector_norm(c, dim=-1)  # (K, C)
    holds = held.any(1)
    own_length = median_where(length.T, held.T)  # (K,)
    usual = median_where(own_length, holds)
    longest = LONGEST * usual
    shorter = torch.where(length > longest, longest / length, 1)
    bounded = c * shorter[..., None]

    middle = median_where(bounded, held[..., None].expand_as(c))  # (C, d)
    distance = torch.linalg.vector_norm(bounded - middle, dim=-1)
    reach = median_where(distance, held)  # (C,)
    pulled = (distance > reach) & (held.sum(0) >= FEWEST_HOLDERS)
    nearer = torch.where(pulled, reach / distance, 1)
    bounded = torch.where(
        pulled[..., None], middle + nearer[..., None] * (bounded - middle), bounded
    )
    return bounded, held & ((shorter < 1) | pulled)


def bounded_in(server: State) -> dict[str, float]:
    """For the record of a round: how many prototypes were moved, where the rule is in force."""
    return {"prototypes_bounded": float(server["bounded"])} if "bounded" in server else {}


def median_where(values: Tensor, there: Tensor) -> Tensor:
    """The median over the first dimension of the values that are there; 0 where none is."""
    ordered = torch.where(there, values, torch.inf).sort(0).values
    number = there.sum(0, keepdim=True)
    lower = ordered.gather(0, ((number - 1) // 2).clamp_min(0))
    upper = ordered.gather(0, (number // 2).clamp_max(len(values) - 1))
    return torch.where(number > 0, (lower + upper) / 2, 0)[0]
