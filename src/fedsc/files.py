"""Files that are either all there or not there at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from .errors import FedscError


class CannotWriteError(FedscError):
    """The disk is full, or the place cannot be written to."""


def write_atomically(
    path: Path, content: bytes, make_way: Callable[[], None] = lambda: None
) -> None:
    """Write a file; `make_way` is called when its content is on the disk and its name is not."""
    part = path.with_name(path.name + ".part")
    with explain_write_errors(path):
        try:
            with part.open("wb") as file:
                write_through(file, content)
            make_way()
            replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def replace(old: Path, new: Path) -> None:
    """Give a file another name, for good: the folder's entry is on the disk as well."""
    os.replace(old, new)
    folder = os.open(new.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot do this for folders
            raise
    finally:
        os.close(folder)


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
        raise CannotWriteError(
            f"cannot write {path}: {error.strerror}; make room or choose another place"
        ) from None
