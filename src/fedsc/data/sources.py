"""Every data set by its name: where its files are looked for, and how they become a Dataset."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..errors import FedscError, unknown
from . import cifar, fashion_mnist, tinyimagenet
from .dataset import Dataset, split_by_class
from .folder import read_folder
from .images import Progress
from .npz import read_npz

# FC100 divides CIFAR-100 by superclass. Its validation superclasses 8, 11, 13 and 16 stay unused.
FC100_TRAIN_SUPERCLASSES = (1, 2, 3, 4, 5, 6, 9, 10, 15, 17, 18, 19)
FC100_TEST_SUPERCLASSES = (0, 7, 12, 14)
# The superclass of each fine class of CIFAR-100, in label order.
CIFAR100_SUPERCLASS = (
    *(4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11),
    *(6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5),
    *(5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17),
    *(10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13),
    *(16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13),
)

# Mean and standard deviation per channel, as published. These photographs are also the ones that
# are cropped and flipped in training; all other data are measured and left as they are.
_CIFAR100_NORMALISATION = ((0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615))
PHOTOGRAPHS = {
    "cifar10": (
        (125.3 / 255, 123.0 / 255, 113.9 / 255),
        (63.0 / 255, 62.1 / 255, 66.7 / 255),
    ),
    "cifar100": _CIFAR100_NORMALISATION,
    "fc100": _CIFAR100_NORMALISATION,
    "tinyimagenet": ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
}

Labelled = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]  # images and their labels


@dataclass(frozen=True)
class Source:
    """A data set known by name. `layouts` maps each official folder name to the files that must be
    in it, of which any one layout will do; none are needed where the data come with a package."""

    name: str
    description: str
    num_train: int
    num_test: int
    num_classes: int
    layouts: dict[str, tuple[str, ...]]

    def find(self, data_dir: Path) -> tuple[Path, str] | None:
        """The folder that holds the files, and which layout it has."""
        for layout, files in self.layouts.items():
            for folder in (data_dir / layout, data_dir):
                if not _missing(folder, files):
                    return folder, layout
        return None


_CIFAR10 = ("cifar-10-batches-bin", "cifar-10-batches-py")
_CIFAR100 = ("cifar-100-binary", "cifar-100-python")

SOURCES = {
    source.name: source
    for source in (
        Source("digits", "8x8 grey digits, part of scikit-learn", 1442, 355, 10, {}),
        Source(
            "fashion-mnist",
            "28x28 grey pictures of clothes",
            60_000,
            10_000,
            10,
            {"fashion-mnist": tuple(fashion_mnist.CONTENT_MD5)},
        ),
        Source(
            "cifar10",
            "32x32 colour photographs",
            50_000,
            10_000,
            10,
            {layout: tuple(cifar.OFFICIAL[layout]) for layout in _CIFAR10},
        ),
        Source(
            "cifar100",
            "32x32 colour photographs",
            50_000,
            10_000,
            100,
            {layout: tuple(cifar.OFFICIAL[layout]) for layout in _CIFAR100},
        ),
        Source(
            "fc100",
            "CIFAR-100 for few-shot: 60 classes to train, 20 others to test",
            36_000,
            12_000,
            60,
            {layout: tuple(cifar.OFFICIAL[layout]) for layout in _CIFAR100},
        ),
        Source(
            "tinyimagenet",
            "64x64 colour photographs",
            100_000,
            10_000,
            200,
            {"tiny-imagenet-200": ("wnids.txt", "words.txt", "val/val_annotations.txt")},
        ),
    )
}


def default_data_dir() -> Path:
    """$FEDSC_DATA, else ~/.cache/fedsc."""
    given = os.environ.get("FEDSC_DATA")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "fedsc"


def load_dataset(
    name: str, data_dir: Path | None = None, *, seed: int = 0, progress: Progress | None = None
) -> Dataset:
    """The data set `name`: a key of SOURCES, `folder:PATH` or `npz:PATH`.

    `seed` draws the test set where the data have none; `progress` hears of a slow first load.
    """
    kind, colon, path = name.partition(":")
    if colon and kind in ("folder", "npz") and not path:
        raise FedscError(f"data set '{name}' names no path: write {kind}:PATH")
    if colon and kind == "folder":
        return read_folder(Path(path).expanduser(), seed)
    if colon and kind == "npz":
        return read_npz(Path(path).expanduser(), seed)
    if name not in SOURCES:
        raise unknown("data set", name, [*SOURCES, "folder:PATH", "npz:PATH"])
    if name == "digits":
        return _digits()
    folder, layout = _find_or_explain(SOURCES[name], data_dir or default_data_dir())
    if name == "fashion-mnist":
        return _fashion_mnist(folder)
    if name == "tinyimagenet":
        return _tinyimagenet(folder, progress)
    cifar.verify_folder(folder, layout)
    paths = [folder / file for file in cifar.OFFICIAL[layout]]
    readers: dict[str, Callable[[list[Path]], Dataset]]
    readers = {"cifar10": _cifar10, "cifar100": _cifar100, "fc100": _fc100}
    return readers[name](paths)


def _missing(folder: Path, files: tuple[str, ...]) -> list[str]:
    def is_there(file: str) -> bool:
        gzipped = file.endswith("-ubyte") and (folder / f"{file}.gz").is_file()
        return gzipped or (folder / file).is_file()

    return [file for file in files if not is_there(file)]


def _find_or_explain(source: Source, data_dir: Path) -> tuple[Path, str]:
    found = source.find(data_dir)
    if found is not None:
        return found
    for layout, files in source.layouts.items():
        if (data_dir / layout).is_dir():
            lacking = ", ".join(_missing(data_dir / layout, files))
            raise FedscError(
                f"{source.name}: {data_dir / layout} lacks {lacking}; "
                f"add what is missing, or remove the folder and run: fedsc data get {source.name}"
            )
    place = "" if data_dir == default_data_dir() else f" --data-dir {data_dir}"
    raise FedscError(
        f"{source.name} is not in {data_dir} (looked for {' and '.join(source.layouts)}); "
        f"run: fedsc data get {source.name}{place}"
    )


def _digits() -> Dataset:
    # Imported here, since it takes a second.
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images * 15).astype(np.uint8)[:, None]  # 0 to 16 becomes 0 to 240
    labels = bunch.target.astype(np.int64)
    in_test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        in_test[np.flatnonzero(labels == label)[4::5]] = True
    return _dataset(
        "digits",
        (images[~in_test], labels[~in_test]),
        (images[in_test], labels[in_test]),
        tuple("0123456789"),
    )


def _fashion_mnist(folder: Path) -> Dataset:
    arrays = fashion_mnist.read_folder(folder)
    train, test = (
        (
            arrays[f"{part}-images-idx3-ubyte"][:, None],
            arrays[f"{part}-labels-idx1-ubyte"].astype(np.int64),
        )
        for part in ("train", "t10k")
    )
    return _dataset("fashion-mnist", train, test, fashion_mnist.CLASSES)


def _tinyimagenet(folder: Path, progress: Progress | None) -> Dataset:
    tree = tinyimagenet.list_tree(folder)
    tinyimagenet.check_complete(folder, tree)
    arrays = tinyimagenet.read_images(folder, tree, progress)
    train = arrays.train_images, arrays.train_labels
    test = arrays.test_images, arrays.test_labels
    return _dataset("tinyimagenet", train, test, tree.classes)


def _cifar10(paths: list[Path]) -> Dataset:
    train = cifar.read_files(paths[:-1], 50_000, label_bytes=1)
    test = cifar.read_files(paths[-1:], 10_000, label_bytes=1)
    return _dataset("cifar10", train, test, cifar.CIFAR10_CLASSES)


def _cifar100(paths: list[Path]) -> Dataset:
    train = cifar.read_files(paths[:-1], 50_000, label_bytes=2)
    test = cifar.read_files(paths[-1:], 10_000, label_bytes=2)
    return _dataset("cifar100", train, test, cifar.CIFAR100_CLASSES)


def _fc100(paths: list[Path]) -> Dataset:
    images, labels = cifar.read_files(paths, 60_000, label_bytes=2)
    train = images[:50_000], labels[:50_000]
    test = images[50_000:], labels[50_000:]
    pooled = _dataset("fc100", train, test, cifar.CIFAR100_CLASSES)
    return split_by_class(
        pooled,
        torch.from_numpy(images),
        torch.from_numpy(labels),
        _fine_classes(FC100_TRAIN_SUPERCLASSES),
        _fine_classes(FC100_TEST_SUPERCLASSES),
    )


def _fine_classes(superclasses: tuple[int, ...]) -> list[int]:
    return [fine for fine, coarse in enumerate(CIFAR100_SUPERCLASS) if coarse in superclasses]


def _dataset(name: str, train: Labelled, test: Labelled, classes: tuple[str, ...]) -> Dataset:
    mean, std = PHOTOGRAPHS.get(name, ((), ()))
    return Dataset(
        name=name,
        train_images=torch.from_numpy(train[0]),
        train_labels=torch.from_numpy(train[1]),
        test_images=torch.from_numpy(test[0]),
        test_labels=torch.from_numpy(test[1]),
        classes=classes,
        mean=mean,
        std=std,
        augment="crop-flip" if name in PHOTOGRAPHS else "none",
    )
