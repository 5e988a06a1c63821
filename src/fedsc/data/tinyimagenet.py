"""Tiny-ImageNet: the official tree of JPEGs, decoded once and kept decoded beside it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import FedscError
from ..files import read_text, refuse_link
from .images import Progress, decode

SIDE = 64
OFFICIAL_SIZES = (100_000, 10_000)


class Tree(NamedTuple):
    """The files of the tree, train before test, and their labels. The validation set is the test
    set: the labels of the official test set were never published."""

    classes: tuple[str, ...]
    paths: list[Path]
    labels: npt.NDArray[np.int64]
    num_train: int


class Arrays(NamedTuple):
    train_images: npt.NDArray[np.uint8]
    train_labels: npt.NDArray[np.int64]
    test_images: npt.NDArray[np.uint8]
    test_labels: npt.NDArray[np.int64]


def list_tree(root: Path) -> Tree:
    """What the tree holds. Classes in the order of their WordNet ids, as ImageFolder has them."""
    try:
        wnids = sorted(read_text(root / "wnids.txt").split())
        for wnid, following in zip(wnids, [*wnids[1:], ""], strict=True):
            if not re.fullmatch(r"\w+", wnid) or wnid == following:
                raise FedscError(f"{root}/wnids.txt: '{wnid}' is no id of one class")
        words = _read_words(root / "words.txt")
        label_of = {wnid: label for label, wnid in enumerate(wnids)}
        train = [
            (root / "train" / wnid / "images" / name, label_of[wnid])
            for wnid in wnids
            for name in sorted(os.listdir(root / "train" / wnid / "images"))
            if name.endswith(".JPEG")
        ]
        test = []
        for line in sorted(read_text(root / "val" / "val_annotations.txt").splitlines()):
            name, wnid = line.split("\t")[:2]
            if not re.fullmatch(r"\w+\.JPEG", name) or wnid not in label_of:
                raise FedscError(
                    f"{root}/val/val_annotations.txt: line '{line}' does not give an image of "
                    "val/images and a class of wnids.txt"
                )
            test.append((root / "val" / "images" / name, label_of[wnid]))
    except (OSError, ValueError) as error:
        if isinstance(error, FedscError):
            raise
        raise FedscError(f"{root} is not the official Tiny-ImageNet tree: {error}") from error
    labels = np.array([label for _, label in train + test], dtype=np.int64)
    classes = tuple(words.get(wnid, wnid) for wnid in wnids)
    return Tree(classes, [path for path, _ in train + test], labels, len(train))


def check_complete(root: Path, tree: Tree) -> None:
    """Raises FedscError unless the tree has as many images as the official one."""
    sizes = (tree.num_train, len(tree.paths) - tree.num_train)
    if sizes != OFFICIAL_SIZES:
        raise FedscError(
            f"{root} is incomplete: it has {sizes[0]} train and {sizes[1]} validation images, "
            f"the official one {OFFICIAL_SIZES[0]} and {OFFICIAL_SIZES[1]}; "
            "remove it and get it again"
        )


def read_images(root: Path, tree: Tree, progress: Progress | None = None) -> Arrays:
    """The decoded images, from beside the tree where they are kept there already."""
    cache = root.with_name(f"{root.name}-decoded")
    kept = cache / _fingerprint(tree)
    if kept.is_dir():
        try:
            return _load(kept, tree)
        except Exception:
            pass  # damaged, in whichever way: decode again
    images = decode(tree.paths, (SIDE, SIDE), 3, progress)
    arrays = Arrays(
        images[: tree.num_train],
        tree.labels[: tree.num_train],
        images[tree.num_train :],
        tree.labels[tree.num_train :],
    )
    try:
        _keep(arrays, cache, kept.name)
        return _load(kept, tree)  # and the copy in memory is let go
    except (OSError, FedscError):  # a read-only place or a full disk: only the next load is slower
        return arrays


def _read_words(path: Path) -> dict[str, str]:
    """WordNet id -> the first of its names: `n01443537<tab>goldfish, Carassius auratus`."""
    lines = (line.partition("\t") for line in read_text(path).splitlines())
    words = {wnid: names.split(",")[0].strip() for wnid, _, names in lines}
    return {wnid: word for wnid, word in words.items() if word.isprintable()}


def _fingerprint(tree: Tree) -> str:
    """Changes when a file is added, removed or written to; no image is opened for it."""
    digest = hashlib.sha256()
    for path, label in zip(tree.paths, tree.labels.tolist(), strict=True):
        try:
            found = path.stat()
        except OSError as error:
            raise FedscError(f"{path} is missing from the tree; get it again") from error
        digest.update(f"{path.name} {label} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _load(kept: Path, tree: Tree) -> Arrays:
    # Mapped copy-on-write: nothing is read before it is used, and runs side by side share it.
    found = Arrays(
        *(
            np.load(kept / f"{name}.npy", mmap_mode="c", allow_pickle=False)
            for name in Arrays._fields
        )
    )
    sizes = tree.num_train, len(tree.paths) - tree.num_train
    for images, labels, size in zip(found[::2], found[1::2], sizes, strict=True):
        if images.shape != (size, 3, SIDE, SIDE) or labels.shape != (size,):
            raise ValueError(f"{kept} holds other arrays")
    return found


def _keep(arrays: Arrays, cache: Path, fingerprint: str) -> None:
    """Written under another name and then renamed: whoever sees the folder sees all of it."""
    refuse_link(cache)  # folders are removed in it
    cache.mkdir(exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=cache))
    try:
        for name, array in arrays._asdict().items():
            np.save(unfinished / f"{name}.npy", array)
        shutil.rmtree(cache / fingerprint, ignore_errors=True)  # there only if damaged
        os.rename(unfinished, cache / fingerprint)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for other in cache.iterdir():
        if other.name != fingerprint and re.fullmatch(r"[0-9a-f]{16}", other.name):
            shutil.rmtree(other, ignore_errors=True)  # of the tree as it was before
