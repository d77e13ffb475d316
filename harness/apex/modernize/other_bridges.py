"""What Python, numpy, PyYAML, Pillow, scipy.misc, matplotlib, librosa and transformers had or accepted.

A function with ``used`` and ``original`` is called in place of ``original``; see ``table.Call``.
"""

from __future__ import annotations

import inspect
import logging
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
logger = logging.getLogger("transformers")  # what ``from transformers import logger`` gave


def getargspec(function: Any) -> ArgSpec:
    """``inspect.getargspec``: raises ValueError for keyword-only parameters and annotations, as it did."""
    spec = inspect.getfullargspec(function)
    if spec.kwonlyargs or spec.annotations:
        raise ValueError("Function has keyword-only parameters or annotations: use inspect.signature()")
    return ArgSpec(*spec[:4])


def json_loads(used: Used, original: Any, s: Any, **kwargs: Any) -> Any:
    """``json.loads`` and ``json.load``, which calls it: ``encoding`` had no effect in Python 3."""
    if kwargs.pop("encoding", json_loads) is not json_loads:
        used()
    return original(s, **kwargs)


def yaml_load(used: Used, original: Any, stream: Any, *args: Any, **kwargs: Any) -> Any:
    """``yaml.load`` and ``load_all`` without a loader: PyYAML 5.1 to 5.4 took FullLoader, which runs no code."""
    if not args and "Loader" not in kwargs:
        used()
        kwargs["Loader"] = original.__globals__["FullLoader"]
    return original(stream, *args, **kwargs)


def strict_version(used: Used, original: Any, self: Any, vstring: str) -> None:
    """``StrictVersion``, of versions such as torch's 2.10.0+cu130, which it refuses: only the part that it knows."""
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
    """``np.isin`` of the flattened ``ar1``."""
    import numpy as np

    return np.isin(np.asarray(ar1).ravel(), ar2, assume_unique=assume_unique, invert=invert, **kwargs)


