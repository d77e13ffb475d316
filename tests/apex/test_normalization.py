"""FusedLayerNorm, FusedRMSNorm, their Mixed forms and functions, against torch's modules and float64 (contract 5.6)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.apex import amp
from harness.apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from harness.apex.normalization import fused_layer_norm as functions

pytestmark = pytest.mark.contract("5.6.norm", "1.1")

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# One rounding of the result: half the distance between two neighbours, relative, with room for one more.
ULP = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-14}


def randomized(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 1.5)
    return layer


def exact(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Result and gradients of input and parameters, in float64, of torch's layer with the same weights."""
    kind = nn.LayerNorm if isinstance(layer, nn.LayerNorm) else nn.RMSNorm
    twin = kind(layer.normalized_shape, eps=layer.eps, elementwise_affine=layer.elementwise_affine).double()
    twin.load_state_dict(layer.state_dict())
    x = x.detach().double().requires_grad_()
    y = twin(x)
    y.backward(grad.double())
    return [y, x.grad, *(p.grad for p in twin.parameters())]


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        actual.double(), expected, rtol=tolerance, atol=tolerance * float(expected.detach().abs().max())
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm])
@pytest.mark.parametrize("shape", [16, (16,), (3, 16)], ids=str)
def test_equals_torch_forward_and_backward(kind, dtype, shape):
    layer = randomized(kind(shape)).to(dtype)
    x = (3 + torch.randn(16, 5, 3)).to(dtype).transpose(0, 2).contiguous().transpose(0, 1).requires_grad_()
    grad = torch.randn(x.shape).to(dtype)
    assert not x.is_contiguous()
    y = layer(x)
    y.backward(grad)
    assert y.dtype == dtype
    actual = [y, x.grad, *(p.grad for p in layer.parameters())]
    for one, other in zip(actual, exact(layer, x, grad), strict=True):
        assert one.dtype == dtype
        close(one, other, ULP[dtype])


@pytest.mark.parametrize(("ours", "torchs"), [(FusedLayerNorm, nn.LayerNorm), (FusedRMSNorm, nn.RMSNorm)])
@pytest.mark.parametrize("affine", [True, False])
def test_drop_in_for_torch(ours, torchs, affine):
    layer, twin = ours(8, elementwise_affine=affine), torchs(8, eps=1e-5, elementwise_affine=affine)
    assert list(layer.state_dict()) == list(twin.state_dict())
    assert isinstance(layer, torchs)
    assert repr(layer) == repr(twin).replace(torchs.__name__, ours.__name__)
    x = torch.randn(4, 8) * 1e-3  # small enough for eps to matter
    assert torch.equal(layer(x), twin(x))
    assert torch.equal(ours(8, 1e-3)(x), torchs(8, eps=1e-3)(x))
    assert not torch.allclose(ours(8)(x), ours(8, 1e-3)(x))
    assert torch.equal(ours(8, memory_efficient=True)(x), ours(8)(x))


# dtypes


@pytest.mark.parametrize("params", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", DTYPES, ids=str)
def test_result_has_the_dtype_of_input_or_parameters(inputs, params):
    x = torch.randn(4, 8).to(inputs)
    for plain, mixed in ((FusedLayerNorm, MixedFusedLayerNorm), (FusedRMSNorm, MixedFusedRMSNorm)):
        for kind, expected in ((plain, inputs), (mixed, params)):
            layer = randomized(kind(8)).to(params)
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            grad = torch.ones_like(y)
            y.backward(grad)
            assert y.dtype == expected
            assert leaf.grad.dtype == inputs
            assert layer.weight.grad.dtype == params
            close(y, exact(layer, x, grad)[0], ULP[expected])


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm])
def test_statistics_of_half_are_computed_in_float32(kind):
    overflowing = torch.full((1, 4096), 300.0).half()  # squares and sums are far above 65504
    overflowing[:, ::2] = 100.0
    large_mean = 1024 + torch.randn(2, 4096).half()
    layer = kind(4096).half()
    for x in (overflowing, large_mean):
        y = layer(x)
        assert y.isfinite().all()
        close(y, exact(layer, x, torch.ones_like(x))[0], ULP[torch.float16])


