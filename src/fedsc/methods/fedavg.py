"""FedAvg: clients train with cross-entropy, the server averages their weights.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
AISTATS 2017.

    client:  min_w  mean_i CE(h(f(x_i)), y_i)
    server:  w = sum_k n_k / N_A  w_k       over the clients A of the round
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..method import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """The contract's defaults, nothing else."""

    name: ClassVar[str] = "fedavg"
    private_units: ClassVar = ("record", "client")
