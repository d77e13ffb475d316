"""Finding workers for the ranks of a run: free, able to see the same files or not, and running the same versions."""

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
from harness.engines.dask import worker as on_worker
from harness.engines.dask.reservation import KEYS
from harness.errors import LaunchError, plural, reason, remedy
from harness.version import __version__

_PAUSE_S = 0.5  # between two attempts to reserve workers
_Facts = Mapping[str, Mapping[str, Any]]  # the answers of ``worker.describe``, by worker


@dataclass(frozen=True)
class Placement:
    """The place of a rank: its worker and machine."""

    worker: str
    takes: dict[str, float]  # of the worker's resources
    host: str
    devices: str | None  # CUDA_VISIBLE_DEVICES there


def call(client: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
    """Call ``function`` on workers, next to their tasks; return its results by worker. Raises LaunchError."""
    try:
        answers: dict[str, Any] = client.run(function, *arguments, **options)
    except ImportError as error:
        raise LaunchError(
            f"a worker cannot import the harness: {error}",
            where=client.scheduler.address,
            hint="install the project with its dask extra in the workers' environment",
        ) from None
    except OSError as error:
        hint = "check that every worker is running and can be reached, then run the same command again"
        raise LaunchError(f"a worker does not answer: {error}", where=client.scheduler.address, hint=hint) from None
    return answers


def find(client: Any, job: Job, name: str, deadline: float) -> tuple[list[Placement], bool]:
    """Reserve workers under ``name``. Returns placements by rank, and whether all workers share this machine's disk.
    Raises LaunchError if too few are free by ``deadline`` (of time.monotonic), or if their versions differ."""
    places = _reserve(client, job, name, deadline)
    with _marker(job) as marker:
        facts = call(client, on_worker.describe, marker, workers=sorted({address for address, _ in places}))
    _check_versions(client, facts)
    found = [Placement(at, takes, facts[at]["host"], facts[at]["devices"]) for at, takes in places]
    # The ranks of a machine follow each other, and rank 0 has a GPU if there is one.
    found.sort(key=lambda placement: ("GPU" not in placement.takes, placement.host, placement.worker))
    return found, _shared(job, facts)


def release(client: Any, name: str) -> None:
    """Give the workers reserved under ``name`` back."""
    client.run_on_scheduler(reservation.release, name)


def _reserve(client: Any, job: Job, name: str, deadline: float) -> list[tuple[str, dict[str, float]]]:
    import cloudpickle  # type: ignore[import-untyped]

    cloudpickle.register_pickle_by_value(reservation)  # the scheduler need not have the project installed
    settings, count = job.settings.engine_settings, job.world_size
    where = client.scheduler.address
    while True:
        try:
            found = client.run_on_scheduler(reservation.reserve, name, client.id, count, settings.resources)
        except ValueError as error:
            raise LaunchError(
                f"the scheduler refuses to run a function of the harness: {error}", where=where,
                hint="start it with DASK_DISTRIBUTED__SCHEDULER__PICKLE=true, the default",
            ) from None  # fmt: skip
        if found["places"]:
            return list(found["places"])
        if time.monotonic() > deadline:
            asked = f" and resources {settings.resources}" if settings.resources else ""
            seen = "".join(f"\n  {line}" for line in found["seen"]) or " none"
            raise LaunchError(
                f"the run needs {plural(count, 'worker')} with a free thread{asked}, one per rank; seen within "
                f"{settings.timeout_s:g} s:{seen}",
                where=where,
                hint="start more workers (dask worker ADDRESS --nthreads 1), or request fewer ranks (--nproc N)",
            )
        time.sleep(_PAUSE_S)


@contextmanager
def _marker(job: Job) -> Iterator[str]:
    """A file in the output folder (the current one if the output is a URL): workers that share the disk see it."""
    output = "." if job.url else job.config.output
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=output, prefix=f".{KEYS}") as file:
            yield str(Path(file.name).absolute())
    except OSError as error:
        raise LaunchError(f"a file cannot be written: {reason(error)}", where=output, hint=remedy(error)) from None


def _shared(job: Job, facts: _Facts) -> bool:
    wanted = job.settings.engine_settings.shared
    blind = sorted(address for address, fact in facts.items() if not fact["sees"])
    if wanted and blind:
        raise LaunchError(
            f"{', '.join(blind)} cannot see {Path(job.config.output).absolute()}",
            where="launch.dask.shared",
            hint="mount it there, or remove launch.dask.shared, so that files are copied",
        )
    return not blind if wanted is None else wanted


def _check_versions(client: Any, facts: _Facts) -> None:
    """Raise LaunchError if versions differ: the ranks would not compute the same."""
    seen = {address: fact["versions"] for address, fact in facts.items()}
    first = next(iter(seen.values())) | {"harness": __version__}
    for address, versions in seen.items():
        for package, version in versions.items():
            if version != first[package]:
                raise LaunchError(
                    f"{address} has {package} {version}, {'this machine' if package == 'harness' else 'others'} "
                    f"{first[package]}",
                    where=client.scheduler.address,
                    hint="use one environment for all workers and this machine",
                )
