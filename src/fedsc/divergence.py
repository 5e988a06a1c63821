"""Which models, one per client, lie closest together: the search behind FedCDA's server."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .state import State

PIECE = 1 << 20  # floats of each model at a time


def choose(
    candidates: list[range],
    costs: Tensor,
    gram: Tensor,
    with_others: Tensor,
    others: float,
    cost_of_others: float,
    number_of_others: int,
    lipschitz: float,
) -> tuple[list[int], list[float]]:
    """The rows, one per client, that minimise J; and J of every choice, newest models first.

    Rows are candidate models: `costs` F + L/2 ||w||^2, `gram` their inner products, `with_others`
    those with the sum of the other clients' models, `others` the squared norm of that sum.
    """
    choices = list(itertools.product(*(reversed(rows) for rows in candidates)))
    picked = torch.tensor(choices, device=gram.device)  # (number of choices, clients)
    size = number_of_others + picked.shape[1]
    squared = (
        others
        + 2 * with_others[picked].sum(1)
        + gram[picked[:, :, None], picked[:, None, :]].sum((1, 2))
    )
    cost = (cost_of_others + costs[picked].sum(1)) / size
    objective = cost - lipschitz / 2 * squared / size**2
    best = int(objective.argmin())  # ties: the first, which is the newest
    return list(choices[best]), objective.tolist()


def inner_products(
    models: list[State], others: State, trainable: State
) -> tuple[Tensor, Tensor, float]:
    """Of the models with each other, of each with the sum `others`, and of that with itself.

    Trainable tensors only, a piece at a time in float64, so that memory stays small.
    """
    gram: Tensor | float = 0.0
    with_others: Tensor | float = 0.0
    squared = 0.0
    for name in sorted(trainable):  # a state read from disk comes in another order
        other = others[name].flatten()
        columns = [model[name].to(other.device).flatten() for model in models]
        for start in range(0, len(other), PIECE):
            piece = slice(start, start + PIECE)
            rows = torch.stack([column[piece].double() for column in columns])
            gram = gram + rows @ rows.T
            with_others = with_others + rows @ other[piece]
            squared += float(other[piece] @ other[piece])
    assert isinstance(gram, Tensor)
    assert isinstance(with_others, Tensor)
    return gram, with_others, squared
