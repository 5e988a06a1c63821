"""Whole federations, very small: what must be equal bit for bit, and every way to run one."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import fedsc
from fedsc import Dataset, FedAvg, Federation, FedSC, FedscError, Method, Outputs, Run, RunSpec
from fedsc.data.plan import client_plan
from fedsc.methods import method_from_text
from fedsc.models import build_model
from fedsc.options import options_of

QUICK: dict[str, Any] = {
    "rounds": 2,
    "epochs": 1,
    "train_limit": 200,
    "lr": 0.05,
    "device": "cpu",
}
ALWAYS = {"round", "accuracy", "train_loss", "cohort", "bytes_down", "bytes_up", "timing"}
CLASSIFIER = {"per_class", "client_mean", "client_worst", "ece"}
MLP_FLOATS = 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return fedsc.load_dataset("digits")


def run(data: Dataset, method: str | Method = "fedsc", **options: Any) -> Run:
    return fedsc.run(data, method, **{**QUICK, **options})


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        inner = (
            flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
        )
        found.update(inner)
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    a, b = flat(one), flat(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def without_time(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "timing"} for record in records]


def federation(data: Dataset, method: Method, model: str = "mlp", **options: Any) -> Federation:
    spec = RunSpec(model=model, **{**QUICK, **options})
    torch.manual_seed(0)
    network = build_model(model, data.image_shape, data.num_classes, spec.norm)
    return Federation(spec, data, method, network)


# Equalities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_fedsc_without_its_terms_is_fedavg_bit_for_bit(
    digits: Dataset, participation: float
) -> None:
    options = {"rounds": 3, "epochs": 2, "participation": participation}
    fedavg = run(digits, FedAvg(), **options)
    plain = run(digits, FedSC(rpcl_weight=0.0, cpdr_weight=0.0), **options)
    assert same(fedavg.server["model"], plain.server["model"])
    for one, other in zip(fedavg.records, plain.records, strict=True):
        for name in CLASSIFIER | {"accuracy", "train_loss", "cohort"}:
            assert one[name] == other[name]
    full = run(digits, FedSC(), **options)
    assert not same(fedavg.server["model"], full.server["model"])


def test_the_first_round_of_fedsc_is_fedavgs_bit_for_bit(digits: Dataset) -> None:
    fedavg, ours = (run(digits, name, rounds=1, epochs=2) for name in ("fedavg", "fedsc"))
    assert same(fedavg.server["model"], ours.server["model"])
    assert fedavg.accuracy == ours.accuracy
    assert ours.records[0]["train_loss"]["rpcl"] == 0
    assert ours.records[0]["train_loss"]["cpdr"] == 0
    assert "min_u" not in ours.records[0]


def test_the_same_seed_gives_the_same_files(digits: Dataset, tmp_path: Path) -> None:
    for name in ("one", "two"):
        run(digits, "fedsc", rounds=3, participation=0.5, out=tmp_path / name)
    lines = []
    for name in ("one", "two"):
        text = (tmp_path / name / "metrics.jsonl").read_text()
        records = without_time([json.loads(line) for line in text.splitlines()])
        lines.append("\n".join(json.dumps(record) for record in records))
    assert lines[0] == lines[1]
    for file in ("partition.safetensors", "partition.json", "spec.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    states = [load_file(tmp_path / name / "state.safetensors") for name in ("one", "two")]
    assert same(*states)


def test_the_same_seed_gives_the_same_state_byte_for_byte(digits: Dataset, tmp_path: Path) -> None:
    """Five times, for an order drawn at random comes out right now and then."""
    written = set()
    for name in "abcde":
        run(digits, "fedavg", rounds=1, out=tmp_path / name)
        written.add((tmp_path / name / "state.safetensors").read_bytes())
    assert len(written) == 1


def test_another_seed_gives_another_run(digits: Dataset) -> None:
    one, other = run(digits, seed=0), run(digits, seed=1)
    assert not same(one.server["model"], other.server["model"])
    assert without_time(one.records) != without_time(other.records)


def test_what_went_before_does_not_matter(digits: Dataset) -> None:
    """Neither PyTorch's and NumPy's random numbers before a run nor those after it change."""
    torch.manual_seed(1)
    one = run(digits)
    torch.manual_seed(2)
    np.random.seed(3)
    before = torch.get_rng_state()
    other = run(digits)
    assert same(one.server["model"], other.server["model"])
    assert torch.equal(torch.get_rng_state(), before)


def test_the_number_of_threads_is_put_back(digits: Dataset) -> None:
    before = torch.get_num_threads()
    found = run(digits, threads=before + 1, rounds=1)
    assert torch.get_num_threads() == before
    # Threads add up in another order, so only nearly the same comes out.
    alone = run(digits, rounds=1)
    for name, value in alone.server["model"].items():
        torch.testing.assert_close(found.server["model"][name], value, rtol=1e-3, atol=1e-4)


def test_all_methods_start_with_the_same_weights(digits: Dataset) -> None:
    tiny: dict[str, Any] = {"rounds": 1, "lr": 1e-30}
    fedavg, ours = (run(digits, name, **tiny) for name in ("fedavg", "fedsc"))
    assert same(fedavg.server["model"], ours.server["model"])
    assert not same(fedavg.server["model"], run(digits, "fedavg", seed=5, **tiny).server["model"])


def test_a_client_that_never_takes_part_has_no_effect(digits: Dataset) -> None:
    options: dict[str, Any] = {"participation": 0.3, "rounds": 2}
    before = run(digits, **options)
    took_part = {k for record in before.records for k in record["cohort"]}
    parts = federation(digits, FedSC(), **options).parts
    absent = next(k for k in range(10) if k not in took_part)
    for client, has_effect in ((absent, False), (min(took_part), True)):
        images = digits.train_images.clone()
        images[torch.from_numpy(parts[client])] = 77
        after = run(dataclasses.replace(digits, train_images=images), **options)
        assert same(before.server, after.server) is not has_effect
        assert (without_time(before.records) == without_time(after.records)) is not has_effect


# Local training, against plain PyTorch ------------------------------------------------------------


def normalised(data: Dataset, images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    return (images / 255.0 - mean) / std


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_client_of_fedavg_is_an_ordinary_training_loop(digits: Dataset, momentum: float) -> None:
    options: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 8,
        "momentum": momentum,
        "weight_decay": 0.01,
    }
    fed = federation(digits, FedAvg(), **options)
    start = {name: value.clone() for name, value in fed.server["model"].items()}
    for k in (0, 3):
        (upload,) = fed.fit(1, [k])
        model = build_model("mlp", digits.image_shape, 10)
        model.load_state_dict(start)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, weight_decay=0.01)
        own = torch.from_numpy(fed.parts[k])
        plan = client_plan(0, 1, k, len(own), 2, 8)
        for picked in plan.order.flatten(0, 1):
            images = normalised(digits, digits.train_images[own[picked]])
            loss = F.cross_entropy(model(images).logits, digits.train_labels[own[picked]])
            sgd.zero_grad()
            loss.backward()
            sgd.step()
        assert upload.num_samples == len(own)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(upload.model[name], value, rtol=1e-5, atol=1e-6)
    assert same(fed.server["model"], start)  # clients work on copies


def test_prototypes_are_the_mean_features_of_the_clients_final_model(digits: Dataset) -> None:
    fed = federation(digits, FedSC(proto_source="eval"), model="cnn", batch_size=7)
    (upload,) = fed.fit(1, [2])
    model = build_model("cnn", digits.image_shape, 10)
    model.load_state_dict(upload.model)
    own = torch.from_numpy(fed.parts[2])
    with torch.no_grad():
        features = model.eval()(normalised(digits, digits.train_images[own])).features
    labels = digits.train_labels[own]
    for j in range(10):
        members = features[labels == j]
        assert int(upload.extra["counts"][j]) == len(members)
        expected = members.mean(0) if len(members) else torch.zeros(features.shape[1])
        torch.testing.assert_close(upload.extra["prototypes"][j], expected, rtol=1e-4, atol=1e-5)


def test_samples_that_fill_up_a_batch_are_counted_once(digits: Dataset) -> None:
    fed = federation(digits, FedSC(), batch_size=7, epochs=2)
    for upload in fed.fit(1, list(range(10))):
        own = digits.train_labels[torch.from_numpy(fed.parts[upload.client])]
        assert upload.extra["counts"].tolist() == torch.bincount(own, minlength=10).tolist()


def test_batch_norm_statistics_are_averaged_and_its_counter_is_not(digits: Dataset) -> None:
    options: dict[str, Any] = {
        "model": "cnn",
        "clients": 3,
        "partition": "nid1:0.3",
        "batch_size": 16,
    }
    fed = federation(digits, FedAvg(), **options)
    uploads = fed.fit(1, [0, 1, 2])
    sizes = np.array([upload.num_samples for upload in uploads], dtype=np.float64)
    assert len(set(sizes)) > 1
    fed.run_round(1)
    buffers = 0
    for name, value in fed.server["model"].items():
        theirs = np.stack([upload.model[name].numpy() for upload in uploads])
        if name.endswith("num_batches_tracked"):
            steps = [math.ceil(size / 16) for size in sizes]
            assert theirs.tolist() == steps
            assert int(value) == max(steps)
        else:
            expected = np.tensordot(sizes / sizes.sum(), theirs.astype(np.float64), 1)
            assert np.allclose(value.numpy(), expected, rtol=1e-5, atol=1e-6)
            buffers += name.endswith(("running_mean", "running_var"))
            if name.endswith("running_mean"):
                assert np.abs(theirs[0] - theirs[1]).max() > 1e-4
    assert buffers == 4


def test_prototypes_of_the_first_model_give_round_one_its_terms(digits: Dataset) -> None:
    with_them = run(digits, "fedsc,init_protos=true", rounds=1)
    assert with_them.records[0]["train_loss"]["rpcl"] > 0
    assert with_them.records[0]["train_loss"]["cpdr"] > 0
    # The survey itself trains nothing.
    still = run(digits, "fedsc,init_protos=true", rounds=1, lr=1e-30)
    fedavg = run(digits, "fedavg", rounds=1, lr=1e-30)
    assert same(still.server["model"], fedavg.server["model"])


# Records ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"partition": "iid"}, CLASSIFIER),
        ({"partition": "nid1:0.5"}, CLASSIFIER),
        ({"partition": "nid2"}, CLASSIFIER),
        ({"partition": "nid2:half"}, CLASSIFIER),
        ({"partition": "shards:2"}, CLASSIFIER),
        ({"participation": 0.5}, CLASSIFIER),
        ({"participation": 0.1}, CLASSIFIER),
        ({"clients": 1}, CLASSIFIER),
        ({"clients": 20, "train_limit": 20, "partition": "iid"}, CLASSIFIER),  # one image each
        ({"long_tail": 10.0}, CLASSIFIER | {"head", "middle", "tail"}),
        ({"few_shot": 5, "episodes": 20}, {"accuracy_ci95"}),
        ({"augment": "crop-flip"}, CLASSIFIER),
        ({"batch_size": 1, "train_limit": 30, "clients": 2}, CLASSIFIER),
        ({"momentum": 0.0, "weight_decay": 0.0}, CLASSIFIER),
    ],
)
def test_every_setting_runs_and_is_recorded(
    digits: Dataset, options: dict[str, Any], more: set[str]
) -> None:
    for method, own in (
        ("fedavg", set[str]()),
        ("fedsc", {"prototype_rows", "prototype_drift", "nearest_prototype"}),
    ):
        found = run(digits, method, **options)
        expected = ALWAYS | more | own
        if "few_shot" in options:
            expected = expected - {"nearest_prototype"}
        for number, record in enumerate(found.records, 1):
            assert record["round"] == number
            assert expected <= set(record)
            assert 0 <= record["accuracy"] <= 1
            assert all(math.isfinite(value) for value in record["train_loss"].values())
            assert record["timing"]["seconds"] > 0
        assert found.accuracy == found.records[-1]["accuracy"]


def test_cohorts_are_recorded_and_shared_by_all_methods(digits: Dataset) -> None:
    fedavg, ours = (run(digits, name, rounds=4, participation=0.3) for name in ("fedavg", "fedsc"))
    cohorts = [record["cohort"] for record in fedavg.records]
    assert cohorts == [record["cohort"] for record in ours.records]
    assert all(len(cohort) == 3 for cohort in cohorts)
    assert len({tuple(cohort) for cohort in cohorts}) > 1


def test_traffic_by_hand(digits: Dataset) -> None:
    model = 4 * MLP_FLOATS
    fedavg = run(digits, "fedavg").records[-1]
    assert fedavg["bytes_up"] == fedavg["bytes_down"] == 10 * model
    ours = run(digits, "fedsc", participation=0.5).records[-1]
    assert ours["bytes_up"] == 5 * (model + 4 * (10 * 64 + 10))  # prototypes and counts
    rows = 5 * 10
    message = 4 * 64 * rows + rows + 8 * 5 + 4 * 64 * 10 + 10 + 4  # the last: how far weights fell
    assert ours["bytes_down"] == 5 * (model + message)


def test_training_loss_is_the_mean_over_samples(digits: Dataset) -> None:
    fed = federation(digits, FedAvg(), clients=3)
    uploads = fed.fit(1, [0, 1, 2])
    total = sum(u.num_samples * float(u.losses["ce"]) for u in uploads)
    record = fed.run_round(1)
    assert record["train_loss"]["ce"] == pytest.approx(total / 200, rel=1e-6)


def test_training_does_learn(digits: Dataset) -> None:
    for method in ("fedavg", "fedsc"):
        found = run(digits, method, rounds=5, epochs=5, train_limit=None, partition="iid", lr=0.1)
        assert found.accuracy > 0.85
        losses = [record["train_loss"]["ce"] for record in found.records]
        assert losses[-1] < losses[0] / 2
    assert found.records[-1]["nearest_prototype"] > 0.85


@pytest.mark.parametrize("method", ["fedavg", "fedsc"])
def test_training_that_blows_up_is_recorded_not_raised(digits: Dataset, method: str) -> None:
    found = run(digits, method, lr=1e30)
    assert len(found.records) == 2
    assert found.records[-1]["diverged"]
    assert len(found.records[-1]["rejected"]) == 10
    json.dumps(found.records, allow_nan=False)


# Options ------------------------------------------------------------------------------------------


def every_choice() -> list[str]:
    """Each value of each option of FedSC that has few of them, and the edges of the rest."""
    found = ["neighbours=0", "neighbours=100", "min_count=5", "tau=0.001", "tau=10"]
    found += ["literal", "pool=bank,max_age=0", "pool=bank,max_age=1"]
    for opt in options_of(FedSC):
        values: tuple[Any, ...] = (True, False) if opt.kind is bool else opt.choices
        found += [f"{opt.name}={value}" for value in values]
    found += [
        "absent=global_fill,pool=bank,max_age=1,positives=mean_positive,exclude_self=true",
        "positives=mean_positive,u_mode=round,u_same_class=true,center=true",
        "positives=outside,u_mode=ema,u_same_class=true,exclude_self=true",
        "u_grad=true,u_same_class=true,positives=mean_positive,pool=bank",
        "absent=zero_fill,metric=kl,divisor=fixed,renormalise=false,weight_sums=all",
        "init_protos=true,proto_source=eval,pool=bank,u_mode=epoch",
    ]
    return found


@pytest.mark.parametrize("words", every_choice())
def test_every_reading_of_fedsc_runs(digits: Dataset, words: str) -> None:
    method = method_from_text(f"fedsc,{words}")
    found = run(digits, method, participation=0.5, rounds=3)
    for record in found.records:
        assert {"ce", "rpcl", "cpdr"} == set(record["train_loss"])
        assert all(math.isfinite(value) for value in record["train_loss"].values())
        assert 0 <= record["nearest_prototype"] <= 1
    assert found.records[-1]["train_loss"]["cpdr"] > 0
    for name, value in flat(found.server).items():
        assert value.isfinite().all(), name


def test_single_and_half_precision(digits: Dataset) -> None:
    full, half = (run(digits, precision=precision) for precision in ("fp32", "bf16"))
    assert not same(full.server["model"], half.server["model"])
    for name, value in flat(half.server).items():
        assert value.dtype in (torch.float32, torch.int64, torch.bool), name
    for term in ("ce", "rpcl", "cpdr"):
        one, other = (r.records[-1]["train_loss"][term] for r in (full, half))
        assert other == pytest.approx(one, rel=0.1, abs=0.01)


# Models -------------------------------------------------------------------------------------------


def enlarged(data: Dataset, factor: int, keep: int = 40) -> Dataset:
    def bigger(images: Tensor) -> Tensor:
        return images.repeat_interleave(factor, 2).repeat_interleave(factor, 3)

    return dataclasses.replace(
        data,
        train_images=bigger(data.train_images[:keep]),
        train_labels=data.train_labels[:keep],
        test_images=bigger(data.test_images[:keep]),
        test_labels=data.test_labels[:keep],
    )


@pytest.mark.parametrize(
    ("model", "factor", "norm"),
    [
        ("mlp", 1, "batch"),
        ("cnn", 1, "auto"),
        ("cnn", 1, "group"),
        ("conv4", 2, "auto"),
        ("resnet10", 1, "auto"),
    ],
)
def test_built_in_models(digits: Dataset, model: str, factor: int, norm: str) -> None:
    data = enlarged(digits, factor)
    options: dict[str, Any] = {
        "model": model,
        "norm": norm,
        "clients": 2,
        "train_limit": 16,
        "rounds": 1,
    }
    found = run(data, partition="iid", **options)
    assert math.isfinite(found.records[0]["train_loss"]["ce"])
    assert not found.model.training
    features = found.model(data.test_images[:2].float()).features
    assert found.server["consistent"].shape == (10, features.shape[1])


OWN_MODEL = """
import math
from torch import nn
from fedsc import Outputs

