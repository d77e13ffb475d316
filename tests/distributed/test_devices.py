"""The choice of a rank's device, tested without one."""

from __future__ import annotations

import types

import pytest
import torch

from harness.distributed.devices import card, check_own, choose
from harness.errors import LaunchError


@pytest.fixture
def with_devices(monkeypatch):
    def there_are(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return there_are


def test_cpu_without_a_device(with_devices):
    with_devices(0)
    assert choose("auto", 0, 1).type == "cpu"
    with pytest.raises(LaunchError, match="but 0 are visible"):
        choose("cuda", 0, 1, may_be_isolated=True)


def test_one_device_per_rank(with_devices):
    with_devices(2)
    assert choose("auto", 1, 2) == choose("cuda", 1, 2, may_be_isolated=True) == torch.device("cuda", 1)
    assert choose("cpu", 1, 2).type == "cpu"
    with pytest.raises(LaunchError, match="start at most 2 processes"):
        choose("auto", 2, 3)


def test_single_visible_device_needs_a_launcher_that_isolates(with_devices):
    with_devices(1)
    assert choose("auto", 3, 4, may_be_isolated=True) == torch.device("cuda", 0)
    with pytest.raises(LaunchError, match=r"4 process\(es\) on this node need one CUDA device each, but 1 are visible"):
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
