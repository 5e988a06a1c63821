"""Broken and hostile run folders: every command that reads them gives a result or says why not."""

from __future__ import annotations

import io
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import fedsc
from fedsc.analysis.landscape import landscape_of
from fedsc.analysis.reopen import cached
from fedsc.data.dataset import Dataset
from fedsc.experiments import figure
from fedsc.experiments.compare import read_job
from fedsc.experiments.figure import make_figure
from fedsc.experiments.folder import is_job, is_run
from fedsc.experiments.reproduce import results
from fedsc.experiments.runner import execute
from fedsc.methods import method_from_text
from fedsc.progress import Silent
from fedsc.report import figures, pictures
from fedsc.report.figures import partition_of
from fedsc.report.page import RunReader, render
from fedsc.report.runs import find_runs, read_run
from fedsc.report.theory_table import show_theory
from fedsc.spec import RunSpec

from .inputs import INPUTS, changed_json, damaged, fuzzed, nothing_outside, read_or_refuse

METHODS = ("fedsc", "moon", "fedcda")
SETTINGS: dict[str, Any] = {
    **{"dataset": "tiny", "clients": 2, "partition": "iid", "epochs": 1, "model": "mlp"},
    **{"engine": "sequential", "threads": 1},
}
LAND = {
    "grid": [-1.0, 0.0, 1.0],
    "loss": [[1.0, 2.0, 1.5], [0.5, 0.1, None], [1.0, 1.0, 3.0]],
    "models": [{"name": "global", "at": [0, 0], "loss": 1}, {"name": "client 0", "at": [0.5, 0]}],
    "around": {"grid": [-1, 1], "models": [{"name": "global", "loss": [[1, 2], [3, 4]]}]},
}
EMBEDDING = {
    **{"x": [0.0, 1.0, None], "y": [0.0, 1.0, 2.0], "label": [0, 1, 1]},
    **{"classes": ["0", "1"], "client": [0, None, 1], "predicted": [0, 1, 0]},
}
CONSTANTS = ("L1", "sigma2", "B", "L2", "eta", "E", "M", "C", "xi", "L0")
THEORY = {
    **{"bound": [None, 2.0], "observed": [3.0, 1.0], "notes": ["so"], "round_change": 0.1},
    "conditions": [{"name": "step", "needs": "< 1", "has": "2", "holds": False}],
    "constants": dict.fromkeys(CONSTANTS, 1.0),
}


def tiny_data() -> Dataset:
    images = torch.arange(24 * 16, dtype=torch.int64).remainder(256).to(torch.uint8)
    images, labels = images.reshape(24, 1, 4, 4), torch.arange(24) % 2
    return Dataset("tiny", images[:16], labels[:16], images[16:], labels[16:], ("a", "b"))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs of two rounds, as `fedsc run` leaves them, with what analyses add."""
    root = tmp_path_factory.mktemp("originals")
    for text in METHODS:
        folder = root / f"{text}-seed0"
        fedsc.run(tiny_data(), method_from_text(text), out=folder, rounds=2, **options())
        for name, content in (("landscape", LAND), ("embedding", EMBEDDING), ("theory", THEORY)):
            (folder / f"{name}.json").write_text(json.dumps(content))
    return root


class StopAfterTwo(Silent):
    def round_done(self, record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def cut_short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs that have a checkpoint after each of two rounds, and a third to go."""
    root = tmp_path_factory.mktemp("cut")
    for text in METHODS:
        out, method = root / f"{text}-seed0", method_from_text(text)
        with pytest.raises(KeyboardInterrupt):
            execute(
                *(spec_of(text), tiny_data(), method, None, out, StopAfterTwo()),
                checkpoint_seconds=0,
            )
    return root


def spec_of(method: str) -> RunSpec:
    return RunSpec(method=method, rounds=3, **SETTINGS)


