"""Statistics over seeds, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsc.report.runs import RunData
from fedsc.report.statistics import (
    bytes_to,
    mean_and_spread,
    paired_by_seed,
    paired_p_value,
    rounds_to,
    seconds_to,
)


def run_with(accuracies: list[float], seed: int = 0) -> RunData:
    records = [
        {
            "round": number + 1,
            "accuracy": accuracy,
            "bytes_up": 10,
            "bytes_down": 1,
            "timing": {"seconds": 0.5},
        }
        for number, accuracy in enumerate(accuracies)
    ]
    return RunData(Path("run"), {"seed": seed, "label": "fedavg"}, records, True)


def test_the_first_round_that_reaches_an_accuracy_counts() -> None:
    run = run_with([0.1, 0.4, 0.3, 0.6])
    assert rounds_to(run, 0.4) == 2
    assert bytes_to(run, 0.4) == 22
    assert seconds_to(run, 0.6) == pytest.approx(2.0)


def test_an_accuracy_that_is_never_reached_has_no_round() -> None:
    run = run_with([0.1, 0.4])
    assert rounds_to(run, 0.5) is None
    assert bytes_to(run, 0.5) is None
    assert seconds_to(run, 0.5) is None


def test_spread_is_the_sample_standard_deviation() -> None:
    assert mean_and_spread([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert mean_and_spread([2.5]) == (2.5, None)


def test_the_t_test_pairs_by_seed() -> None:
    """Differences 1, 2, 3: t = 2 / (1 / sqrt 3) = 3.4641, two degrees of freedom.

    There the distribution function has the closed form 1/2 + t / (2 sqrt(2 + t²)), so
    p = 1 - t / sqrt(2 + t²) = 1 - 3.4641 / sqrt(14) = 0.07418.
    """
    first = [run_with([value], seed) for seed, value in enumerate((5.0, 7.0, 9.0))]
    second = [run_with([value], seed) for seed, value in enumerate((4.0, 5.0, 6.0))]
    assert paired_p_value(first, second) == pytest.approx(0.07418, abs=1e-5)
    assert paired_p_value(first, second[::-1]) == pytest.approx(0.07418, abs=1e-5)


def test_pairs_are_of_the_seeds_that_both_have() -> None:
    first = [run_with([0.1, 0.5], 0), run_with([0.1, 0.6], 2)]
    second = [run_with([0.7], 2), run_with([0.8], 1)]
    assert paired_by_seed(first, second) == [(0.6, 0.7)]
    assert paired_by_seed(first, second[1:]) == []


def test_without_two_shared_seeds_or_any_variation_there_is_no_p_value() -> None:
    one = [run_with([0.5], 0), run_with([0.6], 1)]
    assert paired_p_value(one, [run_with([0.4], 0)]) is None
    assert paired_p_value(one, [run_with([0.4], 0), run_with([0.5], 1)]) is None
