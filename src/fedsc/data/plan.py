"""The plan of a round: who takes part, in which order images come, how each is cropped and flipped.

Drawn before training and handed over as data. (seed, round, client) fixes it, for every engine and
every method alike, so methods see the same batches and engines can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .dataset import Augment
from .randomness import generator

CROP_PADDING = 4


@dataclass(frozen=True)
class ClientPlan:
    """A client's batches: E epochs of S steps of B images.

    All batches of a client have one size, min(batch size, n_k): the last of an epoch is filled up
    from the start of that epoch's order, and those extra samples have weight 0.
    """

    order: Tensor  # (E, S, B) int64: positions among the client's own images
    weight: Tensor  # (S, B) float32
    shift: Tensor  # (E, S, B, 2) int64: rows and columns of the crop, 0 to 2 * CROP_PADDING
    flip: Tensor  # (E, S, B) bool

    def to(self, device: torch.device) -> ClientPlan:
        moved = (part.to(device) for part in (self.order, self.weight, self.shift, self.flip))
        return ClientPlan(*moved)


def cohort(seed: int, round: int, num_clients: int, size: int) -> list[int]:
    """The clients of a round, in the order of their ids."""
    if size == num_clients:
        return list(range(num_clients))
    rng = generator("cohort", seed, round)
    return sorted(rng.choice(num_clients, size, replace=False).tolist())


def cohort_size(num_clients: int, participation: float) -> int:
    return max(1, round(num_clients * participation))


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    return -(-num_samples // batch_size)


def client_plan(
    seed: int,
    round: int,
    client: int,
    num_samples: int,
    epochs: int,
    batch_size: int,
    augment: Augment = "crop-flip",
) -> ClientPlan:
    """The batches of one client in one round.

    With `crop-flip-batch` a batch shares one crop and one flip, as in FedSC's published code; with
    `none` nothing is drawn.
    """
    size = min(batch_size, num_samples)
    steps = steps_per_epoch(num_samples, size)
    rng = generator("batches", seed, round, client)
    order = rng.permuted(np.tile(np.arange(num_samples), (epochs, 1)), axis=1)
    order = np.concatenate([order, order[:, : steps * size - num_samples]], axis=1)
    weight = (np.arange(steps * size) < num_samples).astype(np.float32)

    shape = (epochs, steps, size)
    shift, flip = np.full((*shape, 2), CROP_PADDING), np.zeros(shape, dtype=bool)
    if augment != "none":
        rng = generator("augmentation", seed, round, client)
        shift = rng.integers(0, 2 * CROP_PADDING + 1, (*shape, 2))
        flip = rng.integers(0, 2, shape).astype(bool)
    if augment == "crop-flip-batch":
        shift, flip = np.repeat(shift[:, :, :1], size, 2), np.repeat(flip[:, :, :1], size, 2)
    return ClientPlan(
        order=torch.from_numpy(order.reshape(shape)),
        weight=torch.from_numpy(weight.reshape(steps, size)),
        shift=torch.from_numpy(shift),
        flip=torch.from_numpy(flip),
    )
