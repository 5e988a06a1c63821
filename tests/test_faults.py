"""Clients that drop out, come late or send rubbish: drawn, found out, counted, survived."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fedsc
from fedsc import FedAvg, FedscError, LocalResult, Method, Run, Upload
from fedsc.experiments.runner import build, execute, load
from fedsc.faults import draw_faults, find_unusable
from fedsc.methods import METHODS, method_from_text
from fedsc.report.runs import read_run, setting_of
from fedsc.report.table import comparison_rows
from fedsc.spec import RunSpec
from fedsc.state import State, flatten

TINY: dict[str, Any] = {
    "dataset": "digits",
    "train_limit": 300,
    "clients": 6,
    "rounds": 4,
    "epochs": 1,
    "lr": 0.05,
    "device": "cpu",
    "engine": "sequential",
}
CHANCE = st.floats(0, 1)


def tiny_run(method: str | Method, **changes: Any) -> Run:
    return fedsc.run(method=method, **{**TINY, **changes})


def lost(record: dict[str, Any]) -> set[int]:
    rejected = {each["client"] for each in record.get("rejected", [])}
    return {*record.get("dropped", []), *record.get("late", []), *rejected}


# Schedules ----------------------------------------------------------------------------------------


@given(st.integers(0, 2**53), st.integers(0, 1000), st.integers(1, 50), CHANCE, CHANCE)
def test_schedules(seed: int, round: int, clients: int, dropout: float, straggler: float) -> None:
    dropped, late = draw_faults(seed, round, clients, dropout, straggler)
    assert (dropped, late) == draw_faults(seed, round, clients, dropout, straggler)
    assert dropped | late <= set(range(clients))
    assert not dropped & late
    assert draw_faults(seed, round, clients, 0, 0) == (set(), set())
    assert draw_faults(seed, round, clients, 1, straggler)[0] == set(range(clients))
    assert draw_faults(seed, round, clients, 0, 1) == (set(), set(range(clients)))
    # Who drops out does not depend on who is late, and more drop out where the chance is higher.
    assert draw_faults(seed, round, clients, dropout, 0)[0] == dropped
    assert draw_faults(seed, round, clients, (1 + dropout) / 2, straggler)[0] >= dropped


def test_as_many_fail_as_were_asked_for() -> None:
    drawn = [draw_faults(0, round, 100, 0.3, 0.2) for round in range(1, 101)]
    dropped, late = (sum(map(len, sets)) / 10_000 for sets in zip(*drawn, strict=True))
    assert dropped == pytest.approx(0.3, abs=0.02)
    assert late == pytest.approx(0.7 * 0.2, abs=0.02)
    assert len({tuple(sorted(each[0])) for each in drawn}) == 100


# Uploads ------------------------------------------------------------------------------------------


def upload(client: int, **changes: Tensor) -> Upload:
    weights = {"w": torch.full((2, 3), 1.0), "steps": torch.tensor(4)}
    extra = {"prototypes": torch.ones(2, 3), "counts": torch.ones(2)}
    model = {**weights, **{k: v for k, v in changes.items() if k in weights or k == "more"}}
    return Upload(client, 10, model, {**extra, **{k: changes[k] for k in changes if k in extra}})


MODEL: State = {"w": torch.zeros(2, 3), "steps": torch.tensor(0)}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"w": torch.full((2, 3), math.nan)}, "w is not finite"),
        ({"w": torch.tensor([[1, 1, 1], [1, -math.inf, 1]])}, "w is not finite"),
        ({"prototypes": torch.full((2, 3), math.inf)}, "prototypes is not finite"),
        ({"counts": torch.tensor([1.0, math.nan])}, "counts is not finite"),
        ({"w": torch.full((2, 3), 500.0)}, "its length 1.22e+03 is above 1e+03"),
        ({"w": torch.full((2, 3), 1e30)}, "its length inf is above 1e+03"),  # overflows
        ({"w": torch.ones(3, 2)}, "w is (3, 2), not (2, 3)"),
        ({"w": torch.ones(())}, "w is (), not (2, 3)"),
        ({"w": torch.ones(2, 3).double()}, "w is torch.float64, not torch.float32"),
        ({"steps": torch.tensor(4.0)}, "steps is torch.float32, not torch.int64"),
        ({"more": torch.ones(1)}, "more is not asked for"),
        ({"prototypes": torch.ones(5, 3)}, "prototypes is (5, 3), not (2, 3)"),
    ],
)
def test_what_is_rejected_and_why(wrong: dict[str, Tensor], reason: str) -> None:
    uploads = [upload(7), upload(3, **wrong), upload(5)]
    assert find_unusable(uploads, MODEL) == {3: reason}


def test_missing_tensors() -> None:
    empty = Upload(1, 10, {}, upload(0).extra)
    bare = Upload(2, 10, upload(0).model, {})
    found = find_unusable([upload(0), empty, bare, upload(3)], MODEL)
    assert found == {1: "steps is missing", 2: "counts is missing"}


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=6, max_size=6),
    st.lists(st.sampled_from([0.0, 1e30, -1e-30]), min_size=6, max_size=6),
)
def test_what_is_sound_is_never_rejected(weights: list[float], prototypes: list[float]) -> None:
    sound = upload(
        0, w=torch.tensor(weights).view(2, 3), prototypes=torch.tensor(prototypes).view(2, 3)
    )
    assert find_unusable([sound, upload(1)], MODEL) == {}
    assert find_unusable([sound], MODEL) == {}
    assert find_unusable([], MODEL) == {}


def test_a_long_model_may_get_longer() -> None:
    long = {"w": torch.full((2, 3), 500.0), "steps": torch.tensor(0)}
    assert find_unusable([upload(0, w=torch.full((2, 3), 600.0))], long) == {}


# Runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [*METHODS, "fedsc,pool=bank", "fedsc,init_protos=true", "fedproto,evaluation=ensemble"],
)
def test_every_method_copes_with_fewer_clients(method: str) -> None:
    """Some, most and all of a round's clients fail; whatever is left is what counts."""
    if method == "fedcda":
        method = "fedcda,warmup=0"
    for dropout, straggler in ((0.3, 0.3), (0.9, 0.0)):
        run = tiny_run(method, dropout=dropout, straggler=straggler, partition="nid1:0.1")
        assert any(lost(record) for record in run.records)
        for name, tensor in flatten(run.server).items():  # a first prototype has drifted nowhere
            assert bool(tensor.isfinite().all()) or name == "drift", name
        assert all(r["accuracy"] is not None for r in run.records)
    nobody = tiny_run(method, dropout=1.0, rounds=2)
    assert [record["dropped"] for record in nobody.records] == [list(range(6))] * 2
    assert nobody.records[0]["accuracy"] == nobody.records[1]["accuracy"]
    assert nobody.records[-1]["bytes_up"] == nobody.records[-1]["bytes_down"] == 0


