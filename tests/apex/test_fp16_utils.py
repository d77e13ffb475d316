"""fp16_utils: half-precision models, masters by hand, loss scalers, and FP16_Optimizer (contract 1.1, 6.1)."""

from __future__ import annotations

import copy
import io
import sys
import types

import pytest
import torch
from torch import nn

from harness.apex import amp, fp16_utils, fused_adam_cuda
from harness.apex.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16_Optimizer,
    FP16Model,
    LossScaler,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from harness.apex.optimizers import FP16_Optimizer as FlatFP16_Optimizer
from harness.apex.optimizers import FusedAdam
from tests.apex.shared import copies, same, through_a_file

pytestmark = pytest.mark.contract("1.1")
HALF = torch.float16
INF = float("inf")
HIGH = {"init_scale": 2.0**32, "max_loss_scale": 2.0**32}  # a scale at which the first steps overflow

NAMES = """network_to_half BN_convert_float convert_network convert_module tofp16 FP16Model FP16_Optimizer LossScaler
DynamicLossScaler prep_param_lists model_grads_to_master_grads master_params_to_model_params clip_grad_norm
to_python_float"""


def test_star_import_brings_every_name():
    space: dict = {}
    exec("from harness.apex.fp16_utils import *", space)
    assert set(NAMES.split()) <= set(space)
    assert fp16_utils.clip_grad_norm is nn.utils.clip_grad_norm_


# Models


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.affine = nn.BatchNorm2d(4)
        self.plain = nn.BatchNorm2d(4, affine=False)
        self.register_buffer("count", torch.tensor([7]))

    def forward(self, x, shift=None):
        y = self.plain(self.affine(self.conv(x)))
        return y if shift is None else y + shift


def dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in module.state_dict().items() if "num_batches" not in name}


EXPECTED = {
    "conv.weight": HALF,
    "conv.bias": HALF,
    "affine.weight": torch.float32,
    "affine.bias": torch.float32,
    "affine.running_mean": torch.float32,
    "affine.running_var": torch.float32,
    "plain.running_mean": HALF,
    "plain.running_var": HALF,
    "count": torch.int64,
}


@pytest.mark.contract("6.1.fp16util")
def test_fp16_model_keeps_affine_batch_norm_in_float32():
    net = Net()
    model = FP16Model(net)
    assert model.network is net
    assert dtypes(net) == EXPECTED
    y = model(torch.randn(2, 3, 5, 5))
    assert y.dtype == HALF
    assert torch.equal(model(torch.ones(2, 3, 5, 5), shift=torch.ones(1)), model(torch.ones(2, 3, 5, 5)) + 1)
    y.sum().backward()
    assert net.conv.weight.grad.dtype == HALF
    assert net.affine.weight.grad.dtype == torch.float32


@pytest.mark.contract("6.1.fp16util")
def test_network_to_half_does_not_round_batch_norm():
    net = Net()
    net.affine.running_mean.fill_(1 + 2**-20)
    model = network_to_half(net)
    assert dtypes(model) == {f"1.{name}": dtype for name, dtype in EXPECTED.items()}
    assert isinstance(model[0], tofp16)
    assert net.affine.running_mean[0] == 1 + 2**-20
    assert model(torch.randn(2, 3, 5, 5)).dtype == HALF


def test_affine_batch_norm_is_converted_back_to_float32():
    net = nn.Sequential(Net().half(), nn.BatchNorm1d(3).half(), nn.LayerNorm(3).half())
    assert BN_convert_float(net) is net
    assert dtypes(net[0]) == EXPECTED
    assert net[1].weight.dtype == net[1].running_var.dtype == torch.float32
    assert net[2].weight.dtype == HALF


def test_convert_module_leaves_children_alone():
    net = Net()
    net.own = nn.Parameter(torch.ones(2))
    net.own.grad = torch.ones(2)
    net.register_buffer("scale", torch.ones(1))
    own = net.own
    convert_module(net, HALF)
    assert net.own is own
    assert own.dtype == own.grad.dtype == net.scale.dtype == HALF
    assert net.count.dtype == torch.int64
    assert net.conv.weight.dtype == torch.float32


