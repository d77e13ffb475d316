"""Places for the ranks of a gang: workers with room, set aside and looked at, or an error that says what was seen.

The choice itself is made in the scheduler, by ``dask_claims``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.engines.base import Job
from harness.engines.dask import reservation
from harness.engines.dask import worker as dask_rank
from harness.engines.dask.reservation import KEYS
from harness.errors import LaunchError
from harness.version import __version__

_PAUSE_S = 0.5  # between two questions for room
_Facts = Mapping[str, Mapping[str, Any]]  # what ``dask_rank.look`` told, by worker


@dataclass(frozen=True)
class Seat:
    """Where a rank is."""

    worker: str
    takes: dict[str, float]  # of the worker's resources
    host: str
    devices: str | None  # CUDA_VISIBLE_DEVICES there


def ask(client: Any, function: Callable[..., Any], *words: Any, **options: Any) -> dict[str, Any]:
    """What ``function`` answers on each worker, beside its tasks; LaunchError where one cannot be asked."""
    try:
        answers: dict[str, Any] = client.run(function, *words, **options)
    except ImportError as error:
        raise LaunchError(
            f"a worker cannot import what it is to run: {error}",
            where=client.scheduler.address,
            hint="install the project, with its extra dask, in the environment of the workers",
        ) from None
    except OSError as error:
        raise LaunchError(f"a worker does not answer: {error}", where=client.scheduler.address) from None
    return answers


def find(client: Any, job: Job, name: str, deadline: float) -> tuple[list[Seat], bool]:
    """Seats by rank, set aside under ``name``, and whether all of them share this machine's disk. Raises LaunchError
    where there are too few by ``deadline`` (of time.monotonic), or where they differ in what they would run."""
    places = _claim(client, job, name, deadline)
    with _marker(job) as marker:
        facts = ask(client, dask_rank.look, marker, workers=sorted({address for address, _ in places}))
    _check_versions(client, facts)
    seats = [Seat(at, takes, facts[at]["host"], facts[at]["devices"]) for at, takes in places]
    # Ranks of one machine in a row, and rank 0 where the GPUs are.
    return sorted(seats, key=lambda seat: ("GPU" not in seat.takes, seat.host, seat.worker)), _shared(job, facts)


def release(client: Any, name: str) -> None:
    """Give what was set aside under ``name`` back."""
    client.run_on_scheduler(reservation.release, name)


def _claim(client: Any, job: Job, name: str, deadline: float) -> list[tuple[str, dict[str, float]]]:
    import cloudpickle  # type: ignore[import-untyped]

    cloudpickle.register_pickle_by_value(reservation)  # the scheduler need not have the project installed
    settings, count = job.settings.dask, job.world_size
    where = client.scheduler.address
    while True:
        try:
            found = client.run_on_scheduler(reservation.claim, name, client.id, count, settings.resources)
        except ValueError as error:
            raise LaunchError(
                f"the scheduler runs no function of ours: {error}", where=where,
                hint="start it with DASK_DISTRIBUTED__SCHEDULER__PICKLE=true, the default",
            ) from None  # fmt: skip
        if found["places"]:
            return list(found["places"])
        if time.monotonic() > deadline:
            asked = f" that have {settings.resources} each" if settings.resources else ""
            seen = "".join(f"\n  {line}" for line in found["seen"]) or " none"
            raise LaunchError(
                f"{count} rank(s) need {count} worker(s) with a free thread{asked}; seen within "
                f"{settings.timeout_s:g} s:{seen}",
                where=where,
                hint="start more workers (dask worker ADDRESS --nthreads 1), or ask for fewer ranks (--nproc N)",
            )
        time.sleep(_PAUSE_S)


@contextmanager
def _marker(job: Job) -> Iterator[str]:
    """A file in the output folder, or here if that is a URL, which those see who share the disk."""
    output = "." if job.url else job.config.output
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=output, prefix=f".{KEYS}") as file:
            yield str(Path(file.name).absolute())
    except OSError as error:
        raise LaunchError(f"a file cannot be written: {error.strerror}", where=output) from None


def _shared(job: Job, facts: _Facts) -> bool:
    wanted = job.settings.dask.shared
    blind = sorted(address for address, fact in facts.items() if not fact["sees"])
    if wanted and blind:
        raise LaunchError(
            f"{', '.join(blind)} cannot see {Path(job.config.output).absolute()}",
            where="launch.dask.shared",
            hint="mount it there, or leave launch.dask.shared out: then files are sent and fetched",
        )
    return not blind if wanted is None else wanted


def _check_versions(client: Any, facts: _Facts) -> None:
    """Ranks of different releases do not compute the same."""
    seen = {address: fact["versions"] for address, fact in facts.items()}
    first = next(iter(seen.values())) | {"harness": __version__}
    for address, versions in seen.items():
        for package, version in versions.items():
            if version != first[package]:
                raise LaunchError(
                    f"{address} has {package} {version}, {'this machine' if package == 'harness' else 'others'} "
                    f"{first[package]}",
                    where=client.scheduler.address,
                    hint="give all workers, and this machine, one environment",
                )
