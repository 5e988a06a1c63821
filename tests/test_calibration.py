"""Calibration: the discriminant by hand, and what `--calibrated` measures of every method."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import nn

import fedsc
from fedsc import FedscError, Run
from fedsc.calibration import STATISTICS, linear_discriminant
from fedsc.data.sources import load_dataset
from fedsc.data.transform import normalise
from fedsc.experiments.runner import execute, load
from fedsc.experiments.trained import load_trained
from fedsc.methods import METHODS, method_from_text
from fedsc.models.outputs import Outputs
from fedsc.spec import RunSpec
from fedsc.state import State, flatten
from tests.methods.test_all_methods import TINY, StopAfter, tiny_run, without_timing

QUICK: dict[str, Any] = {"rounds": 4, "epochs": 1, "lr": 0.05, "threads": 1}
ONE_IMAGE = 1 / 355 + 1e-9  # of the test set of digits: what the last digit of a sum may turn

# The discriminant ---------------------------------------------------------------------------------


def statistics_of(features: torch.Tensor, labels: torch.Tensor, num_classes: int) -> State:
    of_class = [features[labels == j] for j in range(num_classes)]
    sums = torch.stack([rows.sum(0) for rows in of_class])
    counts = torch.tensor([float(len(rows)) for rows in of_class])
    return {"class_sums": sums, "class_counts": counts, "products": features.T @ features}


def test_a_discriminant_by_hand() -> None:
    # Two classes around (0, 0) and (4, 0), with the variances 1 and 4; a tenth of their mean, 0.25,
    # is added: 1.25 and 4.25. W = S^-1 (m_j - (2, 0)) = (-+1.6, 0); b = -W (m_j + (2, 0)) / 2.
    around = torch.tensor([[1.0, 2.0], [-1.0, 2.0], [1.0, -2.0], [-1.0, -2.0]])
    features = torch.cat([around, around + torch.tensor([4.0, 0.0])])
    labels = torch.tensor([0] * 4 + [1] * 4)
    weight, bias = linear_discriminant(statistics_of(features, labels, 2))
    assert torch.allclose(weight, torch.tensor([[-1.6, 0.0], [1.6, 0.0]]), atol=1e-6)
    assert torch.allclose(bias, torch.tensor([1.6, -4.8]), atol=1e-6)
    # Halfway between the means both score alike.
    middle = torch.tensor([2.0, 7.0])
    assert (weight @ middle + bias).tolist() == pytest.approx([-1.6, -1.6])


def test_a_discriminant_is_scikit_learns() -> None:
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    centers = torch.randn(3, 4, generator=rng)
    mixing = torch.randn(4, 4, generator=rng)
    features = 5 + centers[labels] + torch.randn(60, 4, generator=rng) @ mixing
    weight, bias = linear_discriminant(statistics_of(features, labels, 3))
    theirs = LinearDiscriminantAnalysis(
        solver="lsqr", priors=[1 / 3] * 3, covariance_estimator=Shrunk()
    )
    theirs.fit(features.double().numpy(), labels.numpy())
    ours = torch.softmax(features @ weight.T + bias, 1)
    expected = torch.from_numpy(theirs.predict_proba(features.double().numpy()))
    assert torch.allclose(ours.double(), expected, atol=1e-4)


class Shrunk(BaseEstimator):  # type: ignore[misc]
    """The covariance with a tenth of its mean variance added."""

    def fit(self, rows: Any) -> Shrunk:
        covariance = np.cov(rows.T, bias=True)
        self.covariance_ = covariance + 0.1 * np.trace(covariance) / len(covariance) * np.eye(4)
        return self


def test_a_class_nobody_has_sent_is_never_guessed() -> None:
    features, labels = torch.randn(20, 3), torch.arange(20) % 2
    weight, bias = linear_discriminant(statistics_of(features, labels, 3))
    assert (features @ weight.T + bias)[:, 2].max() < -1e20
    assert bool(weight.isfinite().all())


@pytest.mark.parametrize("features", [torch.ones(4, 3), torch.full((4, 3), torch.nan)])
def test_features_without_use_raise_nothing(features: torch.Tensor) -> None:
    weight, _ = linear_discriminant(statistics_of(features, torch.arange(4) % 2, 2))
    assert weight.shape == (2, 3)


# What it would give any method --------------------------------------------------------------------


def series(run: Run, name: str) -> list[float]:
    return [record[name] for record in run.records]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedsc+", {}),
        ("fedsc+,min_count=30", {}),  # most clients have fewer of most classes
        ("fedsc+,init_protos=true", {}),  # a survey before the first round
        ("fedsc+", {"participation": 0.3, "norm": "batch"}),
        ("fedsc+", {"dropout": 0.3, "straggler": 0.3}),
        ("fedsc+", {"attack": "label-flip", "attackers": 0.3}),
    ],
)
def test_of_fedsc_plus_the_sum_is_the_accuracy(method: str, options: dict[str, Any]) -> None:
    run = fedsc.run("digits", method, calibrated=True, **QUICK, **options)
    assert series(run, "summed") == pytest.approx(series(run, "accuracy"), abs=ONE_IMAGE)
    for name in STATISTICS:
        torch.testing.assert_close(run.server["calibration"][name], run.server[name])


@pytest.mark.parametrize(
    ("method", "name"), [("fedsc+", "summed"), ("fedsc+,averaged_weight=0", "calibrated")]
)
def test_of_fedsc_plus_without_calibration_it_is_the_accuracy_with(method: str, name: str) -> None:
    settings = {**QUICK, "partition": "shards:1", "seed": 1}
    without = fedsc.run("digits", "fedsc+,calibration=false", calibrated=True, **settings)
    ours = fedsc.run("digits", method, **settings)
    assert series(without, name) == pytest.approx(series(ours, "accuracy"), abs=ONE_IMAGE)
    assert series(without, "accuracy")[-1] < series(without, name)[-1] - 0.1


def test_of_fedsc_plus_the_averaged_classifier_is_measured_too() -> None:
    ours = fedsc.run("digits", "fedsc+", calibrated=True, **QUICK)
    without = fedsc.run("digits", "fedsc+,calibration=false", calibrated=True, **QUICK)
    assert series(ours, "averaged") == pytest.approx(series(without, "accuracy"), abs=ONE_IMAGE)
    assert all("averaged" not in record for record in without.records)
    assert series(ours, "summed") == pytest.approx(series(without, "summed"), abs=ONE_IMAGE)


def test_the_sum_is_of_the_classifier_and_the_discriminant() -> None:
    run = fedsc.run("digits", "fedavg", calibrated=True, **QUICK)
    weight, bias = linear_discriminant(run.server["calibration"])
    head = run.model.classifier
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.weight.add_(weight)
        head.bias.add_(bias)
        data = load_dataset("digits")
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
        guess = run.model.eval()(normalise(data.test_images, mean, std)).logits.argmax(1)
    right = float((guess == data.test_labels).double().mean())
    assert series(run, "summed")[-1] == pytest.approx(right, abs=ONE_IMAGE)


@pytest.mark.parametrize("method", [*METHODS, "moon,head=true", "fedavg,aggregation=median"])
def test_it_changes_nothing_but_the_record(method: str) -> None:
    with_it, without = (tiny_run(method, calibrated=flag) for flag in (True, False))
    assert all(0 <= value <= 1 for value in series(with_it, "calibrated"))
    besides = "timing", "calibrated", "summed", "averaged"
    for ours, theirs in zip(with_it.records, without.records, strict=True):
        kept = {name: v for name, v in ours.items() if name not in besides}
        assert kept == {name: v for name, v in theirs.items() if name != "timing"}
    a, b = flatten(with_it.server), flatten(without.server)
    assert {name for name in a if not name.startswith("calibration/")} == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_an_own_method_that_keeps_no_other_state_keeps_the_statistics() -> None:
    """FedAvg, but what `aggregate` gives is the model alone."""

    class Forgetful(fedsc.Method):
        name = "forgetful"

        def aggregate(self, server: State, uploads: list[fedsc.Upload], records: Any) -> State:
            return {"model": self.average(uploads)}

    ours, fedavg = (
        fedsc.run("digits", method, calibrated=True, **QUICK) for method in (Forgetful(), "fedavg")
    )
    assert series(ours, "calibrated") == series(fedavg, "calibrated")


def test_statistics_that_nobody_has_sent_are_no_measurement() -> None:
    run = tiny_run("fedavg", calibrated=True, dropout=1.0)
    assert all("calibrated" not in record for record in run.records)
    too_few = tiny_run("fedproto,min_count=1000", calibrated=True)
    assert all("calibrated" not in record for record in too_few.records)


class SlowInEvaluation(nn.Module):
    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(64, num_classes)

    def forward(self, images: torch.Tensor) -> Outputs:
        if not self.training and len(images) > 100:
            time.sleep(0.05)
        features = images.flatten(1)
        return Outputs(features, self.classifier(features))


def test_its_time_is_counted_as_evaluation() -> None:
    """Two batches of training images and one of test images: three times 0.05 s."""
    run = fedsc.run("digits", "fedavg", SlowInEvaluation, calibrated=True, **QUICK)
    assert all(record["timing"]["evaluate_seconds"] >= 0.15 for record in run.records)


# Between rounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fednh", "fedsc+"])
def test_a_run_cut_short_measures_on(method: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**TINY, "method": method, "rounds": 5, "participation": 0.6}
    spec = RunSpec(**settings, calibrated=True)
    data, made = load(spec), method_from_text(method)
    whole = execute(spec, data, made, out=tmp_path / "whole", checkpoint_seconds=0)
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        execute(spec, data, made, None, cut, StopAfter(2), checkpoint_seconds=0)
    # Whether it is asked for again or not: what a run measures is settled when it begins.
    silent = RunSpec(**settings)
    resumed = execute(silent, data, made, None, cut, resume=True, checkpoint_seconds=0)
    assert series(resumed, "calibrated") == series(whole, "calibrated")
    ours, theirs = (without_timing(p / "metrics.jsonl") for p in (cut, tmp_path / "whole"))
    assert ours == theirs


def test_a_run_that_began_without_cannot_measure_from_the_middle_on(tmp_path: Path) -> None:
    spec = RunSpec(**TINY, method="fedavg")
    data, method = load(spec), method_from_text("fedavg")
    with pytest.raises(KeyboardInterrupt):
        execute(spec, data, method, None, tmp_path / "run", StopAfter(1), checkpoint_seconds=0)
    asked = RunSpec(**TINY, method="fedavg", calibrated=True)
    with pytest.raises(FedscError, match="began without --calibrated"):
        execute(asked, data, method, None, tmp_path / "run", resume=True)


@pytest.mark.parametrize("method", ["fedavg", "fedsc+"])
def test_what_is_exported_is_what_accuracy_is_of(method: str, tmp_path: Path) -> None:
    run = tiny_run(method, calibrated=True, out=tmp_path / "run")
    trained, data = load_trained(tmp_path / "run"), fedsc.load_dataset("digits")
    right = trained.probabilities(data.test_images, "classifier").argmax(1) == data.test_labels
    assert right.double().mean().item() == pytest.approx(run.accuracy)


# Where there is nothing to measure ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "fedproto,evaluation=ensemble"}, "--calibrated needs a global model"),
        ({"few_shot": 5}, "--calibrated needs test images of the classes trained on"),
        ({"dp_unit": "record", "dp_clip": 1.0}, "calibrated does not go with dp_unit = record"),
        ({"dp_unit": "client", "dp_clip": 1.0}, "calibrated does not go with dp_unit = client"),
    ],
)
def test_it_is_refused_with_a_way_out(options: dict[str, Any], words: str) -> None:
    with pytest.raises(FedscError, match=rf"{words}[^\n]*leave"):
        fedsc.run(**{**TINY, "method": "fedavg", **options}, calibrated=True)
