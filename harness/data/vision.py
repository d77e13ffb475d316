"""The decoder of images: torchvision's, without the rest of torchvision, whose import takes longer, and Pillow's."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.config.places import IMAGE_STARTS
from harness.errors import REINSTALL_TORCH, HarnessError, first_line

_PNG, _IDAT = b"\x89PNG\r\n\x1a\n", b"IDAT"  # a PNG's first bytes, and the name of the chunks that have its pixels

_EMPTY = "the file is empty"
_WITH_PILLOW = ("TIFF", "BMP")  # which torchvision does not read

UNCHANGED, GRAY, RGB = 0, 1, 3  # torchvision's numbers for these modes; also the number of channels


def decode(content: Tensor, channels: int = UNCHANGED) -> Tensor:
    """Return uint8 (channels, height, width) of an image file's bytes, uint8 (bytes,), as torchvision's decode_image,
    turned upright as its EXIF orientation says (not that of WebP, which torchvision does not know). Raises RuntimeError
    that says what is wrong with the file."""
    kind = _kind(content[:12].numpy().tobytes())
    if kind in _WITH_PILLOW:
        return _decoded_by_pillow(content, channels, kind)
    _require_intact_png(content.numpy().data)
    try:
        image: Tensor = torch.ops.image.decode_image(content, channels, True)
    except RuntimeError as error:
        raise RuntimeError(_fault(content[:12].numpy().tobytes(), error)) from None
    return image


def decode_as(content: Tensor, channels: int) -> Tensor:
    """Return ``decode`` with exactly ``channels``, GRAY or RGB, which torchvision ignores for 16-bit PNG, WebP and GIF.
    Raises RuntimeError, for an animation, too."""
    image = decode(content, channels)
    if image.dim() != 3:
        raise RuntimeError(f"an animation of {len(image)} frames, not one image")
    if len(image) in (2, 4):  # the last channel is opacity
        image = image[:-1]
    to_gray = channels == GRAY and len(image) == RGB
    if image.dtype == torch.uint8 and not to_gray:
        return image
    functional = torchvision("transforms.v2.functional")
    image = functional.to_dtype(image, torch.uint8, scale=True)
    return functional.rgb_to_grayscale(image) if to_gray else image


def _kind(start: bytes) -> str:
    """Return the kind of a file that begins with ``start``; empty if it is none of IMAGE_STARTS."""
    return next((kind for kind, pattern in IMAGE_STARTS.items() if re.match(pattern, start, re.DOTALL)), "")


def _decoded_by_pillow(content: Tensor, channels: int, kind: str) -> Tensor:
    """Return uint8 (channels, height, width), GRAY or RGB; uint16 if the file is gray and has 16 bits. Raises
    RuntimeError."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content.numpy().data), formats=_WITH_PILLOW) as image:
            if (pages := getattr(image, "n_frames", 1)) > 1:
                raise RuntimeError(f"a {kind} of {pages} pages, not one image")
            if image.mode in ("I", "F"):
                raise RuntimeError(f"a {kind} of 32 bits per value: convert it to 8 or 16")
            upright = ImageOps.exif_transpose(image)
            if image.mode.startswith("I;16"):
                pixels = np.asarray(upright).astype(np.uint16)[:, :, None].repeat(max(channels, 1), 2)
            else:
                pixels = np.atleast_3d(np.array(upright.convert("L" if channels == GRAY else "RGB")))
    except (RuntimeError, MemoryError):
        raise
    except Exception as error:  # of many kinds, such as TypeError for a field with a value of another type
        told = first_line(error).partition(" <")[0]  # without the object in memory
        raise RuntimeError(f"the {kind} is damaged or incomplete (Pillow: {told})") from None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _fault(start: bytes, error: RuntimeError) -> str:
    """Return what is wrong with a file that begins with ``start``."""
    if not start:
        return _EMPTY
    if not (kind := _kind(start)):
        return f"the file is none of {', '.join(IMAGE_STARTS)}: it begins with {start!r}"
    return f"the {kind} is damaged or incomplete (torchvision: {_without_place(error)})"


def _without_place(error: RuntimeError) -> str:
    """Return the text of an error of torchvision without the line of its source."""
    return re.sub(r"^\S+, \S+:\d+, ", "", first_line(error))


def _require_intact_png(content: memoryview) -> None:
    """Raise RuntimeError for a PNG with damaged pixels, for which torchvision's decoder would kill the process: from
    the first chunk of pixels to the chunk after the last, the checksums must be right. That takes a hundredth of the
    time of decoding."""
    if content[:8] != _PNG:
        return
    start, pixels = len(_PNG), False
    while start < len(content):
        stop = start + 12 + int.from_bytes(content[start : start + 4], "big")  # length, name, data, checksum
        is_pixels = content[start + 4 : start + 8] == _IDAT
        pixels = pixels or is_pixels
        if pixels and zlib.crc32(content[start + 4 : stop - 4]) != int.from_bytes(content[stop - 4 : stop], "big"):
            raise RuntimeError("the PNG is damaged: a checksum is wrong")
        if pixels and not is_pixels:
            return
        start = stop


def read_file(path: str) -> Tensor:
    """Return the bytes of a file, uint8 (bytes,). Raises RuntimeError."""
    try:
        content: Tensor = torch.ops.image.read_file(path)
    except RuntimeError as error:
        raise RuntimeError(_without_place(error) if os.stat(path).st_size else _EMPTY) from None
    return content


def torchvision(module: str) -> Any:
    """Return the module of torchvision with this name. Call it late: its import takes long. Raises HarnessError."""
    try:
        return importlib.import_module(f"torchvision.{module}")
    except (ImportError, OSError, RuntimeError) as error:  # a library is missing; built for another torch
        raise HarnessError(f"torchvision cannot be imported: {first_line(error)}", hint=REINSTALL_TORCH) from error


def _load_decoder() -> None:
    spec = importlib.util.find_spec("torchvision")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in [*Path(folder).glob("image*.so"), *Path(folder).glob("image*.pyd")]:
            try:
                torch.ops.load_library(file)
            except OSError:
                continue
            if hasattr(torch.ops.image, "decode_image"):
                return
    torchvision("io")  # which loads it, or says what is wrong


_load_decoder()
