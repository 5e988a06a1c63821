"""The figures of the paper, and those that explain a run, from run folders."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator
from numpy.typing import NDArray

from ..errors import FedscError, unknown
from ..files import read_json
from .checks import check_file
from .colours import COLOURS
from .grid_table import Results
from .pictures import (
    DASHES,
    MARKERS,
    PANEL,
    STYLE,
    add_legends,
    draw_band,
    looks_of,
    over_rounds,
    save_figure,
    setting_panels,
    title_of,
)
from .runs import RunData, by_label
from .statistics import mean_and_spread

MOST_NAMED_CLASSES = 30
MOST_IN_LEGEND = 20
# Paul Tol's muted palette and black: ten colours that stay apart for colour-blind readers.
TEN_COLOURS = (
    "#332288",
    "#88CCEE",
    "#44AA99",
    "#117733",
    "#999933",
    "#DDCC77",
    "#CC6677",
    "#882255",
    "#AA4499",
    "#000000",
)

AXIS_NAMES = {
    "tau": "temperature τ",
    "neighbours": "neighbours M",
    "clients": "clients K",
    "epochs": "local epochs E",
}

Points = dict[str, list[tuple[float, list[float]]]]  # by method: a value, the accuracies over seeds


def draw_sensitivity(panels: dict[str, Points], path: Path, title: str = "") -> None:
    """Accuracy (a share, 0 to 1) over hyperparameters: mean and standard deviation over seeds
    (Fig. 5 and 6). A panel for each, by the name of its axis.
    """
    panels = {
        name: points
        for name, points in panels.items()
        if any(each and not math.isnan(x) for found in points.values() for x, each in found)
    }
    if not panels:
        raise FedscError("no run has a value of the hyperparameter: nothing to draw")
    size = PANEL[0] * len(panels), PANEL[1]
    with plt.rc_context(STYLE):
        figure, rows = plt.subplots(
            1, len(panels), figsize=size, squeeze=False, sharey=True, layout="constrained"
        )
        for axes, (name, points) in zip(rows[0], panels.items(), strict=True):
            draw_over_values(axes, points)
            axes.set_xlabel(name)
        rows[0][0].set_title(title)
        rows[0][0].set_ylabel("test accuracy, %")
        rows[0][-1].legend()
        save_figure(figure, path)


def draw_over_values(axes: Axes, points: Points) -> None:
    """The values stand at equal distances, for they may span orders of magnitude. A method that has
    no such hyperparameter gives its accuracies once, at NaN, and is drawn as a level."""
    values = sorted({x for found in points.values() for x, _ in found if not math.isnan(x)})
    place = {x: number for number, x in enumerate(values)}
    for number, (label, found) in enumerate(points.items()):
        look: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": DASHES[number % len(DASHES)],
            "label": label,
        }
        kept = sorted((x, 100 * np.array(each)) for x, each in found if len(each))
        means = [float(each.mean()) for _, each in kept]
        spreads = [mean_and_spread(each.tolist())[1] or 0.0 for _, each in kept]
        if kept and math.isnan(kept[0][0]):
            axes.axhline(means[0], **look)
            low, high = means[0] - spreads[0], means[0] + spreads[0]
            axes.axhspan(low, high, color=look["color"], alpha=0.12, linewidth=0)
            continue
        axes.errorbar(
            [place[x] for x, _ in kept],
            means,
            spreads if any(spreads) else None,
            marker=MARKERS[number % len(MARKERS)],
            markersize=5,
            capsize=3,
            elinewidth=1,
            **look,
        )
    axes.set_xticks(range(len(values)), [f"{x:g}" for x in values])
    axes.set_xlim(-0.4, len(values) - 0.6)


def draw_classes(runs: list[RunData], path: Path) -> None:
    """Accuracy of each class after the last round: mean over seeds, and from worst to best.

    Up to 30 classes have a row each; more are drawn from the best to the worst.
    """
    runs = [run for run in runs if run.records[-1].get("per_class")]
    if not runs:
        raise FedscError("no accuracy by class in these runs (few-shot runs have none)")
    with plt.rc_context(STYLE):
        figure, panels = setting_panels(runs)
        looks = looks_of(runs)
        for axes, group in panels:
            classes = partition_of(group[0])["classes"]
            few = len(classes) <= MOST_NAMED_CLASSES
            for number, (label, same) in enumerate(by_label(group).items()):
                each = 100 * np.array([run.records[-1]["per_class"] for run in same], dtype=float)
                look = {**looks[label], "label": label}
                if few:
                    draw_class_rows(axes, each, number, len(by_label(group)), look)
                else:
                    order = np.argsort(-each.mean(0), kind="stable")
                    draw_band(axes, list(range(1, len(classes) + 1)), each[:, order], look)
            if few:
                axes.set_yticks(range(len(classes)), classes)
                axes.set_ylim(len(classes) - 0.5, -0.5)
                axes.set_xlabel("test accuracy of the class, %")
                axes.grid(axis="y", visible=False)
                for row in range(0, len(classes), 2):
                    axes.axhspan(row - 0.5, row + 0.5, color="#f4f4f4", zorder=0)
            else:
                axes.set_xlabel("classes, from the best to the worst of each method")
                axes.set_ylabel("test accuracy, %")
        if few:
            inches = max(0.28, 0.085 * len(looks))  # of a row
            figure.set_figheight(max(PANEL[1], inches * len(classes) + 1.3))
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
        save_figure(figure, path)


def draw_class_rows(
    axes: Axes, each: NDArray[np.float64], number: int, methods: int, look: dict[str, Any]
) -> None:
    """A mark and a range (runs, classes) in the row of each class, methods one under another."""
    rows = np.arange(each.shape[1]) + 0.85 * ((number + 0.5) / methods - 0.5)
    axes.hlines(rows, each.min(0), each.max(0), color=look["color"], linewidth=1.2)
    marker = MARKERS[number % len(MARKERS)]
    size = max(2.5, 6 - 0.5 * methods)
    axes.plot(each.mean(0), rows, marker, color=look["color"], markersize=size, label=look["label"])


def draw_drift(runs: list[RunData], path: Path) -> None:
    """How far the class prototypes move from round to round, relative to their length."""
    runs = [run for run in runs if any(r.get("prototype_drift") is not None for r in run.records)]
    if not runs:
        raise FedscError(
            "no drift of prototypes in these runs: FedSC, FedSC+, FedProto and FedNH record it"
        )
    with plt.rc_context(STYLE):
        figure, panels = setting_panels(runs)
        looks = looks_of(runs)
        for axes, group in panels:
            for label, same in by_label(group).items():
                rounds, values = over_rounds(same, "prototype_drift")
                values[values <= 0] = np.nan  # nothing moved: no place on a logarithmic axis
                draw_band(axes, rounds, values, {**looks[label], "label": label})
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            axes.set_xlabel("communication round")
            axes.set_ylabel("drift of prototypes")
        add_legends(figure, panels)
        save_figure(figure, path)


def draw_landscape(runs: list[RunData], path: Path) -> None:
    """A row for each run: the plane with all models of a round, and the loss around some of them.

    From each run's landscape.json.
    """
    found = [read_analysis(run, "landscape") for run in runs]
    surfaces = [
        grid
        for land in found
        for grid in (land["loss"], *(model["loss"] for model in land["around"]["models"]))
    ]
    known = [value for grid in surfaces for row in grid for value in row if value is not None]
    if not known:
        raise FedscError("the loss is no number anywhere: the models have diverged")
    low = max(min(known), 1e-3)
    high = max(np.quantile(known, 0.99), 1.1 * low)  # also where the loss is the same everywhere
    levels = np.geomspace(low, high, 13)
    columns = 1 + max(len(land["around"]["models"]) for land in found)
    with plt.rc_context({**STYLE, "axes.grid": False, "axes.titlesize": 9}):
        figure, rows = plt.subplots(
            len(runs),
            columns,
            figsize=(1.75 * columns + 0.7, 1.95 * len(runs) + 0.1),
            squeeze=False,
            layout="constrained",
        )
        for row, run, land in zip(rows, runs, found, strict=True):
            draw_plane(row[0], land, levels)
            row[0].set_ylabel(run.label)
            for axes, model in zip(row[1:], land["around"]["models"], strict=False):
                draw_surface(axes, land["around"]["grid"], model["loss"], levels)
                axes.set_title(f"around {model['name']}")
            for axes in row[1 + len(land["around"]["models"]) :]:
                axes.axis("off")
        colours = ScalarMappable(norm=LogNorm(levels[0], levels[-1]), cmap="viridis")
        handles, names = rows[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower left", ncols=2)
        bar = figure.colorbar(colours, ax=rows, label="test loss", shrink=0.9, aspect=30)
        bar.minorticks_off()
        ticks = levels[::3].tolist()
        bar.set_ticks(ticks, labels=[f"{level:.2g}" for level in ticks])
        save_figure(figure, path)


def draw_plane(axes: Axes, land: dict[str, Any], levels: NDArray[np.float64]) -> None:
    draw_surface(axes, land["grid"], land["loss"], levels)
    edge: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.8, "zorder": 3}
    places = np.array([m["at"] for m in land["models"] if m["name"] != "global"])
    axes.scatter(
        places[:, 0], places[:, 1], s=26, marker="o", color="#D55E00", label="clients", **edge
    )
    axes.scatter([0], [0], s=90, marker="*", color="black", label="global", **edge)
    axes.set_title("models of one round")


def draw_surface(
    axes: Axes, grid: list[float], loss: list[list[float]], levels: NDArray[np.float64]
) -> None:
    values = np.array(loss, dtype=float)
    norm = LogNorm(levels[0], levels[-1])
    axes.contourf(grid, grid, values, levels, cmap="viridis", norm=norm, extend="both")
    axes.contour(grid, grid, values, levels, colors="white", linewidths=0.4, alpha=0.7)
    axes.set_aspect("equal")
    axes.locator_params(nbins=3)
    axes.tick_params(labelsize=7, length=2)


def draw_embedding(runs: list[RunData], path: Path) -> None:
    """t-SNE of test features: a column for each run, by class above and by client below (Fig. 7).

    From each run's embedding.json.
    """
    found = [read_analysis(run, "embedding") for run in runs]
    by_client = any(each["client"] is not None for each in found)
    with plt.rc_context({**STYLE, "axes.grid": False}):
        figure, rows = plt.subplots(
            1 + by_client,
            len(runs),
            figsize=(2.9 * len(runs) + 1.2, 2.7 * (1 + by_client)),
            squeeze=False,
            layout="constrained",
        )
        one_setting = len({title_of(run.spec) for run in runs}) == 1
        if one_setting:
            figure.suptitle(title_of(runs[0].spec), x=0.01, horizontalalignment="left", fontsize=11)
        for column, (run, each) in enumerate(zip(runs, found, strict=True)):
            x, y = (np.array(each[axis], dtype=float) for axis in "xy")
            title = run.label if one_setting else f"{run.label}\n{title_of(run.spec)}"
            rows[0][column].set_title(title)
            draw_groups(rows[0][column], x, y, each["label"], each["classes"], named=True)
            if by_client:
                clients = [-1 if k is None else k for k in each["client"] or [-1] * len(x)]
                names = [str(k) for k in range(max(clients) + 1)]
                draw_groups(rows[1][column], x, y, clients, names, named=False)
        for axes in rows.flat:
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[["top", "right"]].set_visible(True)
        for row, what in zip(rows, ("class", "client"), strict=False):
            row[0].set_ylabel(f"by {what}")
            if len(row[-1].get_legend_handles_labels()[1]) <= MOST_IN_LEGEND:
                row[-1].legend(
                    loc="upper left",
                    bbox_to_anchor=(1, 1),
                    title=what,
                    markerscale=2,
                    alignment="left",
                )
        save_figure(figure, path)


def draw_groups(
    axes: Axes,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    group: list[int],
    names: list[str],
    named: bool,
) -> None:
    """Points in the colour and with the mark of their group; `named`: its name, if short, in its
    midst."""
    of = np.array(group)
    many = plt.get_cmap("turbo")
    for number, name in enumerate(names):
        inside = of == number
        if not inside.any():
            continue
        few = len(names) <= len(TEN_COLOURS)
        colour = TEN_COLOURS[number] if few else many(number / (len(names) - 1))
        marker = MARKERS[number % len(MARKERS)] if few else "o"
        axes.scatter(
            x[inside], y[inside], s=10, color=colour, marker=marker, linewidths=0, label=name
        )
        if named and len(names) <= MOST_IN_LEGEND and max(map(len, names)) <= 2:
            axes.text(
                np.median(x[inside]),
                np.median(y[inside]),
                name,
                ha="center",
                va="center",
                fontsize=9,
                fontweight="bold",
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )


def read_analysis(run: RunData, kind: str) -> dict[str, Any]:
    """What analysis/ has written into the run folder."""
    path = run.path / f"{kind}.json"
    try:
        found: dict[str, Any] = read_json(path)
        check_file(kind, found)
    except FileNotFoundError:
        command = f"fedsc figure {kind} {run.path} -o {kind}.png"
        raise FedscError(f"{run.path} has no {path.name} yet: make it with {command}") from None
    except FedscError:
        raise
    except (OSError, ValueError) as error:
        raise FedscError(f"{path} is damaged: {error}") from None
    return found


def partition_of(run: RunData) -> dict[str, Any]:
    """The classes, and how many images of each every client holds."""
    path = run.path / "partition.json"
    try:
        found: dict[str, Any] = read_json(path)
        check_file("partition", found)
    except (OSError, ValueError) as error:
        raise FedscError(f"{path} cannot be read: {error}") from None
    return found


def sensitivity_points(runs: list[RunData], over: str | None = None) -> tuple[Points, str]:
    """The accuracies of the last round over the hyperparameter in which the runs differ.

    `over` names it where there are several; runs that differ in another are lines of their own.
    """
    runs = [run for run in runs if run.measured]
    if not runs:
        raise FedscError("no run in which every round has an accuracy")
    known = {name for run in runs for name in numbers_of(run)}
    differing = sorted(
        name
        for name in known
        if len({numbers_of(run)[name] for run in runs if name in numbers_of(run)}) > 1
    )
    if over is None:
        if len(differing) != 1:
            raise FedscError(
                f"the runs differ in {', '.join(differing)}: say which with --over NAME"
                if differing
                else "the runs differ in no number that could be the axis: give runs with several "
                "values of a hyperparameter (fedsc sweep)"
            )
        over = differing[0]
    if over not in known:
        raise unknown("number for --over", over, sorted(known))
    points: Points = {}
    for run in runs:
        numbers = numbers_of(run)
        others = [
            f"{name}={numbers[name]:g}" for name in differing if name in numbers and name != over
        ]
        line = points.setdefault(", ".join([run.spec["method"]["name"], *others]), [])
        x = numbers.get(over, math.nan)
        for at, accuracies in line:
            if at == x or (math.isnan(at) and math.isnan(x)):
                accuracies.append(run.summary["last"])
                break
        else:
            line.append((x, [run.summary["last"]]))
    return points, AXIS_NAMES.get(over, over)


def grid_points(results: Results) -> dict[str, Points]:
    """The same from a grid whose columns are the values of hyperparameters: a panel for each."""
    panels: dict[str, Points] = {}
    for column in results.grid.columns:
        points = panels.setdefault(AXIS_NAMES[column.group], {})
        value = float(column.heading.split(" = ")[1].split("\n")[0])  # `K = 5`, `(for 10)` below it
        for row in results.grid.rows:
            accuracies = [run.summary["last"] for run in results.of(row, column)]
            points.setdefault(row.heading, []).append((value, accuracies))
    return panels


def numbers_of(run: RunData) -> dict[str, float]:
    """The numbers of a specification and of its method, by name; the seed is none of them."""
    method = run.spec["method"]
    return {
        name: float(value)
        for name, value in {**run.spec, **method}.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and name not in ("seed", "format")
    }
