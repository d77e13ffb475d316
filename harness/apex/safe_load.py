"""Lets ``torch.load`` read old checkpoints: plain data in its safe mode, anything else if the user trusts the files.

Since torch 2.6 the default mode (``weights_only=True``) refuses every class that is not on its list of safe globals.
Old scripts saved numpy arrays, ``argparse.Namespace``, paths and the like. These hold data and run no code, so they are
added. For other objects (whole modules, classes of the script) the error names the option ``--trust-checkpoints``.
"""

from __future__ import annotations

import argparse
import codecs
import datetime
import functools
import pathlib
import pickle
import re
import sys
import types
from collections.abc import Callable
from typing import Any

from harness.apex.patches import around, patches

_REFUSED = re.compile("Unsupported (global|class|operand)|Can only |unrecognized function|Cannot use ``weights_only")


def extend_load(trusts_files: Callable[[], bool]) -> None:
    """Add the classes, once torch and numpy are imported, and let ``torch.load`` ask ``trusts_files`` about others.

    Undone by ``harness.apex.uninstall``.
    """
    # There is no public way to remove a single global, which uninstall needs
    from torch import _weights_only_unpickler as unpickler
    from torch.serialization import add_safe_globals

    before = set(unpickler._get_safe_globals())
    add_safe_globals(_plain_classes())

    for owner in (sys.modules["torch"], sys.modules["torch.serialization"]):
        patches.set(owner, "load", around(vars(owner)["load"], functools.partial(_load, trusts_files)))
    added = [each for each in unpickler._get_safe_globals() if each not in before]
    patches.callback(unpickler._remove_safe_globals, added)


def _plain_classes() -> list[Any]:
    """Return classes and functions that old checkpoints name, and that hold data and run no code."""
    import numpy

    scalar = numpy.float64(1).__reduce__()[0]
    array = numpy.zeros(1).__reduce__()[0]
    dtypes = [numpy.dtype(code) for code in numpy.typecodes["All"]]
    return [
        argparse.Namespace,
        codecs.encode,  # bytes are written as a call of it in the pickle protocol that torch.save uses
        numpy.dtype,
        numpy.ndarray,
        *{type(dtype) for dtype in dtypes},
        *{dtype.type for dtype in dtypes},
        *[(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")],  # in numpy 1 and in numpy 2
        *[(array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")],
        *(frozenset, range, slice),
        types.SimpleNamespace,
        *(datetime.date, datetime.datetime, datetime.timedelta),
        *[
            (vars(pathlib)[name], f"{module}.{name}")
            for module in ("pathlib", "pathlib._local")  # the latter in Python 3.13
            for name in ("PosixPath", "PurePosixPath", "PureWindowsPath")
        ],
    ]


def _load(trusts_files: Callable[[], bool], original: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    """Do ``torch.load``; if safe mode refuses a file, name the option for trusted files, or obey it."""
    start = f.tell() if hasattr(f, "seek") else 0
    try:
        return original(f, *args, **kwargs)
    except (pickle.UnpicklingError, RuntimeError) as error:
        if kwargs.get("weights_only") is not None or not _REFUSED.search(str(error)):
            raise  # the script chose the mode, or the file is damaged
        name, reason = getattr(f, "name", f), str(error)
    if not trusts_files():
        culprit = re.search(r"(?:GLOBAL|class|function) `?([\w.]+)|WeightsUnpickler error: *(.*)", reason)
        raise pickle.UnpicklingError(
            f"torch.load does not read {name} in its safe mode: the file holds more than plain data "
            f"({(culprit[1] or culprit[2]) if culprit else reason}), and loading such objects can run code. "
            "If you trust the origin of your checkpoints, run python -m harness.apex --trust-checkpoints SCRIPT, "
            "or call harness.apex.install(trust_checkpoints=True). Plain data needs neither."
        )
    print(f"harness.apex --trust-checkpoints: {name} is not plain data; loading it may run code", file=sys.stderr)
    if hasattr(f, "seek"):
        f.seek(start)
    return original(f, *args, weights_only=False, **{k: v for k, v in kwargs.items() if k != "weights_only"})
