"""FedSC+: FedSC and what measuring it asked for. Not in the paper; see `docs/results.md`.

CE is logit-adjusted, the weight of CPDR falls to 0 over the rounds (it helps the features and costs
the classifier), and RPCL is off, since it cost accuracy wherever it was measured with ResNet-10.
Four things are added, each of which can be switched off:

    smoothing      c_k^j <- s c_k^j(before) + (1 - s) c_k^j. FedSC pulls features to where the last
                   round's features were; unsmoothed, its accuracy swings from round to round. The
                   statistics of calibration are smoothed alike.
    rpcl_prior     the scores of RPCL get log(share of the row's class at the client), as the logits
                   of CE do under logit adjustment (Menon et al. 2021; FedLC, Zhang et al. 2022):
                   otherwise RPCL drives features away from the classes that a client lacks.
    distillation   KL from the received model's view of the classes that a client lacks
                   (FedVLS, Guo et al. 2024).
    calibration    clients train the averaged classifier. What is tested is its sum with the linear
                   discriminant of the global model's features, from class statistics that clients
                   send of the model they received (`calibration.py`).

    client:  CE(logits + log share) + w_1 RPCL(scores + log share) + w_2 CPDR + w_3 KL_absent

Server: FedSC, and the statistics of calibration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..calibration import (
    SMOOTHING,
    STATISTICS,
    add_statistics,
    empty_statistics,
    linear_discriminant,
    smoothed,
)
from ..errors import FedscError
from ..losses import LOG_ZERO
from ..method import Batch, LocalResult, Moment, Task, Upload
from ..options import option
from ..state import State
from .fedsc import FedSC


@dataclass(frozen=True)
class FedSCPlus(FedSC):
    name: ClassVar[str] = "fedsc+"
    presets: ClassVar = {}
    private_units: ClassVar = ()  # shares of classes and smoothed prototypes are not accounted for

    rpcl_weight: float = option(0.0, "weight of RPCL in the loss", at_least=0)
    cpdr_weight: float = option(1.0, "weight of CPDR in the loss", at_least=0)
    schedule: Literal["constant", "rising", "falling"] = option(
        "falling", "both weights over the rounds: as they are, up from 0 or down to 0"
    )
    positives: Literal["inside", "outside", "mean_positive"] = option(
        "inside", "prototypes of the own class in Eq. 14: in the logarithm, outside, or merged"
    )
    logit_adjustment: float = option(
        1.0, "adds this times log(share of the class at the client) to the logits of CE", at_least=0
    )
    smoothing: float = option(
        SMOOTHING,
        "share of old prototypes and statistics that stays in new ones",
        at_least=0,
        at_most=1,
    )
    rpcl_prior: float = option(
        1.0,
        "adds this times log(share of the class at the client) to the scores of RPCL",
        at_least=0,
    )
    distillation: float = option(
        0.0, "weight of the received model's view of the classes a client lacks", at_least=0
    )
    calibration: bool = option(True, "classify by class means and covariance of the features, too")
    averaged_weight: float = option(
        1.0, "weight of the averaged classifier beside that of calibration", at_least=0
    )

    def conflict(self) -> str | None:
        if self.calibration and self.u_moment() == "start":
            return "u_mode=round needs calibration=false: each wants the pass at a round's start"
        if self.calibration and (self.robust_prototypes or self.aggregates_robustly):
            defence = "robust_prototypes" if self.robust_prototypes else self.aggregation
            return f"{defence} needs calibration=false: nothing bounds the statistics that it sends"
        return super().conflict()

    def adapt_model(self, model: nn.Module, task: Task) -> nn.Module:
        head = model.classifier
        if self.calibration and not (isinstance(head, nn.Linear) and head.bias is not None):
            raise FedscError(
                f"{self.name}: the model's classifier is {head}, and calibration makes a Linear "
                "with a bias: take such a classifier, or calibration=false"
            )
        return model

    # The server ----------------------------------------------------------------------------------

    def init_server(self, task: Task) -> State:
        server = super().init_server(task)
        if self.calibration:
            server |= empty_statistics(task)
        return server

    def aggregate(
        self, server: State, uploads: list[Upload], records: MutableMapping[int, State]
    ) -> State:
        after = super().aggregate(server, uploads, records)
        if self.calibration:
            sent = [upload.extra for upload in sorted(uploads, key=lambda upload: upload.client)]
            now = {name: torch.stack([extra[name] for extra in sent]).sum(0) for name in STATISTICS}
            after |= smoothed(server, now, self.smoothing)
        return after

    def evaluated_models(self, server: State, memories: Mapping[int, State]) -> Iterator[State]:
        if not self.calibration or not bool(server["class_counts"].any()):
            yield server["model"]
            return
        model: State = server["model"]
        names = "classifier.weight", "classifier.bias"
        # Both are linear in the features, and so is their sum.
        pairs = zip(names, linear_discriminant(server), strict=True)
        yield {**model, **{n: found + self.averaged_weight * model[n] for n, found in pairs}}

    def update_pool(self, server: State, uploads: list[Upload]) -> State:
        pool = super().update_pool(server, uploads)
        # With other clients in the round a client stands in another row than before.
        same = pool["owner"][:, None] == server["owner"]  # (S, S)
        same &= (pool["owner"] >= 0)[:, None]
        before = same.int().argmax(1)  # (S,): the row that it had
        both = same.any(1)[:, None] & (server["counts"][before] > 0) & (pool["counts"] > 0)
        smoothed = torch.lerp(pool["prototypes"], server["prototypes"][before], self.smoothing)
        pool["prototypes"] = torch.where(both[..., None], smoothed, pool["prototypes"])
        return pool

    # The client ----------------------------------------------------------------------------------

    def moments(self, round: int) -> tuple[Moment, ...]:
        return (*super().moments(round), *(("start",) if self.calibration else ()))

    def start_observing(self, moment: Moment, task: Task) -> State:
        if self.calibration and moment == "start":
            return empty_statistics(task)
        return super().start_observing(moment, task)

    def observe(self, moment: Moment, batch: Batch, totals: State) -> State:
        if not self.calibration or moment != "start":
            return super().observe(moment, batch, totals)
        # As with prototypes, nothing is sent of a class with too few samples.
        enough = batch.client.class_counts[batch.labels] >= self.min_count
        features = batch.student.features
        return add_statistics(totals, features, batch.labels, batch.weight * enough)

    def upload(self, result: LocalResult) -> State:
        statistics = result.observed["start"] if self.calibration else {}
        return {**super().upload(result), **statistics}

    def row_prior(self, batch: Batch, row_class: Tensor, exists: Tensor) -> Tensor | None:
        """log(share of the class), shared out among the class's rows: (Q,), or (B, Q) where which
        rows exist depends on the sample."""
        if not self.rpcl_prior:
            return None
        shares = batch.client.class_shares
        rows = exists.to(shares) @ F.one_hot(row_class, len(shares)).to(shares)  # of each class
        return self.rpcl_prior * (shares / rows.clamp_min(1)).log()[..., row_class]

    def teachers(self, received_model: State, memory: State) -> Mapping[str, State]:
        return {"global": received_model} if self.distillation else {}

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        terms = super().loss(batch)
        if self.distillation:
            absent = batch.client.class_counts < 1  # (C,)
            teacher = batch.teachers["global"].logits
            divergence = absent_divergence(batch.student.logits, teacher, absent)
            terms["absent"] = self.distillation * divergence.mean()
        return terms


def absent_divergence(logits: Tensor, teacher: Tensor, absent: Tensor) -> Tensor:
    """KL(teacher || student) of the softmax over the absent classes alone, (B,); 0 without any."""
    log_p = torch.log_softmax(logits.masked_fill(~absent, LOG_ZERO), -1)
    log_q = torch.log_softmax(teacher.masked_fill(~absent, LOG_ZERO), -1)
    return ((log_q.exp() * (log_q - log_p)) * absent).sum(-1)
