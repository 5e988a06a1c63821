"""A user's own classes, from a file of theirs: `path/to/file.py:Name` for models and methods."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import FedscError, in_words

RUN_CODE = "FEDSC_RUN_CODE"


def is_path(text: str) -> bool:
    return ".py:" in text


def refuse_code(folder: Path, texts: Iterable[Any], named: Iterable[Any] = ()) -> None:
    """A folder of runs may name a file of code, which may have come with it: the file is run only
    if the user has `named` it too, or says so for this one command. A path without a beginning is
    meant from where the run was started: a file that is not there is not the folder's fault."""
    trusted, known = os.environ.get(RUN_CODE) == "1", set(map(str, named))
    for text in filter(is_path, map(str, texts)):
        if not trusted and text not in known:
            raise FedscError(
                f"{folder} asks to run the code in {text}. Look at the file; if you trust it, "
                f"set {RUN_CODE}=1 for this command, or name it yourself where there is an option"
            )
        file = file_of(text).absolute()
        if not os.path.isfile(file):  # unlike Path's, it takes any text
            raise FedscError(
                f"{folder} needs the code in {text}, and there is no file {file}: "
                "call from the folder in which the run was started, or put the file there"
            )


def file_of(path_and_name: str) -> Path:
    """The file of `path/to/file.py:Name`, with or without a method's options behind it."""
    return Path(os.path.expanduser(path_and_name.split(".py:")[0] + ".py"))


def object_from_path(kind: str, path_and_name: str) -> Any:
    """The class or function that `path/to/file.py:Name` names. This runs the file."""
    file, _, name = path_and_name.rpartition(":")  # the last colon: C:\\file.py:Name has two
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise FedscError(
            f"{kind} '{path_and_name}': there is no file {path}; give path/to/file.py:Name"
        )
    found = getattr(_import_file(path, path.stat().st_mtime_ns), name, None)
    if not callable(found):
        raise FedscError(
            f"{kind} '{path_and_name}': {path.name} defines no class or function '{name}'; "
            "give path/to/file.py:Name"
        )
    return found


@functools.cache
def _import_file(path: Path, modified: int) -> ModuleType:
    """Import once per version of the file, so that every client's model has the same class."""
    # Registered under a name that depends on the file only: pickling a model looks it up.
    module_name = f"fedsc_user_{path.stem}_{zlib.crc32(f'{path}:{modified}'.encode()):08x}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise FedscError(f"importing {path} failed: {in_words(error)}") from error
    return module
