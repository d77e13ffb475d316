"""What identifies a start of a run: versions, commits and the source of its code.

It is recorded in provenance.json, compared between the ranks of a start, and compared with the last start on a resume.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from harness.config import loader, plugins
from harness.config.recipe import code_names, may_differ_between_ranks
from harness.config.schema import Config
from harness.config.trees import flatten
from harness.distributed import processes
from harness.distributed.agreement import Facts
from harness.distributed.machine import usable_cores
from harness.distributed.runtime import Runtime
from harness.errors import is_users, plural
from harness.version import __version__

# Those that compute, decode images or draw random numbers: all ranks need the same.
_COMPARED = ("torch", "torchvision", "numpy")
_IN_SOME_RUNS = ("pillow", "timm", "transformers", "tokenizers", "peft")  # which do so there
# What the others read is compared itself, and Python's own version has no influence on a result.
PACKAGES = (*_COMPARED, *_IN_SOME_RUNS, "pandas", "pyarrow", "pydantic", "omegaconf", "safetensors")
_GIT_S = 10.0  # for all questions to git about one start, which take milliseconds
_HARNESS = Path(__file__).parents[1]

_SAME_CONFIG = "give every machine the same configuration file and overrides"
_SAME_SOFTWARE = "install the same versions on every machine"
_SAME_CODE = "copy the same code to every machine"

OwnCode = dict[Path, dict[str, Path]]
"""{folder: {module: file}} of the user's own parts."""


def facts(config: Config) -> list[Facts]:
    """Return what the ranks of a start must have in common, apart from their devices. Raises ConfigError if a part of
    the user cannot be imported."""
    settings = flatten(loader.as_tree(config))
    settings = {key: settings[key] for key in settings if not may_differ_between_ranks(key, config.task.name)}
    if settings["checkpoint.resume"] not in ("auto", "never"):
        settings["checkpoint.resume"] = "a checkpoint"  # its place may differ, as that of ``output``
    packages = {f"version of {name}": version(name) for name in _COMPARED}
    own_modules = {
        f"source code of {name}": _digest(file)
        for modules in own_code(config).values()
        for name, file in modules.items()
    }
    return [
        Facts(_SAME_CONFIG, settings),
        Facts(
            _SAME_SOFTWARE, {"version of harness": __version__, "source code of harness": harness_source(), **packages}
        ),
        Facts(_SAME_CODE, own_modules, partial=True),  # a module may be loaded on some ranks only
    ]


def own_code(config: Config) -> OwnCode:
    """Return the modules of the parts with dotted names, such as the model, and all that are loaded from the same
    folders. Of an installed package, only its own modules."""
    digests: OwnCode = {}
    for key, name in code_names(loader.as_tree(config)):
        top = name.partition(".")[0]
        if top not in (*_COMPARED, "harness"):
            plugins.import_own("part", name, key)
            if (folder := _folder(sys.modules[top])) is not None:
                digests[folder] = digests.get(folder, {}) | dict(_loaded(folder, top))
    return digests


def _folder(module: Any) -> Path | None:
    """Return the folder from which the top-level ``module`` is imported."""
    location = next(iter(getattr(module, "__path__", None) or ()), None) or getattr(module, "__file__", None)
    return Path(location).parent if location else None


def _loaded(folder: Path, top: str) -> Iterator[tuple[str, Path]]:
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not (path := Path(file)).is_relative_to(folder):
            continue
        package = name.partition(".")[0]
        not_own = {"harness", "__main__", "__mp_main__"} | sys.stdlib_module_names
        if package == top or (is_users(file) and package not in not_own):
            yield name, path


@functools.cache
def harness_source() -> str:
    """Return a digest of the harness's own code."""
    digest = hashlib.sha256()
    for path in sorted(_HARNESS.rglob("*.py")):
        digest.update(f"{path.relative_to(_HARNESS).as_posix()} {_digest(path)}\n".encode())
    return digest.hexdigest()[:12]


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return None


@functools.cache
def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# The record of a start


