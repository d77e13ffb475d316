"""What numpy had."""

from __future__ import annotations

import functools
import math  # noqa: F401  (np.math was this module)
import os
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

from harness.apex.modernize.rows import Call

NINF, NZERO, PZERO = float("-inf"), -0.0, 0.0


def asscalar(a: Any) -> Any:
    return a.item()


def alen(a: Any) -> int:
    import numpy as np

    try:
        return len(a)
    except TypeError:
        return len(np.array(a, ndmin=1))


def asfarray(a: Any, dtype: Any = float) -> Any:
    """``np.asarray`` in ``dtype``, or in float64 if that is not a floating-point dtype."""
    import numpy as np

    return np.asarray(a, dtype=dtype if np.issubdtype(np.dtype(dtype), np.inexact) else np.float64)


def msort(a: Any) -> Any:
    """A copy, sorted along the first axis."""
    import numpy as np

    b = np.array(a, subok=True, copy=True)
    b.sort(0)
    return b


def in1d(ar1: Any, ar2: Any, assume_unique: bool = False, invert: bool = False, **kwargs: Any) -> Any:
    """``np.isin`` of the flattened ``ar1``."""
    import numpy as np

    return np.isin(np.asarray(ar1).ravel(), ar2, assume_unique=assume_unique, invert=invert, **kwargs)


class _Cast:
    """``np.cast[dtype](x)``."""

    def __getitem__(self, dtype: Any) -> Callable[[Any], Any]:
        import numpy as np

        return lambda x: np.asarray(x).astype(dtype)


cast = _Cast()


def _array(original: Any, used: Callable[[], None]) -> Any:
    """``np.array`` and its kin: unequal rows make an array of objects, and ``copy=False`` copies if necessary.

    Only for the script's own files: installed libraries may rely on today's errors.
    """

    @functools.wraps(original)
    def array(*args: Any, **kwargs: Any) -> Any:
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

    return array


def _fromstring(original: Any, used: Callable[[], None]) -> Any:
    """``np.fromstring`` of bytes without ``sep``: a copy of the memory."""

    @functools.wraps(original)
    def fromstring(string: Any, dtype: Any = float, count: int = -1, **kwargs: Any) -> Any:
        try:
            return original(string, dtype, count, **kwargs)
        except ValueError as error:
            if "binary mode of fromstring" not in str(error) or isinstance(string, str):
                raise
        import numpy as np

        used()
        return np.frombuffer(string, dtype, count).copy()

    return fromstring


def _linspace(original: Any, used: Callable[[], None]) -> Any:
    """``np.linspace`` with a number of points that is a float: it is cut off."""

    @functools.wraps(original)
    def linspace(start: Any, stop: Any, num: Any = 50, *args: Any, **kwargs: Any) -> Any:
        if isinstance(num, float):  # also numpy.float64
            used()
            num = int(num)
        return original(start, stop, num, *args, **kwargs)

    return linspace


def _is_called_by_script() -> bool:
    """True if the function above was called by code that is not installed, directly or through numpy."""
    frame: Any = sys._getframe(2)
    numpy_folder = os.path.dirname(sys.modules["numpy"].__file__ or "") + os.sep
    while frame is not None and frame.f_code.co_filename.startswith(numpy_folder):
        frame = frame.f_back
    path = frame.f_code.co_filename if frame is not None else _STANDARD_LIBRARY
    return not (path.startswith(_STANDARD_LIBRARY) or "site-packages" in path or "dist-packages" in path)


_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_UNEQUAL = "inhomogeneous shape"
CALLS = [
    *[
        Call("numpy", name, "numpy 1.24 and 2.0", f"numpy.{name} of unequal rows, or with copy=False", symptom, _array)
        for name in ("array", "asarray", "asanyarray")
        for symptom in ([_UNEQUAL + "|Unable to avoid copy while creating an array"] if name == "array" else [_UNEQUAL])
    ],
    Call("numpy", "fromstring", "numpy 2.3", "numpy.fromstring of bytes", "binary mode of fromstring", _fromstring),
    Call("numpy", "linspace", "numpy 1.18", "numpy.linspace with a float number of points", "", _linspace),
]
