"""The checks of ``harness doctor``: software, GPUs, limits, network; and their report. A check is a function that
yields findings.

Cores and memory are those that this process may use; in a container they are fewer than the machine has. The checks of
the network send nothing and resolve no name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.distributed import machine
from harness.distributed.network import address_of, interface_towards
from harness.errors import EXIT_DONE, EXIT_USAGE, REINSTALL_TORCH, plural
from harness.version import __version__

DISTRIBUTION = "apex-harness"
MIB, GIB = 2**20, 2**30
_HERE = "127.0.0.1"
Mark = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``note``: training works, but could work better. ``remedies``: commands or settings."""

    check: str
    mark: Mark
    text: str
    remedies: tuple[str, ...] = ()


@dataclass(frozen=True)
class System:
    """Inputs of the checks: environment variables, the root of the file system, the folder to train in."""

    variables: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path("/")
    folder: Path = Path()


Check = Callable[[System], Iterator[Finding]]


def packages(system: System) -> Iterator[Finding]:
    """Yield the packages that setup.cfg requires, checked by their metadata without importing them."""
    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        text = "apex-harness is not installed (it runs from its folder), so its requirements are unknown"
        yield Finding("packages", "note", text, ("python -m pip install -e .",))
        return
    others = set(importlib.metadata.packages_distributions().get("harness", [])) - {DISTRIBUTION}
    for package in sorted(others):
        text = f"{package} installs a package named harness too, so their files overwrite each other"
        yield Finding("packages", "problem", text, (f"python -m pip uninstall {package}", "install apex-harness again"))
    wrong, fine = [], 0
    for name, oldest in (_parse(line) for line in required if ";" not in line):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append((name, oldest, f"{name} is missing"))
            continue
        if _numbers(version) < _numbers(oldest):
            wrong.append((name, oldest, f"{name} {version} is too old (minimum: {oldest})"))
        else:
            fine += 1
    for name, oldest, text in wrong:
        requirement = f"'{name}>={oldest}'" if oldest else name
        yield Finding("packages", "problem", text, (f"python -m pip install {requirement}",))
    if not wrong:
        yield Finding("packages", "ok", f"all {fine} required packages are installed")


def extras(system: System) -> Iterator[Finding]:
    """Yield which extras of setup.cfg are complete: pip only warns of one that does not exist."""
    installed: dict[str, bool] = {}
    with suppress(importlib.metadata.PackageNotFoundError):  # as ``packages`` says
        for line in importlib.metadata.requires(DISTRIBUTION) or []:
            if extra := re.search(r"extra == ['\"]([\w-]+)", line):
                is_there = any(importlib.metadata.distributions(name=_parse(line)[0]))
                installed[extra[1]] = installed.get(extra[1], True) and is_there
    present, absent = (", ".join(name for name in installed if installed[name] is there) for there in (True, False))
    text = f"installed: {present or 'none'}; not installed: {absent or 'none'}" if installed else "unknown"
    yield Finding("extras", "ok", text)


def torch(system: System) -> Iterator[Finding]:
    """Yield the versions of torch and torchvision, or why one of them cannot be imported."""
    for name in ("torch", "torchvision"):
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:  # a library is missing; built for another torch
            yield Finding("torch", "problem", f"{name} cannot be imported: {error}", (REINSTALL_TORCH,))
            return
        yield Finding("torch", "ok", f"{name} {module.__version__}")


def _parse(requirement: str) -> tuple[str, str]:
    """Return ("torch", "2.6") from "torch>=2.6"; an empty version if there is no minimum."""
    match = re.match(r"\s*([\w.-]+)[^>]*(?:>=\s*([\w.]+))?", requirement)
    return (match.group(1), match.group(2) or "") if match else (requirement, "")


def _numbers(version: str) -> list[int]:
    """Return [2, 6, 1] from "2.6.1+cu121"; trailing zeros are removed."""
    numbers = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


# Apex: identified from files and metadata, because importing PyPI's apex fails

_SCRIPTS = "python -m harness.apex SCRIPT ARGS  # runs scripts that use `from apex import amp` unmodified"


