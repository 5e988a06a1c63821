"""FedSC against the worked examples A, B and D: every equation, every option, every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsc import prototypes as eq
from fedsc.losses import cpdr, prototype_distances, rpcl
from fedsc.method import Batch, Client, Task, Upload
from fedsc.methods import FedSC
from fedsc.models.outputs import Outputs
from fedsc.state import State
from tests.golden import FEDSC, assert_equals, full, tensor

A_AND_B = ["A_all_present", "B_missing_class"]
TAUS = ["0.05", "0.5"]


def gather(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Prototypes c (K, C, d) and counts (K, C) of a case's clients, by Eq. 3."""
    num_classes = case["inputs"]["C"]
    prototypes, counts = [], []
    for client in case["inputs"]["clients"]:
        features, labels = tensor(client["features"]), torch.tensor(client["labels"])
        once = torch.ones(len(labels), dtype=torch.float64)
        counts.append(eq.class_counts(labels, once, num_classes))
        sums = eq.class_sums(features, labels, once, num_classes)
        prototypes.append(eq.client_prototypes(sums, counts[-1]))
    return torch.stack(prototypes), torch.stack(counts)


def serve(case: dict[str, Any], method: FedSC) -> State:
    """The server's state after one round in which every client of the case took part."""
    c, counts = gather(case)
    num_clients, num_classes, dim = c.shape
    task = Task(num_clients, num_clients, num_classes, dim, num_rounds=1)
    server = {
        name: value.double() if value.is_floating_point() else value
        for name, value in method.init_server(task).items()
    }
    uploads = [
        Upload(k, int(counts[k].sum()), {}, {"prototypes": c[k], "counts": counts[k]})
        for k in range(num_clients)
    ]
    return {**server, **method.aggregate(server, uploads[::-1], {})}


def train_batch(case: dict[str, Any], server: State, method: FedSC) -> Batch:
    """The case's training batch, with a gradient, as its client sees it."""
    given = case["inputs"]["train_batch"]
    features = tensor(given["Z"]).requires_grad_()
    labels = torch.tensor(given["labels"])
    num_classes = case["inputs"]["C"]
    client = Client(torch.tensor(given["client"]), gather(case)[1][given["client"]], {})
    return batch_of(features, labels, client, method.broadcast(server), num_classes)


def batch_of(
    features: Tensor, labels: Tensor, client: Client, received: State, num_classes: int
) -> Batch:
    logits = torch.zeros(len(labels), num_classes, dtype=features.dtype)
    once = torch.ones(len(labels), dtype=features.dtype)
    return Batch(labels, once, Outputs(features, logits), {}, {}, {}, received, client, {})


def observe(method: FedSC, moment: Any, batch: Batch) -> Batch:
    """The batch again, after the method has seen it at this moment."""
    size, num_classes, dim = batch.received["relational"].shape
    task = Task(size, size, num_classes, dim, num_rounds=1)
    start = {k: v.double() for k, v in method.start_observing(moment, task).items()}
    with torch.no_grad():
        totals = method.observe(moment, batch, start)
    fields = {**vars(batch), "observed": {**batch.observed, moment: totals}}
    return Batch(**fields)


def by_class(per_class: list[dict[str, Any]], rows: Tensor, exists: Tensor) -> None:
    """rows (K, C, ...) hold exactly the values of the golden's [class]{client: value}."""
    for j, expected in enumerate(per_class):
        assert [k for k in range(len(rows)) if exists[k, j]] == sorted(map(int, expected))
        for k, value in expected.items():
            assert_equals(rows[int(k), j], value)


