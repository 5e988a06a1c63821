"""CIFAR files: read right, refused when damaged, and never run."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsc.data.cifar import CIFAR10_CLASSES, CIFAR100_CLASSES, read_binary, read_files
from fedsc.data.cifar_pickle import read_python
from fedsc.data.sources import SOURCES, default_data_dir, load_dataset
from fedsc.data.verify import Official, verify_file
from fedsc.errors import FedscError


def some_images(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


def write_binary(path: Path, labels: np.ndarray, images: np.ndarray) -> None:
    np.concatenate([labels, images.reshape(len(images), -1)], axis=1).tofile(path)


def python2_pickle(labels: bytes, images: np.ndarray) -> bytes:
    """What Python 2's pickle wrote for the official files, opcode by opcode."""
    pixels = images.tobytes()
    shape = b"K" + bytes([len(images)]) + b"M" + struct.pack("<H", 3072) + b"\x86"
    return (
        b"\x80\x02}(U\x04data"
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01" + shape + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + struct.pack("<I", len(pixels)) + pixels + b"tb"
        b"U\x06labels](" + b"".join(b"K" + bytes([label]) for label in labels) + b"eu."
    )


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_binary_gives_back_what_was_written(tmp_path: Path, label_bytes: int) -> None:
    images = some_images(4)
    labels = np.arange(4 * label_bytes, dtype=np.uint8).reshape(4, label_bytes)
    write_binary(tmp_path / "a.bin", labels, images)
    found_labels, found_images = read_binary(tmp_path / "a.bin", label_bytes)
    assert np.array_equal(found_images, images)
    assert np.array_equal(found_labels, labels)


def test_files_are_joined_in_order_with_the_fine_label(tmp_path: Path) -> None:
    images = some_images(5)
    labels = np.array([[9, 1], [9, 2], [9, 3], [9, 4], [9, 5]], dtype=np.uint8)
    write_binary(tmp_path / "a.bin", labels[:2], images[:2])
    write_binary(tmp_path / "b.bin", labels[2:], images[2:])
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
    found_images, found_labels = read_files(paths, 5, label_bytes=2)
    assert np.array_equal(found_images, images)
    assert found_labels.tolist() == [1, 2, 3, 4, 5]
    for wrong in (4, 6):
        with pytest.raises(FedscError, match=f"{wrong} images of|hold {wrong}"):
            read_files(paths, wrong, label_bytes=2)


def test_truncated_binary_is_named(tmp_path: Path) -> None:
    write_binary(tmp_path / "a.bin", np.zeros((2, 1), np.uint8), some_images(2))
    os.truncate(tmp_path / "a.bin", 5000)
    with pytest.raises(FedscError, match=r"a\.bin is truncated.*5000 bytes"):
        read_binary(tmp_path / "a.bin", 1)


