"""A run is a folder. Everything shown to a person is derived from what is written here.

spec.json              what was run, with its hash and the version of this format
environment.json       versions and hardware it ran on
partition.json         images of each class at each client, and the partition's hash
partition.safetensors  the clients' indices into the training images
metrics.jsonl          one line of JSON per round; what depends on the clock is under "timing"
state.safetensors      the server's state and the clients' memories after the last round
summary.json           last, best and mean-of-last-10 accuracy; written when the run is complete
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save
from torch import Tensor

from ..errors import FedscError
from ..method import State

FORMAT = 1
MADE_BY_US = ("curves.png", "summary.md")  # beside the run folders


class RunFolder:
    """An open run folder, being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain_write_errors(path):
            path.mkdir(parents=True)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
        write_atomically(self.path / name, text.encode())

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        write_atomically(self.path / name, save(tensors))

    def append_record(self, record: dict[str, Any]) -> None:
        """Add a round's line; a line that does not fit on the disk is taken back whole."""
        path = self.path / "metrics.jsonl"
        line = json.dumps(record, allow_nan=False) + "\n"
        size = path.stat().st_size if path.exists() else 0
        with explain_write_errors(path):
            try:
                with path.open("ab") as file:
                    write_through(file, line.encode())
            except OSError:
                os.truncate(path, size)
                raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is either all there or not there at all."""
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
    except FileExistsError:
        raise FedscError(f"{path} exists already: choose another --out") from None
    except OSError as error:
        raise FedscError(
            f"cannot write {path}: {error.strerror}; make room or choose another --out"
        ) from None


def prepare_out(out: Path, overwrite: bool) -> None:
    """Make sure that `out` is free for new runs; with `overwrite`, remove the runs it holds."""
    if not out.exists():
        return
    if not out.is_dir():
        raise FedscError(f"--out {out} is a file: give a folder")
    runs = [path.parent for path in out.glob("*/spec.json")]
    if runs and not overwrite:
        raise FedscError(
            f"{out} holds another run ({runs[0].name}): choose another --out, "
            "or replace it with --overwrite"
        )
    if not runs and any(out.iterdir()):
        raise FedscError(f"{out} is not empty and holds no runs: choose another --out")
    for run in runs:
        shutil.rmtree(run)
    for name in MADE_BY_US:
        (out / name).unlink(missing_ok=True)


def flatten(state: State, prefix: str = "") -> dict[str, Tensor]:
    """A nested state as one flat dict with keys like "clients/3/model/fc.weight"."""
    flat: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}/"))
        else:
            flat[prefix + name] = value.detach().cpu().contiguous()
    return flat


def unflatten(flat: dict[str, Tensor]) -> State:
    """The nested state of `flatten`."""
    state: State = {}
    for name, tensor in flat.items():
        *path, last = name.split("/")
        inner = state
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = tensor
    return state


def environment(device: torch.device) -> dict[str, Any]:
    """The versions and the hardware that a number depends on."""

    def version_of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    packages = "fedsc", "torch", "numpy", "safetensors", "scikit-learn", "pillow"
    cuda = device.type == "cuda"
    return {
        "format": FORMAT,
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in packages},
        "platform": platform.platform(),
        "processor": _processor(),
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "cuda": torch.version.cuda if cuda else None,
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    """The CPU's name; `platform.processor()` is empty on most Linux machines."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
