"""The Python version of a CIFAR file, read without running anything that is in it.

A pickle may name any function of any module and have it called. Here every name it may use leads
to a stand-in of this file, which does nothing but keep bytes; any other name is refused.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import FedscError


class _Dtype:
    """Stands in for numpy.dtype: CIFAR's arrays are of bytes and nothing else is admitted."""

    def __init__(self, code: object, *_align_and_copy: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"an array of type {code!r}, expected 'u1'")

    def __setstate__(self, _byte_order_and_so_on: object) -> None:
        """A byte has no byte order."""


class _Array:
    """Stands in for numpy.ndarray: shape and bytes, as numpy's own pickles state them."""

    values: npt.NDArray[np.uint8]

    def __setstate__(self, state: tuple[Any, Any, Any, Any, Any]) -> None:
        _version, shape, _dtype, in_fortran_order, content = state
        flat = np.frombuffer(content, np.uint8)
        # The reshape fails unless the file holds as many bytes as it claims.
        self.values = flat.reshape(shape, order="F" if in_fortran_order else "C")


def _reconstruct(_kind: object, _shape: object, _typecode: object) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in the old pickle protocols."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in encoding {encoding!r}, expected 'latin1'")
    return text.encode("latin1")


_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for '{module}.{name}', which no CIFAR file needs; nothing was run"
            ) from None


def read_python(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Labels (N, 1), or (N, 2) as coarse, fine for CIFAR-100, and images (N, 3, 32, 32)."""
    try:
        # Read as a whole: a length stated inside the pickle cannot then exceed what is there.
        batch = _PlainUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        # Python 2 wrote the keys as what are bytes today.
        batch = {key if isinstance(key, str) else key.decode(): batch[key] for key in batch}
        columns = ("coarse_labels", "fine_labels") if "fine_labels" in batch else ("labels",)
        images = batch["data"].values.reshape(-1, 3, 32, 32)
        labels = np.array([batch[column] for column in columns], dtype=np.uint8).T
        if len(labels) != len(images):
            raise ValueError(f"{len(labels)} labels for {len(images)} images")
    except OSError as error:
        raise FedscError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        reason = f"no {error} in it" if isinstance(error, KeyError) else error
        raise FedscError(f"{path} is not a CIFAR file of the Python version: {reason}") from error
    return labels, images
