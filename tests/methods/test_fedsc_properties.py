"""FedSC where no worked example reaches: random pools against plain loops, edges, options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import fedsc
from fedsc import prototypes as eq
from fedsc.losses import cpdr, rpcl
from fedsc.method import Batch, Client, LocalResult, Moment, Task, Upload
from fedsc.methods import FedSC
from fedsc.models import MLP
from fedsc.models.outputs import Outputs
from tests.golden import full

Array = NDArray[np.float64]
State = dict[str, Any]

repeatable = settings(max_examples=40, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Pool:
    """What the clients of a round sent, and a training batch for the next."""

    prototypes: Array  # (K, C, d)
    counts: Array  # (K, C)
    features: Array  # (B, d)
    labels: NDArray[np.int64]  # (B,)

    @property
    def held(self) -> NDArray[np.bool_]:
        return self.counts > 0


@st.composite
def pools(draw: st.DrawFn, min_clients: int = 1) -> Pool:
    """Random sizes and values; a third of the counts are zero, but no client is empty."""
    clients, classes, dim, size = (
        draw(st.integers(low, high)) for low, high in ((min_clients, 6), (1, 4), (2, 5), (1, 6))
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts = rng.integers(1, 9, (clients, classes)) * (rng.random((clients, classes)) < 0.67)
    for k in range(clients):
        if not counts[k].any():
            counts[k, k % classes] = 1
    return Pool(
        rng.normal(size=(clients, classes, dim)),
        counts.astype(np.float64),
        rng.normal(size=(size, dim)),
        rng.integers(0, classes, size),
    )


def uploads_of(pool: Pool, ids: list[int] | None = None) -> list[Upload]:
    names = range(len(pool.counts)) if ids is None else ids
    return [
        Upload(
            client=client,
            num_samples=int(pool.counts[k].sum()),
            model={"w": torch.from_numpy(pool.prototypes[k].sum(0)).clone()},
            extra={
                "prototypes": torch.from_numpy(pool.prototypes[k]),
                "counts": torch.from_numpy(pool.counts[k]),
            },
        )
        for k, client in enumerate(names)
    ]


def new_server(
    method: FedSC,
    shape: tuple[int, ...],
    num_clients: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> State:
    """An empty server for a cohort of `shape[0]` clients."""
    size, classes, dim = shape
    task = Task(num_clients or size, size, classes, dim, num_rounds=1)
    return {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in method.init_server(task).items()
    }


def serve(
    method: FedSC,
    pool: Pool,
    ids: list[int] | None = None,
    num_clients: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> State:
    """The server after its first round with these clients."""
    server = new_server(method, pool.prototypes.shape, num_clients, dtype)
    return method.aggregate(server, uploads_of(pool, ids), {})


def batch_of(
    method: FedSC,
    server: State,
    features: Array | Tensor,
    labels: Any,
    client: int = 0,
    class_counts: Tensor | None = None,
) -> Batch:
    """A training batch, its features with a gradient, as the client sees it."""
    z = torch.as_tensor(features).detach().clone().to(server["consistent"].dtype).requires_grad_()
    y = torch.as_tensor(labels)
    classes = len(server["consistent"])
    return Batch(
        labels=y,
        weight=torch.ones(len(y), dtype=z.dtype),
        student=Outputs(z, torch.zeros(len(y), classes, dtype=z.dtype)),
        teachers={},
        params={},
        global_params={},
        received=method.broadcast(server),
        client=Client(
            torch.tensor(client), torch.ones(classes) if class_counts is None else class_counts, {}
        ),
        observed={},
    )


def see(method: FedSC, moment: Moment, batch: Batch, before: State | None = None) -> Batch:
    """The batch once more, after the method has observed it."""
    size, classes, dim = batch.received["relational"].shape
    dtype = batch.student.features.dtype
    if before is None:
        task = Task(size, size, classes, dim, num_rounds=1)
        before = {k: v.to(dtype) for k, v in method.start_observing(moment, task).items()}
    with torch.no_grad():
        totals = method.observe(moment, batch, before)
    return Batch(**{**vars(batch), "observed": {moment: totals}})


def terms_and_gradients(method: FedSC, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Each of FedSC's own terms with its gradient by the features."""
    found = {}
    for name, term in method.loss(batch).items():
        if name != "ce":
            (gradient,) = torch.autograd.grad(term, batch.student.features, retain_graph=True)
            found[name] = term.detach(), gradient
    return found


# The same mathematics in loops over single vectors ------------------------------------------------


def cosine(a: Array, b: Array) -> float:
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))


def weights_by_loops(counts: Array) -> list[float]:
    """Eq. 10-11."""
    clients, classes = counts.shape
    d = [math.sqrt(0.5 * sum((n / row.sum() - 1 / classes) ** 2 for n in row)) for row in counts]
    t = [counts[k].sum() / counts.sum() - (d[k] / sum(d) if sum(d) else 0) for k in range(clients)]
    sigma = [1 / (1 + math.exp(-value)) for value in t]
    return [value / sum(sigma) for value in sigma]


