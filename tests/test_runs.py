"""The run folder: what is written, and that tables and pictures say the same."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

import fedsc
from fedsc import Dataset, FedscError
from fedsc.experiments import folder as run_folder
from fedsc.report.partition_table import partition_table
from fedsc.report.pictures import draw_curves, draw_partition
from fedsc.report.runs import RunData, by_label, read_run
from fedsc.report.table import comparison_rows, markdown_table

QUICK: dict[str, Any] = {
    "rounds": 2,
    "epochs": 1,
    "train_limit": 100,
    "clients": 3,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return fedsc.load_dataset("digits")


@pytest.fixture(scope="module")
def folder(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "fedsc-seed0"
    fedsc.run(digits, "fedsc,tau=0.1", out=path, **{**QUICK, "rounds": 3, "partition": "nid1:0.5"})
    return path


def read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_files_of_a_run(folder: Path) -> None:
    names = {path.name for path in folder.iterdir() if path.is_file()}
    assert names == {
        "spec.json",
        "environment.json",
        "partition.json",
        "partition.safetensors",
        "metrics.jsonl",
        "state.safetensors",
        "summary.json",
    }


def test_the_specification_leaves_nothing_to_defaults(folder: Path, digits: Dataset) -> None:
    spec = read_json(folder / "spec.json")
    assert spec["format"] == 1
    assert re.fullmatch("[0-9a-f]{12}", spec["hash"])
    assert spec["dataset"] == "digits"
    assert spec["model"] == "mlp"  # what "auto" came to
    assert spec["augment"] == "none"
    assert spec["clients"] == 3
    assert spec["rounds"] == 3
    assert spec["partition"] == "nid1:0.5"
    assert spec["method"]["name"] == "fedsc"
    assert spec["method"]["tau"] == 0.1
    assert spec["method"]["neighbours"] == 2
    assert spec["data_checksum"] == digits.checksum()
    assert spec["partition_hash"] == read_json(folder / "partition.json")["hash"]


def test_the_environment(folder: Path) -> None:
    found = read_json(folder / "environment.json")
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"]["numpy"] == np.__version__
    assert found["device"] == "cpu"
    assert found["threads"] >= 1


def test_the_revision_of_the_code_where_it_lies_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "src" / "folder.py"
    module.parent.mkdir()
    module.write_text("")
    monkeypatch.setattr(run_folder, "__file__", str(module))
    revision = run_folder._revision.__wrapped__  # not what it remembers

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert revision() is None
    git("init")
    (tmp_path / "other").write_text("of a project that fedsc is only installed beside")
    git("add", "other")
    git("commit", "-m", "without fedsc")
    assert revision() is None
    git("add", "src")
    git("commit", "-m", "with fedsc")
    commit = revision()
    assert commit
    assert git("rev-parse", "HEAD").startswith(commit)
    module.write_text("# changed")
    assert revision() == f"{commit}-dirty"


def test_one_line_of_metrics_per_round(folder: Path) -> None:
    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    records = [json.loads(line) for line in text.splitlines()]
    assert [record["round"] for record in records] == [1, 2, 3]
    assert all("timing" in record for record in records)


def test_the_partition_as_indices_and_as_counts(folder: Path, digits: Dataset) -> None:
    parts = load_file(folder / "partition.safetensors")
    table = read_json(folder / "partition.json")
    assert sorted(parts) == ["0", "1", "2"]
    for k, row in enumerate(table["class_counts"]):
        labels = digits.train_labels[parts[str(k)]]
        assert row == torch.bincount(labels, minlength=10).tolist()
    assert sum(map(sum, table["class_counts"])) == 100
    assert table["classes"] == list("0123456789")


def test_the_state_holds_the_global_model(digits: Dataset, tmp_path: Path) -> None:
    run = fedsc.run(digits, "fedsc", out=tmp_path / "run", **QUICK)
    state = load_file(tmp_path / "run" / "state.safetensors")
    for name, value in run.model.state_dict().items():
        (key,) = [key for key in state if key.endswith(f"model/{name}")]
        assert torch.equal(state[key], value)
    assert any(key.endswith("consistent") for key in state)


def test_the_summary_agrees_with_the_metrics(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    accuracies = [json.loads(line)["accuracy"] for line in lines]
    assert read_json(folder / "summary.json") == pytest.approx(
        {
            "last": accuracies[-1],
            "best": max(accuracies),
            "mean_last_10": statistics.mean(accuracies),
        }
    )


def hash_of(digits: Dataset, path: Path, method: str = "fedsc", **options: Any) -> str:
    fedsc.run(digits, method, out=path, **{**QUICK, "rounds": 1, **options})
    return str(read_json(path / "spec.json")["hash"])


def test_the_hash_is_of_what_decides_the_result(digits: Dataset, tmp_path: Path) -> None:
    base = hash_of(digits, tmp_path / "base")
    same: list[dict[str, Any]] = [
        {},
        {"device": "auto" if not torch.cuda.is_available() else "cpu"},
        {"threads": 1},
        {"method": "fedsc,tau=0.05"},  # the default, written out
        {"model": "mlp"},  # what "auto" is for digits
        {"augment": "none"},
        {"calibrated": True},  # measured besides
    ]
    for number, options in enumerate(same):
        assert hash_of(digits, tmp_path / f"same{number}", **options) == base, options
    other: list[dict[str, Any]] = [
        {"method": "fedsc,tau=0.06"},
        {"method": "fedavg"},
        {"seed": 1},
        {"rounds": 2},
        {"lr": 0.02},
        {"partition": "iid"},
        {"precision": "bf16"},
        {"train_limit": 99},
    ]
    found = [hash_of(digits, tmp_path / f"other{n}", **options) for n, options in enumerate(other)]
    assert len({base, *found}) == len(other) + 1


def test_the_hash_knows_the_data(digits: Dataset, tmp_path: Path) -> None:
    images = digits.test_images.clone()
    images[0, 0, 0, 0] ^= 1
    changed = dataclasses.replace(digits, test_images=images)
    one, other = hash_of(digits, tmp_path / "one"), hash_of(changed, tmp_path / "other")
    assert one != other


def test_a_folder_that_exists_is_not_touched(digits: Dataset, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(FedscError, match="exists already"):
        fedsc.run(digits, "fedavg", out=tmp_path / "run", **QUICK)
    assert list((tmp_path / "run").iterdir()) == []


# Reading ------------------------------------------------------------------------------------------


def test_a_run_read_back(folder: Path) -> None:
    run = read_run(folder)
    assert run.complete
    assert run.label == "fedsc,tau=0.1"
    assert len(run.records) == 3
    assert run.spec["method"]["tau"] == 0.1


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("spec.json", None, "no spec.json"),
        ("metrics.jsonl", None, "no metrics.jsonl"),
        ("spec.json", '{"format": 1', "damaged"),
        ("spec.json", '{"format": 99}', "format"),
        ("spec.json", "[]", "format"),
        ("spec.json", '{"format": 1}', "lacks 'label'"),
        ("spec.json", "[" * 100_000, "damaged"),
        ("metrics.jsonl", "[]\n", "line 1: it is no JSON object"),
        ("metrics.jsonl", '{"round": 1e999}\n', "beyond 1e\\+100"),
        ("metrics.jsonl", "{\n", "damaged"),
        ("metrics.jsonl", '{"round": 1, "acc', "no finished round"),
        ("metrics.jsonl", "", "no finished round"),
    ],
)
def test_what_is_no_run_folder_is_explained(
    folder: Path, tmp_path: Path, file: str, content: str | None, words: str
) -> None:
    for name in ("spec.json", "metrics.jsonl"):
        shutil.copy(folder / name, tmp_path)
    assert not read_run(tmp_path).complete
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(FedscError, match=words) as raised:
        read_run(tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


# Tables and pictures ------------------------------------------------------------------------------


def made_run(name: str, accuracies: list[float], seconds: float, **more: Any) -> RunData:
    records = [
        {
            "round": number,
            "accuracy": accuracy,
            "bytes_up": 2_500_000,
            "bytes_down": 25_000_000,
            "timing": {"seconds": seconds},
            **more,
        }
        for number, accuracy in enumerate(accuracies, 1)
    ]
    spec = {
        "dataset": "digits",
        "partition": "iid",
        "clients": 3,
        "epochs": 1,
        "long_tail": None,
        "few_shot": None,
        "participation": 1.0,
        "model": "mlp",
        "label": name.rpartition("-seed")[0],
        "seed": int(name.rpartition("seed")[2]),
    }
    return RunData(Path(name), spec, records, True)


RUNS = [
    made_run("fedavg-seed0", [0.5, 0.25], 2.0, ece=0.125),
    made_run("fedavg-seed1", [0.25, 0.75], 2.0, ece=0.375),
    made_run("fedsc,tau=0.1-seed0", [0.5, 1.0], 3.0, calibrated=0.875),
]


def test_the_table_by_hand() -> None:
    names, rows = comparison_rows(RUNS)
    table = [dict(zip([n.replace("\n", " ") for n in names], row, strict=True)) for row in rows]
    assert [row["method"] for row in table] == ["fedavg", "fedsc,tau=0.1"]
    first, second = table
    assert first["last"] == "50.00 ± 35.36"  # of 25 and 75
    assert first["best"] == "62.50"
    assert first["mean of last 10"] == "43.75"
    assert first["ECE"] == "25.00"
    assert first["MB up"] == "2.50"
    assert first["MB down"] == "25"
    assert first["time"] == "×1.00"
    assert second["last"] == "100.00"  # one seed, no spread
    assert second["ECE"] == "-"
    assert (first["calibrated"], second["calibrated"]) == ("-", "87.50")
    assert second["time"] == "×1.50"
    assert "head" not in first  # nobody has it
    lines = markdown_table(names, rows).splitlines()
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {len(names) + 1}
    assert "\n" not in lines[0]


def test_runs_of_one_method_belong_together() -> None:
    assert {k: len(v) for k, v in by_label(RUNS).items()} == {"fedavg": 2, "fedsc,tau=0.1": 1}


def assert_is_a_picture(path: Path) -> None:
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with Image.open(path) as image:
        assert 400 <= image.width <= 4000
        assert 300 <= image.height <= 4000
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int)
        assert (pixels[:, 2] > pixels[:, 0] + 60).sum() > 100  # drawn in blue, the first colour
        assert (pixels == 255).all(1).mean() > 0.3


def test_curves(tmp_path: Path) -> None:
    draw_curves(RUNS, tmp_path / "curves.png")
    assert_is_a_picture(tmp_path / "curves.png")
    draw_curves([made_run("fedavg-seed0", [0.5], 1.0)], tmp_path / "one.png")
    assert_is_a_picture(tmp_path / "one.png")


@pytest.mark.parametrize(("clients", "classes"), [(3, 10), (40, 60)])
def test_picture_of_a_partition(tmp_path: Path, clients: int, classes: int) -> None:
    counts = np.random.default_rng(0).integers(0, 50, (clients, classes))
    names = tuple(map(str, range(classes)))
    draw_partition(counts, names, "a title", tmp_path / "partition.png")
    assert_is_a_picture(tmp_path / "partition.png")


def test_table_of_a_partition() -> None:
    counts = np.array([[8, 0, 1], [0, 4, 0]])
    table = partition_table(counts, ("cat", "dog", "owl"), "title", 80)
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == ["cat", "dog", "owl", "images", "classes"]
    assert columns[1] == ["███", "···", "▁▁▁", "9", "2"]
    assert columns[2] == ["···", "▄▄▄", "···", "4", "1"]
    big = partition_table(np.ones((30, 50), np.int64), tuple(map(str, range(50))), "title", 80)
    assert "10 more classes and 19 more clients" in str(big.caption)
    drawn = io.StringIO()
    Console(file=drawn, width=80).print(big)
    assert "…" not in drawn.getvalue()
