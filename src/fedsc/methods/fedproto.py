"""FedProto: clients are tied together by class prototypes.

Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022.

    client:  min_w  CE + lambda mean_i,dim (z_i - c^{y_i})^2
    server:  c^j = mean over holders of their c_k^j

The original shares prototypes only: each client keeps its own weights, and there is no global
model to test. The way it is compared in the literature, and the default here, averages weights as
FedAvg does (`evaluation=avg_classifier`); the other ways of evaluation are named below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import prototypes as eq
from ..losses import cpdr
from ..method import Batch, LocalResult, Method, Moment, Task, Upload
from ..models.outputs import Outputs
from ..options import option
from ..robust import bounded_in, bounded_prototypes
from ..state import State


@dataclass(frozen=True)
class FedProto(Method):
    name: ClassVar[str] = "fedproto"
    sent_prototypes: ClassVar[str | None] = "prototypes"
    private_units: ClassVar = ("record", "client")
    presets: ClassVar = {"private": {"proto_source": "eval"}}  # what DP-SGD can cover

    weight: float = option(1.0, "lambda, the weight of the pull to the prototypes", at_least=0)
    evaluation: Literal["avg_classifier", "avg_proto", "personal_mean", "ensemble"] = option(
        "avg_classifier",
        "averaged weights tested by classifier or by nearest prototype; or own weights per "
        "client, tested one by one or by their mean probabilities",
    )
    proto_source: Literal["last_epoch", "eval"] = option(
        "last_epoch", "features behind a prototype: of the last epoch, or a clean pass after it"
    )
    min_count: int = option(
        1, "a class with fewer samples at a client has no prototype", at_least=1
    )
    robust_prototypes: bool = option(
        False,
        "bound what one client's prototypes can do: their length and, among three or more "
        "holders of a class, their distance from the median",
    )

    def shares_weights(self) -> bool:
        return self.evaluation in ("avg_classifier", "avg_proto")

    # The server ----------------------------------------------------------------------------------

    def init_server(self, task: Task) -> State:
        return {
            "prototypes": torch.zeros(task.num_classes, task.feature_dim),
            "exists": torch.zeros(task.num_classes, dtype=torch.bool),
        }

    def broadcast(self, server: State) -> State:
        return {"prototypes": server["prototypes"], "exists": server["exists"]}

    def aggregate(
        self, server: State, uploads: list[Upload], records: MutableMapping[int, State]
    ) -> State:
        ordered = sorted(uploads, key=lambda upload: upload.client)
        c = torch.stack([upload.extra["prototypes"] for upload in ordered])
        counts = torch.stack([upload.extra["counts"] for upload in ordered])
        held = counts >= self.min_count
        new: State = {}
        if self.robust_prototypes:
            bounded, moved = bounded_prototypes(c, held)
            c, new["bounded"] = bounded.to(c), moved.sum()
        prototypes, exists = eq.global_prototypes(c, held), held.any(0)
        drift = eq.mean_change(server["prototypes"], prototypes, server["exists"] & exists)
        new |= {"prototypes": prototypes, "exists": exists, "drift": drift}
        if self.shares_weights():
            new["model"] = self.average(uploads, server.get("model"))
        return {**server, **new}

    def diagnostics(self, server: State, uploads: list[Upload]) -> dict[str, float]:
        return {"prototype_drift": float(server["drift"]), **bounded_in(server)}

    # The client ----------------------------------------------------------------------------------

    def local_model(self, received_model: State, memory: State) -> State:
        return memory.get("model", received_model)

    def remember(self, result: LocalResult) -> State:
        return {} if self.shares_weights() else {"model": result.model}

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(batch)}
        if self.weight:
            terms["prototype"] = self.weight * prototype_mse(
                batch.student.features,
                batch.labels,
                batch.received["prototypes"],
                batch.received["exists"],
            )
        return terms

    def moments(self, round: int) -> tuple[Moment, ...]:
        return ("end",) if self.proto_source == "eval" else ("last_epoch",)

    def start_observing(self, moment: Moment, task: Task) -> State:
        return eq.empty_sums(task.num_classes, task.feature_dim)

    def observe(self, moment: Moment, batch: Batch, totals: State) -> State:
        return eq.add_sums(totals, batch.student.features, batch.labels, batch.weight)

    def upload(self, result: LocalResult) -> State:
        return eq.sent_prototypes(next(iter(result.observed.values())), self.min_count)

    # Evaluation ----------------------------------------------------------------------------------

    def prototypes(self, server: State) -> tuple[Tensor, Tensor]:
        return server["prototypes"], server["exists"]

    def evaluated_models(self, server: State, memories: Mapping[int, State]) -> Iterator[State]:
        if self.shares_weights():
            yield server["model"]
        else:
            yield from (memories[client]["model"] for client in memories)

    def predictions(self, outputs: list[Outputs], server: State) -> list[Tensor]:
        if self.evaluation == "avg_proto":
            distance = torch.cdist(outputs[0].features, server["prototypes"])
            return [(-distance).masked_fill(~server["exists"], -torch.inf)]
        if self.evaluation == "ensemble":
            probabilities = [torch.softmax(output.logits, -1) for output in outputs]
            return [torch.stack(probabilities).mean(0).log()]
        return [output.logits for output in outputs]


def prototype_mse(features: Tensor, labels: Tensor, prototypes: Tensor, exists: Tensor) -> Tensor:
    """Mean over batch and dimensions; a sample without a prototype counts as zero."""
    share = exists[labels].to(features.dtype).mean()
    return share * cpdr(features, labels, prototypes, exists, "mse_mean")
