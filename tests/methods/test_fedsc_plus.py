"""FedSC+: what it adds to FedSC, worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedsc
from fedsc.calibration import SHRINKAGE, STATISTICS, empty_statistics
from fedsc.data.transform import normalise
from fedsc.experiments.runner import build
from fedsc.experiments.trained import load_trained
from fedsc.losses import rpcl
from fedsc.method import Batch, Client, Task, Upload
from fedsc.methods import FedSCPlus
from fedsc.methods.fedsc_plus import absent_divergence
from fedsc.models.outputs import Outputs
from tests.test_calibration import statistics_of

QUICK: dict[str, Any] = {"rounds": 3, "epochs": 1, "lr": 0.05, "threads": 1}


def upload(client: int, prototypes: list[list[float]], counts: list[float]) -> Upload:
    extra = {"prototypes": torch.tensor(prototypes), "counts": torch.tensor(counts)}
    extra |= empty_statistics(Task(3, 2, num_classes=2, feature_dim=2, num_rounds=5))
    return Upload(client, int(sum(counts)), {"w": torch.zeros(1)}, extra)


def test_a_prototype_keeps_its_share_of_the_one_before() -> None:
    method = FedSCPlus(smoothing=0.25)
    server = method.init_server(Task(3, 2, num_classes=2, feature_dim=2, num_rounds=5))
    first = [upload(0, [[2, 0], [0, 0]], [4, 0]), upload(1, [[0, 8], [4, 4]], [3, 2])]
    server = method.aggregate(server, first, {})
    assert torch.equal(server["prototypes"][0, 0], torch.tensor([2.0, 0.0]))  # nothing before it
    second = [upload(0, [[0, 4], [1, 1]], [4, 1]), upload(2, [[8, 0], [0, 4]], [3, 2])]
    server = method.aggregate(server, second, {})
    # Client 0 had class 0 before: 0.25 (2, 0) + 0.75 (0, 4). It had no class 1, and client 2 stands
    # in the row that was client 1's.
    expected = [[[0.5, 3.0], [1.0, 1.0]], [[8.0, 0.0], [0.0, 4.0]]]
    assert torch.allclose(server["prototypes"], torch.tensor(expected))
    third = [upload(1, [[1, 1], [1, 1]], [1, 1]), upload(2, [[0, 4], [8, 0]], [3, 2])]
    second_row = [upload(2, [[0, 4], [8, 0]], [3, 2]), upload(1, [[1, 1], [1, 1]], [1, 1])]
    for uploads in (third, second_row):
        after = method.aggregate(server, uploads, {})
        # Client 2 as before, 0.25 of its old prototype; client 1 was away, and begins anew.
        expected = [[[1.0, 1.0], [1.0, 1.0]], [[2.0, 3.0], [6.0, 1.0]]]
        assert torch.allclose(after["prototypes"], torch.tensor(expected))
    alone = method.aggregate(server, third[1:], {})  # now in the first row
    assert torch.allclose(alone["prototypes"][0], torch.tensor([[2.0, 3.0], [6.0, 1.0]]))


def batch_of(counts: list[float]) -> Batch:
    client = Client(torch.tensor(0), torch.tensor(counts), {})
    outputs = Outputs(torch.zeros(1, 2), torch.zeros(1, 3))
    return Batch(torch.tensor([0]), torch.ones(1), outputs, {}, {}, {}, {}, client, {})


def test_the_share_of_a_class_is_shared_out_among_its_rows() -> None:
    row_class = torch.tensor([0, 1, 2, 0, 1, 2])
    exists = torch.tensor([True, True, True, True, False, False])
    prior = FedSCPlus(rpcl_prior=2.0).row_prior(batch_of([3, 1, 0]), row_class, exists)
    assert prior is not None
    # Half a sample of class 2: shares 3, 1 and 0.5 of 4.5, and class 0 has two rows.
    by_class = [2 * math.log(share / 4.5) for share in (1.5, 1.0, 0.5)]
    assert prior.tolist() == pytest.approx(by_class * 2)
    assert FedSCPlus(rpcl_prior=0.0).row_prior(batch_of([3, 1, 0]), row_class, exists) is None


def test_with_the_prior_rpcl_hardly_pushes_away_from_a_class_the_client_lacks() -> None:
    features = torch.tensor([[1.0, 0.2]], requires_grad=True)
    prototypes = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # the second of a class it lacks
    labels, row_class, exists = torch.tensor([0]), torch.arange(2), torch.ones(2, dtype=torch.bool)

    def push(prior: torch.Tensor | None) -> float:
        loss = rpcl(
            features, labels, prototypes, row_class, exists, torch.ones(()), 0.5, prior=prior
        )
        (gradient,) = torch.autograd.grad(loss, features)
        return gradient[0, 1].item()

    method = FedSCPlus()
    prior = method.row_prior(batch_of([200.0, 0.0]), row_class, exists)
    # The push is proportional to the absent class's part in the softmax, about 0.17 before.
    assert 0 < push(prior) < push(None) / 100


def test_divergence_over_the_absent_classes_by_hand() -> None:
    student = torch.tensor([[5.0, 0.0, math.log(3)]])  # 1/4 and 3/4 of classes 1 and 2
    teacher = torch.tensor([[-9.0, 1.0, 1.0]])  # 1/2 and 1/2
    absent = torch.tensor([False, True, True])
    by_hand = 0.5 * math.log(4 / 3)
    assert absent_divergence(student, teacher, absent).item() == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize("absent", [[False] * 3, [False, True, False]])
def test_none_or_one_absent_class_leaves_nothing_to_distil(absent: list[bool]) -> None:
    student = torch.randn(4, 3, requires_grad=True)
    divergence = absent_divergence(student, torch.randn(4, 3), torch.tensor(absent))
    divergence.sum().backward()
    assert divergence.tolist() == [0.0] * 4
    assert student.grad is not None
    assert torch.equal(student.grad, torch.zeros(4, 3))


def test_without_its_additions_it_is_fedsc() -> None:
    bare = (
        "fedsc+,smoothing=0,rpcl_prior=0,logit_adjustment=0,rpcl_weight=1,schedule=constant,"
        "calibration=false"
    )
    ours, theirs = (fedsc.run("digits", text, **QUICK) for text in (bare, "fedsc,full"))
    weights = theirs.model.state_dict()
    assert all(torch.equal(t, weights[name]) for name, t in ours.model.state_dict().items())


@pytest.mark.parametrize(
    "change",
    [
        {"smoothing": 0.0},
        {"cpdr_weight": 0.0},
        {"rpcl_weight": 1.0},
        {"distillation": 1.0},
        {"logit_adjustment": 0.0},
        {"calibration": False},
        {"averaged_weight": 0.0},
        {"schedule": "constant"},
    ],
)
def test_each_option_matters(change: dict[str, Any]) -> None:
    method = FedSCPlus()
    ours, other = (
        fedsc.run("digits", m, **QUICK) for m in (method, dataclasses.replace(method, **change))
    )
    first, second = ours.model.state_dict(), other.model.state_dict()
    assert any(not torch.equal(t, second[name]) for name, t in first.items())


# Calibration --------------------------------------------------------------------------------------


def test_old_statistics_keep_their_share() -> None:
    method = FedSCPlus(smoothing=0.25)
    task = Task(2, 2, num_classes=2, feature_dim=2, num_rounds=5)
    server = method.init_server(task)
    sent = upload(0, [[1, 0], [0, 1]], [1, 1])
    values = {name: tensor + 8 for name, tensor in empty_statistics(task).items()}
    first = dataclasses.replace(sent, extra={**sent.extra, **values})
    server = method.aggregate(server, [first, dataclasses.replace(first, client=1)], {})
    server = method.aggregate(server, [first], {})
    # Two clients' 8, three quarters of them: 12. Then a quarter of 12, and three quarters of 8.
    assert all(torch.equal(server[name], torch.full_like(server[name], 9.0)) for name in STATISTICS)


def test_the_statistics_are_of_the_model_that_was_received() -> None:
    """One round: what the server holds is what the first model makes of all training images."""
    run = fedsc.run("digits", "fedsc+,smoothing=0", rounds=1, epochs=2, threads=1, partition="iid")
    data = fedsc.load_dataset("digits")
    first, _ = build(run.spec, data, run.method)
    images = normalise(data.train_images, torch.tensor(data.mean), torch.tensor(data.std))
    first.model.eval()
    with torch.no_grad():
        features = first.model(images).features
    expected = statistics_of(features, data.train_labels, 10)
    for name, tensor in expected.items():
        assert torch.allclose(run.server[name], tensor, rtol=1e-4, atol=1e-2)


def test_of_a_class_with_too_few_images_nothing_is_sent() -> None:
    method = FedSCPlus(min_count=2)
    client = Client(torch.tensor(0), torch.tensor([2.0, 1.0]), {})
    features = torch.tensor([[1.0, 2.0], [5.0, 7.0], [3.0, 0.0]])
    labels = torch.tensor([0, 1, 0])
    outputs = Outputs(features, torch.zeros(3, 2))
    batch = Batch(labels, torch.ones(3), outputs, {}, {}, {}, {}, client, {})
    task = Task(1, 1, num_classes=2, feature_dim=2, num_rounds=1)
    totals = method.observe("start", batch, method.start_observing("start", task))
    assert totals["class_sums"].tolist() == [[4.0, 2.0], [0.0, 0.0]]
    assert totals["class_counts"].tolist() == [2.0, 0.0]
    assert totals["products"].tolist() == [[10.0, 2.0], [2.0, 4.0]]


def test_calibration_changes_what_is_tested_and_nothing_clients_train() -> None:
    ours, other = (fedsc.run("digits", f"fedsc+{t}", **QUICK) for t in ("", ",calibration=false"))
    trained = other.model.state_dict()
    for name, tensor in ours.server["model"].items():
        assert torch.equal(tensor, trained[name])
    tested = ours.model.state_dict()
    differ = {name for name, tensor in tested.items() if not torch.equal(tensor, trained[name])}
    assert differ == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_what_is_tested_is_the_discriminant_and_a_part_of_the_averaged_classifier(
    weight: float,
) -> None:
    """Two classes at -1 and 1 on the first axis, variance 1 on both: a discriminant by hand."""
    task = Task(1, 1, num_classes=2, feature_dim=2, num_rounds=1)
    method = FedSCPlus(averaged_weight=weight)
    model = {"classifier.weight": torch.eye(2), "classifier.bias": torch.tensor([0.5, 0.0])}
    server = {**method.init_server(task), "model": model}
    server |= {
        "class_sums": torch.tensor([[-10.0, 0.0], [10.0, 0.0]]),
        "class_counts": torch.tensor([10.0, 10.0]),
        "products": torch.diag(torch.tensor([40.0, 20.0])),  # 20 (variance 1 + mean^2), 20
    }
    (tested,) = method.evaluated_models(server, {})
    slope = 1 / (1 + SHRINKAGE)  # (m_j - m) over the variance, with shrinkage
    weights = torch.tensor([[-slope + weight, 0.0], [slope, weight]])
    assert torch.allclose(tested["classifier.weight"], weights)
    assert torch.allclose(
        tested["classifier.bias"], torch.tensor([weight / 2 - slope / 2, -slope / 2])
    )


def test_where_clients_lack_classes_calibration_is_far_ahead() -> None:
    """Clients with one or two classes each: their averaged classifier hardly knows the others."""
    options: dict[str, Any] = {"partition": "shards:1", "rounds": 5, "lr": 0.05, "threads": 1}
    ours, other = (fedsc.run("digits", f"fedsc+{t}", **options) for t in ("", ",calibration=false"))
    assert ours.accuracy > other.accuracy + 0.1


def test_what_is_exported_is_what_was_tested(tmp_path: Path) -> None:
    run = fedsc.run("digits", "fedsc+", out=tmp_path / "run", **QUICK)
    trained = load_trained(tmp_path / "run")
    data = fedsc.load_dataset("digits")
    right = trained.model(data.test_images).argmax(1) == data.test_labels
    assert right.double().mean().item() == pytest.approx(run.accuracy)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rpcl_weight": 1.0, "u_mode": "round"}, "u_mode=round needs calibration=false"),
        ({"robust_prototypes": True}, "robust_prototypes needs calibration=false"),
        ({"aggregation": "median"}, "median needs calibration=false"),
    ],
)
def test_what_does_not_go_with_calibration(options: dict[str, Any], words: str) -> None:
    with pytest.raises(fedsc.FedscError, match=words):
        FedSCPlus(**options)
    FedSCPlus(**options, calibration=False)


class OwnHead(nn.Module):
    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(64, num_classes, bias=False)

    def forward(self, images: torch.Tensor) -> Outputs:
        features = images.flatten(1)
        return Outputs(features, self.classifier(features))


def test_a_classifier_that_cannot_be_calibrated_is_refused() -> None:
    with pytest.raises(fedsc.FedscError, match=r"calibration makes a Linear with a bias.*=false"):
        fedsc.run("digits", "fedsc+", OwnHead, **QUICK)
    assert fedsc.run("digits", "fedsc+,calibration=false", OwnHead, **QUICK).records
