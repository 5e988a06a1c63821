"""Crop, flip and normalise against a slow version of one sample at a time."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsc.data.plan import CROP_PADDING
from fedsc.data.transform import crop_and_flip, normalise


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 2**31),
)
def test_crop_and_flip_against_padding_and_slicing(
    size: int, channels: int, height: int, width: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (size, channels, height, width), dtype=np.uint8)
    shift = rng.integers(0, 2 * CROP_PADDING + 1, (size, 2))
    flip = rng.integers(0, 2, size).astype(bool)
    expected = []
    for image, (row, column), flipped in zip(images, shift, flip, strict=True):
        padded = np.pad(image, ((0, 0), (CROP_PADDING,) * 2, (CROP_PADDING,) * 2))
        crop = padded[:, row : row + height, column : column + width]
        expected.append(crop[:, :, ::-1] if flipped else crop)
    found = crop_and_flip(torch.from_numpy(images), torch.from_numpy(shift), torch.from_numpy(flip))
    assert found.dtype == torch.uint8
    assert np.array_equal(found.numpy(), np.stack(expected))


def test_the_middle_crop_is_the_image() -> None:
    images = torch.arange(2 * 3 * 5 * 4, dtype=torch.uint8).view(2, 3, 5, 4)
    middle = torch.full((2, 2), CROP_PADDING)
    no = torch.zeros(2, dtype=torch.bool)
    assert torch.equal(crop_and_flip(images, middle, no), images)
    assert torch.equal(crop_and_flip(images, middle, ~no), images.flip(3))


def test_normalise_by_hand() -> None:
    images = torch.tensor([0, 51, 255, 102], dtype=torch.uint8).view(1, 2, 1, 2)
    mean = torch.tensor([0.2, 0.5]).view(2, 1, 1)
    std = torch.tensor([0.1, 0.25]).view(2, 1, 1)
    found = normalise(images, mean, std)
    assert found.dtype == torch.float32
    expected = torch.tensor([-2.0, 0.0, 2.0, -0.4]).view(1, 2, 1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
