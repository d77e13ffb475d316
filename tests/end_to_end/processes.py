"""Start launchers and ranks as real processes, inspect what they started, and end all of it.

Only processes that a test started, and their descendants, are inspected or signalled. Each carries a mark in its
environment, which survives a launcher that is killed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.forked import fork_commands, run_python
from tests.ranks import free_port, launch_environment, start, wait_for

START_S = 60  # limit until a launcher's ranks train, on a slow machine
END_S = 30  # limit until all ranks have exited, whatever happened to their peers
_MARK = "TEST_PROCESS_MARK"
_OWN = {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable}  # PYTHON: for the scripts of launch/


def wait_until(happened: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Poll ``happened()`` until it is true and return its value; AssertionError after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not (value := happened()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
    return value


def environment_of(pid: int) -> dict[str, str]:
    """The environment that process ``pid`` was started with; empty if it has exited."""
    try:
        text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


class Started:
    """A running command whose output goes to a file."""

    def __init__(self, command: Sequence[str | Path], terminal: Path, environ: dict[str, str]) -> None:
        self.terminal, self._mark = terminal, secrets.token_hex(8)
        inherited = {key: value for key, value in os.environ.items() if key != "LAUNCHER"}
        with open(terminal, "wb") as file:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**inherited, **_OWN, **environ, _MARK: self._mark},
                start_new_session=True,
            )

    def alive(self) -> dict[int, dict[str, str]]:
        """{process id: environment} of this process and all its descendants, orphans included."""
        found = {
            int(entry.name): environment_of(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()
        }
        return {pid: environ for pid, environ in found.items() if environ.get(_MARK) == self._mark}

    def ranks(self) -> list[int]:
        """Process ids of the ranks that the launcher started, by rank, without the loader workers they fork."""
        ranks = {}
        for pid, environ in sorted(self.alive().items(), reverse=True):  # a loader worker is later than its rank
            if "RANK" in environ:
                ranks[int(environ["RANK"])] = pid
        return [ranks[rank] for rank in sorted(ranks)]

    def signal(self, number: int, pid: int | None = None) -> None:
        os.kill(pid or self.process.pid, number)

    def text(self) -> str:
        return self.terminal.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s; its output:\n{self.text()}") from None

    def end(self) -> None:
        """Kill whatever is left of it."""
        while left := self.alive():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            time.sleep(0.02)
        self.process.wait()


class StartedByFork(Started):
    """``Started`` for a command of this Python. The process and all Python processes that it starts are forked from the
    warm server, without the seconds of CPU time for imports."""

    def __init__(self, command: Sequence[str | Path], terminal: Path, environ: dict[str, str], network: str) -> None:
        self.terminal, self._mark = terminal, secrets.token_hex(8)
        ours, theirs = multiprocessing.Pipe(duplex=False)
        arguments = ([str(word) for word in command], str(terminal), network, theirs)
        self._parent, self._result = start(_follow, arguments, {**_OWN, **environ, _MARK: self._mark})
        theirs.close()
        self.process = _Handle(ours)  # type: ignore[assignment]


class _Handle:
    """The methods of subprocess.Popen that tests use, for the child of ``_follow``."""

    def __init__(self, connection: Any) -> None:
        self._connection, self.returncode = connection, None
        self.pid: int = connection.recv()

    def poll(self) -> int | None:
        if self.returncode is None and self._connection.poll():
            self.returncode = self._connection.recv()
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        if self.returncode is None and not self._connection.poll(timeout_s):
            raise subprocess.TimeoutExpired("a forked process", timeout_s or 0)
        code = self.poll()
        assert code is not None
        return code


def _follow(command: list[str], terminal: str, network: str, connection: Any) -> None:
    """Fork ``command``, in the network namespace ``network``; send its process id, and its exit code when it ends."""
    fork_commands()
    with open(terminal, "wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=partial(_enter, network),
        )  # fmt: skip
    connection.send(child.pid)
    connection.send(child.wait())


def _enter(network: str) -> None:
    if network:  # os.setns is new in Python 3.12
        with open(f"/run/netns/{network}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0, f"cannot enter {network}"


@contextmanager
def started(
    command: Sequence[str | Path], terminal: Path, *, fork: bool = False, network: str = "", **environ: str
) -> Iterator[Started]:
    """Run ``command`` in the project's folder; kill whatever is left of it when the body ends. An assertion that
    fails in the body shows the command's output.

    ``fork``: as ``StartedByFork`` does, in the network namespace ``network`` if there is one.
    """
    process = StartedByFork(command, terminal, environ, network) if fork else Started(command, terminal, environ)
    try:
        yield process
    except AssertionError as error:
        if (text := process.text()) not in str(error):
            error.args = (f"{error}\nThe output of the command:\n{text}",)
        raise
    finally:
        process.end()


def wait_for_steps(folder: Path, num_lines: int, timeout_s: float = START_S) -> None:
    """Wait until metrics.jsonl of the run ``folder`` has ``num_lines`` lines of training."""

    def far_enough() -> bool:
        try:
            return (folder / "metrics.jsonl").read_text().count('"train"') >= num_lines
        except OSError:
            return False

    wait_until(far_enough, timeout_s, f"{num_lines} lines of training in {folder}")


def driver(arguments: Sequence[str], environ: dict[str, str], terminal: Path) -> Any:
    """Start a rank as driver.py does, forked from the warm server, with its output in a file: (process, connection)."""
    return start(drive_in_terminal, (list(arguments), str(terminal)), environ)


def drivers(world_size: int, arguments: Sequence[str], terminal: Path) -> list[Any]:
    """Start ``world_size`` ranks that share one terminal; wait for them with ``tests.ranks.wait_for``."""
    port = free_port()
    return [
        driver(arguments, launch_environment(rank, world_size, port) if world_size > 1 else {}, terminal)
        for rank in range(world_size)
    ]


def drive_in_terminal(arguments: list[str], terminal: str) -> None:
    """Do what driver.py does, with the file ``terminal`` as the terminal."""
    file = os.open(terminal, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from harness.cli import main
    from harness.distributed import signals

    signals.install(quiet=int(os.environ.get("LOCAL_RANK", "0")) > 0)
    raise SystemExit(main(["train", *arguments]))


def python(
    words: Sequence[str | Path], terminal: Path, cwd: Path = ROOT, timeout_s: float = 240, **environ: str
) -> int:
    """Do what ``python WORDS`` does, appending to the file ``terminal``; return the exit code.

    The process and all Python processes that it starts are forked, without the seconds of CPU time for imports.
    """
    return wait_for([start_python(words, terminal, cwd, **environ)], timeout_s)[0]


def without_greetings(text: str) -> str:
    """``text`` in lower case, without the lines by which gloo reports that ranks are connected (in torch 2.9)."""
    return "\n".join(line for line in text.lower().splitlines() if not line.startswith("[gloo] rank "))


def shell(words: Sequence[str], terminal: Path, cwd: Path, **environ: str) -> int:
    """``python`` for a command line of the documentation. Scripts of launch/ start the Python command that they end
    with; ``test_launch.py`` runs them as they are."""
    program, *rest = words
    if program == "harness":
        return python([Path(sys.executable).with_name(program), *rest], terminal, cwd, 600, **environ)
    if program == "python":
        return python([ROOT / word if word == "driver.py" else word for word in rest], terminal, cwd, **environ)
    (shim := cwd / "print_words").write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    shim.chmod(0o755)
    script = subprocess.run(
        [ROOT / program, *rest], cwd=cwd, env={**os.environ, **environ, "PYTHON": str(shim)}, capture_output=True,
        text=True, check=True, timeout=250,
    )  # fmt: skip
    options = script.stdout.rstrip("\0").split("\0")
    del options[: options.index("-m")]  # -W and its value
    return python(options, terminal, cwd, **environ)


def start_python(words: Sequence[str | Path], terminal: Path, cwd: Path = ROOT, **environ: str) -> Any:
    """``python`` without waiting: (process, connection)."""
    own = {"OMP_NUM_THREADS": "1", **environ}
    return start(_python_in_terminal, ([str(word) for word in words], str(terminal), str(cwd)), own)


def _python_in_terminal(words: list[str], terminal: str, cwd: str) -> None:
    file = os.open(terminal, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(cwd)
    fork_commands()
    try:
        run_python(words)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
