"""One's own data: folders of images and .npz files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedsc.data.holdout import stratified_holdout
from fedsc.data.own import read_part
from fedsc.data.sources import load_dataset
from fedsc.errors import FedscError


def save(path: Path, value: int, *, size: tuple[int, int] = (6, 4), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "I;16") else (value, 0, 255)).save(path)


def class_folders(root: Path, per_class: int = 10) -> None:
    for number, name in enumerate(("cat", "dog")):
        for i in range(per_class):
            save(root / name / f"{i}.png", 100 * number + i)


# --- folder:PATH


def test_folder_without_a_test_set_is_split_by_the_seed(tmp_path: Path) -> None:
    class_folders(tmp_path)
    data = load_dataset(f"folder:{tmp_path}")
    assert data.classes == ("cat", "dog")
    assert data.image_shape == (1, 4, 6)
    assert data.train_labels.bincount().tolist() == [8, 8]
    assert data.test_labels.bincount().tolist() == [2, 2]
    values = torch.cat([data.train_images, data.test_images])[:, 0, 0, 0].sort().values
    assert values.tolist() == [*range(10), *range(100, 110)]  # each image once
    assert data.checksum() == load_dataset(f"folder:{tmp_path}").checksum()
    assert data.checksum() != load_dataset(f"folder:{tmp_path}", seed=1).checksum()


def test_folder_with_train_and_test(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", 3)
    save(tmp_path / "test" / "dog" / "x.JPG", 50)
    save(tmp_path / "test" / "cat" / "x.bmp", 60)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    data = load_dataset(f"folder:{tmp_path}")
    assert data.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test_labels.tolist() == [0, 1]
    assert set(data.test_images[0].flatten().tolist()) == {60}


def test_one_colour_image_makes_all_of_them_colour(tmp_path: Path) -> None:
    class_folders(tmp_path, 2)
    save(tmp_path / "dog" / "z.png", 9, mode="RGB")
    data = load_dataset(f"folder:{tmp_path}")
    assert data.image_shape == (3, 4, 6)


def test_folder_with_an_odd_size_names_both(tmp_path: Path) -> None:
    class_folders(tmp_path)
    save(tmp_path / "dog" / "odd.png", 1, size=(7, 4))
    with pytest.raises(FedscError, match=r"dog/odd\.png is 7x4 pixels, .*cat/0\.png is 6x4"):
        load_dataset(f"folder:{tmp_path}")


def test_folder_with_a_broken_image(tmp_path: Path) -> None:
    class_folders(tmp_path)
    (tmp_path / "dog" / "a.png").write_bytes(b"nothing of the kind")
    with pytest.raises(FedscError, match=r"dog/a\.png as an image"):
        load_dataset(f"folder:{tmp_path}")
    whole = (tmp_path / "dog" / "0.png").read_bytes()
    (tmp_path / "dog" / "a.png").write_bytes(whole[:45])
    with pytest.raises(FedscError, match=r"dog/a\.png is truncated or altered"):
        load_dataset(f"folder:{tmp_path}")


def test_folder_with_16_bit_pixels(tmp_path: Path) -> None:
    class_folders(tmp_path)
    save(tmp_path / "dog" / "deep.png", 40_000, mode="I;16")
    with pytest.raises(FedscError, match=r"deep\.png has pixels of mode I;16"):
        load_dataset(f"folder:{tmp_path}")


def test_folders_that_are_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(FedscError, match="does not exist"):
        load_dataset(f"folder:{tmp_path}/absent")
    (tmp_path / "file").touch()
    with pytest.raises(FedscError, match="is a file"):
        load_dataset(f"folder:{tmp_path}/file")
    save(tmp_path / "a" / "only" / "0.png", 1)
    with pytest.raises(FedscError, match="1 class folder"):
        load_dataset(f"folder:{tmp_path}/a")
    (tmp_path / "a" / "empty").mkdir()
    with pytest.raises(FedscError, match=r"empty holds no image \(allowed: \.png"):
        load_dataset(f"folder:{tmp_path}/a")
    save(tmp_path / "a" / "empty" / "0.png", 1)
    with pytest.raises(FedscError, match=r"class 'empty' has 1 image"):
        load_dataset(f"folder:{tmp_path}/a")
    class_folders(tmp_path / "b" / "train")
    class_folders(tmp_path / "b" / "test")
    save(tmp_path / "b" / "test" / "fox" / "0.png", 1)
    with pytest.raises(FedscError, match=r"test has class 'fox', .*allowed: cat, dog"):
        load_dataset(f"folder:{tmp_path}/b")


def test_holdout_takes_a_fifth_of_every_class() -> None:
    labels = np.repeat([0, 1, 2], [50, 7, 2])
    train, test = stratified_holdout(labels, ["a", "b", "c"], 0, "x")
    assert sorted([*train, *test]) == list(range(59))
    assert np.bincount(labels[test]).tolist() == [10, 1, 1]


# --- npz:PATH


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("shape", [(20, 5, 6), (20, 5, 6, 1), (20, 1, 5, 6)])
def test_npz_shapes_of_grey_images(tmp_path: Path, shape: tuple[int, ...]) -> None:
    x = images(20, 5, 6)
    np.savez(tmp_path / "a.npz", x=x.reshape(shape), y=np.arange(20) % 2)
    data = load_dataset(f"npz:{tmp_path}/a.npz")
    assert data.image_shape == (1, 5, 6)
    assert (len(data.train_labels), len(data.test_labels)) == (16, 4)
    whole = {image.tobytes() for image in x}
    assert {image.numpy().tobytes() for image in data.train_images} <= whole
    assert data.checksum() != load_dataset(f"npz:{tmp_path}/a.npz", seed=3).checksum()


def test_npz_colour_last_or_first_is_the_same(tmp_path: Path) -> None:
    x, y = images(8, 5, 6, 3), np.arange(8, dtype=np.uint8) % 4
    np.savez(tmp_path / "last.npz", x_train=x, y_train=y, x_test=x[:3], y_test=y[:3])
    first = x.transpose(0, 3, 1, 2)
    np.savez_compressed(
        tmp_path / "first.npz", x_train=first, y_train=y, x_test=first[:3], y_test=y[:3]
    )
    a, b = (load_dataset(f"npz:{tmp_path}/{name}.npz") for name in ("last", "first"))
    assert a.image_shape == (3, 5, 6)
    assert a.checksum() == b.checksum()
    assert a.classes == ("0", "1", "2", "3")


def test_npz_with_python_objects_is_not_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{}, []], dtype=object), y=np.arange(2))
    with pytest.raises(FedscError, match=r"a\.npz: cannot read array 'x': it holds Python objects"):
        load_dataset(f"npz:{tmp_path}/a.npz")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": images(4, 5, 5)}, "holds the arrays x; it must hold"),
        ({"x": images(4, 5, 5) / 255, "y": [0, 0, 1, 1]}, "x is float64; images must be uint8"),
        ({"x": images(4, 5, 5, 5), "y": [0, 0, 1, 1]}, r"shape \(4, 5, 5, 5\) \(allowed"),
        ({"x": images(4, 5, 5), "y": [0, 0, 1]}, r"integers of shape \(4,\)"),
        ({"x": images(4, 5, 5), "y": [0.0, 0, 1, 1]}, "y is float64"),
        ({"x": images(4, 5, 5), "y": [1, 1, 2, 2]}, "2 different label.* from 1 to 2"),
        ({"x": images(4, 5, 5), "y": [0, 0, 0, 0]}, "1 different label"),
        ({"x": images(4, 5, 5), "y": [0, 0, 0, 1]}, "class '1' has 1 image"),
        ({"x": images(0, 5, 5), "y": np.zeros(0, int)}, "0 different label"),
    ],
)
def test_npz_with_wrong_arrays(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(FedscError, match=message):
        load_dataset(f"npz:{tmp_path}/a.npz")


def test_npz_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FedscError, match="cannot read"):
        load_dataset(f"npz:{tmp_path}/absent.npz")
    np.save(tmp_path / "lone.npy", images(3))
    with pytest.raises(FedscError, match=r"not an \.npz file"):
        load_dataset(f"npz:{tmp_path}/lone.npy")
    np.savez(tmp_path / "a.npz", x=images(40, 5, 5), y=np.arange(40) % 2)
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[300] ^= 255
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(FedscError, match="cannot read array 'x'"):
        load_dataset(f"npz:{tmp_path}/a.npz")


# --- a machine's own images


def test_a_machine_may_lack_classes_but_not_have_others(tmp_path: Path) -> None:
    """Labels are the federation's: a folder with dogs alone has label 1, not 0."""
    save(tmp_path / "dog" / "0.png", 7)
    images, labels, classes = read_part(f"folder:{tmp_path}", "train", ("cat", "dog", "owl"))
    assert images.shape == (1, 1, 4, 6)
    assert labels.tolist() == [1]
    assert classes == ("cat", "dog", "owl")
    with pytest.raises(FedscError, match=r"has class 'dog'.*\(allowed: cat, owl\)"):
        read_part(f"folder:{tmp_path}", "train", ("cat", "owl"))
    with pytest.raises(FedscError, match="no folder of any class"):
        read_part(f"folder:{tmp_path / 'dog'}", "train", ("cat", "owl"))


def test_a_machine_takes_the_part_it_is_asked_for_or_everything(tmp_path: Path) -> None:
    class_folders(tmp_path / "split" / "train", 3)
    class_folders(tmp_path / "split" / "test", 2)
    class_folders(tmp_path / "whole", 4)
    x, y = np.zeros((6, 5, 5), np.uint8), np.arange(6) % 3
    np.savez(tmp_path / "split.npz", x_train=x, y_train=y, x_test=x[:3], y_test=y[:3])
    np.savez(tmp_path / "whole.npz", x=x, y=y)
    for text, part, number in (
        ("folder:{}/split", "train", 6),
        ("folder:{}/split", "test", 4),
        ("folder:{}/whole", "test", 8),
        ("npz:{}/split.npz", "train", 6),
        ("npz:{}/split.npz", "test", 3),
        ("npz:{}/whole.npz", "train", 6),
    ):
        images, labels, _ = read_part(text.format(tmp_path), part, None)  # type: ignore[arg-type]
        assert len(images) == len(labels) == number
    with pytest.raises(FedscError, match="is not folder:PATH or npz:PATH"):
        read_part(str(tmp_path), "train", None)