def server_by_loops(
    pool: Pool, m: int
) -> tuple[dict[tuple[int, int], Array], dict[int, Array], float]:
    """Eq. 5-12: every r_k^j and o^j that exists, and how near the nearest tie in Eq. 8 came."""
    c, e = pool.prototypes, weights_by_loops(pool.counts)
    r: dict[tuple[int, int], Array] = {}
    o: dict[int, Array] = {}
    nearest_tie = math.inf
    for j in range(c.shape[1]):
        holders = np.flatnonzero(pool.held[:, j]).tolist()
        if not holders:
            continue
        g = sum(c[k, j] for k in holders) / len(holders)
        phi = {k: cosine(g, c[k, j]) for k in holders}
        for k in holders:
            gap = {q: abs(phi[k] - phi[q]) for q in holders if q != k}
            others = sorted(gap, key=lambda q, gap=gap: (gap[q], q))  # type: ignore[misc]
            if m and len(others) > m:
                nearest_tie = min(nearest_tie, gap[others[m]] - gap[others[m - 1]])
            group = [k, *others[:m]]
            r[k, j] = sum(c[q, j] for q in group) / len(group)
        o[j] = np.average([r[k, j] for k in holders], axis=0, weights=[e[k] for k in holders])
    return r, o, nearest_tie


def rpcl_by_loops(features: Array, labels: Any, rows: list[tuple[int, Array]], tau: float) -> float:
    """Eq. 13-14, U over the whole batch."""
    u = [max(1e-6, np.mean([np.linalg.norm(z - p) for z in features])) for _, p in rows]
    losses = []
    for z, y in zip(features, labels, strict=True):
        s = [cosine(z, p) / u_q / tau for (_, p), u_q in zip(rows, u, strict=True)]
        top = max(s, default=0.0)
        every = sum(math.exp(v - top) for v in s)
        own = [v for v, (j, _) in zip(s, rows, strict=True) if j == y]
        if own:
            best = max(own)
            own_sum = best + math.log(sum(math.exp(v - best) for v in own))
            losses.append(top + math.log(every) - own_sum)
    return sum(losses) / len(losses) if losses else 0.0


def close(got: Tensor, expected: Any, rtol: float = 1e-9, atol: float = 1e-10) -> None:
    expected = torch.as_tensor(np.asarray(expected), dtype=got.dtype)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


@repeatable
@given(pools(), st.integers(0, 4))
def test_server_agrees_with_plain_loops(pool: Pool, m: int) -> None:
    r, o, nearest_tie = server_by_loops(pool, m)
    assume(nearest_tie > 1e-9)
    # What a client does not hold is never read: not even where it is no number.
    pool.prototypes[~pool.held] = np.nan
    server = serve(full(neighbours=m), pool)
    exists = server["relational_exists"]
    assert exists.tolist() == pool.held.tolist()
    for (k, j), value in r.items():
        close(server["relational"][k, j], value)
    assert server["consistent_exists"].tolist() == pool.held.any(0).tolist()
    for j, value in o.items():
        close(server["consistent"][j], value)
    assert not server["relational"].isnan().any()
    assert not server["consistent"].isnan().any()


def test_ties_go_to_the_lower_client_however_many_there_are() -> None:
    same = torch.randn(1, 1, 512, dtype=torch.float64).expand(60, 1, 512)
    for metric in ("cosine", "l1", "l2", "kl"):
        distance = eq.pairwise_distance(same, metric)
        groups = eq.neighbour_groups(distance, torch.ones(60, 1, dtype=torch.bool), 2)
        assert groups[0, 50].nonzero().flatten().tolist() == [0, 1, 50], metric


@repeatable
@given(pools(), st.integers(0, 4), st.sampled_from([0.05, 0.5]))
def test_losses_agree_with_plain_loops(pool: Pool, m: int, tau: float) -> None:
    r, o, nearest_tie = server_by_loops(pool, m)
    assume(nearest_tie > 1e-9)
    method = full(neighbours=m, tau=tau)
    server = serve(method, pool)
    batch = see(method, "step", batch_of(method, server, pool.features, pool.labels))
    found = method.loss(batch)
    rows = [(j, value) for (_, j), value in r.items()]
    close(found["rpcl"].detach(), rpcl_by_loops(pool.features, pool.labels, rows, tau), 1e-7)
    pulls = [
        np.mean((z - o[y]) ** 2)
        for z, y in zip(pool.features, pool.labels.tolist(), strict=True)
        if y in o
    ]
    close(found["cpdr"].detach(), np.mean(pulls) if pulls else 0.0)


# Symmetries ---------------------------------------------------------------------------------------


@repeatable
@given(pools(min_clients=2), st.integers(0, 3), st.randoms(use_true_random=False))
def test_the_order_in_which_clients_answer_does_not_matter(pool: Pool, m: int, random: Any) -> None:
    method = full(neighbours=m)
    uploads = uploads_of(pool)
    shuffled = random.sample(uploads, len(uploads))
    empty = new_server(method, pool.prototypes.shape)
    one, other = method.aggregate(empty, uploads, {}), method.aggregate(empty, shuffled, {})
    assert one.keys() == other.keys()
    for name in one.keys() - {"model"}:
        # A first round has no drift, and NaN equals nothing.
        assert torch.equal(one[name].nan_to_num(), other[name].nan_to_num()), name
    assert torch.equal(one["model"]["w"], other["model"]["w"])


