"""MLP, FusedDense and FusedDenseGeluDense against torch's modules (contract 5.6)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.apex import amp
from harness.apex.fused_dense import (
    FusedDense,
    FusedDenseGeluDense,
    dense_no_bias_function,
    fused_dense_function,
    fused_dense_gelu_dense_function,
)
from harness.apex.mlp import MLP, mlp_function

pytestmark = pytest.mark.contract("5.6.mlp", "1.1")

ACTIVATIONS = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "none": nn.Identity}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def sequential(mlp: MLP) -> nn.Sequential:
    """torch's modules with copies of the weights of ``mlp``."""
    layers = []
    for i in range(mlp.num_layers):
        weight = getattr(mlp, f"weight_{i}")
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=mlp.bias, dtype=weight.dtype)
        linear.weight.data.copy_(weight)
        if mlp.bias:
            linear.bias.data.copy_(getattr(mlp, f"bias_{i}"))
        layers += [linear, ACTIVATIONS[mlp.activation]()]
    return nn.Sequential(*layers)


def same_steps(ours: nn.Module, twin: nn.Module, x: torch.Tensor) -> None:
    """Result, gradient of the input and of every parameter are torch's, bit for bit."""
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outputs = [ours(inputs[0]), twin(inputs[1])]
    assert torch.equal(*outputs)
    for y in outputs:
        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for one, other in zip(sorted_grads(ours), sorted_grads(twin), strict=True):
        assert torch.equal(one, other)


def sorted_grads(module: nn.Module) -> list[torch.Tensor]:
    return sorted((p.grad for p in module.parameters()), key=lambda g: (g.dim(), g.shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_equals_a_stack_of_linear_layers(activation, bias, dtype):
    mlp = MLP([5, 7, 4, 3], bias=bias, activation=activation).to(dtype)
    same_steps(mlp, sequential(mlp), torch.randn(6, 5).to(dtype))
    mlp.zero_grad()
    same_steps(mlp, sequential(mlp), torch.randn(5, 6).to(dtype).t())


def test_names_and_shapes():
    assert {n: tuple(p.shape) for n, p in MLP([5, 7, 3]).named_parameters()} == {
        "weight_0": (7, 5), "bias_0": (7,), "weight_1": (3, 7), "bias_1": (3,)
    }  # fmt: skip
    assert list(MLP([5, 7, 3], bias=False).state_dict()) == ["weight_0", "weight_1"]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: MLP([5, 3], activation="gelu"), TypeError, "choose one of 'none', 'relu', 'sigmoid'"),
        (lambda: MLP([5]), ValueError, "needs at least two sizes"),
        (lambda: FusedDenseGeluDense(2, 3, 4, bias=False), ValueError, r"nn\.GELU"),
        (lambda: mlp_function(True, 1, torch.ones(1, 2), torch.ones(2, 2)), ValueError, "given 1 parameter with"),
        (lambda: mlp_function(True, 1, torch.ones(1, 2)), ValueError, "given 0 parameters"),
        (lambda: mlp_function(False, 3, torch.ones(1, 2), torch.ones(2, 2)), ValueError, "activation=3"),
        (lambda: mlp_function(False, -1, torch.ones(1, 2), torch.ones(2, 2)), ValueError, "activation=-1"),
    ],
)
def test_wrong_arguments_are_explained(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_function_takes_apexs_numbers_for_activations():
    x, weight, bias = torch.randn(4, 3), torch.randn(2, 3), torch.randn(2)
    linear = torch.nn.functional.linear(x, weight, bias)
    for number, activation in enumerate([nn.Identity(), nn.ReLU(), nn.Sigmoid()]):
        assert torch.equal(mlp_function(1, number, x, weight, bias), activation(linear))
    assert torch.equal(mlp_function(0, "relu", x, weight), (x @ weight.t()).relu())


@pytest.mark.parametrize(
    ("make", "bounds"),
    [
        (lambda: MLP([400, 900]), {"weight_0": 1 / 20, "bias_0": 1 / 20}),
        (lambda: FusedDense(400, 900), {"weight": 1 / 20, "bias": 1 / 20}),
        (
            lambda: FusedDenseGeluDense(400, 900, 50),
            {"weight1": 1 / 20, "bias1": 1 / 20, "weight2": 1 / 30, "bias2": 1 / 30},
        ),
    ],
)
def test_initialised_like_linear_layers(make, bounds):
    layer = make()
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    assert before.keys() == bounds.keys()
    layer.reset_parameters()
    for name, p in layer.named_parameters():
        assert not torch.equal(p, before[name])
        for values in (p, before[name]):
            assert 0.8 * bounds[name] < values.abs().max() <= bounds[name]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_dense_equals_torch(dtype):
    for bias in (True, False):
        dense, twin = FusedDense(5, 3, bias=bias).to(dtype), nn.Linear(5, 3, bias=bias).to(dtype)
        twin.load_state_dict(dense.state_dict())
        same_steps(dense, twin, torch.randn(6, 5).to(dtype))
    both = FusedDenseGeluDense(5, 7, 3).to(dtype)
    twin = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).to(dtype)
    twin.load_state_dict(dict(zip(twin.state_dict(), both.state_dict().values(), strict=True)))
    same_steps(both, twin, torch.randn(6, 5).to(dtype))


def test_dense_functions():
    x, w1, b1, w2, b2 = (torch.randn(shape) for shape in [(4, 3), (5, 3), (5,), (2, 5), (2,)])
    assert torch.equal(fused_dense_function(x, w1, b1), nn.functional.linear(x, w1, b1))
    assert torch.equal(dense_no_bias_function(x, w1), nn.functional.linear(x, w1))
    hidden = nn.functional.gelu(nn.functional.linear(x, w1, b1))
    expected = nn.functional.linear(hidden, w2, b2)
    assert torch.equal(fused_dense_gelu_dense_function(x, w1, b1, w2, b2), expected)


@pytest.mark.parametrize(("level", "reduced"), [("O1", torch.float16), ("O4", torch.bfloat16)])
@pytest.mark.parametrize(
    "make", [lambda: MLP([5, 7, 3]), lambda: FusedDense(5, 3), lambda: FusedDenseGeluDense(5, 7, 3)]
)
def test_o1_casts_them_like_linear_layers(make, level, reduced):
    model = make()
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, loss_scale=8.0, verbosity=0
    )
    y = model(torch.randn(6, 5))
    assert y.dtype == reduced
    with amp.scale_loss(y.float().square().sum(), optimizer) as scaled:
        scaled.backward()
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.abs().max() > 0
