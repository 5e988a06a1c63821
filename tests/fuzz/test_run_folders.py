"""Broken and hostile run folders: every command that reads them gives a result or says why not."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsc.analysis.landscape import landscape_of
from fedsc.analysis.reopen import cached
from fedsc.experiments import figure
from fedsc.experiments.compare import read_job
from fedsc.experiments.figure import make_figure
from fedsc.experiments.folder import is_job, is_run
from fedsc.experiments.reproduce import results
from fedsc.experiments.runner import execute
from fedsc.methods import method_from_text
from fedsc.report import figures, pictures
from fedsc.report.figures import partition_of
from fedsc.report.page import RunReader, render
from fedsc.report.runs import find_runs, read_run
from fedsc.report.theory_table import show_theory

from .inputs import INPUTS, fuzzed, nothing_outside, read_or_refuse
from .runs import (
    ANALYSES,
    METHODS,
    TEXT_FILES,
    THEORY,
    Change,
    changes,
    fresh,
    quiet,
    spec_of,
    tiny_data,
)


@pytest.fixture(autouse=True)
def _small_pictures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pictures, "DPI", 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Matplotlib's, of fonts and empty contours
        yield


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
