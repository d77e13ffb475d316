"""Starts the scripts of tests/audit/scripts without the auditor, kills them and compares what they leave."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests import forked, ranks
from tests.audit.scripts.labels import Label

CHECKPOINTS = (".pt", ".pth", ".ckpt", ".tar", ".bin")
# In the names of values that differ between two equal runs.
DIFFERENT = ("time", "second", "date", "elapsed", "pid", "run_name", "previous_run", "args", "resume")
Kill = tuple[str, int]


@dataclass
class Start:
    """What one start of a script did."""

    code: int
    output: str
    steps: list[str] = field(default_factory=list)
    """A digest of the weights before each optimizer step of rank 0."""
    saves: list[int] = field(default_factory=list)
    """How many steps rank 0 had begun at each call of torch.save."""
    values: dict[str, Any] = field(default_factory=dict)
    """What the checkpoint files contain, by the file and the path in it."""


class Session:
    """A folder in which a script is started several times, always at the same paths."""

    def __init__(self, label: Label, folder: Path) -> None:
        self.label = label
        self.work, self.out, self.records = folder / "work", folder / "out", folder / "records"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()

    def clear(self) -> None:
        for folder in (self.work, self.out):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        (self.work / self.label.file).write_text(self.label.source)

    def start(self, resume: bool = False, kill: Kill | None = None, timeout_s: float = 150) -> Start:
        """Start the script, as after a kill with ``resume``; ``kill`` is ("step" or "write", which one)."""
        shutil.rmtree(self.records, ignore_errors=True)
        self.records.mkdir(parents=True)
        words = [*self.label.python, *(self.label.resume if resume else ())]
        words = [word.format(out=self.out, latest=self.latest()) for word in words]
        process, receiver = ranks.start(
            _run, (words, str(self.work), str(self.records), kill), {"TMPDIR": str(self.temporary)}
        )
        process.join(timeout_s)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        receiver.close()
        start = Start(process.exitcode, (self.records / "output").read_text())
        for line in _lines(self.records / "rank0"):
            kind, value = line.split()
            if kind == "step":
                start.steps.append(value)
            else:
                start.saves.append(int(value))
        for path in sorted(self.files()):
            name = re.sub(r"\d{15,}", "TIME", str(path.relative_to(self.work.parent)))
            with suppress(Exception):  # a torn file
                _flatten(name, torch.load(path, weights_only=False), start.values)
            start.values.setdefault(name, None)
        return start

    def latest(self) -> Path | None:
        """The newest checkpoint file that can be read."""
        for path in sorted(self.files(), key=lambda path: path.stat().st_mtime_ns, reverse=True):
            with suppress(Exception):
                torch.load(path, weights_only=False)
                return path
        return None

    def files(self) -> list[Path]:
        found = [path for folder in (self.work, self.out) for path in folder.rglob("*") if path.is_file()]
        return [path for path in found if path.suffix in CHECKPOINTS and not path.name.startswith(".")]


def kill_step(undisturbed: Start, part: float) -> int:
    """The number of a step between two checkpoints, at about this ``part`` of those of the run, and at least one step
    behind the first of them."""
    total = len(undisturbed.steps)
    saves = [count for count in sorted(set(undisturbed.saves)) if 0 < count < total]
    index = min(int(part * len(saves)), len(saves) - 1)
    following = [*saves, total][index + 1]
    return min(saves[index] + 1 + max(1, (following - saves[index]) // 2), following)


def differences(undisturbed: Start, resumed: Start) -> set[str]:
    """What tells the resumed run from the undisturbed one: ``scratch`` (it begins with the same weights), ``trace``
    (its steps are not the last ones of the undisturbed run), ``length`` (there are too few or too many), ``values`` (of
    checkpoints), ``failed``, ``code`` (0, although the run is not complete)."""
    steps, found = undisturbed.steps, set()
    complete = any(name.endswith("final.pt") for name in resumed.values)
    if resumed.steps and resumed.steps[0] in steps:
        match = steps.index(resumed.steps[0])
        found |= {"scratch"} if match == 0 else set()
        found |= {"length"} if len(resumed.steps) != len(steps) - match else set()
    elif not resumed.steps and complete:
        found.add("length")
    if not resumed.steps or resumed.steps != steps[-len(resumed.steps) :]:
        found.add("trace")
    if resumed.values != undisturbed.values:
        found.add("values")
    if resumed.code:
        found.add("failed")
    if not resumed.code and not complete:
        found.add("code")
    return found


def different_values(one: Start, other: Start) -> list[str]:
    return sorted(key for key in {*one.values, *other.values} if one.values.get(key, 0) != other.values.get(key, 0))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _flatten(name: str, value: Any, into: dict[str, Any]) -> None:
    if any(word in name.rpartition(".")[2].lower() for word in DIFFERENT):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten(f"{name}.{key}", item, into)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _flatten(f"{name}.{index}", item, into)
    elif isinstance(value, torch.Tensor):
        into[name] = _digest([value])
    elif isinstance(value, np.ndarray):
        into[name] = value.tobytes()
    else:
        into[name] = value if isinstance(value, int | float | str | None) else repr(value)


def _digest(tensors: Any) -> str:
    whole = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        whole.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def _run(words: list[str], work: str, records: str, kill: Kill | None) -> None:
    """In a process of its own: do what ``python WORDS`` does, and note steps and checkpoints; this process, and all
    that it starts, die by SIGKILL at the place ``kill``."""
    os.setpgid(0, 0)
    os.chdir(work)
    output = os.open(Path(records) / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    counts = {"step": 0, "write": 0}
    whole_save = torch.save

    def note(kind: str, value: Any) -> None:
        with open(Path(records) / f"rank{os.environ.get('RANK', 0)}", "a") as file:
            file.write(f"{kind} {value}\n")

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        counts["step"] += 1
        if kill == ("step", counts["step"]) and os.environ.get("RANK", "0") == "0":
            _die()
        note("step", _digest(parameter for group in optimizer.param_groups for parameter in group["params"]))

    def save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
        counts["write"] += 1
        whole_save(obj, f, *args, **options)
        if kill == ("write", counts["write"]):
            os.truncate(f, Path(f).stat().st_size // 2)
            _die()
        note("save", counts["step"])

    register_optimizer_step_pre_hook(before_step)
    torch.save = save
    os.environ["OMP_NUM_THREADS"] = "1"  # torchrun sets it, and a rank with another environment would not be forked
    forked.fork_commands()
    code: Any = 1
    try:
        forked.run_python(words)
        code = 0
    except SystemExit as error:
        code = error.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die() -> None:
    if "RANK" in os.environ:  # the launcher sees it and ends the others
        os.kill(os.getpid(), signal.SIGKILL)
    os.killpg(os.getpgid(0), signal.SIGKILL)