def test_losing_clients_is_having_fewer(tmp_path: Path) -> None:
    """A round of which some drop out is the same round of the others alone, bit for bit."""
    spec = RunSpec(**{**TINY, "method": "fedsc", "dropout": 0.4})
    method, data = method_from_text("fedsc"), load(spec)
    with_faults, _ = build(spec, data, method)
    record = with_faults.run_round(1)
    assert 0 < len(record["dropped"]) < 6
    plain, _ = build(dataclasses.replace(spec, dropout=0.0), data, method)
    others = [k for k in range(6) if k not in record["dropped"]]
    expected = flatten(method.aggregate(plain.server, plain.fit(1, others), {}))
    for name, tensor in flatten(with_faults.server).items():
        assert torch.equal(tensor.nan_to_num(), expected[name].nan_to_num()), name
    assert record["bytes_down"] < plain.run_round(1)["bytes_down"]


def test_a_straggler_remembers_and_one_that_dropped_out_does_not() -> None:
    for options, remembers in (({"dropout": 0.5}, False), ({"straggler": 0.5}, True)):
        spec = RunSpec(**{**TINY, "method": "moon", **options})
        federation, _ = build(spec, load(spec), method_from_text("moon"))
        record = federation.run_round(1)
        gone = lost(record)
        assert 0 < len(gone) < 6
        everybody = set(range(6))
        assert set(federation.memories) == (everybody if remembers else everybody - gone)
        sent = everybody if remembers else everybody - gone
        weights = sum(w.numel() * w.element_size() for w in federation.server["model"].values())
        assert record["bytes_up"] == record["bytes_down"] == len(sent) * weights


