"""torchvision's decoder of images without the rest of torchvision, whose import takes longer."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import torch
from torch import Tensor

UNCHANGED, GRAY, RGB = 0, 1, 3  # torchvision's numbers for these modes; also the number of channels


def decode(content: Tensor, channels: int = UNCHANGED) -> Tensor:
    """uint8 (channels, height, width) of an image file's bytes, uint8 (bytes,), as ``torchvision.io.decode_image``.
    Raises RuntimeError."""
    image: Tensor = torch.ops.image.decode_image(content, channels, False)
    return image


def read_file(path: str) -> Tensor:
    """Return the bytes of a file, uint8 (bytes,). Raises RuntimeError."""
    content: Tensor = torch.ops.image.read_file(path)
    return content


def _load_decoder() -> None:
    found = importlib.util.find_spec("torchvision")
    for folder in (found.submodule_search_locations or ()) if found else ():
        for file in [*Path(folder).glob("image*.so"), *Path(folder).glob("image*.pyd")]:
            try:
                torch.ops.load_library(file)
            except OSError:
                continue
            if hasattr(torch.ops.image, "decode_image"):
                return
    importlib.import_module("torchvision.io")  # which loads it, or says what is wrong


_load_decoder()
