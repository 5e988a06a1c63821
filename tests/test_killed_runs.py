"""Runs killed at any moment go on to the same end, bit for bit; damage, and full disks."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.killed_run import start

SETTINGS = {
    "sequential": ["--threads", "1"],
    "workers": ["--threads", "2"],
    "graphs": ["--threads", "1", "--slots", "2"],
}
METHODS = ["fedsc", "moon", "fedcda,warmup=0.2"]
# Two of four clients a round, and memory for less than one: states pass over the disk all the time.
TINY = (
    *("--train-limit", "200", "--clients", "4", "--participation", "0.5", "--rounds", "5"),
    *("--epochs", "1", "--lr", "0.05", "--client-memory", "0.00001", "--device", "cpu"),
)


def finish(process: ForkServerProcess, log: Path) -> str:
    process.join(120)
    said = log.read_text()
    assert process.exitcode == 0, said
    return said


def asked(method: str, engine: str, out: Path) -> list[str]:
    given = "--method", method, "--engine", engine, *SETTINGS[engine]
    return ["run", *given, *TINY, "--quiet", "--out", str(out)]


def what_remains(out: Path) -> tuple[bytes, list[Any], dict[str, bytes]]:
    """The last checkpoint, the records but for their times, and the clients' states it names."""
    (run,) = (path.parent for path in out.glob("*/spec.json"))
    assert (run / "summary.json").exists()
    assert not list(run.rglob("*.part"))
    state = (run / "state.safetensors").read_bytes()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [{k: v for k, v in json.loads(line).items() if k != "timing"} for line in lines]
    named = set(re.findall(rb"(?:memory|record)-\d+-[0-9a-f]{32}\.safetensors", state))
    clients = {name.decode(): (run / "clients" / name.decode()).read_bytes() for name in named}
    return state, records, clients


class Uncut:
    """What runs that nobody killed leave behind, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[tuple[str, str], tuple[Any, int, float]] = {}

    def __call__(self, method: str, engine: str) -> tuple[Any, int, float]:
        """What remains of it, its number of file operations, and the seconds it took."""
        if (method, engine) not in self.known:
            out = self.folder / f"{method}-{engine}"
            began = time.monotonic()
            log = out.with_suffix(".log")
            said = finish(start(asked(method, engine, out), log), log)
            seconds = time.monotonic() - began
            operations = int(said.split("file operations: ")[1])
            self.known[method, engine] = what_remains(out), operations, seconds
        return self.known[method, engine]


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Uncut:
    return Uncut(tmp_path_factory.mktemp("uncut"))


def kill_and_resume(
    method: str, engine: str, kills: int, uncut: Uncut, out: Path, rng: random.Random
) -> None:
    """Kill a run and what goes on with it again and again, in turn from outside at a random time
    and from inside at a random file operation."""
    wanted, operations, seconds = uncut(method, engine)
    arguments, log, happened = asked(method, engine, out), out.with_suffix(".log"), []
    for number in range(kills):
        if number % 2 == 0:
            kill_at = rng.randrange(1, operations + 1)
            process = start(arguments, log, kill_at)
            process.join(120)
            happened.append(f"operation {kill_at}")
        else:
            moment = rng.uniform(0.1, 1.1) * seconds
            process = start(arguments, log)
            process.join(moment)
            process.kill()
            process.join()
            happened.append(f"{moment:.2f} s")
        assert process.exitcode in (0, -signal.SIGKILL), (happened, log.read_text())
        if (out / "job.json").exists():
            arguments = ["run", "--quiet", "--resume", str(out)]
    finish(start(arguments, log), log)
    assert what_remains(out) == wanted, happened


@pytest.mark.parametrize(
    ("method", "engine"), [("fedsc", "sequential"), ("moon", "workers"), (METHODS[2], "graphs")]
)
def test_a_killed_run_ends_as_if_nothing_had_happened(
    method: str, engine: str, uncut: Uncut, tmp_path: Path
) -> None:
    kill_and_resume(method, engine, 1, uncut, tmp_path / "out", random.Random(f"{method} {engine}"))
