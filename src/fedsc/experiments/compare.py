"""Several methods and seeds in one go, with a table and a picture at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import FedscError
from ..files import (
    CannotReadError,
    CannotWriteError,
    explain_write_errors,
    read_json,
    read_object,
    read_text,
    refuse_link,
    write_atomically,
)
from ..methods import method_from_text
from ..plugins import refuse_code
from ..progress import Lines, Live, Silent, data_progress
from ..report.checks import Check, is_text, is_whole, list_of, wrong_in
from ..report.runs import RunData, read_run
from ..report.table import comparison_rows, comparison_table, markdown_table
from ..spec import NOT_PART_OF_THE_HASH, RunSpec, spec_hash
from .folder import folder_name, grid_command, prepare_out, some_of
from .runner import build, describe, execute, load
from .trackers import Tracked, check_trackers

RESUME_AS_IT_WAS = "resume a run as it was asked for, or start another"
JOB: dict[str, Check] = {  # what job.json holds
    "methods": list_of(is_text, 1),
    "seeds": list_of(is_whole, 1),
    "settings": lambda value: isinstance(value, dict),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """What `fedsc run` was asked for: methods and seeds to combine, and the settings of all."""

    methods: list[str]
    seeds: list[int]
    settings: dict[str, Any]

    def specs(self) -> dict[str, RunSpec]:
        """The runs, by the name of their folder."""
        if not self.methods or not self.seeds:
            raise FedscError("nothing to run: give at least one method and one seed")
        specs: dict[str, RunSpec] = {}
        for method, seed in itertools.product(self.methods, self.seeds):
            spec = RunSpec(method=method, seed=seed, **self.settings)
            name = f"{folder_name(method)}-seed{seed}"
            if name in specs:
                raise FedscError(f"{name} is asked for twice: give each method and seed once")
            specs[name] = spec
        return specs


def compare(
    job: Job,
    console: Console,
    out: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    data_dir: Path | None = None,
    quiet: bool = False,
    track: list[str] | None = None,
) -> list[RunData]:
    """Run every method with every seed; each run is a folder `out/METHOD-seedN`.

    Everything that can be wrong with the settings is found before the first run starts.
    """
    check_trackers(track or [])
    specs = job.specs()
    methods = {name: method_from_text(spec.method, spec.dataset) for name, spec in specs.items()}
    first = next(iter(specs.values()))
    out = out or Path("runs") / folder_name(f"{first.dataset}-{first.partition}")
    with data_progress(console) as decoding:
        data = load(first, data_dir, decoding)
    for name, spec in specs.items():
        build(spec, data, methods[name])  # what cannot be built is said before anything is written
    if not resume:
        if not overwrite and is_that_job(out, job):
            begun = {n: spec for n, spec in specs.items() if (out / n / "spec.json").exists()}
            asked = {n: describe(*build(spec, data, methods[n])) for n, spec in begun.items()}
            refuse_to_run_again(out, specs, asked)
        prepare_out(out, overwrite)
    with nothing_left_if_nothing_ran(out):
        if not resume:
            with explain_write_errors(out):
                out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(dataclasses.asdict(job), indent=2)
            write_atomically(out / "job.json", text.encode())
        for name, spec in specs.items():
            refuse_link(out / name)
            if not (out / name / "summary.json").exists():
                progress = choose_progress(quiet, console)
                if track:
                    progress = Tracked(progress, track, out / name)
                gc.collect()  # the last run's models refer to each other, and may fill a GPU
                execute(spec, data, methods[name], None, out / name, progress, resume)

    from ..report.pictures import draw_curves

    try:
        runs = [read_run(out / name) for name in specs]
    except CannotReadError:
        raise
    except FedscError as error:
        raise FedscError(f"{error}; remove it and run it again: fedsc run --resume {out}") from None
    console.print(comparison_table(runs, console.width), crop=False)
    console.print()
    write_atomically(out / "summary.md", markdown_table(*comparison_rows(runs)).encode())
    draw_curves(runs, out / "curves.png")
    console.print(f"Runs in {out}, curves in {out / 'curves.png'}", soft_wrap=True)
    return runs


def is_that_job(out: Path, job: Job) -> bool:
    """Whether `fedsc run` was asked for the same in this folder before."""
    try:
        found = read_json(out / "job.json")
        if wrong_in(found, JOB):
            return False
        before, now = Job(**found).specs(), job.specs()
    except (OSError, FedscError, TypeError):
        return False
    return before.keys() == now.keys() and not any(changed(before[n], now[n]) for n in now)


def refuse_to_run_again(
    out: Path, specs: dict[str, RunSpec], begun: dict[str, dict[str, Any]]
) -> None:
    """Say how far the runs have come that are asked for once more; `begun` describes those that
    have a folder. Data or a method's file that were changed since make others of them."""
    for name, asked in begun.items():
        if read_object(out / name / "spec.json").get("hash") != spec_hash(asked):
            return
    if not begun:
        return
    what = "this very run" if len(specs) == 1 else f"these very {len(specs)} runs"
    rounds = next(iter(specs.values())).rounds
    if all((out / name / "summary.json").exists() for name in specs):
        each = "" if len(specs) == 1 else " each"
        state = f"finished after {rounds} round{'s' * (rounds > 1)}{each}"
        way = f"fedsc results {out} shows the numbers; --overwrite deletes them and runs again"
    else:
        done = sum(min(rounds_written(out / name), rounds) for name in specs)
        state = f"{done} of {rounds * len(specs)} rounds done"
        way = f"to go on, fedsc run --resume {out}"
    raise FedscError(f"{out} holds {what} ({some_of(list(specs))}), {state}: {way}")


