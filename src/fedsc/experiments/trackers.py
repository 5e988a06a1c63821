"""Runs in TensorBoard and in MLflow, through their own libraries, for those who ask.

A tracker is told what progress is told, and reads the rest from the run folder: the specification,
and the rounds of a run that is resumed. So what it holds is what the folder holds, also where a run
was tracked only from its second start on. Numbers of a record are tracked, lists (accuracy by
class, the cohort) are not.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import FedscError, in_words, unknown
from ..progress import Silent
from ..report.runs import setting_of
from .folder import EVENTS

MOST_PARAMS = 100  # that MLflow takes at a time
EXTRA = "pip install 'fedsc[track]'"


class Tracker:
    """One run in one tracker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # of the run

    def start(self) -> None:
        """The run begins or goes on; its folder is there."""

    def record(self, record: dict[str, Any]) -> None:
        """A round has ended."""

    def finish(self, complete: bool) -> None:
        """The run has ended, or was stopped."""

    def spec(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "spec.json").read_text())
        return found

    def records(self) -> list[dict[str, Any]]:
        """The rounds that the run has behind it."""
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class TensorBoard(Tracker):
    """An event file in the run folder."""

    needs = ("tensorboard",)

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for old in self.folder.glob(f"{EVENTS}*"):  # all its rounds are written again below
            old.unlink()
        self.writer = SummaryWriter(str(self.folder))
        text = json.dumps(self.spec(), indent=2)
        self.writer.add_text("specification", f"```\n{text}\n```")
        for record in self.records():
            self.record(record)

    def record(self, record: dict[str, Any]) -> None:
        for name, value in numbers(record).items():
            self.writer.add_scalar(name, value, record["round"])
        self.writer.flush()

    def finish(self, complete: bool) -> None:
        self.writer.close()


class MLflow(Tracker):
    """A run in `mlflow.db` beside the run folders, or where MLFLOW_TRACKING_URI says."""

    needs = ("mlflow", "sqlalchemy", "alembic")

    def start(self) -> None:
        # Its own reports about itself, over the network, are nothing that was asked for.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        for talkative in ("mlflow", "alembic"):
            logging.getLogger(talkative).setLevel(logging.WARNING)
        out, spec = self.folder.parent.resolve(), self.spec()
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(uri or f"sqlite:///{out / 'mlflow.db'}")
        name = f"{spec['dataset']}, {setting_of(spec)}"
        experiment = self.client.get_experiment_by_name(name)
        artifacts = None if uri else (out / "mlflow").as_uri()
        experiment_id = (
            self.client.create_experiment(name, artifacts)
            if experiment is None
            else experiment.experiment_id
        )
        self.run_id, tracked = self.open_run(experiment_id, spec, str(self.folder.resolve()))
        for record in self.records():
            if record["round"] > tracked:
                self.record(record)

    def open_run(self, experiment_id: str, spec: dict[str, Any], folder: str) -> tuple[str, int]:
        """The run that was left unfinished here, or a new one; and the rounds it has."""
        from mlflow.entities import Param

        same = f"tags.`fedsc.hash` = '{spec['hash']}'"
        for run in self.client.search_runs([experiment_id], same):
            if run.data.tags.get("fedsc.folder") == folder and run.info.status != "FINISHED":
                history = self.client.get_metric_history(run.info.run_id, "accuracy")
                self.client.update_run(run.info.run_id, "RUNNING")
                return run.info.run_id, max((point.step for point in history), default=0)
        tags = {"fedsc.hash": spec["hash"], "fedsc.folder": folder}
        name = f"{spec['label']} seed {spec['seed']}"
        run_id = self.client.create_run(experiment_id, tags=tags, run_name=name).info.run_id
        params = [Param(key, str(value)) for key, value in flat(spec).items()]
        for start in range(0, len(params), MOST_PARAMS):
            self.client.log_batch(run_id, params=params[start : start + MOST_PARAMS])
        return run_id, 0

    def record(self, record: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        found = numbers(record)
        metrics = [Metric(name, value, now, record["round"]) for name, value in found.items()]
        self.client.log_batch(self.run_id, metrics)

    def finish(self, complete: bool) -> None:
        self.client.set_terminated(self.run_id, "FINISHED" if complete else "KILLED")


TRACKERS: dict[str, type[TensorBoard] | type[MLflow]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
}


def check_trackers(names: list[str]) -> None:
    """Are they known, and are their packages here? Asked before anything runs."""
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        for package in TRACKERS[name].needs:
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise FedscError(
                    f"--track {name} needs the package {package} ({error}): {EXTRA}"
                ) from None


class Tracked(Silent):
    """Progress that is shown as before, and tracked. A tracker that fails is left out from then on:
    it must not cost the run."""

    def __init__(self, shown: Silent, names: list[str], folder: Path) -> None:
        self.shown = shown
        self.trackers = {name: TRACKERS[name](folder) for name in dict.fromkeys(names)}
        self.left = 0

    def start(self, label: str, num_rounds: int, images_per_round: int, done: int) -> None:
        self.left = num_rounds - done
        self.each(lambda tracker: tracker.start())
        self.shown.start(label, num_rounds, images_per_round, done)

    def images(self, number: int) -> None:
        self.shown.images(number)

    def round_done(self, record: dict[str, Any]) -> None:
        self.left -= 1
        self.each(lambda tracker: tracker.record(record))
        self.shown.round_done(record)

    def finish(self) -> None:
        self.shown.finish()
        self.each(lambda tracker: tracker.finish(complete=self.left == 0))

    def each(self, tell: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                tell(tracker)
            except Exception as error:  # of a library that is not ours, of any kind
                del self.trackers[name]
                print(f"fedsc: no longer tracked in {name}: {in_words(error)}", file=sys.stderr)


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record by name, those of inner records as `train_loss/ce`."""
    return {
        name: float(value)
        for name, value in flat(record, "/").items()
        if isinstance(value, int | float) and name != "round"
    }


def flat(content: dict[str, Any], between: str = ".") -> dict[str, Any]:
    """A nested dict on one level."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict):
            found |= {f"{name}{between}{inner}": v for inner, v in flat(value, between).items()}
        else:
            found[name] = value
    return found