# Masters by hand


@pytest.mark.parametrize("flat", [False, True])
def test_masters_by_hand(flat):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(1, 1)).half()
    model[0].bias.requires_grad_(False)
    params, masters = prep_param_lists(model, flat_master=flat)
    assert [id(p) for p in params] == [id(p) for p in model.parameters() if p.requires_grad]
    assert [tuple(m.shape) for m in masters] == ([(24,)] if flat else [(4, 3), (2, 4), (2,), (1, 1), (1,)])
    assert {m.dtype for m in masters} == {torch.float32}
    assert all(m.requires_grad and m.is_leaf for m in masters)

    model[1](model[0](torch.ones(1, 3).half())).sum().backward()  # the last layer gets no gradient
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    for _ in range(2):  # the second time gradients are replaced, not added to
        model_grads_to_master_grads(params, masters, flat_master=flat)
        if flat:
            assert torch.equal(masters[0].grad, torch.cat([g.reshape(-1) for g in expected]).float())
        else:
            assert masters[-1].grad is None
            assert same([m.grad for m in masters[:3]], [g.float() for g in expected[:3]])

    with torch.no_grad():
        for master in masters:
            master.add_(1.0)
    before = copies(params)
    master_params_to_model_params(params, masters, flat_master=flat)
    assert same(params, [(old.float() + 1).half() for old in before])
    params[0].grad = None
    model_grads_to_master_grads(params, masters, flat_master=flat)
    assert not masters[0].grad[:12].any() if flat else masters[0].grad is None


def test_masters_by_hand_do_not_alias_float32_parameters():
    params, masters = prep_param_lists(nn.Linear(2, 2))
    assert masters[0].data_ptr() != params[0].data_ptr()


def test_flat_master_takes_one_dtype():
    with pytest.raises(ValueError, match=r"one dtype; found .*float16.*float32.*flat_master=False"):
        prep_param_lists(BN_convert_float(Net().half()), flat_master=True)


@pytest.mark.parametrize("value", [torch.tensor(1.5), torch.tensor([1.5]), [1.5], 1.5], ids=str)
def test_to_python_float(value):
    assert to_python_float(value) == 1.5


# Scalers


def with_grad(values, dtype=torch.float32) -> torch.Tensor:
    parameter = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    parameter.grad = torch.tensor(values, dtype=dtype)
    return parameter


def test_static_scaler_never_looks_for_overflow():
    scaler = LossScaler(128.0)
    assert scaler.has_overflow([with_grad([1.0, INF])]) is False
    scaler.update_scale(True)
    assert scaler.loss_scale == 128.0
    assert LossScaler().loss_scale == 1


def test_dynamic_scaler_has_the_legacy_constants():
    scaler = DynamicLossScaler()
    assert vars(scaler) == {
        "cur_scale": 2.0**32, "cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000,
        "min_loss_scale": 1.0, "max_loss_scale": INF,
    }  # fmt: skip
    for _ in range(999):
        scaler.update_scale(False)
    assert scaler.loss_scale == 2.0**32
    scaler.update_scale(False)
    assert scaler.loss_scale == 2.0**33


def test_dynamic_scaler_trace():
    scaler = DynamicLossScaler(16.0, scale_factor=4.0, scale_window=3)
    trace = []
    for overflow in [False, False, False, True, False, False, False, True, True, True, True]:
        scaler.update_scale(overflow)
        trace.append(scaler.loss_scale)
    assert trace == [16, 16, 64, 16, 16, 16, 64, 16, 4, 1, 1]
    scaler.cur_scale = 0.5
    scaler.update_scale(True)
    assert scaler.loss_scale == 0.5, "an overflow never raises the scale"


