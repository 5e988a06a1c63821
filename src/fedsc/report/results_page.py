"""Tables within a page of prose, made from run folders: `fedsc results --fill docs/results.md`.

    <!-- comparison: results/cifar10-nid1_0.2 -->
    all that stands here is replaced
    <!-- end -->

Before the colon stands the kind of the block, behind it one or more folders with runs. With
`by summed` after the kind, the accuracy is that of another classifier, from `--calibrated`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import FedscError, unknown
from ..experiments.folder import folder_name
from ..experiments.grids import grid
from ..files import read_object, write_atomically
from ..method import Method
from ..methods import METHODS, changed_options
from ..models import default_model
from ..options import option_text, options_of
from ..spec import NOT_PART_OF_THE_HASH, RunSpec
from .grid_table import (
    best_and_second,
    comparable_means,
    only_most,
    p_text,
    percent_text,
    rounds_text,
    seeds_text,
)
from .results_table import (
    CLASSIFIERS,
    accuracy_by,
    any_measured,
    by_setting,
    measured_text,
    recorded_method,
    refuse_same_seed,
    told_apart,
    value_of,
)
from .runs import RunData, find_runs
from .statistics import ACCURACY_LEVELS, paired_by_seed, paired_p_value, rounds_to
from .table import Number, diverged
from .text_table import Block, TextTable, as_markdown

OPENING = re.compile(r"<!-- *([\w-]+)(?: by ([\w-]+))?: *(.*?) *-->")
CLOSING = "<!-- end -->"
NOTHING = "-"
SEARCH_ROUNDS = (5, 10, 20, 30, 40, 60, 80, 100)
FEWEST_SEEDS = 3  # for a p-value
LINE = 100  # characters of a command
FAIRNESS = {  # what an accuracy hides, by name in the metrics
    "client_worst": "worst client",
    "ece": "ECE",
    "head": "head",
    "middle": "middle",
    "tail": "tail",
}
NOT_IN_A_SETTING = (  # what `setting_of` leaves out, and a reader wants to know
    *("train_limit", "norm", "batch_size", "lr", "momentum", "weight_decay", "clip_norm"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """Runs that differ in their seed only, and came equally far."""

    method: str  # with the options that are not its default
    options: tuple[str, ...]  # of the run, where they set it apart from others
    rounds: str
    runs: list[RunData]

    @property
    def name(self) -> str:
        return ", ".join([self.method, *self.options]) + diverged(self.runs)


# The page -----------------------------------------------------------------------------------------


def fill_page(path: Path) -> str:
    """Write the blocks of a page anew; returns a line that says what was done."""
    try:
        before = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FedscError(f"cannot read {path}: {error}; give a page in Markdown") from None
    try:
        after = filled(before)
    except FedscError as error:
        raise FedscError(f"{path}, {error}") from None
    if CLOSING not in before:
        raise FedscError(
            f"{path} has no block to fill: write a line <!-- comparison: FOLDER --> and {CLOSING}"
        )
    if after == before:
        return f"{path} is up to date"
    write_atomically(path, after.encode())
    return f"{path} is filled anew"


def filled(text: str) -> str:
    """The page with the content of each block made from its run folders."""
    lines: list[str] = []
    opened: tuple[int, str] | None = None  # line and content of the block that is open
    for number, line in enumerate(text.splitlines(), 1):
        opening = OPENING.fullmatch(line.strip())
        if opening and opened:
            raise not_closed(opened[0])
        if opening:
            try:
                opened = number, block(opening[1], opening[3].split(), opening[2])
            except FedscError as error:
                raise FedscError(f"line {number}: {error}") from None
            lines.append(line)
        elif line.strip() == CLOSING:
            if opened is None:
                raise FedscError(
                    f"line {number}: {CLOSING} closes nothing; a block begins with a line such as "
                    "<!-- comparison: results/cifar10-nid1_0.2 -->"
                )
            lines += ["", opened[1].strip("\n"), "", line]
            opened = None
        elif opened is None:
            lines.append(line)
    if opened:
        raise not_closed(opened[0])
    return "\n".join(lines) + "\n"


def not_closed(line: int) -> FedscError:
    return FedscError(f"line {line}: the block is not closed; write {CLOSING} below it")


def block(kind: str, folders: list[str], classifier: str | None = None) -> str:
    kinds: dict[str, Callable[[list[RunData]], str]] = {
        "comparison": comparison,
        "seeds": by_seed,
        "search": search,
        "speed": speed,
        "fairness": fairness,
        "commands": commands,
    }
    if kind not in kinds:
        raise unknown("kind of block", kind, kinds)
    if not folders:
        raise FedscError(f"the block names no folder; write <!-- {kind}: FOLDER -->")
    runs, unreadable = find_runs([Path(folder) for folder in folders])
    if unreadable:
        raise FedscError(
            f"{unreadable[0]}; put its runs there or take it out (folders are looked for "
            "from where the command is called)"
        )
    for run in runs:
        if not run.measured:
            raise FedscError(f"{run.path} has rounds without an accuracy: take it out")
    return kinds[kind](runs if classifier is None else seen_by(classifier, runs))


def seen_by(classifier: str, runs: list[RunData]) -> list[RunData]:
    """The runs that were measured by another classifier, with its accuracy in place of theirs."""
    if classifier not in CLASSIFIERS:
        raise unknown("classifier", classifier, CLASSIFIERS)
    found = [run for run in runs if accuracy_by(classifier, run, run.records[-1]) is not None]
    if not found:
        raise FedscError(
            f"no run was measured {CLASSIFIERS[classifier]}: make them with --calibrated"
        )
    others = {"nearest_prototype", *CLASSIFIERS, *FAIRNESS}
    return [
        dataclasses.replace(
            run,
            spec=run.spec | {"classifier": classifier},
            records=[
                {name: value for name, value in record.items() if name not in others}
                | {"accuracy": accuracy_by(classifier, run, record)}
                for record in run.records
            ],
        )
        for run in found
    ]


# The kinds of blocks ------------------------------------------------------------------------------


def comparison(runs: list[RunData]) -> str:
    """Methods under one setting, the paper's numbers and the distance to FedAvg beside them."""
    return "\n".join(map(_comparison, by_setting(runs).values()))


