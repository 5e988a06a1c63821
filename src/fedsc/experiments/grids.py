"""The paper's Tables 1 to 5 and Figures 1, 5, 6 and 7 as grids of runs, at three scales.

A grid has rows (methods or variants) and columns (settings); a cell is the runs of one row under
one column, over seeds. `RunSpec`'s defaults are the paper's settings, so a column says only where
it differs. `paper_tables.json` holds the numbers that the paper prints.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from ..errors import FedscError, unknown

Scale = Literal["paper", "small", "smoke"]
SCALES: dict[str, str] = {
    "paper": "the paper's data, networks, rounds and epochs",
    "small": (
        "real data and the paper's networks, 20 rounds of 5 epochs; 10,000 training images of "
        "CIFAR-10 and 20,000 of the other data sets, where there is no long tail"
    ),
    "smoke": (
        "scikit-learn's digits instead of every data set, a small MLP, 6 rounds of 2 epochs on 400 "
        "images, learning rate 0.1, batches of 32"
    ),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A method or one of its variants."""

    name: str
    heading: str
    method: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # besides the column's


@dataclasses.dataclass(frozen=True)
class Column:
    """A setting, and what is read off its runs."""

    group: str  # columns of a group stand together
    name: str
    group_heading: str
    heading: str
    settings: dict[str, Any] | None  # None: the mean of the group's other columns
    method_options: str = ""  # added to the row's method, as in `tau=0.1`
    rounds_to: float | None = None  # rounds until this accuracy, instead of the last accuracy

    @property
    def key(self) -> str:
        return f"{self.group}/{self.name}"

    @property
    def title(self) -> str:
        """Empty for the only column of a sweep."""
        words = f"{self.group_heading}, {self.heading}" if self.group_heading else ""
        return words.replace("\n", " ")


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table or figure. `paper` holds printed numbers by row and column, in % or rounds."""

    name: str
    title: str
    row_heading: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    paper: dict[tuple[str, str], float]
    scale: str = ""  # of the paper's grids

    def select(self, columns: list[str] | None, rows: list[str] | None) -> Grid:
        """Some of the columns, by group (`cifar10`) or one by one (`cifar10/nid2`), and rows."""
        kept_columns, kept_rows = self.columns, self.rows
        if columns is not None:
            keys = {column.key for column in self.columns}
            groups = {column.group for column in self.columns}
            for name in columns:
                if name not in keys | groups:
                    allowed = [
                        *ordered(c.group for c in self.columns),
                        *(c.key for c in self.columns),
                    ]
                    raise unknown(f"column of {self.name}", name, allowed)
            asked = {c.key for c in self.columns if {c.key, c.group} & set(columns)}
            cut = {c.group for c in self.columns if c.settings is not None and c.key not in asked}
            kept_columns = tuple(  # a mean comes with all columns of its group
                c
                for c in self.columns
                if (c.key in asked if c.settings is not None else c.group not in cut)
            )
        if rows is not None:
            names = [row.name for row in self.rows]
            for name in rows:
                if name not in names:
                    raise unknown(f"method of {self.name}", name, names)
            kept_rows = tuple(row for row in self.rows if row.name in rows)
        if not kept_columns or not kept_rows:
            raise FedscError(f"nothing is left of {self.name}: give a column and a method")
        return dataclasses.replace(self, rows=kept_rows, columns=kept_columns)


def ordered(names: Iterable[str]) -> list[str]:
    """Each name once, in the order they come."""
    return list(dict.fromkeys(names))


# Settings -----------------------------------------------------------------------------------------

HEADINGS = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tinyimagenet": "TinyImageNet",
    "fc100": "FC100, 5-way 5-shot",
}
NID = {
    "nid1_0.05": ("NID1\n0.05", "nid1:0.05"),
    "nid1_0.2": ("NID1\n0.2", "nid1:0.2"),
    "nid1_0.5": ("NID1\n0.5", "nid1:0.5"),
    "nid2": ("NID2", "nid2"),
}
# What takes the place of a value that digits are too few for: the largest class has 147 images.
SMOKE_RHO = {10: 2, 50: 5, 100: 10, 200: 20}
SMOKE_CLIENTS = {10: 5, 20: 10, 50: 15, 100: 20}
SMOKE_EPOCHS = {1: 1, 5: 2, 10: 3, 20: 4}
SMOKE = {"rounds": 6, "epochs": 2, "train_limit": 400, "batch_size": 32, "lr": 0.1, "threads": 1}
SMALL_IMAGES = {"cifar10": 10_000, "cifar100": 20_000, "tinyimagenet": 20_000, "fc100": 20_000}


def at_scale(scale: str, dataset: str, **settings: Any) -> dict[str, Any]:
    """The settings of a column at a scale; those given are the paper's."""
    if scale == "paper":
        return {"dataset": dataset, **settings}
    if scale == "small":
        limit = {} if "long_tail" in settings else {"train_limit": SMALL_IMAGES[dataset]}
        return {"dataset": dataset, "rounds": 20, "epochs": 5, **limit, **settings}
    found = {"dataset": "digits", **SMOKE, **settings}
    if dataset == "fc100":  # five classes to train on, five for the episodes
        found |= {"few_shot": 5, "episodes": 20}
    if "long_tail" in settings:
        found |= {"long_tail": SMOKE_RHO[settings["long_tail"]], "train_limit": None}
    if "clients" in settings:
        found["clients"] = SMOKE_CLIENTS[settings["clients"]]
    if "epochs" in settings:
        found["epochs"] = SMOKE_EPOCHS[settings["epochs"]]
    return found


