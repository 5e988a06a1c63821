"""Grids of runs as a person runs them: skipped, resumed, killed, shared, damaged."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedsc
from fedsc import FedscError
from fedsc.cli import main
from fedsc.experiments.cells import Cell, cells_of, read_cell
from fedsc.experiments.grids import GRIDS, SCALES, grid
from fedsc.experiments.reproduce import parse_values, reproduce, results, sweep, sweep_grid
from fedsc.experiments.runner import execute, load
from fedsc.progress import Silent


def run_grid(
    out: Path,
    name: str = "table1",
    columns: str = "cifar10/nid2",
    methods: str = "fedavg,fedsc",
    seeds: int = 1,
) -> tuple[bool, str]:
    """In this process, at smoke scale: whether nothing was left out, and what was printed."""
    console = Console(file=io.StringIO(), width=80)
    whole = reproduce(
        [name],
        "smoke",
        columns.split(","),
        methods.split(","),
        seeds,
        out,
        console,
        {"device": "cpu"},
        quiet=True,
    )
    return whole, console.file.getvalue()  # type: ignore[attr-defined]


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    """`fedsc reproduce table1` in a process of its own."""
    command = [sys.executable, "-m", "fedsc", "reproduce", "table1", "--scale", "smoke"]
    return subprocess.Popen(
        [*command, "--device", "cpu", "--out", str(out), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"},
    )


def finished(out: Path) -> list[Path]:
    return sorted(path.parent for path in out.glob("*/summary.json"))


def contents(folders: list[Path]) -> dict[Path, tuple[bytes, int]]:
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def without_timing(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "timing"} for record in records]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished grid of two methods, two columns and two seeds, and what it printed."""
    out = tmp_path_factory.mktemp("grid")
    whole, printed = run_grid(out, columns="cifar10/nid2,fc100/nid1_0.2", seeds=2)
    assert whole
    return out, printed


def test_the_table_says_what_the_runs_say(done: tuple[Path, str]) -> None:
    out, printed = done
    last: dict[tuple[str, str], list[float]] = {}
    for folder in finished(out):
        spec = json.loads((folder / "spec.json").read_text())
        accuracy = read_lines(folder / "metrics.jsonl")[-1]["accuracy"]
        last.setdefault((spec["label"], spec["partition"]), []).append(100 * accuracy)
    assert {key: len(values) for key, values in last.items()} == {
        (method, partition): 2
        for method in ("fedavg", "fedsc")
        for partition in ("nid2", "nid1:0.2")
    }
    lines = read_csv(out / "table1.csv")
    names = {"cifar10/nid2": "nid2", "fc100/nid1_0.2": "nid1:0.2"}
    for line in lines:
        values = last[line["row"], names[f"{line['group']}/{line['column']}"]]
        mean, spread = statistics.mean(values), statistics.stdev(values)
        assert float(line["mean"]) == pytest.approx(mean, abs=1e-5)
        assert float(line["std"]) == pytest.approx(spread, abs=1e-5)
        for text in (printed, (out / "table1.md").read_text()):
            assert f"{mean:.2f} ± {spread:.2f}" in text
        assert f"{mean:.2f} $\\pm$ {spread:.2f}" in (out / "table1.tex").read_text()
    assert len(lines) == 4
    assert "79.61" in printed  # the paper's FedSC under NID2
    assert max(map(len, printed.replace(str(out), "OUT").splitlines())) <= 80


def test_what_is_finished_is_not_run_again(done: tuple[Path, str]) -> None:
    out, printed = done
    before = contents(finished(out))
    whole, again = run_grid(out, columns="cifar10/nid2,fc100/nid1_0.2", seeds=2)
    assert whole
    assert again == printed
    assert contents(finished(out)) == before


def test_results_are_made_again_from_the_folders(done: tuple[Path, str]) -> None:
    out, printed = done
    pages = {kind: (out / f"table1.{kind}").read_bytes() for kind in ("md", "tex", "csv")}
    for kind in pages:
        (out / f"table1.{kind}").unlink()
    console = Console(file=io.StringIO(), width=80)
    results([out], console)
    assert console.file.getvalue() == printed  # type: ignore[attr-defined]
    assert {kind: (out / f"table1.{kind}").read_bytes() for kind in pages} == pages


