"""`fedsc report` and `fedsc board` as a person calls them."""

from __future__ import annotations

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
