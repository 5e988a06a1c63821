"""Accuracy under attack, plain and robust: the table of docs/robustness.md.

    python benchmarks/attacks.py

digits, ten clients under NID1 0.2, 20 rounds of 5 epochs, three seeds. Runs are kept in
runs/attacks: what is finished is not run again, and two processes started like this share the work
(about 25 minutes on two busy cores).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from fedsc.experiments.cells import cells_of, read_cell, run_cells
from fedsc.experiments.grids import Column, Grid, Row
from fedsc.report.statistics import mean_and_spread
from fedsc.spec import RunSpec

COMMON = {"dataset": "digits", "rounds": 20, "epochs": 5, "lr": 0.05, "threads": 1}
BOUND = "robust_prototypes=true"
METHODS = (
    "fedavg",
    "fedavg,aggregation=median",
    "fedavg,aggregation=trimmed_mean",
    "fedavg,aggregation=clipped_mean",
    "fedsc",
    f"fedsc,{BOUND},aggregation=clipped_mean",
    "fedsc,full",
    f"fedsc,full,{BOUND}",
    f"fedsc,full,{BOUND},aggregation=clipped_mean",
)
ATTACKS = ("label-flip", "sign-flip", "scaled-update", "poisoned-prototypes")
SHARES = (0.1, 0.3)


def attack_grid(methods: tuple[str, ...]) -> Grid:
    columns = [Column("attacks", "none", "Attacks", "none", COMMON)]
    columns += [
        Column(
            "attacks",
            f"{attack}-{share:g}",
            "Attacks",
            f"{attack} {share:.0%}",
            {**COMMON, "attack": attack, "attackers": share},
        )
        for attack in ATTACKS
        for share in SHARES
    ]
    rows = tuple(Row(text, text, text) for text in methods)
    return Grid("attacks", "Accuracy under attack", "method", rows, tuple(columns), {})


def possible(method: str, spec: RunSpec) -> bool:
    """FedAvg sends no prototypes that could be poisoned."""
    return spec.attack != "poisoned-prototypes" or method.startswith("fedsc")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/attacks"))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    grid = attack_grid(METHODS)
    cells = cells_of(grid, list(range(args.seeds)))
    cells = [cell for cell in cells if possible(cell.row.method, cell.spec)]
    run_cells(cells, args.out, Console(stderr=True))
    print("| method | " + " | ".join(column.heading for column in grid.columns) + " |")
    print("|---" * (1 + len(grid.columns)) + "|")
    for row in grid.rows:
        texts = []
        for column in grid.columns:
            own = [cell for cell in cells if cell.row is row and cell.column is column]
            runs = [run for cell in own if (run := read_cell(args.out, cell)) is not None]
            if not runs:
                texts.append("-")
                continue
            mean, spread = mean_and_spread([100 * run.summary["last"] for run in runs])
            texts.append(f"{mean:.1f}" + ("" if spread is None else f" ± {spread:.1f}"))
        print(f"| {row.heading} | " + " | ".join(texts) + " |")


if __name__ == "__main__":
    main()