def test_a_second_call_adds_to_the_table(tmp_path: Path) -> None:
    run_grid(tmp_path, methods="fedavg")
    first = (tmp_path / "table1.md").read_text()
    assert "FedSC" not in first
    run_grid(tmp_path, columns="cifar10/nid1_0.2", methods="fedsc")
    rows = [line for line in (tmp_path / "table1.md").read_text().splitlines() if "|" in line]
    assert rows[0] == "| method | NID1 0.2 ours | paper | diff. | NID2 ours | paper | diff. |"
    assert [row.count("missing") for row in rows[2:4]] == [1, 1]  # each ran under one column
    with pytest.raises(FedscError, match="holds table1 at scale smoke, not small"):
        reproduce(["table1"], "small", None, None, 1, tmp_path, Console(), {})


def test_grids_share_their_runs(done: tuple[Path, str]) -> None:
    out, _ = done
    before = finished(out)
    _, printed = run_grid(out, "figure7", "cifar10/nid2", "fedavg,fedsc")
    assert finished(out) == before
    assert "missing" not in printed


# Interrupted --------------------------------------------------------------------------------------


class StopAfterTwoRounds(Silent):
    def round_done(self, record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt


def one_cell(method: str) -> Cell:
    (cell,) = cells_of(grid("table1", "smoke").select(["cifar10/nid2"], [method]), [0])
    return cell


def test_a_half_finished_run_goes_on_from_its_checkpoint(
    done: tuple[Path, str], tmp_path: Path
) -> None:
    cell = one_cell("fedsc")
    with pytest.raises(KeyboardInterrupt):
        execute(
            dataclasses.replace(cell.spec, device="cpu"),
            load(cell.spec),
            cell.method,
            None,
            tmp_path / cell.name,
            StopAfterTwoRounds(),
            checkpoint_seconds=0,
        )
    begun = read_lines(tmp_path / cell.name / "metrics.jsonl")
    assert len(begun) == 2
    assert run_grid(tmp_path, methods="fedsc")[0]
    records = read_lines(tmp_path / cell.name / "metrics.jsonl")
    assert records[:2] == begun  # with their times: they were not run again
    uncut = read_lines(done[0] / cell.name / "metrics.jsonl")
    assert without_timing(records) == without_timing(uncut)


def test_a_killed_grid_goes_on_and_ends_like_an_uncut_one(
    done: tuple[Path, str], tmp_path: Path
) -> None:
    options = ["--columns", "cifar10/nid2", "--methods", "fedavg,fedsc", "--seeds", "2"]
    process = start(tmp_path, *options)
    try:
        deadline = time.monotonic() + 60
        while len(finished(tmp_path)) < 2 and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    before = finished(tmp_path)
    assert 2 <= len(before) < 4
    assert not (tmp_path / "table1.md").exists()
    kept = contents(before)
    assert run_grid(tmp_path, seeds=2)[0]
    assert len(finished(tmp_path)) == 4
    assert contents(before) == kept
    for folder in finished(tmp_path):
        uncut = read_lines(done[0] / folder.name / "metrics.jsonl")
        assert without_timing(read_lines(folder / "metrics.jsonl")) == without_timing(uncut)


def test_two_processes_share_a_grid(tmp_path: Path) -> None:
    options = ["--columns", "cifar10", "--methods", "fedavg,fedsc"]
    processes = [start(tmp_path, *options) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    begun = [
        line.split("] ")[1].split(" (about")[0]
        for _, err in said
        for line in err.splitlines()
        if line.startswith("[")
    ]
    assert len(begun) == len(set(begun)) == 6  # no run was begun twice
    assert len(finished(tmp_path)) == 6
    tables = ["\n".join(line for line in out.splitlines() if " Fed" in line) for out, _ in said]
    assert tables[0] == tables[1]  # each waited for what the other was computing
    assert "missing" not in said[0][0]


# What goes wrong ----------------------------------------------------------------------------------


def test_damaged_and_foreign_folders_are_named_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_grid(tmp_path)
    damaged, other = (tmp_path / one_cell(method).name for method in ("fedavg", "fedsc"))
    (damaged / "metrics.jsonl").write_text("{\n")
    spec = json.loads((other / "spec.json").read_text())
    (other / "spec.json").write_text(json.dumps({**spec, "lr": 0.5}))
    (tmp_path / "holiday").mkdir()
    (tmp_path / "holiday" / "photo.jpg").write_text("mine")
    before = contents([damaged, other, tmp_path / "holiday"])
    capsys.readouterr()
    whole, printed = run_grid(tmp_path, methods="fedavg,fedprox,fedsc")
    assert not whole
    err = capsys.readouterr().err
    assert f"{damaged / 'metrics.jsonl'} is damaged" in err
    assert f"{other} holds another run: lr is 0.5, not 0.1" in err
    assert f"{tmp_path / 'holiday'} is not a run folder" in err
    assert contents([damaged, other, tmp_path / "holiday"]) == before
    rows = {line.split()[0]: line for line in printed.splitlines() if line.startswith(" Fed")}
    assert rows["FedAvg"].split()[1:] == ["missing", "75.60", "-"]
    assert rows["FedSC"].split()[1:] == ["missing", "79.61", "-"]
    assert "missing" not in rows["FedProx"]
    assert "Missing: 2 of 3 runs" in printed
    lines = {line["row"]: line for line in read_csv(tmp_path / "table1.csv")}
    assert lines["fedavg"]["mean"] == lines["fedsc"]["difference"] == ""


def test_a_whole_run_that_cannot_be_read_is_not_to_be_removed(
    done: tuple[Path, str], tmp_path: Path
) -> None:
    cell = one_cell("fedsc")
    shutil.copytree(done[0] / cell.name, tmp_path / cell.name)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        with pytest.raises(FedscError, match=r"cannot be read: Too many open files") as too_many:
            read_cell(tmp_path, cell)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    path = tmp_path / cell.name / "spec.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(FedscError, match="a format this version cannot read") as newer:
        read_cell(tmp_path, cell)
    path.write_text("{")
    with pytest.raises(FedscError, match=r"is damaged: .*; remove the folder to run it again"):
        read_cell(tmp_path, cell)
    for raised in (too_many, newer):
        assert "damaged" not in str(raised.value)
        assert "remove" not in str(raised.value)


def test_a_data_set_that_is_not_there_leaves_out_its_runs_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(file=io.StringIO(), width=80)
    settings = {"rounds": 1, "epochs": 1, "train_limit": 60, "clients": 2, "partition": "iid"}
    whole = sweep(
        ["fedavg"],
        {"dataset": ["cifar10", "digits"]},
        2,
        {**settings, "device": "cpu"},
        tmp_path / "out",
        console,
        data_dir=tmp_path / "no-data",
        quiet=True,
    )
    assert not whole
    err = capsys.readouterr().err
    assert "2 runs left out: cifar10 is not in" in err
    assert err.count("fedsc: left out") == 1  # the reason once, not for every run
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "fedavg, dataset=cifar10" in printed
    assert "missing" in printed
    assert len(finished(tmp_path / "out")) == 2


# Sweeps -------------------------------------------------------------------------------------------

TINY = {"rounds": 1, "epochs": 1, "train_limit": 60, "clients": 2, "partition": "iid"}


def test_a_sweep_runs_every_combination(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    values = parse_values(["tau=0.05,0.5", "batch-size=16,32"])
    settings = {**TINY, "device": "cpu"}
    assert sweep(["fedavg", "fedsc"], values, 1, settings, tmp_path, console, quiet=True)
    specs = [json.loads((folder / "spec.json").read_text()) for folder in finished(tmp_path)]
    found = {(s["method"]["name"], s["method"].get("tau"), s["batch_size"]) for s in specs}
    assert found == {  # FedAvg has no tau
        ("fedavg", None, 16),
        ("fedavg", None, 32),
        ("fedsc", 0.05, 16),
        ("fedsc", 0.05, 32),
        ("fedsc", 0.5, 16),
        ("fedsc", 0.5, 32),
    }
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "fedsc, tau=0.5, batch_size=16" in printed
    rows = read_csv(tmp_path / "sweep.csv")
    assert len(rows) == 6
    before = contents(finished(tmp_path))
    again = Console(file=io.StringIO(), width=80)
    results([tmp_path], again)
    assert again.file.getvalue() == printed  # type: ignore[attr-defined]
    assert contents(finished(tmp_path)) == before


def test_a_finished_run_without_what_is_asked_for_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(file=io.StringIO(), width=80)
    settings: dict[str, Any] = {**TINY, "device": "cpu"}
    assert sweep(["fedavg"], {}, 1, settings, tmp_path, console, quiet=True)
    (folder,) = finished(tmp_path)
    before = contents([folder])
    capsys.readouterr()
    settings["calibrated"] = True
    assert sweep(["fedavg", "moon"], {}, 1, settings, tmp_path, console, quiet=True)
    assert capsys.readouterr().err == (
        "fedsc: fedavg, seed 0 is finished, and was not measured with --calibrated: remove "
        f"{folder} to run it again\n"
    )
    assert contents([folder]) == before
    assert len(finished(tmp_path)) == 2


def test_a_sweep_chooses_on_images_held_out(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    settings: dict[str, Any] = {**TINY, "train_limit": None, "validation": 300, "device": "cpu"}
    assert sweep(["fedavg"], {}, 1, settings, tmp_path / "sweep", console, quiet=True)
    (folder,) = finished(tmp_path / "sweep")
    fedsc.run("digits", "fedavg", out=tmp_path / "run", **settings)
    for name in ("spec.json", "partition.json"):
        ours, theirs = (json.loads((f / name).read_text()) for f in (folder, tmp_path / "run"))
        assert ours == theirs


def test_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fedsc(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedsc", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    quick = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    quick += ["--device=cpu", "--quiet", "--method=fedavg"]
    code, out, err = fedsc("sweep", "--set", "lr=0.01,0.1", *quick)
    assert (code, err) == (0, "")
    assert (tmp_path / "runs" / "sweep-digits-iid" / "sweep.md").exists()
    assert fedsc("results", "runs/sweep-digits-iid") == (0, out, "")
    code, out, err = fedsc("sweep", "--set", "dataset=digits,nothing", *quick, "--out", "other")
    assert code == 1
    assert "1 run left out: unknown data set 'nothing'" in err
    assert "missing" in out
    code, out, _ = fedsc("reproduce")
    assert code == 0
    assert all(name in out for name in (*GRIDS, *SCALES))
    code, _, err = fedsc("reproduce", "table6")
    assert code == 2
    assert "figure7" in err
    assert fedsc("results", "runs/sweep-digits-iid", "--write", "x.md")[0] == 2


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["tau"], "NAME=VALUE,VALUE"),
        (["tau=0.1,,0.2"], "NAME=VALUE,VALUE"),
        (["tau=0.1", "tau=0.2"], "twice"),
        (["tau=0.1,0.1"], "twice"),
        (["tua=0.1"], "did you mean 'tau'"),
        (["seed=0,1"], "unknown name in --set 'seed'"),
        (["lr=fast"], "not a number"),
        (["rounds=1,2"], "given by --set and as an option"),
        (["tau=-1"], "out of range"),
        (["lr=0"], "out of range"),
    ],
)
def test_a_wrong_sweep_is_refused_before_anything_is_written(
    tmp_path: Path, texts: list[str], words: str
) -> None:
    with pytest.raises(FedscError, match=words):
        sweep(["fedsc"], parse_values(texts), 1, TINY, tmp_path / "out", Console())
    assert not (tmp_path / "out").exists()


def test_a_method_given_twice_is_refused() -> None:
    with pytest.raises(FedscError, match="twice"):
        sweep_grid(["fedsc", "fedsc"], {"tau": ["0.1"]}, {})


def test_the_name_of_a_run_is_of_what_decides_its_result() -> None:
    def name(method: str = "fedsc", **settings: Any) -> str:
        (cell,) = cells_of(sweep_grid([method], {"lr": ["0.1"]}, settings), [0])
        return cell.name

    assert name() == name(device="cpu", threads=1) == name("fedsc,tau=0.05") == name(clients=10)
    different = [name(), name("fedsc,tau=0.1"), name(rounds=3), name(clients=9), name("fedavg")]
    assert len(set(different)) == len(different)


# Any runs -----------------------------------------------------------------------------------------


def test_results_of_any_runs(
    done: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = done
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "spec.json").write_text("{")
    console = Console(file=io.StringIO(), width=100)
    results([*finished(out), tmp_path], console, 0.5, tmp_path / "all.md")
    assert "damaged/spec.json is damaged" in capsys.readouterr().err
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "digits, NID2, 6 clients, 2 epochs, mlp" in printed
    assert "few-shot with 5 classes held out" in printed
    assert "to 50%" in printed
    assert (tmp_path / "all.md").read_text().count("### digits") == 2
    with pytest.raises(FedscError, match="no finished run"):
        results([tmp_path], console)
    with pytest.raises(FedscError, match="is not a folder"):
        results([tmp_path / "nothing"], console)
