"""fedsc: FedSC (KDD 2025) and its baselines for federated learning on non-IID data.

import fedsc
run = fedsc.run("digits", "fedsc", rounds=20, epochs=5, lr=0.05)
print(run.accuracy)
"""

from __future__ import annotations

from .data.dataset import Dataset
from .data.sources import load_dataset
from .errors import FedscError
from .experiments.runner import Run, run
from .federation import Federation
from .method import Batch, Client, LocalResult, Method, Task, Upload
from .methods import (
    METHODS,
    FedAvg,
    FedCDA,
    FedNH,
    FedNTD,
    FedProto,
    FedProx,
    FedRCL,
    FedSC,
    FedSCPlus,
    Moon,
)
from .models.outputs import Outputs
from .options import option
from .spec import RunSpec
from .state import State

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Batch",
    "Client",
    "Dataset",
    "FedAvg",
    "FedCDA",
    "FedNH",
    "FedNTD",
    "FedProto",
    "FedProx",
    "FedRCL",
    "FedSC",
    "FedSCPlus",
    "Federation",
    "FedscError",
    "LocalResult",
    "Method",
    "Moon",
    "Outputs",
    "Run",
    "RunSpec",
    "State",
    "Task",
    "Upload",
    "load_dataset",
    "option",
    "run",
]
