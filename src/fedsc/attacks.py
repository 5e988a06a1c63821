"""Clients that do harm, to test robust aggregation with. Only in the simulator, only when asked.

label-flip            trains on class C - 1 - j in place of j
sign-flip             sends its update w_k - w with the opposite sign
scaled-update         sends ten times its update
poisoned-prototypes   sends -10 c_k^j in place of its prototypes c_k^j; its weights are honest
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from .data.randomness import generator
from .method import Upload
from .robust import scale_update
from .state import State

SCALE = 10.0


def choose_attackers(seed: int, num_clients: int, share: float) -> list[int]:
    """Which clients attack, in the order of their ids; a larger share adds to a smaller one."""
    number = max(1, round(share * num_clients)) if share else 0
    order = generator("attackers", seed).permutation(num_clients)
    return sorted(order[:number].tolist())


def flip_labels(labels: Tensor, num_classes: int) -> Tensor:
    return num_classes - 1 - labels


def attacked(attack: str, upload: Upload, received: State, prototypes: str | None) -> Upload:
    """What an attacker sends in place of an honest upload; `received` is the model w it got.

    `prototypes`: where in the upload's extra part they are.
    """
    if attack == "sign-flip":
        return dataclasses.replace(upload, model=scale_update(upload.model, received, -1.0))
    if attack == "scaled-update":
        return dataclasses.replace(upload, model=scale_update(upload.model, received, SCALE))
    if attack == "poisoned-prototypes" and prototypes is not None:
        poisoned = -SCALE * upload.extra[prototypes]
        return dataclasses.replace(upload, extra={**upload.extra, prototypes: poisoned})
    return upload  # label-flip: the labels it trained on were wrong
