"""The idx format: what the header says is what must be there."""

from __future__ import annotations

import gzip
import math
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsc.data import fashion_mnist
from fedsc.data.idx import read_idx
from fedsc.errors import FedscError


def idx(shape: tuple[int, ...], content: bytes) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + content


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
def test_gives_back_what_was_written(tmp_path: Path, shape: tuple[int, ...]) -> None:
    content = bytes(i % 251 for i in range(math.prod(shape)))
    for name in ("a-ubyte", "a-ubyte.gz"):
        array = read_idx(write(tmp_path / name, idx(shape, content)))
        assert array.shape == shape
        assert array.tobytes() == content


@pytest.mark.parametrize("name", ["a-ubyte", "a-ubyte.gz"])
@pytest.mark.parametrize("content", [b"12345", b"1234567"])
def test_too_short_or_too_long(tmp_path: Path, name: str, content: bytes) -> None:
    path = write(tmp_path / name, idx((2, 3), content))
    with pytest.raises(FedscError, match=rf"{name} is truncated or altered.*2 x 3 = 6 bytes"):
        read_idx(path)


@pytest.mark.parametrize("name", ["a-ubyte", "a-ubyte.gz"])
@pytest.mark.parametrize(
    ("shape", "said"),
    [((2**14, 2**14), "100 bytes follow"), ((2**32 - 1,) * 3, "allowed: at most 268435456")],
)
def test_a_lying_header_takes_no_memory(
    tmp_path: Path, name: str, shape: tuple[int, ...], said: str
) -> None:
    path = write(tmp_path / name, idx(shape, bytes(100)))
    tracemalloc.start()
    with pytest.raises(FedscError, match=said):
        read_idx(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_no_bytes_of_an_impossible_shape(tmp_path: Path) -> None:
    path = write(tmp_path / "a-ubyte", idx((0, 2, 2**31, 2**31), b""))
    with pytest.raises(FedscError, match="allowed: at most"):
        read_idx(path)


def test_a_truncated_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(idx((1000,), np.random.default_rng(0).bytes(1000)))
    (tmp_path / "a.gz").write_bytes(whole[:600])
    with pytest.raises(FedscError, match="truncated or altered"):
        read_idx(tmp_path / "a.gz")
    (tmp_path / "a.gz").write_bytes(whole[:300] + bytes(50) + whole[350:])
    with pytest.raises(FedscError, match="truncated or altered"):
        read_idx(tmp_path / "a.gz")


@pytest.mark.parametrize(
    "content", [b"", b"\0\0", b"\0\0\x0d\1\0\0\0\0", b"PK\3\4....", b"\0\0\x08\0", b"\0\0\x08\x09"]
)
def test_other_files(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(FedscError, match="not an idx file"):
        read_idx(write(tmp_path / "a-ubyte", content))


def test_truncated_header_and_absent_file(tmp_path: Path) -> None:
    with pytest.raises(FedscError, match="within its header"):
        read_idx(write(tmp_path / "a-ubyte", b"\0\0\x08\3\0\0"))
    with pytest.raises(FedscError, match="cannot read"):
        read_idx(tmp_path / "absent")
    (tmp_path / "plain.gz").write_bytes(idx((1,), b"x"))
    with pytest.raises(FedscError, match="truncated or altered"):
        read_idx(tmp_path / "plain.gz")


def test_fashion_mnist_with_other_content_is_refused(tmp_path: Path) -> None:
    for name in fashion_mnist.CONTENT_MD5:
        write(tmp_path / f"{name}.gz", idx((2,), b"ab"))
    with pytest.raises(FedscError, match=r"train-images-idx3-ubyte\.gz is altered"):
        fashion_mnist.read_folder(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(FedscError, match="holds neither"):
        fashion_mnist.read_folder(tmp_path)
