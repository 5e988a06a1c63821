"""A run is a folder. Everything shown to a person is derived from what is written here.

spec.json              what was run, with its hash and the version of this format
environment.json       versions, the code's revision and hardware it ran on
partition.json         images of each class at each client, the partition's hash, and the images'
                       shape and normalisation
partition.safetensors  the clients' indices into the training images
metrics.jsonl          one line of JSON per round; what depends on the clock is under "timing"
state.safetensors      the last checkpoint: the server's state, the round, and the clients' files
state-previous.safetensors, state-best.safetensors   the one before it, and of those before that the
                       one with the best accuracy
clients/               memories of clients, and what the server keeps of each, where there are any
summary.json           last, best and mean-of-last-10 accuracy; written when the run is complete
landscape.json, embedding.json, theory.json   what analysis/ made of the run, where it was asked to
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ..errors import FedscError
from ..federation import Federation
from ..files import (
    CannotReadError,
    cannot_read,
    explain_write_errors,
    open_here,
    parse_json,
    read_json,
    read_text,
    refuse_link,
    replace,
    write_atomically,
    write_through,
)
from ..report.checks import OPTIONAL_IN_A_RECORD, RECORD, wrong_in
from ..state import State, check_like, to_device
from .checkpoint import Facts, seal, unseal
from .grids import SWEEP, asked_in

FORMAT = 1
NEWEST = "state.safetensors"
PREVIOUS = "state-previous.safetensors"
BEST = "state-best.safetensors"
RUN_FILES = (  # all that a run folder holds
    *("spec.json", "environment.json", "partition.json", "partition.safetensors"),
    *("metrics.jsonl", NEWEST, PREVIOUS, BEST, "summary.json"),
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
        self.checkpoints: dict[str, Facts] = {}  # by file: what is kept, and its facts

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

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Refuse the folder while another process works in it; two would mix their rounds."""
        # Neither opened nor written while a run goes on: the lock is lost with the first descriptor
        # of the file that this process closes, whichever it is.
        path = self.path / "environment.json"
        with explain_write_errors(path):
            file = open_here(path, "r+b")
        with file:
            try:
                # Unlike flock's, this lock is not handed on to workers, which may outlive a kill.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise FedscError(
                    f"another process works in {self.path}: wait for its end, or stop it"
                ) from None
            except OSError:
                pass  # a file system that knows no locks
            yield

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
                with open_here(path, "ab") as file:
                    write_through(file, line.encode())
            except OSError:
                if path.exists():
                    os.truncate(path, size)
                raise

    def save_checkpoint(self, federation: Federation, accuracy: float) -> None:
        """All that the next round needs. The clients' files first, then the file that names them:
        a run killed in between finds its last checkpoint whole."""
        if self.checkpoints.get(NEWEST, {}).get("round") == federation.round:
            return
        facts = {
            "format": FORMAT,
            "round": federation.round,
            "accuracy": accuracy,
            "memories": federation.memories.save(),
            "records": federation.records.save(),
        }
        write_atomically(self.path / NEWEST, seal(federation.server, facts), self.make_way)
        self.checkpoints[NEWEST] = facts
        self.discard_unused(federation)

    def make_way(self) -> None:
        """The last checkpoint becomes the one before it, which stays only if it is the best."""
        known = self.checkpoints
        if PREVIOUS in known:
            best = known[BEST]["accuracy"] if BEST in known else -1.0
            if known[PREVIOUS]["accuracy"] > best:
                self.rename_checkpoint(PREVIOUS, BEST)
        if NEWEST in known:
            self.rename_checkpoint(NEWEST, PREVIOUS)

    def rename_checkpoint(self, old: str, new: str) -> None:
        replace(self.path / old, self.path / new)
        self.checkpoints[new] = self.checkpoints.pop(old)

    def discard_unused(self, federation: Federation) -> None:
        """Remove clients' files that no checkpoint names."""
        for store, key in ((federation.memories, "memories"), (federation.records, "records")):
            named = (facts[key].values() for facts in self.checkpoints.values())
            store.discard_unused(itertools.chain.from_iterable(named))

    def restore(self, federation: Federation) -> list[dict[str, Any]]:
        """Put a federation where the last checkpoint left it; returns the records until then.

        Rounds after the checkpoint are taken back: they are run again, with the same result. A
        damaged checkpoint is named and removed, and the one before it used; one that only cannot
        be read, as when too many files are open, ends it, and all stays as it was.
        """
        refuse_link(self.path / CLIENTS)
        lines: list[str] = []
        problems: dict[str, FedscError] = {}  # by file
        self.checkpoints = {}
        for name in (NEWEST, PREVIOUS, BEST):
            if not (self.path / name).exists():
                continue
            try:
                facts, state = unseal(self.path / name)
                if not self.checkpoints:
                    lines = self.take_up(federation, name, facts, state)
                    federation.memories.check()
                    federation.records.check()
                self.checkpoints[name] = facts
            except CannotReadError:
                raise
            except FedscError as error:
                problems[name] = error
        if problems and not self.checkpoints:
            reason = next(iter(problems.values()))
            raise FedscError(
                f"{self.path} cannot be resumed from any checkpoint: {reason}; "
                "remove the folder to run it from its beginning"
            )
        with explain_write_errors(self.path):
            for name, problem in problems.items():
                (self.path / name).unlink()
                federation.say(f"{problem}; going on after round {federation.round}")
            if self.checkpoints and NEWEST not in self.checkpoints:
                self.rename_checkpoint(next(iter(self.checkpoints)), NEWEST)
            for path in self.path.glob("*.part"):  # being written when the run was killed
                path.unlink()
            self.discard_unused(federation)
        if not self.checkpoints:  # killed before its first
            (self.path / "metrics.jsonl").unlink(missing_ok=True)
            return []
        text = "".join(f"{line}\n" for line in lines)
        write_atomically(self.path / "metrics.jsonl", text.encode())
        return [json.loads(line) for line in lines]

    def read_checkpoint(self, federation: Federation) -> None:
        """Put a federation where the last checkpoint left it, and write nothing."""
        self.take_up(federation, NEWEST, *unseal(self.path / NEWEST))

    def take_up(self, federation: Federation, name: str, facts: Facts, state: State) -> list[str]:
        """The state of a checkpoint into a federation; returns the lines of metrics.jsonl until
        then."""
        try:
            federation.round = facts["round"]
            federation.memories.restore(facts["memories"])
            federation.records.restore(facts["records"])
            if federation.round > federation.spec.rounds:
                raise ValueError(f"its round is {federation.round}")
            check_like(state, federation.server)
        except (OSError, ValueError) as error:
            raise FedscError(f"{self.path / name} is damaged: {error}") from None
        lines = self.lines_until(name, federation.round)
        # A group without tensors, such as FedCDA's sums before anybody has sent, leaves no trace.
        empty = {key: value for key, value in federation.server.items() if value == {}}
        federation.server = {**empty, **to_device(state, federation.device)}
        return lines

    def lines_until(self, checkpoint: str, rounds: int) -> list[str]:
        """The lines of metrics.jsonl for the rounds of a checkpoint."""
        path = self.path / "metrics.jsonl"
        try:
            lines = read_text(path).splitlines()[:rounds]
        except FileNotFoundError as error:
            raise FedscError(
                f"{path} cannot be read ({error.strerror}), and {checkpoint} "
                f"needs its {rounds} rounds"
            ) from None
        except OSError as error:
            raise cannot_read(path, error) from None
        if len(lines) < rounds:
            raise FedscError(f"{path} has {len(lines)} of the {rounds} rounds of {checkpoint}")
        for number, line in enumerate(lines, 1):
            record = parse_json(line, path)
            wrong = wrong_in(record, RECORD, OPTIONAL_IN_A_RECORD)
            if not wrong and record["accuracy"] is None:
                wrong = "an accuracy is missing"
            if not wrong and record["round"] != number:
                wrong = f"it is of round {record['round']}"
            if wrong:
                raise FedscError(f"{path} is damaged in line {number}: {wrong}")
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
    command = grid_command(out)
    if command is not None:  # a night's work of a grid is not for one run to replace
        names = ", ".join(file.stem for file in asked_in(out))
        raise FedscError(
            f"{out} is a folder of `{command}` ({names}; {len(runs)} "
            f"{'run' if len(runs) == 1 else 'runs'}), which --overwrite does not replace: "
            "choose another --out, or remove the folder yourself"
        )
    ours = {*runs, *(out / name for name in JOB_FILES if is_job(out))}
    ours |= {out / f"{name}.part" for name in JOB_FILES}  # being written when a run was killed
    others = [path for path in sorted(out.iterdir()) if path not in ours]
    if others and not runs:
        raise FedscError(
            f"{out} is not empty and holds no runs ({others[0].name}): choose another --out"
        )
    if runs and not overwrite:
        what, them = "another run", "it"
        if len(runs) > 1:
            what, them = f"{len(runs)} runs", f"all {len(runs)}"
        raise FedscError(
            f"{out} holds {what} ({some_of([run.name for run in runs])}): choose another --out; "
            f"--overwrite deletes {them}"
        )
    for run in runs:
        refuse_in_use(run)
    for run in runs:
        remove_run(run)
    for path in ours - set(runs):
        path.unlink(missing_ok=True)


