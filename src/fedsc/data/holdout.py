"""A test set for data that came without one: a fifth of every class, drawn with the seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import FedscError
from .randomness import generator

TEST_SHARE = 0.2


def stratified_holdout(
    labels: npt.NDArray[np.int64], classes: Sequence[str], seed: int, where: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Indices of the train and of the test images, each in their original order."""
    rng = generator("holdout", seed)
    in_test = np.zeros(len(labels), dtype=bool)
    for label, name in enumerate(classes):
        members = np.flatnonzero(labels == label)
        if len(members) < 2:
            raise FedscError(
                f"{where}: class '{name}' has {len(members)} image(s); at least 2 are needed, "
                "one to train on and one to test on"
            )
        num_test = max(1, round(TEST_SHARE * len(members)))
        in_test[rng.permutation(members)[:num_test]] = True
    return np.flatnonzero(~in_test), np.flatnonzero(in_test)
