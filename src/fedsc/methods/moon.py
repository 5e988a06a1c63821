"""MOON: model-contrastive learning. Features should resemble the global model's, not the last own.

Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021.

    a = cos(q, q_global),  b = cos(q, q_previous)
    client:  min_w  CE + mu mean_i -log( e^(a/tau) / (e^(a/tau) + e^(b/tau)) )

q are the features of the trained model, q_global and q_previous those of the received model and of
the client's own model after its last participation, both frozen and in evaluation mode. Before its
first participation a client has no previous model and the term is zero. Server: FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..method import Batch, LocalResult, Method, Task
from ..models.outputs import Outputs
from ..options import option
from ..prototypes import unit
from ..state import State


@dataclass(frozen=True)
class Moon(Method):
    name: ClassVar[str] = "moon"
    private_units: ClassVar = ("record", "client")
    dataset_defaults: ClassVar = {
        "cifar100": {"mu": 1.0},
        "fc100": {"mu": 1.0},
        "tinyimagenet": {"mu": 1.0},
    }

    mu: float = option(5.0, "weight of the contrastive term", at_least=0)
    tau: float = option(0.5, "temperature of the contrastive term", above=0)
    head: bool = option(
        False, "the official projection head: q is 256-d and the classifier sits on it"
    )

    def adapt_model(self, model: nn.Module, task: Task) -> nn.Module:
        return WithProjection(model, task) if self.head else model

    def init_client(self, task: Task) -> State:
        return {"has_previous": torch.zeros(())}

    def teachers(self, received_model: State, memory: State) -> Mapping[str, State]:
        if not self.mu:
            return {}
        return {"global": received_model, "previous": memory.get("model", received_model)}

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(batch)}
        if self.mu:
            contrast = model_contrast(
                batch.student.features,
                batch.teachers["global"].features,
                batch.teachers["previous"].features,
                self.tau,
            )
            terms["contrast"] = self.mu * batch.client.memory["has_previous"] * contrast.mean()
        return terms

    def remember(self, result: LocalResult) -> State:
        if not self.mu:
            return result.client.memory
        return {
            "model": result.model,
            "has_previous": torch.ones_like(result.client.memory["has_previous"]),
        }


def model_contrast(q: Tensor, q_global: Tensor, q_previous: Tensor, tau: float) -> Tensor:
    """-log( e^(a/tau) / (e^(a/tau) + e^(b/tau)) ) of each sample, (B,)."""
    a = (unit(q) * unit(q_global)).sum(-1)
    b = (unit(q) * unit(q_previous)).sum(-1)
    return F.softplus((b - a) / tau)


class WithProjection(nn.Module):
    """A network whose features pass through Linear(d, d), ReLU, Linear(d, 256)."""

    def __init__(self, network: nn.Module, task: Task, size: int = 256) -> None:
        super().__init__()
        self.network = network
        self.network.classifier = nn.Identity()
        dim = task.feature_dim
        self.projection = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, size))
        self.classifier = nn.Linear(size, task.num_classes)

    def forward(self, images: Tensor) -> Outputs:
        outputs: Outputs = self.network(images)
        q = self.projection(outputs.features)
        return Outputs(q, self.classifier(q), outputs.stages)
