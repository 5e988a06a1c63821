"""Long tails against the published counts, and the first images of each class."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsc.data.subset import first_of_each_class, long_tail, long_tail_counts
from fedsc.errors import FedscError
from tests.golden import GOLDEN

SIZES = {"cifar10": (5000, 10), "cifar100": (500, 100), "tinyimagenet": (500, 200)}


@pytest.mark.parametrize("name", GOLDEN["settings"]["long_tail"])
def test_long_tail_counts(name: str) -> None:
    expected = GOLDEN["settings"]["long_tail"][name]
    data, rho = name.split("_rho")
    largest, classes = SIZES[data]
    counts = long_tail_counts(largest, classes, float(rho))
    assert len(counts) == classes
    assert (counts[0], counts[-1], sum(counts)) == (
        expected["first"],
        expected["last"],
        expected["total"],
    )
    if expected["counts"]:
        assert counts == expected["counts"]
    assert counts == sorted(counts, reverse=True)

    labels = np.repeat(np.arange(classes), largest)
    kept = long_tail(labels, float(rho), seed=0)
    assert np.bincount(labels[kept], minlength=classes).tolist() == counts
    assert (np.diff(kept) > 0).all()


def test_a_long_tail_is_a_random_subset_fixed_by_its_seed() -> None:
    labels = np.repeat(np.arange(5), 100)
    one, same, other = (long_tail(labels, 10, seed) for seed in (1, 1, 2))
    assert one.tolist() == same.tolist()
    assert one.tolist() != other.tolist()
    smallest = one[labels[one] == 4] - 400
    assert len(smallest) == 10
    assert smallest.tolist() != list(range(10))  # not simply the first


def test_a_ratio_of_one_keeps_everything() -> None:
    labels = np.repeat(np.arange(4), 7)
    assert long_tail(labels, 1, seed=0).tolist() == list(range(28))
    assert long_tail_counts(9, 1, 50.0) == [9]


@pytest.mark.parametrize("rho", [0.0, -3.0, 0.99, float("nan"), float("inf")])
def test_ratios_out_of_range(rho: float) -> None:
    with pytest.raises(FedscError, match=r"rho = .*at least 1"):
        long_tail(np.repeat(np.arange(4), 7), rho, seed=0)


def test_a_ratio_that_empties_a_class() -> None:
    with pytest.raises(FedscError, match=r"rho = 100 .*largest class has 7; take a smaller rho"):
        long_tail(np.repeat(np.arange(4), 7), 100, seed=0)


def test_first_of_each_class_by_hand() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 0, 1, 0, 0])  # 7 and 3
    assert first_of_each_class(labels, 10).tolist() == list(range(10))
    # 3.5 and 1.5: both round down, the fifth goes to the lower class of two equal remainders.
    assert first_of_each_class(labels, 5).tolist() == [0, 1, 2, 3, 4]
    # 2.8 and 1.2
    assert first_of_each_class(labels, 4).tolist() == [0, 1, 2, 4]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.data())
def test_first_of_each_class_keeps_the_proportions(values: list[int], data: st.DataObject) -> None:
    labels = np.array(values, dtype=np.int64)
    limit = data.draw(st.integers(1, len(values)))
    kept = first_of_each_class(labels, limit)
    assert len(kept) == limit
    assert (np.diff(kept) > 0).all()
    for j in range(5):
        members = np.flatnonzero(labels == j)
        mine = kept[labels[kept] == j]
        assert mine.tolist() == members[: len(mine)].tolist()
        assert abs(len(mine) - limit * len(members) / len(labels)) < 1


@pytest.mark.parametrize("limit", [0, -1, 11])
def test_limits_out_of_range(limit: int) -> None:
    with pytest.raises(FedscError, match=rf"{limit} .*1 to 10"):
        first_of_each_class(np.zeros(10, np.int64), limit)