def some_of(names: list[str]) -> str:
    """The first three, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def grid_command(out: Path) -> str | None:
    """The command that made this folder, where it holds the runs of a table, figure or sweep."""
    names = [file.stem for file in asked_in(out)]
    if not names:
        return None
    return "fedsc sweep" if SWEEP in names else "fedsc reproduce"


def is_job(out: Path) -> bool:
    """Whether this folder was made by `fedsc run`."""
    try:
        return {"methods", "seeds", "settings"} == set(read_json(out / "job.json"))
    except (OSError, ValueError, TypeError):
        return False


def is_run(path: Path) -> bool:
    """Whether a folder is a run of ours and holds nothing else."""
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        spec = read_json(path / "spec.json")
    except (OSError, ValueError):
        return False
    if not isinstance(spec, dict) or not {"format", "hash"} <= set(spec):
        return False
    if (path / CLIENTS).is_symlink():  # what it leads to is not ours
        return False
    names = {inner.name.removesuffix(".part") for inner in path.iterdir()}
    names = {name for name in names if not name.startswith(EVENTS)}
    return names <= {*RUN_FILES, CLIENTS} and all(
        inner.suffix in (".safetensors", ".part") for inner in (path / CLIENTS).glob("*")
    )


def refuse_in_use(run: Path) -> None:
    """Refuse to go on while another process works in a run, which is then not to be removed."""
    if (run / "environment.json").exists():
        with RunFolder(run).alone():
            pass


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

    packages = "fedsc", "numpy", "safetensors", "scikit-learn", "pillow"
    cuda = device.type == "cuda"
    return {
        "format": FORMAT,
        "python": platform.python_version(),
        # PyTorch's own word names its build, +cu130 or +cpu, which its package need not.
        "packages": {
            "torch": str(torch.__version__),
            **{name: version_of(name) for name in packages},
        },
        "revision": _revision(),
        "platform": platform.platform(),
        "processor": _processor(),
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "cuda": torch.version.cuda if cuda else None,
        "threads": torch.get_num_threads(),
    }


@functools.cache
def _revision() -> str | None:
    """The commit of the checkout that this code lies in, with `-dirty` where files differ from it;
    None where it was installed without one."""
    git = ["git", "-C", str(Path(__file__).parent)]

    def answer(*words: str) -> str:
        done = subprocess.run([*git, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # The environment it is installed into may lie in a checkout of something else.
        answer("ls-files", "--error-unmatch", Path(__file__).name)
        return answer("describe", "--always", "--dirty", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    """The CPU's name; `platform.processor()` is empty on most Linux machines."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
