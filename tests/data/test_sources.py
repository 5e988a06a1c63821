"""Data sets by name: what is found, and what is said when it is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedsc.data import cifar
from fedsc.data.sources import (
    CIFAR100_SUPERCLASS,
    FC100_TEST_SUPERCLASSES,
    FC100_TRAIN_SUPERCLASSES,
    SOURCES,
    default_data_dir,
    load_dataset,
)
from fedsc.errors import FedscError


def test_digits_need_no_files_and_no_seed(tmp_path: Path) -> None:
    data = load_dataset("digits", tmp_path)
    source = SOURCES["digits"]
    assert data.image_shape == (1, 8, 8)
    assert (len(data.train_labels), len(data.test_labels)) == (source.num_train, source.num_test)
    assert data.classes == tuple("0123456789")
    assert int(data.train_images.max()) == 240
    assert not (data.train_images % 15).any()
    assert data.augment == "none"
    assert data.checksum() == load_dataset("digits", tmp_path, seed=5).checksum()
    # A fifth of every class, rounded down.
    total = data.train_labels.bincount() + data.test_labels.bincount()
    assert data.test_labels.bincount().tolist() == (total // 5).tolist()


@pytest.mark.parametrize("name", ["cifar11", "", "Cifar10", "folder", "npz", "zip:/x"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(FedscError, match=rf"unknown data set '{name}'.*allowed: .*folder:PATH"):
        load_dataset(name)


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "digits"])
def test_missing_files_name_the_folder_and_the_command(tmp_path: Path, name: str) -> None:
    with pytest.raises(FedscError) as caught:
        load_dataset(name, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert f"fedsc data get {name} --data-dir {tmp_path}" in str(caught.value)


def test_data_dir_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDSC_DATA", str(tmp_path))
    assert default_data_dir() == tmp_path
    monkeypatch.setenv("FEDSC_DATA", "")
    assert default_data_dir() == Path.home() / ".cache" / "fedsc"


def sparse(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


@pytest.mark.parametrize("inside", ["cifar-100-binary", "."])
def test_files_are_found_in_their_folder_or_directly(tmp_path: Path, inside: str) -> None:
    for name in ("train.bin", "test.bin"):
        sparse(tmp_path / inside / name, 10)
    assert SOURCES["fc100"].find(tmp_path) == (tmp_path / inside, "cifar-100-binary")
    assert SOURCES["cifar10"].find(tmp_path) is None


def test_an_incomplete_folder_says_what_is_missing(tmp_path: Path) -> None:
    for number in (1, 2, 4, 5):
        sparse(tmp_path / "cifar-10-batches-bin" / f"data_batch_{number}.bin", 10)
    with pytest.raises(FedscError, match=r"lacks data_batch_3\.bin, test_batch\.bin"):
        load_dataset("cifar10", tmp_path)


@pytest.mark.parametrize("layout", ["cifar-10-batches-bin", "cifar-10-batches-py"])
def test_truncated_and_altered_files(tmp_path: Path, layout: str) -> None:
    for name, official in cifar.OFFICIAL[layout].items():
        assert official.size is not None
        sparse(tmp_path / layout / name, official.size)
    with pytest.raises(FedscError, match=r"data_batch_1(\.bin)? is altered"):
        load_dataset("cifar10", tmp_path)
    first = next(iter(cifar.OFFICIAL[layout]))
    sparse(tmp_path / layout / first, 1_000_000)
    with pytest.raises(
        FedscError, match=r"data_batch_1(\.bin)? is truncated: it has 1000000 bytes"
    ):
        load_dataset("cifar10", tmp_path)


def test_fc100_divides_by_superclass() -> None:
    assert np.bincount(CIFAR100_SUPERCLASS).tolist() == [5] * 20
    assert not set(FC100_TRAIN_SUPERCLASSES) & set(FC100_TEST_SUPERCLASSES)


def test_fc100_from_the_real_files() -> None:
    found = SOURCES["fc100"].find(default_data_dir())
    if found is None:
        pytest.skip(f"cifar100 is not in {default_data_dir()}")
    data = load_dataset("fc100")
    assert data.few_shot
    assert data.train_labels.bincount().tolist() == [600] * 60
    assert data.test_labels.bincount().tolist() == [600] * 20
    assert not set(data.classes) & set(data.test_classes)
    assert data.classes[:3] == ("apple", "aquarium_fish", "bed")
    assert data.test_classes[:3] == ("baby", "beaver", "bee")
    folder, layout = found
    if layout == "cifar-100-binary":  # the files themselves say which superclass a class has
        labels, _ = cifar.read_binary(folder / "test.bin", 2)
        assert all(CIFAR100_SUPERCLASS[fine] == coarse for coarse, fine in labels.tolist())


def test_fashion_mnist_from_the_real_files() -> None:
    if SOURCES["fashion-mnist"].find(default_data_dir()) is None:
        pytest.skip(f"fashion-mnist is not in {default_data_dir()}")
    data = load_dataset("fashion-mnist")
    assert data.train_images.shape == (60_000, 1, 28, 28)
    assert data.test_labels.bincount().tolist() == [1000] * 10
    assert data.mean == pytest.approx((0.2860,), abs=1e-4)
    assert data.std == pytest.approx((0.3530,), abs=1e-4)