def apex(system: System) -> Iterator[Finding]:
    """Yield the ``apex`` that an import would find."""
    if getattr(sys.modules.get("apex"), "__harness__", False):
        yield Finding("apex", "ok", "harness.apex itself, through harness.apex.install()")
        return
    try:
        spec = importlib.util.find_spec("apex")
    except (ImportError, ValueError):  # partly imported, without a spec
        spec = None
    if spec is None:
        yield Finding("apex", "ok", "not installed, and not needed")
        return
    folder = Path(next(iter(spec.submodule_search_locations or []), spec.origin or ""))
    try:
        distribution = importlib.metadata.distribution("apex")
        version, requirements = distribution.version, " ".join(distribution.requires or []).lower()
    except importlib.metadata.PackageNotFoundError:
        version, requirements = "of unknown version", ""
    if (folder / "amp").is_dir() and (folder / "parallel").is_dir():
        yield Finding("apex", "ok", f"Apex {version}, in {folder}")
    elif "pyramid" in requirements:
        text = f"PyPI's apex {version}: a toolkit for the Pyramid web framework, which cannot be imported"
        yield Finding("apex", "problem", text, ("python -m pip uninstall apex", _SCRIPTS))
    else:
        text = f"apex {version}, in {folder}, has no amp and parallel, which NVIDIA removed after 25.05"
        yield Finding("apex", "note", text, (_SCRIPTS,))


# GPUs


def cuda(system: System) -> Iterator[Finding]:
    """Yield the CUDA devices, or why there are none."""
    import torch

    from harness.distributed import devices, no_cuda
    from harness.distributed.no_cuda import Reason

    marks: dict[Reason, Mark] = {Reason.NO_DRIVER: "ok", Reason.NO_DEVICE: "note", Reason.HIDDEN: "note"}
    count, warning = devices.count_devices()
    if count:
        built, driver = no_cuda.built_for(torch.version), no_cuda.driver_version(system.root)
        yield Finding(
            "cuda", "ok", f"{plural(count, 'device')}; torch is built for {built or 'the CPU only'}, driver {driver}"
        )
        for index in range(count):
            yield _device(torch.cuda, index)
    else:
        cause = no_cuda.why_none(warning, system.variables, system.root)
        then = "does not start" if cause.reason is Reason.BROKEN else "runs on the CPU"
        text = f"{cause.text}: training {then}"
        yield Finding("cuda", marks.get(cause.reason, "problem"), text, cause.remedies)


def _device(torch_cuda: Any, index: int) -> Finding:
    """Return what the device ``index`` is, and whether this torch has code for it."""
    from harness.distributed.no_cuda import PREVIOUS_VERSIONS

    device = torch_cuda.get_device_properties(index)
    capability = f"compute capability {device.major}.{device.minor}"
    text = f"cuda:{index} {device.name}, {device.total_memory / GIB:.1f} GiB, {capability}"
    architectures = torch_cuda.get_arch_list()
    if architectures and not _runs_on(device.major, device.minor, architectures):
        text += f", for which this torch has no kernels ({' '.join(architectures)})"
        return Finding("cuda", "problem", text, (f"install another build: {PREVIOUS_VERSIONS}",))
    return Finding("cuda", "ok", text)


def _runs_on(major: int, minor: int, architectures: list[str]) -> bool:
    """Return True if a device runs code for one of ``architectures``. Binaries run on their major version with an equal
    or higher minor; ``compute_`` code on any newer device."""
    for kind, number in re.findall(r"(sm|compute)_(\d+)", " ".join(architectures)):
        version = (int(number[:-1]), int(number[-1]))
        if version <= (major, minor) and (kind == "compute" or version[0] == major):
            return True
    return any(architecture.startswith("gfx") for architecture in architectures)  # AMD: torch checks this itself


# Limits


def cpu(system: System) -> Iterator[Finding]:
    """Yield the cores that this process may use, and the threads that compete for them."""
    import torch

    present = os.cpu_count() or 1
    usable, quota = machine.usable_cores(system.root), machine.cpu_quota(system.root)
    threads = torch.get_num_threads()
    limited = f" (the cgroup limits CPU use to {quota:g} of them)" if quota and quota < present else ""
    text = f"usable cores: {usable} of {present}{limited}; torch uses {plural(threads, 'thread')}"
    if threads > usable:
        yield Finding("cpu", "note", f"{text}, which will compete for them", (f"export OMP_NUM_THREADS={usable}",))
    else:
        yield Finding("cpu", "ok", text)


def memory(system: System) -> Iterator[Finding]:
    """Yield the memory that this process may use."""
    total, free, limited_by_cgroup = machine.memory(system.root)
    limited = " (limit of the cgroup)" if limited_by_cgroup else ""
    text = f"{total / GIB:.1f} GiB{limited}, {free / GIB:.1f} GiB free"
    if free < GIB:
        remedies = ("stop other processes, or raise the container's limit (docker run --memory=…)",)
        yield Finding("memory", "problem" if free < 256 * MIB else "note", text, remedies)
    else:
        yield Finding("memory", "ok", text)


