"""Figures from run folders: every kind comes out as a picture, and says what the folders say."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedsc import FedscError
from fedsc.cli import main
from fedsc.experiments.figure import KINDS
from fedsc.experiments.grids import grid
from fedsc.prototypes import mean_change
from fedsc.report.figures import (
    draw_classes,
    draw_sensitivity,
    grid_points,
    sensitivity_points,
)
from fedsc.report.grid_table import Results
from fedsc.report.pictures import draw_curves, looks_of, seeds_of
from fedsc.report.runs import RunData, read_run


def figure(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["fedsc", "figure", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def assert_is_drawn(path: Path) -> None:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int)
        assert 500 <= image.width <= 4000
        assert 300 <= image.height <= 4000
    assert (pixels.max(1) - pixels.min(1) > 60).sum() > 200  # in colour
    assert (pixels == 255).all(1).mean() > 0.1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sensitivity"])
def test_every_kind_from_the_command_line(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    runs = [copied / "fedavg-seed0", copied / "fedsc-seed0"]
    if kind == "landscape":  # small, and current: what is there is drawn, not computed again
        from fedsc.analysis import landscape

        monkeypatch.setattr(landscape.landscape_of, "__defaults__", (3, 50, None, print, None))
    assert figure(monkeypatch, kind, *runs, "-o", tmp_path / "figure.png") == 0
    assert_is_drawn(tmp_path / "figure.png")
    made = {"landscape": "landscape.json", "embedding": "embedding.json"}.get(kind)
    assert made is None or all((run / made).exists() for run in runs)
    assert figure(monkeypatch, kind, *runs, "-o", tmp_path / "figure.pdf") == 0
    assert (tmp_path / "figure.pdf").read_bytes()[:5] == b"%PDF-"


def test_mistakes_are_one_line_and_leave_nothing(
    run_folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = run_folders / "fedavg-seed0"
    cases: list[tuple[list[str | Path], str]] = [
        (["curve", run, "-o", tmp_path / "a.png"], "did you mean 'curves'?"),
        (["curves", run, "-o", tmp_path / "a.txt"], "'.txt' is not one of"),
        (["curves", run, "-o", tmp_path / "no" / "a.png"], "there is no folder"),
        (["curves", tmp_path, "-o", tmp_path / "a.png"], "no run to draw"),
        (["drift", run, "-o", tmp_path / "a.png"], "no drift of prototypes"),
        (["sensitivity", run, "-o", tmp_path / "a.png"], "differ in no number"),
    ]
    for arguments, words in cases:
        assert figure(monkeypatch, *arguments) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.glob("a.*")) == []


def test_a_damaged_folder_is_named_and_the_rest_is_drawn(
    copied: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (copied / "fedsc-seed0" / "spec.json").write_text("{")
    assert figure(monkeypatch, "curves", copied, "-o", tmp_path / "curves.png") == 0
    assert f"skipped: {copied / 'fedsc-seed0' / 'spec.json'} is damaged" in capsys.readouterr().err
    assert_is_drawn(tmp_path / "curves.png")


def made_run(last: float, seed: int, name: str = "fedsc", **changes: Any) -> RunData:
    method = {"name": name, "tau": 0.05, "neighbours": 2} if name == "fedsc" else {"name": name}
    own = {key: value for key, value in changes.items() if key in method}
    spec = {"seed": seed, "format": 1, "clients": 10, "relational": True, "label": name}
    spec |= {key: value for key, value in changes.items() if key not in method}
    return RunData(
        Path("run"), {**spec, "method": {**method, **own}}, [{"accuracy": last}], complete=True
    )


def test_sensitivity_groups_by_value_and_seed() -> None:
    runs = [made_run(0.5, 0, tau=0.1), made_run(0.7, 1, tau=0.1), made_run(0.9, 0)]
    runs.append(made_run(0.4, 0, "fedavg"))
    points, name = sensitivity_points(runs)
    assert name == "temperature τ"
    assert points["fedsc"] == [(0.1, [0.5, 0.7]), (0.05, [0.9])]
    ((x, accuracies),) = points["fedavg"]
    assert math.isnan(x)
    assert accuracies == [0.4]


def test_sensitivity_over_one_of_several() -> None:
    runs = [made_run(0.5, 0), made_run(0.6, 0, tau=0.1), made_run(0.7, 0, clients=20)]
    with pytest.raises(FedscError, match="clients, tau: say which"):
        sensitivity_points(runs)
    points, name = sensitivity_points(runs, "clients")
    assert name == "clients K"
    assert points == {
        "fedsc, tau=0.05": [(10, [0.5]), (20, [0.7])],
        "fedsc, tau=0.1": [(10, [0.6])],
    }
    with pytest.raises(FedscError, match="unknown number for --over 'beta'"):
        sensitivity_points(runs, "beta")


def test_sensitivity_is_drawn(tmp_path: Path) -> None:
    points = {
        "fedsc": [(0.5, [0.7, 0.72]), (0.05, [0.8, 0.84])],
        "fedavg": [(math.nan, [0.75])],
        "missing": [(0.05, list[float]())],
    }
    draw_sensitivity({"tau": points, "M": points}, tmp_path / "tau.png", "a title")
    assert_is_drawn(tmp_path / "tau.png")
    with pytest.raises(FedscError, match="nothing to draw"):
        draw_sensitivity({"tau": {"fedavg": [(math.nan, [0.5])]}}, tmp_path / "none.png")


def test_points_of_a_grid_are_at_the_values_that_were_run() -> None:
    smoke = grid("figure6", "smoke").select(["clients/10", "clients/20", "epochs/1"], None)
    runs = {("fedsc", "clients/10", seed): made_run(0.5 + seed / 10, seed) for seed in (0, 1)}
    runs["fedavg", "clients/20", 0] = made_run(0.4, 0, "fedavg")
    # Digits are dealt to 5 and 10 clients in the place of 10 and 20.
    assert grid_points(Results(smoke, [0, 1], runs, 12, 9)) == {
        "clients K": {
            "FedAvg": [(5, []), (10, [0.4])],
            "FedSC": [(5, [0.5, 0.6]), (10, [])],
        },
        "local epochs E": {"FedAvg": [(1, [])], "FedSC": [(1, [])]},
    }


def test_many_classes_are_drawn_by_rank(copied: Path, tmp_path: Path) -> None:
    run = read_run(copied / "fedsc-seed0")
    table = {"classes": [str(number) for number in range(40)], "class_counts": [[1] * 40]}
    (run.path / "partition.json").write_text(json.dumps(table))
    run.records[-1]["per_class"] = [*np.linspace(0, 1, 39), None]
    draw_classes([run], tmp_path / "classes.png")
    assert_is_drawn(tmp_path / "classes.png")


def test_settings_get_panels_and_many_methods_a_legend_below(
    run_folders: Path, tmp_path: Path
) -> None:
    run = read_run(run_folders / "fedsc-seed0")
    others = [
        RunData(run.path, {**run.spec, "label": f"fedsc,tau={tau}"}, run.records, True)
        for tau in (0.1, 0.2, 0.3)
    ]
    epochs = RunData(run.path, {**run.spec, "epochs": 7}, run.records, True)
    draw_curves([run], tmp_path / "one.png")
    draw_curves([run, *others, epochs], tmp_path / "two.png")
    with Image.open(tmp_path / "one.png") as one, Image.open(tmp_path / "two.png") as two:
        assert two.width == 2 * one.width
        assert two.height > one.height
    looks = looks_of([run, *others])
    assert len({(look["color"], str(look["linestyle"])) for look in looks.values()}) == 4


def test_a_title_says_how_many_seeds_each_method_has(run_folders: Path) -> None:
    run = read_run(run_folders / "fedsc-seed0")
    two, other = (
        RunData(run.path, {**run.spec, **changed}, run.records, True)
        for changed in ({"seed": 1}, {"label": "fedavg"})
    )
    assert seeds_of([run, other]) == ""
    assert seeds_of([run, two]) == ", 2 seeds"
    assert seeds_of([run, two, other]) == ", 1 to 2 seeds"


def test_drift_by_hand() -> None:
    """(3, 4) to (3, 9): 5/5; (2, 0) to (2, 1): 1/2; the third has no prototype before."""
    old = torch.tensor([[3.0, 4.0], [2.0, 0.0], [0.0, 0.0]])
    new = torch.tensor([[3.0, 9.0], [2.0, 1.0], [7.0, 7.0]])
    assert float(mean_change(old, new, torch.tensor([True, True, False]))) == pytest.approx(0.75)
    assert math.isnan(mean_change(old, new, torch.zeros(3, dtype=torch.bool)))


def test_drift_is_recorded_where_there_are_prototypes(run_folders: Path) -> None:
    drift: dict[str, list[Any]] = {
        name: [r.get("prototype_drift") for r in read_run(run_folders / f"{name}-seed0").records]
        for name in ("fedavg", "fedsc", "fednh")
    }
    assert drift["fedavg"] == [None, None, None]
    assert drift["fedsc"][0] is None  # nothing to compare with
    assert all(value > 0 for value in drift["fedsc"][1:] + drift["fednh"])