@pytest.mark.parametrize("settings", [{"init_scale": 0}, {"scale_factor": 1.0}, {"scale_window": 0}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        DynamicLossScaler(**settings)


def test_overflow_is_any_inf_or_nan_in_any_dtype():
    scaler = DynamicLossScaler()
    finite = [with_grad([1.0, -2.0]), with_grad([3e38, 3e38]), with_grad([65504.0] * 9, HALF), with_grad([])]
    assert scaler.has_overflow([*finite, nn.Parameter(torch.ones(1))]) is False
    assert scaler.has_overflow([]) is False
    for bad in (INF, -INF, float("nan")):
        for dtype in (HALF, torch.bfloat16, torch.float32, torch.float64):
            assert scaler.has_overflow([*finite, with_grad([1.0, bad, 1.0], dtype)]) is True
    for factor in (1.0, INF):
        table = nn.Embedding(5, 2, sparse=True)
        (table(torch.tensor([1, 1])).sum() * factor).backward()
        assert scaler.has_overflow([table.weight]) is (factor == INF)


def test_scale_gradient_is_a_backward_hook():
    layer = nn.Linear(2, 2)
    layer.register_full_backward_hook(LossScaler(8.0).scale_gradient)
    x = torch.ones(1, 2, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(x.grad, 8 * layer.weight.sum(0, keepdim=True))
    assert LossScaler(2.0).scale_gradient(layer, (None,), ()) == (None,)


# FP16_Optimizer


MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


def make_model(dtype=HALF) -> nn.Module:
    torch.manual_seed(3)
    return convert_network(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), dtype)


def build(maker="sgd", dtype=HALF, **arguments) -> tuple[nn.Module, FP16_Optimizer]:
    model = make_model(dtype)
    inner = MAKERS[maker](model.parameters()) if isinstance(maker, str) else maker(model.parameters())
    return model, FP16_Optimizer(inner, **arguments)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(16, 6, generator=generator), torch.randn(16, 3, generator=generator)
    return nn.functional.mse_loss(model(x.to(model[0].weight.dtype)).float(), target)


def masters_of(optimizer: FP16_Optimizer) -> list[torch.Tensor]:
    return optimizer.param_groups[0]["params"]


def train(model, optimizer, steps, clip=None) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        optimizer.backward(loss)
        if clip is not None:
            optimizer.clip_master_grads(clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_hand(model, make_optimizer, steps, scale, clip=None) -> tuple[list[float], list[torch.Tensor]]:
    """The recipe of the mixed precision papers, spelled out parameter by parameter."""
    params = list(model.parameters())
    masters = [p.detach().float().clone().requires_grad_() for p in params]
    optimizer = make_optimizer(masters)
    losses = []
    for step in steps:
        for p in params:
            p.grad = None
        loss = loss_of(model, step)
        (loss.float() * scale).backward()
        for p, master in zip(params, masters, strict=True):
            master.grad = p.grad.float() / scale
        if clip is not None:
            nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(params, masters, strict=True):
                p.copy_(master)
        losses.append(loss.item())
    return losses, masters


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_training_equals_the_recipe_by_hand(dtype, maker, dynamic, clip):
    arguments = {"dynamic_loss_args": {"init_scale": 1024.0}} if dynamic else {"static_loss_scale": 1024.0}
    model, optimizer = build(maker, dtype, dynamic_loss_scale=dynamic, **arguments)
    twin = make_model(dtype)
    losses = train(model, optimizer, range(8), clip)
    expected, masters = by_hand(twin, MAKERS[maker], range(8), 1024.0, clip)
    assert losses == expected
    assert losses[-1] != losses[0]
    assert same(masters_of(optimizer), masters)
    assert same(model.parameters(), twin.parameters())


def test_masters_replace_half_parameters_in_the_groups():
    model = make_model()
    inside = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 1.0}], lr=0.1)
    optimizer = FP16_Optimizer(inside)
    assert optimizer.optimizer is inside
    assert optimizer.param_groups is inside.param_groups
    assert optimizer.state is inside.state
    assert optimizer.fp16_groups == [[model[0].weight, model[0].bias], []]
    assert inside.param_groups[1]["params"][0] is model[1].weight, "float32 is its own master"
    assert optimizer.fp32_from_fp32_groups == [[], [model[1].weight, model[1].bias]]
    assert same(optimizer.fp32_from_fp16_groups[0], [p.float() for p in optimizer.fp16_groups[0]])
    assert isinstance(optimizer, torch.optim.Optimizer)


