"""FedProx: a proximal term keeps local weights near the global ones.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.

    client:  min_w  CE + mu / 2 ||w - w_global||^2

over all trainable tensors, as a sum; BatchNorm's running statistics are left out. Server: FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..method import Batch, Method
from ..options import option


@dataclass(frozen=True)
class FedProx(Method):
    name: ClassVar[str] = "fedprox"
    private_units: ClassVar = ("record", "client")

    mu: float = option(0.01, "weight of the proximal term", at_least=0)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(batch)}
        if self.mu:
            terms["proximal"] = self.mu / 2 * squared_distance(batch.params, batch.global_params)
        return terms


def squared_distance(params: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Tensor:
    """||w - w'||^2 over all tensors."""
    gaps = [(param - others[name]).square().sum() for name, param in params.items()]
    return torch.stack(gaps).sum()
