"""Worked examples of every equation, computed outside this project (golden.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsc.methods import FedSC

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden.json").read_text())
FEDSC = {case["name"]: case for case in GOLDEN["fedsc_cases"]}


def full(**options: Any) -> FedSC:
    """Both losses as they are printed, whole in every round; the default weighs them."""
    return FedSC(**{**FedSC.presets["full"], **options})


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_equals(got: Tensor | float, expected: Any) -> None:
    """Relative 1e-9, absolute 1e-9 near zero: the file prints 10 to 12 digits."""
    got = torch.as_tensor(got, dtype=torch.float64)
    torch.testing.assert_close(got, tensor(expected), rtol=1e-9, atol=1e-9)
