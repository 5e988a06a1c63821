"""The Python version of a CIFAR file, read without running anything that is in it.

A pickle is a program for a small machine that may call any function of any module. The machine
here knows what CIFAR's files need and no more: it puts values into lists and dicts, and where a
call would be it recognises the few that numpy writes for an array of bytes. It calls nothing.
"""

from __future__ import annotations

import pickletools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import FedscError

LARGEST_FILE = 1 << 28  # bytes; CIFAR-100's is 155 million

VALUES = {  # opcodes that push what stands behind them
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Global(NamedTuple):
    """A name that a pickle asks for; here it stays one."""

    module: str
    name: str


RECONSTRUCT = (
    _Global("numpy.core.multiarray", "_reconstruct"),
    _Global("numpy._core.multiarray", "_reconstruct"),
)
NDARRAY, DTYPE = _Global("numpy", "ndarray"), _Global("numpy", "dtype")
ENCODE = _Global("_codecs", "encode")  # how Python 3 writes bytes in the old protocols
ADMITTED = {*RECONSTRUCT, NDARRAY, DTYPE, ENCODE}


class _Dtype:
    """Of bytes: nothing else is admitted."""


class _Array:
    """An array that is being made: empty first, filled by what follows."""

    values: npt.NDArray[np.uint8] | None = None


class _Mark:
    """On the stack, the place where the members of a tuple, list or dict begin."""


MARK = _Mark()


def read_python(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Labels (N, 1), or (N, 2) as coarse, fine for CIFAR-100, and images (N, 3, 32, 32)."""
    try:
        size = path.stat().st_size
        if not path.is_file() or size > LARGEST_FILE:
            raise ValueError(f"it has {size:,} bytes (allowed: at most {LARGEST_FILE:,})")
        batch = _load(path.read_bytes())
        if not isinstance(batch, dict):
            raise ValueError("it holds no dict")
        # Python 2 wrote the keys as what are bytes today.
        batch = {_text(key): value for key, value in batch.items()}
        columns = ("coarse_labels", "fine_labels") if "fine_labels" in batch else ("labels",)
        for column in ("data", *columns):
            if column not in batch:
                raise ValueError(f"no '{column}' in it")
        if not isinstance(batch["data"], _Array) or batch["data"].values is None:
            raise ValueError("its data are no array")
        images = batch["data"].values.reshape(-1, 3, 32, 32)
        labels = np.stack([_labels(batch[column]) for column in columns], axis=1)
        if len(labels) != len(images):
            raise ValueError(f"{len(labels)} labels for {len(images)} images")
    except OSError as error:
        raise FedscError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise FedscError(f"{path} is not a CIFAR file of the Python version: {error}") from error
    return labels, images


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _labels(values: Any) -> npt.NDArray[np.uint8]:
    # Lists of lists may hold each other, and a few bytes then stand for more than any memory.
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError("its labels are no list of whole numbers")
    return np.array(values, dtype=np.uint8)


def _load(content: bytes) -> Any:
    """The value that the pickle describes; raises nearly anything if it describes another."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, position in pickletools.genops(content):
        name = opcode.name
        if name in VALUES:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name == "MARK":
            stack.append(MARK)
        elif name in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE"):
            stack.append({"EMPTY_LIST": [], "EMPTY_DICT": {}, "EMPTY_TUPLE": ()}[name])
        elif name in TUPLES:
            stack.append(tuple(_take(stack, TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(_take_to_mark(stack)))
        elif name == "LIST":
            stack.append(_take_to_mark(stack))
        elif name == "DICT":
            members = _take_to_mark(stack)
            stack.append(_add_items({}, members))
        elif name in ("APPEND", "APPENDS"):
            members = _take(stack, 1) if name == "APPEND" else _take_to_mark(stack)
            if not isinstance(stack[-1], list):
                raise ValueError("something is appended to no list")
            stack[-1].extend(members)
        elif name in ("SETITEM", "SETITEMS"):
            members = _take(stack, 2) if name == "SETITEM" else _take_to_mark(stack)
            _add_items(stack[-1], members)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_admit(*str(argument).split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack.append(_admit(*_take(stack, 2)))
        elif name == "REDUCE":
            stack.append(_recognise(*_take(stack, 2)))
        elif name == "BUILD":
            [state] = _take(stack, 1)
            _fill(stack[-1], state)
        elif name == "STOP":
            [value] = stack
            return value
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"no CIFAR file needs {name}, at byte {position}; nothing was run")
    raise ValueError("it has no end")


def _take(stack: list[Any], number: int) -> list[Any]:
    taken = stack[-number:]
    if len(taken) < number or any(value is MARK for value in taken):
        raise ValueError("values are missing")
    del stack[-number:]
    return taken


def _take_to_mark(stack: list[Any]) -> list[Any]:
    taken = []
    while (value := stack.pop()) is not MARK:
        taken.append(value)
    return taken[::-1]


def _add_items(target: Any, members: list[Any]) -> dict[str | bytes, Any]:
    # Hashing any other key could follow it down to the end of the C stack.
    keys = members[::2]
    if not isinstance(target, dict) or not all(isinstance(key, str | bytes) for key in keys):
        raise ValueError("something is set in no dict, or under no text")
    target.update(zip(keys, members[1::2], strict=True))
    return target


def _admit(module: Any, name: Any) -> _Global:
    if not (isinstance(module, str) and isinstance(name, str)):
        raise ValueError("it asks for something without a name; nothing was run")
    found = _Global(module, name)
    if found not in ADMITTED:
        asked = f"{module}.{name}"[:80]
        raise ValueError(f"it asks for '{asked}', which no CIFAR file needs; nothing was run")
    return found


def _recognise(function: Any, arguments: Any) -> Any:
    """What a call would give, for the calls that numpy and pickle write for arrays of bytes."""
    if not isinstance(function, _Global) or not isinstance(arguments, tuple):
        raise ValueError("it calls what is no function; nothing was run")
    if function in RECONSTRUCT:
        return _Array()
    if function == DTYPE:
        if not arguments or arguments[0] not in ("u1", b"u1"):
            raise ValueError("its array is not of bytes")
        return _Dtype()
    if function == ENCODE:
        text, encoding = arguments
        if not isinstance(text, str) or encoding != "latin1":
            raise ValueError("its bytes are not written in latin1")
        return text.encode("latin1")
    raise ValueError(f"it calls {function.module}.{function.name}; nothing was run")


def _fill(made: Any, state: Any) -> None:
    if isinstance(made, _Dtype):
        return  # a byte has no byte order
    if not isinstance(made, _Array) or not isinstance(state, tuple):
        raise ValueError("it fills what is no array")
    _version, shape, dtype, in_fortran_order, content = state
    if not isinstance(dtype, _Dtype):
        raise ValueError("its array is not of bytes")
    if isinstance(content, str):
        content = content.encode("latin1")  # as Python 2 wrote bytes
    # The reshape fails unless the file holds as many bytes as it claims.
    flat = np.frombuffer(content, np.uint8)
    made.values = flat.reshape(shape, order="F" if in_fortran_order else "C")
