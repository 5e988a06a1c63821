"""Broken and hostile data files: each reader gives data or refuses in words, and writes nothing."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import shutil
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedsc.data import tinyimagenet
from fedsc.data.cifar import read_binary
from fedsc.data.cifar_pickle import read_python
from fedsc.data.dataset import Dataset
from fedsc.data.fetch import unpack
from fedsc.data.folder import read_folder, read_folder_part
from fedsc.data.idx import read_idx
from fedsc.data.npz import read_npz, read_npz_images, read_npz_part
from fedsc.errors import FedscError
from tests.data.test_cifar import python2_pickle, some_images
from tests.data.test_fetch import tar_gz

from .inputs import damaged, fuzzed, nothing_outside, read_or_refuse


@pytest.fixture(autouse=True)
def _warnings_are_words() -> Iterator[None]:
    """Pillow and numpy warn of what they read all the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def is_plain(data: Dataset) -> None:
    assert data.train_images.dtype.is_floating_point is False
    assert data.train_images.numel() > 0
    assert int(data.train_labels.max()) < data.num_classes
    assert np.isfinite(data.mean).all()


# CIFAR --------------------------------------------------------------------------------------------

CIFAR_BINARY = bytes([3]) + bytes(3072)


@fuzzed
@given(content=damaged(CIFAR_BINARY), label_bytes=st.sampled_from((1, 2)))
def test_cifar_binary(place: Path, content: bytes, label_bytes: int) -> None:
    (place / "a.bin").write_bytes(content)
    found = read_or_refuse(lambda: read_binary(place / "a.bin", label_bytes))
    assert found is None or found[1].shape[1:] == (3, 32, 32)


PICKLES = [
    python2_pickle(b"\x03", some_images(1)),
    *(
        pickle.dumps({"data": some_images(1).reshape(1, 3072), "labels": [3]}, protocol=protocol)
        for protocol in range(6)
        if protocol != 5
    ),
]
# The opcodes that call, import or build something, and those whose length is stated.
DANGEROUS = [
    *b"cRbio\x81\x92\x93\x82\x83\x84PQ\x97\x98",
    *b"\x8d\x8e\x8f\x90\x91\x96\x8a\x8b\x95TXBUCrjqh",
]


@st.composite
def made_pickles(draw: st.DrawFn) -> bytes:
    """A pickle with instructions of its own put in at a place between two others."""
    content = bytearray(draw(st.sampled_from(PICKLES)))
    place = draw(st.integers(2, 60) | st.integers(2, len(content)))
    words = st.sampled_from(
        (
            *(b"cos\nsystem\n", b"cbuiltins\neval\n", b"cnumpy\nload\n", b"cposix\nsystem\n"),
            *(b"S'touch pwned'\n", b"(", b"t", b"R", b"b", b"0", b"2", b"}", b"]", b"a", b"s"),
            *(b"\x85", b"\x86", b"e", b"u", b".", b"Nh\x00", b"r\xff\xff\xff\x7f", b"i", b"o"),
        )
    )
    made = b"".join(draw(st.lists(words, min_size=1, max_size=6)))
    if draw(st.booleans()):
        made += bytes([draw(st.sampled_from(DANGEROUS))]) + draw(st.binary(max_size=9))
    content[place:place] = made
    return bytes(content)


@fuzzed
@given(content=st.sampled_from(PICKLES).flatmap(damaged) | made_pickles())
def test_cifar_pickle(place: Path, content: bytes) -> None:
    (place / "batch").write_bytes(content)
    before = Path.cwd() / "pwned"
    found = read_or_refuse(lambda: read_python(place / "batch"))
    assert not before.exists()
    if found is not None:
        assert found[0].dtype == found[1].dtype == np.uint8
        assert len(found[0]) == len(found[1])


# idx ----------------------------------------------------------------------------------------------


@st.composite
def idx_files(draw: st.DrawFn) -> bytes:
    sizes = draw(st.lists(st.sampled_from((0, 1, 2, 3, 2**14, 2**31, 2**32 - 1)), max_size=6))
    dimensions = draw(st.sampled_from((len(sizes), 0, 1, 255)))
    head = bytes([0, 0, draw(st.sampled_from((8, 9, 13))), dimensions & 255])
    return head + struct.pack(f">{len(sizes)}I", *sizes) + draw(st.binary(max_size=20))


IDX = b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 4) + bytes(24)


@fuzzed
@given(
    content=damaged(IDX) | idx_files() | damaged(gzip.compress(IDX)),
    name=st.sampled_from(("a-ubyte", "a-ubyte.gz")),
    packed=st.booleans(),
)
def test_idx(place: Path, content: bytes, name: str, packed: bool) -> None:
    (place / name).write_bytes(gzip.compress(content) if packed else content)
    found = read_or_refuse(lambda: read_idx(place / name))
    assert found is None or found.dtype == np.uint8


# npz ----------------------------------------------------------------------------------------------


def npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def stored_npz(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


X, Y = np.zeros((10, 4, 4), np.uint8), np.arange(10) % 2
NPZ = npz(x=X, y=Y)


@st.composite
def npy_headers(draw: st.DrawFn) -> bytes:
    """An .npy member whose header says what it likes."""
    text = draw(
        st.sampled_from(
            (
                "{'descr': '|u1', 'fortran_order': False, 'shape': (%s), }",
                "{'descr': '|O', 'fortran_order': False, 'shape': (%s), }",
                "{'descr': [('a', '<f8', (%s))], 'fortran_order': True, 'shape': (2,), }",
                "{'descr': '<f8', 'fortran_order': 1, 'shape': (%s)",
                "__import__('os').system('touch pwned') or (%s)",
                "{'descr': '|V%s', 'fortran_order': False, 'shape': (3,), }",
            )
        )
    )
    numbers = ("10, 4, 4", "0, 0", "-1, 5", "2**70,", "99999999999999999999", "10,", "True, 4", "")
    head = (text % draw(st.sampled_from(numbers))).encode()
    version = draw(st.sampled_from((b"\x01\0", b"\x02\0", b"\x03\0", b"\xff\xff")))
    size = struct.pack("<H" if version[0] == 1 else "<I", len(head))
    return b"\x93NUMPY" + version + size + head + draw(st.binary(max_size=200))


@fuzzed
@given(
    content=damaged(NPZ)
    | npy_headers().map(lambda x: stored_npz({"x.npy": x, "y.npy": npy(Y)}))
    | damaged(npy(X)).map(lambda x: stored_npz({"x.npy": x, "y.npy": npy(Y)}))
    | damaged(npy(Y)).map(lambda y: stored_npz({"x.npy": npy(X), "y.npy": y, "z": b"x"}))
    | st.tuples(
        st.sampled_from(((10, 4, 4), (10, 0, 4), (10, 4, 4, 3), (10, 3, 1, 1), (0, 4, 4), (10,))),
        st.sampled_from(("u1", "i8", "f8", "c16", "S3", "M8[s]")),
        st.sampled_from(((10,), (10, 1), (), (9,))),
        st.sampled_from(("i8", "u8", "f4", "b1", "i1")),
    ).map(lambda t: npz(x=np.zeros(t[0], t[1]), y=np.resize(Y, t[2]).astype(t[3])))
)
def test_npz(place: Path, content: bytes) -> None:
    (place / "a.npz").write_bytes(content)
    data = read_or_refuse(lambda: read_npz(place / "a.npz", 0))
    for classes in (None, 2):
        part = read_or_refuse(partial(read_npz_part, place / "a.npz", "train", classes))
        assert part is None or (part[0].dtype == np.uint8 and part[1].max() < part[2])
    images = read_or_refuse(lambda: read_npz_images(place / "a.npz"))
    assert images is None or (images.dtype == np.uint8 and images.ndim == 4)
    assert not Path("pwned").exists()
    if data is not None:
        is_plain(data)


# Images -------------------------------------------------------------------------------------------


def image_bytes(kind: str, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(buffer, kind)
    return buffer.getvalue()


IMAGES = [
    *(image_bytes(kind) for kind in ("PNG", "JPEG", "BMP", "GIF", "WEBP")),
    *(image_bytes("PNG", mode) for mode in ("L", "P", "LA", "1", "RGBA", "I;16")),
]
OTHER_FORMATS = [image_bytes(kind) for kind in ("TIFF", "EPS", "PPM", "ICO", "TGA", "PDF")]


@fuzzed
@given(
    content=st.sampled_from(IMAGES).flatmap(damaged) | st.sampled_from(OTHER_FORMATS),
    suffix=st.sampled_from((".png", ".jpg", ".gif")),
)
def test_folder_of_images(place: Path, content: bytes, suffix: str) -> None:
    root = place / "images"
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "a.png").write_bytes(IMAGES[0])
        (root / name / "b.png").write_bytes(IMAGES[0])
    for old in (root / "cat").glob("c.*"):
        old.unlink()
    (root / "cat" / f"c{suffix}").write_bytes(content)
    data = read_or_refuse(lambda: read_folder(root, 0))
    if data is not None:
        is_plain(data)
        assert content not in OTHER_FORMATS
    read_or_refuse(lambda: read_folder_part(root, "train", ("cat", "dog", "owl")))


def test_classes_of_a_federation_lead_nowhere_else(tmp_path: Path) -> None:
    for folder in ("own/cat", "own/dog", "secret"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.png").write_bytes(IMAGES[0])
    for name in ("../secret", "..", str(tmp_path / "secret"), ""):
        with pytest.raises(FedscError, match="cannot be the name of a folder"):
            read_folder_part(tmp_path / "own", "train", ("cat", "dog", name))


# Tiny-ImageNet ------------------------------------------------------------------------------------

LISTS = {
    "wnids.txt": b"n01\nn02\n",
    "words.txt": b"n01\tgoldfish, Carassius\nn02\tcat\n",
    "val/val_annotations.txt": b"val_0.JPEG\tn01\t0\t0\t62\t62\nval_1.JPEG\tn02\t0\t0\t62\t62\n",
}
NAMES = st.sampled_from(
    (b"n01", b"..", b"/etc", b"", b"n\0", b"../../other", b"n01/..", b"\xff", b"val_0.JPEG")
)


@st.composite
def listed(draw: st.DrawFn) -> tuple[str, bytes]:
    file = draw(st.sampled_from(sorted(LISTS)))
    if draw(st.booleans()):
        return file, draw(damaged(LISTS[file]))
    rows = draw(st.lists(st.lists(NAMES, min_size=1, max_size=3).map(b"\t".join), max_size=4))
    return file, b"\n".join(rows)


@fuzzed
@given(change=listed())
def test_tinyimagenet_tree(place: Path, change: tuple[str, bytes]) -> None:
    root = place / "tiny-imagenet-200"
    photo = Image.new("RGB", (64, 64))
    for wnid in ("n01", "n02"):
        (root / "train" / wnid / "images").mkdir(parents=True, exist_ok=True)
        photo.save(root / "train" / wnid / "images" / f"{wnid}_0.JPEG", "JPEG")
    (root / "val" / "images").mkdir(parents=True, exist_ok=True)
    for number in range(2):
        photo.save(root / "val" / "images" / f"val_{number}.JPEG", "JPEG")
    for file, content in LISTS.items():
        (root / file).write_bytes(content)
    (root / change[0]).write_bytes(change[1])

    def read() -> tinyimagenet.Arrays:
        tree = tinyimagenet.list_tree(root)
        assert all(path.is_relative_to(root) and ".." not in path.parts for path in tree.paths)
        return tinyimagenet.read_images(root, tree)

    with nothing_outside(place):
        read_or_refuse(read)


@fuzzed
@given(
    content=st.sampled_from((IMAGES[0], IMAGES[1])).flatmap(damaged), kept=damaged(npy(X)) | NAMES
)
def test_tinyimagenet_images_and_what_is_kept_of_them(
    place: Path, content: bytes, kept: bytes
) -> None:
    shutil.rmtree(place / "tiny2", ignore_errors=True)
    root = place / "tiny2" / "tiny-imagenet-200"
    root.mkdir(parents=True, exist_ok=True)
    (root / "a.JPEG").write_bytes(content)
    tree = tinyimagenet.Tree(("a",), [root / "a.JPEG"] * 2, np.zeros(2, np.int64), 1)
    cache = root.with_name("tiny-imagenet-200-decoded") / tinyimagenet._fingerprint(tree)
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "train_images.npy").write_bytes(kept)
    with nothing_outside(place):
        read_or_refuse(lambda: tinyimagenet.read_images(root, tree))


# Archives -----------------------------------------------------------------------------------------


@st.composite
def tars(draw: st.DrawFn) -> bytes:
    """A tar whose members have names, kinds and targets of their own choice."""
    names = st.sampled_from(
        ("a", "a/b", "../evil", "/tmp/evil-of-fedsc", "a/../../evil", "link", "link/evil", ".", "")
    )
    kinds = (
        *(tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE),
        *(tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.CONTTYPE),
    )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=draw(st.sampled_from((0, 1, 2)))) as tar:
        for _ in range(draw(st.integers(1, 5))):
            info = tarfile.TarInfo(draw(names))
            info.type = draw(st.sampled_from(kinds))
            info.mode = draw(st.sampled_from((0o644, 0o777, 0o4777, 0)))
            info.linkname = draw(
                st.sampled_from(("..", "../other/mine.txt", "/etc/passwd", "a", "../" * 30))
            )
            content = draw(st.binary(max_size=10)) if info.isreg() else b""
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@st.composite
def zips(draw: st.DrawFn) -> bytes:
    names = st.sampled_from(
        ("a", "a/b", "../evil", "/tmp/evil-of-fedsc", "a/../../evil", "..\\evil", "C:\\evil", "a/")
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for _ in range(draw(st.integers(1, 5))):
            info = zipfile.ZipInfo(draw(names))
            info.external_attr = draw(st.sampled_from((0o120777 << 16, 0o100644 << 16, 0)))
            archive.writestr(info, draw(st.sampled_from((b"../other", b"/etc/passwd", b"x"))))
    return buffer.getvalue()


TAR, ZIP = tar_gz({"thing/a.bin": b"abc"}), stored_npz({"thing/a.bin": b"abc"})


@fuzzed
@given(
    content=tars()
    | zips()
    | damaged(TAR)
    | damaged(ZIP)
    | damaged(gzip.decompress(TAR)).map(gzip.compress)
)
def test_archives(place: Path, content: bytes) -> None:
    into = place / "into"
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    (place / "archive").write_bytes(content)
    with nothing_outside(place):
        read_or_refuse(lambda: unpack(place / "archive", into))
    assert sorted(os.listdir(place.parent)) == ["other", "place"]
    assert not Path("/tmp/evil-of-fedsc").exists()
    assert not any(path.is_symlink() or path.is_fifo() for path in into.rglob("*"))
