"""A real browser for the page, where there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

NAMES = "chromium", "chromium-browser", "google-chrome"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        reason = "no Chromium on this machine (Debian: apt-get install chromium)"
        if os.environ.get("FEDSC_BROWSER") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    # Chromium's sandbox does not work for root.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A window in which every error and every request to elsewhere fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(20_000)
    wrong: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            wrong.append(message.text)

    def on_request(request: Request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:")):
            wrong.append(f"asked for {request.url}")

    page.on("console", on_console)
    page.on("request", on_request)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    context.close()
    assert wrong == []
