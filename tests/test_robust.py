"""Robust aggregation: rules worked out by hand, and what one attacker can do at most."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedsc
from fedsc import FedscError, Method, Upload
from fedsc.method import Task, weighted_average
from fedsc.methods import METHODS, FedAvg, FedCDA, FedNH, FedProto, FedSC, method_from_text
from fedsc.robust import bounded_prototypes, clip_updates, coordinate_median, trimmed_mean
from fedsc.state import State

RULES = ("median", "trimmed_mean", "clipped_mean")
RECEIVED: State = {
    "weight": torch.tensor([0.0, 0.0]),
    "norm.running_var": torch.tensor([1.0]),
    "norm.num_batches_tracked": torch.tensor(0),
}


def upload(client: int, weight: list[float], variance: float = 1.0, counter: int = 0) -> Upload:
    model = {
        "weight": torch.tensor(weight),
        "norm.running_var": torch.tensor([variance]),
        "norm.num_batches_tracked": torch.tensor(counter),
    }
    return Upload(client, 1 + client, model, {"loss": torch.tensor(0.1)})


# By hand ------------------------------------------------------------------------------------------


def test_coordinate_median() -> None:
    odd = torch.tensor([[1.0, 10.0], [5.0, -2.0], [100.0, 3.0]])
    assert coordinate_median(odd).tolist() == [5.0, 3.0]
    assert coordinate_median(torch.tensor([100.0, 1.0, 4.0, 2.0])).item() == 3.0
    assert coordinate_median(torch.tensor([3, 9, 8, 4])).item() == 4  # whole: the lower one
    assert coordinate_median(torch.tensor([7.0])).item() == 7.0


@pytest.mark.parametrize(
    ("trim", "expected"),
    [(0.0, 21.8), (0.2, 3.0), (0.3, 2.0), (0.5, 2.0)],  # none, one, two, two of five cut
)
def test_trimmed_mean(trim: float, expected: float) -> None:
    values = torch.tensor([6.0, 100.0, 0.0, 1.0, 2.0])
    assert trimmed_mean(values, trim).item() == pytest.approx(expected)


def test_trimming_three_tenths_of_ten_leaves_four() -> None:
    """0.3 * 10 must not be rounded up to four at each end by its last digit."""
    values = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 6.0, 9.0, 9.0, 9.0])
    assert trimmed_mean(values, 0.3).item() == 3.0
    assert trimmed_mean(torch.tensor([1, 5, 9]), 0.3).item() == 5  # counters: the median


def test_clipped_mean() -> None:
    """Updates of length 5, 1 and 2: the first is cut to 2. Samples 1, 2 and 3."""
    uploads = [
        upload(0, [3.0, 4.0], -9.0, 900),
        upload(1, [0.0, 1.0], 2.0, 5),
        upload(2, [0.0, -2.0], 4.0, 8),
    ]
    clipped = clip_updates([one.model for one in uploads], RECEIVED)
    torch.testing.assert_close(clipped[0]["weight"], torch.tensor([1.2, 1.6]))
    assert torch.equal(clipped[1]["weight"], uploads[1].model["weight"])
    assert torch.equal(clipped[2]["weight"], uploads[2].model["weight"])
    mean = FedAvg(aggregation="clipped_mean").average(uploads, RECEIVED)
    # (1.2 + 0 + 0) / 6 and (1.6 + 2 * 1 - 3 * 2) / 6
    torch.testing.assert_close(mean["weight"], torch.tensor([0.2, -0.4]))
    assert mean["norm.running_var"].item() == 2.0  # measured, not stepped: the median
    assert mean["norm.num_batches_tracked"].item() == 8


def test_batch_norm_under_median_and_trimmed_mean() -> None:
    uploads = [upload(k, [0.0, 0.0], v, n) for k, (v, n) in enumerate([(2, 3), (-9, 900), (4, 5)])]
    for rule in ("median", "trimmed_mean"):
        mean = FedAvg(aggregation=rule).average(uploads)
        assert mean["norm.running_var"].item() == 2.0
        assert mean["norm.num_batches_tracked"].item() == 5
        assert mean["norm.num_batches_tracked"].dtype == torch.int64


def test_bounded_prototypes_by_hand() -> None:
    """Lengths 1, 2, 60: none above twice the median 2. Then from the middle 2 none further than 1.

    In the second class two clients hold one, and only the length of the longer is cut. The usual
    length of a client is the median over its classes: 1, (2 + 3) / 2, (60 + 80) / 2.
    """
    c = torch.tensor([[[1.0], [9e9]], [[2.0], [3.0]], [[60.0], [-80.0]]])
    held = torch.tensor([[True, False], [True, True], [True, True]])
    bounded, moved = bounded_prototypes(c, held)
    # Cut to 2 * 2.5: 1, 2, 5. Middle 2, distances 1, 0, 3, so 5 becomes 3.
    assert bounded[:, 0, 0].tolist() == pytest.approx([1.0, 2.0, 3.0])
    assert bounded[1:, 1, 0].tolist() == pytest.approx([3.0, -5.0])
    assert moved.tolist() == [[False, False], [False, False], [True, True]]


def test_nothing_is_moved_where_clients_agree_or_hold_nothing() -> None:
    c = torch.ones(4, 3, 2)
    held = torch.tensor([[True, True, False]] * 4)
    held[1] = False
    bounded, moved = bounded_prototypes(c, held)
    assert torch.equal(bounded[held], c[held].double())
    assert not moved.any()


# What one attacker can do -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1e3, 1e18])
def test_one_wrong_upload_moves_the_weights_no_further_than_the_honest_ones(
    rule: str, size: float
) -> None:
    torch.manual_seed(0)
    honest = [upload(k, torch.randn(2).tolist(), 1.0 + k, k) for k in range(4)]
    wrong = upload(4, [size, -size], -size, 10**9)
    mean = FedAvg(aggregation=rule).average([wrong, *honest], RECEIVED)  # type: ignore[arg-type]
    weights = torch.stack([one.model["weight"] for one in honest])
    if rule == "clipped_mean":
        assert mean["weight"].norm() <= weights.norm(dim=1).max() + 1e-6
    else:
        assert (mean["weight"] >= weights.amin(0)).all()
        assert (mean["weight"] <= weights.amax(0)).all()
    assert 1.0 <= mean["norm.running_var"].item() <= 4.0
    assert int(mean["norm.num_batches_tracked"]) <= 3
    plain = weighted_average([wrong, *honest], [1.0] * 5)
    assert plain["weight"].abs().max() > 100


@pytest.mark.parametrize("rule", RULES)
def test_fedcda_keeps_and_combines_no_wrong_model(rule: str) -> None:
    method = FedCDA(aggregation=rule, warmup=0.0)  # type: ignore[arg-type]
    task = Task(5, 5, 2, 2, 3, trainable=("weight",))
    server: State = {**method.init_server(task), "model": RECEIVED}
    records: dict[int, State] = {}
    for round in range(3):
        honest = [upload(k, [1.0 + 0.1 * k, 0.1 * round]) for k in range(4)]
        server = method.aggregate(server, [*honest, upload(4, [-1e6, 1e6])], records)
    longest = (1.3**2 + 0.2**2) ** 0.5
    # Clipped, each round may add one more step of the median length.
    assert server["model"]["weight"].norm() <= (3 if rule == "clipped_mean" else 1) * longest
    with_plain = FedCDA(warmup=0.0)
    server = {**with_plain.init_server(task), "model": RECEIVED}
    server = with_plain.aggregate(server, [*honest, upload(4, [-1e6, 1e6])], {})
    assert server["model"]["weight"].norm() > 1e5


@pytest.mark.parametrize("rule", ["samples", "uniform", *RULES])
def test_fedcda_warms_up_as_fedavg_does(rule: Any) -> None:
    lengths = enumerate((1.0, 2.0, 10.0, 20.0))  # of four, the median is 6; of the clipped, 4
    uploads = [upload(k, [length, 0.0]) for k, length in lengths]
    method = FedCDA(aggregation=rule, warmup=1.0)
    server = {**method.init_server(Task(4, 4, 2, 2, 2, trainable=("weight",))), "model": RECEIVED}
    found = method.aggregate(server, uploads, {})["model"]
    expected = FedAvg(aggregation=rule).average(uploads, RECEIVED)
    assert torch.equal(found["weight"], expected["weight"])


@pytest.mark.parametrize("global_weights", ["uniform", "samples"])
def test_fedcda_leaves_the_state_it_is_given_as_it_was(global_weights: Any) -> None:
    method = FedCDA(warmup=0.0, global_weights=global_weights)
    task = Task(2, 2, 2, 2, 3, trainable=("weight",))
    records: dict[int, State] = {}
    server: State = {**method.init_server(task), "model": RECEIVED}
    server = method.aggregate(server, [upload(k, [1.0 + k, 0.0]) for k in range(2)], records)
    later = [upload(k, [5.0, 1.0 + k]) for k in range(2)]
    first = method.aggregate(server, later, dict(records))
    second = method.aggregate(server, later, dict(records))
    assert torch.equal(first["model"]["weight"], second["model"]["weight"])


def test_fedcda_takes_the_median_over_absent_clients_too() -> None:
    method = FedCDA(aggregation="median", warmup=0.0, cache=1)
    task = Task(3, 2, 2, 2, 2, trainable=("weight",))
    server: State = {**method.init_server(task), "model": RECEIVED}
    records: dict[int, State] = {}
    server = method.aggregate(server, [upload(0, [1.0, 9.0]), upload(1, [2.0, 8.0])], records)
    assert server["model"]["weight"].tolist() == [1.5, 8.5]
    server = method.aggregate(server, [upload(1, [4.0, 7.0]), upload(2, [3.0, 1.0])], records)
    assert server["model"]["weight"].tolist() == [3.0, 7.0]  # of 1 4 3, and of 9 7 1


def test_clipping_says_what_it_lacks() -> None:
    with pytest.raises(FedscError, match=r'average\(uploads, server\["model"\]\)'):
        FedAvg(aggregation="clipped_mean").average([upload(0, [1.0, 1.0])])


NUM_CLASSES, DIM = 3, 4
CLIENTS = 5  # the last one attacks
MODEL = {"weight": torch.zeros(2)}


def prototype_upload(client: int, prototypes: Tensor, counts: Tensor) -> Upload:
    extra = {"prototypes": prototypes.float(), "counts": counts.float()}
    return Upload(client, 1, MODEL, extra)


def aggregated(method: Method, uploads: list[Upload]) -> State:
    task = Task(CLIENTS, CLIENTS, NUM_CLASSES, DIM, 3)
    return method.aggregate({**method.init_server(task), "model": MODEL}, uploads, {})


def largest_displacement(honest: Tensor, counts: Tensor, holders: int, label: int) -> float:
    """Of any r_k^j and of o^j, from the honest clients' prototypes (K, C, d) alone.

    With two honest holders or more: the box around their prototypes and the origin (cutting their
    length moves them towards it) holds the median and every honest prototype. The attacker's lies
    no further from the median than an honest one, so all that is made of them lies within the box's
    diameter of it. Else only lengths are bounded: by twice the largest usual one.
    """
    lengths = honest.norm(dim=-1)
    if holders >= 2:
        own = honest[counts[:, label] > 0, label]
        corners = torch.cat([own, torch.zeros(1, DIM)])
        return 2 * float((corners.amax(0) - corners.amin(0)).norm())
    usual = [float(row[n > 0].max()) for row, n in zip(lengths, counts, strict=True) if n.any()]
    return 2 * max(usual) + float(lengths.max())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.floats(0, 30),
    st.sampled_from(["fedsc", "fedsc,pool=bank", "fedsc,metric=l2,global_mean=weighted", "other"]),
)
def test_one_attacker_of_any_size_moves_prototypes_less_than_a_bound(
    seed: int, exponent: float, text: str
) -> None:
    rng = torch.Generator().manual_seed(seed)
    if text == "other":
        text = "fedsc,absent=global_fill,divisor=fixed,client_weight=uniform"
    text += ",robust_prototypes=true"
    honest = torch.rand(CLIENTS - 1, NUM_CLASSES, DIM, generator=rng) + 0.5
    counts = torch.randint(0, 3, (CLIENTS - 1, NUM_CLASSES), generator=rng)
    counts[0, 0] = counts[1, 1] = counts[2, 2] = 1  # three honest clients hold something
    attack = torch.randn(NUM_CLASSES, DIM, generator=rng) * 10**exponent
    claimed = torch.randint(0, 10**6, (NUM_CLASSES,), generator=rng)

    uploads = [prototype_upload(k, honest[k], counts[k]) for k in range(CLIENTS - 1)]
    poisoned = [*uploads, prototype_upload(CLIENTS - 1, attack, claimed)]
    before = aggregated(method_from_text(text), uploads)
    after = aggregated(method_from_text(text), poisoned)
    fedproto = [aggregated(FedProto(robust_prototypes=True), sent) for sent in (uploads, poisoned)]
    for label in range(NUM_CLASSES):
        holders = int((counts[:, label] > 0).sum())
        bound = largest_displacement(honest, counts, holders, label) * (1 + 1e-5)
        moved = after["consistent"][label] - before["consistent"][label]
        assert moved.norm() <= bound
        own = [row for row in before["relational"][:, label] if row.any()]
        for row in after["relational"][after["relational_exists"][:, label], label]:
            assert all((row - other).norm() <= bound for other in own)
        moved = fedproto[1]["prototypes"][label] - fedproto[0]["prototypes"][label]
        assert moved.norm() <= bound


def test_without_the_option_an_attacker_moves_prototypes_as_far_as_it_likes() -> None:
    honest = [
        prototype_upload(k, torch.ones(NUM_CLASSES, DIM), torch.ones(NUM_CLASSES)) for k in range(4)
    ]
    wrong = prototype_upload(4, torch.full((NUM_CLASSES, DIM), -1e9), torch.ones(NUM_CLASSES))
    for size in (False, True):
        fedsc_state = aggregated(FedSC(robust_prototypes=size), [*honest, wrong])
        fedproto_state = aggregated(FedProto(robust_prototypes=size), [*honest, wrong])
        for found in (fedsc_state["consistent"], fedproto_state["prototypes"]):
            assert (found.abs().max() > 1e6) != size
        if size:  # the four agree, so nothing is left of the fifth
            assert torch.equal(fedsc_state["consistent"], torch.ones(NUM_CLASSES, DIM))
            assert float(fedsc_state["bounded"]) == NUM_CLASSES


def test_fednh_turns_its_head_no_further_than_the_honest_directions() -> None:
    """Three honest clients within 10 degrees of each other, one that sends the opposite."""
    angles = torch.deg2rad(torch.tensor([40.0, 45.0, 50.0]))
    ones = torch.ones(1)
    honest = [torch.stack([a.cos(), a.sin()])[None] for a in angles]
    sums = [*honest, torch.tensor([[-1e6, -1e6]])]
    uploads = [
        Upload(k, 1, {"classifier.prototypes": torch.eye(2)[:1]}, {"sums": s, "counts": ones})
        for k, s in enumerate(sums)
    ]
    server: State = {"model": {"classifier.prototypes": torch.eye(2)[:1]}}
    for robust in (False, True):
        method = FedNH(rho=0.0, robust_prototypes=robust)
        row = method.aggregate(server, uploads, {})["model"]["classifier.prototypes"][0]
        degrees = torch.rad2deg(torch.atan2(row[1], row[0])).item()
        assert (39 <= degrees <= 51) == robust


# Whole runs ---------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "dataset": "digits",
    "train_limit": 200,
    "clients": 5,
    "rounds": 2,
    "epochs": 1,
    "lr": 0.05,
    "engine": "sequential",
    "norm": "batch",
    "model": "cnn",
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_every_rule_and_the_record_says_so(method: str) -> None:
    extra = ",robust_prototypes=true" if METHODS[method].sent_prototypes else ""
    extra += {"fedcda": ",warmup=0", "fedsc+": ",calibration=false"}.get(method, "")
    seen = set()
    for rule in RULES:
        run = fedsc.run(method=f"{method}{extra},trim=0.2,aggregation={rule}", **TINY)
        assert run.records[-1]["aggregation"] == rule
        assert ("prototypes_bounded" in run.records[-1]) == bool(METHODS[method].sent_prototypes)
        for tensor in run.server["model"].values():
            assert tensor.isfinite().all()
        seen.add(float(next(iter(run.server["model"].values())).sum()))
    assert len(seen) == 3
    plain = fedsc.run(method=method, **{**TINY, "rounds": 1}).records[-1]
    assert not {"aggregation", "prototypes_bounded", "attackers"} & plain.keys()