def group_heading(scale: str, dataset: str, suffix: str = "") -> str:
    return ("digits for " if scale == "smoke" else "") + HEADINGS[dataset] + suffix


def label_shift(scale: str, dataset: str, names: Iterable[str]) -> list[Column]:
    return [
        Column(
            dataset,
            name,
            group_heading(scale, dataset),
            NID[name][0],
            at_scale(scale, dataset, partition=NID[name][1]),
        )
        for name in names
    ]


def imbalance_shift(scale: str, dataset: str, rhos: Iterable[int]) -> list[Column]:
    """Long tails, dealt to the clients by NID1 0.2."""
    columns = []
    for rho in rhos:
        settings = at_scale(scale, dataset, partition="nid1:0.2", long_tail=rho)
        heading = value_heading("ρ", settings["long_tail"], rho)
        title = group_heading(scale, dataset, "-LT")
        columns.append(Column(f"{dataset}_lt", f"rho_{rho}", title, heading, settings))
    return columns


def value_heading(symbol: str, value: float, in_paper: float) -> str:
    return f"{symbol} = {value:g}" + ("" if value == in_paper else f"\n(for {in_paper:g})")


def rows_for(names: Iterable[str]) -> tuple[Row, ...]:
    return tuple(Row(name, METHOD_HEADINGS[name], name) for name in names)


METHOD_HEADINGS = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "moon": "MOON",
    "fedntd": "FedNTD",
    "fedproto": "FedProto",
    "fednh": "FedNH",
    "fedrcl": "FedRCL",
    "fedcda": "FedCDA",
    "fedsc": "FedSC",
}
RHOS = (10, 50, 100, 200)


# Tables -------------------------------------------------------------------------------------------


@functools.cache
def paper_tables() -> dict[str, Any]:
    text = files("fedsc.experiments").joinpath("paper_tables.json").read_text()
    tables: dict[str, Any] = json.loads(text)
    return tables


def printed_by_method(table: str) -> dict[tuple[str, str], float]:
    """The numbers of a table whose rows are methods."""
    return {
        (name, f"{group}/{column}"): value
        for name, heading in METHOD_HEADINGS.items()
        for group, columns in paper_tables()[table].get(heading, {}).items()
        for column, value in columns.items()
    }


def table1(scale: str) -> Grid:
    names = "nid1_0.05", "nid1_0.2", "nid2"
    columns = [column for dataset in HEADINGS for column in label_shift(scale, dataset, names)]
    title = "Table 1: test accuracy in % under label shift"
    return Grid(
        "table1",
        title,
        "method",
        rows_for(METHOD_HEADINGS),
        tuple(columns),
        printed_by_method("table1"),
    )


def table2(scale: str) -> Grid:
    datasets = "cifar10", "cifar100", "tinyimagenet"
    columns = [column for dataset in datasets for column in imbalance_shift(scale, dataset, RHOS)]
    title = "Table 2: test accuracy in % with long tails, NID1 0.2"
    return Grid(
        "table2",
        title,
        "method",
        rows_for(METHOD_HEADINGS),
        tuple(columns),
        printed_by_method("table2"),
    )


def table3(scale: str) -> Grid:
    columns = []
    for dataset, levels in (("cifar10", (20, 40, 80)), ("cifar100", (20, 40, 60))):
        (accuracy,) = label_shift(scale, dataset, ["nid1_0.2"])
        columns += [
            dataclasses.replace(
                accuracy,
                name=f"rounds_to_{level}",
                heading=f"rounds\nto {level}%",
                rounds_to=level / 100,
            )
            for level in levels
        ]
        columns.append(dataclasses.replace(accuracy, name="acc", heading="accuracy"))
    rows = rows_for(
        name for name in METHOD_HEADINGS if name != "fedproto"
    )  # the paper leaves it out
    title = "Table 3: rounds to an accuracy, and the last accuracy in %, NID1 0.2"
    return Grid("table3", title, "method", rows, tuple(columns), printed_by_method("table3"))


