"""The runs of a grid, each in a folder that is found by the hash of its specification.

    OUT/cifar10-nid1_0.2-fedsc-seed0-1a2b3c4d5e6f/    a run folder, as `fedsc run` writes it
    OUT/.locks/                                       a file per run, locked while it is computed

Finished runs are never computed again, half-finished ones go on from their checkpoint. Processes
that work on one folder take different runs: a run is locked by the operating system, which lifts
the lock when its process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from ..data.dataset import Dataset
from ..errors import FedscError, in_words
from ..files import CannotReadError, explain_write_errors, open_here, refuse_link
from ..method import Method
from ..methods import method_from_text, method_to_text
from ..progress import data_progress
from ..report.runs import RunData, read_run
from ..spec import NOT_PART_OF_THE_HASH, RunSpec, spec_hash
from .compare import choose_progress
from .folder import folder_name
from .grids import Column, Grid, Row, ordered
from .runner import execute, identity, load

LOCKS = ".locks"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    row: Row
    column: Column
    seed: int
    spec: RunSpec
    method: Method

    @functools.cached_property
    def name(self) -> str:
        """Of its folder. Cells of different grids that are the same run share it."""
        spec = self.spec
        words = [spec.dataset, spec.partition]
        if spec.long_tail:
            words.append(f"tail{spec.long_tail:g}")
        words += [spec.method, f"seed{self.seed}"]
        return f"{folder_name('-'.join(words))}-{spec_hash(identity(spec, self.method))}"

    @property
    def title(self) -> str:
        words = self.column.title, self.row.heading, f"seed {self.seed}"
        return ", ".join(filter(None, words))


def cells_of(grid: Grid, seeds: list[int], common: dict[str, Any] | None = None) -> list[Cell]:
    """All runs of a grid; `common` says where and how they are computed."""
    cells = []
    for group in ordered(column.group for column in grid.columns):
        for seed in seeds:  # a whole table of one seed says more than three seeds of half of it
            for column in grid.columns:
                if column.group != group or column.settings is None:
                    continue
                for row in grid.rows:
                    settings = {**column.settings, **row.settings, **(common or {})}
                    text = ",".join(filter(None, (row.method, column.method_options)))
                    method, text = method_as_written_shortest(text, settings.get("dataset", ""))
                    spec = RunSpec(method=text, seed=seed, **settings)
                    cells.append(Cell(row, column, seed, spec, method))
    return cells


def method_as_written_shortest(text: str, dataset: str) -> tuple[Method, str]:
    """Equal runs have equal names: `fedsc,tau=0.05` is `fedsc`, whose default that is."""
    method, name = method_from_text(text, dataset), text.split(",")[0].strip()
    return method, method_to_text(method, dataset, name)


def run_cells(
    cells: list[Cell],
    out: Path,
    console: Console,
    data_dir: Path | None = None,
    quiet: bool = False,
) -> dict[str, str]:
    """Compute what is missing; returns what went wrong, by the name of the cell."""
    load_once = remember_last_data(console, data_dir)
    jobs = list({cell.name: cell for cell in cells}.values())
    failures: dict[str, str] = {}
    counter = Counter(len(jobs), console, quiet)

    def work_on(cell: Cell, wait: bool) -> bool:
        """Whether the cell is settled, rather than in another process's hands."""
        try:
            finished = read_cell(out, cell)
            if finished is not None:
                if cell.spec.calibrated and not finished.spec.get("calibrated"):
                    counter.warn(
                        f"{cell.title} is finished, and was not measured with --calibrated: remove "
                        f"{out / cell.name} to run it again"
                    )
                counter.settled += 1
                return True
            with locked(out, cell.name, wait) as held:
                if not held:
                    return False
                if read_cell(out, cell) is not None:  # another process was quicker
                    counter.settled += 1
                    return True
                counter.begin(cell)
                data = load_once(cell.spec.dataset, cell.spec.few_shot, cell.spec.validation)
                progress = choose_progress(quiet, console)
                gc.collect()  # the last run's models refer to each other, and may fill a GPU
                execute(cell.spec, data, cell.method, None, out / cell.name, progress, resume=True)
                counter.end()
        except Exception as error:  # the other cells of a long night must not suffer for this one
            reason = str(error) if isinstance(error, FedscError) else in_words(error)
            if reason not in failures.values():
                counter.warn(f"left out {cell.title}: {reason}")
            failures[cell.name] = reason
            counter.settled += 1
        return True

    try:
        elsewhere = [cell for cell in jobs if not work_on(cell, wait=False)]
        if elsewhere:
            counter.say(f"waiting for {len(elsewhere)} runs that another process is computing")
        for cell in elsewhere:
            work_on(cell, wait=True)
    except KeyboardInterrupt:
        counter.warn("stopped; the same command goes on from here")
        raise
    return failures


def read_cell(out: Path, cell: Cell) -> RunData | None:
    """The finished run of a cell, nothing if there is none yet, or an error if it is damaged."""
    folder = out / cell.name
    refuse_link(folder)
    if not (folder / "summary.json").exists():
        return None
    try:
        run = read_run(folder)
    except CannotReadError:
        raise
    except FedscError as error:
        raise FedscError(f"{error}; remove the folder to run it again") from None
    if not run.measured:
        raise FedscError(f"{folder} has rounds without an accuracy; remove it to run it again")
    wanted = json.loads(json.dumps(identity(cell.spec, cell.method)))
    for name, value in wanted.items():
        decided_by_data = value == "auto"
        if name in NOT_PART_OF_THE_HASH or decided_by_data or run.spec.get(name) == value:
            continue
        raise FedscError(
            f"{folder} holds another run: {name} is {run.spec.get(name)!r}, not {value!r}; "
            "remove the folder to run it again"
        )
    return run


@contextlib.contextmanager
def locked(out: Path, name: str, wait: bool = True) -> Iterator[bool]:
    """Hold a name for this process; gives False if another process holds it and we do not wait."""
    with contextlib.ExitStack() as stack:
        refuse_link(out / LOCKS)
        with explain_write_errors(out / LOCKS):
            (out / LOCKS).mkdir(exist_ok=True)
            file = stack.enter_context(open_here(out / LOCKS / f"{name}.lock", "ab"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def remember_last_data(
    console: Console, data_dir: Path | None
) -> Callable[[str, int | None, int | None], Dataset]:
    """Loads a data set once for all runs in a row that need it, and holds one at a time."""

    @functools.lru_cache(maxsize=1)
    def load_once(dataset: str, few_shot: int | None, validation: int | None) -> Dataset:
        with data_progress(console) as decoding:
            spec = RunSpec(dataset=dataset, few_shot=few_shot, validation=validation)
            return load(spec, data_dir, decoding)

    return load_once


class Counter:
    """How far a grid has come, a line per run."""

    def __init__(self, total: int, console: Console, quiet: bool) -> None:
        self.total, self.console, self.quiet = total, console, quiet
        self.settled, self.computed, self.began = 0, 0, time.monotonic()

    def begin(self, cell: Cell) -> None:
        left = ""
        if self.computed:
            each = (time.monotonic() - self.began) / self.computed
            left = f" (about {duration(each * (self.total - self.settled))} left)"
        self.say(f"[{self.settled + 1}/{self.total}] {cell.title}{left}")

    def end(self) -> None:
        self.settled += 1
        self.computed += 1

    def warn(self, text: str) -> None:
        print(f"fedsc: {text}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        if self.quiet:
            return
        if self.console.is_terminal:
            self.console.print(text, soft_wrap=True, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
