"""Attacks by hand: code in files, links that lead elsewhere, headers that announce gigabytes."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedsc.analysis.reopen import rebuild
from fedsc.data import tinyimagenet
from fedsc.data.cifar_pickle import read_python
from fedsc.data.fetch import unpack
from fedsc.data.folder import read_folder
from fedsc.data.npz import read_npz
from fedsc.errors import FedscError
from fedsc.experiments.cells import locked
from fedsc.experiments.compare import read_job
from fedsc.experiments.folder import is_run
from fedsc.experiments.reproduce import read_asked
from fedsc.files import LARGEST_TEXT, read_json, write_atomically
from fedsc.report.runs import read_run
from tests.data.test_cifar import python2_pickle, some_images
from tests.report.made_runs import write_run

from .inputs import with_little_memory
from .test_checkpoints import forged
from .test_data import npy, stored_npz

# Code ---------------------------------------------------------------------------------------------


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "function", [os.system, eval, exec, print, __import__, getattr, np.load, np.fromfile, open]
)
def test_no_pickle_is_run(tmp_path: Path, function: Any, protocol: int) -> None:
    for value in (Calls(function, "x"), {"data": Calls(function, "x"), "labels": [0]}):
        (tmp_path / "batch").write_bytes(pickle.dumps(value, protocol))
        with pytest.raises(FedscError, match=r"nothing was run|no dict"):
            read_python(tmp_path / "batch")


VALID = python2_pickle(b"\x03", some_images(1))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        # Filling what a pickle only names would change this program for the rest of its life.
        (b"c_codecs\nencode\n}S'__doc__'\nS'x'\nsb.", "no array"),
        (b"cnumpy\nndarray\nN}S'values'\nS'x'\nsb.", "no array"),
        (b"(icollections\nOrderedDict\n.", "INST"),
        (b"(cnumpy\nndarray\no.", "OBJ"),
        (b"cnumpy\nndarray\n)\x81.", "NEWOBJ"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "os.system"),
        (b"\x82\x01.", "EXT1"),
        (b"Pid\n.", "PERSID"),
        (b"\x97.", "NEXT_BUFFER"),
        (b"(lp0\nh\x07.", "CIFAR"),
        (VALID.replace(b"cnumpy\ndtype\n", b"cnumpy\nndarray\n"), "calls numpy.ndarray"),
        (VALID[:-1], "CIFAR"),
    ],
)
def test_other_ways_to_call_something(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(FedscError, match=said):
        read_python(tmp_path / "batch")


def test_npz_with_python_objects(tmp_path: Path) -> None:
    objects = np.array([Calls(os.system, f"touch {tmp_path}/pwned")], dtype=object)
    np.savez(tmp_path / "a.npz", x=objects, y=np.zeros(1, int))
    with pytest.raises(FedscError, match="Python objects"):
        read_npz(tmp_path / "a.npz", 0)
    assert not (tmp_path / "pwned").exists()


def test_an_image_that_would_start_ghostscript(tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "EPS")
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(2):
            (tmp_path / name / f"{number}.png").write_bytes(picture.getvalue())
    with pytest.raises(FedscError, match="cannot read"):
        read_folder(tmp_path, 0)


def test_a_folder_of_runs_cannot_have_its_code_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "evil.py"
    code.write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\n")
    name = f"{code}:Evil"
    job = {"methods": [name], "seeds": [0], "settings": {}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    sweep = {"name": "sweep", "scale": "", "columns": [], "methods": [name], "seeds": [0]}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    spec = {**json.loads(json.dumps(vars_of_run())), "model": name}
    run = write_run(tmp_path / "run", "fedsc", 0, [0.5], **spec)
    with pytest.raises(FedscError, match="asks to run the code in"):
        read_job(tmp_path, {})
    with pytest.raises(FedscError, match="asks to run the code in"):
        read_asked(tmp_path / "sweep.json")
    with pytest.raises(FedscError, match="asks to run the code in"):
        rebuild(read_run(run))
    assert not (tmp_path / "pwned").exists()
    assert read_job(tmp_path, {"methods": [name]}).methods == [name]  # named by the user
    monkeypatch.setenv("FEDSC_RUN_CODE", "1")
    assert read_job(tmp_path, {}).methods == [name]


def vars_of_run() -> dict[str, Any]:
    import dataclasses

    from fedsc.spec import RunSpec

    facts = dataclasses.asdict(RunSpec(clients=4))
    return {k: v for k, v in facts.items() if k not in ("method", "seed", "rounds")} | {
        "data_checksum": "x"
    }


# Links --------------------------------------------------------------------------------------------


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.json.part").symlink_to(mine)
    (folder / "a.json").symlink_to(mine)
    write_atomically(folder / "a.json", b"new")
    assert mine.read_text() == "mine"
    assert (folder / "a.json").read_text() == "new"
    assert not (folder / "a.json").is_symlink()

    (tmp_path / "elsewhere").mkdir()
    (folder / ".locks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FedscError, match="is a link"), locked(folder, "x"):
        pass
    (folder / ".locks").unlink()
    (folder / ".locks").mkdir()
    (folder / ".locks" / "x.lock").symlink_to(tmp_path / "elsewhere" / "new")
    with pytest.raises(FedscError, match="cannot write"), locked(folder, "x"):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_linked_folder_of_clients_is_no_run_of_ours(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.safetensors").write_text("mine")
    run = write_run(tmp_path / "run", "fedsc", 0, [0.5])
    assert is_run(run)
    (run / "clients").symlink_to(tmp_path / "mine")
    assert not is_run(run)  # so `--overwrite` does not remove what the link leads to


def test_kept_images_are_not_written_through_a_link(tmp_path: Path) -> None:
    root = tmp_path / "tiny-imagenet-200"
    root.mkdir()
    Image.new("RGB", (64, 64)).save(root / "a.JPEG")
    (tmp_path / "mine" / "0123456789abcdef").mkdir(parents=True)
    (tmp_path / "tiny-imagenet-200-decoded").symlink_to(tmp_path / "mine")
    tree = tinyimagenet.Tree(("a",), [root / "a.JPEG"] * 2, np.zeros(2, np.int64), 1)
    assert tinyimagenet.read_images(root, tree).train_images.shape == (1, 3, 64, 64)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["0123456789abcdef"]


def test_links_in_archives(tmp_path: Path) -> None:
    """A link to outside, then a file through it: refused before anything is written."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "into").mkdir()
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        with tarfile.open(tmp_path / "a.tgz", "w:gz") as tar:
            link = tarfile.TarInfo("link")
            link.type, link.linkname = kind, "../mine"
            tar.addfile(link)
            through = tarfile.TarInfo("link/evil")
            tar.addfile(through, io.BytesIO())
        with pytest.raises(FedscError, match="link or a device"):
            unpack(tmp_path / "a.tgz", tmp_path / "into")
    assert list((tmp_path / "mine").iterdir()) == list((tmp_path / "into").iterdir()) == []


