"""Accuracy against the value of an option: the paper's Figures 5 and 6."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from ..experiments.grids import ordered
from .colours import COLOURS
from .grid_table import Results
from .pictures import STYLE, save_figure
from .statistics import mean_and_spread

AXIS_LABELS = {
    "τ": "temperature τ",
    "M": "number of neighbours M",
    "K": "number of clients K",
    "E": "local epochs E",
}


def draw_lines(results: Results, path: Path) -> None:
    """A panel for each group of columns, a line for each row; bars are standard deviations."""
    grid = results.grid
    groups = ordered(column.group for column in grid.columns)
    with plt.rc_context(STYLE):
        size = (4.6 * len(groups), 3.6)
        figure, panels = plt.subplots(1, len(groups), figsize=size, squeeze=False, sharey=True)
        figure.set_layout_engine("constrained")
        for axes, group in zip(panels[0], groups, strict=True):
            columns = [column for column in grid.columns if column.group == group]
            # Evenly spaced: the values span orders of magnitude.
            symbol = columns[0].heading.split(" = ")[0]
            labels = [column.heading.split(" = ")[1].split("\n")[0] for column in columns]
            for colour, row in zip(COLOURS, grid.rows, strict=False):
                found = [(i, results.values(row, c)) for i, c in enumerate(columns)]
                points = [
                    (i, *mean_and_spread([v for v in values if v is not None]))
                    for i, values in found
                    if values
                ]
                if not points:
                    continue
                where, means, spreads = zip(*points, strict=True)
                errors = [spread or 0 for spread in spreads]
                axes.errorbar(
                    where,
                    means,
                    errors if any(errors) else None,
                    color=colour,
                    marker="o",
                    linewidth=2,
                    capsize=3,
                    label=row.heading,
                )
            axes.set_xticks(range(len(columns)), labels)
            axes.set_xlim(-0.4, len(columns) - 0.6)
            axes.set_xlabel(AXIS_LABELS[symbol])
        panels[0][0].set_ylabel("test accuracy of the global model, %")
        panels[0][-1].legend()
        title = grid.columns[0].group_heading
        figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=12)
        save_figure(figure, path)