@pytest.mark.parametrize("name", A_AND_B)
def test_equations_3_to_12_step_by_step(name: str) -> None:
    case = FEDSC[name]
    expected, m = case["expected"], case["inputs"]["M"]
    c, counts = gather(case)
    held = counts > 0
    assert counts.int().tolist() == expected["n_kj"]
    for k, row in enumerate(expected["eq3_c"]):
        for j, value in enumerate(row):
            if value is not None:
                assert_equals(c[k, j], value)

    g = eq.global_prototypes(c, held)
    assert_equals(g, expected["eq5_g"])
    phi = eq.angular_similarity(g, c)
    by_class(expected["eq7_phi"], phi, held)
    distance = (phi.T[:, :, None] - phi.T[:, None, :]).abs()
    groups = eq.neighbour_groups(distance, held, m)
    assert groups.int().tolist() == expected["eq8_A"]
    r = eq.relational_prototypes(c, groups)
    by_class(expected["eq9_r"], r, held)
    assert_equals(eq.class_imbalance(counts), expected["eq10_d"])
    e = eq.client_weights(counts)
    assert_equals(e, expected["eq11_e"])
    assert_equals(eq.consistent_prototypes(r, held, e), expected["eq12_o"])

    other = case["alternatives"]
    zero_filled = eq.global_prototypes(c, held, zero_fill=True)
    assert_equals(zero_filled, other["eq5_zero_fill_divide_by_K"])
    fixed = eq.relational_prototypes(c, groups, divisor=m + 1)
    by_class(other["eq9_divide_by_M_plus_1"], fixed, held)
    plain = eq.consistent_prototypes(r, held, e, renormalise=False)
    assert_equals(plain, other["eq12_no_renormalisation"])


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("name", A_AND_B)
def test_losses_and_their_gradients(name: str, tau: str) -> None:
    case = FEDSC[name]
    expected = case["expected"]["by_tau"][tau]
    method = full(neighbours=case["inputs"]["M"], tau=float(tau), cpdr_weight=0.0)
    server = serve(case, method)
    batch = observe(method, "step", train_batch(case, server, method))
    order = [tuple(pair) for pair in expected["eq13_prototype_order_class_client"]]

    u = batch.observed["step"]["u"].reshape(server["relational_exists"].shape)
    assert_equals(torch.stack([u[k, j] for j, k in order]), expected["eq13_U"])

    loss = method.loss(batch)["rpcl"]
    assert_equals(loss, expected["eq14_rpcl_mean"])
    (gradient,) = torch.autograd.grad(loss, batch.student.features)
    assert_equals(gradient, expected["grad_rpcl_mean_wrt_Z_U_detached"])

    for form, value in expected["eq15_cpdr_mean"].items():
        pull = full(neighbours=case["inputs"]["M"], rpcl_weight=0.0, cpdr=form)
        loss = pull.loss(batch)["cpdr"]
        assert_equals(loss, value)
        if form == "mse_mean":
            (gradient,) = torch.autograd.grad(loss, batch.student.features)
            assert_equals(gradient, expected["grad_cpdr_mse_mean_wrt_Z"])


@pytest.mark.parametrize("name", A_AND_B)
def test_cosines_and_per_sample_losses(name: str) -> None:
    case = FEDSC[name]
    method = full(neighbours=case["inputs"]["M"])
    server = serve(case, method)
    batch = train_batch(case, server, method)
    for tau in TAUS:
        expected = case["expected"]["by_tau"][tau]
        order = expected["eq13_prototype_order_class_client"]
        rows = torch.stack([server["relational"][k, j] for j, k in order])
        row_class = torch.tensor([j for j, _ in order])
        features = batch.student.features.detach()
        cosine = eq.unit(features) @ eq.unit(rows).T
        assert_equals(cosine, expected["eq13_cosine"])
        u = prototype_distances(features, rows).mean(0)
        assert_equals(cosine / u, expected["eq13_s"])
        exists = torch.ones(len(rows), dtype=torch.bool)
        for i, label in enumerate(batch.labels):
            one, y = features[i : i + 1], label[None]
            loss = rpcl(one, y, rows, row_class, exists, u, float(tau))
            assert_equals(loss, expected["eq14_rpcl_per_sample"][i])
            for form, values in expected["eq15_cpdr_per_sample"].items():
                got = cpdr(one, y, server["consistent"], server["consistent_exists"], form)
                assert_equals(got, values[i])


