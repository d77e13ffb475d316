"""The doctor's findings on machines made up for the purpose: folders as file systems, replaced answers of torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import resource
import subprocess
import sys
import threading
import warnings
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from harness import cli
from harness.doctor import communication, devices, examine, machine, software, which_apex
from harness.doctor.findings import Finding, Place, as_json, as_text, look
from harness.training import precision

GIB, MIB = 2**30, 2**20
Usage = namedtuple("Usage", "total used free")  # noqa: PYI024


def found(check, place=None) -> list[Finding]:
    return list(check(place or Place()))


def only(check, place=None) -> Finding:
    (finding,) = found(check, place)
    assert finding.check == check.__name__
    return finding


def write(root, files: dict[str, str]) -> Place:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Place(root=root)


# The report


def test_the_verb_on_this_machine(capsys):
    code = cli.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"harness", "host", "system", "problems", "findings"}
    problems = [finding for finding in report["findings"] if finding["mark"] == "problem"]
    assert report["problems"] == len(problems)
    assert code == (2 if problems else 0)
    assert all(finding["remedies"] for finding in problems)
    checks = {finding["check"] for finding in report["findings"]}
    assert checks | {"mps"} == {check.__name__ for check in examine.CHECKS}
    assert not any("could not be looked at" in finding["text"] for finding in report["findings"])


def test_a_problem_is_exit_code_2(capsys, monkeypatch):
    def fine(place):
        yield Finding("fine", "note", "it will do", ("type this",))

    def bad(place):
        yield Finding("bad", "problem", f"with {place.variables['NAME']}")

    monkeypatch.setattr(examine, "examine", lambda place: [*found(fine, place)])
    assert examine.main({}, False) == 0
    assert "Nothing here keeps training from working. Notes: 1." in capsys.readouterr().out
    monkeypatch.setattr(examine, "examine", lambda place: [*found(fine, place), *found(bad, place)])
    assert examine.main({"NAME": "x"}, False) == 2
    assert capsys.readouterr().out.splitlines()[2:] == [
        "note     fine  it will do",
        "                 -> type this",
        "problem  bad   with x",
        "",
        "Problems: 1. Notes: 1.",
    ]


def test_text_and_json_of_nothing():
    assert as_text([]) == "\nNothing here keeps training from working."
    assert json.loads(as_json([], {"host": "h"})) == {"host": "h", "problems": 0, "findings": []}


def test_a_check_that_fails_is_one_finding():
    def broken(place):
        yield Finding("broken", "ok", "so far")
        raise ValueError("no such thing")

    def ends(place):
        raise SystemExit(3)
        yield

    def lacks(place):
        raise ImportError("no torch")
        yield

    def fine(place):
        yield Finding("fine", "ok", "yes")

    findings = examine.examine(Place(), [broken, ends, lacks, fine])
    assert [(f.check, f.mark) for f in findings] == [
        ("broken", "ok"), ("broken", "problem"), ("ends", "problem"), ("lacks", "note"), ("fine", "ok")
    ]  # fmt: skip
    assert findings[1].text == "could not be looked at: ValueError: no such thing"


def test_a_check_that_hangs_is_one_finding():
    release = threading.Event()

    def hangs(place):
        yield Finding("hangs", "ok", "at first")
        release.wait(20)
        yield Finding("hangs", "ok", "too late")

    first, second = look(hangs, Place(), timeout_s=0.05)
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "doctor-hangs"] == [True]
    release.set()
    assert first.text == "at first"
    assert (second.mark, second.text) == ("problem", "no answer within 0.05 s")


def test_a_missing_torch_does_not_keep_it_from_looking():
    program = "import sys\nfrom harness.doctor import examine\nassert not {'torch', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# Software


def test_python(monkeypatch):
    assert only(software.python).mark == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert only(software.python) == Finding(
        "python", "problem", "3.9.1 is too old: 3.10 or newer", ("install Python 3.10",)
    )


def test_packages(monkeypatch):
    versions = {"torch": "2.5+cu121", "numpy": "2", "pyarrow": "14.0.1"}
    required = ["torch>=2.5.1", "numpy>=2.0.0", "pyarrow>=14", "pandas", "pytest; extra == 'test'"]

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert found(software.packages) == [
        Finding(
            "packages",
            "problem",
            "torch 2.5+cu121 is too old: 2.5.1 or newer",
            ("python -m pip install 'torch>=2.5.1'",),
        ),
        Finding("packages", "problem", "pandas is missing", ("python -m pip install pandas",)),
    ]
    versions |= {"torch": "2.10.0", "pandas": "1"}
    assert only(software.packages) == Finding("packages", "ok", "all 4 required packages are there")

    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", unknown)
    assert only(software.packages).mark == "note"


@pytest.mark.parametrize("check", [software.torch, software.torchvision])
def test_a_torch_that_cannot_be_imported(monkeypatch, check):
    assert only(check).mark == "ok"

    def fails(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fails)
    finding = only(check)
    assert finding.mark == "problem"
    assert "libcudart.so.13" in finding.text
    assert "install --force-reinstall torch torchvision" in finding.remedies[0]


# Which Apex


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes a package apex that fails when it is imported, with files and metadata."""
    monkeypatch.delitem(sys.modules, "apex", raising=False)

    def make(*files: str, version: str = "", requires: str = "", init: bool = True, **texts: str) -> None:
        for name in files:
            (tmp_path / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "apex" / name).write_text(texts.get(name.replace("/", "_").replace(".", "_"), ""))
        (tmp_path / "apex").mkdir(exist_ok=True)
        if init:
            (tmp_path / "apex" / "__init__.py").write_text("raise ImportError('UnencryptedCookieSessionFactory')")
        if version:
            info = tmp_path / "apex-1.dist-info"
            info.mkdir()
            lines = [f"Metadata-Version: 2.1\nName: apex\nVersion: {version}"]
            lines += [f"Requires-Dist: {name}" for name in requires.split()]
            (info / "METADATA").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    return make


