"""Attacks: who attacks, what is sent in place of what, and that nobody does unless asked."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsc
from fedsc import Federation, FedscError, RunSpec, Upload
from fedsc.attacks import attacked, choose_attackers
from fedsc.cli import app
from fedsc.experiments.runner import build, load
from fedsc.methods import method_from_text
from fedsc.report.runs import read_run, setting_of

TINY: dict[str, Any] = {
    "train_limit": 300,
    "rounds": 2,
    "epochs": 1,
    "lr": 0.05,
    "device": "cpu",
    "engine": "sequential",
}


def federation(method: str = "fedsc", **options: Any) -> Federation:
    spec = RunSpec(method=method, **{**TINY, **options})
    return build(spec, load(spec), method_from_text(method))[0]


def test_attackers_are_drawn_by_the_seed_and_a_larger_share_adds_to_them() -> None:
    groups = [set(choose_attackers(0, 20, share)) for share in (0.0, 0.01, 0.1, 0.3, 1.0)]
    assert [len(group) for group in groups] == [0, 1, 2, 6, 20]
    for smaller, larger in itertools.pairwise(groups):
        assert smaller <= larger
    assert choose_attackers(0, 20, 0.3) == choose_attackers(0, 20, 0.3)
    assert len({tuple(choose_attackers(seed, 20, 0.3)) for seed in range(10)}) > 5


def test_what_is_sent_by_hand() -> None:
    received = {"w": torch.tensor([1.0, 2.0]), "running_var": torch.tensor([5.0])}
    honest = Upload(
        3,
        7,
        {"w": torch.tensor([2.0, 1.5]), "running_var": torch.tensor([6.0])},
        {"prototypes": torch.tensor([[1.0, -0.5]]), "counts": torch.tensor([4.0])},
    )
    flipped = attacked("sign-flip", honest, received, "prototypes")
    assert flipped.model["w"].tolist() == [0.0, 2.5]
    assert flipped.model["running_var"].tolist() == [6.0]  # a variance below 0 would be no attack
    scaled = attacked("scaled-update", honest, received, "prototypes")
    assert scaled.model["w"].tolist() == [11.0, -3.0]
    poisoned = attacked("poisoned-prototypes", honest, received, "prototypes")
    assert poisoned.extra["prototypes"].tolist() == [[-10.0, 5.0]]
    assert poisoned.extra["counts"].tolist() == [4.0]
    assert poisoned.model is honest.model
    assert attacked("label-flip", honest, received, "prototypes") is honest
    assert honest.model["w"].tolist() == [2.0, 1.5]


@pytest.mark.parametrize("method", ["fedsc", "fedproto", "fednh"])
@pytest.mark.parametrize("attack", ["sign-flip", "scaled-update", "poisoned-prototypes"])
def test_attackers_uploads_alone_are_changed(method: str, attack: str) -> None:
    plain = federation(method)
    wrong = federation(method, attack=attack, attackers=0.3)
    assert len(wrong.attackers) == 3
    everyone = list(range(10))
    for honest, sent in zip(plain.fit(1, everyone), wrong.fit(1, everyone), strict=True):
        key = plain.method.sent_prototypes
        assert key is not None
        weight = next(iter(honest.model))
        same_weights = torch.equal(honest.model[weight], sent.model[weight])
        same_prototypes = torch.equal(honest.extra[key], sent.extra[key])
        attacks = honest.client in wrong.attackers
        assert same_weights == (not attacks or attack == "poisoned-prototypes")
        assert same_prototypes == (not attacks or attack != "poisoned-prototypes")


def test_label_flip_turns_the_attackers_labels_around_and_no_others() -> None:
    found = federation("fedavg", attack="label-flip", attackers=0.3)
    labels = found.local_data.train_labels
    for client, part in enumerate(found.parts):
        own = found.data.train_labels[part]
        expected = 9 - own if client in found.attackers else own
        assert torch.equal(labels[part], expected)
        # Clients are judged by the classes they really hold; they count what they train on.
        real = found.class_counts[client].tolist()
        assert real == torch.bincount(own, minlength=10).tolist()
        trained = found.clients[client].class_counts.tolist()
        assert trained == (real[::-1] if client in found.attackers else real)
    assert torch.equal(found.engine.images.labels, labels)
    assert found.data.checksum() == federation("fedavg").data.checksum()


@pytest.mark.parametrize("method", ["fedavg", "fedsc,init_protos=true"])
def test_an_attack_by_nobody_is_no_attack_bit_for_bit(method: str) -> None:
    plain = fedsc.run(method=method, **TINY)
    none = fedsc.run(method=method, attack="label-flip", attackers=0.0, **TINY)
    for name, tensor in plain.server["model"].items():
        assert torch.equal(tensor, none.server["model"][name])
    assert plain.accuracy == none.accuracy
    assert none.records[-1]["attackers"] == []


def test_the_record_names_the_attackers_of_the_round(tmp_path: Path) -> None:
    run = fedsc.run(
        method="fedavg",
        attack="sign-flip",
        attackers=0.3,
        participation=0.5,
        out=tmp_path / "run",
        **TINY,
    )
    all_attackers = set(choose_attackers(0, 10, 0.3))
    for record in run.records:
        assert set(record["attackers"]) == all_attackers & set(record["cohort"])
    assert "30% attack by sign-flip" in setting_of(read_run(tmp_path / "run").spec)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--attack", "sign-flip"], "needs --attackers"),
        (["--attackers", "0.3"], "needs --attack"),
        (["--attack", "sign-flop", "--attackers", "0.3"], "did you mean 'sign-flip'"),
        (["--attack", "sign-flip", "--attackers", "1.3"], "attackers = 1.3"),
        (
            ["--method", "fedavg", "--attack", "poisoned-prototypes", "--attackers", "0.3"],
            "fedavg sends no prototypes",
        ),
    ],
)
def test_mistakes_are_named(options: list[str], words: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(FedscError, match=words):
        app(["run", *options, "--rounds", "1", "--out", str(out)], standalone_mode=False)
    assert not list(tmp_path.glob("out/*/spec.json"))
