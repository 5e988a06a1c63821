"""`fedsc reproduce`, `fedsc sweep` and `fedsc results`: grids of runs, and their tables.

Beside the runs of a grid lie what was asked for (`table1.json`) and the results (`table1.md`,
`.tex` and `.csv`), which can be made again from the run folders at any time.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import FedscError, unknown
from ..files import CannotReadError, cannot_read, explain_write_errors, read_json, write_atomically
from ..methods import method_class
from ..options import options_of, parse
from ..plugins import refuse_code
from ..report.checks import Check, dict_of, is_text, is_whole, list_of, wrong_in
from ..report.grid_table import (
    Results,
    cost_tables,
    csv_page,
    latex_page,
    markdown_page,
    notes_of,
    result_tables,
    significance_table,
)
from ..report.results_table import results_file, results_tables
from ..report.runs import RunData, find_runs, without_copies
from ..report.text_table import TextTable, for_terminal
from ..spec import NOT_PART_OF_THE_HASH, RunSpec
from .cells import cells_of, locked, read_cell, run_cells
from .folder import folder_name, is_job
from .grids import GRIDS, SCALES, SWEEP, Column, Grid, Row, asked_in, grid

MOST_RUNS = 100_000
NOT_SWEPT = ("method", "seed", *NOT_PART_OF_THE_HASH)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a grid was asked for: enough to make its tables again from the run folders."""

    name: str  # of a table or figure, or "sweep"
    scale: str
    columns: list[str]
    methods: list[str]
    seeds: list[int]
    values: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # of a sweep
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # of a sweep

    def grid(self) -> Grid:
        if self.name == SWEEP:
            return sweep_grid(self.methods, self.values, self.settings)
        return grid(self.name, self.scale).select(self.columns, self.methods)

    def write(self, out: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        write_atomically(out / f"{self.name}.json", text.encode())


ASKED: dict[str, Check] = {
    **dict.fromkeys(("name", "scale"), is_text),
    **dict.fromkeys(("columns", "methods"), list_of(is_text)),
    "seeds": list_of(is_whole),
    "values": dict_of(list_of(is_text)),
    "settings": lambda value: isinstance(value, dict),
}


def read_asked(path: Path, named: Sequence[Any] = ()) -> Asked:
    """`named`: methods and model that the user has given beside it, and whose code may run."""
    try:
        found = read_json(path)
    except OSError as error:
        raise cannot_read(path, error) from None
    except CannotReadError:
        raise
    except FedscError as error:
        raise FedscError(f"{error}; remove it") from None
    wrong = wrong_in(found, ASKED, optional=("values", "settings"))
    if not wrong and (found["name"] != path.stem or not found.keys() <= ASKED.keys()):
        wrong = "it is of another table"  # and its name would lead to other files
    if wrong:
        raise FedscError(f"{path} is damaged: {wrong}; remove it")
    asked = Asked(**found)
    values = itertools.chain(*asked.values.values())
    refuse_code(path, (*asked.methods, asked.settings.get("model"), *values), named)
    try:
        if not cells_of(asked.grid(), asked.seeds[:1]):
            raise FedscError("it asks for no run")
        if len(asked.seeds) * len(asked.grid().rows) > MOST_RUNS:
            raise FedscError(f"it asks for more than {MOST_RUNS} runs")
    except (FedscError, TypeError) as error:  # TypeError: an option that RunSpec has not
        raise FedscError(f"{path} is damaged: {error}; remove it") from None
    return asked


# The commands -------------------------------------------------------------------------------------


def reproduce(
    names: list[str],
    scale: str,
    columns: list[str] | None,
    methods: list[str] | None,
    num_seeds: int,
    out: Path | None,
    console: Console,
    common: dict[str, Any],
    data_dir: Path | None = None,
    quiet: bool = False,
) -> bool:
    """Run tables and figures of the paper and show them; whether nothing was left out."""
    names = list(GRIDS) if names == ["all"] else names
    seeds = list(range(num_seeds))
    chosen = [grid(name, scale).select(columns, methods) for name in names]  # before any work
    out = prepare(out or Path("runs") / f"reproduce-{scale}")
    whole = True
    for one in chosen:
        asked = Asked(
            one.name,
            scale,
            [column.key for column in one.columns],
            [row.name for row in one.rows],
            seeds,
        )
        with locked(out, one.name):
            with_what_was_asked_before(out, asked).write(out)
        failures = run_cells(cells_of(one, seeds, common), out, console, data_dir, quiet)
        together = read_asked(out / f"{one.name}.json")  # other processes may have added to it
        show(out, together, console, failures=failures, data_dir=data_dir, quiet=quiet)
        whole = whole and not failures
    return whole


def sweep(
    methods: list[str],
    values: dict[str, list[str]],
    num_seeds: int,
    settings: dict[str, Any],
    out: Path | None,
    console: Console,
    data_dir: Path | None = None,
    quiet: bool = False,
) -> bool:
    """Run every combination of the values and show them; whether nothing was left out."""
    asked = Asked(SWEEP, "", [], methods, list(range(num_seeds)), values, settings)
    cells = cells_of(asked.grid(), asked.seeds)
    first = cells[0].spec
    out = prepare(out or Path("runs") / folder_name(f"sweep-{first.dataset}-{first.partition}"))
    with locked(out, SWEEP):
        asked.write(out)
    failures = run_cells(cells, out, console, data_dir, quiet)
    show(out, asked, console, failures=failures)
    return not failures


def results(
    paths: list[Path], console: Console, accuracy: float | None = None, file: Path | None = None
) -> None:
    """The tables of grids once more, or one for each setting of any other runs."""
    for path in paths:
        if not path.is_dir():
            raise FedscError(f"{path} is not a folder: give one with runs")
    grids = [asked for path in paths for asked in asked_in(path)]
    if grids and file is not None:
        raise FedscError(
            f"--write is for other runs: the tables of a grid are in {grids[0].parent}"
        )
    for asked in grids:
        show(asked.parent, read_asked(asked), console, accuracy, costs=accuracy is not None)
    others = [path for path in paths if not any(asked_in(path))]
    if not others:
        return
    runs, skipped = find_runs(others)
    for line in skipped:
        warn(f"skipped: {line}")
    for run in runs:
        if not run.complete:
            warn(f"skipped: {run.path} is unfinished (round {run.rounds})")
        elif not run.measured:
            warn(f"skipped: {run.path} has rounds without an accuracy")
    finished, copies = without_copies([run for run in runs if run.complete and run.measured])
    for line in copies:
        warn(line)
    if not finished:
        raise FedscError(f"no finished run in {', '.join(map(str, others))}")
    if file is not None:
        content = results_file(finished, file, accuracy)  # refuses a wrong name before all else
        with explain_write_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content.encode())
    for table in results_tables(finished, accuracy):
        print_table(table, console)


