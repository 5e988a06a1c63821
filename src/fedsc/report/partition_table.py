"""Clients by classes in the terminal: the fuller the block, the more images."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

BLOCKS = "·▁▂▃▄▅▆▇█"
MOST_CLASSES, MOST_CLIENTS = 40, 24  # as many as fit on a screen


def partition_table(class_counts: NDArray[np.int64], classes: tuple[str, ...], title: str) -> Table:
    """One row per class, one column per client, of the first ones where there are many."""
    num_clients, num_classes = class_counts.shape
    table = Table(title=title, title_justify="left", header_style="bold", padding=(0, 1))
    table.add_column("class")
    shown = range(min(num_clients, MOST_CLIENTS))
    for k in shown:
        table.add_column(f"{k}", justify="center")
    most = class_counts.max()
    for j in range(min(num_classes, MOST_CLASSES)):
        blocks = [
            BLOCKS[int(np.ceil(class_counts[k, j] / most * (len(BLOCKS) - 1)))] * 2 for k in shown
        ]
        table.add_row(classes[j], *blocks)
    table.add_section()
    table.add_row("images", *(str(class_counts[k].sum()) for k in shown))
    table.add_row("classes", *(str((class_counts[k] > 0).sum()) for k in shown))
    hidden = [
        f"{count - limit} more {what}"
        for what, count, limit in (
            ("classes", num_classes, MOST_CLASSES),
            ("clients", num_clients, MOST_CLIENTS),
        )
        if count > limit
    ]
    if hidden:
        table.caption = f"{' and '.join(hidden)} not shown (--png draws them all)"
    return table
