"""What docs/robustness.md says of poisoned prototypes."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

import fedsc

pytestmark = pytest.mark.slow


def accuracy(method: str, **attack: Any) -> float:
    """In %, the mean of three seeds, in the setting of benchmarks/attacks.py."""
    common: dict[str, Any] = {"rounds": 20, "epochs": 5, "lr": 0.05}
    runs = (fedsc.run("digits", method, seed=seed, **common, **attack) for seed in range(3))
    return 100 * statistics.mean(run.accuracy for run in runs)


def test_bounded_prototypes_lose_under_three_points_where_plain_ones_lose_more() -> None:
    """At full weight; by default RPCL weighs a tenth, and poisoned prototypes do little harm."""
    attack = {"attack": "poisoned-prototypes", "attackers": 0.3}
    plain_loss = accuracy("fedsc,full") - accuracy("fedsc,full", **attack)
    bounded = "fedsc,full,robust_prototypes=true"
    assert accuracy(bounded) - accuracy(bounded, **attack) < 3 < plain_loss
