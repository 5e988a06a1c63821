"""Every random draw of a run comes from here: a generator per purpose, never a shared stream.

Two things that must not influence each other (the partition, a client's batch order in round 7)
have generators of their own, fixed by the seed and by what they are for. So any part of a run can
be drawn alone, in any order and on any machine, and comes out the same.
"""

from __future__ import annotations

import numpy as np

# A new purpose goes to the end: its place in this list is part of its seed.
PURPOSES = (
    "long_tail",
    "partition",
    "cohort",
    "batches",
    "augmentation",
    "episodes",
    "model",
    "holdout",
    "layers",
    "server",
    "validation",
    "figures",
    "attackers",
    "faults",
    "private_batches",
    "gradient_noise",
    "prototype_noise",
    "update_noise",
)


def generator(purpose: str, *keys: int) -> np.random.Generator:
    """The generator for a purpose, e.g. `generator("batches", seed, round, client)`."""
    return np.random.Generator(np.random.PCG64([PURPOSES.index(purpose), *keys]))
