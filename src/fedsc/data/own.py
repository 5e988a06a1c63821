"""A machine's own images, where each machine brings its own: all of one part, none held out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import FedscError
from .folder import read_folder_part
from .npz import read_npz_part

OWN_DATA = "own"  # as a partition: every node brings its own images
FORMS = "folder:PATH or npz:PATH"


def read_part(
    text: str, part: Literal["train", "test"], classes: tuple[str, ...] | None
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Images, labels and classes of `folder:PATH` or `npz:PATH`.

    The part is PATH/PART/ or the arrays x_PART and y_PART if there are such, else everything. With
    `classes` given, some may be missing.
    """
    kind, _, path = text.partition(":")
    where = Path(path).expanduser()
    if kind == "folder" and path:
        images, labels, found = read_folder_part(where, part, classes)
    elif kind == "npz" and path:
        number = None if classes is None else len(classes)
        images, labels, number = read_npz_part(where, part, number)
        found = classes or tuple(str(label) for label in range(number))
    else:
        raise FedscError(f"data '{text}' is not {FORMS}")
    return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels), found
