"""Reading run folders: the only thing that tables and pictures are made from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FedscError
from ..evaluation import summarise
from ..experiments.folder import FORMAT
from ..files import CannotReadError, cannot_read, parse_json, read_json, read_text
from .checks import OPTIONAL_IN_A_RECORD, OPTIONAL_IN_A_SPEC, RECORD, SPEC, wrong_in

# An unfinished run counts as stopped when nothing was heard of it for five times its longest round,
# and for two minutes at least: writing a checkpoint and starting up after a resume take time, too.
LONGEST_ROUNDS_OF_SILENCE = 5
LEAST_SECONDS_OF_SILENCE = 120.0


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
    def measured(self) -> bool:
        """Whether every round has an accuracy: of a diverged model there may be none."""
        return all(record["accuracy"] is not None for record in self.records)

    @property
    def rounds(self) -> str:
        """How far it came: `100`, or `40 of 100`."""
        done, asked = self.records[-1]["round"], self.spec["rounds"]
        return f"{done}" if done >= asked else f"{done} of {asked}"

    def seems_stopped(self) -> bool:
        """Whether it was cut short, as far as its files tell: no line for longer than a round
        takes."""
        if self.complete:
            return False
        try:
            last_heard = (self.path / "metrics.jsonl").stat().st_mtime
        except OSError:  # just removed, or begun anew
            return False
        longest = max(record["timing"]["seconds"] for record in self.records)
        patience = max(LEAST_SECONDS_OF_SILENCE, LONGEST_ROUNDS_OF_SILENCE * longest)
        return time.time() - last_heard > patience

    @property
    def summary(self) -> dict[str, float]:
        return summarise([record["accuracy"] for record in self.records])


def read_run(path: Path) -> RunData:
    """A run folder, or an error that says what is wrong with it."""
    try:
        spec = read_json(path / "spec.json")
        text = read_text(path / "metrics.jsonl")
        # A last line without its end is being written just now, or was cut short by a kill.
        lines = text[: text.rfind("\n")].split("\n") if "\n" in text else []
        records = [parse_json(line, path / "metrics.jsonl") for line in lines]
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        if missing == "metrics.jsonl" and (path / "summary.json").exists():
            raise FedscError(f"{path} is damaged: it is finished and has no {missing}") from None
        if missing == "metrics.jsonl":  # it comes with the first round
            raise FedscError(f"{path} has no finished round yet: it has no {missing}") from None
        raise FedscError(f"{path} is not a run folder: it has no {missing}") from None
    except FedscError:
        raise
    except OSError as error:
        raise cannot_read(Path(error.filename or path), error) from None
    if not isinstance(spec, dict) or spec.get("format") != FORMAT:
        raise CannotReadError(f"{path} has a format this version cannot read (it reads {FORMAT})")
    if not records:
        raise FedscError(f"{path} has no finished round")
    wrong = wrong_in(spec, SPEC, OPTIONAL_IN_A_SPEC)
    if wrong:
        raise FedscError(f"{path / 'spec.json'} is damaged: {wrong}")
    for number, record in enumerate(records, 1):
        wrong = wrong_in(record, RECORD, OPTIONAL_IN_A_RECORD)
        if wrong:
            raise FedscError(f"{path / 'metrics.jsonl'} is damaged in line {number}: {wrong}")
    return RunData(path, spec, records, (path / "summary.json").exists())


def by_label(runs: list[RunData]) -> dict[str, list[RunData]]:
    """The runs of each method, over seeds."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def find_runs(paths: list[Path]) -> tuple[list[RunData], list[str]]:
    """All run folders at or below the paths, and a line for each that cannot be read."""
    folders, skipped = find_folders(paths)
    runs: list[RunData] = []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except FedscError as error:
            skipped.append(str(error))
    return runs, skipped


def without_copies(runs: list[RunData]) -> tuple[list[RunData], list[str]]:
    """The same run in two folders counts once, with the one that is further (of two equally far,
    the one that was measured more); and a line for each that does not count."""

    def extent(run: RunData) -> tuple[int, int]:
        return len(run.records), len(run.records[-1])

    best: dict[str, RunData] = {}
    for run in runs:
        other = best.get(run.spec["hash"])
        if other is None or extent(run) > extent(other):
            best[run.spec["hash"]] = run
    copies = [
        f"{run.path} is the same run as {best[run.spec['hash']].path}: counted once"
        for run in runs
        if best[run.spec["hash"]] is not run
    ]
    return [run for run in runs if best[run.spec["hash"]] is run], copies


def find_folders(paths: list[Path]) -> tuple[list[Path], list[str]]:
    """Folders with a spec.json at or below the paths, and a line for each without any."""
    folders: dict[Path, Path] = {}  # by resolved path: the same may be named twice
    skipped: list[str] = []

    def search(folder: Path) -> list[Path]:
        if (folder / "spec.json").exists():
            return [folder]
        found: list[Path] = []
        without: list[Path] = []
        for inner in sorted(folder.iterdir()):
            if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
                below = search(inner)
                found += below
                without += [] if below else [inner]
        if found:  # else the folder above names this one
            skipped.extend(f"{inner} holds no run folder" for inner in without)
        return found

    for path in paths:
        if not path.is_dir():
            skipped.append(f"{path} is not a folder" if path.exists() else f"{path} is not there")
            continue
        try:
            found = search(path)
        except OSError as error:
            skipped.append(f"{error.filename} cannot be read: {error.strerror}")
            continue
        if not found:
            skipped.append(f"{path} holds no run folder")
        folders |= {folder.resolve(): folder for folder in found}
    return list(folders.values()), skipped


PRIVACY_OPTIONS = (
    *("target_epsilon", "delta", "dp_clip", "dp_noise", "dp_feature_clip", "dp_prototype_noise"),
)


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
    for name, what in (("dropout", "drop out"), ("straggler", "late")):
        if spec.get(name):
            words.append(f"{spec[name]:.0%} {what}")
    words.append("1 epoch" if spec["epochs"] == 1 else f"{spec['epochs']} epochs")
    words.append(spec["model"])
    words += attack_of(spec)
    if spec.get("dp_unit") not in (None, "none"):  # older runs do not have it
        given = {name: spec[name] for name in PRIVACY_OPTIONS if spec.get(name) is not None}
        if "target_epsilon" in given:  # from which the noise was found
            given.pop("dp_noise", None)
        amounts = (f"{name.replace('_', ' ')} {value:g}" for name, value in given.items())
        words.append(f"private for one {spec['dp_unit']} ({', '.join(amounts)})")
    return ", ".join(words)


def attack_of(spec: dict[str, Any]) -> list[str]:
    """The attack that some of the clients made, if any; older folders know of none."""
    if not spec.get("attack") or not spec.get("attackers"):
        return []
    return [f"{spec['attackers']:.0%} attack by {spec['attack']}"]
