"""Twenty-one kills of each method: seven in each engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.test_killed_runs import METHODS, SETTINGS, Uncut, kill_and_resume

pytestmark = pytest.mark.slow
KILLS = 7


@pytest.mark.parametrize("engine", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_killed_again_and_again(method: str, engine: str, tmp_path: Path) -> None:
    uncut, rng = Uncut(tmp_path), random.Random(f"{method} {engine}")
    kill_and_resume(method, engine, KILLS, uncut, tmp_path / "out", rng)
