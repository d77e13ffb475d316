"""Checkpoints of FP16_Optimizer, and its namesake in apex.optimizers, with flat masters (contract 1.1, 6.1)."""

from __future__ import annotations

import copy
import io
import sys
import types

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.apex import fused_adam_cuda
from harness.apex.fp16_utils import FP16_Optimizer
from harness.apex.optimizers import FP16_Optimizer as FlatFP16_Optimizer
from harness.apex.optimizers import FusedAdam
from tests.apex.fp16_training import HALF, HIGH, INF, MAKERS, build, loss_of, masters_of, train
from tests.apex.shared import copies, same, through_a_file
from tests.syncs import fakes

pytestmark = pytest.mark.contract("1.1")


# Saving and loading

DYNAMIC = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**18}, "verbose": False}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_resumed_run_equals_the_uninterrupted_one(maker, order):
    model, optimizer = build(maker, **DYNAMIC)
    uninterrupted = train(model, optimizer, range(12))

    half, half_optimizer = build(maker, **DYNAMIC)
    before = train(half, half_optimizer, range(6))
    saved = through_a_file({"model": half.state_dict(), "optimizer": half_optimizer.state_dict()})

    resumed, resumed_optimizer = build(maker, static_loss_scale=1.0)
    train(resumed, resumed_optimizer, range(20, 22))
    loads = [
        lambda: resumed.load_state_dict(saved["model"]),
        lambda: resumed_optimizer.load_state_dict(saved["optimizer"]),
    ]
    for load in loads if order == "model first" else reversed(loads):
        load()
    assert before + train(resumed, resumed_optimizer, range(6, 12)) == uninterrupted
    assert vars(resumed_optimizer.loss_scaler) == vars(optimizer.loss_scaler)
    assert resumed_optimizer.dynamic_loss_scale
    assert same(masters_of(resumed_optimizer), masters_of(optimizer))


def test_state_has_the_keys_of_apex_and_plain_data():
    model, optimizer = build("adam", **DYNAMIC)
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    assert " ".join(sorted(state)) == (
        "dynamic_loss_scale first_closure_call_this_step fp32_from_fp16 loss_scaler optimizer_state_dict overflow"
    )
    assert state["loss_scaler"] == vars(optimizer.loss_scaler)
    assert state["loss_scaler"] is not vars(optimizer.loss_scaler)
    assert [[t.dtype for t in group] for group in state["fp32_from_fp16"]] == [[torch.float32] * 4]


def test_state_saved_between_overflow_and_step_skips_that_step():
    model, optimizer = build("adam", dynamic_loss_scale=True, dynamic_loss_args=HIGH)
    optimizer.backward(loss_of(model, 0))
    assert optimizer.overflow
    _, resumed_optimizer = build("adam", dynamic_loss_scale=True, dynamic_loss_args=HIGH)
    resumed_optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    resumed_optimizer.step()
    assert resumed_optimizer.loss_scale == 2.0**31
    assert not resumed_optimizer.state


def old_file(monkeypatch, module: str, class_name: str, attributes: dict, optimizer: FP16_Optimizer) -> bytes:
    """A file as Apex wrote it: the state, with the scaler as an object of a class that only Apex had."""
    parts = module.split(".")
    with monkeypatch.context() as patch:
        for name in (".".join(parts[: i + 1]) for i in range(len(parts))):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        old_class = type(class_name, (), {"__module__": module, "__qualname__": class_name})
        setattr(sys.modules[module], class_name, old_class)
        scaler = old_class()
        vars(scaler).update(attributes)
        masters = [[nn.Parameter(t.clone()) for t in group] for group in optimizer.fp32_from_fp16_groups]
        file = io.BytesIO()
        torch.save({**optimizer.state_dict(), "loss_scaler": scaler, "fp32_from_fp16": masters}, file)
        return file.getvalue()


# module and class of the scaler, its attributes, scale, dynamic
OLD = {
    "dynamic": ("apex.fp16_utils.loss_scaler", "DynamicLossScaler", {"cur_scale": 64.0, "cur_iter": 7,
                "last_overflow_iter": 2, "scale_factor": 2.0, "scale_window": 1000}, 64.0, True),
    "static": ("apex.fp16_utils.loss_scaler", "LossScaler", {"cur_scale": 128.0}, 128.0, False),
    "of amp": ("apex.amp.scaler", "LossScaler", {"dynamic": True, "_loss_scale": 32.0, "_max_loss_scale": 2.0**24,
               "_min_loss_scale": None, "_scale_seq_len": 2000, "_unskipped": 1999, "_has_overflow": False,
               "_overflow_buf": torch.zeros(1, dtype=torch.int)}, 32.0, True),
    "of amp, static": ("apex.amp.scaler", "LossScaler", {"dynamic": False, "_loss_scale": 16.0}, 16.0, False),
}  # fmt: skip


