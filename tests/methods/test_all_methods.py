"""What holds for every method: zero is FedAvg, rounds missed, states kept, resumed and spilled."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsc
from fedsc import FedscError, Run
from fedsc.experiments.runner import build, execute, load
from fedsc.methods import METHODS, FedCDA, method_from_text
from fedsc.methods.fednh import spread_directions
from fedsc.progress import Silent
from fedsc.spec import RunSpec
from fedsc.state import State, flatten

TINY: dict[str, Any] = {
    "dataset": "digits",
    "train_limit": 300,
    "clients": 5,
    "rounds": 3,
    "epochs": 1,
    "lr": 0.05,
}


def tiny_run(method: str, **changes: Any) -> Run:
    return fedsc.run(method=method, **{**TINY, **changes})


def assert_same_weights(ours: State, theirs: State) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    "zero",
    [
        "fedprox,mu=0",
        "moon,mu=0",
        "fedntd,beta=0",
        "fedproto,weight=0",
        "fedrcl,weight=0",
        "fedsc,rpcl_weight=0,cpdr_weight=0",
        "fedcda,warmup=1",
    ],
)
@pytest.mark.parametrize("changes", [{}, {"participation": 0.4}, {"norm": "batch"}])
def test_with_a_zero_coefficient_it_is_fedavg_bit_for_bit(
    zero: str, changes: dict[str, Any]
) -> None:
    ours, fedavg = tiny_run(zero, **changes), tiny_run("fedavg", **changes)
    assert_same_weights(ours.server["model"], fedavg.server["model"])
    assert [r["accuracy"] for r in ours.records] == [r["accuracy"] for r in fedavg.records]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "fedavg"])
def test_without_zero_it_is_not_fedavg(method: str) -> None:
    text = "fedcda,warmup=0" if method == "fedcda" else method
    ours, fedavg = tiny_run(text), tiny_run("fedavg")
    weight = next(iter(fedavg.server["model"]))
    assert not torch.equal(ours.server["model"][weight], fedavg.server["model"][weight])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_with_half_of_the_clients_and_missing_classes(method: str) -> None:
    """Two of five take part, so some come late and some miss rounds; alpha 0.1 empties classes."""
    settings = {"participation": 0.4, "partition": "nid1:0.1", "rounds": 6, "epochs": 2}
    text = "moon,mu=1" if method == "moon" else method
    records = tiny_run(text, **settings).records
    assert all(len(record["cohort"]) == 2 for record in records)
    assert all(value is not None for r in records for value in r["train_loss"].values())
    assert max(record["accuracy"] for record in records) > 0.2


def test_fednh_begins_with_a_simplex_where_there_is_one() -> None:
    rows = spread_directions(5, 8, "etf")
    cosines = rows @ rows.T
    assert torch.allclose(cosines, torch.eye(5) * 1.25 - 0.25, atol=1e-6)
    with pytest.raises(FedscError, match="as many features as classes, not 4 for 5"):
        spread_directions(5, 4, "etf")


def test_fednh_with_rho_one_keeps_its_prototypes() -> None:
    spec = RunSpec(**{**TINY, "method": "fednh,rho=1"})
    federation, _ = build(spec, load(spec), method_from_text("fednh,rho=1"))
    before = federation.server["model"]["classifier.prototypes"].clone()
    for _ in federation.rounds():
        assert torch.equal(federation.server["model"]["classifier.prototypes"], before)
    orthonormal = before @ before.T
    torch.testing.assert_close(orthonormal, torch.eye(10), atol=1e-5, rtol=0)


def test_fedcda_with_one_model_kept_is_uniform_fedavg() -> None:
    ours = tiny_run("fedcda,cache=1,warmup=0")
    fedavg = tiny_run("fedavg,aggregation=uniform")
    for name, tensor in fedavg.server["model"].items():
        torch.testing.assert_close(ours.server["model"][name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_fedcda_averages_the_chosen_models_of_absent_clients_too(weights: str) -> None:
    """The server's running sums against the mean taken from its records, after missed rounds."""
    text = f"fedcda,warmup=0,global_weights={weights}"
    spec = RunSpec(**{**TINY, "method": text, "participation": 0.4, "rounds": 5})
    federation, _ = build(spec, load(spec), method_from_text(text))
    for _ in federation.rounds():
        pass
    records = [federation.records[k] for k in federation.records]
    shares = [float(r["samples"]) if weights == "samples" else 1.0 for r in records]
    for name, tensor in federation.server["model"].items():
        chosen = [r["models"][str(int(r["chosen"]))][name].double() for r in records]
        mean = sum(w * s for w, s in zip(chosen, shares, strict=True)) / sum(shares)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-5, atol=1e-6)


