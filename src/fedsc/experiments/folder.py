"""A run is a folder. Everything shown to a person is derived from what is written here.

spec.json              what was run, with its hash and the version of this format
environment.json       versions and hardware it ran on
partition.json         images of each class at each client, the partition's hash, and the images'
                       shape and normalisation
partition.safetensors  the clients' indices into the training images
metrics.jsonl          one line of JSON per round; what depends on the clock is under "timing"
state.safetensors      the checkpoint: the server's state, the round, and the clients' files
clients/               memories of clients, and what the server keeps of each, where there are any
summary.json           last, best and mean-of-last-10 accuracy; written when the run is complete
landscape.json, embedding.json, theory.json   what analysis/ made of the run, where it was asked to
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import FedscError
from ..federation import Federation
from ..files import explain_write_errors, write_atomically, write_through
from ..state import flatten, to_device, unflatten

FORMAT = 1
RUN_FILES = (  # all that a run folder holds
    *("spec.json", "environment.json", "partition.json", "partition.safetensors"),
    *("metrics.jsonl", "state.safetensors", "summary.json"),
    *("landscape.json", "embedding.json", "theory.json"),
)
CLIENTS = "clients"  # and this folder
EVENTS = "events.out.tfevents."  # and TensorBoard's files, which begin with this
LONGEST_NAME = 80  # of a folder; beyond that a hash stands for the rest
JOB_FILES = ("job.json", "curves.png", "summary.md")  # beside the run folders


class RunFolder:
    """A run folder being written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def created(self) -> Iterator[None]:
        """Make the folder; what the caller then writes is in it from its first moment, or the
        folder is not there at all."""
        if self.path.exists():
            raise FedscError(f"{self.path} exists already: choose another folder")
        final, self.path = self.path, self.path.with_name(f".{self.path.name}.part")
        shutil.rmtree(self.path, ignore_errors=True)  # of a run killed at this very point
        try:
            with explain_write_errors(final):
                self.path.mkdir(parents=True)
                yield
                self.path.rename(final)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        finally:
            self.path = final

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
                if path.exists():
                    os.truncate(path, size)
                raise

    def save_checkpoint(self, federation: Federation) -> None:
        """All that the next round needs. The clients' files first, then the file that names them:
        a run killed in between finds its last checkpoint whole."""
        facts = {
            "format": FORMAT,
            "round": federation.round,
            "memories": federation.memories.save(),
            "records": federation.records.save(),
        }
        # One key: safetensors writes several in random order, and equal runs give equal files.
        content = save(flatten(federation.server), metadata={"fedsc": json.dumps(facts)})
        write_atomically(self.path / "state.safetensors", content)
        federation.memories.discard_unused()
        federation.records.discard_unused()

    def restore(self, federation: Federation) -> list[dict[str, Any]]:
        """Put a federation where the last checkpoint left it; returns the records until then.

        Rounds after the checkpoint are taken back: they are run again, with the same result.
        """
        if not (self.path / "state.safetensors").exists():  # killed before its first checkpoint
            (self.path / "metrics.jsonl").unlink(missing_ok=True)
            return []
        lines = self.read_checkpoint(federation)
        text = "".join(f"{line}\n" for line in lines)
        write_atomically(self.path / "metrics.jsonl", text.encode())
        return [json.loads(line) for line in lines]

    def read_checkpoint(self, federation: Federation) -> list[str]:
        """Put a federation where the last checkpoint left it, and write nothing; returns the lines
        of metrics.jsonl until then."""
        path = self.path / "state.safetensors"
        try:
            lines = (self.path / "metrics.jsonl").read_text().splitlines()
            with safe_open(path, "pt") as file:
                facts = json.loads(file.metadata()["fedsc"])
                flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            federation.round = int(facts["round"])
            federation.memories.restore(facts["memories"])
            federation.records.restore(facts["records"])
            lines = lines[: federation.round]
            if len([json.loads(line) for line in lines]) < federation.round:
                raise ValueError(f"metrics.jsonl has {len(lines)} of {federation.round} rounds")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise FedscError(f"{self.path} is damaged and cannot be resumed: {error}") from None
        federation.server = to_device(unflatten(flat), federation.device)
        return lines


def prepare_out(out: Path, overwrite: bool) -> None:
    """Make sure that `out` is free for new runs; with `overwrite`, remove the runs it holds.

    Nothing is removed that a run of ours did not write.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise FedscError(f"--out {out} is a file: give a folder")
    runs = [path for path in sorted(out.iterdir()) if is_run(path)]
    ours = {*runs, *(out / name for name in JOB_FILES if is_job(out))}
    others = [path for path in sorted(out.iterdir()) if path not in ours]
    if others and not runs:
        raise FedscError(
            f"{out} is not empty and holds no runs ({others[0].name}): choose another --out"
        )
    if runs and not overwrite:
        raise FedscError(
            f"{out} holds another run ({runs[0].name}): choose another --out, "
            "or replace it with --overwrite"
        )
    for run in runs:
        remove_run(run)
    for path in ours - set(runs):
        path.unlink(missing_ok=True)


def is_job(out: Path) -> bool:
    """Whether this folder was made by `fedsc run`."""
    try:
        return {"methods", "seeds", "settings"} == set(json.loads((out / "job.json").read_text()))
    except (OSError, ValueError, TypeError):
        return False


def is_run(path: Path) -> bool:
    """Whether a folder is a run of ours and holds nothing else."""
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        spec = json.loads((path / "spec.json").read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(spec, dict) or not {"format", "hash"} <= set(spec):
        return False
    names = {inner.name.removesuffix(".part") for inner in path.iterdir()}
    names = {name for name in names if not name.startswith(EVENTS)}
    return names <= {*RUN_FILES, CLIENTS} and all(
        inner.suffix in (".safetensors", ".part") for inner in (path / CLIENTS).glob("*")
    )


def remove_run(path: Path) -> None:
    for inner in [*path.glob(f"{CLIENTS}/*"), *(p for p in path.iterdir() if p.is_file())]:
        inner.unlink()
    if (path / CLIENTS).exists():
        (path / CLIENTS).rmdir()
    path.rmdir()


def folder_name(text: str) -> str:
    """A method or data set as part of a path: `npz:/data/x.npz` must not lead elsewhere."""
    kept = "".join(c if c.isalnum() or c in "-._=+" else "_" for c in text).strip(".") or "run"
    if len(kept) <= LONGEST_NAME:
        return kept
    return kept[:LONGEST_NAME] + "-" + hashlib.sha256(text.encode()).hexdigest()[:8]


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
