"""The findings of the doctor on simulated machines: folders as file systems, replaced answers of torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import threading
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from harness import cli
from harness.distributed import machine
from harness.tools.doctor import checks
from harness.tools.doctor.checks import Finding, System, run_check

GIB, MIB = 2**30, 2**20
Usage = namedtuple("Usage", "total used free")  # noqa: PYI024


def found(check, system=None) -> list[Finding]:
    return list(check(system or System()))


def only(check, system=None) -> Finding:
    (finding,) = found(check, system)
    assert finding.check == check.__name__
    return finding


def write(root, files: dict[str, str]) -> System:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return System(root=root)


# The report


def test_report_on_this_machine(capsys, monkeypatch):
    version = f"PyTorch version: {torch.__version__}"  # the whole list takes seconds
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: version)
    code = cli.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"harness", "host", "system", "problems", "findings"}
    problems = [finding for finding in report["findings"] if finding["mark"] == "problem"]
    assert report["problems"] == len(problems)
    assert code == (2 if problems else 0)
    assert all(finding["remedies"] for finding in problems)
    names = {finding["check"] for finding in report["findings"]}
    assert names == {check.__name__ for check in checks.CHECKS} | {"environment"}
    assert report["findings"][-1]["text"] == version
    assert not any("the check failed" in finding["text"] for finding in report["findings"])


def note(system):
    yield Finding("note", "note", "it could be better", ("type this",))


def problem(system):
    yield Finding("problem", "problem", f"with {system.variables['NAME']}")


def test_text_and_exit_code(capsys):
    assert checks.main({}, False, [note]) == 0
    assert capsys.readouterr().out.endswith("\nReady to train. Notes: 1.\n")
    assert checks.main({"NAME": "x"}, False, [note, problem]) == 2
    assert capsys.readouterr().out.splitlines()[2:] == [
        "note     note     it could be better",
        "                    -> type this",
        "problem  problem  with x",
        "",
        "Problems: 1. Notes: 1.",
    ]


def test_check_that_fails_adds_a_finding():
    def broken(system):
        yield Finding("broken", "ok", "so far")
        raise ValueError("no such thing")

    def exits(system):
        raise SystemExit(3)
        yield

    def lacks(system):
        raise ImportError("no torch")
        yield

    findings = [finding for check in (broken, exits, lacks) for finding in run_check(check, System(), 60)]
    assert [(f.check, f.mark) for f in findings] == [
        ("broken", "ok"), ("broken", "problem"), ("exits", "problem"), ("lacks", "note"),
    ]  # fmt: skip
    assert findings[1].text == "the check failed: ValueError: no such thing"


def test_check_that_hangs_adds_a_finding():
    release = threading.Event()

    def hangs(system):
        yield Finding("hangs", "ok", "at first")
        release.wait(20)
        yield Finding("hangs", "ok", "too late")

    first, second = run_check(hangs, System(), timeout_s=0.05)
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "doctor-hangs"] == [True]
    release.set()
    assert first.text == "at first"
    assert (second.mark, second.text) == ("problem", "no answer within 0.05 s")


# Software


def test_packages(monkeypatch):
    versions = {"torch": "2.5+cu121", "numpy": "2", "pyarrow": "14.0.1"}
    required = ["torch>=2.5.1", "numpy>=2.0.0", "pyarrow>=14", "pandas", "pytest; extra == 'test'"]

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    owners: dict[str, list[str]] = {}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: owners)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert [(finding.mark, finding.text, finding.remedies) for finding in found(checks.packages)] == [
        ("problem", "torch 2.5+cu121 is too old (minimum: 2.5.1)", ("python -m pip install 'torch>=2.5.1'",)),
        ("problem", "pandas is missing", ("python -m pip install pandas",)),
    ]
    versions |= {"torch": "2.10.0", "pandas": "1"}
    assert only(checks.packages) == Finding("packages", "ok", "all 4 required packages are installed")

    owners["harness"] = ["apex-harness", "harness"]
    hidden, _ = found(checks.packages)
    assert (hidden.mark, hidden.remedies[0]) == ("problem", "python -m pip uninstall harness")

    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", unknown)
    assert only(checks.packages).mark == "note"
    assert only(checks.extras).text == "unknown"


def test_extras(monkeypatch):
    required = ["numpy>=2", "pytest; extra == 'a'", "pytest>=1; extra == 'b'", 'not-there[x]>=2; extra == "b"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    assert only(checks.extras) == Finding("extras", "ok", "installed: a; not installed: b")


@pytest.mark.parametrize("name", ["torch", "torchvision"])
def test_torch_that_cannot_be_imported(monkeypatch, name):
    assert [finding.mark for finding in found(checks.torch)] == ["ok", "ok"]
    imported = importlib.import_module

    def fails(wanted):
        if wanted == name:
            raise OSError("libcudart.so.13: cannot open shared object file")
        return imported(wanted)

    monkeypatch.setattr(importlib, "import_module", fails)
    finding = found(checks.torch)[-1]
    assert finding.mark == "problem"
    assert f"{name} cannot be imported: libcudart.so.13" in finding.text
    assert "install --force-reinstall torch torchvision" in finding.remedies[0]


# Apex

BROKEN = {"apex/__init__.py": "raise ImportError('UnencryptedCookieSessionFactory')"}
PARTS = BROKEN | {f"apex/{name}/__init__.py": "" for name in ("multi_tensor_apply", "optimizers", "contrib")}
AMP = {f"apex/{name}/__init__.py": "" for name in ("amp", "parallel")}


def metadata(version: str, *requires: str) -> dict[str, str]:
    lines = ["Metadata-Version: 2.1", "Name: apex", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    return {"apex-1.dist-info/METADATA": "\n".join(lines) + "\n"}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Writes files into a folder from which Python imports; an apex in it cannot be imported."""
    monkeypatch.delitem(sys.modules, "apex", raising=False)

    def install(files: dict[str, str]) -> None:
        write(tmp_path, files)
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    return install