@repeatable
@given(pools(min_clients=2), st.integers(0, 3), st.randoms(use_true_random=False))
def test_renaming_clients_renames_their_rows_only(pool: Pool, m: int, random: Any) -> None:
    assume(server_by_loops(pool, m)[2] > 1e-9)
    num_clients = 20
    ids = random.sample(range(num_clients), len(pool.counts))
    method = full(neighbours=m)
    plain = serve(method, pool)
    renamed = serve(method, pool, ids, num_clients)
    assert renamed["owner"].tolist() == sorted(ids)
    for k, client in enumerate(ids):
        row = sorted(ids).index(client)
        assert torch.equal(renamed["relational_exists"][row], plain["relational_exists"][k])
        close(renamed["relational"][row], plain["relational"][k])
    close(renamed["consistent"], plain["consistent"])


@repeatable
@given(pools(), st.integers(0, 5))
def test_a_client_twice_weighs_like_one_with_twice_the_samples(pool: Pool, which: int) -> None:
    k = which % len(pool.counts)
    double = pool.counts.copy()
    double[k] *= 2
    twice = Pool(
        np.concatenate([pool.prototypes, pool.prototypes[k : k + 1]]),
        np.concatenate([pool.counts, pool.counts[k : k + 1]]),
        pool.features,
        pool.labels,
    )
    method = full(global_mean="weighted", relational=False)  # every row is g
    one = serve(method, Pool(pool.prototypes, double, pool.features, pool.labels))
    other = serve(method, twice)
    for j in np.flatnonzero(pool.held.any(0)):
        close(other["relational"][0, j], one["relational"][0, j])


@repeatable
@given(pools())
def test_everybody_twice_changes_no_mean(pool: Pool) -> None:
    twice = Pool(
        np.concatenate([pool.prototypes, pool.prototypes]),
        np.concatenate([pool.counts, pool.counts]),
        pool.features,
        pool.labels,
    )
    # Not with e of Eq. 11: the sigmoid of half the share is not half the sigmoid.
    for method in (full(relational=False), full(neighbours=0, client_weight="uniform")):
        close(serve(method, twice)["consistent"], serve(method, pool)["consistent"])


# Few holders, few classes, few samples ------------------------------------------------------------


@repeatable
@given(pools(min_clients=2), st.integers(0, 3))
def test_a_class_nobody_holds(pool: Pool, which: int) -> None:
    classes = pool.counts.shape[1]
    assume(classes > 1)
    gone = which % classes
    pool.counts[:, gone] = 0
    pool.counts[pool.counts.sum(1) == 0, (gone + 1) % classes] = 1
    method = full(u_mode="none")  # U apart, each sample's loss is its own affair
    server = serve(method, pool)
    assert not server["relational_exists"][:, gone].any()
    assert not server["consistent_exists"][gone]

    batch = batch_of(method, server, pool.features, pool.labels)
    mixed = terms_and_gradients(method, batch)
    absent = torch.from_numpy(~np.any(pool.held, axis=0)[pool.labels])
    for _, gradient in mixed.values():
        assert gradient.isfinite().all()
        assert (gradient[absent] == 0).all()
    rest = ~np.asarray(absent)
    if rest.any():
        without = batch_of(method, server, pool.features[rest], pool.labels[rest])
        for name, (value, _) in terms_and_gradients(method, without).items():
            close(mixed[name][0], value)

    only_gone = see(full(), "step", batch_of(full(), server, pool.features, pool.labels * 0 + gone))
    for value, gradient in terms_and_gradients(full(), only_gone).values():
        assert value == 0
        assert (gradient == 0).all()


@repeatable
@given(pools())
def test_more_neighbours_than_holders_is_everybody(pool: Pool) -> None:
    most = len(pool.counts) - 1
    all_of_them = serve(full(neighbours=most), pool)
    beyond = serve(full(neighbours=most + 50), pool)
    assert torch.equal(beyond["relational"], all_of_them["relational"])
    assert torch.equal(beyond["consistent"], all_of_them["consistent"])


@repeatable
@given(pools(), st.integers(0, 5))
def test_few_holders_make_all_three_prototypes_one(pool: Pool, m: int) -> None:
    """Where h_j <= M + 1: r = g = o, so in NID2 the relations say nothing."""
    server = serve(full(neighbours=m), pool)
    for j in range(pool.counts.shape[1]):
        holders = np.flatnonzero(pool.held[:, j])
        if 0 < len(holders) <= m + 1:
            g = pool.prototypes[holders, j].mean(0)
            close(server["consistent"][j], g)
            for k in holders:
                close(server["relational"][k, j], g)


@repeatable
@given(pools())
def test_without_neighbours_each_client_keeps_its_prototype(pool: Pool) -> None:
    server = serve(full(neighbours=0), pool)
    held = torch.from_numpy(pool.held)
    assert torch.equal(server["relational"][held], torch.from_numpy(pool.prototypes)[held])