NVIDIA = ("multi_tensor_apply/__init__.py", "optimizers/__init__.py", "contrib/__init__.py")
AMP = ("amp/__init__.py", "parallel/__init__.py")


def test_no_apex(monkeypatch):
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert only(which_apex.apex) == Finding("apex", "ok", "none is installed, and none is needed")


@pytest.mark.contract("9")
def test_pypis_apex_is_known_without_importing_it(package):
    package("models.py", "views.py", "lib/__init__.py", version="0.9.10.dev0", requires="pyramid velruse wtforms")
    finding = only(which_apex.apex)
    assert finding.mark == "problem"
    assert "PyPI's apex 0.9.10.dev0" in finding.text
    assert finding.remedies[0] == "python -m pip uninstall apex"
    assert "apex" not in sys.modules


def test_another_package_of_that_name(package):
    package("thing.py", version="3.0", requires="requests")
    finding = only(which_apex.apex)
    assert (finding.mark, which_apex.find().kind) == ("note", "unknown")
    assert "not NVIDIA's Apex: 3.0" in finding.text


def test_nvidias_with_amp(package, monkeypatch, tmp_path):
    package(*NVIDIA, *AMP, version="0.1")
    (tmp_path / "amp_C.py").write_text("raise ImportError")
    finding = only(which_apex.apex)
    assert finding.mark == "ok"
    assert finding.text == (
        f"NVIDIA's 0.1, in {tmp_path / 'apex'}; has amp, parallel, optimizers, multi_tensor_apply, contrib; "
        "extensions: amp_C"
    )
    assert {"apex", "amp_C"}.isdisjoint(sys.modules)


def test_nvidias_without_amp(package):
    package(*NVIDIA)
    finding = only(which_apex.apex)
    assert finding.mark == "note"
    assert "of unknown version" in finding.text
    assert "none were built; no amp and parallel, which NVIDIA removed" in finding.text
    assert "python -m harness.apex" in finding.remedies[0]


def test_rocms(package):
    package(*NVIDIA, *AMP, version="1.9", amp___init___py="from .amp import bfloat16_function")
    assert only(which_apex.apex).text.startswith("ROCm's 1.9, in ")


def test_a_folder_of_that_name(package, tmp_path):
    package("csrc/x.cpp", "setup.py", init=False)
    finding = only(which_apex.apex)
    assert finding.mark == "note"
    assert finding.remedies[0] == f"mv {tmp_path / 'apex'} {tmp_path / 'apex'}-source"


def test_ours_and_a_half_imported_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace(__harness__=True))
    assert only(which_apex.apex).text == "harness.apex itself, by its install()"
    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace(__spec__=None))
    assert which_apex.find().kind == "none"


@pytest.mark.parametrize(
    ("on_cuda", "files", "device"), [(False, AMP, "cpu"), (True, AMP, "cuda"), (True, ("thing.py",), "cpu")]
)
def test_backend_imports_only_an_apex_that_has_amp(package, monkeypatch, on_cuda, files, device):
    package(*files)
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_cuda)
    monkeypatch.setattr(precision, "choose", lambda s, d: asked.append(d.type) or SimpleNamespace(backend="apex 0.1"))
    assert only(which_apex.backend).text.startswith("precision.backend=auto uses apex 0.1")
    assert asked == [device]


def test_backend_without_apex():
    if not torch.cuda.is_available():
        assert "uses harness.apex (on the CPU" in only(which_apex.backend).text


# Devices

DRIVER = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC"}
DEVICE = {"dev/nvidia0": ""}