def _comparison(runs: list[RunData]) -> str:
    rows = rows_of(runs)
    paper = [paper_number(row.runs[0]) for row in rows]
    ahead = [ahead_of_fedavg(row, rows) for row in rows]
    last = [share_text(run.summary["last"] for run in row.runs) for row in rows]
    marks = best_and_second(comparable_means([row.runs for row in rows]))
    blocks = [
        column("seeds", (f"{len(row.runs)}" for row in rows)),
        column("rounds", (row.rounds for row in rows)),
        column("last", last, marks),
        column("mean of last 5", (share_text(mean_of_last(r) for r in row.runs) for row in rows)),
        column("best", (mean_text(run.summary["best"] for run in row.runs) for row in rows)),
    ]
    blocks += [
        column(name, (measured_text(row.runs, name, len(row.runs)) for row in rows))
        for name in CLASSIFIERS
        if any_measured(runs, name)
    ]
    if any(number is not None for number in paper):
        blocks.append(column("paper", (number_text(number) for number in paper)))
    if any(ahead):
        blocks += [
            column("over FedAvg", (found[0] if found else NOTHING for found in ahead)),
            column("p", (found[1] if found else NOTHING for found in ahead)),
        ]
    blocks.append(column("images/s", (f"{images_per_second(row.runs):,.0f}" for row in rows)))
    devices = sorted(filter(None, {device_of(run) for run in runs}))
    measured_on = f" Images/s of training, on {' and '.join(devices)}." if devices else ""
    return table_text("method", rows, blocks, setting_note(runs) + measured_on)


def by_seed(runs: list[RunData]) -> str:
    """Finished runs one by one: the mean of the last five rounds, and the paper's number."""
    return "\n".join(map(_by_seed, by_setting(runs).values()))


def _by_seed(runs: list[RunData]) -> str:
    rows = [row for row in rows_of(runs) if " of " not in row.rounds]
    blocks = []
    for seed in sorted({run.spec["seed"] for row in rows for run in row.runs}):
        shares = [
            [mean_of_last(run) for run in row.runs if run.spec["seed"] == seed] for row in rows
        ]
        means = [100 * found[0] if found and found[0] is not None else None for found in shares]
        marks = best_and_second(only_most(means, [row.runs[0].spec["rounds"] for row in rows]))
        blocks.append(column(f"seed {seed}", map(number_text, means), marks))
    paper = [paper_number(row.runs[0]) for row in rows]
    if any(number is not None for number in paper):
        blocks.append(column("paper", map(number_text, paper)))
    return table_text("method", rows, blocks, f"{setting_note(runs)} Mean of the last five rounds.")