@pytest.mark.contract("7.2")
@pytest.mark.parametrize("which", OLD)
def test_files_of_apex_load(monkeypatch, which):
    module, class_name, attributes, scale, dynamic = OLD[which]
    model, optimizer = build("adam", **DYNAMIC)
    train(model, optimizer, range(12))
    content = old_file(monkeypatch, module, class_name, attributes, optimizer)
    assert b"apex" in content
    assert module not in sys.modules

    resumed, resumed_optimizer = build("adam", **DYNAMIC)
    resumed_optimizer.load_state_dict(torch.load(io.BytesIO(content), weights_only=True))
    assert resumed_optimizer.loss_scale == scale
    assert resumed_optimizer.dynamic_loss_scale is dynamic
    assert same(resumed[0].parameters(), model[0].parameters()), "the masters are copied to the model"
    if which == "dynamic":
        limits = {"min_loss_scale": 1.0, "max_loss_scale": INF}
        assert vars(resumed_optimizer.loss_scaler) == {**attributes, **limits}
    train(resumed, resumed_optimizer, [12])
    assert resumed_optimizer.loss_scale == (64.0 if which == "of amp" else scale)  # its 2000th clean step


def test_state_that_does_not_fit_changes_nothing():
    model, optimizer = build("adam", **DYNAMIC)
    train(model, optimizer, range(3))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    state = copy.deepcopy(optimizer.state_dict())
    state["fp32_from_fp16"][0].pop()
    with pytest.raises(ValueError, match="saved masters do not fit"):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="not a loss scaler of fp16_utils"):
        optimizer.load_state_dict({**optimizer.state_dict(), "loss_scaler": {"scale": 1}})
    with pytest.raises(ValueError, match="incomplete: it has no last_overflow_iter, scale_factor, scale_window"):
        optimizer.load_state_dict({**optimizer.state_dict(), "loss_scaler": {"cur_scale": 2.0, "cur_iter": 1}})
    assert str((model.state_dict(), optimizer.state_dict())) == str(before)


def test_deep_copy_trains_independently():
    model, optimizer = build("adam", **DYNAMIC)
    train(model, optimizer, range(3))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    before = copies(model.parameters())
    expected = train(twin, twin_optimizer, range(3, 12))
    assert same(model.parameters(), before)
    assert train(model, optimizer, range(3, 12)) == expected


# FP16_Optimizer of apex.optimizers, with flat masters


