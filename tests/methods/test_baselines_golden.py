"""The baselines against their worked examples, gradients included."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsc import prototypes as eq
from fedsc.divergence import choose, inner_products
from fedsc.method import Batch, Client, Task, Upload
from fedsc.methods.fedcda import FedCDA
from fedsc.methods.fednh import PrototypeHead, move_prototypes
from fedsc.methods.fedntd import FedNTD, not_true_divergence
from fedsc.methods.fedproto import FedProto, prototype_mse
from fedsc.methods.fedprox import FedProx
from fedsc.methods.fedrcl import contrast_code, contrast_paper
from fedsc.methods.moon import Moon, model_contrast
from fedsc.models.outputs import Outputs
from fedsc.state import State
from tests.golden import GOLDEN, assert_equals, tensor

BASELINES: dict[str, Any] = GOLDEN["baselines"]


def gradient(loss: Tensor, wanted: Tensor) -> Tensor:
    return torch.autograd.grad(loss, wanted)[0]


def make_batch(
    student: Outputs,
    labels: Tensor,
    teachers: dict[str, Outputs] | None = None,
    memory: State | None = None,
    received: State | None = None,
    params: dict[str, Tensor] | None = None,
    global_params: dict[str, Tensor] | None = None,
) -> Batch:
    client = Client(torch.tensor(0), torch.zeros(student.logits.shape[1]), memory or {})
    once = torch.ones(len(labels), dtype=student.logits.dtype)
    return Batch(
        labels,
        once,
        student,
        teachers or {},
        params or {},
        global_params or {},
        received or {},
        client,
        {},
    )


def features_only(features: Tensor, num_classes: int = 3) -> Outputs:
    return Outputs(features, torch.zeros(len(features), num_classes, dtype=features.dtype))


def test_fedprox() -> None:
    given, expected = BASELINES["fedprox"]["inputs"], BASELINES["fedprox"]["expected"]
    w = tensor(given["w"]).requires_grad_()
    batch = make_batch(
        features_only(torch.zeros(1, 2, dtype=torch.float64)),
        torch.tensor([0]),
        params={"w": w},
        global_params={"w": tensor(given["w_global"])},
    )
    term = FedProx(mu=given["mu"]).loss(batch)["proximal"]
    assert_equals(term, expected["term"])
    assert_equals(gradient(term, w), expected["grad"])


def test_moon() -> None:
    given, expected = BASELINES["moon"]["inputs"], BASELINES["moon"]["expected"]
    z = tensor(given["z"]).requires_grad_()
    others = tensor(given["z_global"]), tensor(given["z_prev"])
    assert_equals(model_contrast(z, *others, given["tau"]), expected["con_per_sample"])
    batch = make_batch(
        features_only(z),
        torch.tensor([0, 1]),
        {"global": features_only(others[0]), "previous": features_only(others[1])},
        {"has_previous": tensor(1.0)},
    )
    term = Moon(mu=float(given["mu"]), tau=given["tau"]).loss(batch)["contrast"]
    assert_equals(term, expected["mu_times_mean"])
    assert_equals(gradient(term, z), expected["grad_z"])


def test_moon_without_a_previous_model_and_with_equal_teachers_has_no_gradient() -> None:
    z = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    teacher, other = (features_only(torch.randn(4, 8, dtype=torch.float64)) for _ in range(2))
    for previous, known in ((other, 0.0), (teacher, 1.0)):
        batch = make_batch(
            features_only(z),
            torch.tensor([0, 1, 2, 0]),
            {"global": teacher, "previous": previous},
            {"has_previous": tensor(known)},
        )
        assert torch.equal(gradient(Moon().loss(batch)["contrast"], z), torch.zeros_like(z))


def test_fedntd() -> None:
    given = BASELINES["fedntd"]["inputs"]
    labels, teacher = torch.tensor(given["labels"]), tensor(given["teacher_logits"])
    for tau in (1, 3):
        expected = BASELINES["fedntd"]["expected"][f"tau={tau}"]
        logits = tensor(given["logits"]).requires_grad_()
        per_sample = not_true_divergence(logits, teacher, labels, tau)
        assert_equals(per_sample, expected["ntd_per_sample"])
        batch = make_batch(Outputs(logits, logits), labels, {"global": Outputs(teacher, teacher)})
        terms = FedNTD(beta=float(given["beta"]), tau=float(tau)).loss(batch)
        assert_equals(terms["not_true"], expected["ntd_mean"])
        assert_equals(terms["ce"], expected["ce_mean"])
        total = terms["ce"] + terms["not_true"]
        assert_equals(total, expected["total"])
        assert_equals(gradient(total, logits), expected["grad_logits_of_total"])


def test_fedntd_is_zero_for_equal_models_and_for_two_classes() -> None:
    logits = torch.randn(5, 4, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 0])
    assert_equals(not_true_divergence(logits, logits, labels, 1.0), [0.0] * 5)
    other = torch.randn(5, 2, dtype=torch.float64)
    assert_equals(not_true_divergence(logits[:, :2], other, labels % 2, 1.0), [0.0] * 5)


def test_fedproto() -> None:
    given, expected = BASELINES["fedproto"]["inputs"], BASELINES["fedproto"]["expected"]
    features = tensor(given["features"]).requires_grad_()
    prototypes = torch.full((3, 2), torch.nan, dtype=torch.float64)
    for label, row in given["global_protos"].items():
        prototypes[int(label)] = tensor(row)
    exists = torch.tensor([True, True, False])
    prototypes = torch.where(exists[:, None], prototypes, 0)
    loss = prototype_mse(features, torch.tensor(given["labels"]), prototypes, exists)
    assert_equals(loss, expected["mse_mean"])
    assert_equals(gradient(loss, features), expected["grad_features"])


def test_fedproto_server() -> None:
    given, expected = BASELINES["fedproto"]["inputs"], BASELINES["fedproto"]["expected"]
    uploads = []
    for client, own in enumerate(given["local_protos_for_aggregation"]):
        prototypes, counts = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3)
        for label, row in own.items():
            prototypes[int(label)], counts[int(label)] = tensor(row), client + 1
        uploads.append(Upload(client, 1, {}, {"prototypes": prototypes, "counts": counts}))
    method = FedProto()
    before = {"prototypes": torch.zeros(3, 2), "exists": torch.zeros(3, dtype=torch.bool)}
    server = method.aggregate(before, uploads, {})
    assert server["exists"].tolist() == [True, True, False]
    for label, row in expected["aggregated_uniform"].items():
        assert_equals(server["prototypes"][int(label)], row)


def test_fednh() -> None:
    given, expected = BASELINES["fednh"]["inputs"], BASELINES["fednh"]["expected"]
    summed = torch.zeros(2, 2, dtype=torch.float64)
    counts = torch.zeros(2, dtype=torch.float64)
    for client in given["client_unit_embeddings"]:
        features, labels = tensor(client["feat"]), torch.tensor(client["y"])
        once = torch.ones(len(labels), dtype=torch.float64)
        own = eq.class_counts(labels, once, 2)
        mean = eq.client_prototypes(eq.class_sums(features, labels, once, 2), own)
        summed += eq.unit(mean) * own[:, None]
        counts += own
    assert_equals(eq.unit(eq.client_prototypes(summed, counts)), expected["avg_normalised"])
    old = tensor(given["W_old"])
    rows = move_prototypes(old, summed, counts, given["rho"])
    assert_equals(rows, expected["W_new"])
    head = PrototypeHead(rows, given["scale"], learn_scale=True).double()
    query = 3.5 * tensor(given["query_unit_embedding"])[None]  # any length: the head scales it
    assert_equals(head(query).detach()[0], expected["logits_with_W_new"])

    assert torch.equal(move_prototypes(old, summed, counts, 1.0), old)
    unseen = counts * torch.tensor([1, 0])
    assert torch.equal(move_prototypes(old, summed, unseen, 0.5)[1], old[1])


def test_fedrcl_as_the_code_has_it() -> None:
    given, expected = (BASELINES["fedrcl_code_variant"][k] for k in ("inputs", "expected"))
    z = tensor(given["Z_one_layer"]).requires_grad_()
    labels = torch.tensor(given["labels"])
    loss = contrast_code(z, labels, given["tau"], given["lam"], float(given["beta"]))
    assert_equals(loss, expected["layer_loss"])
    assert_equals(gradient(loss, z), expected["grad_Z"])
    attract = sum(expected["scl_per_sample"]) / 5
    assert_equals(contrast_code(z, labels, given["tau"], given["lam"], 0.0), attract)


def test_fedrcl_as_the_paper_has_it() -> None:
    given, expected = (BASELINES["fedrcl_paper_variant"][k] for k in ("inputs", "expected"))
    z = tensor(given["Z_one_layer"]).requires_grad_()
    labels = torch.tensor(given["labels"])
    loss = contrast_paper(z, labels, given["tau"], given["lam"], float(given["beta"]))
    assert_equals(loss, expected["layer_loss"])
    assert_equals(gradient(loss, z), expected["grad_Z"])


def test_fedrcl_without_positives_or_negatives_is_finite() -> None:
    z = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for labels in (torch.tensor([0, 1, 2]), torch.tensor([1, 1, 1])):
        for form in (contrast_code, contrast_paper):
            loss = form(z, labels, 0.05, 0.7, 1.0)
            assert torch.isfinite(loss)
            assert torch.isfinite(gradient(loss, z)).all()


def test_fedcda_objective_of_every_choice() -> None:
    given, expected = BASELINES["fedcda"]["inputs"], BASELINES["fedcda"]["expected"]
    caches = {int(k): rows for k, rows in given["caches"].items()}
    fixed = torch.zeros(2, dtype=torch.float64)
    cost_of_fixed, number_fixed = 0.0, 0
    for group in given["batches"]:
        models = [{"w": tensor(entry["w"])} for k in group for entry in caches[k]]
        losses = tensor([entry["loss"] for k in group for entry in caches[k]])
        gram, with_others, others = inner_products(models, {"w": fixed}, {"w": tensor(1)})
        costs = losses + given["L"] / 2 * gram.diagonal()
        first = [sum(len(caches[k]) for k in group[:i]) for i in range(len(group))]
        candidates = [range(a, a + len(caches[k])) for a, k in zip(first, group, strict=True)]
        rows, objectives = choose(
            candidates, costs, gram, with_others, others, cost_of_fixed, number_fixed, given["L"]
        )
        logged = [entry for entry in expected["objective_log"] if entry["batch"] == group]
        # Ours goes from the newest choice to the oldest, the golden from the oldest on.
        assert_equals(tensor(objectives[::-1]), [entry["objective"] for entry in logged])
        for k, row, a in zip(group, rows, first, strict=True):
            assert_equals(models[row]["w"], expected["selected"][str(k)])
            assert_equals(tensor(caches[k][row - a]["w"]), expected["selected"][str(k)])
            fixed += models[row]["w"]
            cost_of_fixed += float(costs[row])
            number_fixed += 1
    assert_equals(fixed / number_fixed, expected["w_global"])


def test_fedcda_server_reaches_the_same_global_model() -> None:
    """Two rounds fill the caches; the example's groups are those of its own order."""
    given, expected = BASELINES["fedcda"]["inputs"], BASELINES["fedcda"]["expected"]
    method = GroupsInOrder(warmup=0.5, groups=2, cache=2)
    server = method.init_server(Task(3, 3, 2, 2, num_rounds=2, trainable=("w",)))
    records: dict[int, State] = {}
    for round in range(2):
        uploads = [
            Upload(
                int(k), 1, {"w": tensor(rows[round]["w"])}, {"loss": tensor(rows[round]["loss"])}
            )
            for k, rows in given["caches"].items()
        ]
        server = {**server, **method.aggregate(server, uploads, records)}
    assert_equals(server["model"]["w"], expected["w_global"])
    for k, w in expected["selected"].items():
        record = records[int(k)]
        assert_equals(record["models"][str(int(record["chosen"]))]["w"], w)