@pytest.mark.contract("9")
@pytest.mark.parametrize(
    ("files", "mark", "words", "remedy"),
    [
        (BROKEN | metadata("0.9.10.dev0", "pyramid", "velruse"), "problem", "PyPI's apex 0.9.10.dev0", "pip uninstall"),
        (PARTS | AMP | metadata("0.1") | {"amp_C.py": "raise ImportError"}, "ok", "Apex 0.1, in ", None),
        (PARTS, "note", "apex of unknown version, in ", "python -m harness.apex SCRIPT"),
        ({"apex/csrc/x.cpp": "", "apex/setup.py": ""}, "note", "no amp and parallel", "python -m harness.apex"),
    ],
    ids=["PyPI", "NVIDIA", "NVIDIA without amp", "folder"],
)  # fmt: skip
def test_apex_is_recognized_without_importing_it(install, files, mark, words, remedy):
    install(files)
    finding = only(checks.apex)
    assert finding.mark == mark
    assert words in finding.text
    assert remedy in finding.remedies[0] if remedy else not finding.remedies
    assert {"apex", "amp_C"}.isdisjoint(sys.modules)


def test_no_apex(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace(__harness__=True))
    assert only(checks.apex).text == "harness.apex itself, through harness.apex.install()"
    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace(__spec__=None))  # partly imported
    assert only(checks.apex) == Finding("apex", "ok", "not installed, and not needed")


# GPUs

DRIVER = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC"}
DEVICE = {"dev/nvidia0": ""}


@pytest.fixture
def gpus_of(monkeypatch):
    def make(*capabilities: tuple[int, int], cuda: str | None = "12.6") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_86", "sm_90"])
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda i: SimpleNamespace(
                name="H200", total_memory=141 * GIB, major=capabilities[i][0], minor=capabilities[i][1]
            ),
        )

    return make