def options() -> dict[str, Any]:
    return {k: v for k, v in SETTINGS.items() if k not in ("dataset", "model")} | {"model": "mlp"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fuzzed")
    (root / "other").mkdir()
    (root / "other" / "mine.txt").write_text("mine")
    (root / "place").mkdir()
    return root / "place"


@pytest.fixture(autouse=True)
def _small_pictures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pictures, "DPI", 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Matplotlib's, of fonts and empty contours
        yield


TEXT_FILES = ("spec.json", "metrics.jsonl", "partition.json", "summary.json")
ANALYSES = ("landscape.json", "embedding.json", "theory.json", "partition.json")

Change = Callable[[Path], None]


@st.composite
def changes(draw: st.DrawFn, names: tuple[str, ...]) -> Change:
    """What to do to one file of a run folder; the same draw changes any folder alike."""
    name = draw(st.sampled_from(names))
    data = draw(st.data())
    by_value = draw(st.booleans())

    def change(folder: Path) -> None:
        path = folder / name
        valid = path.read_bytes()
        if not by_value or name.endswith(".safetensors"):
            path.write_bytes(data.draw(damaged(valid)))
        elif name.endswith(".jsonl"):
            lines = valid.decode().splitlines()
            place = data.draw(st.integers(0, len(lines) - 1))
            lines[place] = json.dumps(data.draw(changed_json(json.loads(lines[place]))))
            path.write_text("".join(f"{line}\n" for line in lines))
        else:
            path.write_text(json.dumps(data.draw(changed_json(json.loads(valid)))))

    return change


def fresh(originals: Path, place: Path, methods: tuple[str, ...] = METHODS[:2]) -> Path:
    """The runs once more, in a folder of their own."""
    runs = place / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    for text in methods:
        shutil.copytree(originals / f"{text}-seed0", runs / f"{text}-seed0")
    return runs


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


@fuzzed
@given(change=changes(TEXT_FILES))
def test_results_and_report(originals: Path, place: Path, change: Change) -> None:
    runs = fresh(originals, place)
    change(runs / "fedsc-seed0")
    with nothing_outside(place):
        find_runs([runs])
        data = RunReader([runs]).page_data()
        read_or_refuse(lambda: results([runs], quiet(), 0.5))
        for suffix in ("md", "tex", "csv"):
            read_or_refuse(partial(results, [runs], quiet(), None, place / f"t.{suffix}"))
    assert any(run["label"] == "moon" for run in data["runs"])  # the others do not suffer


@fuzzed
@given(change=changes((*ANALYSES, "metrics.jsonl", "spec.json")))
def test_what_the_page_shows_is_json(originals: Path, place: Path, change: Change) -> None:
    runs = fresh(originals, place)
    change(runs / "fedsc-seed0")
    data = RunReader([runs]).page_data()
    json.dumps(data, allow_nan=False).encode()


@fuzzed
@given(change=changes(ANALYSES), name=st.sampled_from(ANALYSES))
def test_what_figures_read(originals: Path, place: Path, change: Change, name: str) -> None:
    folder = fresh(originals, place, ("fedsc",)) / "fedsc-seed0"
    change(folder)
    run = read_run(folder)
    kind = name.removesuffix(".json")
    read_or_refuse(
        lambda: partition_of(run) if kind == "partition" else figures.read_analysis(run, kind)
    )


KINDS = ("curves", "classes", "drift", "partition", "landscape", "embedding", "sensitivity")


@settings(fuzzed, max_examples=max(20, INPUTS // 10))  # drawing takes long; reading is above
@given(change=changes((*ANALYSES, "metrics.jsonl", "spec.json")), kind=st.sampled_from(KINDS))
def test_figures(originals: Path, place: Path, change: Change, kind: str) -> None:
    runs = fresh(originals, place)
    change(runs / "fedsc-seed0")
    out = place / "figure.png"
    with pytest.MonkeyPatch.context() as patch, nothing_outside(place):
        patch.setattr(figure, "compute", lambda *_: None)  # drawing what lies there
        read_or_refuse(lambda: make_figure(kind, [runs], out, quiet(), over="tau"))
    plt.close("all")


@fuzzed
@given(change=changes(("theory.json", "landscape.json", "spec.json", "state.safetensors")))
def test_analyses(originals: Path, place: Path, change: Change) -> None:
    """What lies there is shown if it is whole, and else made again."""
    folder = fresh(originals, place, ("fedsc",)) / "fedsc-seed0"
    change(folder)

    def show() -> None:
        run = read_run(folder)
        found = cached(folder / "theory.json", {}, lambda: THEORY)
        show_theory(run, found, quiet())
        figures.read_analysis(run, "embedding")
        landscape_of(run, points=2, images=5)  # data set "tiny" is none: refused in words

    with nothing_outside(place):
        read_or_refuse(show)


@fuzzed
@given(method=st.sampled_from(METHODS), data=st.data())
def test_resume(cut_short: Path, place: Path, method: str, data: st.DataObject) -> None:
    """A run goes on or is refused, whichever of its files is damaged."""
    folder = fresh(cut_short, place, (method,)) / f"{method}-seed0"
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    data.draw(changes(tuple(files)))(folder)

    def resume() -> None:
        execute(spec_of(method), tiny_data(), method_from_text(method), None, folder, resume=True)

    with nothing_outside(place):
        is_run(folder)
        is_job(folder.parent)
        read_or_refuse(lambda: read_job(folder.parent, {}))
        read_or_refuse(resume)


def test_the_page_of_fuzzed_runs_renders(originals: Path, place: Path) -> None:
    assert "<html" in render(RunReader([fresh(originals, place)]).page_data())
