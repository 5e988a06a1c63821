"""Run folders written by hand, so that tests know what the page has to show."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPEC: dict[str, Any] = {
    "format": 1,
    "dataset": "digits",
    "partition": "nid1:0.2",
    "clients": 4,
    "participation": 1.0,
    "long_tail": None,
    "few_shot": None,
    "epochs": 2,
    "model": "mlp",
    "lr": 0.05,
}


def write_run(
    folder: Path,
    label: str,
    seed: int,
    accuracies: Sequence[float | None],
    *,
    classes: list[str] | None = None,
    complete: bool = True,
    drift: bool = False,
    measured: dict[str, Any] | None = None,
    **spec: Any,
) -> Path:
    """A run folder as `fedsc run` leaves it, with these accuracies and in each round `measured`."""
    classes = classes or ["cat", "dog", "owl"]
    folder.mkdir(parents=True)
    facts = {**SPEC, "label": label, "seed": seed, "rounds": len(accuracies), **spec}
    facts.setdefault("method", {"name": label.split(",")[0]})
    facts["hash"] = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    (folder / "spec.json").write_text(json.dumps(facts))
    counts = [[(7 * k + 3 * j) % 40 for j in range(len(classes))] for k in range(facts["clients"])]
    table = {"hash": f"{len(classes)}-{seed}", "classes": classes, "class_counts": counts}
    (folder / "partition.json").write_text(json.dumps(table))
    records = [
        {**record(number, accuracy, len(classes), drift), **(measured or {})}
        for number, accuracy in enumerate(accuracies, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if complete:
        (folder / "summary.json").write_text("{}")
    return folder


def record(number: int, accuracy: float | None, num_classes: int, drift: bool) -> dict[str, Any]:
    value = accuracy or 0.0
    return {
        "round": number,
        "accuracy": accuracy,
        "per_class": [round(value * (0.5 + 0.5 * math.cos(j) ** 2), 6) for j in range(num_classes)],
        "client_mean": value,
        "client_worst": 0.8123456789 * value,
        "ece": 0.1 / number,
        "train_loss": {"ce": 2.0 / number, "rpcl": 0.123456789},
        **({"prototype_drift": 1.23456789 / number, "nearest_prototype": value} if drift else {}),
        **({"diverged": True} if accuracy is None else {}),
        "cohort": [0, 1, 2, 3],
        "bytes_down": 2_000_000,
        "bytes_up": 1_000_000,
        "timing": {
            "seconds": 0.5123456789,
            "fit_seconds": 0.4123456789,
            "aggregate_seconds": 0.05123456789,
            "evaluate_seconds": 0.05123456789,
            "images_per_second": 12345.6789,
        },
    }


def rising(last: float, rounds: int) -> list[float | None]:
    """Accuracies that approach `last`."""
    return [last * (1 - math.exp(-4 * number / rounds)) for number in range(1, rounds + 1)]