# Overflow


def test_overflow_skips_the_step_and_halves_the_scale(caplog):
    model, optimizer = build("adam", dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**24})
    assert optimizer.loss_scale == 2.0**24
    seen = []
    for _ in range(30):
        params = copies((*model.parameters(), *masters_of(optimizer)))
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, 0))
        before, overflow = optimizer.loss_scale, optimizer.overflow
        if overflow:
            assert optimizer.clip_master_grads(1.0) == -1
            assert optimizer.inspect_master_grad_data() is None
        assert optimizer.step() is None
        assert same(params, (*model.parameters(), *masters_of(optimizer))) == overflow
        assert optimizer.loss_scale == (before / 2 if overflow else before)
        seen.append(overflow)
    assert seen[0]
    assert not seen[-1]
    assert seen == sorted(seen, reverse=True), "it finds a scale that fits and keeps it"
    assert f"loss scale {2.0**24:g}, now {2.0**23:g}" in caplog.text


def test_dynamic_scale_has_the_constants_of_amp():
    _, optimizer = build("sgd", dynamic_loss_scale=True)
    scaler, start = optimizer.loss_scaler, optimizer.loss_scale
    assert start == 2.0**16, "Apex's FP16_Optimizer took the scaler of amp from 2019 on"
    scales = []
    for _ in range(20_000):
        scaler.update_scale(False)
        scales.append(scaler.loss_scale)
    assert [scales[1998], scales[1999], scales[3998], scales[3999]] == [start, 2 * start, 2 * start, 4 * start]
    assert scales[-1] == 2.0**24
    arguments = {"init_scale": 64.0, "scale_window": 2, "min_loss_scale": 16.0, "max_loss_scale": 128.0}
    _, optimizer = build("sgd", dynamic_loss_scale=True, dynamic_loss_args=arguments)
    for overflow, expected in ((True, 32.0), (True, 16.0), (True, 16.0), *[(False, None)] * 9, (False, 128.0)):
        optimizer.loss_scaler.update_scale(overflow)
        assert expected in (None, optimizer.loss_scale)


def test_nan_in_a_float32_parameter_skips_the_step():
    arguments = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 8.0}, "verbose": False}
    model, optimizer = build(**arguments)
    before = copies((*model.parameters(), *masters_of(optimizer)))
    optimizer.backward(model[1].weight.sum() * float("nan"))
    assert optimizer.overflow
    optimizer.step()
    assert optimizer.loss_scale == 4.0
    assert same(before, (*model.parameters(), *masters_of(optimizer)))
    assert not optimizer.state


def test_skipped_steps_are_not_logged_unless_verbose(caplog):
    model, optimizer = build(dynamic_loss_scale=True, dynamic_loss_args=HIGH, verbose=False)
    train(model, optimizer, range(2))
    assert optimizer.loss_scale == 2.0**30
    assert caplog.text == ""


def test_scale_grows_by_steps_and_may_be_set():
    model, optimizer = build(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0, "scale_window": 2})
    train(model, optimizer, range(4))
    assert optimizer.loss_scale == 32.0
    optimizer.loss_scale = 4.0
    assert optimizer.loss_scaler.cur_scale == 4.0


# Gradients


def grads(optimizer) -> list[torch.Tensor]:
    return [g.clone() for group in optimizer.inspect_master_grad_data() for g in group]


@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_backward_calls_add_up_in_every_precision(scale):
    """Apex divided the gradients of float32 parameters by the scale once for every backward."""
    model, optimizer = build(static_loss_scale=scale)
    model.eval()
    singles = []
    for step in (0, 1):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, step))
        singles.append(grads(optimizer))
    expected = [one + other for one, other in zip(*singles, strict=True)]
    for updates in ([True, True], [False, True], [False, False]):
        optimizer.zero_grad()
        for step, update in enumerate(updates):
            optimizer.backward(loss_of(model, step), update_master_grads=update)
        if not updates[-1]:
            optimizer.update_master_grads()
        optimizer.update_master_grads()  # again: nothing is unscaled twice
        for one, other in zip(grads(optimizer), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-4)


