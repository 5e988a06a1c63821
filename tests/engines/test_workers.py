"""Clients in worker processes against one after another: the same bits, whoever is done first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedsc
from fedsc import FedscError, Outputs, Run
from fedsc.engines.workers import WorkerEngine
from fedsc.models import MLP

TEXTS = [*fedsc.METHODS, "moon,head=true", "fedproto,evaluation=ensemble", "fedsc,init_protos=true"]


@pytest.fixture(autouse=True)
def two_cores() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def run(method: str, model: Any = "mlp", **changes: Any) -> Run:
    common: dict[str, Any] = {"rounds": 3, "epochs": 1, "train_limit": 400, "participation": 0.6}
    return fedsc.run("digits", method, model, **{**common, **changes})


def assert_same_bits(method: str, model: Any = "mlp", **changes: Any) -> None:
    in_workers = run(method, model, engine="workers", threads=2, **changes)
    one_by_one = run(method, model, engine="sequential", threads=1, **changes)
    for name, tensor in one_by_one.server["model"].items():
        assert torch.equal(tensor, in_workers.server["model"][name])
    for ours, theirs in zip(in_workers.records, one_by_one.records, strict=True):
        assert ours["train_loss"] == theirs["train_loss"]


@pytest.mark.parametrize("text", TEXTS)
def test_every_method_gives_the_same_bits_as_one_after_another(text: str) -> None:
    assert_same_bits(text)


class Dropping(nn.Module):
    """With dropout, which draws from the process's own generator."""

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5))
        self.classifier = nn.Linear(16, num_classes)

    def forward(self, images: Tensor) -> Outputs:
        features = self.body(images)
        return Outputs(features, self.classifier(features))


def test_random_layers_draw_the_same_in_every_worker() -> None:
    assert_same_bits("fedavg", Dropping)


def test_a_memory_larger_than_was_foreseen_still_travels() -> None:
    class Hoarder(fedsc.FedAvg):
        def init_client(self, task: fedsc.Task) -> fedsc.State:
            return {"ballast": torch.zeros(400_000), "visits": torch.zeros(())}

        def remember(self, result: fedsc.LocalResult) -> fedsc.State:
            memory = result.client.memory
            return {"ballast": memory["ballast"] + 1, "visits": memory["visits"] + 1}

    spec = fedsc.RunSpec(engine="workers", rounds=2, epochs=1, train_limit=200)
    data = fedsc.load_dataset("digits")
    federation = fedsc.Federation(spec, data, Hoarder(), MLP(data.image_shape, 10))
    list(federation.rounds())
    for client in range(10):
        assert torch.equal(federation.memories[client]["ballast"], torch.full((400_000,), 2.0))


def federation_of(**options: Any) -> fedsc.Federation:
    data = fedsc.load_dataset("digits")
    spec = fedsc.RunSpec(train_limit=400, epochs=1, **options)
    return fedsc.Federation(spec, data, fedsc.FedAvg(), MLP(data.image_shape, 10))


def test_workers_are_taken_where_there_are_cores_and_clients_for_them() -> None:
    assert federation_of().engine_name == "workers"
    assert federation_of(participation=0.1).engine_name == "sequential"
    torch.set_num_threads(1)
    assert federation_of().engine_name == "sequential"


class Failing(fedsc.FedAvg):
    def loss(self, batch: fedsc.Batch) -> dict[str, Tensor]:
        raise FedscError("no loss today")


def test_a_client_that_fails_stops_the_round_with_its_own_error() -> None:
    with pytest.raises(FedscError, match="no loss today"):
        fedsc.run("digits", Failing(), rounds=1, epochs=1, engine="workers")
    assert torch.get_num_threads() == 2


class Broken(fedsc.FedAvg):
    def loss(self, batch: fedsc.Batch) -> dict[str, Tensor]:
        return {"ce": batch.student.logits.nonsense}  # type: ignore[attr-defined]


def test_a_mistake_in_a_method_is_shown_with_its_line() -> None:
    with pytest.raises(AttributeError) as error:
        fedsc.run("digits", Broken(), rounds=1, epochs=1, engine="workers")
    assert "batch.student.logits.nonsense" in error.value.__notes__[0]


def test_more_cores_than_clients_can_use() -> None:
    # In a process of its own: it would hang.
    code = "import fedsc; fedsc.run('digits', 'fedavg', 'cnn', rounds=1, epochs=1, clients=2,"
    code += "partition='iid', train_limit=200, threads=4, engine='workers')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_after_an_error_between_clients_no_old_answer_is_taken_for_a_new_one() -> None:
    federation = federation_of(engine="workers")
    engine = federation.engine
    assert isinstance(engine, WorkerEngine)
    asked: list[int] = []

    def memory_of(client: int) -> fedsc.State:
        asked.append(client)
        if len(asked) == 4:
            raise OSError("the disk is gone")
        return {}

    def nothing(number: int) -> None:
        pass

    model = federation.server["model"]
    other = {name: w + 1 if w.is_floating_point() else w for name, w in model.items()}
    with pytest.raises(OSError, match="the disk is gone"):
        list(engine.fit(1, engine.clients, other, {}, memory_of, nothing))
    assert not engine.workers  # they still had work, with other weights
    uploads = [upload for upload, _ in engine.fit(1, engine.clients, model, {}, memory_of, nothing)]
    torch.set_num_threads(1)  # as in a worker
    for upload in uploads:
        client = engine.clients[upload.client]
        alone, _ = engine.engine.fit_one(1, client, model, {}, {}, nothing)
        for name, tensor in alone.model.items():
            assert torch.equal(tensor, upload.model[name])


def test_a_worker_that_dies_is_an_error_and_not_a_hang() -> None:
    federation = federation_of(engine="workers")
    federation.run_round(1)
    engine = federation.engine
    assert isinstance(engine, WorkerEngine)
    os.kill(engine.workers[0].process.pid or 0, signal.SIGKILL)
    with pytest.raises(FedscError, match=r"worker process ended by itself \(exit code -9\)"):
        federation.run_round(2)


def test_workers_end_with_their_federation() -> None:
    federation = federation_of(engine="workers")
    federation.run_round(1)
    engine = federation.engine
    assert isinstance(engine, WorkerEngine)
    processes = [worker.process for worker in engine.workers]
    assert all(process.is_alive() for process in processes)
    del federation, engine
    assert not any(process.is_alive() for process in processes)
