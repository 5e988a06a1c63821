"""Tiny-ImageNet's tree: read right, kept decoded, and decoded again when it changes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsc.data import tinyimagenet
from fedsc.data.sources import load_dataset
from fedsc.errors import FedscError


def save(path: Path, value: int, mode: str = "RGB", side: int = 64) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (side, side), value if mode == "L" else (value,) * 3).save(path, "JPEG")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes of three train images, of which one is grey, and four validation images."""
    root = tmp_path / "tiny-imagenet-200"
    for wnid, base in (("n02", 10), ("n01", 100)):
        for i in range(3):
            path = root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG"
            save(path, base + i, "L" if i == 1 else "RGB")
    notes = ""
    for i, wnid in enumerate(("n01", "n02", "n02", "n01")):
        save(root / "val" / "images" / f"val_{i}.JPEG", 200 + i)
        notes += f"val_{i}.JPEG\t{wnid}\t0\t0\t63\t63\n"
    (root / "val" / "val_annotations.txt").write_text(notes)
    (root / "wnids.txt").write_text("n02\nn01\n")
    (root / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\tshark\nn03\tother\n")
    return root


def read(root: Path, seen: list[tuple[str, int, int | None]] | None = None) -> tinyimagenet.Arrays:
    def note(what: str, done: int, total: int | None) -> None:
        if seen is not None:
            seen.append((what, done, total))

    return tinyimagenet.read_images(root, tinyimagenet.list_tree(root), note)


def test_tree_is_read(root: Path) -> None:
    tree = tinyimagenet.list_tree(root)
    arrays = read(root)
    assert tree.classes == ("goldfish", "shark")
    assert arrays.train_images.shape == (6, 3, 64, 64)
    assert arrays.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert arrays.train_images[:, :, 0, 0].tolist() == [
        [v] * 3 for v in (100, 101, 102, 10, 11, 12)
    ]
    assert arrays.test_labels.tolist() == [0, 1, 1, 0]
    assert arrays.test_images[:, 0, 5, 5].tolist() == [200, 201, 202, 203]


def test_second_load_decodes_nothing_and_is_the_same(root: Path) -> None:
    first: list[tuple[str, int, int | None]] = []
    second: list[tuple[str, int, int | None]] = []
    a = read(root, first)
    b = read(root, second)
    assert first == [("decoding images", 10, 10)]
    assert second == []
    for name in a._fields:
        assert np.array_equal(getattr(a, name), getattr(b, name))
    assert len(list((root.parent / "tiny-imagenet-200-decoded").iterdir())) == 1


def test_an_altered_tree_is_decoded_again(root: Path) -> None:
    read(root)
    save(root / "train" / "n01" / "images" / "n01_0.JPEG", 77)
    assert read(root).train_images[0, 0, 0, 0] == 77
    (root / "train" / "n01" / "images" / "n01_2.JPEG").unlink()
    assert len(read(root).train_images) == 5
    assert len(list((root.parent / "tiny-imagenet-200-decoded").iterdir())) == 1  # only the last


def test_a_damaged_copy_is_made_again(root: Path) -> None:
    read(root)
    [kept] = (root.parent / "tiny-imagenet-200-decoded").iterdir()
    os.truncate(kept / "train_images.npy", 1000)
    seen: list[tuple[str, int, int | None]] = []
    assert read(root, seen).train_images.shape == (6, 3, 64, 64)
    assert seen
    assert (kept / "train_images.npy").stat().st_size > 1000


def test_a_place_that_cannot_be_written_to_is_no_obstacle(root: Path) -> None:
    (root.parent / "tiny-imagenet-200-decoded").write_text("in the way")
    assert read(root).train_images.shape == (6, 3, 64, 64)


def test_damaged_trees(root: Path) -> None:
    with pytest.raises(FedscError, match=r"6 train and 4 validation images, .* 100000 and 10000"):
        load_dataset("tinyimagenet", root.parent)
    odd = root / "train" / "n01" / "images" / "n01_0.JPEG"
    whole = odd.read_bytes()
    odd.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FedscError, match=r"n01_0\.JPEG"):
        read(root)
    save(odd, 1, side=32)
    with pytest.raises(FedscError, match=r"n01_0\.JPEG is 32x32 pixels, expected 64x64"):
        read(root)
    (root / "val" / "images" / "val_1.JPEG").unlink()
    with pytest.raises(FedscError, match=r"val_1\.JPEG is missing"):
        read(root)
    (root / "val" / "val_annotations.txt").write_text("../../x.JPEG\tn01\t0\t0\t63\t63\n")
    with pytest.raises(FedscError, match="does not give an image"):
        tinyimagenet.list_tree(root)
    (root / "val" / "val_annotations.txt").write_text("no tabs\n")
    with pytest.raises(FedscError, match="not the official Tiny-ImageNet tree"):
        tinyimagenet.list_tree(root)
    (root / "words.txt").unlink()
    with pytest.raises(FedscError, match=r"words\.txt"):
        tinyimagenet.list_tree(root)
