"""FedSC: Federated Learning with Semantic-Aware Collaboration (KDD 2025).

Clients send, beside their weights, the mean feature c_k^j of each class they hold (Eq. 3). The
server makes of them

    relational prototypes  r_k^j   mean of c_k^j and its M nearest by angle to g^j   (Eq. 5-9)
    consistent prototypes  o^j     mean of r_k^j weighted by size and balance e_k    (Eq. 10-12)

and clients train, from the second round on, with

    CE + w_1 RPCL(z, all r_k^j) + w_2 CPDR(z, o^y)                                   (Eq. 13-15)

The weights of the network are averaged as in FedAvg. Where the paper leaves a choice, the choice is
an option below; `docs/methods.md` lists them with the place in the paper. `FedSC()` is the reading
that won on held-out images (`docs/results.md`): it differs from the preset `full`, the recommended
reading before that search, in the weights w_1 and w_2 and in where Eq. 14 has its positives. The
preset `literal` takes Eq. 3, 13 and 15 to the letter.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import prototypes as eq
from ..losses import U_FLOOR, cpdr, prototype_distances, rpcl
from ..method import Batch, LocalResult, Method, Moment, Task, Upload
from ..options import option
from ..robust import bounded_in, bounded_prototypes
from ..state import State

# Both losses at their full weight in every round, positives in the logarithm as Eq. 14 prints them.
FULL = {"rpcl_weight": 1.0, "schedule": "constant", "positives": "inside"}


@dataclass(frozen=True)
class FedSC(Method):
    name: ClassVar[str] = "fedsc"
    sent_prototypes: ClassVar[str | None] = "prototypes"
    private_units: ClassVar[tuple[str, ...]] = ("record", "client")
    presets: ClassVar = {
        "full": FULL,
        "literal": {**FULL, "u_mode": "round", "cpdr": "l1_sum", "proto_source": "eval"},
        # What DP-SGD can cover, at the weights that docs/robustness.md measures.
        "private": {**FULL, "u_mode": "none", "proto_source": "eval"},
    }

    tau: float = option(0.05, "temperature of RPCL, Eq. 14", above=0)
    neighbours: int = option(2, "M of Eq. 8: how many nearest clients are merged", at_least=0)
    rpcl_weight: float = option(0.1, "weight of RPCL in the loss", at_least=0)
    cpdr_weight: float = option(1.0, "weight of CPDR in the loss", at_least=0)
    schedule: Literal["constant", "rising", "falling"] = option(
        "falling", "both weights over the rounds: as they are, up from 0 or down to 0 (no paper)"
    )
    ce: Literal["mean", "sum"] = option("mean", "cross-entropy over a batch (Algorithm 1 sums)")

    # Client prototypes, Eq. 3
    proto_source: Literal["last_epoch", "eval"] = option(
        "last_epoch",
        "features behind a prototype: training mode in the last epoch, or a clean pass after it",
    )
    init_protos: bool = option(False, "start with prototypes of the untrained model, not without")
    min_count: int = option(
        1, "a class with fewer samples at a client has no prototype", at_least=1
    )
    robust_prototypes: bool = option(
        False,
        "bound what one client's prototypes can do: their length and, among three or more "
        "holders of a class, their distance from the median",
    )

    # Relational prototypes, Eq. 5-9
    global_mean: Literal["plain", "weighted"] = option(
        "plain", "Eq. 5 over holders: plain, or weighted by their samples of the class"
    )
    absent: Literal["skip", "zero_fill", "global_fill"] = option(
        "skip",
        "a client without the class: left out, given r = g in Eq. 9, or a zero vector in Eq. 5, "
        "which shortens g and so acts with relational=false only",
    )
    metric: Literal["angle", "cosine", "l1", "l2", "kl"] = option(
        "angle", "nearness in Eq. 8: difference of angles to g, or directly between prototypes"
    )
    angle: Literal["cosine", "arccos"] = option(
        "cosine", "the angle of Eq. 7: its cosine as printed, or the angle itself"
    )
    divisor: Literal["group", "fixed"] = option(
        "group", "Eq. 9 divides by the size of the group, or always by M + 1"
    )
    relational: bool = option(True, "false: every r_k^j is g^j")
    pool: Literal["participants", "bank"] = option(
        "participants", "prototypes in use: the last round's, or the last known of every client"
    )
    max_age: int | None = option(
        None, "rounds after which a prototype leaves the bank; none: never", at_least=0
    )

    # Consistent prototypes, Eq. 10-12
    client_weight: Literal["balance", "uniform"] = option(
        "balance", "e_k of Eq. 11, or the same for every client"
    )
    weight_sums: Literal["pool", "all"] = option(
        "pool", "sums in Eq. 11: over the pool's clients, or over every client ever heard of"
    )
    renormalise: bool = option(True, "Eq. 12 divides by the sum of e_k over the holders")

    # Losses, Eq. 13-15
    u_mode: Literal["batch", "ema", "epoch", "round", "none"] = option(
        "batch",
        "U of Eq. 13: of each batch, its moving average, of all data each epoch or round, or 1",
    )
    u_grad: bool = option(False, "let gradients through U (with u_mode = batch)")
    u_same_class: bool = option(False, "U of a prototype over samples of its own class only")
    positives: Literal["inside", "outside", "mean_positive"] = option(
        "outside", "prototypes of the own class in Eq. 14: in the logarithm, outside, or merged"
    )
    exclude_self: bool = option(False, "a client does not see the prototypes it owns in RPCL")
    center: bool = option(False, "subtract the mean of the o^j before the cosine of Eq. 13")
    cpdr: Literal["mse_mean", "mse_sum", "l1_mean", "l1_sum", "l2"] = option(
        "mse_mean", "the distance of Eq. 15"
    )

    def conflict(self) -> str | None:
        if self.u_grad and self.u_mode != "batch":
            return f"u_grad needs u_mode=batch, not {self.u_mode}"
        if self.max_age is not None and self.pool != "bank":
            return "max_age needs pool=bank"
        if self.absent == "zero_fill" and self.global_mean == "weighted":
            return "absent=zero_fill and global_mean=weighted are two readings of Eq. 5: take one"
        if self.angle == "arccos" and self.metric != "angle":
            return f"angle=arccos needs metric=angle, not {self.metric}"
        return None

    # The server ----------------------------------------------------------------------------------

    def init_server(self, task: Task) -> State:
        size = task.num_clients if self.pool == "bank" else task.cohort_size
        shape = (size, task.num_classes, task.feature_dim)
        return {
            "prototypes": torch.zeros(shape),  # c_k^j
            "counts": torch.zeros(shape[:2]),  # n_k^j behind them
            "owner": torch.full((size,), -1),
            "age": torch.zeros(size, dtype=torch.int64),
            "known_counts": torch.zeros(task.num_clients, task.num_classes),
            "relational": torch.zeros(shape),  # r_k^j
            "relational_exists": torch.zeros(shape[:2], dtype=torch.bool),
            "consistent": torch.zeros(shape[1:]),  # o^j
            "consistent_exists": torch.zeros(shape[1], dtype=torch.bool),
            "drift": torch.zeros(()),
            # The survey before the first round counts up to 0.
            "round": torch.tensor(-1.0 if self.init_protos else 0.0),
            "num_rounds": torch.tensor(float(task.num_rounds)),
        }

    def broadcast(self, server: State) -> State:
        names = "relational", "relational_exists", "owner", "consistent", "consistent_exists"
        message = {name: server[name] for name in names}
        if self.schedule != "constant":
            # A round counts when uploads came of it, so the survey before the first may not.
            progress = (server["round"] / server["num_rounds"]).clamp_min(0)
            message["strength"] = progress if self.schedule == "rising" else 1 - progress
        return message

    def aggregate(
        self, server: State, uploads: list[Upload], records: MutableMapping[int, State]
    ) -> State:
        pool = self.update_pool(server, sorted(uploads, key=lambda upload: upload.client))
        return {
            **server,
            **pool,
            **self.build_prototypes(pool, server),
            "round": server["round"] + 1,
            "model": self.average(uploads, server.get("model")),
        }

    def update_pool(self, server: State, uploads: list[Upload]) -> State:
        """The prototypes in use from now on: this round's, or the bank with this round's put in."""
        bank = self.pool == "bank"
        names = "prototypes", "counts", "owner", "age", "known_counts"
        pool = {name: server[name].clone() for name in names}
        if not bank:
            pool["counts"].zero_()
            pool["owner"].fill_(-1)
        pool["age"] += 1
        for position, upload in enumerate(uploads):
            row = upload.client if bank else position
            pool["prototypes"][row] = upload.extra["prototypes"]
            pool["counts"][row] = upload.extra["counts"]
            pool["owner"][row] = upload.client
            pool["age"][row] = 0
            pool["known_counts"][upload.client] = upload.extra["counts"]
        if bank and self.max_age is not None:
            pool["counts"][pool["age"] > self.max_age] = 0
        return pool

    def build_prototypes(self, pool: State, server: State) -> State:
        """Eq. 5-12: relational and consistent prototypes from the pool's c (S, C, d)."""
        c, counts = pool["prototypes"].cpu().double(), pool["counts"].cpu().double()
        held = counts >= self.min_count
        robust: State = {}
        if self.robust_prototypes:
            c, moved = bounded_prototypes(c, held)
            robust["bounded"] = moved.sum().to(server["relational"].device)
        holders = held.any(0)  # (C,): classes that somebody holds

        weights = counts if self.global_mean == "weighted" else None
        g = eq.global_prototypes(c, held, weights, zero_fill=self.absent == "zero_fill")
        if self.relational:
            groups = eq.neighbour_groups(self.distances(g, c), held, self.neighbours)
            fixed = self.neighbours + 1 if self.divisor == "fixed" else None
            r = eq.relational_prototypes(c, groups, fixed)
        else:
            r = g.expand_as(c).clone()
        exists = held
        member = counts.sum(1) > 0
        if self.absent == "global_fill":
            exists = member[:, None] & holders
            r = torch.where((exists & ~held)[..., None], g, r)

        e = torch.zeros(len(c), dtype=torch.float64)
        if self.client_weight == "uniform":
            e[member] = 1 / member.sum()
        elif member.any():
            heard_of = pool["known_counts"].cpu().double()
            heard_of = heard_of[heard_of.sum(1) > 0]
            known = heard_of if self.weight_sums == "all" else None
            e[member] = eq.client_weights(counts[member], known)
        o = eq.consistent_prototypes(r, exists, e, self.renormalise)

        like = server["relational"]  # its device and precision
        old, both = server["consistent"], server["consistent_exists"] & holders.to(like.device)
        o = o.to(like)
        return {
            "relational": r.to(like),
            "relational_exists": exists.to(like.device),
            "consistent": o,
            "consistent_exists": holders.to(like.device),
            "drift": eq.mean_change(old, o, both),
            **robust,
        }

    def distances(self, g: Tensor, c: Tensor) -> Tensor:
        """How far apart clients are in Eq. 8, (C, S, S)."""
        if self.metric != "angle":
            return eq.pairwise_distance(c, self.metric)
        phi = eq.angular_similarity(g, c).T  # (C, S)
        if self.angle == "arccos":
            phi = phi.clamp(-1, 1).arccos()
        return (phi[:, :, None] - phi[:, None, :]).abs()

    def diagnostics(self, server: State, uploads: list[Upload]) -> dict[str, float]:
        found = {
            "prototype_rows": float(server["relational_exists"].sum()),
            "prototype_drift": float(server["drift"]),
            **bounded_in(server),
        }
        smallest = [float(u.measures["min_u"]) for u in uploads if "min_u" in u.measures]
        # Before there are prototypes there is no U, and infinity is no JSON.
        if smallest and min(smallest) != torch.inf:
            found["min_u"] = min(smallest)
        return found

    def prototypes(self, server: State) -> tuple[Tensor, Tensor]:
        return server["consistent"], server["consistent_exists"]

    # The client ----------------------------------------------------------------------------------

    def surveys_before_training(self) -> bool:
        return self.init_protos

    def u_moment(self) -> Moment | None:
        if not self.rpcl_weight:
            return None
        moments: dict[str, Moment] = {
            "batch": "step",
            "ema": "step",
            "epoch": "epoch",
            "round": "start",
        }
        return moments.get(self.u_mode)

    def moments(self, round: int) -> tuple[Moment, ...]:
        if round == 0:
            return ("end",)
        u_moment = self.u_moment()
        proto_moment: Moment = "end" if self.proto_source == "eval" else "last_epoch"
        return (proto_moment, u_moment) if u_moment else (proto_moment,)

    def start_observing(self, moment: Moment, task: Task) -> State:
        if moment in ("end", "last_epoch"):
            return eq.empty_sums(task.num_classes, task.feature_dim)
        pool_size = task.num_clients if self.pool == "bank" else task.cohort_size
        merged = self.positives == "mean_positive"
        rows = (pool_size + merged) * task.num_classes
        if moment == "step":
            return {
                "u": torch.zeros(rows),
                "steps": torch.zeros(()),
                "min_u": torch.tensor(torch.inf),
            }
        return {"distance": torch.zeros(rows), "weight": torch.zeros(rows)}

    def observe(self, moment: Moment, batch: Batch, totals: State) -> State:
        if moment in ("end", "last_epoch"):
            return eq.add_sums(totals, batch.student.features, batch.labels, batch.weight)
        if moment == "step":
            u = self.batch_u(batch)
            exists = self.rows(batch)[2]
            if self.u_mode == "ema":
                u = torch.where(totals["steps"] == 0, u, 0.9 * totals["u"] + 0.1 * u)
            smallest = torch.where(exists, u, torch.inf).amin()
            return {
                "u": u,
                "steps": totals["steps"] + 1,
                "min_u": torch.minimum(totals["min_u"], smallest),
            }
        distance, weight = self.distances_to_rows(batch, batch.client.class_counts > 0)
        return {
            "distance": totals["distance"] + (distance * weight * batch.weight[:, None]).sum(0),
            "weight": totals["weight"] + (weight * batch.weight[:, None]).sum(0),
        }

    def rows(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The prototypes of RPCL one under another: P (Q, d), their class (Q,), which exist (Q,).

        With `positives=mean_positive` the mean of each class's rows follows, C more.
        """
        relational = batch.received["relational"]
        exists = batch.received["relational_exists"]  # (S, C)
        if self.exclude_self:
            exists = exists & (batch.received["owner"] != batch.client.id)[:, None]
        size, num_classes, _ = relational.shape
        prototypes, row_exists = relational.flatten(0, 1), exists.flatten()
        row_class = torch.arange(num_classes, device=relational.device).repeat(size)
        if self.positives == "mean_positive":
            merged = eq.global_prototypes(relational, exists)
            prototypes = torch.cat([prototypes, merged])
            row_exists = torch.cat([row_exists, exists.any(0)])
            row_class = torch.cat([row_class, row_class[:num_classes]])
        return prototypes, row_class, row_exists

    def distances_to_rows(self, batch: Batch, has_class: Tensor) -> tuple[Tensor, Tensor]:
        """||z_i - P_q|| and whether sample i counts for U_q, both (B, Q).

        With `u_same_class` only samples of the row's class count, or all where there are none
        (`has_class` (C,) is false).
        """
        prototypes, row_class, _ = self.rows(batch)
        distance = prototype_distances(batch.student.features, prototypes)
        counts = torch.ones_like(distance)
        if self.u_same_class:
            same = batch.labels[:, None] == row_class
            counts = torch.where(has_class[row_class], same.to(distance), counts)
        return distance, counts

    def batch_u(self, batch: Batch) -> Tensor:
        """Eq. 13: U_q, the mean distance of the batch's features to each prototype, (Q,)."""
        num_classes = len(batch.client.class_counts)
        in_batch = F.one_hot(batch.labels, num_classes).any(0)
        distance, counts = self.distances_to_rows(batch, in_batch)
        return ((distance * counts).sum(0) / counts.sum(0)).clamp_min(U_FLOOR)

    def spread(self, batch: Batch) -> Tensor:
        """U as `u_mode` says, (Q,) or 1."""
        moment = self.u_moment()
        if moment is None:
            return batch.student.features.new_ones(())
        if self.u_grad:
            return self.batch_u(batch)
        totals = batch.observed[moment]
        return totals["u"] if moment == "step" else self.mean_distance(totals)

    def mean_distance(self, totals: State) -> Tensor:
        """U over all of a client's data, (Q,)."""
        return (totals["distance"] / totals["weight"].clamp_min(1)).clamp_min(U_FLOOR)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(batch, self.ce)}
        strength = batch.received.get("strength", 1.0)
        if self.rpcl_weight:
            terms["rpcl"] = strength * self.rpcl_weight * self.rpcl_loss(batch)
        if self.cpdr_weight:
            terms["cpdr"] = (
                strength
                * self.cpdr_weight
                * cpdr(
                    batch.student.features,
                    batch.labels,
                    batch.received["consistent"],
                    batch.received["consistent_exists"],
                    self.cpdr,
                )
            )
        return terms

    def rpcl_loss(self, batch: Batch) -> Tensor:
        prototypes, row_class, exists = self.rows(batch)
        if self.positives == "mean_positive":
            # A sample sees its own class merged and the other classes row by row.
            num_classes = len(batch.client.class_counts)
            merged = torch.arange(len(exists), device=exists.device) >= len(exists) - num_classes
            exists = exists & (merged == (row_class == batch.labels[:, None]))  # (B, Q)
        center = None
        if self.center:
            o, there = batch.received["consistent"], batch.received["consistent_exists"]
            center = (o * there[:, None]).sum(0) / there.sum().clamp_min(1)
        return rpcl(
            batch.student.features,
            batch.labels,
            prototypes,
            row_class,
            exists,
            self.spread(batch),
            self.tau,
            center,
            outside=self.positives == "outside",
            prior=self.row_prior(batch, row_class, exists),
        )

    def row_prior(self, batch: Batch, row_class: Tensor, exists: Tensor) -> Tensor | None:
        """What is added to each row's score in RPCL, (Q,): nothing in the paper."""
        return None

    def upload(self, result: LocalResult) -> State:
        totals = result.observed["end" if "end" in result.observed else "last_epoch"]
        return eq.sent_prototypes(totals, self.min_count)

    def measure(self, result: LocalResult) -> State:
        moment = self.u_moment()
        if moment is None or moment not in result.observed:
            return {}
        totals = result.observed[moment]
        if moment == "step":
            return {"min_u": totals["min_u"]}
        exists = result.received["relational_exists"].flatten()  # merged rows are none of them
        u = self.mean_distance(totals)[: len(exists)]
        return {"min_u": torch.where(exists, u, torch.inf).amin()}