class GroupsInOrder(FedCDA):
    """FedCDA with the groups of the worked example instead of random ones."""

    def split(self, server: State, clients: list[int]) -> list[list[int]]:
        return [clients[:2], clients[2:]]


def test_cross_entropy_is_a_mean() -> None:
    logits = torch.randn(7, 3, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    terms = FedProx(mu=0.0).loss(make_batch(Outputs(logits, logits), labels))
    by_hand = -F.log_softmax(logits, 1)[range(7), labels].sum() / 7
    assert set(terms) == {"ce"}
    assert_equals(terms["ce"], float(by_hand))


def test_logit_adjustment_adds_the_log_shares_of_the_client() -> None:
    """Counts 3, 1 and none (half a sample): shares 6/9, 2/9, 1/9.

    With equal logits the adjusted softmax is the shares themselves, so samples of classes 0 and 2
    cost ln(9/6) and ln 9, on average ln(13.5) / 2.
    """
    logits = torch.zeros(2, 3, dtype=torch.float64)
    batch = make_batch(Outputs(logits, logits), torch.tensor([0, 2]))
    counts = torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64)
    batch = replace(batch, client=replace(batch.client, class_counts=counts))
    assert_equals(FedProx(mu=0.0, logit_adjustment=1.0).loss(batch)["ce"], math.log(13.5) / 2)
    assert_equals(FedProx(mu=0.0).loss(batch)["ce"], math.log(3))
