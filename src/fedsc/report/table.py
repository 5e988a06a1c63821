"""The comparison of methods as a table: one row per method, mean and spread over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from rich import box
from rich.table import Table

from .runs import RunData, attack_of, by_label

Number = float | None


def percent(values: list[Number]) -> str:
    """`88.13`: the mean over seeds."""
    numbers = [100 * value for value in values if value is not None]
    return f"{statistics.mean(numbers):.2f}" if numbers else "-"


def short_percent(values: list[Number]) -> str:
    """`4.2`, and nothing is zero."""
    return f"{statistics.mean(100 * (value or 0) for value in values):.1f}"


def percent_with_spread(values: list[Number]) -> str:
    """`88.13 ± 0.40`: mean and standard deviation over seeds."""
    numbers = [100 * value for value in values if value is not None]
    spread = f" ± {statistics.stdev(numbers):.2f}" if len(numbers) > 1 else ""
    return percent(values) + spread


def megabytes(values: list[Number]) -> str:
    mean = statistics.mean(value for value in values if value is not None) / 1e6
    return f"{mean:.2f}" if mean < 10 else f"{mean:.0f}"


def last_value(name: str) -> Callable[[RunData], Number]:
    return lambda run: run.records[-1].get(name)


def seconds_per_round(run: RunData) -> float:
    """The median, without the first round, which pays for warming up."""
    records = run.records[1:] or run.records
    return statistics.median(record["timing"]["seconds"] for record in records)


def lost_share(run: RunData) -> Number:
    """Of all the clients that were to take part in a round: not there, late or rejected."""
    names = "dropped", "late", "rejected"
    lost = sum(len(record.get(name, [])) for record in run.records for name in names)
    asked = sum(len(record.get("cohort", [])) for record in run.records)
    return lost / asked if lost and asked else None


Column = tuple[str, Callable[[RunData], Number], Callable[[list[Number]], str]]
COLUMNS: list[Column] = [
    ("last", lambda run: run.summary["last"], percent_with_spread),
    ("± 95%", last_value("accuracy_ci95"), percent),
    ("best", lambda run: run.summary["best"], percent),
    ("mean of\nlast 10", lambda run: run.summary["mean_last_10"], percent),
    ("head", last_value("head"), percent),
    ("middle", last_value("middle"), percent),
    ("tail", last_value("tail"), percent),
    ("nearest\nproto", last_value("nearest_prototype"), percent),
    ("worst\nclient", last_value("client_worst"), percent),
    ("ECE", last_value("ece"), percent),
    ("lost", lost_share, short_percent),
    ("MB\nup", last_value("bytes_up"), megabytes),
    ("MB\ndown", last_value("bytes_down"), megabytes),
]


def diverged(runs: list[RunData]) -> str:
    return " (diverged)" if any(run.records[-1].get("diverged") for run in runs) else ""


def comparison_rows(runs: list[RunData]) -> tuple[list[str], list[list[str]]]:
    """Column names and cells of the comparison; columns without any number are left out."""
    groups = by_label(runs)
    names = ["method"]
    rows = [[label + diverged(group)] for label, group in groups.items()]
    for name, value_of, show in COLUMNS:
        values = [[value_of(run) for run in group] for group in groups.values()]
        if all(value is None for group in values for value in group):
            continue
        names.append(name)
        for row, group in zip(rows, values, strict=True):
            row.append(show(group))
    # A time is a ratio within one table: machines differ, and so does the same one from day to day.
    seconds = [statistics.mean(map(seconds_per_round, group)) for group in groups.values()]
    base = seconds[list(groups).index("fedavg")] if "fedavg" in groups else min(seconds)
    names.append("time")
    for row, value in zip(rows, seconds, strict=True):
        row.append(f"×{value / base:.2f}")
    return names, rows


def comparison_table(runs: list[RunData]) -> Table:
    """For the terminal."""
    spec = runs[0].spec
    names, rows = comparison_rows(runs)
    clients = ", ".join([f"{spec['clients']} clients", *attack_of(spec)])
    title = (
        f"{spec['dataset']}, {spec['partition']}, {clients}, "
        f"{len(runs[0].records)} rounds of {spec['epochs']} epochs, test accuracy in %"
    )
    # Narrow gaps: the table has to fit into 80 columns.
    table = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for name in names:
        if name == "method":
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(names: list[str], rows: list[list[str]]) -> str:
    names = [name.replace("\n", " ") for name in names]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"
