"""Cores and GPUs of this machine, taken by trials and given back, never more than exist."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.config.schema import Config
from harness.distributed.machine import cpu_quota, usable_cores
from harness.errors import plural


@dataclass(frozen=True)
class Machine:
    """Cores and GPUs of a machine. ``gpus``: names as in CUDA_VISIBLE_DEVICES."""

    cores: int
    gpus: tuple[str, ...] = ()

    @classmethod
    def this(cls, visible: str | None) -> Machine:
        """Return what this process may use of this machine. ``visible``: CUDA_VISIBLE_DEVICES, None if not set."""
        from harness.distributed import devices

        cores, quota = usable_cores(), cpu_quota(Path("/"))
        if quota:
            cores = max(1, min(cores, int(quota)))  # whole ones
        names = [name.strip() for name in (visible or "").split(",") if name.strip()]
        count, _ = devices.count_devices()
        return cls(cores, tuple(names[:count]) if names else tuple(map(str, range(count))))


@dataclass(frozen=True)
class Need:
    """Cores and GPUs that a trial takes while it runs."""

    cores: int = 0
    gpus: int = 0

    def lacks(self, machine: Machine) -> str:
        """Return the reason why ``machine`` can never run it; empty if it can."""
        if self.gpus > len(machine.gpus):
            return f"{plural(self.gpus, 'GPU')} needed, but the machine has {len(machine.gpus)}"
        if self.cores > machine.cores:
            needed = f"{plural(self.cores, 'core')} needed (launch.nproc x launch.threads)"
            return f"{needed}, but the machine has {machine.cores}"
        return ""


def needed(config: Config, machine: Machine) -> Need:
    """Return a GPU per rank if it trains on GPUs, else a core per thread; nothing if it runs on other machines."""
    if not is_here(config):
        return Need()
    launch, device = config.launch, config.runtime.device
    if device == "cuda" or (device == "auto" and machine.gpus):
        return Need(gpus=launch.nproc)
    return Need(cores=launch.nproc * launch.threads)


def is_here(config: Config) -> bool:
    """Return True if its ranks run on this machine. Elsewhere another scheduler limits how many run at once."""
    launch = config.launch
    return launch.engine in ("local", "torchrun") or (
        launch.engine == "dask" and launch.engine_settings.scheduler is None
    )


@dataclass(frozen=True)
class Grant:
    """Resources of one trial, its own until they are given back."""

    cores: int
    gpus: tuple[str, ...]


class Slots:
    """The free resources of a machine."""

    def __init__(self, machine: Machine, most: int) -> None:
        """Grant at most ``most`` trials of any size at once."""
        self._machine = machine
        self._free_cores = machine.cores
        self._free_gpus = list(machine.gpus)
        self._free_places = most

    @property
    def full(self) -> bool:
        """Whether all places, cores or GPUs are taken. Where needs differ, a trial that would still fit waits, too:
        which need the next one has is not known before it is drawn."""
        no_gpu = bool(self._machine.gpus) and not self._free_gpus
        return self._free_places < 1 or self._free_cores < 1 or no_gpu

    def take(self, wanted: Need) -> Grant | None:
        """Take ``wanted``; None while it is not free."""
        if self._free_places < 1 or wanted.cores > self._free_cores or wanted.gpus > len(self._free_gpus):
            return None
        gpus, self._free_gpus = self._free_gpus[: wanted.gpus], self._free_gpus[wanted.gpus :]
        self._free_places -= 1
        self._free_cores -= wanted.cores
        return Grant(wanted.cores, tuple(gpus))

    def give_back(self, grant: Grant) -> None:
        self._free_places += 1
        self._free_cores += grant.cores
        self._free_gpus += grant.gpus