@pytest.fixture
def gpus(monkeypatch):
    def make(*capabilities: tuple[int, int], cuda: str | None = "12.6", warning: str = "") -> None:
        def is_available():
            if warning:
                warnings.warn(warning)
            return bool(capabilities)

        monkeypatch.setattr(torch.cuda, "is_available", is_available)
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


def test_no_driver_is_fine(gpus, tmp_path):
    gpus()
    assert only(devices.cuda, Place(root=tmp_path)).mark == "ok"


def test_devices_one_by_one(gpus, tmp_path):
    gpus((9, 0), (7, 0))
    first, second, third = found(devices.cuda, write(tmp_path, DRIVER))
    assert first.text == "2 devices; torch is built for CUDA 12.6, driver 535.104.05"
    assert second == Finding("cuda", "ok", "cuda:0 H200, 141.0 GiB, compute capability 9.0")
    assert third.mark == "problem"
    assert "compute capability 7.0, which this torch has no kernels for (sm_75 sm_80" in third.text


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
def test_which_device_a_build_runs_on(capability, architectures, runs):
    assert devices._runs_on(*capability, architectures) is runs


def test_a_driver_without_devices(gpus, tmp_path):
    gpus()
    finding = only(devices.cuda, write(tmp_path, DRIVER))
    assert (finding.mark, "--gpus all" in finding.remedies[0]) == ("note", True)


def test_a_torch_for_the_cpu_beside_a_gpu(gpus, tmp_path):
    gpus(cuda=None)
    finding = only(devices.cuda, write(tmp_path, DRIVER | DEVICE))
    assert finding.mark == "problem"
    assert "is built for the CPU" in finding.text


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_devices(gpus, tmp_path, hidden):
    gpus()
    place = Place({"CUDA_VISIBLE_DEVICES": hidden}, write(tmp_path, DRIVER | DEVICE).root)
    assert only(devices.cuda, place).remedies == ("unset CUDA_VISIBLE_DEVICES",)
    assert only(devices.cuda, place).mark == "note"