def test_fedcda_groups_stay_small_whatever_the_number_of_clients() -> None:
    method = FedCDA()
    server = {"seed": torch.tensor(0), "round": torch.tensor(3)}
    for number in (1, 2, 10, 100, 1000):
        groups = method.split(server, list(range(number)))
        assert sorted(k for group in groups for k in group) == list(range(number))
        assert max(map(len, groups)) <= 7
    sizes = sorted(len(group) for group in method.split(server, list(range(10))))
    assert sizes == [3, 3, 4]


@pytest.mark.parametrize("evaluation", ["avg_classifier", "avg_proto", "personal_mean", "ensemble"])
def test_fedproto_in_its_four_ways_of_evaluation(evaluation: str) -> None:
    run = tiny_run(f"fedproto,evaluation={evaluation}", partition="nid1:0.1", rounds=5, epochs=4)
    averaged = evaluation.startswith("avg")
    weights = sum(w.numel() * w.element_size() for w in run.server["model"].values())
    bytes_up = run.records[-1]["bytes_up"]
    assert bytes_up == 5 * (averaged * weights + (10 * 64 + 10) * 4)
    if not averaged:  # the clients' own models never meet: the global one stays as it began
        fresh = tiny_run("fedavg", rounds=1)
        assert run.records[-1]["accuracy"] < 0.9
        assert fresh.server["model"].keys() == run.server["model"].keys()


class StopAfter(Silent):
    """Kills the run as a person would, with Ctrl-C, after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def round_done(self, record: dict[str, Any]) -> None:
        if record["round"] == self.rounds:
            raise KeyboardInterrupt


def without_timing(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "timing"} for line in lines]


@pytest.mark.parametrize(
    "text",
    ["fedavg", "moon", "fedproto,evaluation=ensemble", "fedcda,warmup=0.2", "fedsc,pool=bank"],
)
def test_a_run_cut_short_goes_on_as_if_nothing_had_happened(text: str, tmp_path: Path) -> None:
    """With a memory limit of a few kilobytes, so that every client's state passes over the disk."""
    settings = {"participation": 0.6, "rounds": 5, "client_memory": 1e-4}
    spec = RunSpec(**{**TINY, "method": text, **settings})
    data, method = load(spec), method_from_text(text)
    whole = execute(spec, data, method, out=tmp_path / "whole", checkpoint_seconds=0)
    for stop in (1, 3):
        cut = tmp_path / f"cut{stop}"
        with pytest.raises(KeyboardInterrupt):
            execute(spec, data, method, None, cut, StopAfter(stop), checkpoint_seconds=0)
        resumed = execute(spec, data, method, None, cut, resume=True, checkpoint_seconds=0)
        a, b = flatten(whole.server), flatten(resumed.server)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
        ours, theirs = (without_timing(p / "metrics.jsonl") for p in (cut, tmp_path / "whole"))
        assert ours == theirs


def test_resuming_as_another_run_is_refused_with_the_difference(tmp_path: Path) -> None:
    spec = RunSpec(**{**TINY, "method": "fedavg"})
    data = load(spec)
    execute(spec, data, method_from_text("fedavg"), out=tmp_path / "run")
    other = RunSpec(**{**TINY, "method": "fedavg", "lr": 0.1})
    with pytest.raises(fedsc.FedscError, match=r"lr was 0\.05, is now 0\.1"):
        execute(other, data, method_from_text("fedavg"), out=tmp_path / "run", resume=True)


def test_a_tenth_method_from_the_documentation_runs_without_touching_the_package(
    tmp_path: Path,
) -> None:
    """The very code that docs/adding-a-method.md shows, under forty lines."""
    page = Path(__file__).parents[2] / "docs" / "adding-a-method.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[0]
    assert len(code.splitlines()) < 40
    file = tmp_path / "feddecay.py"
    file.write_text(code)
    plain = tiny_run("fedavg")
    zero = tiny_run(f"{file}:FedDecay,strength=0")
    assert_same_weights(zero.server["model"], plain.server["model"])
    strong = tiny_run(f"{file}:FedDecay,strength=0.1")
    assert strong.records[-1]["mean_norm"] < zero.records[-1]["mean_norm"]
    with pytest.raises(fedsc.FedscError, match="strength = -1 is out of range"):
        tiny_run(f"{file}:FedDecay,strength=-1")