def test_ties_go_to_the_lower_client() -> None:
    """Four clients on one line through the origin: all at angle 0 to g, all equally near."""
    c = np.array([[[1.0]], [[2.0]], [[4.0]], [[8.0]]])
    server = serve(full(neighbours=1), Pool(c, np.ones((4, 1)), c[0], np.zeros(1, np.int64)))
    assert server["relational"][:, 0, 0].tolist() == [1.5, 1.5, 2.5, 4.5]


@repeatable
@given(pools())
def test_clients_of_one_sample_each(pool: Pool) -> None:
    """Its prototype is the sample, it holds one class, and all clients weigh the same."""
    clients, classes = pool.counts.shape
    lone = np.zeros_like(pool.counts)
    own = np.arange(clients) % classes
    lone[np.arange(clients), own] = 1
    server = serve(full(neighbours=0), Pool(pool.prototypes, lone, pool.features, pool.labels))
    assert server["relational_exists"].sum(1).tolist() == [1] * clients
    for j in range(min(classes, clients)):
        close(server["consistent"][j], pool.prototypes[own == j, j].mean(0))


@repeatable
@given(pools())
def test_one_client_alone(pool: Pool) -> None:
    alone = Pool(pool.prototypes[:1], pool.counts[:1], pool.features, pool.labels)
    server = serve(full(), alone)
    for j in np.flatnonzero(alone.held[0]):
        close(server["relational"][0, j], pool.prototypes[0, j], 0, 0)
        close(server["consistent"][j], pool.prototypes[0, j], 1e-15)


@repeatable
@given(pools())
def test_one_class_leaves_nothing_to_contrast(pool: Pool) -> None:
    single = Pool(
        pool.prototypes[:, :1],
        np.maximum(pool.counts[:, :1], 1),
        pool.features,
        np.zeros_like(pool.labels),
    )
    server = serve(full(), single)
    batch = see(full(), "step", batch_of(full(), server, single.features, single.labels))
    value, gradient = terms_and_gradients(full(), batch)["rpcl"]
    assert abs(value) < 1e-12
    assert gradient.abs().max() < 1e-10


@repeatable
@given(pools(), st.sampled_from(["batch", "none", "ema"]))
def test_before_the_first_prototypes_only_cross_entropy_counts(pool: Pool, u_mode: Any) -> None:
    method = full(u_mode=u_mode)
    server = new_server(method, pool.prototypes.shape)
    batch = see(method, "step", batch_of(method, server, pool.features, pool.labels))
    for value, gradient in terms_and_gradients(method, batch).values():
        assert value == 0
        assert (gradient == 0).all()
    assert method.prototypes(server)[1].sum() == 0


# Numbers ------------------------------------------------------------------------------------------


@repeatable
@given(pools(min_clients=2), st.sampled_from(["batch", "none"]))
def test_vectors_of_length_zero(pool: Pool, u_mode: Any) -> None:
    """Neither a zero feature nor a zero prototype has a direction: cosine 0, gradient 0."""
    pool.features[0] = 0
    pool.prototypes[0] = 0
    pool.counts[:] = 3
    method = full(neighbours=0, u_mode=u_mode)
    server = serve(method, pool)
    batch = see(method, "step", batch_of(method, server, pool.features, pool.labels))
    found = terms_and_gradients(method, batch)
    for value, gradient in found.values():
        assert value.isfinite()
        assert gradient.isfinite().all()
    assert (found["rpcl"][1][0] == 0).all()

    lone = see(method, "step", batch_of(method, server, pool.features[:1], pool.labels[:1]))
    close(method.loss(lone)["rpcl"].detach(), math.log(pool.counts.shape[1]))  # all cosines are 0


@repeatable
@given(pools(), st.sampled_from([1e-30, 1e-9]))
def test_features_on_their_prototypes(pool: Pool, distance: float) -> None:
    """U is floored at 1e-6, so s / tau reaches 2e7: the loss and its gradient stay finite."""
    pool.counts[:] = 1
    labels = np.zeros(2, np.int64)
    features = np.repeat(pool.prototypes[0, :1], 2, 0) + distance
    method = full(neighbours=0)
    server = serve(method, pool)
    batch = see(method, "step", batch_of(method, server, features, labels))
    for value, gradient in terms_and_gradients(method, batch).values():
        assert value.isfinite()
        assert gradient.isfinite().all()
    assert batch.observed["step"]["min_u"] == pytest.approx(1e-6)


@repeatable
@given(pools(min_clients=2))
def test_a_small_step_down_the_gradient_of_rpcl_lowers_it(pool: Pool) -> None:
    method = full(cpdr_weight=0.0, tau=0.5)
    server = serve(method, pool)
    batch = see(method, "step", batch_of(method, server, pool.features, pool.labels))
    before, gradient = terms_and_gradients(method, batch)["rpcl"]
    assume(gradient.norm() > 1e-2)
    moved = batch_of(method, server, batch.student.features - 1e-6 * gradient, pool.labels)
    with_same_u = Batch(**{**vars(moved), "observed": batch.observed})
    after = method.loss(with_same_u)["rpcl"].detach()
    assert after < before
    expected_fall = 1e-6 * gradient.norm() ** 2  # to first order
    assert before - after == pytest.approx(float(expected_fall), rel=0.05)


