"""What the page is told about the runs, and that nothing in a run folder can break out of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedsc import FedscError
from fedsc.report.page import RunReader, render, write_report
from tests.report.made_runs import record, rising, write_run


def page_data(*paths: Path) -> dict[str, Any]:
    return RunReader(list(paths)).page_data()


def test_statistics_over_seeds(tmp_path: Path) -> None:
    """Last accuracies 5, 7, 9 against 4, 5, 6 hundredths: the p-value of test_statistics."""
    for seed, (first, second) in enumerate([(0.05, 0.04), (0.07, 0.05), (0.09, 0.06)]):
        write_run(tmp_path / f"a{seed}", "fedsc", seed, [0.25, 0.5, first])
        write_run(tmp_path / f"b{seed}", "fedavg", seed, [0.1, second])
    fedsc, fedavg = page_data(tmp_path)["groups"]
    assert fedsc["method"] == "fedsc"
    assert fedsc["accuracy"]["last"] == pytest.approx((0.07, 0.02))
    assert fedsc["accuracy"]["best"] == pytest.approx((0.5, 0))
    assert fedavg["p_values"]["fedsc"] == pytest.approx(0.07418, abs=1e-5)
    reached = {"seeds": 3, "of": 3, "rounds": 2, "bytes": 6_000_000, "seconds": 1.0246913578}
    assert fedsc["reached"]["0.4"] == pytest.approx(reached)
    assert set(fedsc["reached"]) == {"0.2", "0.4"}  # 60 % was never reached: missing, not zero
    assert fedavg["reached"] == {}


def test_what_calibration_would_give_is_a_curve(tmp_path: Path) -> None:
    measured = {"calibrated": 0.5, "summed": 0.6}
    write_run(tmp_path / "a", "fedsc", 0, [0.1, 0.3], measured=measured, calibrated=True)
    data = page_data(tmp_path)
    assert data["runs"][0]["series"]["calibrated"] == [0.5, 0.5]
    titles = {m["name"]: m["title"] for m in data["metrics"] if m["unit"] == "%"}
    assert titles["calibrated"] == "With calibration"
    assert titles["summed"] == "By the sum of classifiers"
    assert data["groups"][0]["final"]["calibrated"] == (0.5, None)
    write_run(tmp_path / "b", "fedsc", 1, [0.1, 0.3])
    (group,) = page_data(tmp_path)["groups"]  # one method, whether measured or not
    assert "calibrated" not in group["final"]  # as with all that a seed lacks


def test_a_text_that_has_meant_two_methods_is_two_methods(tmp_path: Path) -> None:
    """Defaults change; a run keeps its values, and may lack options that came later."""
    for seed, options in enumerate([{"tau": 0.05}, {"tau": 0.5}, {}]):
        method = {"name": "fedsc", "cpdr_weight": 1.0, **options}
        write_run(tmp_path / f"{seed}", "fedsc", seed, [0.1, 0.3], method=method)
    assert page_data(tmp_path)["methods"] == ["fedsc", "fedsc,tau=0.5"]
    shutil.rmtree(tmp_path / "1")
    assert page_data(tmp_path)["methods"] == ["fedsc"]


def test_only_some_seeds_reach_an_accuracy(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedsc", 0, [0.1, 0.3])
    write_run(tmp_path / "b", "fedsc", 1, [0.1, 0.1])
    (group,) = page_data(tmp_path)["groups"]
    assert (group["reached"]["0.2"]["seeds"], group["reached"]["0.2"]["of"]) == (1, 2)
    assert group["reached"]["0.2"]["rounds"] == 2


def test_runs_that_go_on_do_not_count_beside_finished_ones(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedsc", 0, [0.1, 0.5])
    write_run(tmp_path / "b", "fedsc", 1, [0.1], complete=False, rounds=2)
    write_run(tmp_path / "c", "moon", 0, [0.2], complete=False, rounds=2)
    data = page_data(tmp_path)
    fedsc, moon = data["groups"]
    assert (len(fedsc["runs"]), len(fedsc["counted"])) == (2, 1)
    assert fedsc["accuracy"]["last"] == (0.5, None)
    assert moon["accuracy"]["last"] == (0.2, None)
    assert [run["complete"] for run in data["runs"]] == [True, False, False]


@pytest.mark.parametrize(
    ("seconds", "silence", "state"),
    [(0.5, 110, "running"), (0.5, 130, "stopped"), (60, 290, "running"), (60, 310, "stopped")],
)
def test_a_killed_run_is_stopped_and_a_slow_one_is_not(
    tmp_path: Path, seconds: float, silence: float, state: str
) -> None:
    """Two minutes of silence, or five times the longest round if that is more."""
    run = write_run(tmp_path / "a", "fedsc", 0, [0.1, 0.2], rounds=9, complete=False)
    write_run(tmp_path / "b", "fedsc", 1, [0.1, 0.2])
    reader = RunReader([tmp_path])
    assert [found["state"] for found in reader.page_data()["runs"]] == ["running", "finished"]
    before = reader.stamp
    metrics = run / "metrics.jsonl"
    first, second = map(json.loads, metrics.read_text().splitlines())
    first["timing"]["seconds"] = seconds
    metrics.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    for file in tmp_path.glob("*/metrics.jsonl"):  # a finished run may be as old as it likes
        os.utime(file, (time.time() - silence,) * 2)
    assert [found["state"] for found in reader.page_data()["runs"]] == [state, "finished"]
    assert reader.stamp != before
    metrics.touch()  # it goes on
    assert reader.page_data()["runs"][0]["state"] == "running"


def test_the_board_hears_of_a_run_that_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file changes when a run is killed, only the time goes by."""
    write_run(tmp_path / "a", "fedsc", 0, [0.1, 0.2], rounds=9, complete=False)
    reader = RunReader([tmp_path])
    assert reader.page_data()["runs"][0]["state"] == "running"
    before = reader.stamp
    monkeypatch.setattr("fedsc.report.runs.LEAST_SECONDS_OF_SILENCE", -1.0)
    monkeypatch.setattr("fedsc.report.runs.LONGEST_ROUNDS_OF_SILENCE", -1)
    assert reader.page_data()["runs"][0]["state"] == "stopped"
    assert reader.stamp != before


