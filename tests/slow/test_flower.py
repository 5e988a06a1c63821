"""Real simulations of every method, and a real deployment that loses a node and its server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsc import METHODS, load_dataset
from fedsc.report.runs import read_run

from ..flower.processes import Deployment, Simulation, until
from ..flower.test_flower import QUICK, assert_same_run, in_one_process

pytestmark = pytest.mark.slow
PATIENT: dict[str, Any] = {**QUICK, "start-timeout": 120}


CONVOLUTION: dict[str, Any] = {"method": "fedsc", "model": "cnn", "train-limit": 100}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[Path]]:
    """A folder with simulated runs, made while the deployment waits for Flower."""
    folder = tmp_path_factory.mktemp("simulated")

    def simulate() -> Path:
        with Simulation(folder) as simulation:
            every = {**PATIENT, "method": "; ".join(METHODS), "out": str(folder / "mlp")}
            simulation.train(4, every)
            simulation.train(4, {**PATIENT, **CONVOLUTION, "out": str(folder / "cnn")})
        return folder

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(simulate)


def test_a_deployment_with_tls_and_known_nodes(simulated: Future[Path], tmp_path: Path) -> None:
    data = digits_as_npz(tmp_path / "digits.npz")  # quicker to read, in a process per message
    config = {**PATIENT, "dataset": data, "clients": 3, "min-count": 5}
    with Deployment(tmp_path, nodes=3) as deployment:
        start_stranger(deployment)

        # The server is killed in its second round: a new run goes on after the first.
        whole = {**config, "method": "fedsc", "out": str(tmp_path / "whole")}
        deployment.train(whole, wait=False)
        folder = tmp_path / "whole" / "fedsc_min_count=5-seed0"
        until(lambda: rounds_of(folder) >= 1, "the first round")
        deployment.kill("superlink")
        finished = rounds_of(folder)
        assert finished < 3
        before = (folder / "metrics.jsonl").read_text().splitlines()[:1]
        deployment.start_superlink()
        deployment.train({**whole, "resume": True})
        assert (folder / "metrics.jsonl").read_text().splitlines()[:1] == before
        sequential = in_one_process(
            tmp_path / "sequential", "fedsc,min_count=5", dataset=data, clients=3
        )
        assert_same_run(folder, sequential)
        assert_refused(deployment)

        # A node dies while it trains: Flower notices within a minute, and the others go on.
        trained = deployment.log("node-2").count("Receiving: train message")
        dying = {**config, "method": "fedavg", "rounds": 2, "out": str(tmp_path / "dying")}
        deployment.train(dying, wait=False)
        until(
            lambda: deployment.log("node-2").count("Receiving: train message") > trained,
            "node 2 to train",
        )
        deployment.kill("node-2")
        folder = tmp_path / "dying" / "fedavg-seed0"
        until(lambda: (folder / "summary.json").exists(), "the run without node 2")
    assert [record["left_out"] for record in read_run(folder).records] == [[2], [2]]


def test_simulations_of_every_method_and_a_convolutional_network(
    simulated: Future[Path], tmp_path: Path
) -> None:
    folder = simulated.result()
    found = {}
    for run in (folder / "mlp").iterdir():
        found[json.loads((run / "spec.json").read_text())["method"]["name"]] = run
    assert found.keys() == METHODS.keys()
    for name, run in found.items():
        assert_same_run(run, in_one_process(tmp_path / name, name))
    (run,) = (folder / "cnn").iterdir()
    assert_same_run(run, in_one_process(tmp_path / "cnn", **CONVOLUTION), rtol=1e-3)


def digits_as_npz(path: Path) -> str:
    digits = load_dataset("digits")
    np.savez(
        path,
        x_train=digits.train_images[:, 0].numpy(),
        y_train=digits.train_labels.numpy(),
        x_test=digits.test_images[:, 0].numpy(),
        y_test=digits.test_labels.numpy(),
    )
    return f"npz:{path}"


def start_stranger(deployment: Deployment) -> None:
    """A fourth node whose key the server was not told of."""
    folder = deployment.folder / "stranger"
    deployment.set_up(folder, 4)
    shutil.copy(deployment.federation / "ca.crt", folder / "node-3" / "ca.crt")
    deployment.start("stranger", str(folder / "node-3" / "start.sh"))


def assert_refused(deployment: Deployment) -> None:
    stranger = deployment.running.pop("stranger")
    assert stranger.wait(timeout=60) != 0
    assert "Failed to activate SuperNode" in deployment.log("stranger")


def rounds_of(folder: Path) -> int:
    try:
        return len((folder / "metrics.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0