def rounds_written(run: Path) -> int:
    try:
        return read_text(run / "metrics.jsonl").count("\n")
    except OSError:  # none yet
        return 0


@contextlib.contextmanager
def nothing_left_if_nothing_ran(out: Path) -> Iterator[None]:
    try:
        yield
    except FedscError as error:
        if not any(out.glob("*/spec.json")):
            with contextlib.suppress(OSError):  # never made, or not empty
                (out / "job.json").unlink(missing_ok=True)
                out.rmdir()
        elif isinstance(error, CannotWriteError):
            raise FedscError(f"{error}; to go on then: fedsc run --resume {out}") from None
        raise
    except KeyboardInterrupt:
        print(f"fedsc: stopped; to go on: fedsc run --resume {out}", file=sys.stderr)
        raise


def read_job(out: Path, given: dict[str, Any]) -> Job:
    """The job of a folder to be resumed. What is given beside must not contradict it, but for where
    and how fast it runs."""
    try:
        found = read_json(out / "job.json")
        wrong = wrong_in(found, JOB)
        if wrong or len(found) > len(JOB):
            raise FedscError(f"{out / 'job.json'} is damaged: {wrong or 'it holds more'}")
        job = Job(**found)
        before = job.specs()
    except OSError:
        raise FedscError(why_no_job(out)) from None
    except TypeError as error:  # an option that RunSpec has not
        raise FedscError(f"{out / 'job.json'} is damaged: {error}") from None
    named = (*given.get("methods", []), given.get("model"))
    refuse_code(out, (*job.methods, job.settings.get("model")), named)
    asked = Job(
        given.pop("methods", job.methods),
        given.pop("seeds", job.seeds),
        {**job.settings, **given},
    )
    now = asked.specs()
    if before.keys() != now.keys():
        raise FedscError(
            f"the runs were {', '.join(before)}, are now {', '.join(now)}: {RESUME_AS_IT_WAS}"
        )
    for name in before:
        for difference in changed(before[name], now[name]):
            raise FedscError(f"{difference}: {RESUME_AS_IT_WAS}")
    return asked


def why_no_job(out: Path) -> str:
    """In place of a job.json that is not there: what to do instead."""
    for folder in (out, out.parent):
        command = grid_command(folder)
        if command is not None:
            return (
                f"{folder} is a folder of `{command}`, which goes on when it is given again: "
                f"{command} ... --out {folder}"
            )
        if folder != out and (folder / "job.json").exists():
            return f"{out} is one run of several: fedsc run --resume {folder}"
    return f"{out} holds no run to resume: it has no job.json"


def changed(before: RunSpec, now: RunSpec) -> list[str]:
    """What makes another run of it, in words."""
    return [
        f"{name} was {was}, is now {is_now}"
        for name, was in dataclasses.asdict(before).items()
        if was != (is_now := getattr(now, name)) and name not in NOT_PART_OF_THE_HASH
    ]


def choose_progress(quiet: bool, console: Console) -> Silent:
    if quiet:
        return Silent()
    return Live(console) if console.is_terminal else Lines()
