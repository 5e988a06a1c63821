"""Decoding many image files of one size into one array."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from ..errors import FedscError, in_words
from .limits import check_expansion

Progress = Callable[[str, int, int | None], None]  # what is done, how much of it, of how much

BATCH = 256  # images per task: large enough that handing tasks out costs nothing
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")  # of all that Pillow knows, EPS would run programs
LARGEST_SIDE = 4096


def decode(
    paths: Sequence[Path], size: tuple[int, int], channels: int, progress: Progress | None = None
) -> npt.NDArray[np.uint8]:
    """Images (N, channels, height, width); `size` is (width, height) as Pillow has it."""
    width, height = size
    check_expansion(
        f"{paths[0].parent} and its like" if len(paths) > 1 else str(paths[0]),
        sum(_size(path) for path in paths),
        len(paths) * channels * height * width,
    )
    images = np.empty((len(paths), channels, height, width), dtype=np.uint8)

    def decode_batch(start: int) -> None:
        for index, path in enumerate(paths[start : start + BATCH], start):
            images[index] = _decode_one(path, size, channels)

    # Threads, not processes: Pillow lets go of the interpreter while it decodes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        starts = range(0, len(paths), BATCH)
        try:
            for start, _ in zip(starts, pool.map(decode_batch, starts), strict=True):
                if progress is not None:
                    progress("decoding images", min(start + BATCH, len(paths)), len(paths))
        except BaseException:
            pool.shutdown(cancel_futures=True)  # one bad image: do not decode the rest first
            raise
    return images


def inspect(path: Path) -> tuple[tuple[int, int], bool]:
    """(width, height) and whether the image is grey, from its header alone."""
    with _open(path) as image:
        # Pillow would cut 16-bit and floating-point pixels off at 255 without a word.
        if image.mode.startswith(("I", "F")):
            raise FedscError(f"{path} has pixels of mode {image.mode}; they must have 8 bits")
        return image.size, image.mode in ("1", "L", "LA")


def _decode_one(path: Path, size: tuple[int, int], channels: int) -> npt.NDArray[np.uint8]:
    with _open(path) as image:
        if image.size != size:
            raise FedscError(
                f"{path} is {_by(image.size)} pixels, expected {_by(size)}; "
                "all images must have one size"
            )
        try:
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
        except Exception as error:  # Pillow has many ways to say "broken"
            raise FedscError(f"{path} is truncated or altered: {in_words(error)}") from error
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _open(path: Path) -> Image.Image:
    if not path.is_file():  # a pipe would be waited for
        raise FedscError(f"{path} is no file")
    try:
        image = Image.open(path, formats=FORMATS)
    except Exception as error:  # a damaged header can raise nearly anything
        raise FedscError(f"cannot read {path} as an image: {in_words(error)}") from error
    if max(image.size) > LARGEST_SIDE or min(image.size) < 1:
        image.close()
        raise FedscError(
            f"{path} is {_by(image.size)} pixels (allowed: 1 to {LARGEST_SIDE} a side)"
        )
    return image


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError) as error:
        raise FedscError(f"cannot read {path}: {error}") from None


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
