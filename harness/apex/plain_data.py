"""Checkpoints of the old days load: ``torch.load`` is told of the plain data that scripts kept in them.

Since torch 2.6 it refuses every class that it was not told of. Here it is told of numbers of numpy (a learning rate
from a numpy schedule, an accuracy) and of ``argparse.Namespace``, which hold data and run nothing; of nothing else.
"""

from __future__ import annotations

import argparse
import codecs
import sys
from typing import Any

from harness.apex.patches import patches

_told = False


def allow_when_imported() -> None:
    """Tell ``torch.load``, once torch and numpy are imported; until then, and after that, nothing.

    Undone by ``harness.apex.uninstall``. Neither is imported for it.
    """
    global _told
    if _told or not (_is_imported("torch") and _is_imported("numpy")):
        return
    _told = True
    from torch import _weights_only_unpickler as unpickler
    from torch.serialization import add_safe_globals

    before = set(unpickler._get_safe_globals())
    add_safe_globals(_plain())
    try:
        unpickler._get_user_allowed_globals()
    except AttributeError:  # this torch knows no pairs of a class and its former name
        unpickler._remove_safe_globals([each for each in _plain() if isinstance(each, tuple)])
        add_safe_globals([each[0] for each in _plain() if isinstance(each, tuple)])

    ours = [each for each in unpickler._get_safe_globals() if each not in before]

    def forget() -> None:
        global _told
        _told = False
        unpickler._remove_safe_globals(ours)

    patches.on_undo(forget)


def _plain() -> list[Any]:
    import numpy

    scalar = numpy.float64(1).__reduce__()[0]
    kinds = [numpy.dtype(name) for name in ("bool", "int32", "int64", "uint8", "float16", "float32", "float64")]
    return [
        argparse.Namespace,
        codecs.encode,  # how bytes are written in the protocol that torch.save uses
        numpy.dtype,
        *{type(kind) for kind in kinds},
        *[(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")],  # of numpy 1 and 2
    ]


def _is_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)
