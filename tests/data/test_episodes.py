"""Few-shot episodes: their draw, and accuracies that are known beforehand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsc.data.episodes import Episodes, draw_episodes, episode_accuracies
from fedsc.errors import FedscError


def labels(classes: int = 8, each: int = 25) -> Tensor:
    return torch.arange(classes).repeat(each)


def test_shapes_and_classes_of_episodes() -> None:
    y = labels()
    episodes = draw_episodes(y, 30, ways=5, shots=4, queries=6)
    assert episodes.support.shape == (30, 5, 4)
    assert episodes.query.shape == (30, 5, 6)
    for support, query in zip(episodes.support, episodes.query, strict=True):
        classes = y[support][:, 0]
        assert len(classes.unique()) == 5
        assert (y[support] == classes[:, None]).all()
        assert (y[query] == classes[:, None]).all()
        used = torch.cat([support.flatten(), query.flatten()])
        assert len(used.unique()) == len(used)  # no image twice, none in support and query


def test_episodes_are_always_the_same_and_differ_from_each_other() -> None:
    one, other = (draw_episodes(labels(), 10, 5, 5, 5) for _ in range(2))
    assert torch.equal(one.support, other.support)
    assert torch.equal(one.query, other.query)
    assert len({tuple(s.flatten().tolist()) for s in one.support}) == 10


def test_perfect_features_are_always_right() -> None:
    y = labels()
    features = torch.nn.functional.one_hot(y).float()
    accuracy = episode_accuracies(features, draw_episodes(y, 20, 5, 5, 15))
    assert accuracy.tolist() == [1.0] * 20


def test_features_that_say_nothing_are_right_by_chance() -> None:
    y = labels(classes=8, each=200)
    features = torch.randn(len(y), 16, generator=torch.Generator().manual_seed(0))
    accuracy = episode_accuracies(features, draw_episodes(y, 200, 4, 5, 15))
    # 12,000 queries: the standard error of one in four is 0.004
    assert float(accuracy.mean()) == pytest.approx(0.25, abs=0.02)


def test_one_episode_by_hand() -> None:
    """Two classes on a line, their means at 0 and 10, three queries each."""
    features = torch.tensor(
        [[-1.0], [1.0], [8.0], [12.0], [1.0], [4.0], [6.0], [9.0], [2.0], [11.0]]
    )
    episodes = Episodes(
        support=torch.tensor([[[0, 1], [2, 3]]]), query=torch.tensor([[[4, 5, 6], [7, 8, 9]]])
    )
    # 1 and 4 are nearer to 0, 6 is not; 9 and 11 are nearer to 10, 2 is not.
    assert float(episode_accuracies(features, episodes)[0]) == pytest.approx(4 / 6)


@pytest.mark.parametrize(
    ("ways", "shots", "queries", "words"),
    [
        (9, 5, 5, ["episodes of 9 classes", "8 classes"]),
        (5, 20, 6, ["20 + 6 images", "smallest of 25"]),
    ],
)
def test_episodes_that_cannot_be_drawn(
    ways: int, shots: int, queries: int, words: list[str]
) -> None:
    with pytest.raises(FedscError) as raised:
        draw_episodes(labels(), 3, ways, shots, queries)
    for word in words:
        assert word in str(raised.value)


def test_all_of_a_class_can_be_used() -> None:
    assert draw_episodes(labels(), 3, 8, 10, 15).query.shape == (3, 8, 15)
