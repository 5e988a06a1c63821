"""FedNH: a head of uniform class prototypes, frozen on clients and moved slowly by the server.

Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023.

    logits = s (z / ||z||) W^T,   rows of W of length 1, s learnable
    client:  min_u,s  CE; then mu_k^j = the mean unit embedding of class j, scaled to length 1
    server:  W^j = normalise(rho W^j + (1 - rho) m^j),  m^j = normalise(sum_k n_k^j mu_k^j)

The extractor and s are averaged as in FedAvg. A class that nobody had this round keeps its row.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from .. import prototypes as eq
from ..errors import FedscError
from ..method import Batch, LocalResult, Method, Moment, Task, Upload
from ..options import option
from ..robust import bounded_in, bounded_prototypes
from ..state import State


@dataclass(frozen=True)
class FedNH(Method):
    name: ClassVar[str] = "fednh"
    sent_prototypes: ClassVar[str | None] = "sums"

    rho: float = option(0.9, "how much of its old prototypes the head keeps", at_least=0, at_most=1)
    scale: float = option(20.0, "first value of s", above=0)
    learn_scale: bool = option(True, "false: s stays as it is (the paper's option: 30)")
    init: Literal["orthogonal", "etf"] = option(
        "orthogonal", "first prototypes: random orthogonal directions, or a simplex"
    )
    min_count: int = option(
        1, "a class with fewer samples at a client has no part in the head", at_least=1
    )
    robust_prototypes: bool = option(
        False,
        "bound what one client's prototypes can do: their length and, among three or more "
        "holders of a class, their distance from the median",
    )

    def adapt_model(self, model: nn.Module, task: Task) -> nn.Module:
        rows = spread_directions(task.num_classes, task.feature_dim, self.init)
        model.classifier = PrototypeHead(rows, self.scale, self.learn_scale)
        return model

    def aggregate(
        self, server: State, uploads: list[Upload], records: MutableMapping[int, State]
    ) -> State:
        model = self.average(uploads, server.get("model"))
        name = next(key for key in model if key.endswith("classifier.prototypes"))
        ordered = sorted(uploads, key=lambda upload: upload.client)
        sums = torch.stack([upload.extra["sums"] for upload in ordered])
        counts = torch.stack([upload.extra["counts"] for upload in ordered])
        server = {**server}
        if self.robust_prototypes:
            each = sums / counts.clamp_min(1)[..., None]
            bounded, moved = bounded_prototypes(each, counts > 0)
            sums, server["bounded"] = bounded.to(sums) * counts[..., None], moved.sum()
        summed, counts = sums.sum(0), counts.sum(0)
        old = server["model"][name]
        model[name] = move_prototypes(old, summed, counts, self.rho)
        every = torch.ones(len(old), dtype=torch.bool, device=old.device)
        return {**server, "model": model, "drift": eq.mean_change(old, model[name], every)}

    def diagnostics(self, server: State, uploads: list[Upload]) -> dict[str, float]:
        return {"prototype_drift": float(server["drift"]), **bounded_in(server)}

    def moments(self, round: int) -> tuple[Moment, ...]:
        return ("end",)

    def start_observing(self, moment: Moment, task: Task) -> State:
        return eq.empty_sums(task.num_classes, task.feature_dim)

    def observe(self, moment: Moment, batch: Batch, totals: State) -> State:
        return eq.add_sums(totals, eq.unit(batch.student.features), batch.labels, batch.weight)

    def upload(self, result: LocalResult) -> State:
        totals = result.observed["end"]
        direction = eq.unit(eq.client_prototypes(totals["sums"], totals["counts"]))
        counts = totals["counts"] * (totals["counts"] >= self.min_count)
        return {"sums": direction * counts[:, None], "counts": counts}

    def embedding(self, features: Tensor) -> Tensor:
        return eq.unit(features)


class PrototypeHead(nn.Module):
    """logits = s cos(z, W): W has no gradient, s has one if it is to be learned."""

    prototypes: Tensor

    def __init__(self, rows: Tensor, scale: float, learn_scale: bool) -> None:
        super().__init__()
        self.register_buffer("prototypes", rows)
        self.scale = nn.Parameter(torch.tensor(scale), requires_grad=learn_scale)

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * nn.functional.linear(eq.unit(features), self.prototypes)


def spread_directions(num_classes: int, dim: int, kind: str) -> Tensor:
    """Unit vectors (C, d) as far apart as they go."""
    if dim == 2:
        angle = 2 * math.pi * torch.arange(num_classes) / num_classes
        return torch.stack([angle.cos(), angle.sin()], 1)
    if kind == "etf" and num_classes > dim:
        raise FedscError(
            f"fednh: init=etf needs as many features as classes, not {dim} for {num_classes}: take "
            "init=orthogonal"
        )
    # With C > d only the columns come out orthogonal; rows of length 1 are then well spread.
    rows = nn.init.orthogonal_(torch.empty(num_classes, dim))
    if kind == "etf" and num_classes > 1:  # a simplex: every cosine is -1 / (C - 1)
        rows = rows - rows.mean(0)
    return eq.unit(rows)


def move_prototypes(old: Tensor, summed: Tensor, counts: Tensor, rho: float) -> Tensor:
    """The server's step: a little towards this round's mean directions, (C, d)."""
    mean = eq.unit(eq.client_prototypes(summed, counts))
    moved = eq.unit(rho * old + (1 - rho) * mean)
    moves = (counts > 0) & (rho < 1)  # scaling to length 1 again would change the last digit
    return torch.where(moves[:, None], moved, old)
