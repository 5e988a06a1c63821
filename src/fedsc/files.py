"""Files that are either all there or not there at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .errors import FedscError


def write_atomically(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    with explain_write_errors(path):
        try:
            with part.open("wb") as file:
                write_through(file, content)
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def write_through(file: IO[bytes], content: bytes) -> None:
    """To the disk, not only to its cache: a full disk or a lost machine must show here."""
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FedscError(
            f"cannot write {path}: {error.strerror}; make room or choose another place"
        ) from None
