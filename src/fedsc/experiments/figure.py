"""`fedsc figure`: from run folders to a picture, computing what the picture needs first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..errors import FedscError, unknown
from ..progress import data_progress
from ..report import figures, pictures
from ..report.runs import RunData, find_runs

KINDS = ("curves", "landscape", "sensitivity", "embedding", "partition", "classes", "drift")


def make_figure(
    kind: str,
    paths: list[Path],
    out: Path,
    console: Console,
    over: str | None = None,
    title: str = "",
    images: int | None = None,
    data_dir: Path | None = None,
) -> None:
    if kind not in KINDS:
        raise unknown("figure", kind, KINDS)
    pictures.check_picture(out)
    runs, skipped = find_runs(paths)
    for line in skipped:
        print(f"fedsc: skipped: {line}", file=sys.stderr)
    if not runs:
        raise FedscError("no run to draw: give run folders, or a folder that holds some")
    if kind == "curves":
        pictures.draw_curves(runs, out)
    elif kind == "classes":
        figures.draw_classes(runs, out)
    elif kind == "drift":
        figures.draw_drift(runs, out)
    elif kind == "sensitivity":
        points, name = figures.sensitivity_points(runs, over)
        figures.draw_sensitivity({name: points}, out, title or pictures.title_of(runs[0].spec))
    elif kind == "partition":
        draw_partition_of(runs, out)
    else:
        runs = one_seed(runs)
        compute(kind, runs, images, data_dir, console)
        draw = figures.draw_landscape if kind == "landscape" else figures.draw_embedding
        draw(runs, out)
    console.print(f"{kind} in {out}", soft_wrap=True)


def compute(
    kind: str,
    runs: list[RunData],
    images: int | None,
    data_dir: Path | None,
    console: Console,
    quiet: bool = False,
) -> None:
    """Write landscape.json or embedding.json into the run folders that lack it."""
    from ..analysis.embedding import embedding_of
    from ..analysis.landscape import landscape_of

    make: Any = landscape_of if kind == "landscape" else embedding_of
    size = {} if images is None else {"images": images}
    for run in runs:
        if quiet:
            make(run, data_dir=data_dir, **size)
            continue
        with data_progress(console) as progress:
            make(run, data_dir=data_dir, on_step=progress, decoding=progress, **size)


def one_seed(runs: list[RunData]) -> list[RunData]:
    """The runs with the lowest seed: these pictures show one run of each method."""
    seed = min(run.spec["seed"] for run in runs)
    kept = [run for run in runs if run.spec["seed"] == seed]
    if len(kept) < len(runs):
        print(f"fedsc: drawn for seed {seed}, one of several", file=sys.stderr)
    return kept


def draw_partition_of(runs: list[RunData], out: Path) -> None:
    runs = one_seed(runs)
    run = runs[0]
    found = figures.partition_of(run)
    counts = np.array(found["class_counts"])
    others = {each.spec["partition_hash"] for each in runs} - {run.spec["partition_hash"]}
    if others:
        raise FedscError("these runs have different partitions: give the runs of one setting")
    spec = run.spec
    title = f"{pictures.title_of(spec)}, seed {spec['seed']}"
    pictures.draw_partition(counts, tuple(found["classes"]), title, out)