class Net(nn.Module):
    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.body = nn.Linear(math.prod(image_shape), 12)
        self.classifier = nn.Linear(12, num_classes)

    def forward(self, images):
        features = self.body(images.flatten(1)).relu()
        return Outputs(features, self.classifier(features))
"""


class Net(nn.Module):
    def __init__(self, size: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(size, 12)
        self.classifier = nn.Linear(12, num_classes)

    def forward(self, images: Tensor) -> Outputs:
        features = self.body(images.flatten(1)).relu()
        return Outputs(features, self.classifier(features))


def own_model(image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    return Net(math.prod(image_shape), num_classes)


def test_a_users_model_from_a_file_and_from_a_function(digits: Dataset, tmp_path: Path) -> None:
    """The two are the same network, so the runs are the same."""
    file = tmp_path / "own.py"
    file.write_text(OWN_MODEL)
    from_file = run(digits, model=f"{file}:Net", out=tmp_path / "file")
    from_function = run(digits, model=own_model, out=tmp_path / "function")
    assert same(from_file.server["model"], from_function.server["model"])
    assert from_file.server["consistent"].shape == (10, 12)
    spec = json.loads((tmp_path / "function" / "spec.json").read_text())
    assert spec["model"] == "own_model"


@pytest.mark.parametrize(
    "options",
    [
        {"clients": 20, "train_limit": 20},  # one image each
        {"batch_size": 1},
    ],
)
def test_batch_norm_of_one_image_is_explained_before_training(
    digits: Dataset, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(FedscError, match=r"batches of one image.*larger batch size"):
        run(digits, model="mlp", norm="batch", partition="iid", out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    run(digits, model="mlp", norm="group", partition="iid", **options)


# The user's own method and data -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Halved(FedAvg):
    name = "halved"

    def loss(self, batch: fedsc.Batch) -> dict[str, Tensor]:
        return {"ce": 0.5 * F.cross_entropy(batch.student.logits, batch.labels)}


def test_a_users_own_method(digits: Dataset) -> None:
    """Half the loss is half the learning rate, for SGD without weight decay."""
    one = run(digits, Halved(), lr=0.1, weight_decay=0.0, rounds=1)
    other = run(digits, FedAvg(), lr=0.05, weight_decay=0.0, rounds=1)
    for name, value in one.server["model"].items():
        torch.testing.assert_close(value, other.server["model"][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda data: run(data, rouds=3), ["unknown option 'rouds'", "rounds"]),
        (lambda data: run(data, rounds=0), ["rounds = 0", "at least 1"]),
        (lambda data: run(data, lr=-1.0), ["lr = -1", "above 0"]),
        (lambda data: run(data, lr=math.inf), ["lr = inf"]),
        (lambda data: run(data, participation=1.5), ["participation = 1.5", "at most 1"]),
        (lambda data: run(data, clients=201), ["201 clients", "200"]),
        (lambda data: run(data, train_limit=10**6), ["1000000", "1 to 1442"]),
        (lambda data: run(data, long_tail=1000.0), ["rho = 1000"]),
        (lambda data: run(data, few_shot=9), ["9 of the 10 classes"]),
        (lambda data: run(data, few_shot=4), ["5 classes", "4 classes"]),
        (lambda data: run(data, "fedsk"), ["'fedsk'", "fedsc"]),
        (lambda data: run(data, model="mpl"), ["'mpl'", "mlp"]),
        (lambda data: run(data, device="quantum"), ["'quantum'", "cpu"]),
        (lambda data: fedsc.run("digts"), ["'digts'", "digits"]),
    ],
)
def test_what_cannot_run_is_explained(
    digits: Dataset, call: Callable[[Dataset], object], words: list[str]
) -> None:
    with pytest.raises(FedscError) as raised:
        call(digits)
    for word in words:
        assert word in str(raised.value)
    assert "\n" not in str(raised.value)


# Found in review ----------------------------------------------------------------------------------


def test_a_run_that_diverges_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    run = fedsc.run("digits", "fedavg", rounds=2, epochs=1, train_limit=200, lr=1e20)
    assert run.records[-1]["diverged"] is True
    assert capsys.readouterr().err.count("has diverged in round") == 1


def test_classes_without_test_images_do_not_count_as_wrong() -> None:
    whole = fedsc.load_dataset("digits")
    kept = whole.test_labels < 5
    data = dataclasses.replace(
        whole, test_images=whole.test_images[kept], test_labels=whole.test_labels[kept]
    )
    record = fedsc.run(data, "fedavg", partition="iid", rounds=4, epochs=5, lr=0.1).records[-1]
    assert record["per_class"][5:] == [None] * 5
    # Five classes of about equal size at every client: the mean over clients is the accuracy.
    assert record["client_mean"] == pytest.approx(record["accuracy"], abs=0.02)


def test_data_that_hold_out_classes_cannot_hold_out_more() -> None:
    few = fedsc.run("digits", "fedavg", few_shot=5, rounds=1, epochs=1, train_limit=200)
    assert few.records[0]["accuracy_ci95"] > 0
    from fedsc.data.dataset import hold_out_classes

    once = hold_out_classes(fedsc.load_dataset("digits"), 4)
    with pytest.raises(fedsc.FedscError, match="holds out classes already"):
        hold_out_classes(once, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fedsc,u_grad=true,u_mode=round", "u_grad needs u_mode=batch"),
        ("fedsc,max_age=3", "max_age needs pool=bank"),
        ("fedsc,absent=zero_fill,global_mean=weighted", "two readings of Eq. 5"),
        ("fedsc,angle=arccos,metric=l2", "angle=arccos needs metric=angle"),
    ],
)
def test_options_that_do_not_go_together_are_refused(text: str, words: str) -> None:
    with pytest.raises(fedsc.FedscError, match=words):
        fedsc.run("digits", text, rounds=1)


def test_min_u_is_recorded_for_every_way_of_measuring_it() -> None:
    for mode in ("batch", "ema", "epoch", "round"):
        run = fedsc.run("digits", f"fedsc,u_mode={mode}", rounds=2, epochs=1, train_limit=200)
        assert "min_u" not in run.records[0]  # there is no prototype yet
        assert 0 < run.records[1]["min_u"] < 100


def test_fedrcl_takes_the_features_of_a_network_without_stages() -> None:
    class Bare(nn.Module):
        def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
            self.classifier = nn.Linear(16, num_classes)

        def forward(self, images: Tensor) -> fedsc.Outputs:
            features = self.body(images)
            return fedsc.Outputs(features, self.classifier(features))

    run = fedsc.run("digits", "fedrcl", Bare, rounds=1, epochs=1, train_limit=200)
    assert run.records[0]["train_loss"]["contrast"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": fedsc.FedSC}, "give a name, or an object"),
        ({"dataset": None}, "give a name or a fedsc.Dataset"),
        ({"model": nn.Linear(1, 1)}, "called with"),
        ({"model": lambda shape, classes: 1 / 0}, "ZeroDivisionError"),
    ],
)
def test_wrong_objects_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(fedsc.FedscError, match=words):
        fedsc.run(**{"dataset": "digits", "rounds": 1, **arguments})


def test_personal_models_have_no_nearest_prototype() -> None:
    run = fedsc.run(
        "digits", "fedproto,evaluation=personal_mean", rounds=1, epochs=1, train_limit=200
    )
    assert "nearest_prototype" not in run.records[0]
    with pytest.raises(fedsc.FedscError, match="each client has its own model"):
        _ = run.model