def test_what_is_missing_is_null(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedsc", 0, [0.1, None, 0.3])
    data = page_data(tmp_path)
    assert data["runs"][0]["series"]["accuracy"] == [0.1, None, 0.3]
    assert data["runs"][0]["diverged"]
    assert data["groups"][0]["accuracy"] == {}


def test_terms_of_the_loss_and_their_sum_are_metrics(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "fedsc", 0, [0.1])
    line = record(2, 0.2, 3, False)
    line["train_loss"] = {"ce": 1.5, "rpcl": None}
    line["my_own"] = 7.0
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    data = page_data(tmp_path)
    series = data["runs"][0]["series"]
    assert series["train_loss"] == [pytest.approx(2.1235), None]
    assert series["train_loss.ce"] == [2.0, 1.5]
    assert series["my_own"] == [None, 7.0]
    titles = {metric["name"]: metric["title"] for metric in data["metrics"]}
    assert titles["my_own"] == "My own"
    assert titles["ece"] == "Calibration error (ECE)"
    names = list(titles)
    assert names[0] == "accuracy"
    start = names.index("train_loss")
    assert names[start : start + 5] == [
        *("train_loss", "train_loss.ce", "train_loss.rpcl", "my_own", "bytes_up"),
    ]


def test_runs_that_differ_in_an_option_are_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedsc", 0, [0.1], lr=0.1)
    write_run(tmp_path / "b", "fedsc", 0, [0.2], lr=0.05)
    write_run(tmp_path / "c", "moon", 0, [0.2], lr=0.05)
    data = page_data(tmp_path)
    assert data["methods"] == ["fedsc, lr 0.05", "fedsc, lr 0.1", "moon"]
    assert data["runs"][0]["options"] == {"lr": 0.1}


def test_methods_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for tau in (10, 2, 0.5):
        write_run(tmp_path / f"{tau}", f"fedsc,tau={tau}", 0, [0.1])
    assert page_data(tmp_path)["methods"] == ["fedsc,tau=0.5", "fedsc,tau=2", "fedsc,tau=10"]


def test_a_copy_of_a_run_counts_once(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedsc", 0, [0.1], rounds=2, complete=False)
    write_run(tmp_path / "b", "fedsc", 0, [0.1, 0.2], rounds=2)
    data = page_data(tmp_path, tmp_path / "b")  # and a folder named twice is one folder
    assert [run["path"] for run in data["runs"]] == [str(tmp_path / "b")]
    (line,) = data["skipped"]
    assert str(tmp_path / "a") in line


def test_damaged_and_foreign_folders_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "good", "fedsc", 0, [0.1])
    (write_run(tmp_path / "cut", "fedsc", 1, [0.1]) / "metrics.jsonl").write_text('{"rou\n')
    (write_run(tmp_path / "bare", "fedsc", 2, [0.1]) / "spec.json").write_text('{"format": 1}')
    (write_run(tmp_path / "odd", "fedsc", 3, [0.1]) / "metrics.jsonl").write_text('{"round": 1}\n')
    (write_run(tmp_path / "list", "fedsc", 4, [0.1]) / "metrics.jsonl").write_text("[1]\n")
    (tmp_path / "photos" / "2024").mkdir(parents=True)
    damaged = write_run(tmp_path / "extra", "fedsc", 5, [0.1]) / "landscape.json"
    damaged.write_text('{"grid": [0]}')
    data = page_data(tmp_path, tmp_path / "nowhere")
    assert [Path(run["path"]).name for run in data["runs"]] == ["extra", "good"]
    for name in ("cut", "bare", "odd", "list", "photos", "nowhere", "landscape.json"):
        (line,) = [line for line in data["skipped"] if f"/{name}/" in line or f"/{name} " in line]
        assert "\n" not in line
    assert len(data["skipped"]) == 7


def test_a_half_written_last_line_is_not_there_yet(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "fedsc", 0, [0.1, 0.2], complete=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "accur')
    assert page_data(tmp_path)["runs"][0]["round"] == [1, 2]


def test_only_what_changed_is_read_again(tmp_path: Path) -> None:
    """A file that is rewritten with the same time and size goes unnoticed: it was not read."""
    kept = write_run(tmp_path / "a", "fedsc", 0, [0.1]) / "metrics.jsonl"
    grown = write_run(tmp_path / "b", "fedsc", 1, [0.1], complete=False) / "metrics.jsonl"
    reader = RunReader([tmp_path])
    reader.page_data()
    before, time = reader.stamp, kept.stat().st_mtime_ns
    assert reader.page_data() is reader.page_data()
    assert reader.stamp == before

    kept.write_text(kept.read_text().replace("0.1,", "0.9,"))
    os.utime(kept, ns=(time, time))
    with grown.open("a") as file:
        file.write(json.dumps(record(2, 0.7, 3, False)) + "\n")
    first, second = reader.page_data()["runs"]
    assert first["series"]["accuracy"] == [0.1]
    assert second["series"]["accuracy"] == [0.1, 0.7]
    assert reader.stamp != before


class Elements(HTMLParser):
    """What a browser takes for elements and scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts.append(data)


ATTACK = '</script ></script><script>alert(1)</script><img src=x onerror="alert(2)">'


def test_text_of_a_run_stays_text(tmp_path: Path) -> None:
    plain, hostile = tmp_path / "plain", tmp_path / "hostile"
    write_run(plain / "run", "fedsc", 0, [0.1])
    write_run(hostile / "run", ATTACK, 0, [0.1], classes=[ATTACK, "%%code%%", "\u2028"])
    pages = [Elements(), Elements()]
    for elements, folder in zip(pages, (plain, hostile), strict=True):
        elements.feed(render(page_data(folder)))
    assert pages[0].tags == pages[1].tags
    (data,) = [text for text in pages[1].scripts if text.startswith('{"version"')]
    assert json.loads(data)["methods"] == [ATTACK]


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "fedsc", 0, [0.1])
    text = render(page_data(tmp_path))
    elements = Elements()
    elements.feed(text)
    assert elements.addresses == ["#results"]
    assert "link" not in elements.tags
    assert "connect-src 'none'" in text
    assert text == render(page_data(tmp_path))


def test_twenty_runs_of_a_hundred_rounds_stay_under_six_mebibytes(tmp_path: Path) -> None:
    """With 200 classes, as Tiny-ImageNet has: the largest of the paper's data sets."""
    classes = [f"class number {j}" for j in range(200)]
    for seed in range(20):
        folder = tmp_path / "runs" / str(seed)
        write_run(folder, "fedsc", seed, rising(0.812345, 100), classes=classes, drift=True)
    size = write_report(page_data(tmp_path / "runs"), tmp_path / "report.html")
    assert size == (tmp_path / "report.html").stat().st_size < 6 * 2**20


def test_a_folder_is_no_place_for_the_page(tmp_path: Path) -> None:
    with pytest.raises(FedscError, match=re.escape(str(tmp_path))):
        write_report({}, tmp_path)
