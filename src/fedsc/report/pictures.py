"""What all pictures share, and the two that every comparison has: curves and partition.

Drawn for a column of a paper: text stays readable at 3.3 inches, methods are told apart by colour
and by the line, and no colour is needed to read a picture.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draw to files; there may be no screen

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ..errors import FedscError
from ..files import write_atomically
from .colours import COLOURS
from .runs import RunData, by_label, setting_of

DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (5, 1, 1, 1)))
MARKERS = "osD^vPX*<>"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.title_fontsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "lines.linewidth": 1.8,
    "pdf.fonttype": 42,  # fonts as outlines that journals accept
}
PANEL = (5.0, 3.2)  # inches
DPI = 200

Panels = list[tuple[Axes, list[RunData]]]


def draw_curves(runs: list[RunData], path: Path) -> None:
    """Test accuracy over rounds: the mean over seeds, and a band from worst to best seed.

    Runs of different data or settings get a panel each.
    """
    with plt.rc_context(STYLE):
        figure, panels = setting_panels(runs)
        looks = looks_of(runs)
        for axes, group in panels:
            for label, same in by_label(group).items():
                rounds, values = over_rounds(same, "accuracy")
                last = f"{label}  {100 * values[:, -1].mean():.1f}%"
                draw_band(axes, rounds, 100 * values, {**looks[label], "label": last})
            axes.set_xlabel("communication round")
            axes.set_ylabel("test accuracy, %")
        add_legends(figure, panels, title="after the last round")
        save_figure(figure, path)


def add_legends(figure: Figure, panels: Panels, title: str | None = None) -> None:
    """In a corner where a few names leave room for it, else below the panel."""
    most = max(len(axes.get_legend_handles_labels()[1]) for axes, _ in panels)
    rows = 0
    for axes, _ in panels:
        names = axes.get_legend_handles_labels()[1]
        if most <= 3:
            axes.legend(loc="best", title=title, alignment="left")
            continue
        columns = 2 if max(map(len, names)) > 16 else 3
        rows = max(rows, -(-len(names) // columns))
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.45, -0.17),
            ncols=columns,
            title=title,
            columnspacing=1.2,
        )
    figure.set_figheight(figure.get_figheight() + 0.21 * rows + (0.25 if rows else 0))


def setting_panels(runs: list[RunData]) -> tuple[Figure, Panels]:
    """A panel for each data set and setting, side by side, with a title."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        groups.setdefault(f"{run.spec['dataset']}, {setting_of(run.spec)}", []).append(run)
    figure, rows = plt.subplots(
        1,
        len(groups),
        figsize=(PANEL[0] * len(groups), PANEL[1]),
        squeeze=False,
        layout="constrained",
    )
    short = [title_of(group[0].spec) for group in groups.values()]
    for axes, (full, group), title in zip(rows[0], groups.items(), short, strict=True):
        clear = title if short.count(title) == 1 else full
        axes.set_title(clear + seeds_of(group), wrap=True)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure, list(zip(rows[0], groups.values(), strict=True))


def seeds_of(runs: list[RunData]) -> str:
    """`, 3 seeds`, or `, 1 to 3 seeds` where methods have not equally many."""
    found = sorted(len(same) for same in by_label(runs).values())
    if found[-1] == 1:
        return ""
    fewest = "" if found[0] == found[-1] else f"{found[0]} to "
    return f", {fewest}{found[-1]} seeds"


def title_of(spec: dict[str, Any]) -> str:
    """`digits, NID1 0.2, 10 clients`: short enough for a panel."""
    words = [spec["dataset"], *setting_of(spec).split(", ")]
    return ", ".join(
        word for word in words if not word.endswith((" epoch", " epochs")) and word != spec["model"]
    )


def looks_of(runs: Iterable[RunData]) -> dict[str, dict[str, Any]]:
    """Colour and line of each method, the same in every panel."""
    labels = list(by_label(list(runs)))
    return {
        label: {
            "color": COLOURS[number % len(COLOURS)],
            # Where colours are near each other, or gone in print, the line tells.
            "linestyle": DASHES[number % len(DASHES)],
        }
        for number, label in enumerate(labels)
    }


def over_rounds(runs: list[RunData], name: str) -> tuple[list[int], NDArray[np.float64]]:
    """The rounds that all these runs have, and a number of theirs (runs, rounds); NaN: none."""
    length = min(len(run.records) for run in runs)
    values = [[record.get(name) for record in run.records[:length]] for run in runs]
    return [r["round"] for r in runs[0].records[:length]], np.array(values, dtype=float)


def draw_band(
    axes: Axes, rounds: list[int], values: NDArray[np.float64], look: dict[str, Any]
) -> None:
    """The mean of (runs, rounds) as a line, and a band from the smallest to the largest."""
    marker = "o" if len(rounds) == 1 else None
    axes.plot(rounds, values.mean(0), marker=marker, **look)
    if len(values) > 1:
        low, high = values.min(0), values.max(0)
        axes.fill_between(rounds, low, high, color=look["color"], alpha=0.15, linewidth=0)


def draw_partition(
    class_counts: NDArray[np.int64], classes: tuple[str, ...], title: str, path: Path
) -> None:
    """Clients by classes: a disc for each, its area the number of images."""
    num_clients, num_classes = class_counts.shape
    with plt.rc_context({**STYLE, "axes.grid": False}):
        width = min(16, max(5, 0.45 * num_clients + 2))
        height = min(20, max(3.2, 0.3 * num_classes + 1.2))
        figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
        columns, rows = np.nonzero(class_counts)
        shares = class_counts[columns, rows] / class_counts.max()
        cell = 72 * min((width - 1.5) / num_clients, (height - 1.2) / num_classes)  # points
        sizes = shares * (0.95 * cell) ** 2
        axes.scatter(columns, rows, s=sizes, c=COLOURS[0], linewidths=0, alpha=0.85)
        axes.set_title(title)
        axes.set_xlabel("client (images)")
        totals = class_counts.sum(1)
        if num_clients <= 30:
            axes.set_xticks(range(num_clients), [f"{k}\n{n:,}" for k, n in enumerate(totals)])
        if num_classes <= 30:
            axes.set_yticks(range(num_classes), classes)
        axes.set_ylabel("class")
        axes.set_xlim(-0.6, num_clients - 0.4)
        axes.set_ylim(num_classes - 0.4, -0.6)
        save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    """Drawn in memory first: a full disk must not leave half a picture."""
    check_picture(path)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.removeprefix(".").lower(), dpi=DPI)
    plt.close(figure)
    write_atomically(path, picture.getvalue())


def check_picture(path: Path) -> None:
    """Can this be drawn? Asked before anything long is computed for it."""
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise FedscError(f"cannot draw {path}: '{path.suffix}' is not one of {', '.join(kinds)}")
    if not path.parent.is_dir():
        raise FedscError(f"cannot draw {path}: there is no folder {path.parent}")
