"""Fetching, from a real server on this machine that can cut connections."""

from __future__ import annotations

import hashlib
import io
import random
import socket
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedsc.data.fetch import Place, _fill_from_archive, download, fetch, install, unpack
from fedsc.errors import FedscError

CONTENT = random.Random(0).randbytes(3_000_000)


def tar_gz(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `content` under any path, and at most `most` bytes of it per connection."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = tar_gz({"thing/a.bin": CONTENT})
        self.most: int | None = None
        self.knows_ranges = True
        self.asked: list[str | None] = []  # the Range header of each request

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/thing.tar.gz"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers["Range"]
        self.server.asked.append(wanted)
        content = self.server.content
        start = 0
        if wanted and self.server.knows_ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = None if self.server.most is None else start + self.server.most
        self.wfile.write(content[start:end])

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def accept(folder: Path) -> None:
    if (folder / "a.bin").read_bytes() != CONTENT:
        raise FedscError("a.bin is altered")


def place(url: str, checksum: str, data_dir: Path) -> Place:
    return Place(url, partial(_fill_from_archive, url, checksum, data_dir, None))


def nothing_listens_here() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/thing.tar.gz"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_fetched_checked_and_moved_into_place(server: Server, tmp_path: Path) -> None:
    data_dir = tmp_path / "made" / "on the way"
    places = [place(server.url, md5(server.content), data_dir)]
    assert install(data_dir, "thing", places, accept) == data_dir / "thing"
    assert names(data_dir) == ["thing"]  # and nothing else is left


def test_progress_is_told(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []

    def note(what: str, done: int, total: int | None) -> None:
        seen.append((what, done, total))

    download(server.url, tmp_path / "x.part", md5(server.content), note)
    assert seen[-1] == ("thing.tar.gz", len(server.content), len(server.content))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_a_cut_connection_is_resumed(server: Server, tmp_path: Path) -> None:
    server.most = 1_300_000
    download(server.url, tmp_path / "x.part", md5(server.content))
    assert server.asked == [None, "bytes=1300000-", "bytes=2600000-"]
    assert (tmp_path / "x.part").read_bytes() == server.content


def test_an_earlier_part_is_completed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "x.part").write_bytes(server.content[:1000])
    download(server.url, tmp_path / "x.part", md5(server.content))
    assert server.asked == ["bytes=1000-"]
    assert (tmp_path / "x.part").read_bytes() == server.content
    download(server.url, tmp_path / "x.part", md5(server.content))  # all there: 416
    assert (tmp_path / "x.part").read_bytes() == server.content


def test_a_connection_that_gives_nothing_keeps_the_part(server: Server, tmp_path: Path) -> None:
    (tmp_path / "x.part").write_bytes(server.content[:1000])
    server.most = 0
    with pytest.raises(FedscError, match="the connection broke after 1000 bytes"):
        download(server.url, tmp_path / "x.part", md5(server.content))
    assert (tmp_path / "x.part").stat().st_size == 1000


def test_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    (tmp_path / "x.part").write_bytes(server.content[:1000])
    server.knows_ranges = False
    download(server.url, tmp_path / "x.part", md5(server.content))
    assert (tmp_path / "x.part").read_bytes() == server.content


def test_a_wrong_checksum_leaves_nothing(server: Server, tmp_path: Path) -> None:
    right = md5(server.content)
    server.content = server.content[:-1] + b"x"
    with pytest.raises(FedscError, match=rf"MD5 {md5(server.content)}, expected {right}"):
        install(tmp_path, "thing", [place(server.url, right, tmp_path)], accept)
    assert names(tmp_path) == []


def test_content_that_does_not_verify_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.content = tar_gz({"thing/a.bin": b"other"})
    with pytest.raises(FedscError, match=r"a\.bin is altered"):
        install(tmp_path, "thing", [place(server.url, md5(server.content), tmp_path)], accept)
    assert names(tmp_path) == []


def test_the_next_place_is_tried(server: Server, tmp_path: Path) -> None:
    right = md5(server.content)
    places = [place(nothing_listens_here(), right, tmp_path), place(server.url, right, tmp_path)]
    assert install(tmp_path, "thing", places, accept).is_dir()


def test_all_reasons_are_given(server: Server, tmp_path: Path) -> None:
    def out_of_order(_scratch: Path) -> None:
        raise FedscError("it is closed today")

    closed = nothing_listens_here()
    places = [place(closed, "0" * 32, tmp_path), Place("the registry", out_of_order)]
    with pytest.raises(FedscError) as caught:
        install(tmp_path, "thing", places, accept)
    said = str(caught.value)
    assert closed in said
    assert "refused" in said
    assert "the registry: it is closed today" in said
    assert f"put the official files into {tmp_path / 'thing'} by hand" in said
    assert names(tmp_path) == []


def test_what_exists_is_never_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "mine.txt").write_text("mine")
    with pytest.raises(FedscError, match="remove it and run this again"):
        install(tmp_path, "thing", [place(server.url, md5(server.content), tmp_path)], accept)
    assert names(tmp_path / "thing") == ["mine.txt"]
    assert server.asked == []


@pytest.mark.parametrize("member", ["../evil", "/tmp/evil-of-fedsc", "a/../../evil"])
def test_archives_cannot_write_outside(tmp_path: Path, member: str) -> None:
    into = tmp_path / "into"
    into.mkdir()
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("fine", "x")
        archive.writestr(member, "x")
    with pytest.raises(FedscError, match="member outside its folder"):
        unpack(tmp_path / "a.zip", into)
    assert names(into) == []
    (tmp_path / "a.tar.gz").write_bytes(tar_gz({member: b"x"}))
    with pytest.raises(FedscError, match="member outside its folder"):
        unpack(tmp_path / "a.tar.gz", into)
    assert names(into) == []
    assert names(tmp_path) == ["a.tar.gz", "a.zip", "into"]
    assert not Path("/tmp/evil-of-fedsc").exists()


def test_folders_files_and_a_deep_one_are_unpacked_and_no_permissions_with_them(
    tmp_path: Path,
) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        folder = tarfile.TarInfo("thing")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o000
        tar.addfile(folder)
        for name, content in {"thing/a.bin": CONTENT, "thing/deep/er/b.bin": b""}.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.uid = len(content), 0o6777, 12345
            tar.addfile(info, io.BytesIO(content))
    unpack(tmp_path / "a.tar.gz", tmp_path / "into")
    a, b = tmp_path / "into/thing/a.bin", tmp_path / "into/thing/deep/er/b.bin"
    assert a.read_bytes() == CONTENT
    assert b.read_bytes() == b""
    assert a.stat().st_mode & 0o7111 == 0  # neither set-user-ID nor executable
    assert a.stat().st_uid == tmp_path.stat().st_uid


def test_names_that_cannot_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(FedscError, match="comes with scikit-learn"):
        fetch("digits", tmp_path)
    with pytest.raises(FedscError, match=r"unknown data set 'cifar'.*allowed: fashion-mnist"):
        fetch("cifar", tmp_path)


def test_damaged_files_are_not_taken_for_fetched(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-binary").mkdir()
    for name in ("train.bin", "test.bin"):
        (tmp_path / "cifar-100-binary" / name).write_bytes(b"short")
    with pytest.raises(FedscError, match=r"train\.bin is truncated"):
        fetch("fc100", tmp_path)
