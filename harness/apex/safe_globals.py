"""Lets ``torch.load`` read the plain data in old checkpoints, in its safe default mode (``weights_only=True``).

Since torch 2.6 that mode refuses every class that is not on its list of safe globals. Old scripts saved numpy numbers
(a learning rate from a numpy schedule, an accuracy) and ``argparse.Namespace``. Both hold data and run no code, so they
are added; nothing else is.
"""

from __future__ import annotations

import argparse
import codecs
import sys
from typing import Any

from harness.apex.patches import patches

_added = False


def add_when_imported() -> None:
    """Add the classes once torch and numpy are both imported by someone else; until then, and afterwards, do nothing.

    Undone by ``harness.apex.uninstall``.
    """
    global _added
    if _added or not (_is_imported("torch") and _is_imported("numpy")):
        return
    _added = True
    # There is no public way to remove a single global, which uninstall needs
    from torch import _weights_only_unpickler as unpickler
    from torch.serialization import add_safe_globals

    before = set(unpickler._get_safe_globals())
    add_safe_globals(_plain_classes())
    try:
        unpickler._get_user_allowed_globals()
    except AttributeError:  # this version of torch does not accept pairs of a class and its former name
        pairs: list[Any] = [each for each in _plain_classes() if isinstance(each, tuple)]
        unpickler._remove_safe_globals(pairs)
        add_safe_globals([each for each, _ in pairs])

    added = [each for each in unpickler._get_safe_globals() if each not in before]

    def remove() -> None:
        global _added
        _added = False
        unpickler._remove_safe_globals(added)

    patches.on_undo(remove)


def _plain_classes() -> list[Any]:
    import numpy

    scalar = numpy.float64(1).__reduce__()[0]
    dtypes = [numpy.dtype(name) for name in ("bool", "int32", "int64", "uint8", "float16", "float32", "float64")]
    return [
        argparse.Namespace,
        codecs.encode,  # bytes are written as a call of it in the pickle protocol that torch.save uses
        numpy.dtype,
        *{type(dtype) for dtype in dtypes},
        *[(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")],  # in numpy 1 and in numpy 2
    ]


def _is_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)
