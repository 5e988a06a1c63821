"""`fedsc report`, `fedsc board` and `fedsc results` as a person calls them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from fedsc.cli import main
from tests.report.made_runs import write_run


def report(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["fedsc", "report", *map(str, arguments)])
    main()


def test_report_names_what_it_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs" / "good", "fedsc", 0, [0.1])
    (tmp_path / "runs" / "foreign").mkdir()
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit) as stop:
        report(monkeypatch, tmp_path / "runs", "-o", page)
    assert not stop.value.code
    out, err = capsys.readouterr()
    assert out == f"1 run in {page} (4.7 MiB)\n"
    assert err == f"fedsc: {tmp_path / 'runs' / 'foreign'} holds no run folder\n"
    assert page.stat().st_size > 1_000_000


def test_report_of_nothing_leaves_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit) as stop:
        report(monkeypatch, tmp_path / "nowhere", "-o", page)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"fedsc: {tmp_path / 'nowhere'} is not there"
    assert lines[1].startswith("fedsc: there is no run to show")
    assert not page.exists()


def test_board_serves_until_it_is_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedsc", "board", str(tmp_path), "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().split()[2]
            with urllib.request.urlopen(address) as answer:
                assert b"<!doctype html>" in answer.read()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=20)
        finally:
            process.kill()  # where it could not be stopped, the test must not wait for it
    assert process.returncode == 0
    assert err == f"fedsc: {tmp_path} holds no run folder\n"


def results(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["fedsc", "results", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


def test_results_count_a_copy_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The copy that was cut short does not count, wherever it comes."""
    whole = write_run(tmp_path / "whole", "fedavg", 0, [0.3, 0.5])
    cut = Path(shutil.copytree(whole, tmp_path / "cut"))
    (cut / "metrics.jsonl").write_text((whole / "metrics.jsonl").read_text().split("\n")[0] + "\n")
    write_run(tmp_path / "other", "fedsc", 0, [0.3, 0.6])
    assert not results(monkeypatch, tmp_path, "--write", tmp_path / "all.md")
    said = f"fedsc: {cut} is the same run as {whole}: counted once\n"
    assert capsys.readouterr().err == said
    page = (tmp_path / "all.md").read_text()
    assert "| fedavg | *50.00* | 50.00 |" in page
    assert "| fedsc | **60.00** | 60.00 |" in page


def test_of_two_copies_the_one_that_was_measured_more_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "a", "fedavg", 0, [0.5])
    more = write_run(tmp_path / "b", "fedavg", 0, [0.5], measured={"summed": 0.7})
    (more / "spec.json").write_bytes((tmp_path / "a" / "spec.json").read_bytes())
    assert not results(monkeypatch, tmp_path, "--write", tmp_path / "all.md")
    assert "| fedavg | 50.00 | 50.00 | 70.00 |" in (tmp_path / "all.md").read_text()


def test_results_refuse_one_seed_twice_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older run, which does not name an option that is new, has another hash."""
    write_run(tmp_path / "old", "fedavg", 0, [0.5])
    write_run(tmp_path / "new", "fedavg", 0, [0.5], dropout=0.0)
    assert results(monkeypatch, tmp_path) == 2
    assert capsys.readouterr().err == (
        f"fedsc: {tmp_path / 'new'} and {tmp_path / 'old'} are the same run: take one out\n"
    )
