"""Fashion-MNIST: four idx files, gzipped or not."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import FedscError
from .idx import read_idx

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

# MD5 of what follows the header, uncompressed: Debian's .gz files differ from the publisher's,
# their content does not.
CONTENT_MD5 = {
    "train-images-idx3-ubyte": "f209073e486d5113ebe2cc431d4df862",
    "train-labels-idx1-ubyte": "3236f6424fc25388b2834cb19942cf7e",
    "t10k-images-idx3-ubyte": "b7656a891b218fc13e45205c48a92cae",
    "t10k-labels-idx1-ubyte": "8dea97a4e78c1bd1b5a6e8efbb870b6e",
}


def find_file(folder: Path, name: str) -> Path | None:
    """The file, gzipped or not, or None."""
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    return None


def read_folder(folder: Path) -> dict[str, npt.NDArray[np.uint8]]:
    """The four arrays by file name, each checked against the official content."""
    arrays = {}
    for name, official in CONTENT_MD5.items():
        path = find_file(folder, name)
        if path is None:
            raise FedscError(f"{folder} holds neither {name}.gz nor {name}")
        arrays[name] = read_idx(path)
        found = hashlib.md5(arrays[name].data, usedforsecurity=False).hexdigest()
        if found != official:
            raise FedscError(
                f"{path} is altered: the MD5 of what it holds after the header is {found}, "
                f"that of the official file {official}; remove it and get it again"
            )
    return arrays
