"""Any run folders as tables: one for each data set and setting, a row for each method."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import FedscError
from ..method import Method
from ..methods import method_from_text, method_to_text
from ..options import option_text, options_of
from ..plugins import is_path
from ..spec import RunSpec
from .grid_table import (
    as_csv,
    best_and_second,
    comparable_means,
    cost_blocks,
    level_for_all,
    numbers_of,
    percent_text,
    significance_text,
)
from .runs import RunData, setting_of
from .table import diverged
from .text_table import Block, TextTable, as_latex, as_markdown

# These follow from the others, from the seed, or do not change a result.
NOT_TOLD_APART_BY = {
    *("seed", "hash", "partition_hash", "label", "code", "format", "data_checksum"),
    *("device", "engine", "slots", "compile", "threads", "client_memory", "calibrated"),
}
FORMATS = ".md, .tex, .csv"
# What `--calibrated` measures besides.
CLASSIFIERS = {
    "calibrated": "by the linear discriminant of fedsc+",
    "summed": "by the sum of a linear discriminant and the averaged classifier, like fedsc+",
    "averaged": "by the averaged classifier, where the method uses another",
}
DEFAULTS = {opt.name: opt.default for opt in options_of(RunSpec)}

Groups = dict[str, list[RunData]]


def groups_by_setting(runs: list[RunData]) -> dict[str, Groups]:
    """Runs that differ in their seed only, by data set and setting, and by what sets them apart."""
    settings = {
        title: {", ".join(words): group for words, group in told_apart(members).items()}
        for title, members in by_setting(runs).items()
    }
    for groups in settings.values():
        for group in groups.values():
            refuse_same_seed(group)
    return settings


def by_setting(runs: list[RunData]) -> dict[str, list[RunData]]:
    settings: dict[str, list[RunData]] = {}
    for run in runs:
        settings.setdefault(f"{run.spec['dataset']}, {setting_of(run.spec)}", []).append(run)
    return settings


def told_apart(
    runs: list[RunData], besides: tuple[str, ...] = ()
) -> dict[tuple[str, ...], list[RunData]]:
    """By method, and by those options that are not the same in all runs, where not the default.

    `besides` names options that the caller looks at itself.
    """
    differ = [
        name
        for name in dict.fromkeys(name for run in runs for name in run.spec)
        if name not in {*NOT_TOLD_APART_BY, "method", *besides}
        and len({json.dumps(value_of(run, name)) for run in runs}) > 1
    ]
    groups: dict[tuple[str, ...], list[RunData]] = {}
    for run in runs:
        values = ((name, value_of(run, name)) for name in differ)
        words = [f"{n}={option_text(v)}" for n, v in values if v != DEFAULTS.get(n)]
        groups.setdefault((method_of(run), *words), []).append(run)
    return groups


def value_of(run: RunData, name: str) -> Any:
    """Of an option; what an older run does not name was as it is now by default."""
    return run.spec.get(name, DEFAULTS.get(name))


def method_of(run: RunData) -> str:
    """The method with the options that are not the default today.

    What the user wrote may mean something else by now: a run keeps the values, not the defaults.
    """
    method = recorded_method(run)
    if method is None:
        return run.label
    name, *words = (word.strip() for word in run.label.split(","))
    dataset = run.spec["dataset"]
    if not all("=" in word for word in words) and method_from_text(run.label, dataset) == method:
        return run.label  # a preset says more than its options
    return method_to_text(method, dataset, name)


def recorded_method(run: RunData) -> Method | None:
    """None where this version has no such method or option; a user's own file is not run."""
    values = {name: value for name, value in run.spec["method"].items() if name != "name"}
    if is_path(run.label):
        return None
    try:
        return dataclasses.replace(method_from_text(run.label, run.spec["dataset"]), **values)
    except (FedscError, TypeError):  # TypeError: an option that has gone
        return None


def any_measured(runs: Iterable[RunData], classifier: str) -> bool:
    """Whether one of the runs was measured by one of the CLASSIFIERS."""
    return any(classifier in run.records[-1] for run in runs)


def measured(runs: list[RunData], classifier: str) -> list[float]:
    """Accuracy in % by it after the last round, of those runs of which it is known."""
    found = (accuracy_by(classifier, run, run.records[-1]) for run in runs)
    return [100 * value for value in found if value is not None]


def accuracy_by(classifier: str, run: RunData, record: dict[str, Any]) -> float | None:
    """Of a round, as measured; what fedsc+ is tested with need not be measured besides."""
    method = run.spec["method"]
    if method["name"] == "fedsc+" and method.get("calibration"):
        tested = {0.0: "calibrated", 1.0: "summed"}.get(method.get("averaged_weight", 0.0))
        if classifier == tested:
            return record.get(classifier, record["accuracy"])
    return record.get(classifier)


def measured_text(runs: list[RunData], classifier: str, expected: int) -> str:
    found = measured(runs, classifier)
    return percent_text([*found], expected) if found else "-"


def refuse_same_seed(runs: list[RunData]) -> None:
    """In one row, where each is to be a seed of its own."""
    of_seed: dict[int, RunData] = {}
    for run in runs:
        twin = of_seed.setdefault(run.spec["seed"], run)
        if twin is not run:
            raise FedscError(f"{twin.path} and {run.path} are the same run: take one out")


def results_tables(runs: list[RunData], accuracy: float | None = None) -> list[TextTable]:
    tables = []
    for title, groups in groups_by_setting(runs).items():
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
            Block("last", ("",), last, best_and_second(comparable_means([*groups.values()]))),
            Block("best", ("",), best),
        ]
        notes = ["Test accuracy in % after the last round and at its best."]
        everything = [run for group in groups.values() for run in group]
        for name, meaning in CLASSIFIERS.items():
            if any_measured(everything, name):
                texts = [(measured_text(group, name, seeds),) for group in groups.values()]
                blocks.append(Block(name, ("",), texts))
                notes.append(f"{name.capitalize()}: after the last round {meaning}.")
        if any(text.endswith("]") for block in blocks for row in block.rows for text in row):
            notes.append("[2/3]: of two seeds, where a row has three.")
        blocks += cost_blocks(list(groups.values()), accuracy)
        notes += filter(None, [significance_text(groups)])
        names = [name + diverged(group) for name, group in groups.items()]
        tables.append(TextTable(title, "method", names, blocks, tuple(notes)))
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
    others = [name for name in CLASSIFIERS if any_measured(runs, name)]
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
                    **_means_by_others(group, others),
                    **numbers_of(group, target),
                }
            )
    return lines


def _means_by_others(runs: list[RunData], classifiers: list[str]) -> dict[str, float | None]:
    """Each beside the number of seeds that were measured by it."""
    means: dict[str, float | None] = {}
    for name in classifiers:
        found = measured(runs, name)
        means |= {name: statistics.mean(found) if found else None, f"{name}_seeds": len(found)}
    return means
