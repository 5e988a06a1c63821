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


def find_runs(paths: list[Path]) -> tuple[list[RunData], list[str]]:
    """All run folders at or below the paths, and a line for each that cannot be read."""
    runs: list[RunData] = []
    skipped: list[str] = []
    for path in paths:
        if not path.is_dir():
            skipped.append(f"{path} is not a folder")
            continue
        folders = sorted({file.parent for file in path.rglob("spec.json")})
        if not folders:
            skipped.append(f"{path} holds no run folder")
        for folder in folders:
            try:
                runs.append(read_run(folder))
            except FedscError as error:
                skipped.append(str(error))
    return runs, skipped


def setting_of(spec: dict[str, Any]) -> str:
    """What the clients had to cope with, in a few words: runs with the same can be compared."""
    words = [spec["partition"].replace("nid", "NID").replace(":", " ")]
    if spec["long_tail"]:
        words.append(f"long tail {spec['long_tail']:g}")
    if spec["few_shot"]:
        words.append(f"few-shot with {spec['few_shot']} classes held out")
    words.append(f"{spec['clients']} clients")
    if spec["participation"] < 1:
        words.append(f"{spec['participation']:.0%} a round")
    words.append(f"{spec['epochs']} epochs")
    words.append(spec["model"])
    return ", ".join(words)
