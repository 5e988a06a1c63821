"""Clients in threads against one after another: the same bits, whoever is done first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedsc
from fedsc import FedscError, Outputs, Run

TEXTS = [*fedsc.METHODS, "moon,head=true", "fedproto,evaluation=ensemble"]


@pytest.fixture(autouse=True)
def two_cores() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def run(method: str, **changes: Any) -> Run:
    common: dict[str, Any] = {"rounds": 3, "epochs": 1, "train_limit": 400, "participation": 0.6}
    return fedsc.run("digits", method, **{**common, **changes})


@pytest.mark.parametrize("text", TEXTS)
def test_every_method_gives_the_same_bits_as_one_after_another(text: str) -> None:
    in_threads = run(text, engine="threads", threads=2)
    one_by_one = run(text, engine="sequential", threads=1)
    for name, tensor in one_by_one.server["model"].items():
        assert torch.equal(tensor, in_threads.server["model"][name])


class Dropping(nn.Module):
    """With dropout, which draws from a generator that threads would share."""

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5))
        self.classifier = nn.Linear(16, num_classes)

    def forward(self, images: Tensor) -> Outputs:
        features = self.body(images)
        return Outputs(features, self.classifier(features))


def engine_of(model: nn.Module, **options: Any) -> str:
    spec = fedsc.RunSpec(**options)
    data = fedsc.load_dataset("digits")
    return fedsc.Federation(spec, data, fedsc.FedAvg(), model).engine_name


def test_a_model_with_random_layers_is_trained_one_by_one() -> None:
    assert engine_of(Dropping((1, 8, 8), 10)) == "sequential"


def test_threads_are_taken_where_there_are_cores_and_clients_for_them() -> None:
    model = fedsc.models.MLP((1, 8, 8), 10)
    assert engine_of(model) == "threads"
    assert engine_of(model, participation=0.1) == "sequential"
    torch.set_num_threads(1)
    assert engine_of(model) == "sequential"


class Failing(fedsc.FedAvg):
    def loss(self, batch: fedsc.Batch) -> dict[str, Tensor]:
        raise FedscError("no loss today")


def test_a_client_that_fails_stops_the_round_with_its_own_error() -> None:
    with pytest.raises(FedscError, match="no loss today"):
        fedsc.run("digits", Failing(), rounds=1, epochs=1, engine="threads")
    assert torch.get_num_threads() == 2
