"""`fedsc board`: the page on this machine, growing with the runs."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..errors import FedscError
from .page import RunReader, render

HOST = "127.0.0.1"  # this machine only
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Board(ThreadingHTTPServer):
    """Serves the page at / and its data at /data.json, and nothing else."""

    daemon_threads = True

    def __init__(self, paths: list[Path], port: int) -> None:
        self.reader = RunReader(paths)
        self.reading = threading.Lock()  # two browsers may ask at once
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise FedscError(
                f"cannot serve at port {port}: {why}; choose another --port, or 0 for any"
            ) from None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def current(self) -> dict[str, Any]:
        """What the page shows now; `stamp` is the same as long as that is."""
        with self.reading:
            data = self.reader.page_data()
            return {**data, "stamp": self.reader.stamp, "poll": True}


class Handler(BaseHTTPRequestHandler):
    server: Board
    server_version, sys_version = "fedsc", ""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        answers: dict[str, Callable[[str], None]] = {"/": self.page, "/data.json": self.data}
        # Pages elsewhere could ask by a name of their own; the port may be that of a tunnel.
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            self.answer(HTTPStatus.FORBIDDEN, "text/plain", b"ask for 127.0.0.1\n")
        elif address.path not in answers:
            self.answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is only /\n")
        else:
            answers[address.path](address.query)

    def page(self, query: str) -> None:
        content = render(self.server.current(), poll=True).encode()
        self.answer(HTTPStatus.OK, "text/html; charset=utf-8", content)

    def data(self, query: str) -> None:
        data = self.server.current()
        if parse_qs(query).get("seen") == [data["stamp"]]:
            self.answer(HTTPStatus.NO_CONTENT)
        else:
            text = json.dumps(data, allow_nan=False)
            self.answer(HTTPStatus.OK, "application/json", text.encode())

    def answer(self, status: HTTPStatus, kind: str | None = None, content: bytes = b"") -> None:
        self.send_response(status)
        if kind is not None:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the browser has left
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal is for the person, not for each request."""
