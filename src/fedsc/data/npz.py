"""`npz:PATH`: one's own arrays, as numpy.savez writes them."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from ..errors import FedscError
from .dataset import Dataset
from .holdout import stratified_holdout
from .limits import check_expansion

CHANNELS = (1, 3)
ARRAYS = ("x_train", "y_train", "x_test", "y_test", "x", "y")


def read_npz(path: Path, seed: int) -> Dataset:
    """Arrays x_train, y_train, x_test, y_test; or x and y, a fifth of which (drawn with `seed`)
    becomes the test set."""
    arrays = _load(path)
    if {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys():
        train_images = _images(path, "x_train", arrays["x_train"])
        test_images = _images(path, "x_test", arrays["x_test"])
        train_labels = _labels(path, "y_train", arrays["y_train"], len(train_images))
        test_labels = _labels(path, "y_test", arrays["y_test"], len(test_images))
        classes = _class_names(path, "y_train", train_labels)
    elif {"x", "y"} <= arrays.keys():
        images = _images(path, "x", arrays["x"])
        labels = _labels(path, "y", arrays["y"], len(images))
        classes = _class_names(path, "y", labels)
        train, test = stratified_holdout(labels, classes, seed, str(path))
        train_images, train_labels = images[train], labels[train]
        test_images, test_labels = images[test], labels[test]
    else:
        raise FedscError(
            f"{path} holds the arrays {', '.join(sorted(arrays)) or '(none)'}; it must hold "
            "x_train, y_train, x_test and y_test, or x and y"
        )
    return Dataset(
        name=f"npz:{path}",
        train_images=torch.from_numpy(np.ascontiguousarray(train_images)),
        train_labels=torch.from_numpy(train_labels),
        test_images=torch.from_numpy(np.ascontiguousarray(test_images)),
        test_labels=torch.from_numpy(test_labels),
        classes=classes,
    )


def read_npz_part(
    path: Path, part: Literal["train", "test"], num_classes: int | None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], int]:
    """One machine's images, labels and the number of classes, from x_PART and y_PART or x and y.

    With `num_classes` given, the file need not have every class.
    """
    arrays = _load(path)
    x, y = (f"x_{part}", f"y_{part}") if f"x_{part}" in arrays else ("x", "y")
    if not {x, y} <= arrays.keys():
        raise FedscError(
            f"{path} holds the arrays {', '.join(sorted(arrays)) or '(none)'}; it must hold "
            f"x_{part} and y_{part}, or x and y"
        )
    images = _images(path, x, arrays[x])
    labels = _labels(path, y, arrays[y], len(images))
    if num_classes is None:
        return images, labels, len(_class_names(path, y, labels))
    if not len(labels) or labels.min() < 0 or labels.max() >= num_classes:
        found = f"labels from {labels.min()} to {labels.max()}" if len(labels) else "no labels"
        raise FedscError(f"{path}: {y} has {found} (allowed: 0 to {num_classes - 1})")
    return images, labels, num_classes


def read_npz_images(path: Path) -> npt.NDArray[np.uint8]:
    """Images alone, to be classified: the array x, or x_test."""
    arrays = _load(path)
    for name in ("x", "x_test"):
        if name in arrays:
            return np.ascontiguousarray(_images(path, name, arrays[name]))
    raise FedscError(f"{path} holds {', '.join(arrays) or 'nothing'}; it must hold x or x_test")


def _load(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays by name, of those that are asked for, empty for the others."""
    name = ""
    try:
        if not path.is_file():
            path.stat()  # says why
            raise FedscError(f"{path} is no file")
        with path.open("rb") as file:
            # numpy.load would take a lone array or a pickle as well.
            if not zipfile.is_zipfile(file):
                raise FedscError(f"{path} is not an .npz file as numpy.savez writes it")
        with np.load(path, allow_pickle=False) as archive, zipfile.ZipFile(path) as members:
            found = [name for name in ARRAYS if name in archive.files]
            sizes = {name: members.getinfo(f"{name}.npy").file_size for name in found}
            check_expansion(str(path), path.stat().st_size, sum(sizes.values()))
            arrays = {name: np.empty(0) for name in archive.files}
            for name in found:
                with members.open(f"{name}.npy") as file:
                    check_header(file, sizes[name])
                arrays[name] = archive[name]
            return arrays
    except OSError as error:
        raise FedscError(f"cannot read {path}: {error.strerror or error}") from error
    except FedscError:
        raise
    except Exception as error:  # a damaged zip can raise nearly anything
        raise FedscError(f"{path}: cannot read array '{name}': {error}") from error


def check_header(file: IO[bytes], size: int) -> None:
    """Before room is made for an array: does the member hold as much as its header announces?"""
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise ValueError(f"its format is {version} (allowed: 1.0 and 2.0)")
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which can run code when read")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"its header announces {shape} of {dtype}, it has {size} bytes")


def _images(path: Path, name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """(N, channels, height, width), from (N, H, W), (N, H, W, C) or (N, C, H, W)."""
    if array.dtype != np.uint8:
        raise FedscError(
            f"{path}: {name} is {array.dtype}; images must be uint8, with values from 0 to 255"
        )
    if array.ndim == 3:
        return array[:, None]
    if array.ndim == 4 and array.shape[3] in CHANNELS:
        return array.transpose(0, 3, 1, 2)
    if array.ndim == 4 and array.shape[1] in CHANNELS:
        return array
    raise FedscError(
        f"{path}: {name} has shape {array.shape} "
        "(allowed: (N, H, W), (N, H, W, C) or (N, C, H, W) with C = 1 or 3)"
    )


def _labels(
    path: Path, name: str, array: npt.NDArray[Any], num_images: int
) -> npt.NDArray[np.int64]:
    if array.dtype.kind not in "iu" or array.shape != (num_images,):
        raise FedscError(
            f"{path}: {name} is {array.dtype} of shape {array.shape}; "
            f"labels must be integers of shape ({num_images},)"
        )
    return array.astype(np.int64)


def _class_names(path: Path, name: str, labels: npt.NDArray[np.int64]) -> tuple[str, ...]:
    present = np.unique(labels)
    if len(present) < 2 or present[0] != 0 or present[-1] != len(present) - 1:
        raise FedscError(
            f"{path}: {name} has {len(present)} different label(s)"
            + (f" from {present[0]} to {present[-1]}" if len(present) else "")
            + "; at least 2 are needed, and they must be 0, 1, 2 and so on without a gap"
        )
    return tuple(str(label) for label in present)
