"""Cores, memory and files that this process may use; in a container they are fewer than the machine has."""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.doctor.findings import Finding, System

MIB, GIB = 2**20, 2**30
_NO_LIMIT_BYTES = 2**60  # cgroup v1 expresses "no limit" by a number of about this size


def cpu(system: System) -> Iterator[Finding]:
    import torch

    present = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    quota = cpu_quota(system.root)
    usable = min(allowed, math.ceil(quota)) if quota else allowed
    threads = torch.get_num_threads()
    text = f"{usable} of {present} cores are usable"
    text += f" (the cgroup allows the time of {quota:g} cores)" if quota and quota < allowed else ""
    text += f"; torch uses {threads} thread{'s' if threads > 1 else ''}"
    if threads > usable:
        yield Finding("cpu", "note", f"{text}, which will compete for them", (f"export OMP_NUM_THREADS={usable}",))
    else:
        yield Finding("cpu", "ok", text)


def memory(system: System) -> Iterator[Finding]:
    total, free = _memory(system.root)
    limit, used = memory_limit(system.root)
    if limit is not None and limit < total:
        total, free = limit, min(free, limit - used)
    limited = " (limit of the cgroup)" if limit == total else ""
    text = f"{total / GIB:.1f} GiB{limited}, {max(free, 0) / GIB:.1f} GiB free"
    if free < GIB:
        remedies = ("stop other processes, or raise the container's limit (docker run --memory=…)",)
        yield Finding("memory", "problem" if free < 256 * MIB else "note", text, remedies)
    else:
        yield Finding("memory", "ok", text)


def shared_memory(system: System) -> Iterator[Finding]:
    """Data loader workers pass batches to the rank through /dev/shm, which has 64 MiB in Docker by default."""
    if not sys.platform.startswith("linux"):
        yield Finding("shared_memory", "ok", "not limited on this system")
        return
    without = "data.num_workers=0  # loads data in the training process, without shared memory"
    try:
        usage = shutil.disk_usage(system.root / "dev/shm")
    except OSError:
        text = "/dev/shm does not exist, but data loader workers need it"
        yield Finding("shared_memory", "problem", text, ("mount -t tmpfs shm /dev/shm", without))
        return
    # Each worker of each rank keeps two batches ready (harness.data.loader_workers.PREFETCH).
    image_batches = usage.free // (64 * 224 * 224 * 3)
    text = (
        f"/dev/shm has {usage.total / GIB:.2f} GiB, {usage.free / GIB:.2f} GiB free: space for {image_batches} batches "
        "of 64 images of 224 x 224, of which each loader worker of each rank keeps 2"
    )
    plan = "harness check -c CONFIG --world RANKS  # what a run needs"
    more = ("docker run --shm-size=8g …; in Kubernetes an emptyDir of medium Memory at /dev/shm", without)
    if usage.free < 16 * MIB:
        clean = "ls -l /dev/shm  # delete files of killed processes"
        yield Finding("shared_memory", "problem", f"{text}; most runs will fail", (clean, *more))
    elif usage.free < GIB:
        yield Finding("shared_memory", "note", text, (plan, *more))
    else:
        yield Finding("shared_memory", "ok", text)


def open_files(system: System) -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_files(soft)} may be open at once (ulimit -n can raise this to {_files(hard)})"
    if soft != resource.RLIM_INFINITY and soft < 1024:
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
        yield Finding("open_files", "note", f"{text}: few for data loader workers", (f"ulimit -n {wanted}",))
    else:
        yield Finding("open_files", "ok", text)


def _files(limit: int) -> str:
    return "any number of files" if limit < 0 or limit > 2**40 else f"{limit} files"


def folder(system: System) -> Iterator[Finding]:
    """Run folders are created in the working folder unless ``output`` is set."""
    where = system.folder.resolve()
    elsewhere = "output=/a/folder/with/space  # after driver.py -c CONFIG"
    try:
        with tempfile.TemporaryFile(dir=where) as probe:
            probe.write(b"harness")
        free = shutil.disk_usage(where).free
    except OSError as error:
        text = f"{where} is not writable: {error.strerror}"
        yield Finding("folder", "problem", text, (elsewhere, "cd to a writable folder"))
        return
    text = f"{where} is writable and has {free / GIB:.1f} GiB free"
    if free < 5 * GIB:
        short = free < 200 * MIB
        text += f": space for {'no' if short else 'few'} checkpoints of a large model"
        remedies = (elsewhere, "checkpoint.keep=1")
        yield Finding("folder", "problem" if short else "note", text, remedies)
    else:
        yield Finding("folder", "ok", text)


# Limits of the kernel


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
    """(bytes that the cgroups of this process allow, or None; bytes in use)."""
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
    """(total, free) bytes of the machine; page cache that can be dropped counts as free."""
    info = root / "proc/meminfo"
    if info.is_file():
        kib = {line.split(":")[0]: int(line.split()[1]) for line in info.read_text(encoding="utf-8").splitlines()}
        return kib["MemTotal"] * 1024, kib.get("MemAvailable", kib.get("MemFree", 0)) * 1024
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total  # macOS does not report free memory this way
