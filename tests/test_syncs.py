"""The detector of host syncs in ``tests/syncs.py``: what it counts, what it leaves out, and that values are real."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.syncs import CUDA, OnGpu, counted_syncs, fake_gpu


def ones(*shape):
    return torch.full(shape, 1.0, device="cuda:0")


WAITS = {
    "item": lambda: ones().item(),
    "float": lambda: float(ones()),
    "if": lambda: bool(ones() > 0),
    "tolist": lambda: ones(3).tolist(),
    "cpu": lambda: ones(3).cpu(),
    "to the host": lambda: ones(3).to("cpu"),
    "into pageable memory": lambda: torch.zeros(3).copy_(ones(3), non_blocking=True),
    "tensor": lambda: torch.tensor(1.0, device="cuda:0"),
    "pageable": lambda: torch.zeros(3).to("cuda:0"),
    "mask": lambda: ones(3)[ones(3) > 0],
    "nonzero": lambda: torch.where(ones(3) > 0),
    "bincount": lambda: ones(3).long().bincount(minlength=4),
    "equal": lambda: torch.equal(ones(3), ones(3)),
    "index on the host": lambda: ones(3)[torch.tensor([0, 1])],
    "synchronize": lambda: torch.cuda.synchronize(),
    "event": lambda: torch.cuda.Event().synchronize(),
    "stream": lambda: torch.cuda.current_stream().synchronize(),
}
GOES_ON = {
    "arithmetic": lambda: ones(3).double().sum() + 1,
    "made there": lambda: torch.full((3,), 2.0, device="cuda:0"),
    "non_blocking to the host": lambda: ones(3).to("cpu", non_blocking=True),
    "into pinned memory": lambda: torch.zeros(3).pin_memory().copy_(ones(3), non_blocking=True),
    "from pinned memory": lambda: torch.zeros(3).pin_memory().to("cuda:0", non_blocking=True),
    "one value for a mask": lambda: ones(3).__setitem__(ones(3) > 0, 0.0),
    "number on the host": lambda: ones(3) * torch.tensor(2.0),
    "event": lambda: torch.cuda.Event().query(),
    "values on the host": lambda: torch.zeros(3).tolist(),
}


@pytest.mark.parametrize("name", WAITS)
def test_wait_is_counted_once(name):
    with counted_syncs() as syncs:
        WAITS[name]()
    assert len(syncs) == 1, syncs
    assert syncs[0].where == "tests/test_syncs.py <lambda>"


@pytest.mark.parametrize("name", GOES_ON)
def test_no_wait(name):
    with counted_syncs() as syncs:
        GOES_ON[name]()
    assert not syncs


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_training_step_computes_as_on_the_cpu(options):
    def trained(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, **options)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.arange(32.0).view(2, 1, 4, 4).to(device)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return [param.detach().cpu() for param in model.parameters()]

    expected = trained("cpu")
    with counted_syncs() as syncs:
        found = trained(CUDA)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert {sync.what for sync in syncs} == {"copy from pageable memory", "copy to the host"}  # in this test only


def test_tensor_is_on_the_device():
    with fake_gpu():
        model = nn.Linear(2, 2).to("cuda:0")
        assert isinstance(model.weight, OnGpu)
        assert isinstance(model.weight, nn.Parameter)
        assert (model.weight.device, model.weight.is_cuda, model.weight.is_cpu) == (CUDA, True, False)
        assert torch.zeros_like(model.weight).is_cuda
        with pytest.raises(RuntimeError, match="same device"):
            ones(2) + torch.ones(2)
        with pytest.raises(TypeError):
            ones(2).numpy()
        assert not torch.zeros(2).is_cuda
    assert not torch.cuda.is_initialized()


def test_order_of_streams_and_events():
    with fake_gpu() as gpu:
        side, event = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(side):
            copy = torch.zeros(2).pin_memory().to("cuda:0", non_blocking=True)
            event.record()
        torch.cuda.current_stream().wait_event(event)
        copy.record_stream(torch.cuda.current_stream())
        copy.add_(1)
    name, number = side.name, event.number
    assert [what for what in gpu.order if what[1] != "clone"] == [
        (name, "copy from pinned memory"), (name, f"record event {number}"),
        ("default", f"wait for event {number} of {name}"), ("default", "record_stream"), ("default", "add_"),
    ]  # fmt: skip
