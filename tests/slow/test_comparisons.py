"""Whole comparisons, as a person would run them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fedsc import METHODS
from fedsc.data.sources import SOURCES, default_data_dir

pytestmark = pytest.mark.slow


def run_command(*options: str) -> tuple[str, float]:
    """What it prints, and the seconds of processor time it takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "fedsc", *options],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "120"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_all_methods_on_digits_in_under_four_minutes(tmp_path: Path) -> None:
    methods = [word for name in METHODS for word in ("--method", name)]
    table, seconds = run_command(
        "run", *methods, "--rounds", "20", "--epochs", "2", "--out", str(tmp_path / "all")
    )
    assert seconds < 2 * 240  # of two cores
    for name in METHODS:
        (row,) = [line for line in table.splitlines() if line.split()[:1] == [name]]
        assert "×" in row
    assert "MB" in table


def test_fedsc_is_ahead_of_fedavg_in_the_demonstration(tmp_path: Path) -> None:
    """The sentence in the README; mean of the last round over its three seeds."""
    config = Path(__file__).parents[2] / "examples" / "demo.toml"
    run_command("run", "--config", str(config), "--out", str(tmp_path / "demo"), "--quiet")
    rows = (tmp_path / "demo" / "summary.md").read_text().splitlines()[2:]
    last = {row.split("|")[1].strip(): float(row.split("|")[2].split("±")[0]) for row in rows}
    assert last["fedsc"] > last["fedavg"] + 0.5


@pytest.mark.skipif(
    SOURCES["cifar10"].find(default_data_dir()) is None, reason="CIFAR-10 is not on this machine"
)
def test_a_round_on_real_cifar10_runs_on_a_cpu(tmp_path: Path) -> None:
    _, seconds = run_command(
        *("run", "--dataset", "cifar10", "--train-limit", "2000", "--clients", "10"),
        *("--partition", "nid1:0.2", "--epochs", "1", "--rounds", "1"),
        *("--method", "fedavg", "--out", str(tmp_path / "cifar")),
    )
    assert seconds < 2 * 240
