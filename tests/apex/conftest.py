"""Every test in this folder starts and ends with amp not initialized and torch's autocast off.

``--device cuda`` creates their tensors on that device; tests that start ranks stay on the CPU.
"""

from __future__ import annotations

import pytest
import torch

from harness.apex import amp

# The first optimizer of a process makes torch set TORCHINDUCTOR_CACHE_DIR, which no test may be blamed for.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


@pytest.fixture(autouse=True)
def _fresh_amp(request):
    amp.reset()
    device = request.config.getoption("--device")
    torch.set_default_device(device if device != "cpu" else None)  # None: without a mode in the way
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors here are tiny: more threads only wait for each other
    yield
    torch.set_num_threads(threads)
    torch.set_default_device(None)
    amp.reset()
    assert not torch.is_autocast_enabled("cpu"), "autocast was left on"
    assert torch.is_autocast_cache_enabled(), "autocast's cache was left off"
    assert "cpu" not in torch.Tensor.__dict__, "Tensor.cpu was left replaced"
