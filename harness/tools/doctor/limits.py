"""Cores, memory and files that this process may use; in a container they are fewer than the machine has."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

from harness.distributed.machine import cpu_quota, memory_of, usable_cores
from harness.errors import plural
from harness.tools.doctor.findings import Finding, System

MIB, GIB = 2**20, 2**30


def cpu(system: System) -> Iterator[Finding]:
    import torch

    present = os.cpu_count() or 1
    usable, quota = usable_cores(system.root), cpu_quota(system.root)
    threads = torch.get_num_threads()
    text = f"usable cores: {usable} of {present}"
    text += f" (the cgroup limits CPU use to {quota:g} of them)" if quota and quota < present else ""
    text += f"; torch uses {plural(threads, 'thread')}"
    if threads > usable:
        yield Finding("cpu", "note", f"{text}, which will compete for them", (f"export OMP_NUM_THREADS={usable}",))
    else:
        yield Finding("cpu", "ok", text)


def memory(system: System) -> Iterator[Finding]:
    total, free, limited_by_cgroup = memory_of(system.root)
    limited = " (limit of the cgroup)" if limited_by_cgroup else ""
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
        f"/dev/shm has {usage.total / GIB:.2f} GiB, {usage.free / GIB:.2f} GiB free: space for "
        f"{plural(image_batches, 'batch')} of 64 images of 224 x 224 (each loader worker of each rank keeps 2)"
    )
    plan = "harness check -c CONFIG --world RANKS  # what a run needs"
    more = ("docker run --shm-size=8g …; in Kubernetes, an emptyDir with medium: Memory at /dev/shm", without)
    if usage.free < 16 * MIB:
        clean = "ls -l /dev/shm  # then delete the files that killed processes left behind"
        yield Finding("shared_memory", "problem", f"{text}; most runs will fail", (clean, *more))
    elif usage.free < GIB:
        yield Finding("shared_memory", "note", text, (plan, *more))
    else:
        yield Finding("shared_memory", "ok", text)


def open_files(system: System) -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_files(soft)} may be open at once"
    text += f" (ulimit -n can raise this to {_files(hard)})" if hard != soft else ""
    if soft != resource.RLIM_INFINITY and soft < 1024:
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
        yield Finding("open_files", "note", f"{text}, often too few for data loader workers", (f"ulimit -n {wanted}",))
    else:
        yield Finding("open_files", "ok", text)


def _files(limit: int) -> str:
    return "any number of files" if limit < 0 or limit > 2**40 else f"{limit} files"


def folder(system: System) -> Iterator[Finding]:
    """Run folders are created in the working folder unless ``output`` is set."""
    where = system.folder.resolve()
    elsewhere = "output=/folder/on/a/larger/disk  # add this to harness train -c CONFIG"
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
        text += (
            f", {'not enough for one checkpoint' if short else 'enough for only a few checkpoints'} of a large model"
        )
        remedies = (elsewhere, "checkpoint.keep=1")
        yield Finding("folder", "problem" if short else "note", text, remedies)
    else:
        yield Finding("folder", "ok", text)
