"""What Python, numpy, PyYAML, Pillow, scipy.misc and matplotlib had or accepted.

A function with ``used`` and ``original`` is called in place of ``original``; see ``table.Call``.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
from collections import namedtuple
from collections.abc import Callable
from typing import Any

Used = Callable[[], None]

# Python, and PyYAML

ArgSpec = namedtuple("ArgSpec", "args varargs keywords defaults")


def getargspec(function: Any) -> ArgSpec:
    """Do ``inspect.getargspec``, which raised ValueError for keyword-only parameters and annotations."""
    spec = inspect.getfullargspec(function)
    if spec.kwonlyargs or spec.annotations:
        raise ValueError("Function has keyword-only parameters or annotations: use inspect.signature()")
    return ArgSpec(*spec[:4])


def json_loads(used: Used, original: Any, s: Any, **kwargs: Any) -> Any:
    """Do ``json.loads``, which ``json.load`` calls, without ``encoding``: it had no effect in Python 3."""
    if kwargs.pop("encoding", json_loads) is not json_loads:
        used()
    return original(s, **kwargs)


def yaml_load(used: Used, original: Any, stream: Any, *args: Any, **kwargs: Any) -> Any:
    """Do ``yaml.load`` and ``load_all`` without a loader as PyYAML 5.1 to 5.4: with FullLoader, which runs no code."""
    if not args and "Loader" not in kwargs:
        used()
        kwargs["Loader"] = original.__globals__["FullLoader"]
    return original(stream, *args, **kwargs)


def strict_version(used: Used, original: Any, self: Any, vstring: str) -> None:
    """Parse, of versions such as torch's 2.10.0+cu130, which ``StrictVersion`` refuses, the part that it knows."""
    known = re.match(r"\d+\.\d+(\.\d+)?([ab]\d+)?", vstring)
    try:
        original(self, vstring)
    except ValueError:
        if known is None:
            raise
        original(self, known[0])
        used()


# numpy

NINF = float("-inf")
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep


def asscalar(a: Any) -> Any:
    return a.item()


def in1d(ar1: Any, ar2: Any, assume_unique: bool = False, invert: bool = False, **kwargs: Any) -> Any:
    """Return ``np.isin`` of the flattened ``ar1``."""
    import numpy as np

    return np.isin(np.asarray(ar1).ravel(), ar2, assume_unique=assume_unique, invert=invert, **kwargs)


def numpy_array(used: Used, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Do ``np.array`` and its kin: unequal rows make an array of objects, and ``copy=False`` copies if necessary.

    This is only for the script's own files: installed libraries may rely on today's errors.
    """
    try:
        return original(*args, **kwargs)
    except ValueError as error:
        reason = str(error)
        if "inhomogeneous shape" in reason and len(args) < 2 and kwargs.get("dtype") is None:
            instead: dict[str, Any] = {"dtype": object}
        elif "Unable to avoid copy" in reason and kwargs.get("copy") is False:
            instead = {"copy": None}
        else:
            raise
        if not _is_called_by_script():
            raise
    used()
    return original(*args, **{**kwargs, **instead})


def numpy_fromstring(used: Used, original: Any, string: Any, dtype: Any = float, count: int = -1, **kwargs: Any) -> Any:
    """Do ``np.fromstring`` of bytes without ``sep``, which copied the memory."""
    try:
        return original(string, dtype, count, **kwargs)
    except ValueError as error:
        if "binary mode of fromstring" not in str(error) or isinstance(string, str):
            raise
    import numpy as np

    used()
    return np.frombuffer(string, dtype, count).copy()


def numpy_linspace(used: Used, original: Any, start: Any, stop: Any, num: Any = 50, *args: Any, **kwargs: Any) -> Any:
    """Do ``np.linspace`` with a number of points that is a float, which was cut off."""
    if isinstance(num, float):  # also numpy.float64
        used()
        num = int(num)
    return original(start, stop, num, *args, **kwargs)


def _is_called_by_script() -> bool:
    """Return True if a bridge was called by code that is not installed, directly or through numpy."""
    frame: Any = sys._getframe(3)  # above the bridge and the replacement that calls it
    numpy_folder = os.path.dirname(sys.modules["numpy"].__file__ or "") + os.sep
    while frame is not None and frame.f_code.co_filename.startswith(numpy_folder):
        frame = frame.f_back
    path = frame.f_code.co_filename if frame is not None else _STANDARD_LIBRARY
    return not (path.startswith(_STANDARD_LIBRARY) or "site-packages" in path or "dist-packages" in path)


# Pillow and matplotlib


def getsize(
    self: Any, text: Any, direction: Any = None, features: Any = None, language: Any = None, stroke_width: int = 0
) -> tuple[int, int]:
    """Return width and height of one line of text, in pixels, as ``font.getsize``: with the space above the letters."""
    if hasattr(self, "getmetrics"):  # a TrueType font
        left, _, right, bottom = self.getbbox(text, "", direction, features, language, stroke_width)
    else:
        left, _, right, bottom = self.getbbox(text)
    return int(right - left), int(bottom + stroke_width)


def tostring_rgb(self: Any) -> bytes:
    """Return the red, green and blue bytes of each pixel, as ``canvas.tostring_rgb``."""
    import numpy as np

    return np.asarray(self.buffer_rgba())[..., :3].tobytes()


# scipy.misc, on Pillow as it was

_RESAMPLING = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "cubic": 3}  # Pillow's numbers


def imresize(arr: Any, size: Any, interp: str = "bilinear", mode: str | None = None) -> Any:
    """Return an array of bytes: the image in ``arr``, scaled to bytes and resized.

    ``size`` is a percentage (int), a factor (float), or (height, width).
    """
    import numpy as np

    image = _image(np.asarray(arr), mode)
    if np.issubdtype(type(size), np.signedinteger):
        size = tuple((np.array(image.size) * (size / 100.0)).astype(int))
    elif np.issubdtype(type(size), np.floating):
        size = tuple((np.array(image.size) * size).astype(int))
    else:
        size = (size[1], size[0])
    return np.array(image.resize(size, resample=_RESAMPLING[interp]))


def _image(data: Any, mode: str | None) -> Any:
    """Return an image of an array: (height, width), or with 3 or 4 channels on any axis. Values are scaled to bytes."""
    import numpy as np
    from PIL import Image

    if data.ndim == 2 and mode == "F":
        return Image.fromarray(data.astype(np.float32))
    if data.ndim == 2 and mode in (None, "L"):
        return Image.fromarray(_scaled(data))
    channels = {None: (3, 4), "RGBA": (4,), "CMYK": (4,), "RGB": (3,), "YCbCr": (3,)}.get(mode, ())
    axis = next((axis for count in channels for axis in range(data.ndim) if data.shape[axis] == count), None)
    if data.ndim != 3 or axis is None:
        raise ValueError(f"no image of mode {mode} has the shape {data.shape}")
    image = Image.fromarray(np.ascontiguousarray(np.moveaxis(_scaled(data), axis, -1)))
    return image if mode is None or image.mode == mode else Image.frombytes(mode, image.size, image.tobytes())


def _scaled(data: Any) -> Any:
    """Return ``data`` scaled from its range to bytes; bytes are unchanged."""
    import numpy as np

    if data.dtype == np.uint8:
        return data
    scale = 255.0 / ((data.max() - data.min()) or 1)
    return (((data - data.min()) * scale).clip(0, 255) + 0.5).astype(np.uint8)
