"""Tables within a page of prose, made from run folders: `fedsc results --fill docs/results.md`.

    <!-- comparison: results/cifar10-nid1_0.2 -->
    all that stands here is replaced
    <!-- end -->

Before the colon stands the kind of the block, behind it one or more folders with runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import FedscError, unknown
from ..experiments.folder import folder_name
from ..experiments.grids import grid
from ..files import read_object, write_atomically
from ..method import Method
from ..methods import METHODS, changed_options
from ..models import default_model
from ..options import options_of
from ..spec import NOT_PART_OF_THE_HASH, RunSpec
from .grid_table import best_and_second, p_text, percent_text
from .results_table import (
    CLASSIFIERS,
    any_measured,
    by_setting,
    measured_text,
    method_of,
    option_text,
    recorded_method,
    told_apart,
    value_of,
)
from .runs import RunData, find_runs
from .statistics import paired_p_value
from .table import Number, diverged
from .text_table import Block, TextTable, as_markdown

OPENING = re.compile(r"<!-- *([\w-]+): *(.*?) *-->")
CLOSING = "<!-- end -->"
NOTHING = "-"
SEARCH_ROUNDS = (5, 10, 20, 30, 40, 60, 80, 100)
FEWEST_SEEDS = 3  # for a p-value
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
                opened = number, block(opening[1], opening[2].split())
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


def block(kind: str, folders: list[str]) -> str:
    kinds: dict[str, Callable[[list[RunData]], str]] = {
        "comparison": comparison,
        "search": search,
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
    return kinds[kind](runs)


# The kinds of blocks ------------------------------------------------------------------------------


def comparison(runs: list[RunData]) -> str:
    """Methods under one setting, the paper's numbers and the distance to FedAvg beside them."""
    return "\n".join(map(_comparison, by_setting(runs).values()))


def _comparison(runs: list[RunData]) -> str:
    rows = rows_of(runs)
    paper = [paper_number(row.runs[0]) for row in rows]
    ahead = [ahead_of_fedavg(row, rows) for row in rows]
    last = [[100 * run.summary["last"] for run in row.runs] for row in rows]
    furthest = max(run.records[-1]["round"] for run in runs)
    comparable = [
        statistics.mean(values) if row.runs[0].records[-1]["round"] == furthest else None
        for row, values in zip(rows, last, strict=True)
    ]
    blocks = [
        column("seeds", (f"{len(row.runs)}" for row in rows)),
        column("rounds", (row.rounds for row in rows)),
        column(
            "last", (percent_text([*values], 0) for values in last), best_and_second(comparable)
        ),
        column("mean of last 5", (share_text(mean_of_last(r) for r in row.runs) for row in rows)),
        column("best", (mean_text(run.summary["best"] for run in row.runs) for row in rows)),
    ]
    notes = [*setting_notes(runs), "`last`: after the last round, mean ± standard deviation."]
    for name, meaning in CLASSIFIERS.items():
        if any_measured(runs, name):
            blocks.append(column(name, (measured_text(row.runs, name, 0) for row in rows)))
            notes.append(f"`{name}`: {meaning}.")
    if any(number is not None for number in paper):
        blocks.append(column("paper", (number_text(number) for number in paper)))
    if any(ahead):
        blocks += [
            column("over FedAvg", (found[0] if found else NOTHING for found in ahead)),
            column("p", (found[1] if found else NOTHING for found in ahead)),
        ]
        notes.append(
            "`over FedAvg`: points ahead of it after the last round, over the seeds that both "
            f"have; `p`: paired t-test, from {FEWEST_SEEDS} seeds on."
        )
    blocks.append(column("images/s", (f"{images_per_second(row.runs):,.0f}" for row in rows)))
    devices = sorted(filter(None, {device_of(run) for run in runs}))
    if devices:
        notes.append(f"`images/s`: of training, on {' and '.join(devices)}.")
    return table_text("method", rows, blocks, notes)


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
        known = [[100 * value for value in values if value is not None] for values in found]
        if any(known):
            means = [statistics.mean(values) if values else None for values in known]
            blocks.append(
                column(f"after {number}", map(number_text, means), best_and_second(means))
            )
    blocks.append(
        column("mean of last 5", (share_text(mean_of_last(r) for r in row.runs) for row in rows))
    )
    nearest = [
        mean_text(mean_of_last(run, "nearest_prototype") for run in row.runs) for row in rows
    ]
    notes = setting_notes(runs)
    if any(text != NOTHING for text in nearest):
        blocks.append(column("nearest prototype", nearest))
        notes.append("`nearest prototype`: accuracy by the nearest prototype, mean of the last 5.")
    blocks.append(column("swing", (mean_text(swing(run) for run in row.runs) for row in rows)))
    notes.append("`swing`: points between one round and the next, mean over the last 10 rounds.")
    return table_text("reading", rows, blocks, notes)


