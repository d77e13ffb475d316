"""Threads compute on the device of the thread that starts them, and whoever waits for their work always learns."""

from __future__ import annotations

import threading

import pytest
import torch

from harness.distributed.threads import Background, thread


class Device:
    """Keeps a current device for each thread, as CUDA does: 0 until it is set. Records who used which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, initialized: bool = True) -> None:
        self._current, self.used = threading.local(), []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
        monkeypatch.setattr(torch.cuda, "current_device", self.current)
        monkeypatch.setattr(torch.cuda, "set_device", lambda number: setattr(self._current, "number", number))
        monkeypatch.setattr(torch.cuda, "synchronize", self.use)

    def current(self) -> int:
        return getattr(self._current, "number", 0)

    def use(self) -> None:
        self.used.append((threading.current_thread().name, self.current()))


def test_threads_inherit_the_device(monkeypatch):
    device = Device(monkeypatch)
    torch.cuda.set_device(3)
    started = thread(torch.cuda.synchronize, "plain")
    started.start()
    started.join()
    Background(lambda: Background(torch.cuda.synchronize, "inner").result(), "outer").result()
    assert device.used == [("plain", 3), ("inner", 3)]


def test_no_context_is_opened_before_cuda_is_in_use(monkeypatch):
    device = Device(monkeypatch, initialized=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("this opens a context"))
    assert Background(lambda: 1, "work").result() == 1
    assert device.used == []


@pytest.mark.parametrize("error", [ValueError("wrong"), SystemExit(3)])
def test_an_error_of_any_kind_ends_the_wait(error):
    def work():
        raise error

    with pytest.raises(type(error)):
        Background(work, "work").result(20)
