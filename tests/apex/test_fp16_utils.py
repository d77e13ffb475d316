"""fp16_utils: half-precision models, masters by hand, and loss scalers (contract 1.1, 6.1)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.apex.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16Model,
    LossScaler,
    convert_module,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from tests.apex.shared import copies, same

pytestmark = pytest.mark.contract("1.1")
HALF = torch.float16
INF = float("inf")

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


def test_master_gradient_is_dense_after_a_sparse_one():
    (parameter,), (master,) = [nn.Parameter(torch.ones(3, 2).half())], [nn.Parameter(torch.ones(3, 2))]
    for gradient in (torch.full((3, 2), 2.0).half().to_sparse(1), torch.full((3, 2), 4.0).half()):
        parameter.grad = gradient
        model_grads_to_master_grads([parameter], [master])
        assert torch.equal(master.grad.to_dense(), gradient.to_dense().float())


def test_masters_by_hand_do_not_alias_float32_parameters_and_a_flat_one_takes_one_dtype():
    params, masters = prep_param_lists(nn.Linear(2, 2))
    assert masters[0].data_ptr() != params[0].data_ptr()
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


def test_dynamic_scaler():
    scaler = DynamicLossScaler()
    assert vars(scaler) == {
        "cur_scale": 2.0**32, "cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000,
        "min_loss_scale": 1.0, "max_loss_scale": INF,
    }, "the constants of 2018"  # fmt: skip
    scaler = DynamicLossScaler(16.0, scale_factor=4.0, scale_window=3, max_loss_scale=32.0)
    trace = []
    for overflow in [False, False, False, True, False, False, False, True, True, True, True]:
        scaler.update_scale(overflow)
        trace.append(scaler.loss_scale)
    assert trace == [16, 16, 32, 8, 8, 8, 32, 8, 2, 1, 1]
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
