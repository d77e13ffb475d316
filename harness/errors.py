"""The errors a user may see: what was seen, where, and what to type next.

Every class carries the exit code its kind ends the process with (see DESIGN in the README): 2 for configuration
or usage, 65 for bad data, 70 for a failure inside. Anything that is not one of these is a bug of ours.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_DATA = 65
EXIT_FAILURE = 70
EXIT_INTERRUPTED = 130  # Ctrl-C before there was anything to stop, as shells say it
EXIT_STOPPED = 75  # stopped early with a checkpoint: a scheduler should start the same command again


class HarnessError(Exception):
    """Base of all errors meant for the user: ``where: message`` and, on its own line, ``hint``."""

    exit_code = EXIT_FAILURE
    origin_rank: int | None = None  # the rank that failed, when all ranks raise its error

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message, self.where, self.hint = message, where, hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\n  -> {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple:
        # Exceptions cross process borders (loader workers, ranks); keyword arguments would be lost by the default.
        return _rebuild, (type(self), self.message, self.where, self.hint)


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """Of what ``error`` says; ``otherwise``, or its kind, where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__ if otherwise is None else otherwise)


def _rebuild(cls: type[HarnessError], message: str, where: str, hint: str) -> HarnessError:
    return cls(message, where=where, hint=hint)


class ConfigError(HarnessError):
    """The YAML, an override or a combination of them is wrong."""

    exit_code = EXIT_USAGE


class LaunchError(HarnessError):
    """The environment in which the process was started is incomplete or contradicts itself."""

    exit_code = EXIT_USAGE


class DataError(HarnessError):
    """An annotation file or an image cannot be used."""

    exit_code = EXIT_DATA


class CheckpointError(HarnessError):
    """A checkpoint cannot be written or read."""

    exit_code = EXIT_FAILURE


class TrainingError(HarnessError):
    """Training itself went wrong: a loss that is not finite, a peer that died."""

    exit_code = EXIT_FAILURE