@repeatable
@given(pools())
def test_client_weights_are_shares(pool: Pool) -> None:
    e = eq.client_weights(torch.from_numpy(pool.counts))
    assert (e > 0).all()
    assert float(e.sum()) == pytest.approx(1)
    close(e, weights_by_loops(pool.counts))
    d = [np.linalg.norm(row / row.sum() - 1 / len(row)) / math.sqrt(2) for row in pool.counts]
    close(eq.class_imbalance(torch.from_numpy(pool.counts)), d)


@repeatable
@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 500))
def test_equal_balanced_clients_weigh_the_same(clients: int, classes: int, each: int) -> None:
    e = eq.client_weights(torch.full((clients, classes), float(each), dtype=torch.float64))
    close(e, [1 / clients] * clients, 1e-12)


@repeatable
@given(pools(), st.integers(0, 3), st.sampled_from(["mse_mean", "l1_sum", "l2"]))
def test_single_precision_agrees_with_double(pool: Pool, m: int, form: Any) -> None:
    rounded = Pool(
        pool.prototypes.astype(np.float32).astype(np.float64),
        pool.counts,
        pool.features.astype(np.float32).astype(np.float64),
        pool.labels,
    )
    method = full(neighbours=m, cpdr=form)
    found = []
    for dtype in (torch.float32, torch.float64):
        server = serve(method, rounded, dtype=dtype)
        batch = see(method, "step", batch_of(method, server, rounded.features, rounded.labels))
        found.append((server, method.loss(batch)))
    (single_server, single), (double_server, double) = found
    for name in ("relational", "consistent"):
        assert single_server[name].dtype == torch.float32
        close(single_server[name].double(), double_server[name], 1e-6, 1e-6)
    for name in ("rpcl", "cpdr"):
        assert single[name].dtype == torch.float32
        close(single[name].detach().double(), double[name].detach(), 1e-4, 1e-6)


# The options that the worked examples leave out ---------------------------------------------------

# Two clients, two classes in the plane; client 1 does not hold class 1.
C2 = np.array([[[4.0, 0.0], [0.0, 2.0]], [[0.0, 8.0], [0.0, 0.0]]])
N2 = np.array([[3.0, 1.0], [4.0, 0.0]])
SMALL = Pool(C2, N2, np.zeros((1, 2)), np.zeros(1, np.int64))


def test_global_fill_gives_r_to_clients_without_the_class() -> None:
    server = serve(full(absent="global_fill", neighbours=0), SMALL)
    assert server["relational_exists"].tolist() == [[True, True], [True, True]]
    assert server["relational"][1, 1].tolist() == [0.0, 2.0]  # g of class 1
    assert server["relational"][0].tolist() == C2[0].tolist()
    assert server["consistent"][1].tolist() == [0.0, 2.0]
    # With three classes nobody holds the last: there is no g to fill in.
    wider = Pool(
        np.concatenate([C2, np.ones((2, 1, 2))], 1),
        np.pad(N2, ((0, 0), (0, 1))),
        C2[0],
        SMALL.labels,
    )
    server = serve(full(absent="global_fill"), wider)
    assert server["relational_exists"].tolist() == [[True, True, False]] * 2
    assert server["consistent_exists"].tolist() == [True, True, False]


def test_global_fill_does_not_invent_clients_that_did_not_answer() -> None:
    method = full(absent="global_fill")
    server = new_server(method, (3, 2, 2))
    server = method.aggregate(server, uploads_of(SMALL), {})
    assert server["relational_exists"].tolist() == [[True, True], [True, True], [False, False]]


def test_without_relations_every_row_is_the_global_prototype() -> None:
    server = serve(full(relational=False), SMALL)
    assert server["relational"][:, 0].tolist() == [[2.0, 4.0], [2.0, 4.0]]
    assert server["relational"][0, 1].tolist() == [0.0, 2.0]
    close(server["consistent"], [[2.0, 4.0], [0.0, 2.0]])


def one_vector(client: int, vector: list[float], count: float = 5.0) -> Upload:
    """An upload of a client with a single class."""
    extra = {
        "prototypes": torch.tensor([vector], dtype=torch.float64),
        "counts": torch.tensor([count], dtype=torch.float64),
    }
    return Upload(client, int(count), {}, extra)


def replay(method: FedSC, rounds: list[list[Upload]], num_clients: int) -> State:
    """The server after these rounds of one-class clients in the plane."""
    server = new_server(method, (len(rounds[0]), 1, 2), num_clients)
    for uploads in rounds:
        server = method.aggregate(server, uploads, {})
    return server


ROUNDS = [
    [one_vector(0, [1.0, 0.0])],
    [one_vector(2, [3.0, 0.0])],
    [one_vector(1, [2.0, 0.0])],
    [one_vector(2, [9.0, 0.0])],
]


