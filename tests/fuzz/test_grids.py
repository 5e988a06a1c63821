"""Broken and hostile folders of grids: tables are made of what is whole, and the rest is named."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsc.errors import FedscError
from fedsc.experiments.cells import Cell, cells_of, read_cell
from fedsc.experiments.grids import asked_in
from fedsc.experiments.reproduce import (
    Asked,
    collect,
    read_asked,
    results,
    sweep,
    with_what_was_asked_before,
)

from .inputs import fuzzed, nothing_outside, read_or_refuse
from .runs import changes, quiet

SETTINGS: dict[str, Any] = {
    **{"dataset": "digits", "rounds": 1, "epochs": 1, "clients": 2, "partition": "iid"},
    **{"train_limit": 40, "device": "cpu", "threads": 1, "engine": "sequential"},
}
FILES = ("sweep.json", *(f"cell/{name}" for name in ("spec.json", "metrics.jsonl", "summary.json")))


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two runs, finished."""
    out = tmp_path_factory.mktemp("grid")
    assert sweep(["fedavg"], {"lr": ["0.1", "0.05"]}, 1, SETTINGS, out, quiet(), quiet=True)
    return out


@fuzzed
@given(change=changes(FILES))
def test_tables_of_a_grid(grid: Path, place: Path, change: Any) -> None:
    out = place / "grid"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(grid, out)
    first = min(path.parent for path in out.glob("*/spec.json"))
    (out / "cell").symlink_to(first.name)
    change(out)
    (out / "cell").unlink()
    asked = Asked("sweep", "", [], ["fedavg"], [0], {"lr": ["0.1", "0.05"]}, SETTINGS)
    with nothing_outside(place):
        found, _ = collect(out, asked)
        read_or_refuse(partial(results, [out], quiet(), 0.5))
        read_or_refuse(lambda: with_what_was_asked_before(out, asked))
    assert found.runs  # the other cell does not suffer


@fuzzed
@given(data=st.data())
def test_cells_of_another_run(grid: Path, place: Path, data: st.DataObject) -> None:
    """A cell's folder that holds something else is not taken for it."""
    out = place / "cells"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(grid, out)
    cell = first_cell(read_asked(out / "sweep.json"))
    data.draw(changes(("spec.json",)))(out / cell.name)
    run = read_or_refuse(lambda: read_cell(out, cell))
    if run is not None:
        assert (run.spec["lr"], run.spec["seed"]) == (cell.spec.lr, 0)
        assert run.spec["method"]["name"] == "fedavg"


@pytest.mark.parametrize("change", [{"methods": []}, {"seeds": []}])
def test_a_grid_without_runs_is_refused(grid: Path, tmp_path: Path, change: Any) -> None:
    (tmp_path / "sweep.json").write_text(
        json.dumps(json.loads((grid / "sweep.json").read_text()) | change)
    )
    with pytest.raises(FedscError, match=r"sweep.json is damaged: .*; remove it"):
        read_asked(tmp_path / "sweep.json")


def first_cell(asked: Asked) -> Cell:
    return min(cells_of(asked.grid(), asked.seeds), key=lambda cell: cell.name)


def test_cells_and_grid_files_that_are_links(grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "grid"
    shutil.copytree(grid, out)
    cell = first_cell(read_asked(out / "sweep.json"))
    (out / cell.name).rename(tmp_path / "elsewhere")
    (out / cell.name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FedscError, match="is a link"):
        read_cell(out, cell)
    mine = tmp_path / "mine.md"
    mine.write_text("mine")
    for suffix in ("md", "tex", "csv"):
        (out / f"sweep.{suffix}").unlink()
        (out / f"sweep.{suffix}").symlink_to(mine)
    results([out], quiet())
    assert mine.read_text() == "mine"
    assert not (out / "sweep.md").is_symlink()


def test_a_grid_file_names_no_other(tmp_path: Path) -> None:
    """The tables are written under the name that the file gives itself."""
    content = {"name": "../x", "scale": "", "columns": [], "methods": ["fedavg"], "seeds": [0]}
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    (file,) = asked_in(tmp_path)
    with pytest.raises(FedscError, match="of another table"):
        read_asked(file)
