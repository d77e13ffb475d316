"""One start of an audited command: its arguments and environment, its kill, and its end, whatever it does."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.audit.folders import Session
from harness.audit.plan import PLAN, AuditPlan
from harness.audit.process_family import KILL_S, ProcessFamily
from harness.distributed import processes
from harness.errors import ConfigError, reason
from harness.runs.files import write_atomically

HOOK = Path(__file__).with_name("hook")
OUT, LATEST, RESUME = "{out}", "{latest}", "{resume}"
TERM_GRACE_S = 60.0  # from SIGTERM to SIGKILL
_STRAYS_S = 10.0  # for what the launcher leaves behind, without new records
_LOOK_S, _POLL_S = 0.1, 0.02  # between looks at all processes and records; at the launcher and the mark
_LOOK_SHARE = 20  # between looks, times what one takes


def record_this_process(plan: Path) -> None:
    """Start the recorder here, as ``sitecustomize`` does in a process that is started with the ``plan``."""
    sys.path.insert(0, str(HOOK))
    import resume_recorder  # type: ignore[import-not-found]

    sys.path.remove(str(HOOK))
    resume_recorder.start(str(plan), {})


@dataclass(frozen=True)
class CommandStart:
    """The end of one start, also as ``ended.json`` in the folder of its records, which
    ``harness.audit.records`` reads."""

    name: str
    command: list[str]
    code: int | None
    """Exit code of the launcher, or minus a signal; None if the auditor ended it."""
    wall_s: float
    killed: dict[str, Any] | None
    """The mark of the recorder, if the start reached the place of its kill."""
    output: str
    late: str = ""
    """Why the auditor ended it before its time; empty if it did not."""


class CommandStarts:
    """Starts of ``command`` in the folders of ``session``, one after the other.

    ``resume``: what a resumed start adds to the command, at its end or in place of ``{resume}``. ``timeout_s``: how
    long a start may make no progress.
    """

    def __init__(
        self,
        session: Session,
        command: Sequence[str],
        resume: str,
        environ: Mapping[str, str],
        timeout_s: float,
        grace_s: float = TERM_GRACE_S,
    ) -> None:
        self._session = session
        self._command = command
        self._resume = shlex.split(resume)
        self._environ = environ
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self.limit_s = math.inf
        """Seconds for one start, even if it makes progress."""

    def words(
        self, latest: Path | None = None, resumed: bool = False, more: Sequence[str] = (), plan: Path | None = None
    ) -> list[str]:
        """Return the command of a start, with ``more`` words at its end. Its paths lead to the copy of the working
        folder, and from there to the same places as before. ``{plan}`` and ``{hook}`` are what its processes need as
        RESUME_AUDIT and first in PYTHONPATH, if they do not inherit the environment."""
        adds = self._resume if resumed and (latest is not None or LATEST not in " ".join(self._resume)) else []
        found: list[str] = []
        for number, word in enumerate(self._command):
            if word == RESUME:
                found += adds
            else:
                word = word.replace(RESUME, shlex.join(adds))
                found.append(self._in_copy(word) if number else word)
        if not any(RESUME in word for word in self._command):
            found += adds
        values = {OUT: self._session.out, LATEST: latest or "", "{plan}": plan or "", "{hook}": HOOK}
        for name, value in values.items():
            found = [word.replace(name, str(value)) for word in found]
        return [*found, *more]

    def _in_copy(self, word: str) -> str:
        """Return ``word``, or ``--name=word``, with the path that a start has to use."""
        option, equals, path = word.rpartition("=")
        if self._session.copy is None:
            return word
        source = self._session.copy.source
        if path.startswith("../") and (source / path).exists() or path == str(source) or path.startswith(f"{source}/"):
            return f"{option}{equals}{self._session.moved(path)}"
        return word

    def environ(self, plan: Path, hashes: bool = True) -> dict[str, str]:
        """Return the environment of a start; without ``hashes``, with a fixed order of sets and hashes of strings."""
        entries = [entry for entry in self._environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        path = os.pathsep.join([str(HOOK), *(str(self._session.moved(entry)) for entry in entries)])
        fixed = {} if hashes else {"PYTHONHASHSEED": "0"}
        return {**self._environ, "PYTHONPATH": path, "PWD": str(self._session.work), PLAN: str(plan), **fixed}

    def start(
        self,
        name: str,
        plan: AuditPlan,
        latest: Path | None = None,
        resumed: bool = False,
        more: Sequence[str] = (),
        hashes: bool = True,
    ) -> CommandStart:
        """Start the command in the folders as they are, and wait until none of its processes is left. Then move what it
        left to ``kept(name)``. Raises ConfigError if the command cannot be started."""
        records = Path(plan.records)
        records.mkdir(parents=True)
        self._session.kept(name).mkdir(parents=True)
        output = self._session.kept(name) / "output.txt"
        path = plan.write(self._session.folder / "records" / f"{name}.plan.json")
        command, began = self.words(latest, resumed, more, path), time.monotonic()
        with open(output, "wb") as file:
            try:
                launcher = subprocess.Popen(
                    command, cwd=self._session.work, env=self.environ(path, hashes), stdin=subprocess.DEVNULL,
                    stdout=file, stderr=file, start_new_session=True, preexec_fn=processes.terminated_with_parent(),
                )  # fmt: skip
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"the command cannot be started: {reason(error)}", where=command[0],
                    hint="type it after -- as in a shell, such as -- python train.py; torchrun is also python -m "
                    "torch.distributed.run",
                ) from None  # fmt: skip
        kill_signal = "" if plan.kill and plan.kill.target != "all" else plan.signal
        with Watch(launcher, ProcessFamily(launcher.pid, str(path)), records, kill_signal) as watch:
            late = watch.wait(self._timeout_s, self.limit_s, self._grace_s)
        done = CommandStart(name, command, watch.code, time.monotonic() - began, watch.mark(), str(output), late)
        write_atomically(records / "ended.json", json.dumps(asdict(done)) + "\n")
        self._session.keep(name)
        return done


class Watch:
    """The processes of a start until none of them is left. An error, such as Ctrl-C, ends them.

    ``kill_signal``: what they get when one of them has reached the place of the kill, such as KILL; empty if it kills
    itself.
    """

    def __init__(
        self, launcher: subprocess.Popen[bytes], family: ProcessFamily, records: Path, kill_signal: str
    ) -> None:
        self._launcher = launcher
        self._family = family
        self._records = records
        self._kill_signal = kill_signal
        self.code: int | None = None
        """Exit code of the launcher, or minus a signal; None if it was ended."""
        self._size = 0  # bytes of the records
        self._began_at = self._progress_at = time.monotonic()
        self._killed_at = math.inf  # when the mark of a rank that kills itself was first seen

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def _kill(self) -> None:
        self._family.kill()
        with suppress(subprocess.TimeoutExpired):  # of a process that is blocked in the kernel
            self._launcher.wait(KILL_S)

    def mark(self) -> dict[str, Any] | None:
        """Return the mark that the recorder writes, atomically, at the place of the kill."""
        with suppress(FileNotFoundError):
            content: dict[str, Any] = json.loads((self._records / "mark.json").read_text(encoding="utf-8"))
            return content
        return None

    def wait(self, timeout_s: float, limit_s: float, grace_s: float, end_s: float = math.inf) -> str:
        """Wait for the kill or the end of all processes, and set ``code``.

        Returns why they are ended before, if so: they made no progress for ``timeout_s``, or had not ended ``limit_s``
        after the start or, in the campaign of kills, ``end_s`` after a rank had killed itself. After the signal that
        kills all, they have ``grace_s`` to end.
        """
        look_at = self._began_at
        while not self._kill_signal or self.mark() is None:
            if self.code is None and (code := self._launcher.poll()) is not None:
                self.code = code
                self._progress_at = look_at = time.monotonic()
            if (now := time.monotonic()) >= look_at:
                self._look_for_progress()
                if not self._family.alive() and self.code is not None:
                    return ""
                look_at = now + max(_LOOK_S, _LOOK_SHARE * (time.monotonic() - now))
            if self.code is not None and time.monotonic() - self._progress_at > _STRAYS_S:
                return ""  # what is left is a service, or a loader process that was forgotten
            if late := self._late(timeout_s, limit_s, end_s):
                return late
            time.sleep(_POLL_S)
        self.code = None if self._kill_signal == "KILL" else self._terminate(grace_s)
        return ""

    def _look_for_progress(self) -> None:
        """Note the time if the records have grown, and if that is the mark of the kill."""
        size = self._records_size()
        if size == self._size:
            return
        self._size = size
        self._progress_at = time.monotonic()
        if self._killed_at == math.inf and self.mark() is not None:
            self._killed_at = self._progress_at

    def _late(self, timeout_s: float, limit_s: float, end_s: float) -> str:
        """Return why the processes have to be ended now; empty if they may go on."""
        now = time.monotonic()
        if now - self._progress_at > timeout_s:
            return f"it made no progress for {timeout_s:.0f} s"
        if now - self._killed_at > end_s:
            return f"it had not ended {end_s:.0f} s after the kill"
        if now - self._began_at > limit_s:
            return f"it had not ended after {limit_s:.0f} s"
        return ""

    def _terminate(self, grace_s: float) -> int | None:
        """Send the signal, and wait ``grace_s`` seconds for the end. Returns the launcher's exit code if it ended."""
        self._family.send(signal.Signals[f"SIG{self._kill_signal}"])
        (self._records / "mark.seen").touch()
        deadline = time.monotonic() + grace_s
        while self._launcher.poll() is None or self._family.alive():
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        return self._launcher.poll()

    def _records_size(self) -> int:
        size = 0
        for path in self._records.iterdir():
            with suppress(FileNotFoundError):  # a temporary name
                size += path.stat().st_size
        return size
