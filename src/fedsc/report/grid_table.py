"""The results of a grid: ours beside the paper's, significance, and what an accuracy costs.

Made from run folders only; a cell without a finished run is missing, never zero.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from ..experiments.grids import SCALES, Column, Grid, Row, ordered
from .runs import RunData
from .statistics import (
    ACCURACY_LEVELS,
    bytes_to,
    mean_and_spread,
    paired_by_seed,
    paired_p_value,
    rounds_to,
    seconds_to,
)
from .text_table import Block, TextTable, as_latex, as_markdown

MISSING = "missing"
NEVER = "never"


@dataclasses.dataclass(frozen=True)
class Results:
    """The finished runs of a grid, by row, column and seed."""

    grid: Grid
    seeds: list[int]
    runs: dict[tuple[str, str, int], RunData]
    wanted: int  # runs that the grid asks for
    missing: int  # of them, those that are not there

    def of(self, row: Row, column: Column) -> list[RunData]:
        found = (self.runs.get((row.name, column.key, seed)) for seed in self.seeds)
        return [run for run in found if run is not None]

    def values(self, row: Row, column: Column) -> list[float | None]:
        """What the column shows, by seed: % or rounds; None where an accuracy is never reached."""
        if column.settings is None:
            return list(self._group_means(row, column))
        if column.rounds_to is not None:
            return [rounds_to(run, column.rounds_to) for run in self.of(row, column)]
        return [100 * run.summary["last"] for run in self.of(row, column)]

    def _group_means(self, row: Row, column: Column) -> Iterable[float]:
        """The mean over a group's columns, for each seed that has them all."""
        others = [other for other in self.columns() if other.group == column.group]
        for seed in self.seeds:
            found = [self.runs.get((row.name, other.key, seed)) for other in others]
            runs = [run for run in found if run is not None]
            if len(runs) == len(others):
                yield statistics.mean(100 * run.summary["last"] for run in runs)

    def columns(self) -> list[Column]:
        """Those that show an accuracy of runs of their own."""
        return [c for c in self.grid.columns if c.settings is not None and c.rounds_to is None]


def result_tables(results: Results) -> list[TextTable]:
    """A table for each group of columns."""
    grid = results.grid
    single = results.columns() if len(results.columns()) == 1 else []
    notes = [significance_text(groups_in(results, column)) for column in single]
    tables = []
    for group in ordered(column.group for column in grid.columns):
        columns = [column for column in grid.columns if column.group == group]
        tables.append(
            TextTable(
                title=columns[0].group_heading,
                row_heading=grid.row_heading,
                row_names=[row.heading for row in grid.rows],
                blocks=[_block(results, column) for column in columns],
                notes=tuple(note for note in notes if note),
            )
        )
    return tables


def _block(results: Results, column: Column) -> Block:
    grid = results.grid
    rows: list[tuple[str, ...]] = []
    values = [results.values(row, column) for row in grid.rows]
    show = rounds_text if column.rounds_to is not None else percent_text
    has_paper = any((row.name, column.key) in grid.paper for row in grid.rows)
    for row, found in zip(grid.rows, values, strict=True):
        text = show(found, len(results.seeds))
        if any(run.records[-1].get("diverged") for run in results.of(row, column)):
            text += "*"
        if not has_paper:
            rows.append((text,))
            continue
        paper = grid.paper.get((row.name, column.key))
        rows.append((text, _paper_text(column, paper), _difference_text(column, found, paper)))
    means = only_most([_mean(found) for found in values], [len(found) for found in values])
    return Block(
        heading=column.heading,
        names=("ours", "paper", "diff.") if has_paper else ("",),
        rows=rows,
        marks=best_and_second(means, lower_is_better=column.rounds_to is not None),
    )


def _paper_text(column: Column, paper: float | None) -> str:
    if paper is None:
        return "-"
    return f"{paper:.0f}" if column.rounds_to is not None else f"{paper:.2f}"


