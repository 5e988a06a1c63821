"""Reading run folders: the only thing that tables and pictures are made from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FedscError
from ..evaluation import summarise
from ..experiments.folder import FORMAT


@dataclass(frozen=True)
class RunData:
    """What a run folder says."""

    path: Path
    spec: dict[str, Any]
    records: list[dict[str, Any]]
    complete: bool

    @property
    def label(self) -> str:
        """The method as the user wrote it."""
        return str(self.spec["label"])

    @property
    def summary(self) -> dict[str, float]:
        return summarise([record["accuracy"] for record in self.records])


def read_run(path: Path) -> RunData:
    """A run folder, or an error that says what is wrong with it."""
    try:
        spec = json.loads((path / "spec.json").read_text())
        lines = (path / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
    except FileNotFoundError as error:
        raise FedscError(
            f"{path} is not a run folder: it has no {Path(error.filename).name}"
        ) from None
    except (OSError, ValueError) as error:
        raise FedscError(f"{path} is damaged: {error}") from None
    if not isinstance(spec, dict) or spec.get("format") != FORMAT:
        raise FedscError(f"{path} has a format this version cannot read (it reads {FORMAT})")
    if not records:
        raise FedscError(f"{path} has no finished round")
    return RunData(path, spec, records, (path / "summary.json").exists())


def by_label(runs: list[RunData]) -> dict[str, list[RunData]]:
    """The runs of each method, over seeds."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups
