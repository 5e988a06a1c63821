"""The page in a real browser: it loads, its controls work, and it grows with the runs."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from fedsc.report.board import Board
from fedsc.report.page import RunReader, write_report
from tests.report.made_runs import record, rising, write_run
from tests.report.test_page import ATTACK

METHODS = {"fedavg": 0.7, "fedsc": 0.9, "moon": 0.8}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods with three seeds on two settings, one run that goes on, one that diverged."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        for method, last in METHODS.items():
            name = f"{method}-{seed}"
            accuracies = rising(last + 0.01 * seed * last, 8)
            write_run(folder / "nid1" / name, method, seed, accuracies, drift=method == "fedsc")
        write_run(folder / "iid" / f"fedavg-{seed}", "fedavg", seed, [0.9], partition="iid")
    write_run(folder / "going", "fedprox", 0, [0.1, 0.2], rounds=8, complete=False)
    write_run(folder / "bad", "fedntd", 0, [0.1, 0.3, None, None, 0.2, 0.4])
    (folder / "broken").mkdir()
    (folder / "broken" / "spec.json").write_text("{")
    return folder


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return report_of(runs, tmp_path_factory.mktemp("page"))


def report_of(runs: Path, folder: Path) -> str:
    path = folder / "report.html"
    write_report(RunReader([runs]).page_data(), path)
    return path.as_uri()


def open_page(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("body[data-ready]")


def lines_of(page: Page, panel: str) -> list[str]:
    """Names of the lines that Plotly has drawn in a panel."""
    found: list[str] = page.evaluate(
        """panel => document.querySelector(`#${panel} .plot`).data
            .filter(trace => trace.showlegend !== false).map(trace => trace.name)""",
        panel,
    )
    return found


def column(page: Page, number: int) -> list[str]:
    return page.locator(f"#table tbody tr > :nth-child({number})").all_inner_texts()


def methods_in_table(page: Page) -> list[str]:
    return [text.split()[0] for text in column(page, 1)]


def test_what_is_on_the_page(page: Page, report: str) -> None:
    open_page(page, report)
    expect(page.locator("#verdict")).to_contain_text("fedsc is best")
    expect(page.locator("#verdict")).to_contain_text("significant at 5 %")
    assert methods_in_table(page)[:3] == ["fedsc", "moon", "fedavg"]
    assert sorted(lines_of(page, "curves")) == ["fedavg", "fedntd", "fedprox", "fedsc", "moon"]
    assert lines_of(page, "drift") == ["fedsc"]
    for panel in ("cost", "classes", "partition"):
        assert page.locator(f"#{panel} .main-svg").count()
    for panel in ("landscape", "embedding", "theory"):  # these runs have none
        expect(page.locator(f"#{panel}")).to_be_hidden()
    expect(page.locator("#skipped")).to_contain_text("broken")
    expect(page.locator("#counts")).to_have_text("13 finished runs, 1 running")
    expect(page.locator("#table tr", has_text="fedprox")).to_contain_text("running")
    expect(page.locator("#table tr", has_text="fedntd")).to_contain_text("diverged")
    drawn = page.evaluate(
        "document.querySelector('#curves .plot').data.find(t => t.name === 'fedntd').y"
    )
    assert drawn == [10, 30, None, None, 20, 40]  # gaps, not zeros


@pytest.mark.parametrize("number", [2, 3, 5])
def test_few_rounds_have_a_tick_each(page: Page, tmp_path: Path, number: int) -> None:
    write_run(tmp_path / "run", "fedsc", 0, rising(0.9, number), drift=True)
    open_page(page, report_of(tmp_path / "run", tmp_path))
    for panel in ("curves", "drift"):
        ticks = page.locator(f"#{panel} .xtick").all_text_contents()
        assert ticks == sorted(set(ticks))
        assert {str(round) for round in range(1 + (panel == "drift"), number + 1)} <= {*ticks}


def test_filters_change_the_table_and_the_plots(page: Page, report: str) -> None:
    open_page(page, report)
    page.get_by_label("Setting").select_option(label="iid, 4 clients, 2 epochs, mlp")
    assert methods_in_table(page) == ["fedavg"]
    assert column(page, 3) == ["90.00 ± 0.00"]
    assert lines_of(page, "curves") == ["fedavg"]
    page.get_by_label("Setting").select_option(index=0)

    page.get_by_role("button", name="moon").click()
    assert "moon" not in lines_of(page, "curves")
    assert "moon" not in methods_in_table(page)
    page.get_by_role("button", name="moon").press("Enter")  # and back, by the keyboard
    assert "moon" in lines_of(page, "curves")
    page.get_by_role("button", name="moon").dblclick()
    assert lines_of(page, "curves") == ["moon"]

    page.get_by_label("Metric").select_option(label="Training loss: ce")
    expect(page.locator("#curves h2")).to_have_text("Training loss: ce over rounds")
    assert page.evaluate("document.querySelector('#curves .plot').data.at(-1).y[1]") == 1.0
    expect(page.locator("#table thead")).to_contain_text("Training loss")

    page.reload()  # the address remembers the choices
    page.wait_for_selector("body[data-ready]")
    assert lines_of(page, "curves") == ["moon"]
    expect(page.locator("#curves h2")).to_have_text("Training loss: ce over rounds")
    page.get_by_role("button", name="moon").click()
    expect(page.locator("#curves .plot")).to_contain_text("choose one above")


def test_sorting(page: Page, report: str) -> None:
    open_page(page, report)
    last = page.get_by_role("button", name="Last %")
    last.click()
    expect(page.locator("#table th", has=last)).to_have_attribute("aria-sort", "ascending")
    # 2 of 8 rounds: 20 %; a run without its last accuracies stays at the end in either order.
    assert methods_in_table(page) == ["fedprox", "fedavg", "moon", "fedsc", "fedntd"]
    page.get_by_role("button", name="Last %").click()
    assert methods_in_table(page) == ["fedsc", "moon", "fedavg", "fedprox", "fedntd"]
    page.get_by_role("button", name="Method").press("Enter")
    assert methods_in_table(page) == ["fedavg", "fedntd", "fedprox", "fedsc", "moon"]
    expect(page.get_by_role("button", name="Method")).to_be_focused()


def test_downloads(page: Page, report: str) -> None:
    open_page(page, report)
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    rows = download.value.path().read_text().splitlines()
    assert rows[0].startswith('"data set","setting","method","Seeds","Last %","Last % sd"')
    assert rows[1].split('","')[2:4] == ["fedsc", "3"]
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<svg")):
        page.locator("#curves .plot").hover()
        with page.expect_download() as download:
            page.locator(f"#curves [data-title='Download {kind.upper()}']").click()
        assert download.value.suggested_filename.endswith(kind)
        assert download.value.path().read_bytes().startswith(start)


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))


def test_dark_and_light(browser: Browser, report: str) -> None:
    with browser.new_context(color_scheme="dark") as context:
        page = context.new_page()
        open_page(page, report)
        dark, button = background(page), page.get_by_role("button", name="Dark")
        expect(button).to_have_attribute("aria-pressed", "true")
        colours = "document.querySelector('#curves .plot').data.at(-1).line.color"
        in_dark = page.evaluate(colours)
        button.click()
        assert background(page) != dark
        assert page.evaluate(colours) != in_dark
        page.reload()
        assert background(page) != dark  # remembered, against the system
        page.wait_for_selector("body[data-ready]")
        page.get_by_role("button", name="Dark").click()
        assert background(page) == dark


def test_on_a_phone_only_tables_scroll_sideways(page: Page, report: str) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    open_page(page, report)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("document.querySelector('#comparison .scroll').scrollWidth") > 360


def test_text_of_a_run_is_shown_and_never_run(page: Page, tmp_path: Path) -> None:
    hostile = tmp_path / "runs" / "<img src=x onerror=alert(3)>"
    run = write_run(hostile, ATTACK, 0, rising(0.5, 3), classes=[ATTACK, "<b>b</b>", "c"])
    notes = {"bound": [1], "observed": [1], "notes": [ATTACK]}
    (run / "theory.json").write_text(json.dumps(notes))
    points = {"x": [0, 1], "y": [0, 1], "label": [0, 1], "classes": [ATTACK, ATTACK]}
    (run / "embedding.json").write_text(json.dumps(points))
    (tmp_path / "runs" / ATTACK.replace("/", "")).mkdir()
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    open_page(page, report_of(tmp_path / "runs", tmp_path))
    expect(page.locator("#table tbody th")).to_have_text(ATTACK)
    expect(page.locator("#theory-notes li")).to_have_text(ATTACK)
    page.locator("#curves .plot").hover()
    assert page.locator("img[src=x]").count() == 0
    assert dialogs == []


def test_landscape_features_and_theory_of_a_run(page: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a", "fedsc", 0, rising(0.5, 3))
    grid = [-1.0, 0.0, 1.0]
    contents: dict[str, dict[str, Any]] = {
        "landscape": {
            "grid": grid,
            "loss": [[1 + x * x + y * y for x in grid] for y in grid],
            "models": [{"name": "global", "at": [0, 0], "loss": 1.0}],
        },
        "embedding": {
            "x": [0.0, 1.0, 2.0],
            "y": [0.0, None, 2.0],
            "label": [0, 1, 1],
            "classes": ["cat", "dog", "owl"],
            "client": [0, 1, 2],
            "predicted": [0, 1, 0],
        },
        "theory": {
            "bound": [9.0, 5.0],
            "observed": [2.0, 1.0],
            "conditions": [{"name": "step size", "needs": "< 0.1", "has": 0.5, "holds": False}],
            "notes": ["the bound is loose"],
        },
    }
    for name, content in contents.items():
        (run / f"{name}.json").write_text(json.dumps(content))
    open_page(page, report_of(tmp_path / "runs", tmp_path))
    kinds = "document.querySelector('#landscape .plot').data.map(trace => trace.type)"
    assert page.evaluate(kinds) == ["contour", "scatter"]
    assert lines_of(page, "embedding") == ["cat", "dog"]
    page.get_by_label("colour").select_option("right")
    assert lines_of(page, "embedding") == ["right", "wrong"]
    assert lines_of(page, "theory") == ["observed", "bound"]
    expect(page.locator("#conditions tbody tr")).to_contain_text("✗ no")
    expect(page.locator("#theory-notes")).to_contain_text("the bound is loose")


def test_twenty_runs_of_a_hundred_rounds_take_under_three_seconds(
    page: Page, tmp_path: Path
) -> None:
    for number in range(20):
        method, seed = f"fed{number % 5}", number // 5
        write_run(tmp_path / "runs" / str(number), method, seed, rising(0.8, 100), drift=True)
    address = report_of(tmp_path / "runs", tmp_path)
    session = page.context.new_cdp_session(page)
    # Time on the processor: what else the machine is doing does not count.
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    open_page(page, address)
    found = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
    assert 0 < found["TaskDuration"] < 3


def zoom_in(page: Page, panel: str) -> None:
    """Drag over the left half of a plot."""
    box = page.locator(f"#{panel} .nsewdrag").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 20, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, middle, steps=5)
    page.mouse.up()
    page.wait_for_function(
        "before => document.querySelector('#curves .plot').layout.xaxis.range[1] < before", arg=7
    )


@pytest.fixture
def board(runs: Path, tmp_path: Path) -> Iterator[Board]:
    shutil.copytree(runs / "nid1", tmp_path / "runs")
    with Board([tmp_path / "runs"], 0) as board:
        thread = threading.Thread(target=board.serve_forever, args=(0.05,))
        thread.start()
        yield board
        board.shutdown()
        thread.join()


def test_a_killed_run_is_shown_as_stopped(page: Page, board: Board, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "new", "fedprox", 0, [0.1, 0.2], rounds=4, complete=False)
    open_page(page, board.url)
    expect(page.locator("#verdict")).to_contain_text("still going on")
    os.utime(run / "metrics.jsonl", (time.time() - 600,) * 2)
    expect(page.locator("#counts")).to_have_text("9 finished runs, 1 stopped")
    expect(page.locator("#verdict")).not_to_contain_text("still going on")
    expect(page.locator("#table tr", has_text="fedprox")).to_contain_text("stopped")


def test_the_board_grows_with_a_run_and_keeps_zoom_and_choices(
    page: Page, board: Board, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "runs" / "new", "fedprox", 0, [0.1, 0.2], rounds=4, complete=False)
    open_page(page, board.url)
    expect(page.locator("#counts")).to_have_text("9 finished runs, 1 running")
    page.get_by_role("button", name="moon").click()
    zoom_in(page, "curves")
    range_of_rounds = "document.querySelector('#curves .plot').layout.xaxis.range"
    zoomed = page.evaluate(range_of_rounds)
    assert zoomed[1] < 7
    length = "document.querySelector('#curves .plot').data.find(t => t.name === 'fedprox').x.length"
    assert page.evaluate(length) == 2
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(3, 0.55, 3, False)) + "\n")
    (run / "summary.json").write_text("{}")
    expect(page.locator("#counts")).to_have_text("10 finished runs")
    assert page.evaluate(length) == 3
    assert "moon" not in lines_of(page, "curves")
    assert page.evaluate(range_of_rounds) == zoomed
    expect(page.locator("#live")).to_have_text("live")