def test_devices_are_listed(gpus_of, tmp_path):
    gpus_of((9, 0), (7, 0))
    first, second, third = found(checks.cuda, write(tmp_path, DRIVER))
    assert first.text == "2 devices; torch is built for CUDA 12.6, driver 535.104.05"
    assert second == Finding("cuda", "ok", "cuda:0 H200, 141.0 GiB, compute capability 9.0")
    assert third.mark == "problem"
    assert "compute capability 7.0, for which this torch has no kernels (sm_75 sm_80" in third.text


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 9), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((12, 0), ["sm_120"], True),
        ((12, 1), ["sm_90", "compute_90"], True),
        ((7, 0), ["compute_80"], False),
        ((9, 4), ["gfx942"], True),
    ],
)
def test_builds_and_compute_capabilities(gpus_of, monkeypatch, tmp_path, capability, architectures, runs):
    gpus_of(capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)
    _, device = found(checks.cuda, write(tmp_path, DRIVER))
    assert device.mark == ("ok" if runs else "problem")


@pytest.mark.parametrize(
    ("files", "cuda", "hidden", "mark", "text", "remedy"),
    [
        ({}, "12.6", {}, "ok", "no NVIDIA driver (torch is built for CUDA 12.6): training runs on the CPU", None),
        (DRIVER, "12.6", {}, "note", "has no device: training runs on the CPU", "docker run --gpus all"),
        (DRIVER | DEVICE, None, {}, "problem", "is built for the CPU", "install a CUDA build"),
        (DRIVER | DEVICE, "12.6", {"CUDA_VISIBLE_DEVICES": ""}, "note", "hides all devices", "unset CUDA_VISIBLE"),
        (DRIVER | DEVICE, "12.6", {}, "problem", "no device is usable: torch gives no reason: training does not start",
         "nvidia-smi"),
    ],
)  # fmt: skip
def test_reasons_for_no_device(gpus_of, tmp_path, files, cuda, hidden, mark, text, remedy):
    """tests/distributed/test_devices.py has all of them."""
    gpus_of(cuda=cuda)
    finding = only(checks.cuda, System(hidden, write(tmp_path, files).root))
    assert finding.mark == mark
    assert text in finding.text
    assert finding.remedies[0].startswith(remedy) if remedy else not finding.remedies


# Processor and memory


def test_cpu_limits(monkeypatch, tmp_path):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(16), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert only(checks.cpu, System(root=tmp_path)).text == "usable cores: 16 of 64; torch uses 16 threads"
    system = write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"})
    finding = only(checks.cpu, system)
    assert (finding.mark, finding.remedies) == ("note", ("export OMP_NUM_THREADS=3",))
    assert finding.text.startswith("usable cores: 3 of 64 (the cgroup limits CPU use to 2.5 of them); torch uses 16")


V2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
    "sys/fs/cgroup/job/cpu.max": "400000 100000\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
    "sys/fs/cgroup/job/step/memory.current": f"{2 * GIB}\n",
    "sys/fs/cgroup/job/memory.current": f"{3 * GIB}\n",
}
V1 = {
    "proc/self/cgroup": "9:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n1:name=systemd:/docker/a\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
}
V1_FREE = V1 | {
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}
V2_CACHE = V2 | {
    "sys/fs/cgroup/job/memory.current": f"{8 * GIB}\n",
    "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {5 * GIB}\nactive_file {GIB}\nshmem 7\n",
}
V1_CACHE = V1 | {
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n",
}
STEP = V2 | {  # a step of a job that uses more than the step's limit
    "sys/fs/cgroup/job/step/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/job/memory.max": f"{128 * GIB}\n",
    "sys/fs/cgroup/job/memory.current": f"{100 * GIB}\n",
}


@pytest.mark.parametrize(
    ("files", "cores", "limits"),
    [
        (V2, 4.0, [(8 * GIB, 5 * GIB)]),
        (V2_CACHE, 4.0, [(8 * GIB, 6 * GIB)]),
        (STEP, 4.0, [(4 * GIB, 2 * GIB), (128 * GIB, 28 * GIB)]),
        (V1, 4.0, [(8 * GIB, 5 * GIB)]),
        (V1_CACHE, 4.0, [(8 * GIB, 7 * GIB)]),
        (V1_FREE, None, []),
        ({}, None, []),
    ],
    ids=["v2", "v2 with cached files", "a step", "v1", "v1 with cached files", "v1 without limits", "none"],
)
def test_control_groups(tmp_path, files, cores, limits):
    system = write(tmp_path, files)
    assert machine.cpu_quota(system.root) == cores
    assert machine.memory_limits(system.root) == limits


