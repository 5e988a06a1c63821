"""The comparison table in the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from fedsc.report.runs import read_run, setting_of
from fedsc.report.table import at_commas, comparison_table
from tests.report.made_runs import write_run


def shown(folders: list[Path], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(comparison_table([read_run(folder) for folder in folders], width), crop=False)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_methods_are_broken_at_commas_and_only_where_they_must(tmp_path: Path) -> None:
    long = "fedsc,tau=0.1,neighbours=3,min_count=5"
    runs = [
        write_run(tmp_path / "a", long, 0, [0.5]),
        write_run(tmp_path / "b", "fedavg", 0, [0.4]),
    ]
    wide = shown(runs, 120)
    assert wide[0].startswith("digits, nid1:0.2, 4 clients, 1 round of 2 epochs")
    assert any(line.startswith(f"{long}  50.00") for line in wide)
    narrow = shown(runs, 72)
    assert max(map(len, narrow)) <= 72
    starts = [line.split(" ")[0] for line in narrow]
    assert starts[starts.index("fedsc,tau=0.1,") + 1 :] == [
        "neighbours=3,",
        "min_count=5",
        "fedavg",
    ]


def test_a_table_that_is_too_wide_keeps_its_methods_and_numbers(tmp_path: Path) -> None:
    tails = {"head": 0.9, "middle": 0.5, "tail": 0.1, "calibrated": 0.75, "summed": 0.76}
    runs = [
        write_run(tmp_path / f"{seed}", "fedsc,tau=0.1", seed, [0.5 + seed / 10], measured=tails)
        for seed in (0, 1)
    ]
    wide, narrow = (shown(runs, width) for width in (200, 80))
    assert any(line.startswith("fedsc,tau=0.1  55.00 ± 7.07  55.00") for line in wide)
    rows = [line for line in narrow if line.startswith(("fedsc", "tau=0.1"))]
    assert [row.split()[0] for row in rows] == ["fedsc,", "tau=0.1"]
    assert rows[0].split()[1:] == next(row for row in wide if "55.00" in row).split()[1:]
    assert not any("…" in line for line in narrow)


def test_lines_of_a_method() -> None:
    assert at_commas("fedsc,tau=0.1,literal", 100) == "fedsc,tau=0.1,literal"
    assert at_commas("fedsc,tau=0.1,literal", 14) == "fedsc,tau=0.1,\nliteral"
    assert at_commas("fedsc,tau=0.1", 3) == "fedsc,\ntau=0.1"
    assert at_commas("fedavg", 3) == "fedavg"


def test_what_a_private_run_has_spent(tmp_path: Path) -> None:
    """The most of any seed; null is infinite; a run that is not private has none."""

    def spend(label: str, seed: int, epsilon: Any) -> Path:
        folder = write_run(tmp_path / f"{label}{seed}", label, seed, [0.5])
        found = json.loads((folder / "metrics.jsonl").read_text())
        (folder / "metrics.jsonl").write_text(json.dumps({**found, "epsilon": epsilon}) + "\n")
        return folder

    plain = write_run(tmp_path / "plain", "fedavg", 0, [0.5])
    assert not any("ε" in line for line in shown([plain], 100))
    folders = [spend("fedsc", 0, 7.123), spend("fedsc", 1, 7.891), spend("moon", 0, None), plain]
    lines = shown(folders, 100)
    (head,) = [line for line in lines if line.startswith("method")]
    column = head.split().index("ε") - len(head.split())  # from the right: ± takes words
    spent = {line.split()[0]: line.split()[column] for line in lines[-3:]}
    assert spent == {"fedsc": "7.89", "moon": "∞", "fedavg": "-"}


def test_a_setting_with_a_target_names_no_noise(tmp_path: Path) -> None:
    """The noise was found from the target; `dp_noise` is 0 then, which it was not."""
    options: dict[str, Any] = {"dp_unit": "record", "delta": 1e-5, "dp_clip": 1.0, "dp_noise": 0.0}
    folder = write_run(tmp_path / "a", "fedavg", 0, [0.5], target_epsilon=8.0, **options)
    text = setting_of(read_run(folder).spec)
    assert text.endswith("private for one record (target epsilon 8, delta 1e-05, dp clip 1)")
    folder = write_run(tmp_path / "b", "fedavg", 0, [0.5], **{**options, "dp_noise": 2.0})
    assert "dp noise 2" in setting_of(read_run(folder).spec)