def table4(scale: str) -> Grid:
    rows = (
        Row("fedavg", "neither (FedAvg)", "fedavg"),
        Row("rpcl", "RPCL", "fedsc,cpdr_weight=0"),
        Row("cpdr", "CPDR", "fedsc,rpcl_weight=0"),
        Row("rpcl+cpdr", "RPCL and CPDR", "fedsc"),
    )
    groups = label_shift(scale, "cifar10", NID), imbalance_shift(scale, "cifar10", RHOS)
    columns = []
    for group in groups:
        mean = dataclasses.replace(group[0], name="avg", heading="mean", settings=None)
        columns += [*group, mean]
    paper = {
        (row.name, f"{group}/{name}"): value
        for group, printed in paper_tables()["table4"].items()
        for row in rows
        for name, value in zip(printed["columns"], printed[row.name], strict=True)
    }
    title = "Table 4: which of FedSC's two losses helps; test accuracy in %"
    return Grid("table4", title, "losses", rows, tuple(columns), paper)


def table5(scale: str) -> Grid:
    headings = {"l1": "L1", "l2": "L2", "cosine": "cosine", "kl": "KL", "angle": "angle-wise"}
    rows = tuple(Row(name, heading, f"fedsc,metric={name}") for name, heading in headings.items())
    (column,) = label_shift(scale, "cifar10", ["nid1_0.2"])
    paper = {(name, column.key): paper_tables()["table5"][name] for name in headings}
    title = "Table 5: FedSC's neighbours by five distances; test accuracy in %"
    return Grid("table5", title, "distance", rows, (column,), paper)


# Figures: the paper prints no numbers for them ----------------------------------------------------


def figure1(scale: str) -> Grid:
    columns = label_shift(scale, "cifar10", ["nid1_0.2"])
    title = "Figure 1: loss landscape and curves; test accuracy in %"
    return Grid("figure1", title, "method", rows_for(["fedavg", "fedsc"]), tuple(columns), {})


def figure5(scale: str) -> Grid:
    (base,) = label_shift(scale, "cifar10", ["nid1_0.2"])
    columns = [
        dataclasses.replace(
            base,
            group=group,
            name=f"{value:g}",
            group_heading=base.title,
            heading=f"{symbol} = {value:g}",
            method_options=f"{group}={value:g}",
        )
        for group, symbol, values in (
            ("tau", "τ", (0.02, 0.04, 0.05, 0.06, 0.08, 0.1, 0.5)),
            ("neighbours", "M", (1, 2, 3, 4, 5, 9)),
        )
        for value in values
    ]
    title = "Figure 5: FedSC's temperature τ and number of neighbours M; test accuracy in %"
    return Grid("figure5", title, "method", rows_for(["fedsc"]), tuple(columns), {})


def figure6(scale: str) -> Grid:
    """The paper names no setting: as in Figure 5."""
    heading = f"{group_heading(scale, 'cifar10')}, NID1 0.2"
    columns = []
    for name, symbol, values in (
        ("clients", "K", (10, 20, 50, 100)),
        ("epochs", "E", (1, 5, 10, 20)),
    ):
        for value in values:
            settings = at_scale(scale, "cifar10", partition="nid1:0.2", **{name: value})
            columns.append(
                Column(
                    name,
                    f"{value}",
                    heading,
                    value_heading(symbol, settings[name], value),
                    settings,
                )
            )
    title = "Figure 6: number of clients K and of local epochs E; test accuracy in %"
    return Grid("figure6", title, "method", rows_for(["fedavg", "fedsc"]), tuple(columns), {})


def figure7(scale: str) -> Grid:
    columns = [
        *label_shift(scale, "cifar10", ["nid1_0.05", "nid1_0.2", "nid2"]),
        *imbalance_shift(scale, "cifar10", [100]),
    ]
    title = "Figure 7: the runs whose features are shown by t-SNE; test accuracy in %"
    return Grid("figure7", title, "method", rows_for(["fedavg", "fedsc"]), tuple(columns), {})


GRIDS = {
    make.__name__: make
    for make in (table1, table2, table3, table4, table5, figure1, figure5, figure6, figure7)
}
SWEEP = "sweep"  # of which somebody else chooses rows and values


def asked_in(folder: Path) -> list[Path]:
    """The files in a folder of runs that say for which tables, figures or sweep they are."""
    return [file for name in (*GRIDS, SWEEP) if (file := folder / f"{name}.json").exists()]


def grid(name: str, scale: str) -> Grid:
    """A table or figure of the paper at a scale."""
    if name not in GRIDS:
        raise unknown("table or figure", name, [*GRIDS, "all"])
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    return dataclasses.replace(GRIDS[name](scale), scale=scale)
