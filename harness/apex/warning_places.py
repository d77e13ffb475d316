"""Attributes warnings to the line of the script that a call came from, not to the function here that passed it on.

Torch raises many warnings in C++ for "the calling Python function", and others with a fixed ``stacklevel``. Under
``--device cpu`` that function is often a redirection.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from typing import Any

from harness.apex.patches import patches

_HERE = os.path.dirname(__file__) + os.sep


def attribute_to_callers() -> None:
    """Correct the place of warnings that are attributed to this package. Undone by ``harness.apex.uninstall``."""
    name = "_showwarnmsg"  # all warnings pass here, also those from C++ and those that are recorded
    if hasattr(warnings, name):
        patches.set(warnings, name, _corrected(getattr(warnings, name)))


def _corrected(original: Any) -> Any:
    shown: set[tuple[Any, ...]] = set()

    @functools.wraps(original)
    def show(message: Any) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (message.filename, message.lineno):
            frame = frame.f_back
        registry: dict[Any, Any] = frame.f_globals.get("__warningregistry__", {}) if frame is not None else {}
        while frame is not None and frame.f_code.co_filename.startswith(_HERE):
            frame = frame.f_back
        if frame is None or not message.filename.startswith(_HERE):
            original(message)
            return
        # Python notes the place of a warning that is to appear once; here, that is the place in the script.
        key = str(message.message), message.category
        if registry.pop((*key, message.lineno), None) is not None:
            place = (*key, frame.f_code.co_filename, frame.f_lineno, registry.get("version"))
            if place in shown:
                return
            shown.add(place)
        message.filename, message.lineno = frame.f_code.co_filename, frame.f_lineno
        original(message)

    return show
