"""What this machine lets a process use: cores and memory; in a container they are fewer than the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

_NO_LIMIT_BYTES = 2**60  # cgroup v1 expresses "no limit" by a number of about this size


class Memory(NamedTuple):
    """Bytes that a process may use, all of them and the free ones."""

    total: int
    free: int
    limited_by_cgroup: bool = False


def memory(root: Path = Path("/")) -> Memory:
    """Return the memory of this machine, or what a cgroup leaves of it. ``root`` is the root of the file system."""
    total, free = _memory(root)
    limits = memory_limits(root)
    least = min((limit for limit, _ in limits), default=total)
    free = max(min([free, *(unused for _, unused in limits)]), 0)
    return Memory(min(total, least), free, least < total)


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return min(allowed, math.ceil(quota)) if quota else allowed


def cpu_quota(root: Path) -> float | None:
    """Return the CPU time that the cgroups of this process allow, in cores; None without a limit."""
    quotas = []
    for group in _cgroups(root, "cpu"):
        allowed, _, period = _text(group / "cpu.max").partition(" ")
        allowed = allowed or _text(group / "cpu.cfs_quota_us")
        period = period or _text(group / "cpu.cfs_period_us")
        if allowed.isdecimal():  # not "max", or -1
            quotas.append(int(allowed) / int(period or 100000))
    return min(quotas, default=None)


def run_queue_s(path: str = "/proc/self/schedstat") -> float:
    """Return the seconds that a thread, by default the main one of this process, was ready to run but had no core; 0 if
    the thread has ended or the system does not count them."""
    try:
        with open(path, "rb", buffering=0) as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def memory_limits(root: Path) -> list[tuple[int, int]]:
    """Return (bytes that it allows, bytes of them that are free) of each cgroup of this process that has a limit.
    Cached files count as free: the system drops them before it refuses memory."""
    limits = []
    for group in _cgroups(root, "memory"):
        limit = _text(group / "memory.max") or _text(group / "memory.limit_in_bytes")
        used = _text(group / "memory.current") or _text(group / "memory.usage_in_bytes")
        if limit.isdecimal() and int(limit) < _NO_LIMIT_BYTES:
            limits.append((int(limit), int(limit) - max(int(used or 0) - _cached(group), 0)))
    return limits


def _cached(group: Path) -> int:
    """Return the bytes of cached files of a cgroup and its children."""
    statistics = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines())
    names = ("inactive_file", "active_file")
    # Version 1 counts the children under other names.
    return sum(int(statistics.get(f"total_{name}", statistics.get(name, 0))) for name in names)


def _text(file: Path) -> str:
    """Return the content of a file of a cgroup; empty if there is none."""
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and all its parents, for cgroup versions 1 and 2."""
    groups = []
    membership = root / "proc/self/cgroup"
    for line in membership.read_text(encoding="utf-8").splitlines() if membership.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = top / path.strip("/")  # may be invisible in a container, unlike its parents
        for folder in [group, *group.parents]:
            groups.append(folder)
            if folder == top:
                break
    return groups


def _memory(root: Path) -> tuple[int, int]:
    """Return (total, free) bytes of the machine; page cache that can be dropped counts as free."""
    info = root / "proc/meminfo"
    if info.is_file():
        kib = {line.split(":")[0]: int(line.split()[1]) for line in info.read_text(encoding="utf-8").splitlines()}
        return kib["MemTotal"] * 1024, kib.get("MemAvailable", kib.get("MemFree", 0)) * 1024
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total  # macOS does not report free memory this way