def list_grids(console: Console) -> None:
    """Names to choose from, with their size."""
    grids = Table("name", "what it is", "runs a seed", title="Tables and figures")
    for name in GRIDS:
        whole = grid(name, "paper")
        runs = {cell.name for cell in cells_of(whole, [0])}
        grids.add_row(name, whole.title, str(len(runs)))
    scales = Table("scale", "what it is", title="Scales")
    for scale, text in SCALES.items():
        scales.add_row(scale, text)
    for table in (grids, scales):
        table.title_justify, table.header_style = "left", "bold"
        console.print(table)
    console.print("To run one: fedsc reproduce table1 --scale smoke", highlight=False)


# What they share ----------------------------------------------------------------------------------


def prepare(out: Path) -> Path:
    if out.exists() and not out.is_dir():
        raise FedscError(f"--out {out} is a file: give a folder")
    if is_job(out):  # whose runs no table of a grid would show
        raise FedscError(
            f"{out} is a folder of `fedsc run` (it has a job.json): choose another --out"
        )
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    return out


def with_what_was_asked_before(out: Path, asked: Asked) -> Asked:
    """A second call adds columns, methods and seeds to the table that the first one began."""
    path = out / f"{asked.name}.json"
    if not path.exists():
        return asked
    before = read_asked(path, (*asked.methods, asked.settings.get("model")))
    if before.scale != asked.scale:
        raise FedscError(
            f"{out} holds {asked.name} at scale {before.scale}, not {asked.scale}: "
            "choose another --out"
        )
    return dataclasses.replace(
        asked,
        columns=[*before.columns, *(c for c in asked.columns if c not in before.columns)],
        methods=[*before.methods, *(m for m in asked.methods if m not in before.methods)],
        seeds=sorted({*before.seeds, *asked.seeds}),
    )


