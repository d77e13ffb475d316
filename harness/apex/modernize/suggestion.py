"""Whether an error that stopped a script is one that ``--modernize`` prevents."""

from __future__ import annotations

import re
import traceback

from harness.apex.modernize.table import CALLS, NAMES

_OF_MODULE = re.compile(
    r"module '([\w.]+)' has no attribute '(\w+)'|`(np)\.(\w+)` was removed in the NumPy 2.0 release"
)
_OF_OBJECT = re.compile(r"'(\w+)' object has no attribute '(\w+)'|No (librosa) attribute (\w+)")
_FROM_MODULE = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")


def suggestion(error: BaseException) -> str | None:
    """One line that suggests ``--modernize``, or None. Errors of child processes are found in their printed text."""
    if _views_a_comparison(error):
        return _line("Tensor.view of a non-contiguous bool tensor", "rejected since torch 1.7")
    text = "".join(traceback.format_exception_only(error))
    found = next((name for line in text.splitlines() if (name := _lost_name(line, error)) is not None), None)
    if found is None:
        calls = [call for call in CALLS if call.symptom and re.search(call.symptom, text)]
        found = (calls[0].label, f"rejected since {calls[0].since}") if calls else None
    return _line(*found) if found is not None else None


def _line(name: str, since: str) -> str:
    return (
        f"harness.apex: --modernize bridges this: {name} ({since}). Put the option before the script; see "
        "docs/apex.md.\n"
    )


def _lost_name(line: str, error: BaseException) -> tuple[str, str] | None:
    """The name of the table that a line of an error's text lacks, and the release that removed it, or None."""
    if match := _FROM_MODULE.search(line):
        return _name(match[2], match[1])
    if match := _NO_MODULE.search(line):
        since = next((row.since for row in NAMES if row.owner == match[1]), None)
        return (match[1], f"removed in {since}") if since else None
    if match := _OF_MODULE.search(line):
        module, name = match[1] or "numpy", match[2] or match[4]
        return _name(module, name)
    if match := _OF_OBJECT.search(line):
        classes = [each.__name__ for each in type(getattr(error, "obj", None)).__mro__]
        return _name(match[3] or "", match[2] or match[4], [match[1] or "", *classes])
    return None


def _name(module: str, name: str, classes: list[str] | None = None) -> tuple[str, str] | None:
    for row in NAMES:
        of_class = row.owner.partition(":")[2]
        if (row.owner == module or (of_class and of_class in (classes or ()))) and row.target(name) is not None:
            return f"{row.owner.replace(':', '.')}.{name}", f"removed in {row.since}"
    return None


def _views_a_comparison(error: BaseException) -> bool:
    """True if the failed line calls ``name.view`` or ``name[...].view``, where ``name`` is a tensor of booleans."""
    if "view size is not compatible" not in str(error) or error.__traceback__ is None:
        return False
    frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    viewed = [frame.f_locals.get(name) for name in re.findall(r"(\w+)(?:\[[^]]*])?\.view\(", line)]
    return any(str(getattr(each, "dtype", "")) == "torch.bool" for each in viewed)
