"""What the standard library, and small corners of other libraries, had."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import math
import re
import sys
from collections import namedtuple
from collections.abc import Callable, Set
from types import ModuleType
from typing import Any

from harness.apex.modernize.rows import Call

ArgSpec = namedtuple("ArgSpec", "args varargs keywords defaults")
logger = logging.getLogger("transformers")  # what ``from transformers import logger`` gave


def getargspec(function: Any) -> ArgSpec:
    """``inspect.getargspec``: raises ValueError for keyword-only parameters and annotations, as it did."""
    spec = inspect.getfullargspec(function)
    if spec.kwonlyargs or spec.annotations:
        raise ValueError("Function has keyword-only parameters or annotations: use inspect.signature()")
    return ArgSpec(*spec[:4])


def gcd(a: Any, b: Any) -> Any:
    """``fractions.gcd``, which has the sign of ``b`` (``math.gcd`` does not), and also takes fractions."""
    if type(a) is int is type(b):
        return -math.gcd(a, b) if (b or a) < 0 else math.gcd(a, b)
    while b:
        a, b = b, a % b
    return a


def load_source(name: str, path: str, file: Any = None) -> ModuleType:
    """``imp.load_source``: runs the file and registers it in ``sys.modules``, also if it was loaded before."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python source file", name=name, path=path)
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


def _sample(original: Any, used: Callable[[], None]) -> Any:
    """``random.sample`` of a set: its elements in the order of iteration, as before Python 3.11."""

    @functools.wraps(original)
    def sample(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, Set) for each in (*args, *kwargs.values())):
            used()
            args = tuple(tuple(each) if isinstance(each, Set) else each for each in args)
            kwargs = {name: tuple(each) if isinstance(each, Set) else each for name, each in kwargs.items()}
        return original(*args, **kwargs)

    return sample


def _loads(original: Any, used: Callable[[], None]) -> Any:
    """``json.loads`` and ``json.load``, which calls it: ``encoding`` had no effect in Python 3."""

    @functools.wraps(original)
    def loads(s: Any, **kwargs: Any) -> Any:
        if kwargs.pop("encoding", loads) is not loads:
            used()
        return original(s, **kwargs)

    return loads


def _load(original: Any, used: Callable[[], None]) -> Any:
    """``yaml.load`` and ``load_all`` without a loader: PyYAML 5.1 to 5.4 took FullLoader, which runs no code."""

    @functools.wraps(original)
    def load(stream: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and "Loader" not in kwargs:
            used()
            kwargs["Loader"] = original.__globals__["FullLoader"]
        return original(stream, *args, **kwargs)

    return load


def _parse(original: Any, used: Callable[[], None]) -> Any:
    """``StrictVersion``, of versions such as torch's 2.10.0+cu130, which it refuses: only the part that it knows."""

    @functools.wraps(original)
    def parse(self: Any, vstring: str) -> None:
        known = re.match(r"\d+\.\d+(\.\d+)?([ab]\d+)?", vstring)
        try:
            original(self, vstring)
        except ValueError:
            if known is None:
                raise
            original(self, known[0])
            used()

    return parse


_NO_SETS = "TypeError: Population must be a sequence"
_NO_LOADER = r"TypeError: load(_all)?\(\) missing 1 required positional argument: 'Loader'"
_VERSION = r"ValueError: invalid version number '\d+\.\d+"
CALLS = [
    Call("distutils.version:StrictVersion", "parse", "torch 1.1", "StrictVersion('1.2.3+cu118')", _VERSION, _parse),
    Call("random", "sample", "Python 3.11", "random.sample of a set", _NO_SETS, _sample),
    Call("random:Random", "sample", "Python 3.11", "random.sample of a set", _NO_SETS, _sample),
    Call("json", "loads", "Python 3.9", "json.load(encoding=)", r"JSONDecoder.*argument 'encoding'", _loads),
    Call("yaml", "load", "PyYAML 6", "yaml.load without a loader", _NO_LOADER, _load),
    Call("yaml", "load_all", "PyYAML 6", "yaml.load without a loader", _NO_LOADER, _load),
]
