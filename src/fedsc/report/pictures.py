"""Pictures for paper and screen: accuracy curves, and who holds which classes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draw to files; there may be no screen

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ..errors import FedscError
from ..files import write_atomically
from .colours import COLOURS
from .runs import RunData, by_label

STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def draw_curves(runs: list[RunData], path: Path) -> None:
    """Test accuracy over rounds: the mean over seeds, and a band from worst to best seed."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
        for colour, (label, group) in zip(_endless(COLOURS), by_label(runs).items(), strict=False):
            length = min(len(run.records) for run in group)
            rounds = [record["round"] for record in group[0].records[:length]]
            values = np.array(
                [[100 * r["accuracy"] for r in run.records[:length]] for run in group]
            )
            last = f"{label}  {values[:, -1].mean():.1f}%"
            marker = "o" if length == 1 else None
            axes.plot(rounds, values.mean(0), color=colour, linewidth=2, label=last, marker=marker)
            if len(group) > 1:
                axes.fill_between(rounds, values.min(0), values.max(0), color=colour, alpha=0.15)
        spec = runs[0].spec
        seeds = len({run.spec["seed"] for run in runs})
        over = f", mean and range of {seeds} seeds" if seeds > 1 else ""
        tail = f", long tail {spec['long_tail']:g}" if spec["long_tail"] else ""
        axes.set_title(
            f"{spec['dataset']}, {spec['partition']}{tail}, {spec['clients']} clients{over}",
            loc="left",
            fontsize=12,
        )
        axes.set_xlabel("communication round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("test accuracy of the global model, %")
        axes.legend(loc="lower right", title="after the last round", alignment="left")
        save_figure(figure, path)


def draw_partition(
    class_counts: NDArray[np.int64], classes: tuple[str, ...], title: str, path: Path
) -> None:
    """Clients by classes: a disc for each, its area the number of images."""
    num_clients, num_classes = class_counts.shape
    with plt.rc_context({**STYLE, "axes.grid": False}):
        width = min(16, max(5, 0.45 * num_clients + 2))
        height = min(20, max(3.5, 0.35 * num_classes + 1.5))
        figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
        columns, rows = np.nonzero(class_counts)
        shares = class_counts[columns, rows] / class_counts.max()
        cell = 72 * min((width - 1.5) / num_clients, (height - 1.2) / num_classes)  # points
        sizes = shares * (0.95 * cell) ** 2
        axes.scatter(columns, rows, s=sizes, c=COLOURS[0], linewidths=0, alpha=0.85)
        axes.set_title(title, loc="left", fontsize=12)
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
    kinds = figure.canvas.get_supported_filetypes()
    kind = path.suffix.removeprefix(".").lower()
    if kind not in kinds:
        raise FedscError(f"cannot draw {path}: '{path.suffix}' is not one of {', '.join(kinds)}")
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=150)
    plt.close(figure)
    write_atomically(path, picture.getvalue())


def _endless(colours: tuple[str, ...]) -> list[str]:
    return list(colours) * 10
