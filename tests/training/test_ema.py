"""The moving average of the weights."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn

from harness.training.optimizer.ema import Ema


def test_average_by_hand():
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    ema = Ema([model.weight], [model.weight], decay=0.5)
    expected, weight = torch.tensor([1.0, 1.0]), model.weight
    for update in range(12):
        with torch.no_grad():
            weight += 1
        ema.update([weight])
        decay = min(0.5, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * weight.detach()[0]
    torch.testing.assert_close(ema.average[0][0], expected)
    assert ema.num_updates == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_swapped_in_restores_the_weights_exactly(dtype):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(dtype)
    model[1].weight.requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    sources = [param.detach().float() for param in trained]
    ema = Ema(trained, sources, 0.9)
    ema.update([source + 1 for source in sources])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with suppress(ZeroDivisionError), ema.swapped_in():
        torch.testing.assert_close(model[0].weight, ema.average[0].to(dtype), rtol=0, atol=0)
        assert torch.equal(model[1].weight, before["1.weight"])  # frozen weights have no average
        assert not torch.equal(model[0].weight, before["0.weight"])
        1 / 0  # noqa: B018
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(average.dtype is torch.float32 for average in ema.average)


def test_average_survives_a_checkpoint():
    model = nn.Linear(2, 1)
    first, second = (Ema(list(model.parameters()), list(model.parameters()), 0.9) for _ in range(2))
    for _ in range(3):
        first.update([param + 1 for param in model.parameters()])
    second.load_state_dict(first.state_dict())
    for ema in (first, second):
        ema.update([param * 2 for param in model.parameters()])
    assert second.num_updates == 4
    assert all(torch.equal(a, b) for a, b in zip(first.average, second.average, strict=True))
