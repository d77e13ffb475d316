"""The choice of a rank's device, tested without one."""

from __future__ import annotations

import os
import subprocess
import types

import pytest
import torch

from harness import cli
from harness.distributed.devices import card, check_own, choose, fitting_ranks
from harness.errors import LaunchError
from tests.conftest import ROOT
from tests.ranks import run_ranks


@pytest.fixture
def with_devices(monkeypatch):
    def there_are(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return there_are


def test_cpu_without_a_device(with_devices):
    with_devices(0)
    assert choose("auto", 0, 1).type == "cpu"
    with pytest.raises(LaunchError, match="0 visible CUDA devices"):
        choose("cuda", 0, 1, may_be_isolated=True)


def test_one_device_per_rank(with_devices):
    with_devices(2)
    assert choose("auto", 1, 2) == choose("cuda", 1, 2, may_be_isolated=True) == torch.device("cuda", 1)
    assert choose("cpu", 1, 2).type == "cpu"
    with pytest.raises(LaunchError, match="start at most 2 processes"):
        choose("auto", 2, 3)


def test_ranks_that_fit(with_devices):
    for devices, most, expected in ((0, None, 2), (0, 1, 1), (1, 2, 1), (2, 2, 2), (8, 2, 2), (8, None, 8)):
        with_devices(devices)
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
    make = subprocess.run(["make", "-n", "train"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "harness launch -c configs/digits.yaml --nproc auto:2\n" in make.stdout


@pytest.mark.parametrize("typed", ["auto:0", "auto:x", "auto:", "all"])
def test_wrong_number_of_ranks(typed, capsys):
    with pytest.raises(SystemExit):
        cli.main(["launch", "-c", "x.yaml", "--nproc", typed])
    assert f"argument --nproc: {typed!r} is not a number of ranks, auto or auto:MAX" in capsys.readouterr().err


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


def test_two_ranks_on_one_card_are_refused():
    check_own([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-3")])
    assert card(torch.device("cpu")) == ""
    check_own([("a", ""), ("a", "")])
    with pytest.raises(LaunchError, match="ranks 1 and 2 both use the CUDA device GPU-2 of a") as caught:
        check_own([("a", "GPU-1"), ("a", "GPU-2"), ("a", "GPU-2"), ("a", "GPU-1")])
    assert "--gpus-per-task=1" in caught.value.hint


def test_slices_of_a_card_have_own_names(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="u"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,GPU-2")
    assert [card(torch.device("cuda", index)) for index in (0, 1, 2)] == ["MIG-1", "u", "u"]