def test_the_bank_keeps_the_last_known_of_every_client() -> None:
    method = full(pool="bank", neighbours=0)
    server = replay(method, ROUNDS[:3], num_clients=4)
    assert server["relational"][:3, 0, 0].tolist() == [1.0, 2.0, 3.0]
    assert server["relational_exists"][:, 0].tolist() == [True, True, True, False]
    assert server["owner"].tolist() == [0, 1, 2, -1]
    server = replay(method, ROUNDS, num_clients=4)
    assert server["relational"][:3, 0, 0].tolist() == [1.0, 2.0, 9.0]
    close(server["consistent"][0], [4.0, 0.0])  # equal sizes, one class: equal weights


@pytest.mark.parametrize(
    ("max_age", "there"),
    [
        (0, [False, True, False, False]),
        (1, [False, True, True, False]),
        (2, [True, True, True, False]),
    ],
)
def test_a_prototype_leaves_the_bank_after_max_age(max_age: int, there: list[bool]) -> None:
    """After three rounds client 0 is two rounds old, client 2 one, client 1 new."""
    server = replay(full(pool="bank", max_age=max_age), ROUNDS[:3], num_clients=4)
    assert server["relational_exists"][:, 0].tolist() == there


def test_a_client_that_comes_back_is_in_the_bank_again() -> None:
    method = full(pool="bank", max_age=0, neighbours=0)
    server = replay(method, ROUNDS, num_clients=4)
    assert server["relational_exists"][:, 0].tolist() == [False, False, True, False]
    close(server["consistent"][0], [9.0, 0.0])


def test_the_pool_of_participants_forgets_the_round_before() -> None:
    server = replay(full(neighbours=0), ROUNDS[:2], num_clients=4)
    assert server["owner"].tolist() == [2]
    close(server["consistent"][0], [3.0, 0.0])


def class_upload(client: int, counts: list[float]) -> Upload:
    """Prototypes that show e_k: without renormalising, o^j sums e_k over the holders of j."""
    extra = {
        "prototypes": torch.ones(len(counts), 1, dtype=torch.float64),
        "counts": torch.tensor(counts, dtype=torch.float64),
    }
    return Upload(client, int(sum(counts)), {}, extra)


def weights_with_all_sums(num_clients: int) -> list[float]:
    """Clients 0 and 1 take part, then 0 and 2: e of the last two from their own classes."""
    method = full(weight_sums="all", renormalise=False, neighbours=0)
    server = new_server(method, (2, 2, 1), num_clients)
    for uploads in (
        [class_upload(0, [6.0, 0.0]), class_upload(1, [1.0, 3.0])],
        [class_upload(0, [6.0, 0.0]), class_upload(2, [0.0, 10.0])],
    ):
        server = method.aggregate(server, uploads, {})
    return [float(value) for value in server["consistent"][:, 0]]


# By hand: N = 6 + 4 + 10 = 20; d = 1/2, 1/4, 1/2, together 5/4; t_0 = 0.3 - 0.4, t_2 = 0.5 - 0.4.
SIGMA = [1 / (1 + math.exp(0.1)), 1 / (1 + math.exp(-0.1))]
WEIGHTS_OF_ALL = [value / sum(SIGMA) for value in SIGMA]


def test_weight_sums_over_everybody_heard_of() -> None:
    assert weights_with_all_sums(num_clients=3) == pytest.approx(WEIGHTS_OF_ALL)


def test_weight_sums_leave_out_clients_never_heard_of() -> None:
    assert weights_with_all_sums(num_clients=8) == pytest.approx(WEIGHTS_OF_ALL)


# One row of class 0 at (3, 4), one of class 1 at (0, -10).
ROWS = Pool(
    np.array([[[3.0, 4.0], [0.0, -10.0]]]), np.ones((1, 2)), np.zeros((1, 2)), np.zeros(1, np.int64)
)


def test_moving_average_of_u() -> None:
    method = full(u_mode="ema")
    server = serve(method, ROWS)
    first = see(method, "step", batch_of(method, server, np.zeros((2, 2)), [0, 1]))
    close(first.observed["step"]["u"], [5.0, 10.0])
    # From (3, 0): 4 and sqrt(109); 0.9 of the old and 0.1 of the new.
    again = batch_of(method, server, np.array([[3.0, 0.0]]), [0])
    second = see(method, "step", again, first.observed["step"])
    close(second.observed["step"]["u"], [4.9, 9 + 0.1 * math.sqrt(109)])
    u = second.observed["step"]["u"]
    scores = np.array([0.6 / float(u[0]), 0.0]) / 0.05
    close(method.loss(second)["rpcl"].detach(), math.log(1 + math.exp(scores[1] - scores[0])), 1e-7)
    assert float(second.observed["step"]["min_u"]) == pytest.approx(4.9)


def test_u_of_own_class_by_hand() -> None:
    method = full(u_same_class=True)
    server = serve(method, ROWS)
    features = np.array([[0.0, 0.0], [3.0, 0.0], [0.0, -4.0]])
    batch = see(method, "step", batch_of(method, server, features, [0, 0, 1]))
    close(batch.observed["step"]["u"], [4.5, 6.0])  # (5 + 4) / 2, and 6
    # A class that is not in the batch takes all samples.
    lone = see(method, "step", batch_of(method, server, features[:2], [0, 0]))
    close(lone.observed["step"]["u"], [4.5, (10 + math.sqrt(109)) / 2])


