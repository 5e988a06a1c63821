"""Is a file the official one? Its size is looked at first: that is free and says more."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from ..errors import FedscError


class Official(NamedTuple):
    """What is known of a published file; `size` None where it could not be established."""

    size: int | None
    md5: str


def verify_file(path: Path, official: Official) -> None:
    """Raises FedscError unless `path` holds exactly the official bytes."""
    try:
        size = path.stat().st_size
        if official.size is not None and size != official.size:
            fault = "truncated" if size < official.size else "too long"
            raise FedscError(
                f"{path} is {fault}: it has {size} bytes, the official file has "
                f"{official.size}; remove it and get it again"
            )
        found = file_md5(path)
    except OSError as error:
        raise FedscError(f"cannot read {path}: {error.strerror or error}") from error
    if found != official.md5:
        raise FedscError(
            f"{path} is altered: its MD5 is {found}, that of the official file "
            f"{official.md5}; remove it and get it again"
        )


def file_md5(path: Path) -> str:
    with path.open("rb") as file:
        # Not for security: MD5 is what the publishers of these files give.
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
