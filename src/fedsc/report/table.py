"""The comparison of methods as a table: one row per method, mean and spread over seeds."""

from __future__ import annotations

import math
import re
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


def spent(values: list[Number]) -> str:
    """The epsilon of the seed that spent most; something that left without noise is infinite."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    return "∞" if math.isinf(max(numbers)) else f"{max(numbers):.3g}"


def last_epsilon(run: RunData) -> Number:
    record = run.records[-1]
    if "epsilon" not in record:  # not a private run
        return None
    return math.inf if record["epsilon"] is None else record["epsilon"]


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
    ("calibrated", last_value("calibrated"), percent_with_spread),
    ("summed", last_value("summed"), percent_with_spread),
    ("worst\nclient", last_value("client_worst"), percent),
    ("ECE", last_value("ece"), percent),
    ("ε", last_epsilon, spent),
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


def comparison_table(runs: list[RunData], width: int) -> Table:
    """For a terminal of this width; methods with many options take several lines if they must.

    Where even that is too wide, so is the table: print it with `crop=False`. Numbers cut short
    would be worse than lines that the terminal breaks.
    """
    spec = runs[0].spec
    names, rows = comparison_rows(runs)
    clients = ", ".join([f"{spec['clients']} clients", *attack_of(spec)])
    rounds = f"{number(len(runs[0].records), 'round')} of {number(spec['epochs'], 'epoch')}"
    title = f"{spec['dataset']}, {spec['partition']}, {clients}, {rounds}, test accuracy in %"
    lines = [
        max(map(len, "\n".join(cells).split("\n"))) for cells in zip(names, *rows, strict=True)
    ]
    gaps = 2 * (len(names) - 1)
    room = width - sum(lines[1:]) - gaps
    rows = [[at_commas(row[0], room), *row[1:]] for row in rows]
    longest = max(len(line) for row in rows for line in row[0].split("\n"))
    needed = max(longest, len("method")) + sum(lines[1:]) + gaps
    # Narrow gaps and no edge: the table has to fit into 80 columns.
    table = Table(
        title=f"{title}\n",
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
        width=needed if needed > width else None,
    )
    for name in names:
        if name == "method":
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def at_commas(text: str, room: int) -> str:
    """Lines of at most `room` characters, broken after commas; a longer part stays whole."""
    first, *parts = re.findall(r"[^,]*,|[^,]+$", text) or [text]
    lines = [first]
    for part in parts:
        if len(lines[-1]) + len(part) <= room:
            lines[-1] += part
        else:
            lines.append(part)
    return "\n".join(lines)


def markdown_table(names: list[str], rows: list[list[str]]) -> str:
    names = [name.replace("\n", " ") for name in names]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"