def collect(out: Path, asked: Asked) -> tuple[Results, list[str]]:
    """The finished runs of a grid, and a line for each folder that is none."""
    cells = cells_of(asked.grid(), asked.seeds)
    found: dict[str, RunData] = {}
    skipped = []
    for name, cell in {cell.name: cell for cell in cells}.items():
        try:
            run = read_cell(out, cell)
        except FedscError as error:
            skipped.append(str(error))
            continue
        if run is not None:
            found[name] = run
    for path in sorted(out.iterdir()):
        if path.is_dir() and not path.name.startswith(".") and not (path / "spec.json").exists():
            skipped.append(f"{path} is not a run folder: it has no spec.json")
    runs = {
        (cell.row.name, cell.column.key, cell.seed): found[cell.name]
        for cell in cells
        if cell.name in found
    }
    wanted = len({cell.name for cell in cells})
    return Results(asked.grid(), asked.seeds, runs, wanted, wanted - len(found)), skipped


def show(
    out: Path,
    asked: Asked,
    console: Console,
    accuracy: float | None = None,
    costs: bool = False,
    failures: dict[str, str] | None = None,
    data_dir: Path | None = None,
    quiet: bool = False,
) -> None:
    """Print the tables of a grid, write them beside its runs, and draw its figure."""
    found, skipped = collect(out, asked)
    for line in skipped:
        if line not in (failures or {}).values():
            warn(f"skipped: {line}")
    console.print(f"\n{found.grid.title}", style="bold underline", highlight=False)
    for note in notes_of(found):
        console.print(note, markup=False, highlight=False)
    tables = result_tables(found)
    significance = significance_table(found)
    tables += [significance] if significance is not None else []
    tables += cost_tables(found, accuracy) if costs else []
    for table in tables:
        print_table(table, console)
    pages = {"md": markdown_page, "tex": latex_page, "csv": csv_page}
    drawn = []
    with locked(out, asked.name):  # another process may be writing the same files
        for suffix, page in pages.items():
            write_atomically(out / f"{asked.name}.{suffix}", page(found, accuracy).encode())
        if found.runs:
            drawn = pictures_of(found, out, data_dir, console, quiet)
    console.print(
        f"Tables in {out / asked.name}.md, .tex and .csv", soft_wrap=True, highlight=False
    )
    for path in drawn:
        console.print(f"Picture in {path}", soft_wrap=True, highlight=False)
    for reason, number in collections.Counter((failures or {}).values()).items():
        warn(f"{number} run{'s' if number > 1 else ''} left out: {reason}")


def print_table(table: TextTable, console: Console) -> None:
    if table.title:
        console.print(f"\n{table.title}", style="bold", markup=False, highlight=False)
    for part in for_terminal(table, console.width):
        console.print(part)
    for note in table.notes:
        console.print(note, markup=False, highlight=False)


def warn(text: str) -> None:
    print(f"fedsc: {text}", file=sys.stderr, flush=True)


# Sweeps -------------------------------------------------------------------------------------------


def parse_values(texts: list[str]) -> dict[str, list[str]]:
    """`["tau=0.05,0.1", "lr=0.01"]` as lists by name."""
    values: dict[str, list[str]] = {}
    for text in texts:
        name, equals, listed = text.partition("=")
        name = name.strip().replace("-", "_")
        words = [word.strip() for word in listed.split(",")]
        if not equals or not name or not all(words):
            raise FedscError(f"--set {text!r} is not NAME=VALUE,VALUE as in --set tau=0.05,0.1")
        if name in values:
            raise FedscError(f"--set gives {name} twice: put all its values into one")
        if len(set(words)) < len(words):
            raise FedscError(f"--set {text!r} gives a value twice")
        values[name] = words
    return values


