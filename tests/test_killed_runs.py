"""Runs killed at any moment go on to the same end, bit for bit; damage, and full disks."""

from __future__ import annotations

import dataclasses
import errno
import json
import random
import re
import shutil
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from fedsc import Federation, FedscError, Run
from fedsc.experiments.checkpoint import unseal
from fedsc.experiments.folder import RunFolder, is_run
from fedsc.experiments.runner import execute, load
from fedsc.methods import method_from_text
from fedsc.progress import Silent
from fedsc.spec import RunSpec
from tests.killed_run import start
from tests.test_cli import small_disk

SETTINGS = {
    "sequential": ["--threads", "1"],
    "workers": ["--threads", "2"],
    "graphs": ["--threads", "1", "--slots", "2"],
}
METHODS = ["fedsc", "moon", "fedcda,warmup=0.2"]
PAIRS = [*zip(METHODS, SETTINGS, strict=True)]
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


@pytest.mark.parametrize(("method", "engine"), PAIRS)
def test_a_killed_run_ends_as_if_nothing_had_happened(
    method: str, engine: str, uncut: Uncut, tmp_path: Path
) -> None:
    kill_and_resume(method, engine, 1, uncut, tmp_path / "out", random.Random(f"{method} {engine}"))


def test_two_processes_do_not_work_in_one_run(tmp_path: Path) -> None:
    out, log, other_log = tmp_path / "out", tmp_path / "log", tmp_path / "other log"
    asked_for = [*asked("fedavg", "workers", out), "--rounds", "100000"]
    process = start(asked_for, log)
    try:
        metrics = out / "fedavg-seed0" / "metrics.jsonl"
        for _ in range(600):
            if metrics.exists():
                break
            time.sleep(0.1)
        for arguments in (["run", "--resume", str(out)], [*asked_for, "--overwrite"]):
            other = start(arguments, other_log)
            other.join(120)
            assert other.exitcode == 2
            assert f"another process works in {metrics.parent}" in other_log.read_text()
        assert process.is_alive()
    finally:
        process.kill()
        process.join()
    rounds = [json.loads(line)["round"] for line in metrics.read_text().splitlines()[:-1]]
    assert rounds == list(range(1, len(rounds) + 1))
    with RunFolder(metrics.parent).alone():  # the lock has ended with the process
        pass


# Checkpoints that are kept ------------------------------------------------------------------------

SPEC = RunSpec(
    dataset="digits",
    train_limit=200,
    clients=4,
    participation=0.5,
    rounds=6,
    epochs=1,
    lr=0.05,
    method="moon",
    engine="sequential",
    device="cpu",
)
STATES = ["state.safetensors", "state-previous.safetensors", "state-best.safetensors"]


class StopAfter(Silent):
    """Ctrl-C after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def round_done(self, record: dict[str, Any]) -> None:
        if record["round"] == self.rounds:
            raise KeyboardInterrupt


def run_until(out: Path, rounds: int | None = None, spec: RunSpec = SPEC) -> Run:
    """Run, or go on, with a checkpoint after every round."""
    progress = StopAfter(rounds) if rounds else None
    method = method_from_text(spec.method)
    return execute(spec, load(spec), method, None, out, progress, True, checkpoint_seconds=0)


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """A run of MOON stopped after its fourth round."""
    with pytest.raises(KeyboardInterrupt):
        run_until(tmp_path / "run", 4)
    return tmp_path / "run"


def named_files(path: Path) -> set[str]:
    facts, _ = unseal(path)
    return {*facts["memories"].values(), *facts["records"].values()}


def test_the_last_two_checkpoints_and_the_best_are_kept_with_their_clients(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for last in range(1, 7):
        with pytest.raises(KeyboardInterrupt):
            run_until(out, last)
        accuracies = [json.loads(x)["accuracy"] for x in open_lines(out / "metrics.jsonl")]
        there = [name for name in STATES if (out / name).exists()]
        assert there == STATES[:last]
        facts = [unseal(out / name)[0] for name in there]
        assert [each["round"] for each in facts[:2]] == [last, last - 1][: len(facts)]
        assert [each["accuracy"] for each in facts] == [accuracies[f["round"] - 1] for f in facts]
        assert max(each["accuracy"] for each in facts) == max(accuracies)
        on_disk = {path.name for path in (out / "clients").iterdir()}
        assert on_disk == set().union(*(named_files(out / name) for name in there))
    assert is_run(out)  # and may be overwritten


def open_lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_a_run_in_which_nobody_has_sent_anything_goes_on(tmp_path: Path) -> None:
    """FedCDA's sums are empty then, and an empty group of tensors is not in the file."""
    spec = dataclasses.replace(SPEC, method="fedcda", dropout=1.0, rounds=3)
    with pytest.raises(KeyboardInterrupt):
        run_until(tmp_path / "run", 1, spec)
    run = run_until(tmp_path / "run", None, spec)
    assert len(run.records) == 3
    assert run.server["chosen_sum"] == {}