def _difference_text(column: Column, values: list[float | None], paper: float | None) -> str:
    mean = _mean(values)
    if mean is None or paper is None:
        return "-"
    return f"{mean - paper:+.1f}" if column.rounds_to is not None else f"{mean - paper:+.2f}"


def _mean(values: list[float | None]) -> float | None:
    """None where there is no value, or one that was never reached."""
    numbers = [value for value in values if value is not None]
    return statistics.mean(numbers) if numbers and len(numbers) == len(values) else None


def percent_text(values: list[float | None], expected: int) -> str:
    """`88.13 ± 0.40`; `[2/3]` behind it where seeds are missing."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return MISSING
    mean, spread = mean_and_spread(numbers)
    text = f"{mean:.2f}" if spread is None else f"{mean:.2f} ± {spread:.2f}"
    return text + seeds_text(len(numbers), expected)


def rounds_text(values: list[float | None], expected: int) -> str:
    """`35.3 ± 2.1`, or `35` of one seed."""
    decimals = 1 if len(values) > 1 else 0
    return reached_text(values, expected, lambda number: f"{number:.{decimals}f}", spread=True)


def reached_text(
    values: list[float | None], expected: int, show: Callable[[float], str], spread: bool = False
) -> str:
    """What the runs that reach an accuracy needed; `(2/3)` behind it if only two of three do."""
    if not values:
        return MISSING
    numbers = [value for value in values if value is not None]
    if not numbers:
        return NEVER + seeds_text(len(values), expected)
    mean, deviation = mean_and_spread(numbers)
    text = show(mean)
    if spread and deviation is not None:
        text += f" ± {show(deviation)}"
    if len(numbers) < len(values):
        text += f" ({len(numbers)}/{len(values)})"
    return text + seeds_text(len(values), expected)


def seeds_text(found: int, expected: int) -> str:
    return "" if found >= expected else f" [{found}/{expected}]"


def best_and_second(means: list[float | None], lower_is_better: bool = False) -> list[str]:
    """Marks by row: the best in bold and the second underlined, as in the paper; ties share."""
    known = sorted({m for m in means if m is not None}, reverse=not lower_is_better)
    if len(known) < 2:
        return ["" for _ in means]
    names = {known[0]: "best", known[1]: "second"}
    return ["" if mean is None else names.get(mean, "") for mean in means]


def only_most(means: list[float | None], amounts: list[int]) -> list[float | None]:
    """The means of those rows that have the most of something, seeds or rounds, and None for the
    others: a lucky seed is no better than three."""
    most = max((n for m, n in zip(means, amounts, strict=True) if m is not None), default=0)
    return [m if n == most else None for m, n in zip(means, amounts, strict=True)]


def comparable_means(groups: list[list[RunData]]) -> list[float | None]:
    """Of the last accuracies in %, where the runs came furthest, and of these where the most seeds
    are; None for the others."""
    means = [
        statistics.mean(100 * run.summary["last"] for run in runs) if runs else None
        for runs in groups
    ]
    rounds = [min((run.records[-1]["round"] for run in runs), default=0) for runs in groups]
    return only_most(only_most(means, rounds), [len(runs) for runs in groups])


# Significance -------------------------------------------------------------------------------------


def significance_table(results: Results) -> TextTable | None:
    """For each of several columns the best row against the second, paired over seeds."""
    if len(results.columns()) < 2:
        return None
    names: list[str] = []
    rows: list[tuple[str, str, str, str]] = []
    for column in results.columns():
        compared = best_against_second(groups_in(results, column))
        if compared is not None:
            names.append(column.title)
            rows.append(compared)
    if not rows:
        return None
    headings = "best", "second", "ahead by", "p"
    blocks = [
        Block(heading, ("",), [(row[index],) for row in rows])
        for index, heading in enumerate(headings)
    ]
    note = "p: two-sided paired t-test on the last accuracies of the seeds that both have."
    return TextTable("Best against second", "column", names, blocks, (note,))


def groups_in(results: Results, column: Column) -> dict[str, list[RunData]]:
    return {row.heading: results.of(row, column) for row in results.grid.rows}


def significance_text(groups: dict[str, list[RunData]]) -> str:
    """`fedsc over fedavg by 1.13 points`, and whether that means anything."""
    compared = best_against_second(groups)
    if compared is None:
        return ""
    best, second, by, p = compared
    if p[0].isdigit():
        p = f"paired t-test p = {p}"
    elif p[0] == "<":
        p = f"paired t-test p {p}"
    return f"Best against second: {best} over {second} by {by} points, {p}."


def best_against_second(groups: dict[str, list[RunData]]) -> tuple[str, str, str, str] | None:
    """Names of the two best groups, the mean difference in points and p in words, over the seeds
    that both have; None where there are no two, or none that they share."""
    means = dict(zip(groups, comparable_means(list(groups.values())), strict=True))
    known = {name: mean for name, mean in means.items() if mean is not None}
    if len(known) < 2:
        return None
    best, second = sorted(known, key=lambda name: -known[name])[:2]
    pairs = paired_by_seed(groups[best], groups[second])
    if not pairs:
        return None
    p = paired_p_value(groups[best], groups[second])
    if len(pairs) < 2:
        text = "one seed"
    elif p is None:
        text = "no spread"
    else:
        text = p_text(p)
    return best, second, f"{100 * statistics.mean(a - b for a, b in pairs):.2f}", text


def p_text(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


# Costs --------------------------------------------------------------------------------------------


def cost_tables(results: Results, accuracy: float | None = None) -> list[TextTable]:
    """Rounds to 20, 40, 60 and 80%, and bytes and seconds to one accuracy, for each column."""
    tables = []
    for column in results.columns():
        groups = groups_in(results, column)
        title = f"What an accuracy costs: {column.title}".removesuffix(": ")
        tables.append(
            TextTable(
                title,
                results.grid.row_heading,
                list(groups),
                cost_blocks(list(groups.values()), accuracy, len(results.seeds)),
            )
        )
    return tables


def cost_blocks(
    groups: list[list[RunData]], accuracy: float | None, expected: int = 0
) -> list[Block]:
    """One row per group of runs, over their seeds."""
    runs = [run for group in groups for run in group]
    target = accuracy if accuracy is not None else level_for_all(runs)
    costs: list[tuple[str, Callable[[RunData], float | None], Callable[[float], str]]] = [
        (
            f"rounds\nto {100 * level:g}%",
            functools.partial(rounds_to, accuracy=level),
            "{:.1f}".format,
        )
        for level in ACCURACY_LEVELS
    ]
    for name, value_of in (("MB", _megabytes_to), ("seconds", seconds_to)):
        measure = functools.partial(value_of, accuracy=target)
        costs.append((f"{name}\nto {100 * target:g}%", measure, three_digits))
    return [
        Block(
            heading,
            ("",),
            [(reached_text([value_of(r) for r in group], expected, show),) for group in groups],
        )
        for heading, value_of, show in costs
    ]


def three_digits(number: float) -> str:
    """`0.123`, `12.3`, `1,234`"""
    if abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:#.3g}".rstrip(".")


def level_for_all(runs: list[RunData]) -> float:
    """The highest of 20, 40, 60 and 80% that every run reaches, so that all can be compared."""
    reached = [
        level for level in ACCURACY_LEVELS if all(rounds_to(run, level) is not None for run in runs)
    ]
    return max(reached, default=min(ACCURACY_LEVELS))


def _megabytes_to(run: RunData, accuracy: float) -> float | None:
    found = bytes_to(run, accuracy)
    return None if found is None else found / 1e6


# Files --------------------------------------------------------------------------------------------


def notes_of(results: Results) -> list[str]:
    """What a reader has to know beside the numbers."""
    grid, seeds = results.grid, len(results.seeds)
    notes = []
    if grid.scale:
        notes.append(f"Scale {grid.scale}: {SCALES[grid.scale]}.")
        if grid.scale != "paper" and grid.paper:
            notes.append("The paper's numbers are of the paper's scale.")
    over = f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One seed"
    notes.append(f"{over}; accuracy of the global model on the test set after the last round.")
    if results.missing:
        some = " ([2/3]: two of three seeds are there)" if seeds > 1 else ""
        notes.append(f"Missing: {results.missing} of {results.wanted} runs{some}.")
    if any(run.records[-1].get("diverged") for run in results.runs.values()):
        notes.append("* has diverged.")
    return notes


def markdown_page(results: Results, accuracy: float | None = None) -> str:
    parts = [f"## {results.grid.title}\n", *(f"{note}\n" for note in notes_of(results))]
    parts += [as_markdown(table) for table in _all_tables(results, accuracy)]
    return "\n".join(parts)


def latex_page(results: Results, accuracy: float | None = None) -> str:
    tables = _all_tables(results, accuracy)
    title = results.grid.title
    titles = [f"{title}. {table.title}".removesuffix(". ") for table in tables]
    tables = [dataclasses.replace(t, title=words) for t, words in zip(tables, titles, strict=True)]
    head = "% \\usepackage{booktabs}\n" + "".join(f"% {note}\n" for note in notes_of(results))
    return head + "\n" + "\n".join(map(as_latex, tables))


def _all_tables(results: Results, accuracy: float | None) -> list[TextTable]:
    significance = significance_table(results)
    middle = [significance] if significance is not None else []
    return [*result_tables(results), *middle, *cost_tables(results, accuracy)]


def csv_page(results: Results, accuracy: float | None = None) -> str:
    """A line for each cell, with every number; what is missing is empty."""
    lines = []
    for column in results.grid.columns:
        everything = [run for row in results.grid.rows for run in results.of(row, column)]
        target = accuracy if accuracy is not None else level_for_all(everything)
        for row in results.grid.rows:
            values = results.values(row, column)
            numbers = [value for value in values if value is not None]
            mean, spread = mean_and_spread(numbers) if numbers else (None, None)
            paper = results.grid.paper.get((row.name, column.key))
            runs = results.of(row, column)
            line: dict[str, Any] = {
                "grid": results.grid.name,
                "scale": results.grid.scale,
                "group": column.group,
                "column": column.name,
                "row": row.name,
                "measure": "accuracy" if column.rounds_to is None else "rounds",
                "seeds": len(values),
                "seeds_missing": len(results.seeds) - len(values),
                "mean": mean,
                "std": spread,
                "paper": paper,
                "difference": None if mean is None or paper is None else mean - paper,
                **numbers_of(runs, target),
            }
            lines.append(line)
    return as_csv(lines)


def numbers_of(runs: list[RunData], target: float) -> dict[str, float | None]:
    """Further means over seeds, each None unless every run has it."""
    found: dict[str, float | None] = {
        "best": _mean([100 * run.summary["best"] for run in runs]),
        "mean_last_10": _mean([100 * run.summary["mean_last_10"] for run in runs]),
    }
    for level in ACCURACY_LEVELS:
        found[f"rounds_to_{100 * level:g}"] = _mean([rounds_to(run, level) for run in runs])
    found["cost_accuracy"] = 100 * target if runs else None
    found["megabytes_to"] = _mean([_megabytes_to(run, target) for run in runs])
    found["seconds_to"] = _mean([seconds_to(run, target) for run in runs])
    found["diverged"] = sum(bool(run.records[-1].get("diverged")) for run in runs)
    return found


def as_csv(lines: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({k: round(v, 6) if isinstance(v, float) else v for k, v in line.items()})
    return text.getvalue()