def test_masters_hold_unscaled_gradients_after_backward():
    model, optimizer = build(static_loss_scale=64.0)
    optimizer.backward(loss_of(model, 0))
    assert torch.equal(grads(optimizer)[0], model[0].weight.grad.float() / 64)
    assert optimizer.clip_master_grads(1e-3) > 1e-3
    assert torch.stack([g.norm() for g in grads(optimizer)]).norm() == pytest.approx(1e-3, rel=1e-3)
    assert optimizer.clip_master_grads(1.0, norm_type=INF) == max(g.abs().max() for g in grads(optimizer))


@pytest.mark.parametrize("argument", ["set_grads_to_None", "set_to_none"])
def test_zero_grad(argument):
    model, optimizer = build()
    everything = [*model.parameters(), *masters_of(optimizer)]
    optimizer.backward(loss_of(model, 0))
    assert any(p.grad.any() for p in everything)
    optimizer.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in everything)
    optimizer.backward(loss_of(model, 0))
    optimizer.zero_grad(**{argument: True})
    assert all(p.grad is None for p in everything)


def test_parameters_without_gradient_do_not_move():
    model, optimizer = build(lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.5))
    train(model, optimizer, [0])
    optimizer.zero_grad(set_to_none=True)
    optimizer.backward(model[3].weight.float().sum())
    before = model[0].weight.clone()
    optimizer.step()
    assert optimizer.inspect_master_grad_data()[0][0] is None
    assert torch.equal(model[0].weight, before)


def test_sparse_gradients():
    table = nn.Embedding(5, 2, sparse=True).half()
    optimizer = FP16_Optimizer(torch.optim.SGD(table.parameters(), lr=1.0), static_loss_scale=8.0)
    expected = table.weight.detach().float()
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        optimizer.backward(table(torch.tensor([1, 1, 3])).sum())
        optimizer.step()
    expected[1] -= 4
    expected[3] -= 2
    assert torch.equal(optimizer.fp32_from_fp16_groups[0][0], expected)
    assert torch.equal(table.weight, expected.half())


def test_retain_graph():
    model, optimizer = build()
    loss = loss_of(model, 0)
    optimizer.backward(loss, retain_graph=True)
    once = grads(optimizer)
    optimizer.backward(loss)
    assert torch.equal(grads(optimizer)[-1], 2 * once[-1])
    with pytest.raises(RuntimeError, match="second time"):
        optimizer.backward(loss)


# Closures


@pytest.mark.parametrize("maker", MAKERS)
def test_step_with_a_closure_equals_the_plain_step(maker):
    model, optimizer = build(maker, static_loss_scale=128.0)
    twin, plain = build(maker, static_loss_scale=128.0)
    for step in range(4):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            optimizer.backward(loss)
            return loss

        assert [optimizer.step(closure).item()] == train(twin, plain, [step])
    assert same(model.parameters(), twin.parameters())
    assert optimizer.first_closure_call_this_step


def test_closure_is_called_again_on_moved_weights_and_at_smaller_scales():
    model, optimizer = build(
        lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=4),
        dynamic_loss_scale=True,
        dynamic_loss_args=HIGH,
        verbose=False,
    )
    weights, kept = [], []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        optimizer.backward(loss)
        weights.append(model[0].weight.detach().clone())
        if not optimizer.overflow:
            kept.append(loss.item())
            assert same(optimizer.fp16_groups[0], [m.half() for m in optimizer.fp32_from_fp16_groups[0]])
        return loss

    for _ in range(3):
        assert optimizer.step(closure).isfinite()
    assert len(weights) > len(kept) > 3, "it is called again after overflows"
    assert not torch.equal(weights[0], weights[-1])
    assert kept[-1] < kept[0] / 2
    assert 1.0 <= optimizer.loss_scale < 2.0**32