def test_a_tar_that_leads_back_to_its_beginning(tmp_path: Path) -> None:
    """A size of -512 - 512: the next member is the first one again (CVE-2025-8194)."""
    header = bytearray(tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = (2**96 - 1024).to_bytes(12, "big")  # in base 256, below zero
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "a.tgz").write_bytes(gzip.compress(bytes(header) + bytes(1024)))
    with pytest.raises(FedscError, match="leads back"):
        unpack(tmp_path / "a.tgz", tmp_path)


def test_what_never_ends_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "spec.json").symlink_to("/dev/zero")
    with pytest.raises(FedscError, match="no plain file"):
        read_json(tmp_path / "spec.json")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(FedscError, match="no plain file"):
        read_json(tmp_path / "pipe.json")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(LARGEST_TEXT + 1)
    with pytest.raises(FedscError, match="allowed: at most"):
        read_json(tmp_path / "large.json")
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "dog").mkdir()
    for name in ("cat", "dog"):
        for number in range(2):
            os.mkfifo(tmp_path / "images" / name / f"{number}.png")
    with pytest.raises(FedscError, match="is no file"):
        read_folder(tmp_path / "images", 0)


# Memory -------------------------------------------------------------------------------------------


def png(width: int, height: int, rows: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    head = struct.pack(">2I5B", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def gzipped_zeros(size: int, head: bytes = b"") -> bytes:
    """A gzip file of `head` and `size` zeros, without its end."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    begin = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return begin + block * (size >> 20)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_small_files_do_not_fill_the_memory(tmp_path: Path) -> None:
    """Each is read in a process that may take 512 MiB, where they announce gigabytes."""
    big = 2 << 30
    header = b"\0\0\x08\x01" + struct.pack(">I", big)
    (tmp_path / "bomb-ubyte.gz").write_bytes(gzipped_zeros(big, header))

    shape = "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000, 100, 100), }\n"
    lying = b"\x93NUMPY\x01\0" + struct.pack("<H", len(shape)) + shape.encode() + bytes(100)
    labels = npy(np.arange(10) % 2)
    (tmp_path / "lying.npz").write_bytes(stored_npz({"x.npy": lying, "y.npy": labels}))
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", bytes(1 << 20))
        archive.writestr("y.npy", labels)
        archive.infolist()[0].file_size = big  # as the directory says

    # A list in a list in a list, each a hundred times: a few bytes, and more than any memory.
    nested = b"](K\x00e"
    for depth in range(9):
        nested = b"](" + nested + b"q" + bytes([depth]) + (b"h" + bytes([depth])) * 99 + b"e"
    (tmp_path / "laughs").write_bytes(
        VALID.replace(b"U\x06labels](K\x03eu.", b"U\x06labels" + nested + b"u.")
    )
    (tmp_path / "memo").write_bytes(b"\x80\x02]r\xff\xff\xff\x7f.")
    (tmp_path / "length").write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.")
    (tmp_path / "deep").write_bytes(b"\x80\x02}N" + b"\x85" * 1_000_000 + b"K\x01s.")

    images = tmp_path / "images"
    rows = zlib.compress(bytes(4096 * 4097), 9)
    for name in ("cat", "dog"):
        (images / name).mkdir(parents=True)
        for number in range(100):
            (images / name / f"{number}.png").write_bytes(png(4096, 4096, rows))
    for name in ("cat", "dog"):
        (tmp_path / "huge" / name).mkdir(parents=True)
        for number in range(2):
            content = png(60000, 60000, b"")
            (tmp_path / "huge" / name / f"{number}.png").write_bytes(content)

    header_of_tar = tarfile.TarInfo("x")
    header_of_tar.type, header_of_tar.size = tarfile.XHDTYPE, big
    (tmp_path / "pax.tgz").write_bytes(gzipped_zeros(big, header_of_tar.tobuf()))
    (tmp_path / "deep.json").write_text("[" * 1_000_000)

    # Checkpoints: a header of 8 EiB, a tensor of 4 TiB, a file of 8 GiB that takes no room.
    tensor = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    facts = {"round": 1, "accuracy": 0.5, "memories": {}, "records": {}}
    (tmp_path / "header.safetensors").write_bytes(struct.pack("<Q", 2**63 - 1) + bytes(100))
    (tmp_path / "tensor.safetensors").write_bytes(forged({"w": tensor}, facts, bytes(100)))
    with (tmp_path / "sparse.safetensors").open("wb") as sparse:
        sparse.truncate(8 << 30)
    (tmp_path / "array.npy").write_bytes(lying)
    (tmp_path / "array.npz").write_bytes((tmp_path / "bomb.npz").read_bytes())

    said = with_little_memory(
        f"""
root = Path({str(tmp_path)!r})
said(idx.read_idx, root / "bomb-ubyte.gz")
said(npz.read_npz, root / "lying.npz", 0)
said(npz.read_npz, root / "bomb.npz", 0)
for name in ("laughs", "memo", "length", "deep"):
    said(cifar_pickle.read_python, root / name)
said(folder.read_folder, root / "images", 0)
said(folder.read_folder, root / "huge", 0)
said(fetch.unpack, root / "pax.tgz", root)
said(read_json, root / "deep.json")
for name in ("header", "tensor", "sparse"):
    said(checkpoint.unseal, root / (name + ".safetensors"))
from flwr.app import Array, ArrayRecord
from fedsc.flower.records import flat_state
for name in ("array.npy", "array.npz"):
    array = Array("uint8", (1000000, 100, 100), "numpy.ndarray", (root / name).read_bytes())
    said(flat_state, ArrayRecord(dict(w=array)))
"""
    ).splitlines()
    reasons = [
        *("allowed: at most 268435456", "it has 183 bytes", "would become 2.0 GiB"),
        *("no list of whole numbers", "holds no dict", "CIFAR file", "under no text"),
        *("would become 3.1 GiB", "allowed: 1 to 4096 a side|decompression bomb"),
        *("a part of 2,147,483,648 bytes", "recursion"),
        *("announces 9,223,372,036,854,775,807 bytes", "damaged", "more than fits in memory"),
        *("it has 183 bytes", "cannot be read"),
    ]
    assert len(said) == len(reasons)
    for line, reason in zip(said, reasons, strict=True):
        assert line.startswith("refused: "), line
        assert any(words in line for words in reason.split("|")), line
