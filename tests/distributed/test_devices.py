"""The choice of a rank's device, tested without one."""

from __future__ import annotations

import logging
import os
import subprocess
import warnings

import pytest
import torch

from harness import cli
from harness.distributed.devices import choose, fitting_ranks, visible_names
from harness.errors import EXIT_USAGE, LaunchError
from tests.conftest import ROOT
from tests.ranks import run_ranks


@pytest.fixture
def with_devices(monkeypatch, tmp_path):
    """A machine with as many CUDA devices, and without the files of a driver."""

    def there_are(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    monkeypatch.setattr("harness.distributed.no_cuda._ROOT", tmp_path)
    return there_are


def test_cpu_without_a_device(with_devices):
    with_devices(0)
    assert choose("auto", 0, 1).type == "cpu"
    with pytest.raises(LaunchError, match="no NVIDIA driver"):
        choose("cuda", 0, 1, may_be_isolated=True)


TOO_OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 12040)."


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine on which torch, built for ``cuda``, finds no device and warns with ``warning``."""

    def make(driver: str, devices: int, cuda: str | None = "13.2", warning: str = "", visible: str | None = None):
        def is_available() -> bool:
            if warning:
                warnings.warn(warning)
            return False

        root = tmp_path / f"{driver}-{devices}"
        (root / "dev").mkdir(parents=True)
        for number in range(devices):
            (root / "dev" / f"nvidia{number}").touch()
        if driver:
            (root / "proc/driver/nvidia").mkdir(parents=True)
            (root / "proc/driver/nvidia/version").write_text(f"NVRM version: NVIDIA Kernel Module  {driver}  Sat\n")
        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)  # by NVML, which works with any driver
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr("harness.distributed.no_cuda._ROOT", root)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


@pytest.mark.parametrize(
    ("facts", "remedy"),
    [
        ({"driver": "535.104.05", "devices": 1, "visible": "3,5"}, "previous-versions"),
        ({"driver": "550.54.15", "devices": 0, "warning": TOO_OLD}, "update the driver"),  # which makes them when used
        ({"driver": "", "devices": 0, "warning": TOO_OLD}, "update the driver"),  # in WSL
        ({"driver": "", "devices": 1}, "update the driver"),
        ({"driver": "580.82.07", "devices": 1, "warning": "CUDA unknown error"}, "nvidia-smi"),
    ],
)
def test_device_that_does_not_work_is_an_error(machine, facts, remedy):
    machine(**facts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for start in (lambda: choose("auto", 0, 1), lambda: choose("cuda", 0, 1), fitting_ranks):
            with pytest.raises(LaunchError) as caught:
                start()
            assert caught.value.exit_code == EXIT_USAGE
            assert remedy in caught.value.hint
            assert "runtime.device=cpu" in caught.value.hint
    assert choose("cpu", 0, 1).type == "cpu"
    assert fitting_ranks(on_cpu=True) == 2


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"driver": "535.104.05", "devices": 1, "visible": ""}, "CUDA_VISIBLE_DEVICES='' hides"),
        ({"driver": "535.104.05", "devices": 1, "visible": "-1"}, "CUDA_VISIBLE_DEVICES='-1' hides"),
        ({"driver": "535.104.05", "devices": 2, "cuda": None}, "is built for the CPU"),
        ({"driver": "535.104.05", "devices": 0}, "no device"),  # a container without devices sees its host's file
    ],
)
def test_device_that_is_not_wanted_is_one_line_in_the_log(machine, facts, words, caplog, monkeypatch):
    machine(**facts)
    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="harness"):
        assert choose("auto", 0, 1).type == "cpu"
    # Handlers of a command that ran in this process may add their own copies.
    assert len(lines := {record.getMessage() for record in caplog.records if record.name == "harness"}) == 1
    assert words in lines.pop()
    with pytest.raises(LaunchError, match=words) as caught:
        choose("cuda", 0, 1)
    assert not caught.value.hint.startswith("or ")


def test_one_device_per_rank(with_devices):
    with_devices(2)
    assert choose("auto", 1, 2) == choose("cuda", 1, 2, may_be_isolated=True) == torch.device("cuda", 1)
    assert choose("cpu", 1, 2).type == "cpu"
    with pytest.raises(LaunchError, match="start at most 2 processes"):
        choose("auto", 2, 3)


def test_ranks_that_fit(with_devices):
    for number, most, expected in ((0, None, 2), (0, 1, 1), (1, 2, 1), (2, 2, 2), (8, 2, 2), (8, None, 8)):
        with_devices(number)
        assert fitting_ranks(most) == expected
    assert fitting_ranks(on_cpu=True) == 2


@pytest.mark.parametrize(("devices", "typed", "ranks"), [(0, "auto:2", 2), (1, "auto:2", 1), (8, "auto", 8)])
def test_launch_starts_the_ranks_that_fit(with_devices, capsys, devices, typed, ranks):
    """As make train does: two processes would be refused on a machine with one GPU."""
    with_devices(devices)
    command = ["launch", "-c", str(ROOT / "configs" / "digits.yaml"), "--nproc", typed, "--dry-run"]
    assert cli.main(command) == 0
    assert f"WORLD_SIZE={ranks} " in capsys.readouterr().out
    assert cli.main([*command, "runtime.device=cpu"]) == 0
    assert "WORLD_SIZE=2 " in capsys.readouterr().out


def test_make_train_starts_the_ranks_that_fit():
    make = subprocess.run(["make", "-n", "train"], cwd=ROOT, capture_output=True, text=True, timeout=250, check=True)
    assert "harness launch -c configs/digits.yaml --nproc auto:2\n" in make.stdout


@pytest.mark.parametrize(
    ("shown", "names"), [("0,-1,1", ["0"]), (" 1, 0,", ["1", "0"]), ("-1,0", []), ("", []), ("GPU-a", ["GPU-a"])]
)
def test_names_after_an_invalid_one_are_hidden(monkeypatch, shown, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert visible_names() == names


@pytest.mark.parametrize("typed", ["auto:0", "auto:x", "auto:", "all"])
def test_wrong_number_of_ranks(typed, capsys):
    with pytest.raises(SystemExit):
        cli.main(["launch", "-c", "x.yaml", "--nproc", typed])
    assert f"argument --nproc: {typed!r} is not a number of ranks, MIN:MAX, auto or auto:MAX" in capsys.readouterr().err


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_tests_and_their_ranks_see_no_gpu(request):
    """Otherwise their two ranks would be refused where there is one GPU, and their numbers would depend on it."""
    if request.config.getoption("--device") == "cpu":
        assert [visible(), *run_ranks(1, visible, group=False)] == ["", ""]


def test_single_visible_device_needs_a_launcher_that_isolates(with_devices):
    with_devices(1)
    assert choose("auto", 3, 4, may_be_isolated=True) == torch.device("cuda", 0)
    with pytest.raises(
        LaunchError, match="this node has 1 visible CUDA device for 4 processes; each process needs its own"
    ):
        choose("auto", 3, 4)