def code(config: Config) -> dict[str, Any]:
    """Return the entries of provenance.json about code: git's answers, and digests, which also exist without git."""
    until = time.monotonic() + _GIT_S
    return {
        "git": commit(Path.cwd(), until),
        "harness": {
            "version": __version__, "source": harness_source(),
            "git": commit(_HARNESS, until, [_HARNESS / "version.py"]),
        },
        "own_code": {
            str(folder): {
                "git": commit(folder, until, modules.values()),
                "source": {name: _digest(file) for name, file in modules.items()},
            }
            for folder, modules in own_code(config).items()
        },
    }  # fmt: skip


def of_start(
    runtime: Runtime, backend: str, ranks: Sequence[Mapping[str, str]], code: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entry of this start in provenance.json. ``ranks``: {"host", "device", "name" of the device, on a CPU
    also "processor"} of each rank."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [sys.executable, *sys.argv],
        "folder": str(Path.cwd()),
        **code,
        "packages": {name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "cuda": torch.version.cuda if runtime.device.type == "cuda" else None,
        "amp": backend,
        "launched_by": runtime.launch.by,
        "world_size": runtime.world_size,
        "ranks": list(ranks),
        "threads": torch.get_num_threads(),
        "cores": usable_cores(),
    }


def commit(folder: Path, until: float, files: Iterable[Path] = ()) -> dict[str, Any] | None:
    """Return the commit of the repository that ``folder`` is in, and whether files have changed since, or some of
    ``files`` were never committed. None outside a repository, if it holds none of ``files``, or without an answer of
    git by the time ``until`` (time.monotonic)."""
    names = [str(file) for file in files]
    head = _git(folder, until, "rev-parse", "HEAD")
    status = _git(folder, until, "status", "--porcelain", "--untracked-files=no")
    tracked = _git(folder, until, "ls-files", "--", *names[:1000])
    if not head or status is None or tracked is None or (names and not tracked):
        return None
    return {"commit": head, "changed": bool(status) or (bool(names) and len(tracked.splitlines()) < len(names[:1000]))}


def _git(folder: Path, until: float, *words: str) -> str | None:
    command = ["git", "-C", str(folder), "--no-optional-locks", *words]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip
    except OSError:
        return None
    try:
        output, _ = process.communicate(timeout=max(0.0, until - time.monotonic()))
    except (subprocess.TimeoutExpired, ValueError):
        processes.kill_session(process.pid)  # without a wait for its end, which a file system that hangs can delay
        return None
    return output.strip() if process.returncode == 0 else None


# Differences between two starts of a run


def warnings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return why the start ``now`` may give other results than if the start ``before`` had continued."""
    then, threads = before.get("threads"), now["threads"]
    texts = []
    if now["cuda"] is None and then not in (None, threads):
        texts.append(
            f"this run last used {plural(then, 'CPU thread')} per rank and now uses {threads}: sums are rounded "
            "differently, so its results will not be bit-identical to those of an uninterrupted run; set "
            f"OMP_NUM_THREADS={then} to resume exactly"
        )
    old, new = _identity(before), _identity(now)
    changed = [
        f"{name} {old[name]} -> {value}" for name, value in new.items() if name in old and value != old[name]
    ]  # fmt: skip
    if changed:
        more = f" and {len(changed) - 8} more" if len(changed) > 8 else ""
        texts.append(
            f"since the last start of this run, these have changed: {', '.join(changed[:8])}{more}. The run continues, "
            "but its results may differ from those of an uninterrupted run"
        )
    return texts


def _identity(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that determine a result, by name, if ``start`` has them: an older version recorded fewer."""
    harness, packages, folders = (_dict(start.get(key)) for key in ("harness", "packages", "own_code"))
    values = {
        "harness": harness.get("version"),
        "source code of harness": harness.get("source"),
        "amp": start.get("amp"),
    }
    values |= {name: packages.get(name) for name in (*_COMPARED, *_IN_SOME_RUNS)} | {"Python": start.get("python")}
    kinds = {rank.get("processor", rank.get("name")) for rank in start.get("ranks", ()) if isinstance(rank, dict)}
    values["device"] = ", ".join(sorted(map(str, kinds))) or None
    for folder in folders.values():
        values |= {f"source code of {name}": digest for name, digest in _dict(_dict(folder).get("source")).items()}
    return {name: value for name, value in values.items() if value is not None}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