@pytest.mark.parametrize(("u_mode", "moment"), [("epoch", "epoch"), ("round", "start")])
def test_u_over_all_data_by_hand(u_mode: Any, moment: Moment) -> None:
    """In two parts, the second with a sample that only fills it up; the floor applies as well."""
    method = full(u_mode=u_mode, tau=0.5)
    server = serve(method, ROWS)
    one = see(method, moment, batch_of(method, server, np.array([[0.0, 0.0]]), [0]))
    part = batch_of(method, server, np.array([[3.0, 0.0], [70.0, 70.0]]), [0, 1])
    part = Batch(**{**vars(part), "weight": torch.tensor([1.0, 0.0])})
    both = see(method, moment, part, one.observed[moment])
    u = [4.5, (10 + math.sqrt(109)) / 2]
    probe = batch_of(method, server, np.array([[1.0, -1.0]]), [1])
    probe = Batch(**{**vars(probe), "observed": both.observed})
    root = math.sqrt(2)
    scores = [(3 - 4) / (5 * root) / u[0] / 0.5, 1 / root / u[1] / 0.5]
    expected = math.log(1 + math.exp(scores[0] - scores[1]))
    close(method.loss(probe)["rpcl"].detach(), expected)


@repeatable
@given(pools())
def test_u_of_the_round_of_the_epoch_and_of_one_batch_agree_on_the_same_features(
    pool: Pool,
) -> None:
    found = []
    modes: list[tuple[Any, Moment]] = [("batch", "step"), ("epoch", "epoch"), ("round", "start")]
    for u_mode, moment in modes:
        method = full(u_mode=u_mode)
        server = serve(method, pool)
        batch = see(method, moment, batch_of(method, server, pool.features, pool.labels))
        found.append(terms_and_gradients(method, batch)["rpcl"])
    for value, gradient in found[1:]:
        close(value, found[0][0])
        close(gradient, found[0][1])


def test_gradients_through_u_change_the_gradient_and_not_the_value() -> None:
    features = np.array([[1.0, 0.5], [-0.5, 1.5]])
    found = []
    for u_grad in (False, True):
        method = full(u_grad=u_grad, tau=0.5)
        server = serve(method, ROWS)
        batch = see(method, "step", batch_of(method, server, features, [0, 1]))
        found.append(terms_and_gradients(method, batch)["rpcl"])
    (value, gradient), (same_value, other_gradient) = found
    close(value, same_value)
    assert (gradient - other_gradient).abs().max() > 1e-3

    # The gradient through U against finite differences, where U moves with the features.
    method = full(u_grad=True, tau=0.5)
    server = serve(method, ROWS)
    rows = [(0, ROWS.prototypes[0, 0]), (1, ROWS.prototypes[0, 1])]
    for i, axis in ((0, 0), (1, 1)):
        step = np.zeros_like(features)
        step[i, axis] = 1e-6
        up = rpcl_by_loops(features + step, [0, 1], rows, 0.5)
        down = rpcl_by_loops(features - step, [0, 1], rows, 0.5)
        assert float(other_gradient[i, axis]) == pytest.approx((up - down) / 2e-6, rel=1e-6)


@repeatable
@given(pools(min_clients=2), st.integers(0, 5))
def test_exclude_self_is_as_if_the_client_had_no_prototypes(pool: Pool, which: int) -> None:
    me = which % len(pool.counts)
    method = full(exclude_self=True, neighbours=0, u_mode="none", cpdr_weight=0.0)
    server = serve(method, pool)
    with_me = method.loss(batch_of(method, server, pool.features, pool.labels, client=me))
    others = [k for k in range(len(pool.counts)) if k != me]
    without = Pool(pool.prototypes[others], pool.counts[others], pool.features, pool.labels)
    plain = full(neighbours=0, u_mode="none", cpdr_weight=0.0)
    smaller = serve(plain, without)
    expected = plain.loss(batch_of(plain, smaller, pool.features, pool.labels))
    close(with_me["rpcl"].detach(), expected["rpcl"].detach())


def test_a_class_with_too_few_samples_has_no_prototype() -> None:
    server = serve(full(min_count=3, neighbours=5), SMALL)
    assert server["relational_exists"].tolist() == [[True, False], [True, False]]
    assert server["consistent_exists"].tolist() == [True, False]
    assert serve(full(min_count=4), SMALL)["relational_exists"].tolist() == [
        [False, False],
        [True, False],
    ]


