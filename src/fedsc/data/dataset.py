"""A data set: images as uint8 tensors, labels, and the facts that go with them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..errors import FedscError, unknown
from .randomness import generator

Augment = Literal["none", "crop-flip", "crop-flip-batch"]


@dataclass(frozen=True)
class Dataset:
    """Images (N, channels, height, width) uint8, labels (N,) int64 from 0 to len(classes) - 1.

    `few_shot`: the test images belong to `test_classes`, none of which is trained on, and are
    scored by episodes instead of by the classifier.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()  # per channel, of pixels scaled to [0, 1]; () measures it
    std: tuple[float, ...] = ()
    augment: Augment = "none"  # what training uses unless the run says otherwise
    few_shot: bool = False
    test_classes: tuple[str, ...] = field(default=())  # few-shot only

    def __post_init__(self) -> None:
        _check_split(self.name, "train", self.train_images, self.train_labels, self.num_classes)
        test_classes = len(self.test_classes) if self.few_shot else self.num_classes
        _check_split(self.name, "test", self.test_images, self.test_labels, test_classes)
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise FedscError(
                f"{self.name}: train images are {tuple(self.train_images.shape[1:])}, "
                f"test images {tuple(self.test_images.shape[1:])}; they must have one shape"
            )
        if self.augment not in get_args(Augment):
            raise unknown(f"value of {self.name}.augment", str(self.augment), get_args(Augment))
        channels = self.image_shape[0]
        if self.mean or self.std:
            if not len(self.mean) == len(self.std) == channels or min(self.std) <= 0:
                raise FedscError(
                    f"{self.name}: mean {self.mean} and std {self.std} must have one value for "
                    f"each of the {channels} channels, and std must be above 0"
                )
        else:
            mean, std = measure_normalisation(self.train_images)
            object.__setattr__(self, "mean", mean)
            object.__setattr__(self, "std", std)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width

    def checksum(self) -> str:
        """SHA-256 over shapes and bytes of all four tensors: the identity of the data."""
        digest = hashlib.sha256()
        for tensor in (self.train_images, self.train_labels, self.test_images, self.test_labels):
            array = tensor.cpu().contiguous().numpy()
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(array.data.cast("B") if array.size else b"")
        return digest.hexdigest()

    def to(self, device: torch.device) -> Dataset:
        return replace(
            self,
            train_images=self.train_images.to(device),
            train_labels=self.train_labels.to(device),
            test_images=self.test_images.to(device),
            test_labels=self.test_labels.to(device),
        )


def measure_normalisation(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of pixels scaled to [0, 1]."""
    means, stds = [], []
    levels = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(images.shape[1]):
        # A histogram is exact and, taken in parts, needs no wide copy of the images.
        share = torch.zeros(256, dtype=torch.float64)
        for part in images[:, channel].split(4096):
            share += torch.bincount(part.reshape(-1), minlength=256)
        share /= share.sum()
        mean = float((share * levels).sum())
        std = float((share * (levels - mean) ** 2).sum().sqrt())
        means.append(mean)
        stds.append(std if std > 0 else 1.0)  # a constant channel carries nothing: leave it be
    return tuple(means), tuple(stds)


def hold_out_classes(data: Dataset, num_test_classes: int) -> Dataset:
    """The few-shot form of a data set: its last classes are only for test episodes.

    Their train and test images are pooled, as FC100 pools CIFAR-100's.
    """
    if data.few_shot:
        raise FedscError(f"{data.name} holds out classes already: leave --few-shot away")
    kept = data.num_classes - num_test_classes
    if num_test_classes < 2 or kept < 2:
        raise FedscError(
            f"cannot hold out {num_test_classes} of the {data.num_classes} classes of {data.name} "
            f"(allowed: 2 to {data.num_classes - 2})"
        )
    images = torch.cat([data.train_images, data.test_images])
    labels = torch.cat([data.train_labels, data.test_labels])
    return split_by_class(
        data, images, labels, list(range(kept)), list(range(kept, kept + num_test_classes))
    )


def hold_out_images(data: Dataset, number: int) -> Dataset:
    """Some training images, the same share of every class, in the place of the test images.

    Drawn without the run's seed: all runs choose on the same images, and none sees the test set.
    """
    if data.few_shot:
        raise FedscError(f"{data.name} tests on other classes: leave --validation away")
    labels = data.train_labels.cpu().numpy()
    if number < data.num_classes or number > len(labels) - data.num_classes:
        raise FedscError(
            f"cannot hold out {number} of the {len(labels)} training images of {data.name} "
            f"(allowed: {data.num_classes} to {len(labels) - data.num_classes})"
        )
    order = generator("validation").permutation(len(labels))
    # The images of each class in random order; then the first ones of all classes in turn.
    place_in_class = np.empty(len(labels))
    for label in range(data.num_classes):
        members = order[labels[order] == label]
        place_in_class[members] = (np.arange(len(members)) + 0.5) / len(members)
    held_out = np.zeros(len(labels), dtype=bool)
    held_out[np.lexsort((labels, place_in_class))[:number]] = True
    mask = torch.from_numpy(held_out).to(data.train_labels.device)
    return replace(
        data,
        train_images=data.train_images[~mask],
        train_labels=data.train_labels[~mask],
        test_images=data.train_images[mask],
        test_labels=data.train_labels[mask],
    )


def split_by_class(
    data: Dataset, images: Tensor, labels: Tensor, train: Sequence[int], test: Sequence[int]
) -> Dataset:
    """A few-shot data set: images of the classes `train` to learn from, of `test` for episodes."""

    def pick(classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        new_label = torch.full((data.num_classes,), -1, dtype=torch.int64)
        new_label[list(classes)] = torch.arange(len(classes))
        relabelled = new_label[labels]
        return images[relabelled >= 0], relabelled[relabelled >= 0]

    train_images, train_labels = pick(train)
    test_images, test_labels = pick(test)
    return Dataset(
        name=data.name,
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        classes=tuple(data.classes[c] for c in train),
        mean=data.mean,
        std=data.std,
        augment=data.augment,
        few_shot=True,
        test_classes=tuple(data.classes[c] for c in test),
    )


def _check_split(name: str, part: str, images: Tensor, labels: Tensor, num_classes: int) -> None:
    where = f"{name}: {part}"
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise FedscError(
            f"{where} images are {images.dtype} of shape {tuple(images.shape)}; "
            "they must be uint8 of shape (N, channels, height, width)"
        )
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise FedscError(
            f"{where} labels are {labels.dtype} of shape {tuple(labels.shape)}; "
            f"they must be int64 of shape ({len(images)},)"
        )
    if len(images) == 0:
        raise FedscError(f"{where} holds no images")
    if images.numel() == 0:
        raise FedscError(f"{where} images are of shape {tuple(images.shape)}: they have no pixels")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise FedscError(
            f"{where} labels run from {low} to {high} (allowed: 0 to {num_classes - 1})"
        )
