"""Few-shot evaluation: episodes of a few new classes, told apart by their nearest mean.

The FC100 protocol: train with cross-entropy on the training classes, drop the classifier, then draw
episodes of 5 classes with 5 support and 15 query images each, and give each query the class of the
nearest mean of support features (Euclidean, ProtoNet).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import FedscError
from .randomness import generator

EPISODE_SEED = 0  # the same episodes for every run, so that runs can be compared


@dataclass(frozen=True)
class Episodes:
    """Indices into the test images. T episodes."""

    support: Tensor  # (T, ways, shots)
    query: Tensor  # (T, ways, queries)


def draw_episodes(
    labels: Tensor, num_episodes: int, ways: int, shots: int, queries: int
) -> Episodes:
    labels_array = labels.cpu().numpy()
    members = [np.flatnonzero(labels_array == j) for j in range(labels_array.max() + 1)]
    smallest = min(len(m) for m in members)
    if ways > len(members) or shots + queries > smallest:
        raise FedscError(
            f"episodes of {ways} classes with {shots} + {queries} images, but the test set has "
            f"{len(members)} classes, the smallest of {smallest} images"
        )
    rng = generator("episodes", EPISODE_SEED)
    picks = np.empty((num_episodes, ways, shots + queries), dtype=np.int64)
    for episode in range(num_episodes):
        for way, label in enumerate(rng.choice(len(members), ways, replace=False)):
            picks[episode, way] = rng.choice(members[label], shots + queries, replace=False)
    drawn = torch.from_numpy(picks)
    return Episodes(drawn[:, :, :shots], drawn[:, :, shots:])


def episode_accuracies(features: Tensor, episodes: Episodes) -> Tensor:
    """The accuracy of each episode, (T,), from the features (N, d) of the test images."""
    support = features[episodes.support.to(features.device)].mean(2)  # (T, ways, d)
    query = features[episodes.query.to(features.device)]  # (T, ways, queries, d)
    distance = torch.cdist(query.flatten(1, 2), support)  # (T, ways * queries, ways)
    guess = distance.argmin(-1).view(query.shape[:3])
    truth = torch.arange(query.shape[1], device=features.device)[:, None]
    return (guess == truth).float().mean((1, 2))