# Under casts, where the layer's own rule applies


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_under_o1_the_dtype_stays_the_layers(level):
    reduced = torch.float16 if level == "O1" else torch.bfloat16
    model = nn.Sequential(nn.Linear(8, 8), FusedLayerNorm(8), MixedFusedLayerNorm(8), FusedRMSNorm(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    seen = []
    for layer in model:
        layer.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    loss = model(torch.randn(4, 8)).float().square().mean()
    assert seen == [reduced, reduced, torch.float32, torch.float32, reduced]
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm])
def test_under_autocast(kind):
    layer = randomized(kind(8))
    x = torch.randn(4, 8)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), expected)
        assert layer(x.bfloat16()).dtype == torch.bfloat16
        assert layer(x.half()).dtype == torch.float16
        assert torch.is_autocast_enabled("cpu")


def test_on_a_device_without_autocast():
    assert FusedLayerNorm(8).to("meta")(torch.empty(2, 8, device="meta")).shape == (2, 8)


# Functions


def test_functions_and_their_default_eps():
    x, weight, bias = torch.randn(3, 2, 8) * 1e-2, torch.rand(2, 8), torch.rand(2, 8)
    shape = (2, 8)
    layer_norm = F.layer_norm(x, shape, weight, bias, 1e-6)
    rms_norm = F.rms_norm(x, shape, weight, 1e-6)
    for found, expected in (
        (functions.fused_layer_norm_affine(x, weight, bias, shape), layer_norm),
        (functions.mixed_dtype_fused_layer_norm_affine(x, weight, bias, shape), layer_norm),
        (functions.fused_rms_norm_affine(x, weight, shape), rms_norm),
        (functions.mixed_dtype_fused_rms_norm_affine(x, weight, shape), rms_norm),
        (functions.manual_rms_norm(x, shape, weight, 1e-6), rms_norm),
        (functions.fused_layer_norm(x, 8), F.layer_norm(x, (8,), eps=1e-6)),
        (functions.fused_layer_norm(x, 8, 1e-3), F.layer_norm(x, (8,), eps=1e-3)),
        (functions.fused_layer_norm(x, 8, memory_efficient=True), F.layer_norm(x, (8,), eps=1e-6)),
        (functions.fused_rms_norm(x, 8), F.rms_norm(x, (8,), eps=1e-6)),
    ):
        assert torch.equal(found, expected)


def test_result_dtypes_of_functions():
    x, weight, shape = torch.randn(4, 8).half(), torch.ones(8), (8,)
    assert {
        functions.fused_layer_norm(x, shape).dtype,
        functions.fused_layer_norm_affine(x, weight, weight, shape).dtype,
        functions.fused_rms_norm(x, shape).dtype,
        functions.fused_rms_norm_affine(x, weight, shape).dtype,
        functions.manual_rms_norm(x, shape, None, 1e-5).dtype,
    } == {torch.float16}
    assert {
        functions.mixed_dtype_fused_layer_norm_affine(x, weight, None, shape).dtype,
        functions.mixed_dtype_fused_rms_norm_affine(x, weight, shape).dtype,
        functions.manual_rms_norm(x, shape, weight, 1e-5).dtype,
    } == {torch.float32}


# Construction


@pytest.mark.parametrize("kind", [MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_mixed_forms_need_parameters(kind):
    with pytest.raises(RuntimeError, match=rf"Use {kind.__name__.removeprefix('Mixed')}"):
        kind(8, elementwise_affine=False)
    with pytest.raises(TypeError, match="argument 'affine'"):
        kind(8, affine=False)
    assert kind(8, elementwise_affine=True, memory_efficient=True).memory_efficient


@pytest.mark.parametrize("kind", ["Layer", "RMS"])
def test_autograd_functions_of_apex_can_be_applied(kind):
    for old, new in {"": "", "Affine": "_affine"}.items():
        function = getattr(functions, f"fused_{kind.lower()}_norm{new}")
        assert getattr(functions, f"Fused{kind}Norm{old}Function").apply is function
    function = getattr(functions, f"mixed_dtype_fused_{kind.lower()}_norm_affine")
    assert getattr(functions, f"Fused{kind}NormAffineMixedDtypesFunction").apply is function
