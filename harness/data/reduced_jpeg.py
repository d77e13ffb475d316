"""JPEGs decoded at 1/2, 1/4 or 1/8 of their size, where a transform scales them down by at least as much.

libjpeg then computes fewer pixels per block of 8 x 8, which takes a fraction of the time. Pillow offers it
(https://pillow.readthedocs.io/en/stable/reference/Image.html#PIL.Image.Image.draft), torchvision does not.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from PIL.JpegImagePlugin import JpegImageFile

FILTERS = ("bilinear", "bicubic", "lanczos")
_ORIENTATION = 0x0112  # the EXIF tag; what it does to an image to be shown:
_SWAPS, _MIRRORS_X, _MIRRORS_Y = (5, 6, 7, 8), (2, 3, 6, 7), (3, 4, 7, 8)
_FACTORS = (8, 4, 2)  # of libjpeg's reduced sizes that Pillow offers
_NO_JPEG = (OSError, SyntaxError, ValueError, IndexError, TypeError, struct.error)  # raised by Pillow's parser


@dataclass(frozen=True)
class Region:
    """A part of an image, in its pixels, that is scaled to ``size`` (height, width) with antialiasing."""

    top: int
    left: int
    height: int
    width: int
    size: tuple[int, int]
    filter: str = "bilinear"

    @property
    def factor(self) -> int:
        """The largest factor by which the image can be reduced, so that the result needs no upsampling."""
        ratio = min(self.height / self.size[0], self.width / self.size[1])
        return next((factor for factor in _FACTORS if ratio >= factor), 1)


def open_jpeg(content: torch.Tensor) -> JpegImageFile | None:
    """Return the file of these bytes with its header read; None if it is no JPEG, or if it has CMYK colors, which
    libraries convert to RGB in different ways."""
    from PIL.JpegImagePlugin import JpegImageFile

    try:
        file = JpegImageFile(io.BytesIO(content.numpy().tobytes()))
        file.getexif()
    except _NO_JPEG:
        return None
    return file if file.mode in ("L", "RGB") else None


def upright_size(file: JpegImageFile) -> tuple[int, int]:
    """Return (height, width) of the image as it is shown."""
    swapped = file.getexif().get(_ORIENTATION) in _SWAPS
    return (file.width, file.height) if swapped else (file.height, file.width)


def decode_region(file: JpegImageFile, region: Region, channels: int) -> torch.Tensor | None:
    """Return ``region`` of the file, uint8 (channels, *region.size); None if it is damaged. ``region.factor`` is at
    least 2.

    The edges of the region keep their place: they may be between the pixels of the reduced image.
    """
    from PIL import Image, ImageOps

    factor, orientation = region.factor, file.getexif().get(_ORIENTATION, 1)
    height, width = upright_size(file)
    file.draft("L" if channels == 1 else None, (file.width // factor, file.height // factor))
    bottom, right = region.top + region.height, region.left + region.width
    try:
        upright = file if orientation == 1 else ImageOps.exif_transpose(file)
        # The last pixel of a row may have fewer than ``factor`` pixels of the image: mirrored, it is the first one.
        x = upright.width - width / factor if orientation in _MIRRORS_X else 0.0
        y = upright.height - height / factor if orientation in _MIRRORS_Y else 0.0
        box = (x + region.left / factor, y + region.top / factor, x + right / factor, y + bottom / factor)
        image = upright.resize(region.size[::-1], Image.Resampling[region.filter.upper()], box)
    except OSError:
        return None
    pixels = torch.from_numpy(np.array(image)).view(*region.size, -1).permute(2, 0, 1)
    return pixels.repeat(channels, 1, 1) if len(pixels) < channels else pixels