OPTIONS = FEDSC["D_options"]["expected"]
# The golden file's words for the options, where ours are others.
SERVER_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "zero_fill": {"absent": "zero_fill"},
    "weighted": {"global_mean": "weighted"},
    "no_renorm": {"renormalise": False},
    "M=1": {"neighbours": 1},
    "M=4": {"neighbours": 4},
    "e=uniform": {"client_weight": "uniform"},
}
LOSS_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "u_mode=none, center": {"u_mode": "none", "center": True},
    "exclude_self": {"exclude_self": True},
}


def settings(words: str, ours: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return ours[words] if words in ours else dict([words.split("=")])


@pytest.mark.parametrize("words", OPTIONS["server"])
def test_every_server_option(words: str) -> None:
    expected = OPTIONS["server"][words]
    method = full(**settings(words, SERVER_OPTIONS))
    server = serve(FEDSC["D_options"], method)
    c, counts = gather(FEDSC["D_options"])
    held = counts > 0
    weights = counts if method.global_mean == "weighted" else None
    g = eq.global_prototypes(c, held, weights, method.absent == "zero_fill")
    assert_equals(g, expected["g"])
    groups = eq.neighbour_groups(method.distances(g, c), held, method.neighbours)
    for j, by_client in enumerate(expected["groups"]):
        for k in range(len(c)):
            assert groups[j, k].nonzero().flatten().tolist() == by_client.get(str(k), [])
    by_class(expected["r"], server["relational"], server["relational_exists"])
    assert_equals(server["consistent"], expected["o"])


def test_imbalance_and_weights_of_case_d() -> None:
    _, counts = gather(FEDSC["D_options"])
    assert_equals(eq.class_imbalance(counts), OPTIONS["d"])
    assert_equals(eq.client_weights(counts), OPTIONS["e"])


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("words", OPTIONS["loss"])
def test_every_loss_option_with_its_gradient(words: str, tau: str) -> None:
    case = FEDSC["D_options"]
    expected = OPTIONS["loss"][words][f"tau={tau}"]
    method = full(tau=float(tau), **settings(words, LOSS_OPTIONS))
    server = serve(case, method)
    batch = train_batch(case, server, method)
    if method.u_mode == "round":
        given = case["inputs"]["clients"][case["inputs"]["train_batch"]["client"]]
        whole = batch_of(
            tensor(given["features"]),
            torch.tensor(given["labels"]),
            batch.client,
            batch.received,
            case["inputs"]["C"],
        )
        batch = Batch(**{**vars(batch), "observed": observe(method, "start", whole).observed})
    elif method.u_mode == "batch":
        batch = observe(method, "step", batch)
    terms = method.loss(batch)
    for name in ("rpcl", "cpdr"):
        assert_equals(terms[name], expected[name])
        (gradient,) = torch.autograd.grad(terms[name], batch.student.features)
        assert_equals(gradient, expected[f"grad_{name}"])


@pytest.mark.parametrize(("rounds", "strength"), [(1, 0.0), (4, 0.75)])
def test_the_default_weighs_rpcl_outside_and_both_losses_fall(rounds: int, strength: float) -> None:
    """After one of so many rounds: what is left of them, of it a tenth for RPCL."""
    expected = OPTIONS["loss"]["positives=outside"]["tau=0.05"]
    case, method = FEDSC["D_options"], FedSC()
    server = serve(case, method) | {"num_rounds": torch.tensor(float(rounds))}
    terms = method.loss(observe(method, "step", train_batch(case, server, method)))
    assert_equals(terms["rpcl"], 0.1 * strength * expected["rpcl"])
    assert_equals(terms["cpdr"], strength * expected["cpdr"])


def test_nid2_weights() -> None:
    """Five clients with two classes of 4,165 each, one with ten of 833."""
    counts = torch.zeros(6, 10, dtype=torch.float64)
    for k in range(5):
        counts[k, 2 * k : 2 * k + 2] = 4165
    counts[5] = 833
    assert_equals(eq.class_imbalance(counts), [0.4472135955] * 5 + [0.0])
    weights = eq.client_weights(counts)
    assert_equals(weights, [0.16389419] * 5 + [0.1805290502])
