"""What a run learned, in use: exported to files, and on new images."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fedsc
from fedsc import Dataset, FedscError
from fedsc.cli import app
from fedsc.experiments.trained import export, load_trained, read_images
from fedsc.report.runs import read_run


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return fedsc.load_dataset("digits")


@pytest.fixture(scope="module")
def run(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedSC, long enough that classes are told apart."""
    out = tmp_path_factory.mktemp("runs") / "fedsc"
    fedsc.run(digits, "fedsc", out=out, rounds=4, epochs=3, lr=0.1, clients=3, partition="iid")
    return out


def test_the_exported_model_has_the_accuracy_of_the_run(digits: Dataset, tmp_path: Path) -> None:
    """FedNH changes the network's head; BatchNorm must be in evaluation mode. Raw pixels go in."""
    path = tmp_path / "run"
    options: dict[str, Any] = {
        "rounds": 2,
        "epochs": 1,
        "clients": 2,
        "train_limit": 300,
        "lr": 0.1,
    }
    fedsc.run(digits, "fednh", "cnn", out=path, **options)
    accuracy = read_run(path).records[-1]["accuracy"]
    assert accuracy > 0.2  # it learned something

    found = load_trained(path).probabilities(digits.test_images, "classifier")
    assert float((found.argmax(1) == digits.test_labels).double().mean()) == accuracy
    pt2, onnx, facts = export(load_trained(path), tmp_path / "model")
    program = torch.export.load(pt2).module()
    logits = program(digits.test_images)
    assert float((logits.argmax(1) == digits.test_labels).double().mean()) == accuracy

    session = onnxruntime.InferenceSession(onnx)
    for number in (1, 7, 355):
        (found,) = session.run(["logits"], {"images": digits.test_images[:number].numpy()})
        np.testing.assert_allclose(found, logits[:number].numpy(), rtol=1e-3, atol=1e-4)
    assert json.loads(facts.read_text())["classes"] == list("0123456789")


def test_both_ways_to_classify_give_the_accuracies_of_the_record(
    run: Path, digits: Dataset
) -> None:
    last = read_run(run).records[-1]
    trained = load_trained(run)
    for by, name in (("classifier", "accuracy"), ("prototype", "nearest_prototype")):
        found = trained.probabilities(digits.test_images, by)  # type: ignore[arg-type]
        torch.testing.assert_close(found.sum(1), torch.ones(len(found)))
        right = (found.argmax(1) == digits.test_labels).double().mean()
        assert float(right) == pytest.approx(last[name], abs=1e-9)


def test_predict_reads_images_folders_and_npz(run: Path, digits: Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "images" / "deeper"
    folder.mkdir(parents=True)
    for i in range(3):
        Image.fromarray(digits.test_images[i, 0].numpy()).save(folder / f"{i}.png")
    np.savez(tmp_path / "more.npz", x=digits.test_images[3:5, 0].numpy())
    expected = load_trained(run).probabilities(digits.test_images[:5], "classifier")

    words = ["predict", str(run), str(folder / "0.png"), str(tmp_path / "images")]
    words += [str(tmp_path / "more.npz"), "--top", "2", "--csv", str(tmp_path / "all.csv")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert len(lines) == 1 + 3 + 2
    best = int(expected[0].argmax())
    assert lines[0] == lines[1]
    assert re.search(rf"0\.png: {best} {expected[0, best]:.1%}, \d \d+\.\d%$", lines[0])
    with (tmp_path / "all.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["image", "class", *"0123456789"]
    found = torch.tensor([[float(p) for p in row[2:]] for row in rows[2:]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_run_folder_from_before_asks_the_data_set_for_the_normalisation(
    run: Path, digits: Dataset, tmp_path: Path
) -> None:
    for name in ("spec.json", "state.safetensors"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    partition = json.loads((run / "partition.json").read_text())
    del partition["images"]
    (tmp_path / "partition.json").write_text(json.dumps(partition))
    old, new = load_trained(tmp_path).model, load_trained(run).model
    assert torch.equal(old(digits.test_images), new(digits.test_images))


def test_what_cannot_be_used_is_named(run: Path, digits: Dataset, tmp_path: Path) -> None:
    with pytest.raises(FedscError, match=r"no spec.json"):
        load_trained(tmp_path)
    out = tmp_path / "personal"
    short: dict[str, Any] = {"rounds": 1, "epochs": 1, "train_limit": 50, "clients": 2}
    fedsc.run(digits, "fedproto,evaluation=personal_mean", out=out, **short)
    with pytest.raises(FedscError, match="a model per client and no global one"):
        load_trained(out)
    fedsc.run(digits, "fedavg", out=tmp_path / "plain", **short)
    with pytest.raises(FedscError, match="fedavg has no prototypes: take --by classifier"):
        load_trained(tmp_path / "plain").probabilities(digits.test_images, "prototype")
    Image.new("L", (9, 8)).save(tmp_path / "wide.png")
    with pytest.raises(FedscError, match=r"wide.png is 9x8 pixels, the model takes 8x8"):
        read_images([tmp_path / "wide.png"], (1, 8, 8))
    np.savez(tmp_path / "y.npz", y=np.arange(3))
    with pytest.raises(FedscError, match=r"y.npz holds y; it must hold x or x_test"):
        read_images([tmp_path / "y.npz"], (1, 8, 8))