def test_slow_checkpoints_are_written_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes half a second, so the next is due after 25: only the first and the last are."""
    written: list[int] = []
    save_checkpoint = RunFolder.save_checkpoint

    def slow(folder: RunFolder, federation: Federation, accuracy: float) -> None:
        time.sleep(0.5)
        written.append(federation.round)
        save_checkpoint(folder, federation, accuracy)

    monkeypatch.setattr(RunFolder, "save_checkpoint", slow)
    method = method_from_text(SPEC.method)
    execute(SPEC, load(SPEC), method, None, tmp_path / "run", checkpoint_seconds=1e-6)
    assert written == [1, 6]


def test_equal_runs_have_equal_files_whatever_their_checkpoints(cut: Path, tmp_path: Path) -> None:
    run_until(cut)
    execute(SPEC, load(SPEC), method_from_text("moon"), None, tmp_path / "uncut")  # one at the end
    ours, theirs = (path / "state.safetensors" for path in (cut, tmp_path / "uncut"))
    assert ours.read_bytes() == theirs.read_bytes()
    assert named_files(ours) == {path.name for path in (tmp_path / "uncut" / "clients").iterdir()}


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "cut short":
        del content[len(content) // 2 :]
    elif how == "a bit":
        content[-9] ^= 1
    elif how == "a bit of its facts":
        content[content.index(b"memories") + 30] ^= 1
    elif how == "empty":
        content.clear()
    elif how == "another file":
        content[:] = save({"w": torch.zeros(1)})
    path.write_bytes(content)


DAMAGES = ["cut short", "a bit", "a bit of its facts", "empty", "another file"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    cut: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(cut / "state.safetensors", how)
    run_until(cut)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{cut / 'state.safetensors'} is damaged" in said
    assert "going on after round 3" in said
    run_until(tmp_path / "uncut")
    assert (cut / "state.safetensors").read_bytes() == (
        tmp_path / "uncut" / "state.safetensors"
    ).read_bytes()


def test_a_damaged_or_missing_file_of_a_client_counts_as_well(
    cut: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, previous = (named_files(cut / name) for name in STATES[:2])
    file = cut / "clients" / min(newest - previous)
    damage(file, "a bit")
    with pytest.raises(KeyboardInterrupt):
        run_until(cut, 4)
    said = capsys.readouterr().err
    assert file.name in said
    assert "after round 3" in said
    file.unlink()  # it has been written again
    with pytest.raises(KeyboardInterrupt):
        run_until(cut, 5)
    assert file.name in capsys.readouterr().err


def test_the_best_is_the_last_resort_and_then_nothing_is_touched(
    cut: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = unseal(cut / "state-best.safetensors")[0]["round"]
    kept = {name: (cut / name).read_bytes() for name in STATES}
    for name in STATES:
        damage(cut / name, "a bit")
    damaged = {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()}
    with pytest.raises(FedscError, match=r"from any checkpoint: .* is damaged"):
        run_until(cut)
    assert {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()} == damaged
    (cut / "state-best.safetensors").write_bytes(kept["state-best.safetensors"])
    with pytest.raises(KeyboardInterrupt):
        run_until(cut, best + 1)
    assert capsys.readouterr().err.count(f"going on after round {best}") == 2


def test_rounds_without_their_lines_are_taken_back(
    cut: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = open_lines(cut / "metrics.jsonl")
    (cut / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines[:3]))
    run_until(cut)
    said = capsys.readouterr().err
    assert f"{cut / 'metrics.jsonl'} has 3 of the 4 rounds of state.safetensors; going on" in said
    assert "damaged" not in said
    rounds = [json.loads(line)["round"] for line in open_lines(cut / "metrics.jsonl")]
    assert rounds == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("file", ["state.safetensors", "a client's", "metrics.jsonl"])
@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError()])
def test_what_only_cannot_be_read_is_not_removed(
    cut: Path, monkeypatch: pytest.MonkeyPatch, file: str, error: BaseException
) -> None:
    """The checkpoint before the last could be."""
    if file == "a client's":
        file = min(named_files(cut / STATES[0]) - named_files(cut / STATES[1]))
    before = {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()}
    read_bytes = Path.read_bytes

    def fail(path: Path) -> bytes:
        if path.name == file:
            raise error
        return read_bytes(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        with pytest.raises(FedscError, match=r"Too many open files|than fits in memory") as raised:
            run_until(cut)
    assert "damaged" not in str(raised.value)
    assert "remove" not in str(raised.value)
    assert {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()} == before
    assert len(run_until(cut).records) == 6


def test_a_line_that_is_lost_at_the_front_is_missed(cut: Path) -> None:
    """Round 2 must not pass for round 1 with the checkpoint before the last, which needs three."""
    lines = open_lines(cut / "metrics.jsonl")
    (cut / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines[1:]))
    assert unseal(cut / "state-previous.safetensors")[0]["round"] == 3
    before = {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()}
    with pytest.raises(FedscError, match=r"from any checkpoint: .*metrics.jsonl has 3 of the 4"):
        run_until(cut)
    assert {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()} == before


# As it began --------------------------------------------------------------------------------------


def test_engine_and_threads_are_taken_up_again(tmp_path: Path) -> None:
    """Begun with two threads and so with workers, taken up where one thread is the default."""
    spec = dataclasses.replace(SPEC, engine="auto", threads=2)
    with pytest.raises(KeyboardInterrupt):
        run_until(tmp_path / "run", 2, spec)
    began = json.loads((tmp_path / "run" / "spec.json").read_text())
    assert (began["engine"], began["threads"]) == ("workers", 2)
    again = dataclasses.replace(spec, threads=None)
    assert torch.get_num_threads() == 1
    run = run_until(tmp_path / "run", None, again)
    assert (run.spec.engine, run.spec.threads) == ("workers", 2)
    assert torch.get_num_threads() == 1
    assert json.loads((tmp_path / "run" / "spec.json").read_text()) == began


def test_another_environment_is_said_and_another_device_refused(
    cut: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cut / "environment.json"
    began = json.loads(path.read_text())
    path.write_text(json.dumps({**began, "device": "NVIDIA H200"}))
    with pytest.raises(FedscError, match="began on NVIDIA H200 and cannot go on here on cpu"):
        run_until(cut)
    path.write_text(json.dumps({**began, "packages": {"torch": "1.0"}, "revision": "0abc"}))
    kept = (cut / "metrics.jsonl").read_bytes()
    (cut / "metrics.jsonl").unlink()
    with pytest.raises(FedscError, match=r"cannot be resumed .*metrics.jsonl cannot be read"):
        run_until(cut)
    assert capsys.readouterr().err == ""  # not first that it goes on
    (cut / "metrics.jsonl").write_bytes(kept)
    with pytest.raises(KeyboardInterrupt):
        run_until(cut, 5)
    said = capsys.readouterr().err
    assert f"PyTorch was 1.0, is now {torch.__version__}; the code was 0abc, is now " in said


# A full disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "engine"), PAIRS)
def test_a_disk_that_fills_in_mid_checkpoint(
    method: str, engine: str, uncut: Uncut, tmp_path: Path
) -> None:
    disk, log = tmp_path / "disk", tmp_path / "log"
    arguments = asked(method, engine, disk / "out")
    with small_disk(disk, 8_000):
        # Room for the run until its second checkpoint is being written.
        with pytest.raises(KeyboardInterrupt):
            run_until(disk / "probe", 1, dataclasses.replace(SPEC, method=method))
        one = sum(p.stat().st_size for p in (disk / "probe").rglob("*") if p.is_file())
        shutil.rmtree(disk / "probe")
        ballast = disk / "ballast"
        free = shutil.disk_usage(disk).free
        ballast.write_bytes(bytes(free - one - one // 2))
        process = start(arguments, log)
        process.join(120)
        said = log.read_text()
        assert process.exitcode == 2, said
        (line,) = [line for line in said.splitlines() if line.startswith("fedsc: ")]
        assert re.search(r"cannot write \S*(clients/\S*|state\.safetensors): No space left", line)
        assert f"fedsc run --resume {disk / 'out'}" in line
        (run,) = (path.parent for path in (disk / "out").glob("*/spec.json"))
        before = unseal(run / "state.safetensors")[0]["round"]
        assert before >= 1
        assert not list(run.rglob("*.part"))

        ballast.unlink()
        finish(start(["run", "--quiet", "--resume", str(disk / "out")], log), log)
        assert what_remains(disk / "out") == uncut(method, engine)[0]
