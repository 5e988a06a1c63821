"""Landscape and embedding: directions by hand, and what is written into run folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fedsc
from fedsc import FedscError, Upload
from fedsc.analysis.embedding import deal, embedding_of
from fedsc.analysis.landscape import (
    Steps,
    difference,
    filter_normalised,
    landscape_of,
    project,
    shown_clients,
    surface,
    weights,
)
from fedsc.analysis.reopen import reopen
from fedsc.engines.local import load_state
from fedsc.report.runs import RunData, read_run


def test_each_filter_of_a_direction_gets_the_norm_of_the_weights() -> None:
    state = {"w": torch.tensor([[3.0, 4.0], [0.0, 2.0]]), "b": torch.ones(2)}
    direction = {"w": torch.tensor([[1.0, 0.0], [3.0, 4.0]])}
    found = filter_normalised(direction, state)
    torch.testing.assert_close(found["w"], torch.tensor([[5.0, 0.0], [1.2, 1.6]]))
    still = filter_normalised({"w": torch.zeros(2, 2)}, state)
    assert torch.equal(still["w"], torch.zeros(2, 2))


def test_biases_normalisation_and_counters_are_no_part_of_a_direction() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    assert [name for name, _ in weights(net.state_dict())] == ["0.weight"]


def test_projection_onto_a_skew_plane() -> None:
    """2 (1, 0, 0) + 3 (1, 1, 0) = (5, 3, 0), and what is orthogonal to both does not count."""
    vectors = [{"w": torch.tensor([[v]]).reshape(1, 3)} for v in ([1.0, 0, 0], [1.0, 1, 0])]
    given = {"w": torch.tensor([[5.0, 3.0, 7.0]])}
    assert project(given, *vectors) == pytest.approx((2.0, 3.0))


def test_a_surface_is_the_loss_at_its_points() -> None:
    origin = {"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([5.0])}
    directions = [{"w": torch.tensor([[1.0, 0.0]])}, {"w": torch.tensor([[0.0, 1.0]])}]
    seen: list[tuple[str, int, int | None]] = []
    steps = Steps(lambda *what: seen.append(what), "rows", 2)
    found = surface(
        lambda state: float(10 * state["w"][0, 0] + state["w"][0, 1] + state["b"]),
        *(origin, directions, [-1.0, 1.0], steps),
    )
    assert found == [[0 + 1 + 5, 20 + 1 + 5], [0 + 3 + 5, 20 + 3 + 5]]
    assert seen == [("rows", 1, 2), ("rows", 2, 2)]


def test_the_largest_the_middle_and_the_smallest_client_are_shown() -> None:
    uploads = [Upload(k, n, {}) for k, n in enumerate((5, 40, 20, 30, 10))]
    assert shown_clients(uploads) == [1, 2, 0]
    assert shown_clients(uploads[:2]) == [1, 0]
    assert shown_clients(uploads[:1]) == [0]


@pytest.mark.parametrize("method", ["fedsc", "fednh"])
def test_landscape_of_a_run(copied: Path, method: str) -> None:
    run = read_run(copied / f"{method}-seed0")
    before = {p.name: p.read_bytes() for p in run.path.iterdir() if p.is_file()}
    found = landscape_of(run, points=3, images=100)
    after = {p.name: p.read_bytes() for p in run.path.iterdir() if p.is_file()}
    assert json.loads(after.pop("landscape.json")) == found
    assert after == before

    assert len(found["grid"]) == len(found["loss"]) == len(found["loss"][0]) == 3
    names = [model["name"] for model in found["models"]]
    assert names == ["global", "client 0", "client 1", "client 2", "client 3"]
    by_name = {model["name"]: model for model in found["models"]}
    assert by_name["global"]["at"] == [0, 0]
    assert found["loss"][1][1] == pytest.approx(by_name["global"]["loss"])
    farthest = max(abs(value) for model in found["models"] for value in model["at"])
    assert found["grid"][-1] == pytest.approx(1.5 * farthest)
    assert farthest > 1e-3
    around = found["around"]["models"]
    assert around[0]["name"] == "global"
    assert len(around) == 4
    for model in around:  # in the middle of its landscape lies the model itself
        assert model["loss"][1][1] == pytest.approx(by_name[model["name"]]["loss"])


def test_the_global_model_is_what_the_next_round_gives(copied: Path) -> None:
    """The loss in landscape.json against one more round of the same run, evaluated by hand."""
    digits = fedsc.load_dataset("digits")
    run = read_run(copied / "fedavg-seed0")
    found = landscape_of(run, points=3, images=1000)
    federation = reopen(run)
    federation.run_round(4)
    load_state(federation.model, federation.server["model"])
    federation.model.eval()
    images = federation.engine.images.normalised(digits.test_images)
    with torch.no_grad():
        loss = F.cross_entropy(federation.model(images).logits, digits.test_labels)
    assert found["models"][0]["loss"] == pytest.approx(float(loss), rel=1e-5)
    moved = difference(federation.server["model"], reopen(run).server["model"])
    assert any(tensor.abs().max() > 0 for tensor in moved.values())


def test_a_landscape_is_computed_once(fedsc_run: RunData) -> None:
    path = fedsc_run.path / "landscape.json"
    landscape_of(fedsc_run, points=2, images=20)
    written = path.stat().st_mtime_ns
    landscape_of(fedsc_run, points=2, images=20)
    assert path.stat().st_mtime_ns == written
    landscape_of(fedsc_run, points=3, images=20)
    assert path.stat().st_mtime_ns > written
    path.write_text("{")
    assert len(landscape_of(fedsc_run, points=2, images=20)["grid"]) == 2


def test_embedding_of_a_run(fedsc_run: RunData) -> None:
    found = embedding_of(fedsc_run)
    assert json.loads((fedsc_run.path / "embedding.json").read_text()) == found
    number = 355  # all of the digits' test images
    assert {len(found[name]) for name in ("x", "y", "label", "client", "predicted")} == {number}
    assert found["classes"] == list("0123456789")
    right = np.mean(np.array(found["predicted"]) == np.array(found["label"]))
    assert right == pytest.approx(fedsc_run.records[-1]["accuracy"])
    counts = json.loads((fedsc_run.path / "partition.json").read_text())["class_counts"]
    for label, client in zip(found["label"], found["client"], strict=True):
        assert counts[client][label] > 0


def test_test_images_are_dealt_by_the_clients_shares() -> None:
    counts = np.array([[30, 0, 0], [10, 5, 0]])
    dealt = deal([0] * 4000 + [1, 2], counts, np.random.default_rng(0))
    assert dealt[:4000].count(0) == pytest.approx(3000, abs=120)  # 4 standard deviations
    assert dealt[4000:] == [1, None]


def test_few_shot_test_images_have_neither_client_nor_prediction(tmp_path: Path) -> None:
    fedsc.run(
        "digits",
        "fedavg",
        out=tmp_path / "run",
        few_shot=4,
        rounds=1,
        epochs=1,
        clients=3,
        train_limit=100,
        episodes=5,
        ways=3,
        device="cpu",
    )
    found = embedding_of(read_run(tmp_path / "run"), images=50)
    assert (found["client"], found["predicted"]) == (None, None)
    assert found["classes"] == list("6789")
    assert len(found["x"]) == 50
    assert landscape_of(read_run(tmp_path / "run"), points=2, images=20)["models"][0]["loss"] > 0


def test_runs_that_cannot_be_rebuilt_say_why(tmp_path: Path, fedsc_run: RunData) -> None:
    (fedsc_run.path / "state.safetensors").rename(fedsc_run.path / "gone")
    with pytest.raises(FedscError, match="no checkpoint yet"):
        embedding_of(fedsc_run)
    fedsc.run(
        fedsc.load_dataset("digits"),
        "fedproto,evaluation=personal_mean",
        out=tmp_path / "own",
        rounds=1,
        epochs=1,
        clients=2,
        train_limit=50,
        partition="iid",
        device="cpu",
    )
    with pytest.raises(FedscError, match="no global one"):
        landscape_of(read_run(tmp_path / "own"))
    spec = json.loads((tmp_path / "own" / "spec.json").read_text())
    spec["data_checksum"] = "0"
    spec["method"]["evaluation"], spec["label"] = "avg_proto", "fedproto,evaluation=avg_proto"
    (tmp_path / "own" / "spec.json").write_text(json.dumps(spec))
    with pytest.raises(FedscError, match="data_checksum was 0"):
        landscape_of(read_run(tmp_path / "own"))