def test_clients_send_means_and_drop_small_classes() -> None:
    """Eq. 3 over two batches, a filler not counted: class 0 mean (2, 1), class 1 has one sample."""
    method = full(min_count=2)
    server = new_server(method, (1, 2, 2))
    one = batch_of(method, server, np.array([[1.0, 0.0], [3.0, 2.0]]), [0, 0])
    two = batch_of(method, server, np.array([[7.0, 7.0], [50.0, 50.0]]), [1, 0])
    two = Batch(**{**vars(two), "weight": torch.tensor([1.0, 0.0])})
    seen = see(method, "last_epoch", one)
    seen = see(method, "last_epoch", two, seen.observed["last_epoch"])
    sent = method.upload(LocalResult({}, {}, seen.observed, {}, one.client))
    assert sent["prototypes"].tolist() == [[2.0, 1.0], [0.0, 0.0]]
    assert sent["counts"].tolist() == [2.0, 1.0]


def test_initial_prototypes_are_asked_for_before_round_one_only() -> None:
    assert full(init_protos=True).surveys_before_training()
    assert not full().surveys_before_training()
    assert full(init_protos=True).moments(0) == ("end",)
    assert set(full(init_protos=True).moments(1)) == {"last_epoch", "step"}
    assert set(full(proto_source="eval", u_mode="none").moments(1)) == {"end"}


def test_summed_cross_entropy_is_64_times_the_mean_of_64() -> None:
    features = np.ones((64, 2))
    logits = torch.linspace(-2, 2, 128, dtype=torch.float64).reshape(64, 2)
    found = []
    forms: tuple[Any, ...] = ("mean", "sum")
    for form in forms:
        method = full(ce=form, rpcl_weight=0.0, cpdr_weight=0.0)
        batch = batch_of(method, new_server(method, (1, 2, 2)), features, [0, 1] * 32)
        batch = Batch(**{**vars(batch), "student": Outputs(batch.student.features, logits)})
        terms = method.loss(batch)
        assert list(terms) == ["ce"]
        found.append(float(terms["ce"]))
    p = 1 / (1 + math.exp(4 / 127))  # of the first of two logits, always 4/127 apart
    assert found[0] == pytest.approx(-(math.log(p) + math.log(1 - p)) / 2)
    assert found[1] == pytest.approx(64 * found[0])


def test_weights_of_the_terms_scale_them() -> None:
    features = np.array([[1.0, 0.5], [-0.5, 1.5]])

    def values(**options: float) -> dict[str, float]:
        method = full(**options)
        batch = batch_of(method, serve(method, ROWS), features, [0, 1])
        terms = method.loss(see(method, "step", batch))
        return {name: float(term.detach()) for name, term in terms.items()}

    plain, scaled = values(), values(rpcl_weight=0.25, cpdr_weight=3.0)
    assert scaled["rpcl"] == pytest.approx(plain["rpcl"] / 4)
    assert scaled["cpdr"] == pytest.approx(plain["cpdr"] * 3)
    assert scaled["ce"] == plain["ce"]


@pytest.mark.parametrize(
    ("form", "expected"),
    [("mse_mean", 12.5), ("mse_sum", 25.0), ("l1_mean", 3.5), ("l1_sum", 7.0), ("l2", 5.0)],
)
def test_forms_of_cpdr_by_hand(form: str, expected: float) -> None:
    """From the origin to (3, 4); a second sample has no prototype and does not count."""
    o = torch.tensor([[3.0, 4.0], [9.0, 9.0]])
    exists = torch.tensor([True, False])
    assert cpdr(torch.zeros(2, 2), torch.tensor([0, 1]), o, exists, form) == expected


def test_the_pull_of_l2_ends_at_the_prototype() -> None:
    o = torch.tensor([[3.0, 4.0]])
    z = o.clone().requires_grad_()
    loss = cpdr(z, torch.tensor([0]), o, torch.tensor([True]), "l2")
    (gradient,) = torch.autograd.grad(loss, z)
    assert gradient.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("outside", "expected"),
    [
        (False, math.log((math.e**2 + 1 + 1) / (math.e**2 + 1))),
        (True, math.log(math.e**2 + 1 + 1) - 1.0),
    ],
)
def test_positives_inside_and_outside_the_logarithm(outside: bool, expected: float) -> None:
    """Scores 2 and 0 of the own class, 0 of the other, with tau = 1/2 and U = 1."""
    rows = torch.tensor([[5.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    z = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    loss = rpcl(
        z,
        torch.tensor([0]),
        rows,
        torch.tensor([0, 0, 1]),
        torch.ones(3, dtype=torch.bool),
        torch.ones(()),
        0.5,
        outside=outside,
    )
    assert float(loss) == pytest.approx(expected)


@pytest.mark.parametrize("init_protos", [False, True])
def test_the_weights_rise_or_fall_over_the_rounds(init_protos: bool) -> None:
    """What the next round will be told, after each of four; a survey before them is no round."""
    expected = {"rising": [0.25, 0.5, 0.75, 1], "falling": [0.75, 0.5, 0.25, 0]}
    data = fedsc.load_dataset("digits")
    for schedule, strengths in expected.items():
        method = full(schedule=schedule, init_protos=init_protos)
        spec = fedsc.RunSpec(rounds=4, epochs=1, train_limit=200, clients=3)
        federation = fedsc.Federation(spec, data, method, MLP(data.image_shape, 10))
        told = [float(method.broadcast(federation.server)["strength"]) for _ in federation.rounds()]
        assert told == strengths
