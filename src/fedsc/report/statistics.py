"""What can be said of a group of runs that differ in their seed only."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from .runs import RunData

ACCURACY_LEVELS = (0.2, 0.4, 0.6, 0.8)  # of the paper's Table 3


def mean_and_spread(values: list[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; one value has no spread."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def rounds_to(run: RunData, accuracy: float) -> int | None:
    """The first round after which the test accuracy (a share, 0 to 1) is reached, if any."""
    reached = (record["round"] for record in run.records if record["accuracy"] >= accuracy)
    return next(reached, None)


def bytes_to(run: RunData, accuracy: float) -> int | None:
    """Bytes that server and clients exchanged until the accuracy was reached."""
    return _sum_to(run, accuracy, lambda record: record["bytes_up"] + record["bytes_down"])


def seconds_to(run: RunData, accuracy: float) -> float | None:
    """Seconds of computing until the accuracy was reached; to compare runs of one machine only."""
    return _sum_to(run, accuracy, lambda record: record["timing"]["seconds"])


def paired_by_seed(first: list[RunData], second: list[RunData]) -> list[tuple[float, float]]:
    """The last accuracies of both, of the seeds that both have."""
    mine, theirs = ({run.spec["seed"]: run.summary["last"] for run in x} for x in (first, second))
    return [(mine[seed], theirs[seed]) for seed in sorted(mine.keys() & theirs.keys())]


def paired_p_value(first: list[RunData], second: list[RunData]) -> float | None:
    """Two-sided paired t-test on the last accuracies of the seeds that both groups have.

    None where fewer than two seeds are shared, or where all differences are equal.
    """
    pairs = paired_by_seed(first, second)
    if len(pairs) < 2 or len({round(a - b, 12) for a, b in pairs}) < 2:
        return None
    from scipy.stats import ttest_rel  # takes a second to import

    return float(ttest_rel(*zip(*pairs, strict=True)).pvalue)


def _sum_to(run: RunData, accuracy: float, value_of: Callable[[dict[str, Any]], Any]) -> Any:
    last = rounds_to(run, accuracy)
    if last is None:
        return None
    return sum(value_of(record) for record in run.records if record["round"] <= last)