def shared_memory(system: System) -> Iterator[Finding]:
    """Yield the size of /dev/shm, through which loader workers pass batches. Docker gives it 64 MiB by default."""
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
    text = f"/dev/shm has {usage.total / GIB:.2f} GiB, {usage.free / GIB:.2f} GiB free"
    plan = "harness check -c CONFIG --world RANKS  # what a run needs"
    more = ("docker run --shm-size=8g …; in Kubernetes, an emptyDir with medium: Memory at /dev/shm", without)
    if usage.free < 16 * MIB:
        clean = "ls -l /dev/shm  # then delete the files that killed processes left behind"
        yield Finding("shared_memory", "problem", f"{text}; most runs will fail", (clean, *more))
    elif usage.free < GIB:
        yield Finding("shared_memory", "note", text, (plan, *more))
    else:
        yield Finding("shared_memory", "ok", text)


def folder(system: System) -> Iterator[Finding]:
    """Yield whether the working folder, in which runs are created unless ``output`` is set, has space."""
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
        enough_for = "not enough for one checkpoint" if short else "enough for only a few checkpoints"
        text += f", {enough_for} of a large model"
        remedies = (elsewhere, "checkpoint.keep=1")
        yield Finding("folder", "problem" if short else "note", text, remedies)
    else:
        yield Finding("folder", "ok", text)


# Network


def network(system: System) -> Iterator[Finding]:
    """Yield the interface that ranks would use, and the variable that overrides it."""
    one_node, several = interface_towards(_HERE), interface_towards(_HERE, outward=True)
    present = [name for _, name in socket.if_nameindex()]
    if several is None:
        yield Finding("network", "ok", "cannot determine on this system which interface ranks would use")
    elif several == one_node:
        text = f"only the loopback interface {several}: ranks on other nodes cannot connect"
        yield Finding("network", "note", text, ("docker run --network=host …, to train on several nodes",))
    else:
        text = f"ranks on one node connect over {one_node}, on several nodes over {several} ({address_of(several)})"
        yield Finding("network", "ok", text)
    names = system.variables.get("GLOO_SOCKET_IFNAME", "").split(",")
    if unknown := [name for name in names if name and name not in present]:
        text = f"GLOO_SOCKET_IFNAME names {', '.join(unknown)}, but the interfaces are {', '.join(present)}"
        yield Finding("network", "problem", text, ("unset GLOO_SOCKET_IFNAME",))


CHECKS: list[Check] = [packages, extras, torch, apex, cuda, cpu, memory, shared_memory, folder, network]

TIMEOUT_S = 60.0  # per check; importing torch from a cold network file system takes long


# The report


def environment(system: System) -> Iterator[Finding]:
    """Yield what a bug report needs. It takes seconds, so only the JSON has it."""
    from torch.utils import collect_env

    yield Finding("environment", "ok", str(collect_env.get_pretty_env_info()))


def main(environ: Mapping[str, str], as_json: bool, checks: Sequence[Check] = CHECKS) -> int:
    """Print the report; return 2 if there is a problem, otherwise 0."""
    checks = [*checks, environment] if as_json else checks
    findings = [finding for check in checks for finding in run_check(check, System(environ), TIMEOUT_S)]
    problems, notes = (sum(finding.mark == mark for finding in findings) for mark in ("problem", "note"))
    header = {"harness": __version__, "host": platform.node(), "system": platform.platform()}
    if as_json:
        report = {**header, "problems": problems, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=2))
    else:
        print(f"apex-harness {header['harness']} on {header['host']} ({header['system']})\n")
        width = max((len(finding.check) for finding in findings), default=0)
        for finding in findings:
            print(f"{finding.mark:<7}  {finding.check:<{width}}  {finding.text}")
            for remedy in finding.remedies:
                print(f"{'':<7}  {'':<{width}}    -> {remedy}")
        print(f"\n{f'Problems: {problems}.' if problems else 'Ready to train.'} Notes: {notes}.")
    return EXIT_USAGE if problems else EXIT_DONE


def run_check(check: Check, system: System, timeout_s: float) -> list[Finding]:
    """Return the findings of ``check``; a check that fails, or does not finish in time, adds a finding of its own.

    A driver or a mount may hang, so the check runs in a thread. A check that cannot import a package is only a note,
    because the check of packages reports the problem.
    """
    name, findings, failure = check.__name__, list[Finding](), list[BaseException]()

    def collect() -> None:
        try:
            findings.extend(check(system))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=collect, name=f"doctor-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        remedy = "check whether the driver (nvidia-smi), a file system (df) or an import hangs"
        return [*findings, Finding(name, "problem", f"no answer within {timeout_s:g} s", (remedy,))]
    if failure:
        missing = isinstance(failure[0], ImportError)
        text = f"the check failed: {type(failure[0]).__name__}: {failure[0]}"
        return [*findings, Finding(name, "note" if missing else "problem", text)]
    return findings
