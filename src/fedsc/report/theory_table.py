"""The theorems beside a run, in the terminal and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .runs import RunData

CONSTANTS = {
    "L1": "L1, smoothness of the loss (Assumption 1)",
    "sigma2": "σ², variance of a batch's gradient (2)",
    "B": "B, norm of a batch's gradient (3)",
    "L2": "L2, features against weights (4)",
    "eta": "η, step size",
    "E": "E, local iterations in a round (mean)",
    "M": "M, neighbours",
    "C": "|C|, classes",
    "xi": "ξ, mean squared gradient to reach",
    "L0": "L0, loss before the first round",
}
MOST_ROUNDS = 8


def show_theory(run: RunData, found: dict[str, Any], console: Console) -> None:
    estimates = new_table("What the theorems speak of", ["", "estimated or set"])
    for name, words in CONSTANTS.items():
        estimates.add_row(words, f"{found['constants'][name]:.4g}")
    console.print(estimates)

    asked = new_table("Conditions", ["", "needs", "has", "holds"])
    for row in found["conditions"]:
        said = str(row["needs"]), str(row["has"]), "yes" if row["holds"] else "no"
        asked.add_row(row["name"], *said)
    console.print(asked)

    rounds = new_table(
        "Loss after a round, and Theorem 1's bound of it", ["round", "loss", "bound"]
    )
    shown = spread(len(found["observed"]), MOST_ROUNDS)
    for place in shown:
        values = found["observed"][place], found["bound"][place]
        number = str(run.records[place]["round"])
        rounds.add_row(number, *("-" if v is None else f"{v:.4g}" for v in values))
    console.print(rounds)
    for note in found["notes"]:
        console.print(f"- {note}")


def spread(length: int, most: int) -> list[int]:
    """The places to show of a list: all, or `most` of them from the first to the last."""
    if length <= most:
        return list(range(length))
    return sorted({round(i * (length - 1) / (most - 1)) for i in range(most)})


def new_table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 else "right")
    return table


def draw_theory(run: RunData, found: dict[str, Any], path: Path) -> None:
    """Observed loss over rounds, and the bound of each from the loss before."""
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    from .colours import COLOURS
    from .pictures import PANEL, STYLE, save_figure, title_of

    rounds = [record["round"] for record in run.records][: len(found["observed"])]
    series = [np.array(found[name], dtype=float) for name in ("observed", "bound")]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=PANEL, layout="constrained")
        axes.plot(
            rounds, series[0], color=COLOURS[0], label="observed loss", marker="o", markersize=3
        )
        axes.plot(rounds, series[1], "--", color=COLOURS[1], label="bound of Theorem 1")
        known = np.concatenate(series)
        known = known[np.isfinite(known)]
        if len(known) and known.min() > 0 and known.max() / known.min() > 50:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        elif len(known) and known.min() <= 0:
            axes.axhline(0, color="black", linewidth=0.8)
        axes.set_title(f"{run.label}, {title_of(run.spec)}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("communication round")
        axes.set_ylabel("loss of the clients")
        axes.legend()
        save_figure(figure, path)
