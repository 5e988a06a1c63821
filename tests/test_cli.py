"""The command line: what it writes and says, and how it refuses what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from fedsc.cli import main
from fedsc.methods import METHODS
from fedsc.options import options_of

Fedsc = Callable[..., tuple[int, str, str]]

QUICK = ["--rounds", "2", "--epochs", "1", "--train-limit", "60", "--clients", "2"]
QUICK += ["--partition", "iid", "--device", "cpu", "--quiet"]


@pytest.fixture
def fedsc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Fedsc:
    """`main()` with these arguments, in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FEDSC_DATA", str(tmp_path / "no-data"))

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedsc", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


# What works ---------------------------------------------------------------------------------------


def test_several_methods_and_seeds(fedsc: Fedsc, tmp_path: Path) -> None:
    several = ["--method", "fedavg", "--method", "fedsc,tau=0.1", "--seed", "0", "--seed", "7"]
    code, out, err = fedsc("run", *QUICK, *several, "--out", "out")
    assert (code, err) == (0, "")
    runs = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert runs == {
        "fedavg-seed0",
        "fedavg-seed7",
        "fedsc_tau=0.1-seed0",
        "fedsc_tau=0.1-seed7",
    }
    accuracies: dict[str, list[float]] = {}
    for name in sorted(runs):
        folder = tmp_path / "out" / name
        spec = json.loads((folder / "spec.json").read_text())
        method, _, seed = name.rpartition("-seed")
        assert spec["seed"] == int(seed)
        assert spec["method"]["name"] == method.split("_")[0]
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
        load_file(folder / "state.safetensors")
        summary = json.loads((folder / "summary.json").read_text())
        accuracies.setdefault(method.replace("_", ","), []).append(100 * summary["last"])
    table = (tmp_path / "out" / "summary.md").read_text()
    for method, values in accuracies.items():
        mean = f"{sum(values) / 2:.2f} ± "
        (row,) = [line for line in table.splitlines() if line.startswith(f"| {method} |")]
        assert mean in row
        assert mean in out  # the same table on the screen
    with Image.open(tmp_path / "out" / "curves.png") as image:
        assert image.format == "PNG"
        assert image.width > 600
    assert "curves.png" in out


