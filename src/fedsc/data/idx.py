"""The idx format of MNIST and Fashion-MNIST, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from ..errors import FedscError

UNSIGNED_BYTE = 0x08
CHUNK = 1 << 20
LARGEST = 1 << 28  # bytes of an array: a small .gz may hold a thousand times its size


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array in the file. Its header must agree with what follows it, to the byte."""
    try:
        with _open(path) as file:
            shape = _read_header(path, file)
            expected = math.prod(shape)
            # Without a side of 0: 0x2147483648x2147483648 has no bytes, and is no array either.
            if math.prod(side or 1 for side in shape) > LARGEST:
                raise FedscError(
                    f"{path} is altered: its header announces {_times(shape)} = {expected} bytes "
                    f"(allowed: at most {LARGEST}); get it again"
                )
            content = _read_at_most(file, expected + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FedscError(f"{path} is truncated or altered: {error}; get it again") from error
    except OSError as error:
        raise FedscError(f"cannot read {path}: {error.strerror or error}") from error
    if len(content) != expected:
        found = f"{len(content)} bytes follow" if len(content) < expected else "more bytes follow"
        raise FedscError(
            f"{path} is truncated or altered: its header announces {_times(shape)} = {expected} "
            f"bytes, {found}; get it again"
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _read_header(path: Path, file: BinaryIO) -> tuple[int, ...]:
    start = file.read(4)
    if (
        len(start) < 4
        or start[:2] != b"\0\0"
        or start[2] != UNSIGNED_BYTE
        or not 1 <= start[3] <= 4
    ):
        raise FedscError(
            f"{path} is not an idx file of bytes: it starts with {start.hex(' ') or 'nothing'}, "
            "expected 00 00 08 and the number of dimensions, 1 to 4"
        )
    sizes = file.read(4 * start[3])
    if len(sizes) < 4 * start[3]:
        raise FedscError(f"{path} is truncated within its header; get it again")
    return struct.unpack(f">{start[3]}I", sizes)


def _read_at_most(file: BinaryIO, limit: int) -> bytearray:
    # In pieces, since one read of `limit` bytes would reserve them all on the header's word.
    content = bytearray()
    while len(content) < limit and (piece := file.read(min(CHUNK, limit - len(content)))):
        content += piece
    return content


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape)
