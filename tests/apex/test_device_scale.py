"""The loss scale on the device changes as that of the host, and unscales to the same bits."""

from __future__ import annotations

import random

import pytest
import torch

from harness.apex.amp import device_scale, scaler
from harness.apex.amp.device_scale import DeviceScale
from harness.apex.amp.scaler import LossScaler


@pytest.mark.parametrize(("lowest", "highest"), [(None, 2.0**24), (3.0, 100_000.0 / 3), (0.0, None)])
def test_scale_after_every_step_is_the_hosts(monkeypatch, lowest, highest):
    for module in (scaler, device_scale):
        monkeypatch.setattr(module, "WINDOW", 3)
    device = torch.empty(0).device
    host, own = (LossScaler("dynamic", lowest, highest) for _ in range(2))
    on_device, optimizer = DeviceScale(own, device), torch.optim.SGD([torch.zeros(1)], 0.1)
    on_device.start()
    first = own.loss_scale()
    draws, flags = random.Random(1), []
    for step in range(120):
        flags.append(draws.random() < (0.9 if step < 30 else 0.15))
        gradients = [torch.full((2,), torch.inf if flags[-1] else 5.0, dtype=torch.float16)]
        expected = [gradients[0].clone()]
        with on_device.deciding(optimizer):
            assert optimizer.found_inf is on_device.found
            own.unscale_(gradients, own.factor)
            assert not own.update_scale()  # the optimizer skips
        host.unscale_(expected, host.factor)
        assert host.update_scale() == bool(on_device.found) == flags[-1]
        host.clear_overflow_state()
        assert gradients[0].tolist() == expected[0].tolist()
        assert on_device.scale.item() == host.loss_scale()
    assert own.loss_scale() == first  # so far it stood still
    for flag in flags:
        on_device.count(flag)
    assert (own.loss_scale(), own._unskipped) == (host.loss_scale(), host._unskipped)