@dataclasses.dataclass(frozen=True)
class Faulty(FedAvg):
    """Client 2 sends what is wrong with it; every client remembers how often it has trained."""

    name = "faulty"
    fault: str = "nan"

    def upload(self, result: LocalResult) -> State:
        extra = torch.ones(3)
        if int(result.client.id) != 2:
            return {"extra": extra}
        if self.fault == "nan":
            result.model["classifier.weight"][0, 0] = math.nan
        if self.fault == "exploded":
            result.model["classifier.weight"] *= 1e9
        if self.fault == "extra":
            extra[1] = math.inf
        return {"extra": torch.ones(4) if self.fault == "shape" else extra}

    def remember(self, result: LocalResult) -> State:
        return {"visits": result.client.memory.get("visits", torch.zeros(())) + 1}


@pytest.mark.parametrize("engine", ["sequential", "workers", "graphs"])
@pytest.mark.parametrize("fault", ["nan", "exploded", "extra", "shape"])
def test_a_faulty_client_is_as_good_as_absent(
    fault: str, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = RunSpec(**{**TINY, "engine": engine, "rounds": 2})
    federation, _ = build(spec, load(spec), Faulty(fault=fault))
    records = list(federation.rounds())
    for record in records:
        (rejected,) = record["rejected"]
        assert rejected["client"] == 2
        assert "diverged" not in record
    assert capsys.readouterr().err.count("client 2's upload is rejected in round 1") == 1
    assert set(federation.memories) == {0, 1, 3, 4, 5}

    plain, _ = build(spec, load(spec), FedAvg())
    for round in (1, 2):
        uploads = plain.fit(round, [0, 1, 3, 4, 5])
        plain.server = FedAvg().aggregate(plain.server, uploads, {})
    for name, tensor in plain.server["model"].items():
        assert torch.equal(federation.server["model"][name], tensor), name


def test_a_late_client_that_diverged_forgets_it() -> None:
    spec = RunSpec(**{**TINY, "straggler": 1.0})
    federation, _ = build(spec, load(spec), Faulty())
    record = federation.run_round(1)
    assert sorted(record["late"]) == [0, 1, 2, 3, 4, 5]
    assert "rejected" not in record
    assert set(federation.memories) == {0, 1, 3, 4, 5}


def test_without_faults_nothing_is_recorded_of_them() -> None:
    for record in tiny_run("fedsc", rounds=1).records:
        assert not {"dropped", "late", "rejected"} & set(record)


def test_a_run_in_which_nobody_is_left_keeps_its_model() -> None:
    run = tiny_run("fedavg", lr=1e30, rounds=2)
    assert all(record["diverged"] and len(record["rejected"]) == 6 for record in run.records)
    assert all(bool(tensor.isfinite().all()) for tensor in run.server["model"].values())


# Too few ------------------------------------------------------------------------------------------


def test_too_few_clients_stop_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    spec = RunSpec(**{**TINY, "method": "moon", "dropout": 0.25, "min_clients": 4, "seed": 1})
    data, method = load(spec), method_from_text("moon")
    with pytest.raises(FedscError, match=r"round \d+ has [0-3] usable uploads.*asks for 4") as why:
        execute(spec, data, method, out=tmp_path / "run")
    stopped = int(str(why.value).split()[1])
    records = read_run(tmp_path / "run").records
    assert [record["round"] for record in records] == list(range(1, stopped))
    assert stopped > 2
    assert all(6 - len(lost(record)) >= 4 for record in records)
    before = (tmp_path / "run" / "state.safetensors").read_bytes()
    with pytest.raises(FedscError, match=f"round {stopped} has"):  # the same clients drop out again
        execute(spec, data, method, out=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "state.safetensors").read_bytes() == before
    # What the checkpoint holds is what a run of so many rounds ends with.
    shorter = dataclasses.replace(spec, rounds=stopped - 1)
    execute(shorter, data, method, out=tmp_path / "shorter")
    assert (tmp_path / "shorter" / "state.safetensors").read_bytes() == before


def test_more_clients_than_a_round_has_are_refused() -> None:
    with pytest.raises(FedscError, match="min_clients = 4: a round has 3 clients only"):
        tiny_run("fedavg", min_clients=4, participation=0.5)


# Shown --------------------------------------------------------------------------------------------


def test_lost_clients_are_in_the_table_and_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "run"
    tiny_run("fedavg", out=path, dropout=0.25, straggler=0.1)
    run = read_run(path)
    share = sum(len(lost(record)) for record in run.records) / (4 * 6)
    assert share > 0
    names, rows = comparison_rows([run])
    assert rows[0][names.index("lost")] == f"{100 * share:.1f}"
    assert "25% drop out, 10% late" in setting_of(run.spec)
    assert all(json.dumps(record, allow_nan=False) for record in run.records)
