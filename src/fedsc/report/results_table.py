"""Any run folders as tables: one for each data set and setting, a row for each method."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from ..errors import FedscError
from .grid_table import (
    as_csv,
    best_and_second,
    cost_blocks,
    level_for_all,
    numbers_of,
    percent_text,
    significance_text,
)
from .runs import RunData, setting_of
from .text_table import Block, TextTable, as_latex, as_markdown

# These follow from the others, from the seed, or do not change a result.
NOT_TOLD_APART_BY = {
    *("seed", "hash", "partition_hash", "label", "code", "format", "data_checksum"),
    *("device", "engine", "slots", "compile", "threads", "client_memory"),
}
FORMATS = ".md, .tex, .csv"

Groups = dict[str, list[RunData]]


def groups_by_setting(runs: list[RunData]) -> dict[str, Groups]:
    """Runs that differ in their seed only, by data set and setting, and by what sets them apart."""
    settings: dict[str, list[RunData]] = {}
    for run in runs:
        settings.setdefault(f"{run.spec['dataset']}, {setting_of(run.spec)}", []).append(run)
    return {title: _groups(members) for title, members in settings.items()}


def _groups(runs: list[RunData]) -> Groups:
    """By the method as it was written, and those options that are not the same in all runs."""
    told_apart = [
        name
        for name in runs[0].spec
        if name not in NOT_TOLD_APART_BY | {"method"}
        and len({json.dumps(run.spec.get(name)) for run in runs}) > 1
    ]
    groups: Groups = {}
    for run in runs:
        words = [run.label, *(f"{name}={run.spec.get(name)}" for name in told_apart)]
        groups.setdefault(", ".join(words), []).append(run)
    return groups


def results_tables(runs: list[RunData], accuracy: float | None = None) -> list[TextTable]:
    tables = []
    for title, groups in groups_by_setting(runs).items():
        means = [statistics.mean(r.summary["last"] for r in group) for group in groups.values()]
        seeds = max(map(len, groups.values()))
        last = [
            (percent_text([100 * run.summary["last"] for run in group], seeds),)
            for group in groups.values()
        ]
        best = [
            (percent_text([100 * statistics.mean(r.summary["best"] for r in group)], 1),)
            for group in groups.values()
        ]
        blocks = [
            Block("last", ("",), last, best_and_second(list(means))),
            Block("best", ("",), best),
        ]
        blocks += cost_blocks(list(groups.values()), accuracy)
        notes = ["Test accuracy in % after the last round and at its best."]
        notes += filter(None, [significance_text(groups)])
        tables.append(TextTable(title, "method", list(groups), blocks, tuple(notes)))
    return tables


def results_file(runs: list[RunData], path: Path, accuracy: float | None = None) -> str:
    """The content of a file of the format that its name ends with."""
    if path.suffix == ".md":
        return "\n".join(map(as_markdown, results_tables(runs, accuracy)))
    if path.suffix == ".tex":
        tables = results_tables(runs, accuracy)
        return "% \\usepackage{booktabs}\n\n" + "\n".join(map(as_latex, tables))
    if path.suffix == ".csv":
        return as_csv(_csv_lines(runs, accuracy))
    raise FedscError(f"cannot write {path}: '{path.suffix}' is not one of {FORMATS}")


def _csv_lines(runs: list[RunData], accuracy: float | None) -> list[dict[str, Any]]:
    lines = []
    for title, groups in groups_by_setting(runs).items():
        everything = [run for group in groups.values() for run in group]
        target = accuracy if accuracy is not None else level_for_all(everything)
        for name, group in groups.items():
            last = [100 * run.summary["last"] for run in group]
            lines.append(
                {
                    "setting": title,
                    "method": name,
                    "seeds": len(group),
                    "mean": statistics.mean(last),
                    "std": statistics.stdev(last) if len(last) > 1 else None,
                    **numbers_of(group, target),
                }
            )
    return lines
