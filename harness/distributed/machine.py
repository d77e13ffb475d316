"""What this machine lets a process use: cores and memory; in a container they are fewer than the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path

_NO_LIMIT_BYTES = 2**60  # cgroup v1 expresses "no limit" by a number of about this size


def memory_of(root: Path = Path("/")) -> tuple[int, int, bool]:
    """Return (total bytes, free bytes, True if a cgroup sets the total). ``root`` is the root of the file system."""
    total, free = _memory(root)
    limit, used = memory_limit(root)
    if limit is not None and limit < total:
        total, free = limit, min(free, limit - used)
    return total, free, limit == total


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return min(allowed, math.ceil(quota)) if quota else allowed


def cpu_quota(root: Path) -> float | None:
    """CPU time that the cgroups of this process allow, in cores; None without a limit."""
    quotas = []
    for text in _cgroup(root, "cpu", "cpu.max"):
        allowed, _, period = text.partition(" ")
        if allowed != "max":
            quotas.append(int(allowed) / int(period or 100000))
    periods = _cgroup(root, "cpu", "cpu.cfs_period_us")
    for text, period in zip(_cgroup(root, "cpu", "cpu.cfs_quota_us"), periods, strict=False):
        if int(text) > 0:
            quotas.append(int(text) / int(period))
    return min(quotas, default=None)


def memory_limit(root: Path) -> tuple[int | None, int]:
    """Return (bytes that the cgroups of this process allow, or None; bytes in use)."""
    limits = [*_cgroup(root, "memory", "memory.max"), *_cgroup(root, "memory", "memory.limit_in_bytes")]
    numbers = [int(limit) for limit in limits if limit != "max" and int(limit) < _NO_LIMIT_BYTES]
    used = [*_cgroup(root, "memory", "memory.current"), *_cgroup(root, "memory", "memory.usage_in_bytes")]
    return min(numbers, default=None), max(map(int, used), default=0)


def _cgroup(root: Path, controller: str, name: str) -> list[str]:
    """Contents of the file ``name`` in this process's cgroup and all its parents, for cgroup versions 1 and 2."""
    found = []
    own = root / "proc/self/cgroup"
    for line in own.read_text(encoding="utf-8").splitlines() if own.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = top / path.strip("/")  # may be invisible in a container, unlike its parents
        for each in [group, *group.parents]:
            if (each / name).is_file():
                found.append((each / name).read_text(encoding="utf-8").strip())
            if each == top:
                break
    return found


def _memory(root: Path) -> tuple[int, int]:
    """Return (total, free) bytes of the machine; page cache that can be dropped counts as free."""
    info = root / "proc/meminfo"
    if info.is_file():
        kib = {line.split(":")[0]: int(line.split()[1]) for line in info.read_text(encoding="utf-8").splitlines()}
        return kib["MemTotal"] * 1024, kib.get("MemAvailable", kib.get("MemFree", 0)) * 1024
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total  # macOS does not report free memory this way