class CarriedFusedAdam(torch.optim.Optimizer):
    """The FusedAdam of 2018, as scripts carry it with them: it takes the gradients as an argument."""

    def __init__(self, params, lr, bias_correction, max_grad_norm, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        self.bias_correction, self.max_grad_norm = bias_correction, max_grad_norm

    def step(self, closure=None, grads=None, output_params=None, scale=1.0, grad_norms=None):
        for group, given, norm in zip(self.param_groups, grads, grad_norms, strict=True):
            factor = scale * max(1.0, (norm / scale + 1e-6) / self.max_grad_norm)
            for param, grad in zip(group["params"], given, strict=True):
                state = self.state[param]
                if not state:
                    state.update(step=0, m=torch.zeros_like(param), v=torch.zeros_like(param))
                state["step"] += 1
                out = torch.empty_like(param, dtype=HALF)
                fused_adam_cuda.adam(
                    param.data, out, state["m"], state["v"], grad, group["lr"], 0.9, 0.999, 1e-8, factor,
                    state["step"], 1, int(self.bias_correction), group["weight_decay"],
                )  # fmt: skip
                assert same([out], [param.detach().half()])


def flat_recipe(maker=FusedAdam, **scaling):
    """The model and optimizer of a BERT script of 2018: float16, weight decay for one of two groups, clipping."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).half()
    groups = [
        {"params": [model[0].weight, model[2].weight], "weight_decay": 0.01},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
    ]
    inner = maker(groups, lr=0.02, bias_correction=False, max_grad_norm=0.1)
    return model, FlatFP16_Optimizer(inner, **(scaling or {"dynamic_loss_scale": True}))


def train_flat(model, optimizer, steps, overflow_at=None, check=None):
    for i in steps:
        x = torch.full((4, 6), 0.1 * (i + 1), dtype=HALF)
        loss = model(x).float().pow(2).mean() * (INF if i == overflow_at else 1.0)
        optimizer.backward(loss)
        if check:
            check(i)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("maker", [FusedAdam, CarriedFusedAdam])
@pytest.mark.parametrize("scaling", [{"dynamic_loss_scale": True}, {"static_loss_scale": 128.0}])
def test_flat_masters_equal_the_recipe_by_hand(maker, scaling):
    model, optimizer = flat_recipe(maker, **scaling)
    masters = [[p.detach().float() for p in group] for group in optimizer.fp16_groups]
    moments = [[(torch.zeros_like(p), torch.zeros_like(p)) for p in group] for group in masters]

    def by_hand(i):
        if i == 2:
            return
        for group, params, state, decay in zip(optimizer.fp16_groups, masters, moments, (0.01, 0.0), strict=True):
            grads = [p.grad.float() / optimizer.cur_scale for p in group]
            norm = sum(g.pow(2).sum() for g in grads) ** 0.5
            factor = min(1.0, 0.1 / float(norm + 1e-6))
            for p, g, (m, v) in zip(params, grads, state, strict=True):
                m.mul_(0.9).add_(factor * g, alpha=0.1)
                v.mul_(0.999).add_((factor * g) ** 2, alpha=0.001)
                p.sub_(0.02 * (m / (v.sqrt() + 1e-8) + decay * p))

    train_flat(model, optimizer, range(6), overflow_at=2, check=by_hand)
    for flat, params in zip(optimizer.fp32_groups_flat, masters, strict=True):
        torch.testing.assert_close(flat.detach(), torch.cat([p.reshape(-1) for p in params]), rtol=1e-5, atol=1e-5)
    assert optimizer.cur_scale == (2.0**15 if "dynamic_loss_scale" in scaling else 128.0)
    assert same([model[0].bias.detach()], [optimizer.fp32_groups_flat[1][:5].detach().half()])
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


def test_code_between_backward_and_step_sees_scaled_gradients_and_may_change_them():
    model, optimizer = flat_recipe(static_loss_scale=64.0)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.backward(model(torch.ones(2, 6, dtype=HALF)).sum())
    assert same([model[2].bias.grad], [torch.full((3,), 128.0, dtype=HALF)])
    for param in model.parameters():
        param.grad.zero_()  # as after an all-reduce of the script's own
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    assert same(before, model.parameters())


def test_flat_state_has_the_keys_of_apex_and_resumes_exactly():
    expected = train_flat(*flat_recipe(), range(6), overflow_at=1)
    model, optimizer = flat_recipe()
    train_flat(model, optimizer, range(3), overflow_at=1)
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    scaler = {"dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window"}
    assert set(saved[1]) == scaler | {"optimizer_state_dict", "fp32_groups_flat"}
    model, optimizer = flat_recipe(static_loss_scale=1.0)
    optimizer.load_state_dict(saved[1])
    model.load_state_dict(saved[0])  # after the optimizer: the exact masters are kept
    assert same(expected, train_flat(model, optimizer, range(3, 6)))
    with torch.no_grad():
        model[0].bias.fill_(7.0)  # other weights, loaded late, win
    optimizer.step()
    assert model[0].bias.min() > 6.9
    with pytest.raises(ValueError, match="do not fit"):
        FlatFP16_Optimizer(FusedAdam(nn.Linear(2, 2).parameters())).load_state_dict(saved[1])
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: None)


@fakes
@pytest.mark.host
def test_flat_masters_are_on_the_device_of_their_group():
    """Also that of a group whose parameters are all frozen: the norms of all groups are read at once."""
    with FakeTensorMode():
        layers = [nn.Linear(2, 2, device="cuda:0", dtype=HALF) for _ in range(2)]
        layers[1].requires_grad_(False)
        optimizer = FlatFP16_Optimizer(FusedAdam([{"params": layer.parameters()} for layer in layers], lr=0.1))
        optimizer.add_param_group({"params": []})
        gradients = map(optimizer._flat_gradient, optimizer.fp16_groups, optimizer.fp32_groups_flat)
        assert [str(gradient.device) for gradient in gradients] == ["cuda:0", "cuda:0", "cpu"]
