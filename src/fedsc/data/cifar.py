"""CIFAR-10 and CIFAR-100: the official binary version, or the one for Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import FedscError
from .cifar_pickle import read_python
from .verify import Official, verify_file

PIXEL_BYTES = 3 * 32 * 32
MOST_IMAGES = 50_000  # in a file

_CIFAR10_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle
    bowl boy bridge bus butterfly camel can castle caterpillar cattle
    chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
    dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard
    lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain
    mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
    plain plate poppy porcupine possum rabbit raccoon ray road rocket
    rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CIFAR10_CLASSES = tuple(_CIFAR10_NAMES.split())
CIFAR100_CLASSES = tuple(_CIFAR100_NAMES.split())

# Folder -> file -> what it must be. The last file of each folder is the test set.
OFFICIAL = {
    "cifar-10-batches-bin": {
        "data_batch_1.bin": Official(30_730_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
        "data_batch_2.bin": Official(30_730_000, "5ea93a67294ea407fff1d09f752e9692"),
        "data_batch_3.bin": Official(30_730_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
        "data_batch_4.bin": Official(30_730_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
        "data_batch_5.bin": Official(30_730_000, "53f37980c15c3d472c316c40844f3f0d"),
        "test_batch.bin": Official(30_730_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),
    },
    "cifar-10-batches-py": {
        "data_batch_1": Official(31_035_704, "c99cafc152244af753f735de768cd75f"),
        "data_batch_2": Official(31_035_320, "d4bba439e000b95fd0a9bffe97cbabec"),
        "data_batch_3": Official(31_035_999, "54ebc095f3ab1f0389bbae665268c751"),
        "data_batch_4": Official(31_035_696, "634d18415352ddfa80567beed471001a"),
        "data_batch_5": Official(31_035_623, "482c414d41f54cd18b22e5b47cb7c3cb"),
        "test_batch": Official(31_035_526, "40351d587109b95175f43aff81a1287e"),
    },
    "cifar-100-binary": {
        "train.bin": Official(153_700_000, "6172c7755cfe09b2fe270c85cebc1b15"),
        "test.bin": Official(30_740_000, "4499cfba6c016c1be1438163640a0898"),
    },
    "cifar-100-python": {
        "train": Official(155_249_918, "16019d7e3df5f24257cddd939b257f8d"),
        "test": Official(None, "f0ef6b0ae62326f3e7ffdfab6717acfc"),
    },
}


def verify_folder(folder: Path, layout: str) -> None:
    """Raises FedscError unless `folder` holds the official files of `layout`, a key of OFFICIAL."""
    for name, official in OFFICIAL[layout].items():
        verify_file(folder / name, official)


def read_files(
    paths: Sequence[Path], num_images: int, label_bytes: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """All images (N, 3, 32, 32) of the files, and the finest labels they have (N,).

    CIFAR-100 has two `label_bytes`, of which the second is the fine label.
    """
    # One array filled file by file: the peak is this plus a single file.
    images = np.empty((num_images, 3, 32, 32), dtype=np.uint8)
    labels = np.empty(num_images, dtype=np.int64)
    done = 0
    for path in paths:
        is_binary = path.suffix == ".bin"
        some_labels, some_images = (
            read_binary(path, label_bytes) if is_binary else read_python(path)
        )
        if done + len(some_images) > num_images:
            raise FedscError(f"{path}: more than the {num_images} images of the official files")
        images[done : done + len(some_images)] = some_images
        labels[done : done + len(some_images)] = some_labels[:, -1]
        done += len(some_images)
    if done != num_images:
        raise FedscError(f"{paths[0].parent}: {done} images, the official files hold {num_images}")
    return images, labels


def read_binary(
    path: Path, label_bytes: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Labels (N, label_bytes) and images (N, 3, 32, 32), both views of the bytes of the file."""
    record = label_bytes + PIXEL_BYTES
    try:
        size = path.stat().st_size
        if not path.is_file() or size == 0 or size % record or size > MOST_IMAGES * record:
            raise FedscError(
                f"{path} is truncated or no CIFAR file: it has {size} bytes, "
                f"expected a multiple of {record}, for at most {MOST_IMAGES} images"
            )
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise FedscError(f"cannot read {path}: {error.strerror or error}") from error
    rows = content.reshape(-1, record)
    return rows[:, :label_bytes], rows[:, label_bytes:].reshape(-1, 3, 32, 32)