def test_a_driver_that_torch_cannot_use(gpus, tmp_path):
    gpus(warning="The NVIDIA driver on your system is too old (found version 11040).")
    place = Place({"CUDA_VISIBLE_DEVICES": "0"}, write(tmp_path, DRIVER | DEVICE).root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finding = only(devices.cuda, place)
    assert finding.mark == "problem"
    assert "too old (found version 11040)" in finding.text


def test_apple_gpus(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert found(devices.mps) == []
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert only(devices.mps).mark == "note"


# Processor and memory


def test_cpu_limits(monkeypatch, tmp_path):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(16), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert only(machine.cpu, Place(root=tmp_path)) == Finding(
        "cpu", "ok", "16 of 64 cores may be used; torch computes with 16 threads"
    )
    place = write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"})
    assert only(machine.cpu, place) == Finding(
        "cpu",
        "note",
        "3 of 64 cores may be used (the cgroup allows the time of 2.5); torch computes with 16 threads, which wait for "
        "each other",
        ("export OMP_NUM_THREADS=3",),
    )


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


@pytest.mark.parametrize(
    ("files", "cores", "limit", "used"),
    [(V2, 4.0, 8 * GIB, 3 * GIB), (V1, 4.0, 8 * GIB, 3 * GIB), (V1_FREE, None, None, 3 * GIB), ({}, None, None, 0)],
    ids=["v2", "v1", "v1 without limits", "none"],
)
def test_control_groups(tmp_path, files, cores, limit, used):
    place = write(tmp_path, files)
    assert machine.cpu_quota(place.root) == cores
    assert machine.memory_limit(place.root) == (limit, used)


def meminfo(total: int, available: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n"}


@pytest.mark.parametrize(
    ("files", "mark", "text"),
    [
        (meminfo(64 * GIB, 32 * GIB), "ok", "64.0 GiB, of which 32.0 GiB are free"),
        (meminfo(64 * GIB, 32 * GIB) | V2, "ok", "8.0 GiB (the cgroup's limit), of which 5.0 GiB are free"),
        (meminfo(64 * GIB, GIB // 2), "note", "64.0 GiB, of which 0.5 GiB are free"),
        (meminfo(64 * GIB, 100 * MIB), "problem", "64.0 GiB, of which 0.1 GiB are free"),
        (meminfo(4 * GIB, 3 * GIB) | V2, "ok", "4.0 GiB, of which 3.0 GiB are free"),
    ],
)
def test_memory(tmp_path, files, mark, text):
    finding = only(machine.memory, write(tmp_path, files))
    assert (finding.mark, finding.text) == (mark, text)
    assert bool(finding.remedies) == (mark != "ok")


# Files


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /dev/shm")
@pytest.mark.parametrize(
    ("total", "free", "mark"), [(64 * MIB, 64 * MIB, "note"), (GIB, MIB, "problem"), (8 * GIB, 8 * GIB, "ok")]
)
def test_shared_memory(monkeypatch, total, free, mark):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(total, total - free, free))
    finding = only(machine.shared_memory)
    assert finding.mark == mark
    assert any("--shm-size" in remedy for remedy in finding.remedies) == (mark != "ok")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /dev/shm")
def test_no_shared_memory(tmp_path):
    finding = only(machine.shared_memory, Place(root=tmp_path))
    assert finding.mark == "problem"
    assert finding.remedies[-1].startswith("data.num_workers=0")


@pytest.mark.parametrize(
    ("soft", "hard", "mark", "remedies"),
    [
        (256, 4096, "note", ("ulimit -n 4096",)),
        (256, resource.RLIM_INFINITY, "note", ("ulimit -n 65536",)),
        (1024, 4096, "ok", ()),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "ok", ()),
    ],
)
def test_open_files(monkeypatch, soft, hard, mark, remedies):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    finding = only(machine.open_files)
    assert (finding.mark, finding.remedies) == (mark, remedies)
    assert ("any number" in finding.text) == (hard == resource.RLIM_INFINITY)


@pytest.mark.parametrize(("free", "mark"), [(100 * MIB, "problem"), (2 * GIB, "note"), (50 * GIB, "ok")])
def test_room_in_the_folder(monkeypatch, tmp_path, free, mark):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(GIB, 0, free))
    finding = only(machine.folder, Place(folder=tmp_path))
    assert finding.mark == mark
    assert str(tmp_path) in finding.text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path):
    finding = only(machine.folder, Place(folder=tmp_path / "gone"))
    assert finding.mark == "problem"
    assert "gone cannot be written: No such file" in finding.text
    assert finding.remedies[0].startswith("output=")


# Communication


def test_collectives(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    assert only(communication.collectives).text == "gloo (CPU), nccl 2.27.3 (CUDA)"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert only(communication.collectives).mark == "ok"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert only(communication.collectives).mark == "problem"
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert "no gloo" in only(communication.collectives).text


@pytest.fixture
def interfaces(monkeypatch):
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1"), (4, "ib0")])
    monkeypatch.setattr(communication, "address_of", lambda name: "10.0.0.7")
    asked = []

    def towards(host, outward=False):
        asked.append(host)
        return "eth0" if outward else "lo"

    monkeypatch.setattr(communication, "interface_towards", towards)
    return asked


def test_network_asks_for_no_name(interfaces):
    finding = only(communication.network, Place({"MASTER_ADDR": "node-01.example"}))
    assert finding.text == "ranks of one node meet over lo, of several nodes over eth0 (10.0.0.7)"
    assert set(interfaces) == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("variable", "value", "chosen"),
    [
        ("GLOO_SOCKET_IFNAME", "eth1", "eth1"),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", "eth0, ib0"),
        ("GLOO_SOCKET_IFNAME", "eth", None),
        ("GLOO_SOCKET_IFNAME", "eth0,eth9", None),
        ("NCCL_SOCKET_IFNAME", "eth", "eth0, eth1"),
        ("NCCL_SOCKET_IFNAME", "=eth", None),
        ("NCCL_SOCKET_IFNAME", "=eth0,ib0", "eth0, ib0"),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", "ib0"),
        ("NCCL_SOCKET_IFNAME", "^=lo,eth", "eth0, eth1, ib0"),
        ("NCCL_SOCKET_IFNAME", "bond0", None),
    ],
)
def test_variables_that_choose_interfaces(interfaces, variable, value, chosen):
    _, finding = found(communication.network, Place({variable: value}))
    if chosen:
        assert finding == Finding("network", "ok", f"{variable}={value} chooses {chosen}")
    else:
        assert finding.mark == "problem"
        assert finding.text == f"{variable}={value} matches no interface; there are lo, eth0, eth1, ib0"
        assert finding.remedies == (f"unset {variable}", f"export {variable}=eth0")


@pytest.mark.parametrize(("name", "mark"), [("lo", "note"), (None, "ok")])
def test_networks_that_lead_nowhere(monkeypatch, name, mark):
    monkeypatch.setattr(communication, "interface_towards", lambda host, outward=False: name)
    assert only(communication.network).mark == mark


def test_launch():
    assert only(communication.launch).text == "no launcher's variables: one process"
    half = only(communication.launch, Place({"RANK": "1", "WORLD_SIZE": "2"}))
    assert half.mark == "problem"
    assert "found RANK=1, WORLD_SIZE=2; missing LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in half.text
    assert "unset the variables" in half.remedies[0]
    whole = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    finding = only(communication.launch, Place(whole))
    assert finding == Finding("launch", "ok", "rank 1 of 2 by RANK and WORLD_SIZE, meeting at 10.0.0.1:29500")
