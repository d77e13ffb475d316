"""Errors that users see: where, what was found, and what to type instead.

Each class has the exit code of the process: 2 for configuration or usage, 65 for bad data, 70 for other failures. Any
other exception is a bug.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_DATA = 65
EXIT_FAILURE = 70
EXIT_INTERRUPTED = 130  # Ctrl-C before a run has started, as in shells
EXIT_STOPPED = 75  # stopped early with a checkpoint; the same command resumes the run


class HarnessError(Exception):
    """Base class; printed as ``where: message`` and ``hint`` on a line of its own."""

    exit_code = EXIT_FAILURE
    origin_rank: int | None = None  # the rank that failed, when all ranks raise its error

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message, self.where, self.hint = message, where, hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\n  -> {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple:
        # Exceptions are pickled between processes (loader workers, ranks), which loses keyword arguments by default.
        return _rebuild, (type(self), self.message, self.where, self.hint)


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """The first line of ``error``; ``otherwise``, or the name of its class, if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__ if otherwise is None else otherwise)


def _rebuild(cls: type[HarnessError], message: str, where: str, hint: str) -> HarnessError:
    return cls(message, where=where, hint=hint)


class ConfigError(HarnessError):
    """The YAML, an override, or a combination of settings is wrong."""

    exit_code = EXIT_USAGE


class LaunchError(HarnessError):
    """The launch environment is incomplete or contradictory, or an engine cannot start the run."""

    exit_code = EXIT_USAGE


class DataError(HarnessError):
    """An annotation file or an image cannot be used."""

    exit_code = EXIT_DATA


class CheckpointError(HarnessError):
    """A checkpoint or another file of a run cannot be written or read."""

    exit_code = EXIT_FAILURE


class TrainingError(HarnessError):
    """Training failed: the loss is not finite, or another rank died."""

    exit_code = EXIT_FAILURE