def commands(runs: list[RunData]) -> str:
    """The command that repeats each run, below the folders whose numbers it gave."""
    lines = []
    for members in by_setting(runs).values():
        for row in rows_of(members):
            cut = f", cut after round {row.rounds}" if " of " in row.rounds else ""
            lines += [f"# {run.path}{cut}" for run in row.runs]
            lines.append(command(row.runs))
    text = "\n".join(lines)
    summary = "<details><summary>Run folders and the commands that repeat them</summary>"
    return f"{summary}\n\n```\n{text}\n```\n\n</details>\n"


def command(runs: list[RunData]) -> str:
    """`fedsc run` with all that decides the result of these runs, which differ in their seed, and
    with all that was measured."""
    run = runs[0]
    words = ["fedsc", "run", "--dataset", run.spec["dataset"], "--method", method_of(run)]
    for same in runs:
        words += ["--seed", str(same.spec["seed"])]
    usual = {"clients": RunSpec(partition=run.spec["partition"]).num_clients}
    for opt in options_of(RunSpec):
        if opt.name in ("dataset", "method", "seed", *NOT_PART_OF_THE_HASH):
            continue
        value = value_of(run, opt.name)
        if value not in (opt.default, usual.get(opt.name, opt.default)):
            words += ["--" + opt.name.replace("_", "-"), option_text(value)]
    if any(value_of(same, "calibrated") for same in runs):
        words.append("--calibrated")
    name = re.sub(r"-seed\d+$", "", run.path.name)
    return shlex.join([*words, "--out", f"runs/{folder_name(run.path.parent.name)}/{name}"])


# What they share ----------------------------------------------------------------------------------


def rows_of(runs: list[RunData]) -> list[Row]:
    """In the order of the paper's tables, and within a method in that of the folders' names."""
    groups: dict[tuple[str, tuple[str, ...], str], list[RunData]] = {}
    for (method, *options), group in told_apart(runs, besides=("rounds",)).items():
        for run in group:
            same = groups.setdefault((method, tuple(options), run.rounds), [])
            twin = next((r for r in same if r.spec["seed"] == run.spec["seed"]), None)
            if twin is not None:
                raise FedscError(f"{twin.path} and {run.path} are the same run: take one out")
            same.append(run)
    order = {name: number for number, name in enumerate(METHODS)}
    rows = [Row(*key, group) for key, group in groups.items()]
    return sorted(rows, key=lambda row: order.get(row.method.split(",")[0], len(order)))


def column(heading: str, texts: Iterable[str], marks: list[str] | None = None) -> Block:
    return Block(heading, ("",), [(text,) for text in texts], marks or [])


def table_text(heading: str, rows: list[Row], blocks: list[Block], notes: list[str]) -> str:
    table = as_markdown(TextTable("", heading, [row.name for row in rows], blocks))
    return "\n".join([table, *notes, ""])


def setting_notes(runs: list[RunData]) -> list[str]:
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
    return [f"{', '.join([setting, *others])}. Accuracy in % on {where}."]


def share_text(values: Iterable[Number]) -> str:
    """Shares (0 to 1) of seeds in %, with their spread."""
    known = [100 * value for value in values if value is not None]
    return percent_text([*known], 0) if known else NOTHING


def mean_text(values: Iterable[Number]) -> str:
    """Shares (0 to 1) of seeds in %, their mean only."""
    known = [100 * value for value in values if value is not None]
    return number_text(statistics.mean(known)) if known else NOTHING


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
    mine, theirs = ({r.spec["seed"]: r.summary["last"] for r in x.runs} for x in (row, other))
    shared = mine.keys() & theirs.keys()
    if row is other or not shared:
        return None
    points = 100 * statistics.mean(mine[seed] - theirs[seed] for seed in shared)
    p = paired_p_value(row.runs, other.runs) if len(shared) >= FEWEST_SEEDS else None
    return f"{points:+.2f}", NOTHING if p is None else p_text(p)


# The paper's numbers ------------------------------------------------------------------------------


def paper_number(run: RunData) -> float | None:
    """What the paper prints for the method under the setting of the run, which must be its own."""
    method = recorded_method(run)
    if method is None:
        return None
    for name in ("table1", "table2", "table4"):
        printed = grid(name, "paper")
        row = paper_row(name, method)
        for one in printed.columns:
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
