"""FedNTD: not-true distillation. The global model's view of the classes a sample is not is kept.

Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning,
NeurIPS 2022.

    p = softmax(logits without y, over tau),  q = the same of the received model
    client:  min_w  CE + beta tau^2 mean_i KL(q_i || p_i)

Server: FedAvg. The first round distils from the untrained model, as the published code does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..method import Batch, Method
from ..options import option
from ..state import State


@dataclass(frozen=True)
class FedNTD(Method):
    name: ClassVar[str] = "fedntd"
    private_units: ClassVar = ("record", "client")

    beta: float = option(1.0, "weight of the distillation", at_least=0)
    tau: float = option(1.0, "temperature of the distillation", above=0)

    def teachers(self, received_model: State, memory: State) -> Mapping[str, State]:
        return {"global": received_model} if self.beta else {}

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(batch)}
        if self.beta:
            teacher = batch.teachers["global"].logits
            distilled = not_true_divergence(batch.student.logits, teacher, batch.labels, self.tau)
            terms["not_true"] = self.beta * distilled.mean()
        return terms


def not_true_divergence(logits: Tensor, teacher: Tensor, labels: Tensor, tau: float) -> Tensor:
    """tau^2 KL(teacher || student) over the classes that are not the label, (B,)."""
    log_p = torch.log_softmax(without_label(logits, labels) / tau, -1)
    log_q = torch.log_softmax(without_label(teacher, labels) / tau, -1)
    return tau**2 * (log_q.exp() * (log_q - log_p)).sum(-1)


def without_label(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits of all classes but each sample's own, (B, C - 1)."""
    others = torch.arange(logits.shape[1] - 1, device=logits.device)
    others = others + (others >= labels[:, None])  # skip the label
    return logits.gather(1, others)
