"""Differential privacy: what is clipped, what is noised, what it costs, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import fedsc
from fedsc import Federation, FedscError, RunSpec
from fedsc.data.sources import load_dataset
from fedsc.engines.private import PrivateSteps
from fedsc.engines.sequential import SequentialEngine, Visit
from fedsc.experiments.runner import build
from fedsc.faults import find_unusable
from fedsc.method import Client, LocalResult, Method, Upload
from fedsc.methods import METHODS, method_from_text
from fedsc.models import build_model
from fedsc.options import option
from fedsc.privacy import (
    Ledger,
    Privacy,
    Release,
    clip_rows,
    epsilon_of,
    hide_clients,
    noised_mean_model,
    noised_totals,
    poisson_batches,
    pooled_prototypes,
    solve_noise,
)
from fedsc.state import State, flatten

QUICK: dict[str, Any] = {
    "train_limit": 200,
    "clients": 4,
    "rounds": 2,
    "epochs": 1,
    "lr": 0.05,
    "engine": "sequential",
}
RECORD: dict[str, Any] = {"dp_unit": "record", "dp_clip": 1.0}
CLIENT: dict[str, Any] = {"dp_unit": "client", "dp_clip": 1.0}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def quick(method: str, **options: Any) -> fedsc.Run:
    return fedsc.run("digits", method, **{**QUICK, **options})


def federation(method: str, **options: Any) -> Federation:
    spec = RunSpec(method=method, **{**QUICK, **options})
    return build(spec, load_dataset("digits"), method_from_text(method, "digits"))[0]


# Clipping and noise -------------------------------------------------------------------------------


def test_a_vector_is_scaled_to_the_bound_or_left_as_it_is() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.3, 0.1], [0.0, 0.0]])
    clipped = clip_rows(vectors, 1.0)
    torch.testing.assert_close(clipped[0], torch.tensor([0.6, 0.8]))
    assert torch.equal(clipped[1:], vectors[1:])


def test_a_vector_without_a_finite_length_is_none() -> None:
    vectors = torch.tensor([[math.inf, 0.0], [math.nan, 1.0], [-math.inf, math.nan], [0.6, 0.8]])
    assert torch.equal(clip_rows(vectors, 1.0), torch.tensor([[0.0, 0.0]] * 3 + [[0.6, 0.8]]))


def test_noise_on_sums_has_the_size_of_a_feature_and_on_counts_that_of_a_record() -> None:
    totals = {"sums": torch.zeros(400, 50), "counts": torch.full((400,), 1e4)}
    noised = noised_totals(totals, clip=3.0, noise=2.0, rng=rng())
    # 20,000 and 400 draws: 4 standard errors are 2% and 14%.
    assert float(noised["sums"].std()) == pytest.approx(6.0, rel=0.02)
    assert float((noised["counts"] - 1e4).std()) == pytest.approx(2.0, rel=0.15)


def test_without_noise_totals_are_as_they_were() -> None:
    totals = {"sums": torch.randn(3, 4), "counts": torch.tensor([0.0, 1.0, 5.0])}
    noised = noised_totals(totals, 1.0, 0.0, rng())
    assert all(torch.equal(noised[name], totals[name]) for name in totals)


def test_a_class_that_is_only_noise_is_absent_and_no_mean_is_longer_than_a_feature() -> None:
    counts = torch.tensor([0.0] * 500 + [60.0] * 500)
    totals = {"sums": torch.zeros(1000, 64), "counts": counts}
    noised = noised_totals(totals, clip=0.5, noise=5.0, rng=rng())
    present = noised["counts"] > 0
    assert int(present[:500].sum()) <= 5  # 1 in 740 lies above 3 standard deviations
    assert present[500:].all()
    assert not noised["sums"][~present].any()
    means = noised["sums"][present] / noised["counts"][present, None]
    assert float(means.norm(dim=-1).max()) <= 0.5 * (1 + 1e-5)


def test_the_mean_of_clipped_updates_by_hand() -> None:
    before = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0]), "steps": torch.tensor(7)}
    far = {"a": torch.tensor([4.0]), "b": torch.tensor([5.0]), "steps": torch.tensor(9)}
    near = {"a": torch.tensor([1.3]), "b": torch.tensor([1.4]), "steps": torch.tensor(8)}
    # The updates are (3, 4) of length 5, which becomes (0.6, 0.8), and (0.3, 0.4).
    mean = noised_mean_model(before, [far, near], clip=1.0, noise=0.0, rng=rng())
    torch.testing.assert_close(mean["a"], torch.tensor([1.45]))
    torch.testing.assert_close(mean["b"], torch.tensor([1.6]))
    assert int(mean["steps"]) == 7


def test_noise_on_the_mean_of_updates_shrinks_with_the_clients() -> None:
    before = {"w": torch.zeros(40_000)}
    mean = noised_mean_model(before, [before] * 8, clip=2.0, noise=3.0, rng=rng())
    assert float(mean["w"].std()) == pytest.approx(2.0 * 3.0 / 8, rel=0.02)


def test_pooled_prototypes_by_hand() -> None:
    prototypes = torch.tensor([[[6.0, 8.0], [0.0, 0.0]], [[2.0, 0.0], [0.0, 2.0]]])
    held = torch.tensor([[True, False], [True, True]])
    # In units of the clip 4: client 0 gives (.6, .8, 1), of length sqrt 2; client 1 gives
    # (.5, 0, 1) and (0, .5, 1), of length sqrt 2.5. Class 0 is the mean of the two by 1/length.
    a, b = 1 / math.sqrt(2), 1 / math.sqrt(2.5)
    first = [4 * (0.6 * a + 0.5 * b) / (a + b), 4 * 0.8 * a / (a + b)]
    mean, exists = pooled_prototypes(prototypes, held, 4.0, 0.0, rng())
    torch.testing.assert_close(mean, torch.tensor([first, [0.0, 2.0]]))
    assert exists.all()


def test_a_class_that_nobody_holds_has_no_pooled_prototype() -> None:
    prototypes, held = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool)
    mean, exists = pooled_prototypes(prototypes, held, 1.0, 0.0, rng())
    assert not mean.any()
    assert not exists.any()


def test_every_record_is_in_a_batch_with_the_same_probability() -> None:
    batches = poisson_batches(50, 0.2, 4000, rng())
    sizes = torch.tensor([float(len(batch)) for batch in batches])
    assert float(sizes.mean()) == pytest.approx(10, rel=0.02)
    assert float(sizes.var()) == pytest.approx(50 * 0.2 * 0.8, rel=0.1)  # binomial
    counts = torch.bincount(torch.cat(batches), minlength=50) / 4000
    assert float((counts - 0.2).abs().max()) < 0.03  # 4.7 standard errors


# DP-SGD -------------------------------------------------------------------------------------------


def private_steps(method: str, clip: float, **options: Any) -> PrivateSteps:
    """The steps of client 0 in round 2, of a federation that has one round behind it."""
    made = federation(method, dp_unit="record", dp_clip=clip, **options)
    next(made.rounds())
    engine, data = made.engine, made.clients[0]
    assert isinstance(engine, SequentialEngine)
    client = Client(torch.tensor(0), data.class_counts, made.memory_of(0))
    message = made.method.broadcast(made.server)
    visit = Visit(engine, 2, data, client, made.server["model"], message, lambda number: None)
    visit.model.train()
    from fedsc.engines.local import plan_of

    return PrivateSteps(visit, plan_of(engine.training, 2, data))


def some_records(steps: PrivateSteps, number: int) -> tuple[Tensor, Tensor]:
    picked = steps.visit.client_data.indices[:number]
    return steps.visit.images.picked(picked), steps.visit.images.labels[picked]


def summed(steps: PrivateSteps, images: Tensor, labels: Tensor) -> Tensor:
    total, _ = steps.summed_gradients(images, labels, torch.ones(len(labels)))
    return torch.cat([total[name].flatten() for name in steps.visit.params])


@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "fedprox,mu=1",
        "fedntd",
        "moon",
        "fedproto,private",
        "fedsc,private",
        "fedsc,private,positives=outside,center=true,cpdr=l2",
        "fedsc,private,positives=mean_positive,exclude_self=true,pool=bank",
    ],
)
def test_one_record_changes_the_sum_of_gradients_by_no_more_than_the_bound(method: str) -> None:
    steps = private_steps(method, clip=0.5)
    images, labels = some_records(steps, 20)
    everyone = summed(steps, images, labels)
    for gone in (0, 7, 19):
        kept = [i for i in range(20) if i != gone]
        change = (everyone - summed(steps, images[kept], labels[kept])).norm()
        assert 0 < float(change) <= 0.5 * (1 + 1e-4)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("method", ["fedavg", "fedsc,private"])
def test_a_record_without_a_finite_gradient_counts_as_none(method: str, value: float) -> None:
    steps = private_steps(method, clip=0.5)
    images, labels = some_records(steps, 20)
    images = images.clone()
    images[7] = value
    kept = [i for i in range(20) if i != 7]
    others = summed(steps, images[kept], labels[kept])
    assert others.isfinite().all()
    torch.testing.assert_close(summed(steps, images, labels), others)


def test_a_client_with_a_record_that_is_not_finite_sends_what_is() -> None:
    made = federation("fedsc,private", **RECORD, dp_feature_clip=5.0)
    assert made.engine.images.prepared is not None
    made.engine.images.prepared[made.clients[0].indices[3]] = math.nan
    (upload,) = made.train(1, [0])
    for name, tensor in flatten({"model": upload[0].model, "extra": upload[0].extra}).items():
        assert tensor.isfinite().all(), name


def test_all_methods_that_promise_unit_record_are_tested_above() -> None:
    promised = {name for name, cls in METHODS.items() if "record" in cls.private_units}
    assert promised == {"fedavg", "fedprox", "fedntd", "moon", "fedproto", "fedsc"}


@pytest.mark.parametrize(("model", "norm"), [("mlp", "none"), ("cnn", "group")])
def test_clipped_gradients_are_those_of_opacus(model: str, norm: str) -> None:
    from opacus import GradSampleModule

    steps = private_steps("fedavg", clip=0.7, model=model, norm=norm)
    images, labels = some_records(steps, 12)
    ours, _ = steps.summed_gradients(images, labels, torch.ones(12))
    # A fresh model and fresh images: Opacus' hooks are wrong for our layout, channels last.
    fresh = build_model(model, (1, 8, 8), 10, norm)
    fresh.load_state_dict(steps.visit.model.state_dict())
    theirs = GradSampleModule(fresh, loss_reduction="sum")
    logits = theirs(torch.empty(images.shape).copy_(images).requires_grad_()).logits
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    each = [p.grad_sample for p in theirs.parameters()]
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each]).norm(dim=0)
    assert (norms > 0.7).any()
    for (name, _), gradient in zip(steps.visit.params.items(), each, strict=True):
        factor = (0.7 / norms).clamp_max(1).view(-1, *[1] * (gradient.dim() - 1))
        torch.testing.assert_close(ours[name], (factor * gradient).sum(0), rtol=1e-3, atol=1e-5)


def test_with_a_bound_that_nothing_reaches_the_mean_gradient_is_the_ordinary_one() -> None:
    steps = private_steps("fedsc,private", clip=1e9)
    visit = steps.visit
    images, labels = some_records(steps, 20)
    # RPCL and CPDR average over samples whose class has a prototype: keep those.
    kept = visit.received["consistent_exists"][labels]
    images, labels = images[kept], labels[kept]
    ours, _ = steps.summed_gradients(images, labels, torch.ones(len(labels)))
    terms = visit.method.loss(visit.batch(images, labels, torch.ones(len(labels))))
    visit.engine.optimiser.zero_grad()
    sum(terms.values()).backward()  # type: ignore[union-attr]
    for name, param in visit.params.items():
        assert param.grad is not None
        torch.testing.assert_close(ours[name] / len(labels), param.grad, rtol=1e-3, atol=1e-5)


def test_noise_of_a_step_is_divided_by_the_expected_size_of_a_batch() -> None:
    steps = private_steps("fedavg", clip=1e-6, dp_noise=3e6, batch_size=10)
    steps.step(0, 0)
    drawn = torch.cat([p.grad.flatten() for p in steps.visit.params.values() if p.grad is not None])
    assert float(drawn.std()) == pytest.approx(3.0 / 10, rel=0.03)


def test_a_batch_that_nobody_is_in_is_noise_alone() -> None:
    steps = private_steps("fedavg", clip=1.0)
    steps.batches = [torch.zeros(0, dtype=torch.int64)]
    terms = steps.step(0, 0)
    assert float(terms["ce"]) == 0
    assert not any(p.grad.any() for p in steps.visit.params.values() if p.grad is not None)


# Accounting ---------------------------------------------------------------------------------------


def test_epsilon_is_the_one_of_the_librarys_own_example() -> None:
    # Opacus, tests/accountants_test.py: 90 epochs at rate 0.04 with noise 1.5.
    history = [Release(1.5, 0.04, int(90 / 0.04))]
    assert epsilon_of(history, 1e-5) == pytest.approx(7.32911117143, abs=1e-9)


def test_the_solved_noise_is_the_one_of_the_librarys_own_example() -> None:
    # The same file: epsilon 8 at rate 0.04 over 90 epochs needs noise 1.416.
    ledger = Ledger(Privacy("record", 1.0), (0.04,), (25,), ((0,),) * 90, False, False)
    assert solve_noise(ledger, 8.0, None).noise == pytest.approx(1.416, rel=0.015)


def test_without_sampling_epsilon_is_that_of_the_gaussian_mechanism() -> None:
    # Renyi divergence a T / (2 z^2) at order a, and Canonne et al. (2020), Prop. 12, by hand.
    z, times, delta = 4.0, 10, 1e-5

    def bound(a: float) -> float:
        return a * times / (2 * z**2) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1)

    best = min(bound(1 + x / 1000) for x in range(1, 100_000))
    assert epsilon_of([Release(z, 1.0, times)], delta) == pytest.approx(best, rel=1e-3)


def test_what_is_released_without_noise_costs_everything_and_nothing_costs_nothing() -> None:
    assert epsilon_of([Release(1.0, 0.1, 5), Release(0.0, 1.0, 1)], 1e-5) == math.inf
    assert epsilon_of([Release(0.0, 1.0, 0)], 1e-5) == 0


def test_no_epsilon_is_below_zero() -> None:
    assert epsilon_of([Release(1e4, 0.01, 1)], 0.1) == 0


@pytest.mark.parametrize("target", [1.0, 20.0])
def test_a_run_ends_just_below_its_target_for_every_client(target: float) -> None:
    ledger = Ledger(
        Privacy("record", 1.0, feature_clip=1.0),
        (0.1, 0.5, 1.0),
        (30, 6, 3),
        ((0, 1), (1, 2), (0, 1), (0, 2)),
        True,
        True,
    )
    solved = dataclasses.replace(ledger, privacy=solve_noise(ledger, target, None))
    assert solved.privacy.prototype_noise == solved.privacy.noise
    assert 0.93 * target < solved.spent(4) <= target
    spent = [solved.spent(round) for round in range(5)]
    assert spent[0] == 0
    assert spent == sorted(spent)


def test_a_target_that_fixed_prototype_noise_alone_exceeds_is_refused() -> None:
    ledger = Ledger(
        Privacy("record", 1.0, feature_clip=1.0), (0.5,), (2,), ((0,),) * 5, True, False
    )
    with pytest.raises(FedscError, match=r"target-epsilon 1.*dp-prototype-noise"):
        solve_noise(ledger, 1.0, 0.5)


# Whole runs ---------------------------------------------------------------------------------------


def assert_equal_runs(one: fedsc.Run, other: fedsc.Run) -> None:
    a, b = flatten(one.server), flatten(other.server)
    assert a.keys() == b.keys()
    for name in a:
        # A drift of nothing is NaN, in both.
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0, equal_nan=True)
    assert [r["accuracy"] for r in one.records] == [r["accuracy"] for r in other.records]


@pytest.mark.parametrize("method", ["fedsc", "fedavg", "fednh"])
@pytest.mark.parametrize("unit", ["record", "client"])
def test_no_noise_and_no_clipping_is_the_ordinary_run_bit_for_bit(method: str, unit: str) -> None:
    private = quick(method, dp_unit=unit, dp_noise=0.0, dp_prototype_noise=0.0)
    assert_equal_runs(private, quick(method))
    assert private.records[-1]["epsilon"] is None


def test_features_that_no_bound_touches_and_no_noise_are_the_ordinary_run_bit_for_bit() -> None:
    private = quick("fedsc", dp_unit="record", dp_feature_clip=1e9, dp_prototype_noise=0.0)
    assert_equal_runs(private, quick("fedsc"))


def test_updates_that_no_bound_touches_and_no_noise_are_the_uniform_mean() -> None:
    private = quick("fedavg", dp_unit="client", dp_clip=1e9)
    plain = quick("fedavg,aggregation=uniform")
    for name, tensor in plain.server["model"].items():
        torch.testing.assert_close(private.server["model"][name], tensor, rtol=1e-4, atol=1e-5)


def test_epsilon_in_the_record_is_opacus_own_over_all_that_was_released() -> None:
    from opacus.accountants import RDPAccountant

    noise = {"dp_noise": 2.0, "dp_feature_clip": 3.0, "dp_prototype_noise": 4.0}
    options = {"partition": "iid", "clients": 2, "batch_size": 25, "epochs": 2, "delta": 1e-4}
    records = quick("fedsc,private,init_protos=true", **RECORD, **noise, **options).records
    for record in records:
        rounds = record["round"]
        accountant = RDPAccountant()
        # 100 images each: 4 steps an epoch at rate 1/4; sums and counts each round, and before.
        accountant.history = [(2.0, 0.25, 8 * rounds), (4.0, 1.0, 2 * (rounds + 1))]
        assert record["epsilon"] == pytest.approx(accountant.get_epsilon(delta=1e-4), rel=1e-6)


def test_the_client_who_took_part_most_often_has_spent_most() -> None:
    from opacus.accountants import RDPAccountant

    options = {"participation": 0.5, "rounds": 4, "dp_noise": 5.0}
    records = quick("fedavg", **CLIENT, **options).records
    cohorts = [client for record in records for client in record["cohort"]]
    accountant = RDPAccountant()
    accountant.history = [(5.0, 1.0, max(cohorts.count(client) for client in range(4)))]
    assert records[-1]["epsilon"] == pytest.approx(accountant.get_epsilon(delta=1e-5), rel=1e-6)


def test_prototypes_without_noise_leave_no_epsilon() -> None:
    records = quick("fedsc,private", **RECORD, dp_noise=2.0).records
    assert [record["epsilon"] for record in records] == [None, None]


@pytest.mark.parametrize("unit", [RECORD, CLIENT])
def test_a_target_is_met_and_the_same_seed_draws_the_same_noise(unit: dict[str, Any]) -> None:
    options = {**unit, "dp_feature_clip": 5.0, "target_epsilon": 30.0}
    one = quick("fedsc,private", **options)
    assert 27 < one.records[-1]["epsilon"] <= 30
    assert one.records[0]["epsilon"] < one.records[1]["epsilon"]
    assert_equal_runs(one, quick("fedsc,private", **options))
    other = quick("fedsc,private", **{**options, "target_epsilon": 60.0})
    assert not torch.equal(
        one.server["model"]["classifier.weight"], other.server["model"]["classifier.weight"]
    )


def drawn_in_a_round(made: Federation) -> Tensor:
    """The noise on the classifier: what is clipped to nearly nothing is noise alone."""
    before = made.server["model"]["classifier.weight"].clone()
    next(made.rounds())
    change: Tensor = (made.server["model"]["classifier.weight"] - before).flatten()
    return change / change.norm()


@pytest.mark.parametrize("unit", ["record", "client"])
def test_two_runs_of_one_seed_share_no_noise(unit: str) -> None:
    options = {"dp_unit": unit, "dp_clip": 1e-6, "dp_noise": 1e6, "lr": 1e-3, "epochs": 1}
    drawn = drawn_in_a_round(federation("fedavg", **options))
    again = drawn_in_a_round(federation("fedavg", **options))
    torch.testing.assert_close(drawn, again, rtol=0, atol=0)
    others = [("fedprox", {}), ("fedavg,aggregation=uniform", {}), ("fedavg", {"lr": 2e-3})]
    for method, changes in others:
        other = drawn_in_a_round(federation(method, **{**options, **changes}))
        # 640 numbers: independent directions have a cosine of 0.04 or so; of the same noise, 1.
        assert abs(float(drawn @ other)) < 0.2


def test_two_runs_of_one_seed_share_no_noise_on_prototypes() -> None:
    options = {"dp_unit": "record", "dp_feature_clip": 1e-3, "dp_prototype_noise": 1.0, "rounds": 1}
    one, other = (
        federation(f"fedsc,private,tau={tau}", **options).fit(1, [0])[0].extra["counts"]
        for tau in (0.05, 0.5)
    )
    held = (one > 0) & (other > 0)
    assert held.any()
    assert (one[held] != other[held]).all()


def test_workers_draw_the_noise_of_the_sequential_engine() -> None:
    options = {**RECORD, "dp_noise": 1.0, "dp_feature_clip": 5.0, "rounds": 1}
    one = quick("fedsc,private", **options)
    assert_equal_runs(one, quick("fedsc,private", **{**options, "engine": "workers"}))


def test_under_unit_client_the_server_sees_no_client_of_its_own() -> None:
    private = quick("fedsc", **CLIENT, dp_noise=0.1, dp_feature_clip=5.0, dp_prototype_noise=0.01)
    received = private.server["prototypes"]  # (4, C, d)
    assert received.abs().sum() > 0
    assert all(torch.equal(received[0], other) for other in received)
    counts = private.server["counts"]
    assert ((counts == 0) | (counts == 1)).all()
    assert all(torch.equal(counts[0], other) for other in counts)


@pytest.mark.parametrize("method", ["fedsc", "fedproto"])
def test_under_unit_client_a_class_exists_where_somebody_has_enough_of_it(method: str) -> None:
    options = {**CLIENT, "dp_feature_clip": 5.0, "rounds": 1}
    made = federation(f"{method},min_count=12", **options)
    held = (made.class_counts >= 12).any(0)
    assert 0 < int(held.sum()) < 10
    list(made.rounds())
    name = "consistent" if method == "fedsc" else "prototypes"
    exists = "consistent_exists" if method == "fedsc" else "exists"
    assert torch.equal(made.server[exists], held)
    assert torch.equal(made.server[name].norm(dim=-1) > 0, held)


def test_under_unit_client_a_class_with_too_few_images_does_not_pull_its_prototype_to_zero() -> (
    None
):
    def prototype(count: float) -> Tensor:
        extra = [
            {"prototypes": torch.tensor([[3.0, 4.0]]), "counts": torch.tensor([5.0])},
            {"prototypes": torch.zeros(1, 2), "counts": torch.tensor([count])},
        ]
        uploads = [Upload(k, 1, {}, each) for k, each in enumerate(extra)]
        privacy = Privacy("client", feature_clip=10.0)
        sent = hide_clients(privacy, uploads, {}, (0,), min_count=3)
        assert sent[0].extra["counts"].tolist() == [3]
        found: Tensor = sent[1].extra["prototypes"][0]
        return found

    torch.testing.assert_close(prototype(0.0), torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(prototype(2.0), torch.tensor([3.0, 4.0]))


@dataclasses.dataclass(frozen=True)
class Broken(fedsc.FedSC):
    """Some clients send what cannot be used."""

    name: ClassVar[str] = "broken"
    private_units: ClassVar[tuple[str, ...]] = ("client",)
    clients: ClassVar[tuple[int, ...]] = ()
    fault: str = option("", "what is wrong with it")

    def upload(self, result: LocalResult) -> State:
        extra = super().upload(result)
        if int(result.client.id) not in self.clients:
            return extra
        if self.fault == "weights":
            result.model["classifier.weight"][0, 0] = math.nan
        if self.fault == "prototypes":
            extra["prototypes"][0, 0] = math.inf
        return {**extra, "counts": torch.ones(3)} if self.fault == "shape" else extra


class BrokenOne(Broken):
    private_units: ClassVar[tuple[str, ...]] = ("client",)
    clients: ClassVar[tuple[int, ...]] = (2,)


class BrokenAll(Broken):
    private_units: ClassVar[tuple[str, ...]] = ("client",)
    clients: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)


def broken(method: Method, **options: Any) -> Federation:
    options = {**QUICK, **CLIENT, "dp_feature_clip": 5.0, "rounds": 1, **options}
    return build(RunSpec(method="fedsc", **options), load_dataset("digits"), method)[0]


@pytest.mark.parametrize("fault", ["weights", "prototypes", "shape"])
def test_under_unit_client_an_unusable_upload_is_a_zero_update(fault: str) -> None:
    made = broken(BrokenOne(fault=fault))
    before, (record,) = made.server["model"], list(made.rounds())
    assert [rejected["client"] for rejected in record["rejected"]] == [2]
    assert "diverged" not in record
    assert 2 not in made.memories
    # No noise here: the mean is over four clients, of which one did not move.
    others = [u for u in broken(Broken()).fit(1, [0, 1, 2, 3]) if u.client != 2]
    expected = noised_mean_model(before, [*(u.model for u in others), before], 1.0, 0.0, rng())
    for name, tensor in made.server["model"].items():
        torch.testing.assert_close(tensor, expected[name])
    held = torch.stack([upload.extra["counts"] for upload in others]).sum(0) > 0
    assert torch.equal(made.server["counts"][0] > 0, held)


def test_under_unit_client_noise_is_added_also_where_no_upload_can_be_used() -> None:
    made = broken(BrokenAll(fault="weights"), dp_noise=2.0)
    before, (record,) = made.server["model"], list(made.rounds())
    assert len(record["rejected"]) == 4
    assert record["diverged"]
    change = made.server["model"]["classifier.weight"] - before["classifier.weight"]
    assert float(change.std()) == pytest.approx(2.0 / 4, rel=0.15)  # 640 draws


def test_under_unit_client_an_update_that_is_too_long_is_clipped_as_any_other() -> None:
    before = {"w": torch.zeros(2)}
    uploads = [Upload(0, 1, {"w": torch.tensor([3e30, 4e30])}), Upload(1, 1, before)]
    assert find_unusable(uploads, before) == {0: "its length inf is above 1e+03"}
    assert find_unusable(uploads, before, any_length=True) == {}
    mean = noised_mean_model(before, [upload.model for upload in uploads], 1.0, 0.0, rng())
    torch.testing.assert_close(mean["w"], torch.tensor([0.3, 0.4]))


def test_what_is_not_finite_is_no_update_and_no_prototype() -> None:
    before = {"w": torch.zeros(2)}
    models = [{"w": torch.tensor([math.nan, 1.0])}, {"w": torch.tensor([0.6, 0.8])}]
    mean = noised_mean_model(before, models, 1.0, 0.0, rng())
    torch.testing.assert_close(mean["w"], torch.tensor([0.3, 0.4]))
    prototypes = torch.tensor([[[math.inf, 1.0], [0.0, 2.0]], [[3.0, 0.0], [math.nan, 0.0]]])
    held = torch.ones(2, 2, dtype=torch.bool)
    pooled, exists = pooled_prototypes(prototypes, held, 4.0, 0.0, rng())
    torch.testing.assert_close(pooled, torch.tensor([[3.0, 0.0], [0.0, 2.0]]))
    assert exists.all()


def test_under_unit_record_the_counts_that_leave_are_the_noised_ones() -> None:
    options = {"dp_unit": "record", "dp_feature_clip": 5.0, "dp_prototype_noise": 1.0}
    private = quick("fedsc", **options)
    counts = private.server["counts"]
    present = counts[counts > 0]
    assert len(present)
    assert (present != present.round()).all()
    assert (present > 3).all()


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("fedsc", {"dp_clip": 1.0}, "dp_clip needs dp_unit"),
        ("fedsc", {"target_epsilon": 1.0}, "target_epsilon needs dp_unit"),
        ("fedsc", {"dp_unit": "record", "dp_noise": 1.0}, "dp_noise = 1 needs dp_clip"),
        ("fedsc", {**RECORD, "dp_prototype_noise": 1.0}, "needs dp_feature_clip"),
        ("fedavg", {**RECORD, "dp_noise": 1.0, "target_epsilon": 1.0}, "one of the two"),
        ("fedavg", {"dp_unit": "record", "target_epsilon": 1.0}, "needs dp_clip"),
        ("fedsc,private", {**RECORD, "target_epsilon": 9.0}, "needs dp_feature_clip"),
        ("fedsc", RECORD, "last_epoch, step.*fedsc,private"),
        ("fedsc,private,u_mode=round", RECORD, "start.*fedsc,private"),
        ("fedproto", RECORD, "fedproto,private"),
        ("fedavg,logit_adjustment=1", RECORD, "logit_adjustment"),
        ("fedavg", {**RECORD, "norm": "batch"}, "--norm group"),
        ("fedavg", {**CLIENT, "model": "cnn"}, "running variances.*--norm group"),
        ("fedavg", {**CLIENT, "model": "cnn", "norm": "fixed"}, "--norm group"),
        ("fedrcl", RECORD, "fedrcl cannot.*--dp-unit client is possible"),
        ("fedcda", CLIENT, "fedcda cannot be private with --dp-unit client"),
        ("fednh", CLIENT, "fednh cannot"),
        ("fedproto,evaluation=ensemble", CLIENT, "averaged model"),
        ("fedavg", {**RECORD, "engine": "graphs"}, "--engine sequential"),
        ("fedavg", {"dp_unit": "item"}, "record"),
        ("fedavg", {**RECORD, "delta": 0.0}, "delta = 0 is out of range"),
    ],
)
def test_what_cannot_be_private_is_refused_before_training(
    method: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(FedscError, match=message):
        federation(method, **options)


def test_a_method_of_ones_own_promises_nothing() -> None:
    class Mine(fedsc.Method):
        name = "mine"

    with pytest.raises(FedscError, match="mine cannot be private"):
        fedsc.run("digits", Mine(), **{**QUICK, **RECORD})


@pytest.mark.parametrize("unit", [RECORD, CLIENT])
def test_a_promise_is_not_inherited(unit: dict[str, Any]) -> None:
    class Mine(fedsc.FedAvg):
        """Sends its class counts as they are."""

        name = "mine"

        def upload(self, result: LocalResult) -> State:
            return {"class_counts": result.client.class_counts}

    with pytest.raises(FedscError, match=r"mine cannot be private.*in the class Mine itself"):
        fedsc.run("digits", Mine(), **{**QUICK, **unit})


@pytest.mark.parametrize("name", METHODS)
def test_our_own_methods_name_their_units_themselves(name: str) -> None:
    assert METHODS[name].private_units == vars(METHODS[name]).get("private_units", ())
