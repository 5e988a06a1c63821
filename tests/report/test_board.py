"""The board's server: two addresses, for this machine only."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsc import FedscError
from fedsc.report.board import Board
from tests.report.made_runs import record, write_run


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    write_run(tmp_path / "runs" / "a", "fedsc", 0, [0.1, 0.2], rounds=3, complete=False)
    (tmp_path / "runs" / "secret.txt").write_text("secret")
    with Board([tmp_path / "runs"], 0) as board:
        thread = threading.Thread(target=board.serve_forever, args=(0.05,))
        thread.start()
        yield board
        board.shutdown()
        thread.join()


def ask(board: Board, path: str, verb: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", board.server_port, timeout=10)
    connection.request(verb, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    if answer.status == 200:
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "Python" not in answer.headers["Server"]
    connection.close()
    return answer.status, content


def test_the_page_and_its_data(board: Board, tmp_path: Path) -> None:
    status, page = ask(board, "/")
    assert status == 200
    assert b"connect-src 'self'" in page
    status, content = ask(board, "/data.json")
    data = json.loads(content)
    assert data["runs"][0]["round"] == [1, 2]
    assert ask(board, f"/data.json?seen={data['stamp']}") == (204, b"")
    with (tmp_path / "runs" / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(3, 0.3, 3, False)) + "\n")
    status, content = ask(board, f"/data.json?seen={data['stamp']}")
    assert status == 200
    assert json.loads(content)["runs"][0]["round"] == [1, 2, 3]


@pytest.mark.parametrize(
    "path",
    ["/secret.txt", "/a/spec.json", "/../secret.txt", "/%2e%2e/secret.txt", "//etc/passwd", "/x"],
)
def test_there_is_nothing_else(board: Board, path: str) -> None:
    assert ask(board, path)[0] == 404


def test_only_this_machine_by_its_name(board: Board) -> None:
    assert board.server_address[0] == "127.0.0.1"
    assert ask(board, "/", Host="elsewhere.example:80")[0] == 403
    assert ask(board, "/data.json", Host="localhost:9000")[0] == 200  # through a tunnel
    assert ask(board, "/", "POST")[0] == 501


def test_a_port_in_use_is_explained(board: Board) -> None:
    with pytest.raises(FedscError, match=f"{board.server_port}.*--port"):
        Board([], board.server_port)
    with pytest.raises(FedscError, match="99999"):
        Board([], 99_999)
