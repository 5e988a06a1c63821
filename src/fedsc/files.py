"""Files that are either all there or not there at all, and files that others may have written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from .errors import FedscError

LARGEST_TEXT = 1 << 26  # bytes of a JSON, JSON-lines or TOML file; ours stay far below
LARGEST_NUMBER = 1e100  # in JSON
DEEPEST = 50  # nesting of JSON


class CannotWriteError(FedscError):
    """The disk is full, or the place cannot be written to."""


class CannotReadError(FedscError):
    """What is there may be whole: nothing is to be removed for this."""


def cannot_read(path: Path, error: OSError) -> CannotReadError:
    """Of a file that is there: too many open files, no rights, a disk that is gone."""
    return CannotReadError(f"{path} cannot be read: {error.strerror}; put that right and try again")


def write_atomically(
    path: Path, content: bytes, make_way: Callable[[], None] = lambda: None
) -> None:
    """Write a file; `make_way` is called when its content is on the disk and its name is not."""
    part = path.with_name(path.name + ".part")
    with explain_write_errors(path):
        try:
            part.unlink(missing_ok=True)  # were it a link, writing would change what it leads to
            with open_here(part, "wb") as file:
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


def check_place(path: Path) -> None:
    """Refuse a file that could not be written when the work for it is done."""
    if path.is_dir():
        raise FedscError(f"cannot write {path}: it is a folder; give a file")
    if not path.parent.is_dir():
        raise FedscError(f"cannot write {path}: there is no folder {path.parent}")


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotWriteError(
            f"cannot write {path}: {error.strerror}; make room or choose another place"
        ) from None


def open_here(path: Path, mode: str) -> IO[bytes]:
    """A file to write, unless its name is a link, which may lead out of the folder."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

    return open(path, mode, opener=opener)


def refuse_link(folder: Path) -> None:
    """What is written into a folder of ours must not end up in another one."""
    if folder.is_symlink():
        raise FedscError(f"{folder} is a link, and nothing is written through one: remove it")


def read_bytes(path: Path, largest: int | None = None) -> bytes:
    """A file of ours that others may have written. Raises OSError or FedscError."""
    size = path.stat().st_size
    if not path.is_file():  # a device has no end, and a pipe may have no beginning
        raise FedscError(f"{path} is damaged: it is no plain file")
    if largest is not None and size > largest:
        raise FedscError(f"{path} is damaged: it has {size:,} bytes (allowed: at most {largest:,})")
    try:
        return path.read_bytes()
    except MemoryError:
        raise CannotReadError(
            f"{path} has {size:,} bytes, which is more than fits in memory"
        ) from None


def read_text(path: Path) -> str:
    """Raises OSError or FedscError."""
    try:
        return read_bytes(path, LARGEST_TEXT).decode()
    except UnicodeDecodeError as error:
        raise FedscError(f"{path} is damaged: {error}") from None


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises OSError or FedscError."""
    return parse_json(read_text(path), path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file that has to be there. Raises FedscError."""
    try:
        found = read_json(path)
    except FileNotFoundError as error:
        raise FedscError(f"{path} is damaged: {error.strerror}") from None
    except OSError as error:
        raise cannot_read(path, error) from None
    if not isinstance(found, dict):
        raise FedscError(f"{path} is damaged: it holds no JSON object")
    return found


def parse_json(text: str, path: Path) -> Any:
    try:
        found = json.loads(text, parse_constant=_no_constant)
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()  # half a character cannot be printed
        if _LARGE.search(text):
            _refuse_large_numbers(found)
        _refuse_depth(found)
    except (ValueError, RecursionError) as error:
        raise FedscError(f"{path} is damaged: {error}") from None
    return found


# What is searched for in the text is rare, and looking at every value would take long.
_LARGE = re.compile(r"[eE]\+?\d{3}|\d{100}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _refuse_large_numbers(value: Any) -> None:
    """No number of ours comes near, and sums of such are no numbers any more."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _refuse_large_numbers(inner)
    elif isinstance(value, int | float) and abs(value) > LARGEST_NUMBER:
        raise ValueError(f"a number in it is beyond {LARGEST_NUMBER:g}")


def _refuse_depth(value: Any) -> None:
    """What is nested too deeply can be read but not, for example, written again."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        members = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for each in members for inner in each if isinstance(inner, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested more than {DEEPEST} deep")
