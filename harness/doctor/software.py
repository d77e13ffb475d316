"""Python and the packages that training needs. Which Apex there is: ``which_apex``."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Iterator

from harness.doctor.findings import Finding, Place

DISTRIBUTION = "apex-harness"
OLDEST_PYTHON = (3, 10)


def python(place: Place) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield Finding("python", "problem", f"{version} is too old: {oldest} or newer", (f"install Python {oldest}",))
    else:
        yield Finding("python", "ok", f"{version}, {sys.executable}")


def packages(place: Place) -> Iterator[Finding]:
    """Those that setup.cfg names, by their metadata: none is imported."""
    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        text = "apex-harness runs from its folder, so what it needs is not known here"
        yield Finding("packages", "note", text, ("python -m pip install -e .",))
        return
    wrong, fine = [], 0
    for name, oldest in (_parse(line) for line in required if ";" not in line):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append((name, oldest, f"{name} is missing"))
            continue
        if _numbers(version) < _numbers(oldest):
            wrong.append((name, oldest, f"{name} {version} is too old: {oldest} or newer"))
        fine += 1
    for name, oldest, text in wrong:
        wanted = f"'{name}>={oldest}'" if oldest else name
        yield Finding("packages", "problem", text, (f"python -m pip install {wanted}",))
    if not wrong:
        yield Finding("packages", "ok", f"all {fine} required packages are there")


def torch(place: Place) -> Iterator[Finding]:
    try:
        found = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library that is missing or does not fit
        remedy = "python -m pip install --force-reinstall torch torchvision"
        yield Finding("torch", "problem", f"cannot be imported: {error}", (remedy,))
        return
    yield Finding("torch", "ok", str(found.__version__))


def torchvision(place: Place) -> Iterator[Finding]:
    try:
        found = importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: built for another torch
        remedy = "python -m pip install --force-reinstall torch torchvision  # both at once, so that they fit"
        yield Finding("torchvision", "problem", f"cannot be imported: {error}", (remedy,))
        return
    yield Finding("torchvision", "ok", str(found.__version__))


def _parse(requirement: str) -> tuple[str, str]:
    """("torch", "2.6") of "torch>=2.6"; an empty version where none is asked for."""
    match = re.match(r"\s*([\w.-]+)[^>]*(?:>=\s*([\w.]+))?", requirement)
    return (match.group(1), match.group(2) or "") if match else (requirement, "")


def _numbers(version: str) -> list[int]:
    """[2, 6, 1] of "2.6.1+cu121"; trailing zeros do not count."""
    numbers = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
