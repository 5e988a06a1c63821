"""Clients by classes in the terminal: the fuller the block, the more images."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

BLOCKS = "·▁▂▃▄▅▆▇█"
MOST_CLASSES = 40
COLUMN = 6  # room for a number of five digits and a space


def partition_table(
    class_counts: NDArray[np.int64], classes: tuple[str, ...], title: str, width: int
) -> Table:
    """One row per class, one column per client, as many as fit into the width."""
    num_clients, num_classes = class_counts.shape
    names = [name[:16] for name in classes[:MOST_CLASSES]]
    fit = max(1, (width - max(map(len, [*names, "classes"])) - 2) // COLUMN)
    shown = range(min(num_clients, fit))
    table = Table(
        title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 0)
    )
    table.add_column("class", no_wrap=True)
    for k in shown:
        table.add_column(f"{k}", justify="right", no_wrap=True, min_width=COLUMN - 1)
    most = class_counts.max()
    for j, name in enumerate(names):
        blocks = [
            BLOCKS[int(np.ceil(class_counts[k, j] / most * (len(BLOCKS) - 1)))] * 3 for k in shown
        ]
        table.add_row(name, *blocks)
    table.add_section()
    table.add_row("images", *(str(class_counts[k].sum()) for k in shown))
    table.add_row("classes", *(str((class_counts[k] > 0).sum()) for k in shown))
    hidden = [
        f"{count - limit} more {what}"
        for what, count, limit in (
            ("classes", num_classes, MOST_CLASSES),
            ("clients", num_clients, fit),
        )
        if count > limit
    ]
    if hidden:
        table.caption = f"{' and '.join(hidden)} not shown (--png draws them all)"
    return table