def numpy_array(used: Used, original: Any, *args: Any, **kwargs: Any) -> Any:
    """``np.array`` and its kin: unequal rows make an array of objects, and ``copy=False`` copies if necessary.

    Only for the script's own files: installed libraries may rely on today's errors.
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
    """``np.fromstring`` of bytes without ``sep``: a copy of the memory."""
    try:
        return original(string, dtype, count, **kwargs)
    except ValueError as error:
        if "binary mode of fromstring" not in str(error) or isinstance(string, str):
            raise
    import numpy as np

    used()
    return np.frombuffer(string, dtype, count).copy()


def numpy_linspace(used: Used, original: Any, start: Any, stop: Any, num: Any = 50, *args: Any, **kwargs: Any) -> Any:
    """``np.linspace`` with a number of points that is a float: it is cut off."""
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
    """``font.getsize``: width and height of one line of text, in pixels; the height starts above the first letter."""
    if hasattr(self, "getmetrics"):  # a TrueType font
        left, _, right, bottom = self.getbbox(text, "", direction, features, language, stroke_width)
    else:
        left, _, right, bottom = self.getbbox(text)
    return int(right - left), int(bottom + stroke_width)


def textsize(
    self: Any,
    text: str,
    font: Any = None,
    spacing: int = 4,
    direction: Any = None,
    features: Any = None,
    language: Any = None,
    stroke_width: int = 0,
) -> tuple[int, int]:
    """``draw.textsize``: width and height of one or more lines of text, in pixels."""
    font = font or self.getfont()
    options = (direction, features, language, stroke_width)
    if "\n" not in text:
        return getsize(font, text, *options)
    lines = text.split("\n")
    height = getsize(font, "A", stroke_width=stroke_width)[1] + spacing
    return max(getsize(font, line, *options)[0] for line in lines), len(lines) * height - spacing


def tostring_rgb(self: Any) -> bytes:
    """``canvas.tostring_rgb``: the red, green and blue bytes of each pixel."""
    import numpy as np

    return np.asarray(self.buffer_rgba())[..., :3].tobytes()


# scipy.misc, on Pillow as it was

_RESAMPLING = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "cubic": 3}  # Pillow's numbers


def bytescale(data: Any, cmin: Any = None, cmax: Any = None, high: int = 255, low: int = 0) -> Any:
    """``data`` scaled from [cmin, cmax] (by default its range) to bytes from ``low`` to ``high``; bytes unchanged."""
    import numpy as np

    if data.dtype == np.uint8:
        return data
    if not 0 <= low <= high <= 255:
        raise ValueError(f"low and high must be in order and between 0 and 255, not {low} and {high}")
    cmin, cmax = data.min() if cmin is None else cmin, data.max() if cmax is None else cmax
    if cmax < cmin:
        raise ValueError(f"cmax must not be below cmin; they are {cmax} and {cmin}")
    scale = float(high - low) / ((cmax - cmin) or 1)
    return (((data - cmin) * scale + low).clip(low, high) + 0.5).astype(np.uint8)


def toimage(
    arr: Any,
    high: int = 255,
    low: int = 0,
    cmin: Any = None,
    cmax: Any = None,
    pal: Any = None,
    mode: str | None = None,
    channel_axis: int | None = None,
) -> Any:
    """Return an image of an array: (height, width), or with 3 or 4 channels on any axis. Values are scaled to bytes."""
    import numpy as np
    from PIL import Image

    data = np.asarray(arr)
    if np.iscomplexobj(data):
        raise ValueError("Cannot convert a complex-valued array.")
    if data.ndim == 2 and mode == "F":
        return Image.fromarray(data.astype(np.float32))
    if data.ndim == 2 and mode in (None, "L", "P"):
        image = Image.fromarray(bytescale(data, cmin, cmax, high, low))
        if mode == "P" or pal is not None:
            palette = np.arange(256)[:, None].repeat(3, 1) if pal is None else pal
            image.putpalette(np.asarray(palette, np.uint8).tobytes())
        return image
    channels = {None: (3, 4), "RGBA": (4,), "CMYK": (4,), "RGB": (3,), "YCbCr": (3,)}.get(mode, ())
    axes = [axis for count in channels for axis in range(data.ndim) if data.shape[axis] == count]
    if data.ndim != 3 or not axes or (channel_axis is not None and data.shape[channel_axis] not in channels):
        raise ValueError(f"no image of mode {mode} has the shape {data.shape}")
    axis = axes[0] if channel_axis is None else channel_axis
    values = np.moveaxis(bytescale(data, cmin, cmax, high, low), axis, -1)
    image = Image.fromarray(np.ascontiguousarray(values))
    return image if mode is None or image.mode == mode else Image.frombytes(mode, image.size, image.tobytes())


def fromimage(im: Any, flatten: bool = False, mode: str | None = None) -> Any:
    """Return the array of an image: (height, width) or (height, width, channels); with ``flatten``, one float32
    channel."""
    import numpy as np

    if mode is not None:
        im = im if im.mode == mode else im.convert(mode)
    elif im.mode == "P":
        im = im.convert("RGBA" if "transparency" in im.info else "RGB")
    if flatten:
        im = im.convert("F")
    elif im.mode == "1":
        im = im.convert("L")
    return np.array(im)


def imread(name: Any, flatten: bool = False, mode: str | None = None) -> Any:
    """Return the array of an image file; see ``fromimage``."""
    from PIL import Image

    return fromimage(Image.open(name), flatten=flatten, mode=mode)


def imsave(name: Any, arr: Any, format: str | None = None) -> None:
    """Write an array, with channels last, as an image file; see ``toimage``."""
    image = toimage(arr, channel_axis=2)
    image.save(name) if format is None else image.save(name, format)


def imresize(arr: Any, size: Any, interp: str = "bilinear", mode: str | None = None) -> Any:
    """Return an array of bytes: the image in ``arr``, scaled to bytes and resized.

    ``size`` is a percentage (int), a factor (float), or (height, width).
    """
    import numpy as np

    image = toimage(arr, mode=mode)
    if np.issubdtype(type(size), np.signedinteger):
        size = tuple((np.array(image.size) * (size / 100.0)).astype(int))
    elif np.issubdtype(type(size), np.floating):
        size = tuple((np.array(image.size) * size).astype(int))
    else:
        size = (size[1], size[0])
    return fromimage(image.resize(size, resample=_RESAMPLING[interp]))


# librosa


def write_wav(path: Any, y: Any, sr: int, norm: bool = False) -> None:
    """``librosa.output.write_wav``: samples of shape (n,) or (2, n), scaled to a peak of 1 with ``norm``."""
    import librosa
    import numpy as np
    import scipy.io.wavfile

    librosa.util.valid_audio(y)
    if norm and np.issubdtype(y.dtype, np.floating):
        y = librosa.util.normalize(y, norm=np.inf, axis=None)
    scipy.io.wavfile.write(path, sr, y.T if y.ndim > 1 and y.shape[0] == 2 else y)