def test_verify_tells_truncated_from_altered(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1.bin"
    official = Official(4, hashlib.md5(b"abcd").hexdigest())
    path.write_bytes(b"abcd")
    verify_file(path, official)
    path.write_bytes(b"abc")
    with pytest.raises(FedscError, match=r"data_batch_1\.bin is truncated.*3 bytes.*has 4"):
        verify_file(path, official)
    path.write_bytes(b"abcde")
    with pytest.raises(FedscError, match="too long"):
        verify_file(path, official)
    path.write_bytes(b"abcx")
    with pytest.raises(FedscError, match="altered"):
        verify_file(path, official)
    with pytest.raises(FedscError, match="cannot read"):
        verify_file(tmp_path / "absent", official)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_python_version_as_python_3_writes_it(tmp_path: Path, protocol: int) -> None:
    images = some_images(3)
    batch = {
        b"data": images.reshape(3, 3072),
        b"fine_labels": [7, 8, 9],
        b"coarse_labels": [1, 2, 3],
        b"filenames": [b"a.png", b"b.png", b"c.png"],
    }
    (tmp_path / "train").write_bytes(pickle.dumps(batch, protocol=protocol))
    labels, found = read_python(tmp_path / "train")
    assert np.array_equal(found, images)
    assert labels.tolist() == [[1, 7], [2, 8], [3, 9]]


def test_python_version_as_python_2_wrote_it(tmp_path: Path) -> None:
    images = some_images(2)
    (tmp_path / "data_batch_1").write_bytes(python2_pickle(b"\x03\x05", images))
    labels, found = read_python(tmp_path / "data_batch_1")
    assert np.array_equal(found, images)
    assert labels.tolist() == [[3], [5]]


def test_fortran_order_is_undone(tmp_path: Path) -> None:
    images = some_images(3)
    batch = {"data": np.asfortranarray(images.reshape(3, 3072)), "labels": [0, 1, 2]}
    (tmp_path / "b").write_bytes(pickle.dumps(batch, protocol=2))
    assert np.array_equal(read_python(tmp_path / "b")[1], images)


def test_a_pickle_that_runs_code_does_not(tmp_path: Path) -> None:
    trace = tmp_path / "trace"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {trace}",)

    (tmp_path / "bomb").write_bytes(pickle.dumps({"data": Bomb(), "labels": []}))
    with pytest.raises(FedscError, match=r"bomb.*'(posix|nt)\.system'"):
        read_python(tmp_path / "bomb")
    assert not trace.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy.core.multiarray\nfromfile\n(S'/etc/passwd'\ntR.",
        b"cnumpy\ndtype\n(S'O'\ntR.",
        b"cnumpy\nndarray\n((I1000000000000\ntS'u1'\ntR.",
        b"c_codecs\nencode\n(Vx\nVzip\ntR.",
        b"I1\n.",
        b"(d.",
        b"",
    ],
)
def test_other_pickles_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd").write_bytes(content)
    with pytest.raises(FedscError, match="odd is not a CIFAR file"):
        read_python(tmp_path / "odd")


def test_an_array_that_claims_more_than_it_has(tmp_path: Path) -> None:
    whole = python2_pickle(b"\x03\x05", some_images(2))
    (tmp_path / "odd").write_bytes(whole.replace(b"K\x02M\x00\x0c", b"K\xffM\x00\x0c"))
    with pytest.raises(FedscError, match="odd is not a CIFAR file"):
        read_python(tmp_path / "odd")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(position=st.integers(0, 250), value=st.integers(0, 255), keep=st.floats(0, 1))
def test_damage_is_an_error_or_harmless(
    tmp_path: Path, position: int, value: int, keep: float
) -> None:
    content = bytearray(python2_pickle(b"\x03", some_images(1)))
    content[position] = value
    (tmp_path / "odd").write_bytes(content[: int(keep * len(content)) + 1])
    try:
        labels, images = read_python(tmp_path / "odd")
    except FedscError:
        return
    assert labels.shape == (1, 1)
    assert images.shape == (1, 3, 32, 32)


def test_class_names() -> None:
    assert len(set(CIFAR10_CLASSES)) == 10
    assert CIFAR10_CLASSES[3] == "cat"
    assert len(set(CIFAR100_CLASSES)) == 100
    assert list(CIFAR100_CLASSES) == sorted(CIFAR100_CLASSES)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_real_files(name: str) -> None:
    if SOURCES[name].find(default_data_dir()) is None:
        pytest.skip(f"{name} is not in {default_data_dir()}")
    data = load_dataset(name)
    assert data.train_images.shape == (50_000, 3, 32, 32)
    assert data.test_images.shape == (10_000, 3, 32, 32)
    assert data.train_labels.bincount().tolist() == [50_000 // data.num_classes] * data.num_classes
    measured = data.train_images[::10].double().mean(dim=(0, 2, 3)) / 255
    assert measured.tolist() == pytest.approx(data.mean, abs=0.005)
