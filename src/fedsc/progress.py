"""What a person sees while a run goes on: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SECONDS_BETWEEN_LINES = 15.0


def lost_clients(record: dict[str, Any]) -> str:
    """`2 of 10 lost`, or nothing where all have sent what can be used."""
    lost = sum(len(record.get(name, [])) for name in ("dropped", "late", "rejected"))
    return f"{lost} of {len(record['cohort'])} lost" if lost else ""


class Silent:
    """Shows nothing; the base of the two that do."""

    def start(self, label: str, num_rounds: int, images_per_round: int, done: int) -> None:
        """A run begins, or goes on after `done` rounds."""

    def images(self, number: int) -> None:
        """So many more images were trained on."""

    def round_done(self, record: dict[str, Any]) -> None:
        """A round has ended, with this record."""

    def finish(self) -> None:
        """The run has ended, well or not."""


class Live(Silent):
    """One bar per run: round, accuracy, images per second, time left."""

    def __init__(self, console: Console) -> None:
        self.bar = Progress(
            TextColumn("{task.fields[label]}", style="bold"),
            BarColumn(),
            TextColumn("round {task.fields[round]}/{task.fields[rounds]}"),
            TextColumn("accuracy {task.fields[accuracy]}"),
            TextColumn("{task.fields[lost]}", style="yellow"),
            TextColumn("{task.fields[rate]} images/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )

    def start(self, label: str, num_rounds: int, images_per_round: int, done: int) -> None:
        self.images_per_round, self.seen, self.began = images_per_round, 0, time.perf_counter()
        self.bar.start()
        self.task = self.bar.add_task(
            "",
            total=num_rounds * images_per_round,
            completed=done * images_per_round,
            label=label,
            round=done,
            rounds=num_rounds,
            accuracy="  --  ",
            rate="--",
            lost="",
        )

    def images(self, number: int) -> None:
        self.seen += number
        rate = self.seen / max(time.perf_counter() - self.began, 1e-6)
        self.bar.update(self.task, advance=number, rate=f"{rate:,.0f}")

    def round_done(self, record: dict[str, Any]) -> None:
        self.bar.update(
            self.task,
            completed=record["round"] * self.images_per_round,
            round=record["round"],
            accuracy=f"{record['accuracy']:.2%}",
            lost=lost_clients(record),
        )

    def finish(self) -> None:
        self.bar.stop()


class Lines(Silent):
    """A line per round, and within a long round a line now and then."""

    def start(self, label: str, num_rounds: int, images_per_round: int, done: int) -> None:
        self.label, self.num_rounds, self.images_per_round = label, num_rounds, images_per_round
        self.round, self.first, self.seen = done, done, 0
        self.began = self.last_line = time.perf_counter()

    def images(self, number: int) -> None:
        self.seen += number
        now = time.perf_counter()
        if now - self.last_line >= SECONDS_BETWEEN_LINES:
            share = min(self.seen / self.images_per_round, 1)
            self.say(f"round {self.round + 1}/{self.num_rounds}  {share:.0%} of its images")

    def round_done(self, record: dict[str, Any]) -> None:
        self.round, self.seen = record["round"], 0
        timing = record["timing"]
        each = (time.perf_counter() - self.began) / (self.round - self.first)
        left = each * (self.num_rounds - self.round)
        lost = lost_clients(record)
        self.say(
            f"round {self.round}/{self.num_rounds}  accuracy {record['accuracy']:.2%}  "
            + (f"{lost}  " if lost else "")
            + f"{timing['images_per_second']:,.0f} images/s  {left:.0f} s left"
        )

    def say(self, text: str) -> None:
        self.last_line = time.perf_counter()
        print(f"{self.label}  {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def data_progress(console: Console) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for each thing that is fetched or decoded, where there is a terminal."""
    bars: dict[str, TaskID] = {}
    with Progress(console=console, disable=not console.is_terminal) as display:

        def show(what: str, done: int, total: int | None) -> None:
            if what not in bars:
                bars[what] = display.add_task(what, total=total)
                if not console.is_terminal:
                    print(what, file=sys.stderr, flush=True)
            display.update(bars[what], completed=done, total=total)

        yield show