def sweep_grid(methods: list[str], values: dict[str, list[str]], settings: dict[str, Any]) -> Grid:
    """A row for each combination. A name is an option of a run, or of the methods that know it."""
    of_run = [opt.name for opt in options_of(RunSpec) if opt.name not in NOT_SWEPT]
    known = {text: _options_of_method(text) for text in methods}
    for name in values:
        if name not in of_run and not any(name in names for names in known.values()):
            allowed = dict.fromkeys([*itertools.chain(*known.values()), *of_run])
            raise unknown("name in --set", name, allowed)
        if name in settings:
            raise FedscError(f"{name} is given by --set and as an option: leave one away")
    combinations = math.prod(map(len, values.values())) * len(methods)
    if combinations > MOST_RUNS:
        raise FedscError(f"{combinations} combinations are too many (allowed: {MOST_RUNS})")
    rows = []
    for text in methods:
        names = [name for name in values if name in of_run or name in known[text]]
        for combination in itertools.product(*(values[name] for name in names)):
            pairs = dict(zip(names, combination, strict=True))
            own = {name: parse(RunSpec, name, pairs[name]) for name in names if name in of_run}
            options = [f"{name}={pairs[name]}" for name in names if name not in of_run]
            heading = ", ".join([text, *(f"{name}={value}" for name, value in pairs.items())])
            rows.append(Row(heading, heading, ",".join([text, *options]), own))
    if len({row.name for row in rows}) < len(rows):
        raise FedscError("a method is given twice: give each --method once")
    words = [f"{name}={value}" for name, value in settings.items() if name not in NOT_SWEPT]
    if "dataset" not in values and "dataset" not in settings:
        words.insert(0, f"dataset={RunSpec().dataset}")
    column = Column("sweep", "accuracy", "", "accuracy", settings)
    title = f"Sweep over {', '.join(values)} with {', '.join(words)}; test accuracy in %"
    return Grid(SWEEP, title, "run", tuple(rows), (column,), {})


def _options_of_method(text: str) -> list[str]:
    return [opt.name for opt in options_of(method_class(text.split(",")[0].strip()))]


# Figures ------------------------------------------------------------------------------------------


def pictures_of(
    found: Results, out: Path, data_dir: Path | None, console: Console, quiet: bool
) -> list[Path]:
    """Draw the figure of a grid, each picture as PNG and PDF; returns the files."""
    from ..report import figures, pictures

    runs = list(found.runs.values())
    name = found.grid.name
    drawings: dict[str, Callable[[Path], None]] = {}
    if name == "figure1":
        drawings[name] = functools.partial(pictures.draw_curves, runs)
        own = with_analysis("landscape", runs, data_dir, console, quiet)
        drawings[f"{name}-landscape"] = functools.partial(figures.draw_landscape, own)
    elif name == "figure7":
        for column in found.grid.columns:
            own = [run for (_, key, _), run in found.runs.items() if key == column.key]
            if own:
                own = with_analysis("embedding", own, data_dir, console, quiet)
                stem = f"{name}-{folder_name(column.key)}"
                drawings[stem] = functools.partial(figures.draw_embedding, own)
    elif name in ("figure5", "figure6"):
        panels, title = figures.grid_points(found), found.grid.columns[0].group_heading
        drawings[name] = functools.partial(figures.draw_sensitivity, panels, title=title)
    paths = []
    for stem, draw in drawings.items():
        for kind in ("png", "pdf"):
            paths.append(out / f"{stem}.{kind}")
            draw(paths[-1])
    return paths


def with_analysis(
    kind: str, runs: list[RunData], data_dir: Path | None, console: Console, quiet: bool
) -> list[RunData]:
    """The runs of the first seed, once what the picture needs lies in their folders."""
    from .figure import compute

    lowest = min(run.spec["seed"] for run in runs)
    kept = [run for run in runs if run.spec["seed"] == lowest]
    compute(kind, kept, None, data_dir, console, quiet)
    return kept