def search(runs: list[RunData]) -> str:
    """Readings of a method over the rounds."""
    return "\n".join(map(_search, by_setting(runs).values()))


def _search(runs: list[RunData]) -> str:
    rows = rows_of(runs)
    blocks = [column("rounds", (row.rounds for row in rows))]
    if any(len(row.runs) > 1 for row in rows):
        blocks.insert(0, column("seeds", (f"{len(row.runs)}" for row in rows)))
    for number in SEARCH_ROUNDS:
        found = [[accuracy_after(number, run) for run in row.runs] for row in rows]
        known = [[value for value in values if value is not None] for values in found]
        if any(known):
            means = [statistics.mean(values) if values else None for values in known]
            marks = best_and_second(only_most(means, [len(values) for values in known]))
            blocks.append(column(f"after {number}", map(mean_text, found), marks))
    blocks.append(
        column("mean of last 5", (share_text(mean_of_last(r) for r in row.runs) for row in rows))
    )
    nearest = [
        mean_text(mean_of_last(run, "nearest_prototype") for run in row.runs) for row in rows
    ]
    if any(text != NOTHING for text in nearest):
        blocks.append(column("nearest prototype", nearest))
    blocks.append(column("swing", (mean_text(swing(run) for run in row.runs) for row in rows)))
    return table_text("reading", rows, blocks, setting_note(runs))


def speed(runs: list[RunData]) -> str:
    """Rounds until an accuracy is reached for the first time, and the paper's Table 3."""
    return "\n".join(map(_speed, by_setting(runs).values()))


def _speed(runs: list[RunData]) -> str:
    rows = rows_of(runs)
    blocks = [
        column("seeds", (f"{len(row.runs)}" for row in rows)),
        column("rounds", (row.rounds for row in rows)),
    ]
    for level in ACCURACY_LEVELS:
        found = [[rounds_to(run, level) for run in row.runs] for row in rows]
        texts = [rounds_text([*numbers], len(numbers)) for numbers in found]
        blocks.append(column(f"to {100 * level:g}%", texts))
        paper = [paper_number(row.runs[0], rounds_to=level) for row in rows]
        if any(number is not None for number in paper):
            shown = (NOTHING if number is None else f"{number:.0f}" for number in paper)
            blocks.append(column("paper", shown))
    note = "Rounds until it is reached for the first time; never: not in the rounds of the run."
    return table_text("method", rows, blocks, f"{setting_note(runs)} {note}")


def fairness(runs: list[RunData]) -> str:
    """Whom the accuracy leaves out (worst client, rare classes), and what confidence is worth."""
    return "\n".join(map(_fairness, by_setting(runs).values()))


def _fairness(runs: list[RunData]) -> str:
    rows = rows_of(runs)
    blocks = [
        column("seeds", (f"{len(row.runs)}" for row in rows)),
        column("rounds", (row.rounds for row in rows)),
        column("accuracy", (share_text(mean_of_last(r) for r in row.runs) for row in rows)),
    ]
    for name, heading in FAIRNESS.items():
        texts = [share_text(mean_of_last(run, name) for run in row.runs) for row in rows]
        if any(text != NOTHING for text in texts):
            blocks.append(column(heading, texts))
    return table_text("method", rows, blocks, f"{setting_note(runs)} Mean of the last five rounds.")


