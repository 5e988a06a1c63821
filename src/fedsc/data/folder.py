"""`folder:PATH`: one's own images, one folder per class."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from ..errors import FedscError
from .dataset import Dataset
from .holdout import stratified_holdout
from .images import decode, inspect

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def read_folder(root: Path, seed: int) -> Dataset:
    """Either root/train/<class>/* and root/test/<class>/*, or root/<class>/*, a fifth of which
    (drawn with `seed`) becomes the test set."""
    _check_folder(root)
    has_split = (root / "train").is_dir() and (root / "test").is_dir()
    classes = _class_names(root / "train" if has_split else root)
    if has_split:
        strangers = sorted(set(_class_names(root / "test")) - set(classes))
        if strangers:
            raise FedscError(
                f"{root}/test has class '{strangers[0]}', which {root}/train has not "
                f"(allowed: {', '.join(classes)})"
            )
        train_paths, train_labels = _list_images(root / "train", classes)
        test_paths, test_labels = _list_images(root / "test", classes)
        paths = train_paths + test_paths
        labels = np.concatenate([train_labels, test_labels])
        train = np.arange(len(train_paths))
        test = np.arange(len(train_paths), len(paths))
    else:
        paths, labels = _list_images(root, classes)
        train, test = stratified_holdout(labels, classes, seed, str(root))
    images = _read_images(paths)
    return Dataset(
        name=f"folder:{root}",
        train_images=torch.from_numpy(images[train]),
        train_labels=torch.from_numpy(labels[train]),
        test_images=torch.from_numpy(images[test]),
        test_labels=torch.from_numpy(labels[test]),
        classes=classes,
    )


def read_folder_part(
    root: Path, part: Literal["train", "test"], classes: tuple[str, ...] | None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], tuple[str, ...]]:
    """One machine's images, labels and classes, from root/PART/<class>/* or root/<class>/*.

    With `classes` given, the folder need not have all of them, but no others.
    """
    _check_folder(root)
    root = root / part if (root / part).is_dir() else root
    if classes is None:
        classes = _class_names(root)
    for name in classes:
        if name in ("", ".", "..") or Path(name).name != name:  # a server must not lead elsewhere
            raise FedscError(f"class '{name}' cannot be the name of a folder in {root}")
    strangers = sorted(
        path.name
        for path in _members(root)
        if path.is_dir() and not path.name.startswith(".") and path.name not in classes
    )
    if strangers:
        raise FedscError(
            f"{root} has class '{strangers[0]}', which this federation has not "
            f"(allowed: {', '.join(classes)})"
        )
    paths, labels = _list_images(root, classes)
    if not paths:
        raise FedscError(f"{root} has no folder of any class (allowed: {', '.join(classes)})")
    return _read_images(paths), labels, classes


def _check_folder(root: Path) -> None:
    if not root.exists():
        raise FedscError(f"folder '{root}' does not exist")
    if not root.is_dir():
        raise FedscError(f"'{root}' is a file: give a folder with a sub-folder per class")


def _class_names(root: Path) -> tuple[str, ...]:
    found = [path for path in _members(root) if path.is_dir() and not path.name.startswith(".")]
    names = sorted(path.name for path in found)
    for name in names:
        if not name.isprintable():  # it goes into tables, pictures and JSON
            raise FedscError(f"{root} has a class folder {name!r}: rename it, in plain letters")
    if len(names) < 2:
        raise FedscError(
            f"{root} has {len(names)} class folder(s), at least 2 are needed: give a folder with "
            "train/<class>/ and test/<class>/, or with <class>/ alone"
        )
    return tuple(names)


def _members(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise FedscError(f"cannot read {folder}: {error.strerror or error}") from None


def _list_images(root: Path, classes: tuple[str, ...]) -> tuple[list[Path], npt.NDArray[np.int64]]:
    """The images of the class folders of `root`; a test folder need not have every class."""
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        folder = root / name
        if not folder.is_dir():
            continue
        found = sorted(
            p
            for p in _members(folder)
            if p.suffix.lower() in SUFFIXES and not p.name.startswith(".")
        )
        if not found:
            raise FedscError(f"{folder} holds no image (allowed: {', '.join(SUFFIXES)})")
        paths += found
        labels += [label] * len(found)
    return paths, np.array(labels, dtype=np.int64)


def _read_images(paths: list[Path]) -> npt.NDArray[np.uint8]:
    size, all_grey = inspect(paths[0])
    for path in paths[1:]:
        other_size, grey = inspect(path)
        if other_size != size:
            raise FedscError(
                f"{path} is {other_size[0]}x{other_size[1]} pixels, {paths[0]} is "
                f"{size[0]}x{size[1]}; all images must have one size"
            )
        all_grey = all_grey and grey
    return decode(paths, size, 1 if all_grey else 3)
