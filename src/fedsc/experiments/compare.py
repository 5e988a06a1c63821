"""Several methods and seeds in one go, with a table and a picture at the end."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import FedscError
from ..methods import method_from_text
from ..progress import Lines, Live, Silent
from ..report.pictures import draw_curves
from ..report.runs import RunData, read_run
from ..report.table import comparison_rows, comparison_table, markdown_table
from .folder import prepare_out, write_atomically
from .runner import execute, load
from .spec import RunSpec


def compare(
    methods: list[str],
    seeds: list[int],
    settings: dict[str, Any],
    out: Path | None,
    overwrite: bool,
    data_dir: Path | None,
    quiet: bool,
    console: Console,
) -> list[RunData]:
    """Run every method with every seed; each run is a folder `out/METHOD-seedN`.

    Everything that can be wrong with the settings is found before the first run starts.
    """
    specs = [
        RunSpec(method=method, seed=seed, **settings)
        for method, seed in itertools.product(methods, seeds)
    ]
    names = [f"{folder_name(spec.method)}-seed{spec.seed}" for spec in specs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise FedscError(f"{twice[0]} is asked for twice: give each method and seed once")
    made = [method_from_text(spec.method) for spec in specs]
    out = out or Path("runs") / folder_name(f"{specs[0].dataset}-{specs[0].partition}")
    data = load(specs[0], data_dir)
    prepare_out(out, overwrite)
    for spec, method, name in zip(specs, made, names, strict=True):
        execute(spec, data, method, None, out / name, choose_progress(quiet, console))

    runs = [read_run(out / name) for name in names]
    console.print(comparison_table(runs))
    write_atomically(out / "summary.md", markdown_table(*comparison_rows(runs)).encode())
    draw_curves(runs, out / "curves.png")
    console.print(f"Runs in {out}, curves in {out / 'curves.png'}", soft_wrap=True)
    return runs


def choose_progress(quiet: bool, console: Console) -> Silent:
    if quiet:
        return Silent()
    return Live(console) if console.is_terminal else Lines()


def folder_name(text: str) -> str:
    """A method or data set as part of a path: `npz:/data/x.npz` must not lead elsewhere."""
    kept = "".join(c if c.isalnum() or c in "-._=+" else "_" for c in text)
    return kept.strip(".") or "run"
