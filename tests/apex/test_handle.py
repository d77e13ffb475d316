"""The handle of Apex's first API: casts, scaling and skipping under ``amp.init`` (contract 1.7), and verbosity 2."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.apex import amp
from tests.apex.shared import backward

pytestmark = pytest.mark.contract("1.7")


def half_linear() -> bool:
    return F.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype is torch.float16


def test_init_casts_until_deactivated():
    handle = amp.init()
    assert amp._amp_state.handle is handle
    assert handle.is_active()
    assert half_linear()
    with handle._disable_casts():
        assert not half_linear()
    handle._deactivate()
    assert not handle.is_active()
    assert not half_linear()


@pytest.mark.contract("1.10")
def test_initialize_replaces_an_older_handle():
    older = amp.init()
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert amp._amp_state.handle.is_active()
    assert not older.is_active()
    older._deactivate()  # has no effect on the casts in force
    older._clear_cache()
    assert (older.has_cache, older.cache) == (False, {})
    assert half_linear()
    with amp._amp_state.handle._disable_casts():
        assert not half_linear()
    amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)
    assert amp._amp_state.handle is None
    assert not half_linear()


def test_allow_banned_and_patch_type():
    probability = torch.tensor([0.25, 0.5]).half()
    amp.init()
    with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss"):
        F.binary_cross_entropy(probability, probability)
    amp.init(allow_banned=True)
    assert F.binary_cross_entropy(probability, probability).dtype is torch.float32
    amp.init(patch_type=torch.bfloat16)
    assert F.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype is torch.bfloat16


def model_and_optimizer():
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def inputs():
    return torch.tensor([[1.0, 2.0]])


@pytest.mark.parametrize("enabled", [True, False])
def test_wrapped_optimizer_sums_its_losses_and_steps(enabled):
    handle = amp.init(enabled=enabled, loss_scale=128.0)
    model, inner = model_and_optimizer()
    optimizer = handle.wrap_optimizer(inner, num_loss=2)
    assert optimizer.param_groups is inner.param_groups
    for factor in (1.0, 2.0):
        with optimizer.scale_loss(model(inputs()).sum() * factor) as loss:
            loss.backward()
    assert model.weight.grad.tolist() == [[3.0, 6.0]]
    optimizer.step()
    assert model.weight.tolist() == [[-0.5, -2.0]]
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_a_disabled_wrapped_optimizer_takes_a_closure():
    model, inner = model_and_optimizer()

    def closure():
        inner.zero_grad()
        loss = model(inputs()).sum()
        loss.backward()
        return loss

    assert amp.init(enabled=False).wrap_optimizer(inner).step(closure).item() == 3.0
    assert model.weight.tolist() == [[0.5, 0.0]]


def test_overflow_in_one_loss_skips_the_step_and_halves_only_its_scale():
    model, inner = model_and_optimizer()
    optimizer = amp.init().wrap_optimizer(inner, num_loss=2)
    for factor in (1e-4, float("inf")):
        with optimizer.scale_loss(model(inputs()).sum() * factor) as loss:
            loss.backward()
    optimizer.step()
    assert model.weight.tolist() == [[1.0, 1.0]]
    assert [scaler.loss_scale() for scaler in optimizer._scalers] == [65536.0, 32768.0]


def test_wrong_use_of_a_wrapped_optimizer_is_explained():
    model, inner = model_and_optimizer()
    optimizer = amp.init(loss_scale=2.0).wrap_optimizer(inner)
    with pytest.raises(RuntimeError, match="after 0 of 1 losses"):
        optimizer.step()
    with optimizer.scale_loss(model(inputs()).sum()) as loss:
        loss.backward()
    with pytest.raises(RuntimeError, match="num_loss=2"), optimizer.scale_loss(model(inputs()).sum()):
        pass
    with pytest.raises(NotImplementedError, match="no closure"):
        optimizer.step(lambda: 0)
    optimizer.step()
    with pytest.raises(AttributeError):
        optimizer.no_such_name  # noqa: B018
    assert copy.copy(optimizer)._optimizer is inner


def test_handle_scales_and_unscales():
    model, optimizer = model_and_optimizer()
    handle = amp.init(loss_scale=4.0)
    with handle.scale_loss(model(inputs()).sum(), optimizer) as loss:
        assert loss.item() == 12.0
        loss.backward()
    assert model.weight.grad.tolist() == [[1.0, 2.0]]
    optimizer.step()
    assert model.weight.tolist() == [[0.5, 0.0]]
    with amp.init(enabled=False).scale_loss(model(inputs()).sum(), optimizer) as loss:
        assert loss.item() == 0.5


@pytest.mark.contract("1.9")
def test_verbosity_2_prints_each_cast(capsys):
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.LayerNorm(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=2)
    capsys.readouterr()
    backward(model(inputs()).sum(), optimizer)
    inputs().half()
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == [
        "amp: layer_norm: float16 -> float32 (1, 3)",
        "amp: linear: float32 -> float16 (1, 2)",
        "amp: linear: float32 -> float16 (3, 2)",
    ]
    amp.initialize(model, opt_level="O1", verbosity=1)
    capsys.readouterr()
    model(inputs())
    assert capsys.readouterr().out == ""
