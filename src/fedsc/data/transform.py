"""From stored uint8 images to what a network sees, on whichever device they are."""

from __future__ import annotations

import torch
from torch import Tensor

from .plan import CROP_PADDING


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 (B, c, h, w) to float32, scaled to [0, 1] and standardised by channel (c, 1, 1)."""
    return (images.float() / 255 - mean) / std


def crop_and_flip(images: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
    """Random crop of the image padded with black, and horizontal flip, for each sample its own.

    images (B, c, h, w) uint8, shift (B, 2) from 0 to 2 * CROP_PADDING, flip (B,) bool.
    """
    _, channels, height, width = images.shape
    device = images.device
    column = torch.arange(width, device=device)
    column = torch.where(flip[:, None], width - 1 - column, column)  # (B, w)
    rows = torch.arange(height, device=device) + shift[:, :1] - CROP_PADDING  # (B, h)
    columns = column + shift[:, 1:] - CROP_PADDING
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[
        :, None, :
    ]
    source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    picked = images.flatten(2).gather(2, source.flatten(1)[:, None, :].expand(-1, channels, -1))
    return picked.view_as(images) * inside[:, None]