def test_closure_that_is_never_finite_raises():
    model, optimizer = build(dynamic_loss_scale=True, dynamic_loss_args=HIGH, verbose=False)
    calls = []

    def closure():
        optimizer.zero_grad()
        calls.append(1)
        optimizer.backward(loss_of(model, 0) * float("nan"))

    with pytest.raises(FloatingPointError, match="every loss scale down to 1:"):
        optimizer.step(closure)
    assert len(calls) == 33
    assert optimizer.first_closure_call_this_step


# Which parameters


def test_groups_added_later_get_masters():
    model = make_model()
    optimizer = FP16_Optimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), static_loss_scale=16.0)
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.2})
    assert [p.dtype for p in optimizer.param_groups[1]["params"]] == [torch.float32] * 2
    before = model[3].weight.clone()
    optimizer.backward(loss_of(model, 0))
    gradient = optimizer.inspect_master_grad_data()[1][0].clone()
    optimizer.step()
    assert torch.equal(model[3].weight, (before.float() - 0.2 * gradient).half())
    with pytest.raises(TypeError, match=r"float64 parameter of shape \(2,\)"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]})
    assert len(optimizer.param_groups) == 2


def test_other_dtypes_are_refused_before_anything_changes():
    half, double = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2).double())
    inside = torch.optim.SGD([half, double], lr=0.1)
    with pytest.raises(TypeError, match=r"Cast it with \.float\(\)"):
        FP16_Optimizer(inside)
    assert inside.param_groups[0]["params"][0] is half


def test_unfreezing_a_parameter_without_master_is_refused():
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = FP16_Optimizer(MAKERS["sgd"](model.parameters()))
    assert masters_of(optimizer)[0] is model[0].weight
    train(model, optimizer, range(2))
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="has no master"):
        train(model, optimizer, [2])


@pytest.mark.parametrize("what", [None, "optimizer", [1]], ids=str)
def test_only_an_optimizer_is_wrapped(what):
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        FP16_Optimizer(what)


def test_optimizers_that_have_masters_are_refused():
    with pytest.raises(RuntimeError, match="already has masters"):
        FP16_Optimizer(build()[1])
    net = nn.Linear(2, 2)
    _, optimizer = amp.initialize(net, MAKERS["sgd"](net.parameters()), opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match="from amp"):
        FP16_Optimizer(optimizer)


@pytest.mark.contract("1.2.types")
@pytest.mark.parametrize("form", [lambda optimizer: optimizer, lambda optimizer: [optimizer]])
def test_amp_refuses_it(form):
    model = nn.Linear(2, 2)
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="FP16_Optimizer"):
        amp.initialize(model, form(optimizer), opt_level="O2", verbosity=0)
    assert model.weight.dtype == torch.float32


def test_weights_loaded_late_are_kept():
    """In Apex the first step restored the weights from before."""
    model, optimizer = build(lambda params: torch.optim.SGD(params, lr=0.0))
    loaded = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    assert torch.equal(optimizer.state_dict()["fp32_from_fp16"][0][0], loaded["0.weight"].float())
    train(model, optimizer, [0])
    assert torch.equal(model[0].weight, loaded["0.weight"])


def test_schedulers_and_step_hooks_work():
    model, optimizer = build(lambda params: torch.optim.SGD(params, lr=1.0))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(model, optimizer, [0])
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.5
    assert "lr: 0.5" in repr(optimizer)
    assert calls == [1]


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


@pytest.mark.parametrize("scaling", [{"dynamic_loss_scale": True}, {"static_loss_scale": 128.0}])
def test_flat_masters_equal_the_recipe_by_hand(scaling):
    model, optimizer = flat_recipe(**scaling)
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
        torch.testing.assert_close(flat.detach(), torch.cat([p.reshape(-1) for p in params]), rtol=1e-5, atol=1e-6)
    assert optimizer.cur_scale == (2.0**15 if "dynamic_loss_scale" in scaling else 128.0)
    assert same([model[0].bias.detach()], [optimizer.fp32_groups_flat[1][:5].detach().half()])
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


def test_flat_optimizer_calls_a_fused_adam_that_scripts_carry():
    ours = train_flat(*flat_recipe(), range(5), overflow_at=1)
    theirs = train_flat(*flat_recipe(CarriedFusedAdam), range(5), overflow_at=1)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5)


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
