"""Every test in this folder starts and ends with amp not initialized and torch's autocast off.

``--device cuda`` creates their tensors on that device, except of the tests marked ``host``; tests that start ranks stay
on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from harness.apex import amp

# The first optimizer of a process makes torch set TORCHINDUCTOR_CACHE_DIR, which no test may be blamed for.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


class SameNumbers(TorchFunctionMode):
    """Draws from a generator of the CPU there, and moves the numbers to the default device."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        factory = func in (torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal)
        if factory and generator is not None and generator.device.type == "cpu" and "device" not in kwargs:
            return func(*args, device="cpu", **kwargs).to(torch.empty(0).device)
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def _fresh_amp(request):
    amp.reset()
    device = request.config.getoption("--device")
    if device == "cpu" or request.node.get_closest_marker("host"):
        device = None  # without a mode in the way
    torch.set_default_device(device)
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors here are tiny: more threads only wait for each other
    with SameNumbers() if device else nullcontext():
        yield
    torch.set_num_threads(threads)
    torch.set_default_device(None)
    amp.reset()
    assert not torch.is_autocast_enabled("cpu"), "autocast was left on"
    assert torch.is_autocast_cache_enabled(), "autocast's cache was left off"
    assert "cpu" not in torch.Tensor.__dict__, "Tensor.cpu was left replaced"