def test_settings_from_a_file_and_the_command_line_wins(fedsc: Fedsc, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(
        'methods = ["fedavg", "fedsc"]\nseeds = [3]\nrounds = 1\nepochs = 1\n'
        'train_limit = 60\nclients = 2\npartition = "iid"\ndevice = "cpu"\nlr = 0.5\n'
    )
    code, _, err = fedsc("run", "--config", "my.toml", "--lr", "0.25", "--quiet", "--out", "a")
    assert (code, err) == (0, "")
    specs = [json.loads(path.read_text()) for path in (tmp_path / "a").glob("*/spec.json")]
    assert {spec["method"]["name"] for spec in specs} == {"fedavg", "fedsc"}
    assert {(s["seed"], s["rounds"], s["lr"], s["clients"]) for s in specs} == {(3, 1, 0.25, 2)}
    over = ["--method", "fedavg", "--seed", "4"]
    code, _, _ = fedsc("run", "--config", "my.toml", *over, "--quiet", "--out", "b")
    assert code == 0
    assert [path.name for path in (tmp_path / "b").glob("*-seed*")] == ["fedavg-seed4"]


def test_one_method_and_seed_from_a_file(fedsc: Fedsc, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('method = "fedavg"\nseed = 9\n')
    code, _, _ = fedsc("run", *QUICK, "--config", "my.toml", "--out", "a")
    assert code == 0
    assert (tmp_path / "a" / "fedavg-seed9" / "summary.json").exists()


def test_the_place_of_runs_without_out(fedsc: Fedsc, tmp_path: Path) -> None:
    assert fedsc("run", *QUICK, "--method", "fedavg")[0] == 0
    (summary,) = tmp_path.glob("runs/*/fedavg-seed0/summary.json")
    assert "digits" in summary.parent.parent.name
    assert "iid" in summary.parent.parent.name


def test_progress_in_lines_where_there_is_no_terminal(fedsc: Fedsc) -> None:
    loud = [word for word in QUICK if word != "--quiet"]
    code, _, err = fedsc("run", *loud, "--method", "fedavg", "--out", "out")
    assert code == 0
    assert "round 1/2" in err
    assert "round 2/2" in err


def test_overwrite_replaces_runs_and_nothing_else(fedsc: Fedsc, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fedsc("run", *QUICK, "--method", "fedsc", "--out", "out")[0] == 0
    (out / "notes.txt").write_text("mine")
    assert fedsc("run", *QUICK, "--method", "fedavg", "--out", "out", "--overwrite")[0] == 0
    assert (out / "notes.txt").read_text() == "mine"
    assert {path.parent.name for path in out.glob("*/spec.json")} == {"fedavg-seed0"}


def test_help(fedsc: Fedsc) -> None:
    code, out, _ = fedsc("--help")
    assert code == 0
    for command in ("run", "methods", "data"):
        assert command in out
    code, out, _ = fedsc("run", "--help")
    assert code == 0
    for flag in ("--partition", "--rounds", "--train-limit", "--participation", "--overwrite"):
        assert flag in out
    code, out, _ = fedsc("predict", "--help")  # arguments have their help too
    assert "images, folders of images, or .npz files" in " ".join(out.split())


def test_version(fedsc: Fedsc) -> None:
    code, out, _ = fedsc("--version")
    assert code == 0
    assert out.strip()[0].isdigit()


def test_methods_lists_every_option_of_every_method(fedsc: Fedsc) -> None:
    code, out, _ = fedsc("methods")
    assert code == 0
    for name, cls in METHODS.items():
        assert f"{name}:" in out
        for opt in options_of(cls):
            assert opt.name in out
    assert "fedsc,literal" in out


def test_one_method_with_what_its_options_may_be(fedsc: Fedsc) -> None:
    code, out, _ = fedsc("methods", "fedsc")
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("fedsc: ")]
    assert "fedprox:" not in out
    rows = {line.split()[1]: line for line in out.splitlines() if line.startswith("│ ")}
    assert "float above 0 " in rows["tau"]
    assert "int at least 0 " in rows["neighbours"]
    assert "fedsc,literal" in out
    assert_refused(fedsc("methods", "fedsk"), ["'fedsk'", "did you mean 'fedsc'", "fedprox"])


def test_data_list(fedsc: Fedsc) -> None:
    code, out, _ = fedsc("data", "list")
    assert code == 0
    for name in ("digits", "cifar10", "cifar100", "fc100", "tinyimagenet", "fashion-mnist"):
        assert name in out
    (row,) = [line for line in out.splitlines() if " digits " in line]
    assert "1,442" in row
    assert "built in" in row


def test_data_show(fedsc: Fedsc, tmp_path: Path) -> None:
    shown = ["data", "show", "--partition", "nid2", "--png", "p.png", "--seed", "3"]
    code, out, err = fedsc(*shown)
    assert (code, err) == (0, "")
    assert "nid2" in out
    with Image.open(tmp_path / "p.png") as image:
        assert image.format == "PNG"
        assert image.width > 400
    # By hand: six clients; of 145 images of a class, for example, a shard is 24.
    (images,) = [line for line in out.splitlines() if line.split()[:1] == ["images"]]
    sizes = [int(cell) for cell in images.split()[1:]]
    assert len(sizes) == 6
    assert all(size % 5 == 0 for size in sizes[:5])
    assert sizes[5] == sum(sizes[:5]) // 5


# What is refused ----------------------------------------------------------------------------------

BAD: dict[str, tuple[list[str], list[str]]] = {
    "data set": (["--dataset", "digts"], ["'digts'", "did you mean 'digits'"]),
    "data that are not here": (["--dataset", "cifar10"], ["cifar10 is not in", "fedsc data get"]),
    "method": (["--method", "fedsk"], ["'fedsk'", "did you mean 'fedsc'"]),
    "option": (["--method", "fedsc,tua=1"], ["'tua'", "did you mean 'tau'"]),
    "value": (["--method", "fedsc,tau=-1"], ["tau = -1", "above 0"]),
    "infinite value": (["--method", "fedsc,tau=inf"], ["tau = inf"]),
    "preset": (["--method", "fedsc,literall"], ["'literall'", "literal"]),
    "a method twice": (["--method", "fedsc", "--method", "fedsc"], ["fedsc-seed0", "twice"]),
    "alpha of zero": (["--partition", "nid1:0"], ["alpha = 0", "above 0"]),
    "alpha below zero": (["--partition", "nid1:-1"], ["alpha = -1", "above 0"]),
    "partition": (["--partition", "nid3"], ["'nid3'", "nid1:ALPHA"]),
    "nid2 of 2": (["--partition", "nid2"], ["6 clients", "2"]),
    "shards": (["--partition", "shards:nan"], ["nan"]),
    "too many clients": (["--clients", "61"], ["61 clients", "60"]),
    "no clients": (["--clients", "0"], ["clients = 0", "at least 1"]),
    "rounds": (["--rounds", "-3"], ["rounds = -3", "at least 1"]),
    "learning rate": (["--lr", "0"], ["lr = 0", "above 0"]),
    "infinite learning rate": (["--lr", "inf"], ["lr = inf"]),
    "participation": (["--participation", "0"], ["participation = 0", "above 0"]),
    "precision": (["--precision", "fp16"], ["'fp16'", "bf16"]),
    "model": (["--model", "resnet"], ["'resnet'", "resnet10"]),
    "model file": (["--model", "none.py:Net"], ["none.py"]),
    "model too large": (["--model", "conv4"], ["8x8", "16x16"]),
    "seed": (["--seed", "-1"], ["seed = -1", "at least 0"]),
    "device": (["--device", "abacus"], ["'abacus'", "cpu"]),
    "long tail": (["--long-tail", "0.5"], ["long_tail = 0.5", "at least 1"]),
    "few shot": (["--few-shot", "9"], ["9 of the 10"]),
    "train limit": (["--train-limit", "999999"], ["999999", "1 to 1442"]),
    "one image a batch": (["--batch-size", "1", "--norm", "batch"], ["batches of one image"]),
    "no such config": (["--config", "none.toml"], ["none.toml", "No such file"]),
    "resume and out": (["--resume", "nowhere"], ["--resume", "leave out --out"]),
}


def assert_refused(answer: tuple[int, str, str], words: list[str]) -> None:
    """Exit code 2 and one line on stderr that says what is wrong."""
    code, _, err = answer
    assert code == 2, err
    assert err.count("\n") == 1, err
    assert err.startswith("fedsc: ")
    for word in words:
        assert word in err


@pytest.mark.parametrize("what", BAD)
def test_wrong_options_are_one_line_and_leave_nothing(
    fedsc: Fedsc, tmp_path: Path, what: str
) -> None:
    arguments, words = BAD[what]
    assert_refused(fedsc("run", *QUICK, "--out", "out", *arguments), words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(fedsc: Fedsc, tmp_path: Path) -> None:
    for device in ("cuda", "cuda:3"):
        assert_refused(
            fedsc("run", *QUICK, "--out", "out", "--device", device),
            [f"'{device}'", "--device cpu"],
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounds = ", ["my.toml", "not valid TOML"]),
        ("\x00", ["my.toml", "not valid TOML"]),
        ("ronds = 3", ["'ronds'", "did you mean 'rounds'"]),
        ("[run]\nrounds = 3", ["'run'"]),
        ('rounds = "three"', ["rounds = 'three'", "whole number"]),
        ("rounds = 2.5", ["rounds = 2.5", "whole number"]),
        ("lr = nan", ["lr = nan"]),
        ("seeds = 3", ["seeds"]),
        ("seeds = [1.5]", ["1.5"]),
        ('methods = "fedsc"', ["methods"]),
        ("methods = 3", ["methods"]),
        ("methods = [3]", ["3"]),
        ("methods = []", ["methods in my.toml is empty", "at least one"]),
        ("seeds = []", ["seeds in my.toml is empty", "at least one"]),
        ('method = "fedsc"\nmethods = ["fedavg"]', ["both method and methods"]),
        ("seed = 1\nseeds = [0]", ["both seed and seeds"]),
        ('method = ["fedavg", "fedsc"]', ["is a list: write methods = ..."]),
        ("seed = [0, 1]", ["seed = [0, 1] in my.toml is a list: write seeds = ..."]),
        ('out = "runs/x"', ["out in my.toml is no option of a run", "give --out"]),
        ('data-dir = "x"', ["give --data-dir beside --config"]),
        ("quiet = true", ["give --quiet"]),
        ('track = ["mlflow"]', ["give --track"]),
    ],
)
def test_wrong_files_of_settings(fedsc: Fedsc, tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "my.toml").write_text(text)
    quick = ["--train-limit", "60", "--epochs", "1", "--device", "cpu", "--quiet"]
    quick += ["--clients", "2", "--partition", "iid"]
    assert_refused(fedsc("run", *quick, "--config", "my.toml", "--out", "out"), words)
    assert [path.name for path in tmp_path.iterdir()] == ["my.toml"]


def test_a_folder_that_holds_another_run(fedsc: Fedsc, tmp_path: Path) -> None:
    assert fedsc("run", *QUICK, "--method", "fedavg", "--out", "out")[0] == 0
    before = files_below(tmp_path)
    assert_refused(
        fedsc("run", *QUICK, "--method", "fedsc", "--out", "out"),
        ["out holds another run", "--overwrite"],
    )
    assert files_below(tmp_path) == before


def test_the_same_run_asked_for_again(fedsc: Fedsc, tmp_path: Path) -> None:
    """Not called another run, until the run or the data is another."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "x_train": rng.integers(0, 256, (40, 8, 8), np.uint8),
        "y_train": np.arange(40) % 2,
    }
    arrays |= {"x_test": arrays["x_train"][:10], "y_test": arrays["y_train"][:10]}
    np.savez(tmp_path / "my.npz", **arrays)
    asked = ["run", "--epochs", "1", "--clients", "2", "--device", "cpu", "--model", "mlp"]
    asked += ["--partition", "iid", "--rounds", "2", "--dataset", "npz:my.npz", "--quiet"]
    asked += ["--out", "out", "--method", "fedavg"]
    assert fedsc(*asked)[0] == 0
    before = files_below(tmp_path)
    for again in (asked, [*asked, "--threads", "2", "--lr", "0.01"]):
        words = ["out holds this very run (fedavg-seed0), finished after 2 rounds"]
        assert_refused(fedsc(*again), [*words, "fedsc results out", "--overwrite"])
        assert files_below(tmp_path) == before
    run = tmp_path / "out" / "fedavg-seed0"
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0])
    words = ["this very run (fedavg-seed0), 1 of 2 rounds done", "fedsc run --resume out"]
    assert_refused(fedsc(*asked), words)
    assert_refused(fedsc(*asked, "--lr", "0.5"), ["holds another run (fedavg-seed0)"])
    np.savez(tmp_path / "my.npz", **{**arrays, "x_test": arrays["x_train"][10:20]})
    assert_refused(fedsc(*asked), ["holds another run (fedavg-seed0)"])


def test_several_runs_are_counted_before_they_are_replaced(fedsc: Fedsc, tmp_path: Path) -> None:
    four = ["--method", "fedavg", "--method", "fedprox", "--seed", "0", "--seed", "1"]
    assert fedsc("run", *QUICK, *four, "--out", "out")[0] == 0
    before = files_below(tmp_path)
    assert_refused(
        fedsc("run", *QUICK, "--method", "fedavg", "--out", "out"),
        ["4 runs (fedavg-seed0, fedavg-seed1, fedprox-seed0 and 1 more)", "deletes all 4"],
    )
    (tmp_path / "out" / "fedprox-seed1" / "summary.json").unlink()
    words = ["these very 4 runs", "8 of 8 rounds done: to go on, fedsc run --resume out"]
    assert_refused(fedsc("run", *QUICK, *four, "--out", "out"), words)
    assert fedsc("run", "--resume", "out", "--quiet")[0] == 0
    after = files_below(tmp_path)
    assert after.keys() == before.keys()
    words = ["these very 4 runs", "finished after 2 rounds each"]
    assert_refused(fedsc("run", *QUICK, *four, "--out", "out"), words)
    assert files_below(tmp_path) == after


def test_runs_and_grids_do_not_share_a_folder(fedsc: Fedsc, tmp_path: Path) -> None:
    sweep = ["sweep", *QUICK, "--set", "lr=0.01,0.1", "--method", "fedavg"]
    table = ["reproduce", "table1", "--scale", "smoke", "--methods", "fedavg", "--quiet"]
    assert fedsc("run", *QUICK, "--method", "fedavg", "--out", "run")[0] == 0
    assert fedsc(*sweep, "--out", "grid")[0] == 0
    before = files_below(tmp_path)
    for words in (sweep, table):
        assert_refused(fedsc(*words, "--out", "run"), ["run is a folder of `fedsc run`", "--out"])
    for more in ([], ["--overwrite"]):
        assert_refused(
            fedsc("run", *QUICK, "--method", "fedavg", "--out", "grid", *more),
            ["grid is a folder of `fedsc sweep`", "2 runs", "choose another --out"],
        )
    assert files_below(tmp_path) == before
    (cell, _) = sorted((tmp_path / "grid").glob("*-seed0-*"))
    for folder in ("grid", f"grid/{cell.name}"):
        words = ["grid is a folder of `fedsc sweep`", "given again", "--out grid"]
        assert_refused(fedsc("run", "--resume", folder), words)


def test_a_finished_run_without_its_metrics(fedsc: Fedsc, tmp_path: Path) -> None:
    assert fedsc("run", *QUICK, "--method", "fedavg", "--out", "out")[0] == 0
    run = tmp_path / "out" / "fedavg-seed0"
    (run / "metrics.jsonl").unlink()
    words = ["out/fedavg-seed0 is damaged: it is finished and has no metrics.jsonl", "remove it"]
    assert_refused(fedsc("run", "--resume", "out"), [*words, "fedsc run --resume out"])
    shutil.rmtree(run)
    assert fedsc("run", "--resume", "out", "--quiet")[0] == 0  # as it was told
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_mistake_beside_overwrite_does_not_cost_the_old_run(fedsc: Fedsc, tmp_path: Path) -> None:
    assert fedsc("run", *QUICK, "--method", "fedavg", "--out", "out")[0] == 0
    before = files_below(tmp_path)
    for wrong in (["--device", "abacus"], ["--clients", "61"], ["--lr", "-1"], ["--model", "mpl"]):
        assert fedsc("run", *QUICK, "--out", "out", "--overwrite", *wrong)[0] == 2
        assert files_below(tmp_path) == before


def test_a_folder_with_other_files(fedsc: Fedsc, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    for more in ([], ["--overwrite"]):
        assert_refused(fedsc("run", *QUICK, "--out", "out", *more), ["out is not empty"])
        assert files_below(tmp_path) == {"out/thesis.txt": b"mine"}


def test_out_that_is_a_file_or_lies_in_one(fedsc: Fedsc, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert_refused(fedsc("run", *QUICK, "--out", "file"), ["file is a file"])
    assert_refused(fedsc("run", *QUICK, "--out", "file/out"), ["file/out"])
    assert files_below(tmp_path) == {"file": b"mine"}


def cifar10_folder(folder: Path, names: list[str], size: int) -> None:
    folder.mkdir(parents=True)
    for name in names:
        with (folder / name).open("wb") as file:
            file.truncate(size)  # a hole: takes no room on the disk


BINARY = [f"data_batch_{n}.bin" for n in range(1, 6)] + ["test_batch.bin"]


@pytest.mark.parametrize(("size", "word"), [(30_730_000 - 1, "truncated"), (30_730_000, "altered")])
def test_cifar_files_that_are_not_the_official_ones(
    fedsc: Fedsc, tmp_path: Path, size: int, word: str
) -> None:
    cifar10_folder(tmp_path / "data" / "cifar-10-batches-bin", BINARY, size)
    answer = fedsc("run", *QUICK, "--dataset", "cifar10", "--data-dir", "data", "--out", "out")
    assert_refused(answer, ["data_batch_1.bin", word])
    assert not (tmp_path / "out").exists()


class Trap:
    """A pickle of this runs a command when it is loaded carelessly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.mkdir, (str(self.path),)  # type: ignore[return-value]


def test_a_pickle_that_runs_code_is_not_run(fedsc: Fedsc, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    names = [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]
    for name in names:
        (folder / name).write_bytes(pickle.dumps({"data": Trap(tmp_path / "sprung")}))
    answer = fedsc("run", *QUICK, "--dataset", "cifar10", "--data-dir", "data", "--out", "out")
    assert_refused(answer, ["data_batch_1"])
    assert not (tmp_path / "sprung").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--partition", "nid1:x"], ["'x'"]),
        (["--png", "no/where/p.png"], ["no/where/p.png"]),
        (["--png", "p.xyz"], ["p.xyz"]),
        (["--dataset", "npz:none.npz"], ["none.npz"]),
    ],
)
def test_data_show_refuses(
    fedsc: Fedsc, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    assert_refused(fedsc("data", "show", *arguments), words)
    assert list(tmp_path.iterdir()) == []


def test_data_get_of_what_does_not_exist(fedsc: Fedsc, tmp_path: Path) -> None:
    assert_refused(fedsc("data", "get", "cifar11"), ["'cifar11'", "cifar10"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--ronds", "3"], ["--ronds"]),
        (["run", "--rounds", "abc"], ["--rounds", "abc"]),
        (["run", "--method"], ["--method"]),
        (["rum"], ["rum"]),
        (["bench", "--model", "foo"], ["'foo'", "resnet10"]),
        (["bench", "--method", "foo"], ["'foo'", "fedsc"]),
        (["bench", "--out", "nowhere/bench.json"], ["nowhere", "no folder"]),
        (["bench", "--out", "."], ["it is a folder"]),
        (["run", "--resume", "nowhere"], ["nowhere", "job.json"]),
    ],
)
def test_usage_errors_are_one_line_too(
    fedsc: Fedsc, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    assert_refused(fedsc(*arguments), words)
    assert list(tmp_path.iterdir()) == []


def test_folders_of_others_are_never_removed(fedsc: Fedsc, tmp_path: Path) -> None:
    """A folder with a spec.json of its own, and one with only a file named like ours."""
    out = tmp_path / "out"
    (out / "project").mkdir(parents=True)
    (out / "project" / "spec.json").write_text("{}")
    (out / "project" / "thesis.tex").write_text("years of work")
    assert_refused(fedsc("run", *QUICK, "--out", "out", "--overwrite"), ["holds no runs"])
    assert (out / "project" / "thesis.tex").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "summary.md").write_text("mine")
    assert_refused(fedsc("run", *QUICK, "--out", "other", "--overwrite"), ["not empty"])
    assert (tmp_path / "other" / "summary.md").read_text() == "mine"
    # A run into which somebody has put a file of theirs stays, and the file with it.
    assert fedsc("run", *QUICK, "--method", "fedavg", "--out", "runs")[0] == 0
    (tmp_path / "runs" / "fedavg-seed0" / "notes.txt").write_text("mine")
    code, _, _ = fedsc("run", *QUICK, "--method", "fedavg", "--out", "runs", "--overwrite")
    assert code == 2
    assert (tmp_path / "runs" / "fedavg-seed0" / "notes.txt").exists()


def test_resume_takes_the_same_options_again_and_no_others(fedsc: Fedsc, tmp_path: Path) -> None:
    asked = ["run", *QUICK, "--method", "fedavg", "--method", "fedprox"]
    assert fedsc(*asked, "--out", "out")[0] == 0
    (tmp_path / "out" / "fedprox-seed0" / "summary.json").unlink()
    for again in (
        ["run", "--resume", "out"],
        [*asked, "--participation", "1.0", "--resume", "out"],
    ):
        assert fedsc(*again)[0] == 0
        assert (tmp_path / "out" / "fedprox-seed0" / "summary.json").exists()
    (tmp_path / "out" / "fedprox-seed0" / "summary.json").unlink()
    code, _, said = fedsc("run", "--resume", "out", "--engine", "graphs", "--threads", "3")
    assert code == 0
    assert "the engine was " in said
    assert "the number of threads was " in said
    assert_refused(
        fedsc("run", "--resume", "out", "--lr", "0.5"), ["lr was 0.01, is now 0.5", "resume"]
    )
    assert_refused(fedsc("run", "--resume", "out", "--method", "moon"), ["moon"])
    assert_refused(fedsc("run", "--resume", "out/fedprox-seed0"), ["--resume out"])
    (tmp_path / "out" / "fedavg-seed0" / "summary.json").unlink()
    (tmp_path / "out" / "fedavg-seed0" / "metrics.jsonl").unlink()
    words = ["out/fedavg-seed0/metrics.jsonl cannot be read (No such file", "remove the folder"]
    assert_refused(fedsc("run", "--resume", "out"), words)
    (tmp_path / "out" / "job.json").write_text("{")
    assert_refused(fedsc("run", "--resume", "out"), ["job.json"])


def test_code_that_is_not_found_from_another_folder(
    fedsc: Fedsc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom typing import ClassVar\nimport fedsc\n\n"
        '@dataclass(frozen=True)\nclass Mine(fedsc.Method):\n    name: ClassVar[str] = "mine"\n'
    )
    mine = ["--method", "./mine.py:Mine,trim=0.2", "--out", "out"]
    assert fedsc("run", *QUICK, *mine)[0] == 0
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    (run,) = (path.parent for path in (tmp_path / "out").glob("*/spec.json"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    predict, resume = ["predict", run, "../x.png"], ["run", "--resume", "../out"]
    for command in (predict, resume):
        assert_refused(fedsc(*command), ["asks to run the code in ./mine.py:Mine"])
    monkeypatch.setenv("FEDSC_RUN_CODE", "1")
    for command in (predict, resume):
        words = ["needs the code in ./mine.py:Mine", f"no file {tmp_path / 'elsewhere/mine.py'}"]
        answer = fedsc(*command)
        assert_refused(answer, [*words, "the folder in which the run was started"])
        assert "damaged" not in answer[2]
    shutil.copy("../mine.py", "mine.py")
    assert fedsc(*predict)[0] == 0
    assert fedsc(*resume)[0] == 0


def test_bench_takes_as_many_threads_as_it_is_told(fedsc: Fedsc, tmp_path: Path) -> None:
    asked = ["--model", "mlp", "--method", "fedavg", "--rounds", "1", "--images", "200"]
    assert fedsc("bench", *asked, "--threads", "2", "--device", "cpu")[0] == 0
    assert json.loads((tmp_path / "bench.json").read_text())["threads"] == 2


@pytest.mark.parametrize("changed", ["job.json", "fedavg-seed0/spec.json"])
def test_a_run_does_not_go_on_as_another(fedsc: Fedsc, tmp_path: Path, changed: str) -> None:
    """Also if somebody has changed a file of it by hand, and left the hash alone."""
    assert fedsc("run", *QUICK, "--method", "fedavg", "--lr", "0.03", "--out", "out")[0] == 0
    (tmp_path / "out" / "fedavg-seed0" / "summary.json").unlink()
    path = tmp_path / "out" / changed
    before = path.read_text()
    path.write_text(before.replace('"lr": 0.03', '"lr": 0.04'))
    assert path.read_text() != before
    assert_refused(fedsc("run", "--resume", "out"), ["fedavg-seed0", "lr was 0.0", "is now 0.0"])
    path.write_text(before)
    assert fedsc("run", "--resume", "out")[0] == 0


# A full disk --------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small disk is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def assert_nothing_half_written(folder: Path) -> None:
    for path in folder.rglob("*"):
        assert path.suffix != ".part"
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            text = path.read_text()
            assert text == "" or text.endswith("\n")
            rounds = [json.loads(line)["round"] for line in text.splitlines()]
            assert rounds == list(range(1, len(rounds) + 1))
        elif path.suffix == ".safetensors":
            load_file(path)
        elif path.suffix == ".png":
            with Image.open(path) as image:
                image.load()


@pytest.mark.parametrize(
    "kilobytes", [4, 8, 16, 20, 24, 28, 32, 64, 96, 100, 104, 108, 132, 156, 160]
)
def test_a_full_disk(fedsc: Fedsc, tmp_path: Path, kilobytes: int) -> None:
    """The run needs about 164 kB: wherever it stops, one line says so and nothing is half there."""
    disk = tmp_path / "disk"
    long = ["--rounds", "20", "--method", "fedavg", "--out", "disk/out"]
    with small_disk(disk, kilobytes):
        answer = fedsc("run", *QUICK, *long)
        if answer[0] == 0:  # the picture may be a little smaller elsewhere
            assert kilobytes > 150
        else:
            assert_refused(answer, ["cannot write", "disk/out"])
        assert_nothing_half_written(disk)
        if kilobytes <= 8:  # it could not even begin
            assert files_below(disk) == {}
        if kilobytes <= 96:
            assert not list(disk.rglob("summary.json"))


def test_a_disk_that_fills_up_in_the_middle_keeps_the_rounds_before(
    fedsc: Fedsc, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    long = ["--rounds", "200", "--method", "fedavg", "--out", "disk/out"]
    with small_disk(disk, 64):  # a line of metrics has about 500 bytes
        assert_refused(fedsc("run", *QUICK, *long), ["cannot write", "metrics.jsonl"])
        lines = (disk / "out" / "fedavg-seed0" / "metrics.jsonl").read_text().splitlines()
        assert 10 < len(lines) < 200
        assert_nothing_half_written(disk)


def test_a_disk_that_is_large_enough(fedsc: Fedsc, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    long = ["--rounds", "20", "--method", "fedavg", "--out", "disk/out"]
    with small_disk(disk, 400):
        assert fedsc("run", *QUICK, *long)[0] == 0
        assert_nothing_half_written(disk)


# The real thing -----------------------------------------------------------------------------------


def test_as_a_program(tmp_path: Path) -> None:
    def program(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fedsc", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = program("run", *QUICK, "--method", "fedavg", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "fedavg-seed0" / "summary.json").exists()
    again = program("run", *QUICK, "--method", "fedavg", "--out", "out")
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert again.stderr.startswith("fedsc: out holds this very run (fedavg-seed0), finished")