def meminfo(total: int, available: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n"}


@pytest.mark.parametrize(
    ("files", "mark", "text"),
    [
        (meminfo(64 * GIB, 32 * GIB), "ok", "64.0 GiB, 32.0 GiB free"),
        (meminfo(64 * GIB, 32 * GIB) | V2, "ok", "8.0 GiB (limit of the cgroup), 5.0 GiB free"),
        (meminfo(64 * GIB, GIB // 2), "note", "64.0 GiB, 0.5 GiB free"),
        (meminfo(64 * GIB, 100 * MIB), "problem", "64.0 GiB, 0.1 GiB free"),
        (meminfo(4 * GIB, 3 * GIB) | V2, "ok", "4.0 GiB, 3.0 GiB free"),
        (meminfo(64 * GIB, 32 * GIB) | STEP, "ok", "4.0 GiB (limit of the cgroup), 2.0 GiB free"),
        (meminfo(64 * GIB, 32 * GIB) | V2_CACHE, "ok", "8.0 GiB (limit of the cgroup), 6.0 GiB free"),
    ],
)
def test_memory(tmp_path, files, mark, text):
    finding = only(checks.memory, write(tmp_path, files))
    assert (finding.mark, finding.text) == (mark, text)
    assert bool(finding.remedies) == (mark != "ok")


# Files


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /dev/shm")
@pytest.mark.parametrize(
    ("total", "free", "mark"), [(64 * MIB, 64 * MIB, "note"), (GIB, MIB, "problem"), (8 * GIB, 8 * GIB, "ok")]
)
def test_shared_memory(monkeypatch, total, free, mark):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(total, total - free, free))
    finding = only(checks.shared_memory)
    assert finding.mark == mark
    assert any("--shm-size" in remedy for remedy in finding.remedies) == (mark != "ok")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /dev/shm")
def test_no_shared_memory(tmp_path):
    finding = only(checks.shared_memory, System(root=tmp_path))
    assert finding.mark == "problem"
    assert finding.remedies[-1].startswith("data.num_workers=0")


@pytest.mark.parametrize(("free", "mark"), [(100 * MIB, "problem"), (2 * GIB, "note"), (50 * GIB, "ok")])
def test_free_space_of_the_folder(monkeypatch, tmp_path, free, mark):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(GIB, 0, free))
    finding = only(checks.folder, System(folder=tmp_path))
    assert finding.mark == mark
    assert str(tmp_path) in finding.text
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_not_writable(tmp_path):
    finding = only(checks.folder, System(folder=tmp_path / "gone"))
    assert finding.mark == "problem"
    assert "gone is not writable: No such file" in finding.text
    assert finding.remedies[0].startswith("output=")


# Network


@pytest.fixture
def interfaces(monkeypatch):
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1"), (4, "ib0")])
    monkeypatch.setattr(checks, "address_of", lambda name: "10.0.0.7")
    asked = []

    def towards(host, outward=False):
        asked.append(host)
        return "eth0" if outward else "lo"

    monkeypatch.setattr(checks, "interface_towards", towards)
    return asked


def test_network_resolves_no_name(interfaces):
    finding = only(checks.network, System({"MASTER_ADDR": "node-01.example"}))
    assert finding.text == "ranks on one node connect over lo, on several nodes over eth0 (10.0.0.7)"
    assert set(interfaces) == {"127.0.0.1"}


@pytest.mark.parametrize(("value", "unknown"), [("eth1", ""), ("eth0,ib0", ""), ("eth", "eth"), ("eth0,eth9", "eth9")])
def test_variable_that_selects_interfaces(interfaces, value, unknown):
    _, *problems = found(checks.network, System({"GLOO_SOCKET_IFNAME": value}))
    assert [finding.mark for finding in problems] == (["problem"] if unknown else [])
    assert not unknown or f"names {unknown}, but the interfaces are lo, eth0" in problems[0].text


@pytest.mark.parametrize(("name", "mark"), [("lo", "note"), (None, "ok")])
def test_loopback_only_and_unknown_networks(monkeypatch, name, mark):
    monkeypatch.setattr(checks, "interface_towards", lambda host, outward=False: name)
    assert only(checks.network).mark == mark