def commands(runs: list[RunData]) -> str:
    """The commands that repeat the runs, each below the folders whose numbers it gave. Methods that
    were run alike, with the same seeds, stand in one."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for members in by_setting(runs).values():
        for row in rows_of(members):
            groups.setdefault(settings_and_seeds(row.runs), []).append(row)
    parts = []
    for number, (settings, rows) in enumerate(groups.items(), 1):
        lines = [f"# {line}" for row in rows for line in folders_of(row)]
        methods = dict.fromkeys(row.method for row in rows)
        out = f"runs/{folder_name(rows[0].runs[0].path.parent.name)}"
        options = [
            *settings,
            *(option("method", method) for method in methods),
            option("out", out if len(groups) == 1 else f"{out}-{number}"),
        ]
        parts.append("\n".join([*lines, broken_into_lines("fedsc run", options)]))
    text = "\n\n".join(parts)
    summary = "<details><summary>Run folders and the commands that repeat them</summary>"
    return f"{summary}\n\n```\n{text}\n```\n\n</details>\n"


def settings_and_seeds(runs: list[RunData]) -> tuple[str, ...]:
    """All that decides the result of these runs beside the method, and all that was measured."""
    run = runs[0]
    found = [option("dataset", run.spec["dataset"])]
    found += [option("seed", same.spec["seed"]) for same in runs]
    usual = {"clients": RunSpec(partition=run.spec["partition"]).num_clients}
    for opt in options_of(RunSpec):
        if opt.name in ("dataset", "method", "seed", *NOT_PART_OF_THE_HASH):
            continue
        value = value_of(run, opt.name)
        if value not in (opt.default, usual.get(opt.name, opt.default)):
            found.append(option(opt.name, value))
    if any(value_of(same, "calibrated") for same in runs):
        found.append("--calibrated")
    return tuple(found)


def option(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')} {shlex.quote(option_text(value))}"


def folders_of(row: Row) -> list[str]:
    """`results/x/fedsc-seed{0,1}` for two folders, as a shell would write them."""
    seeds: dict[str, list[str]] = {}
    for run in row.runs:
        name, _, seed = str(run.path).rpartition("-seed")
        seeds.setdefault(name, []).append(seed)
    cut = f", cut after round {row.rounds}" if " of " in row.rounds else ""
    lines = []
    for name, found in seeds.items():
        numbers = found[0] if len(found) == 1 else "{" + ",".join(found) + "}"
        lines.append(f"{name}-seed{numbers}{cut}" if name else f"{numbers}{cut}")
    return lines


def broken_into_lines(command: str, options: list[str]) -> str:
    """A command of many options, as one that a shell takes over several lines."""
    lines = [command]
    for text in options:
        if len(lines[-1]) + len(text) > LINE:
            lines.append("   ")
        lines[-1] += f" {text}"
    return " \\\n".join(lines)


# What they share ----------------------------------------------------------------------------------


def rows_of(runs: list[RunData]) -> list[Row]:
    """In the order of the paper's tables, and within a method in that of the folders' names."""
    groups: dict[tuple[str, tuple[str, ...], str], list[RunData]] = {}
    for (method, *options), group in told_apart(runs, besides=("rounds",)).items():
        for run in group:
            groups.setdefault((method, tuple(options), run.rounds), []).append(run)
    for group in groups.values():
        refuse_same_seed(group)
    order = {name: number for number, name in enumerate(METHODS)}
    rows = [Row(*key, group) for key, group in groups.items()]
    return sorted(rows, key=lambda row: order.get(row.method.split(",")[0], len(order)))


def column(heading: str, texts: Iterable[str], marks: list[str] | None = None) -> Block:
    return Block(heading, ("",), [(text,) for text in texts], marks or [])


def table_text(heading: str, rows: list[Row], blocks: list[Block], note: str) -> str:
    table = as_markdown(TextTable("", heading, [row.name for row in rows], blocks))
    return f"{table}\n{note}\n"


def setting_note(runs: list[RunData]) -> str:
    """What all the runs of a table have in common."""
    (setting,) = by_setting(runs)
    others = [
        f"{name}={option_text(value_of(runs[0], name))}"
        for name in NOT_IN_A_SETTING
        if value_of(runs[0], name) != getattr(RunSpec, name)
        and len({value_of(run, name) for run in runs}) == 1
    ]
    held_out = {value_of(run, "validation") for run in runs}
    where = "the test set"
    if held_out != {None}:
        where = f"{min(v for v in held_out if v):,} training images held out"
        where += " (validation) or the test set" if None in held_out else ""
    if "classifier" in runs[0].spec:
        where += f", {CLASSIFIERS[runs[0].spec['classifier']]}"
    return f"{', '.join([setting, *others])}. Accuracy in % on {where}."


def share_text(values: Iterable[Number]) -> str:
    """Shares (0 to 1) of seeds in %, with their spread; `[1/2]` where one of two lacks it."""
    shares = [*values]
    known = [100 * value for value in shares if value is not None]
    return percent_text([*known], len(shares)) if known else NOTHING


def mean_text(values: Iterable[Number]) -> str:
    """Shares (0 to 1) of seeds in %, their mean only; `[1/2]` where one of two lacks it."""
    shares = [*values]
    known = [100 * value for value in shares if value is not None]
    if not known:
        return NOTHING
    return number_text(statistics.mean(known)) + seeds_text(len(known), len(shares))


def number_text(value: Number) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def accuracy_after(number: int, run: RunData) -> Number:
    return next((r["accuracy"] for r in run.records if r["round"] == number), None)


def mean_of_last(run: RunData, name: str = "accuracy") -> Number:
    """Over five rounds: a single one can be a point off."""
    found = [value for r in run.records[-5:] if (value := r.get(name)) is not None]
    return statistics.mean(found) if found else None


def swing(run: RunData) -> Number:
    found = [record["accuracy"] for record in run.records[-10:]]
    steps = [abs(b - a) for a, b in itertools.pairwise(found)]
    return statistics.mean(steps) if steps else None


def images_per_second(runs: list[RunData]) -> float:
    return statistics.mean(
        statistics.median(record["timing"]["images_per_second"] for record in run.records)
        for run in runs
    )


def device_of(run: RunData) -> str:
    """What the run was computed on, or nothing where its folder does not say."""
    try:
        return str(read_object(run.path / "environment.json")["device"])
    except (FedscError, KeyError):
        return ""


def ahead_of_fedavg(row: Row, rows: list[Row]) -> tuple[str, str] | None:
    """Points, over the seeds that both have, and p; None without FedAvg equally far."""
    for other in rows:
        if (other.method, other.options, other.rounds) == ("fedavg", row.options, row.rounds):
            break
    else:
        return None
    pairs = paired_by_seed(row.runs, other.runs)
    if row is other or not pairs:
        return None
    points = 100 * statistics.mean(mine - theirs for mine, theirs in pairs)
    p = paired_p_value(row.runs, other.runs) if len(pairs) >= FEWEST_SEEDS else None
    text = f"{points:+.2f}" + seeds_text(len(pairs), len(row.runs))
    return text, NOTHING if p is None else p_text(p)


# The paper's numbers ------------------------------------------------------------------------------


def paper_number(run: RunData, rounds_to: float | None = None) -> float | None:
    """What the paper prints for the method under the setting of the run, which must be its own:
    the last accuracy, or the rounds to one."""
    method = recorded_method(run)
    if method is None or "classifier" in run.spec:
        return None
    for name in ("table1", "table2", "table3", "table4"):
        printed = grid(name, "paper")
        row = paper_row(name, method)
        for one in printed.columns:
            if one.rounds_to != rounds_to:
                continue
            found = printed.paper.get((row, one.key))
            if found is not None and one.settings and is_setting(run, RunSpec(**one.settings)):
                return found
    return None


def paper_row(table: str, method: Method) -> str:
    """Any reading of a method stands beside the method's number. What is no part of the paper has
    none: the options that every method here has, and FedSC without one of its losses outside of
    Table 4."""
    own = {field.name for field in dataclasses.fields(Method)}
    if own & changed_options(method).keys():
        return ""
    if method.name != "fedsc":
        return method.name
    losses = [loss for loss in ("rpcl", "cpdr") if getattr(method, f"{loss}_weight")]
    if table == "table4":
        return "+".join(losses)
    return "fedsc" if len(losses) == 2 else ""


def is_setting(run: RunData, wanted: RunSpec) -> bool:
    """Whether the run had the paper's data, network and training."""
    size = 64 if wanted.dataset == "tinyimagenet" else 32
    resolved = {
        "clients": wanted.num_clients,
        "model": default_model(wanted.dataset, (3, size, size)),
        "augment": "crop-flip",
    }
    return all(
        value_of(run, field.name) == resolved.get(field.name, getattr(wanted, field.name))
        for field in dataclasses.fields(wanted)
        if field.name not in ("method", "seed", "precision", *NOT_PART_OF_THE_HASH)
    )
