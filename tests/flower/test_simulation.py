"""One real simulation, by `flwr run`, a SuperLink and Ray; the others are in tests/slow."""

from __future__ import annotations

from pathlib import Path

from .processes import Simulation
from .test_flower import QUICK, assert_same_run, in_one_process


def test_a_simulation_gives_the_sequential_engines_weights(tmp_path: Path) -> None:
    config = {**QUICK, "method": "fedsc", "out": str(tmp_path / "runs"), "start-timeout": 120}
    with Simulation(tmp_path) as simulation:
        log = simulation.train(4, config)
    assert "round 3/3" in log
    (folder,) = (tmp_path / "runs").iterdir()
    assert_same_run(folder, in_one_process(tmp_path / "sequential", "fedsc"))
