"""O1 and O4: dtypes by operation, casts switched on and off, functions of the script (contract 1.5, 1.6, 3.6, 4)."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.apex import amp
from harness.apex.amp import cast_engine
from tests.apex.shared import backward, copies, same
from tests.syncs import fake_gpu, fakes

LEVELS = {"O1": torch.float16, "O4": torch.bfloat16}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def o1():
    """O1 in force; the value is its reduced dtype. O4 has autocast's lists: see test_o4."""
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    return torch.float16


@pytest.fixture(params=LEVELS)
def reduced(request):
    """O1 or O4 in force; the value is its reduced dtype."""
    amp.initialize(nn.Linear(1, 1), opt_level=request.param, verbosity=0)
    return LEVELS[request.param]


def rand(*shape, dtype=torch.float32):
    return (torch.rand(*shape) * 0.8 + 0.1).to(dtype)


def w(*shape):
    return torch.rand(*shape)


REDUCED_OPS = {
    "linear": lambda x: F.linear(x, w(5, 4), w(5)),
    "conv1d": lambda x: F.conv1d(x[None], w(2, 4, 1), w(2)),
    "conv2d": lambda x: F.conv2d(x[None, None], w(2, 1, 2, 2), w(2)),
    "conv3d": lambda x: F.conv3d(x[None, None, None], w(2, 1, 1, 2, 2)),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x[None], w(4, 2, 1)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x[None, None], w(1, 2, 2, 2)),
    "conv_transpose3d": lambda x: F.conv_transpose3d(x[None, None, None], w(1, 2, 1, 2, 2)),
    "conv_tbc": lambda x: torch.conv_tbc(x[None], w(1, 4, 3), w(3)),
    "prelu": lambda x: F.prelu(x, w(1)),
    "addmm": lambda x: torch.addmm(w(4, 4), x, w(4, 4)),
    "addmv": lambda x: torch.addmv(w(4), x, w(4)),
    "addr": lambda x: torch.addr(w(4, 4), x[0], w(4)),
    "matmul": lambda x: torch.matmul(x, w(4, 4)),
    "matmul operator": lambda x: w(4, 4) @ x,
    "mm": lambda x: torch.mm(x, w(4, 4)),
    "mv": lambda x: x.mv(w(4)),
    "bmm": lambda x: torch.bmm(x[None], w(1, 4, 4)),
    "baddbmm": lambda x: torch.baddbmm(w(1, 4, 4), x[None], w(1, 4, 4)),
    "addbmm": lambda x: torch.addbmm(w(4, 4), x[None], w(1, 4, 4)),
    "lstm cell": lambda x: nn.LSTMCell(4, 3)(x),
    "gru cell": lambda x: nn.GRUCell(4, 3)(x),
    "rnn cell": lambda x: nn.RNNCell(4, 3)(x),
    "lstm": lambda x: nn.LSTM(4, 3, num_layers=2, bidirectional=True)(x[None])[0],
    "lstm state": lambda x: nn.LSTM(4, 3)(x[None])[1],
    "gru": lambda x: nn.GRU(4, 3, batch_first=True)(x[None])[0],
    "rnn tanh": lambda x: nn.RNN(4, 3)(x[None])[0],
    "rnn relu": lambda x: nn.RNN(4, 3, nonlinearity="relu")(x[None])[0],
    "packed lstm": lambda x: nn.LSTM(4, 3)(nn.utils.rnn.pack_padded_sequence(x[:, None], [4]))[0].data,
}
FLOAT32_OPS = {
    "interpolate nearest": lambda x: F.interpolate(x[None, None], scale_factor=2),
    "interpolate bilinear": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    "interpolate bicubic": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bicubic"),
    "interpolate linear": lambda x: F.interpolate(x[None], scale_factor=2, mode="linear"),
    "grid_sample": lambda x: F.grid_sample(x[None, None], w(1, 2, 2, 2), align_corners=False),
    "softplus": F.softplus,
    "softmin": lambda x: F.softmin(x, -1),
    "softmax": lambda x: F.softmax(x, -1),
    "softmax method": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "gelu": F.gelu,
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": lambda x: nn.GroupNorm(2, 4)(x),
    "local_response_norm": lambda x: F.local_response_norm(x[None], 2),
    "normalize": F.normalize,
    "cosine_similarity": lambda x: F.cosine_similarity(x, x * 2),
    "poisson_nll": lambda x: F.poisson_nll_loss(x, x),
    "cosine_embedding": lambda x: F.cosine_embedding_loss(x, x, torch.ones(4)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(4)),
    "hinge_embedding": lambda x: F.hinge_embedding_loss(x, torch.ones(4, 4)),
    "kl_div": lambda x: F.kl_div(x, x, reduction="batchmean"),
    "l1": lambda x: F.l1_loss(x, x * 2),
    "mse": lambda x: F.mse_loss(x, x * 2),
    "margin_ranking": lambda x: F.margin_ranking_loss(x, x, torch.ones(4, 4)),
    "multilabel_margin": lambda x: F.multilabel_margin_loss(x[0], torch.arange(4)),
    "multilabel_soft_margin": lambda x: F.multilabel_soft_margin_loss(x, torch.ones(4, 4)),
    "multi_margin": lambda x: F.multi_margin_loss(x, torch.arange(4)),
    "nll": lambda x: F.nll_loss(x, torch.arange(4)),
    "bce with logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x * 2),
    "soft_margin": lambda x: F.soft_margin_loss(x, torch.ones(4, 4)),
    "triplet_margin": lambda x: F.triplet_margin_loss(x, x, x),
    "ctc": lambda x: F.ctc_loss(
        x.log_softmax(-1)[:, None], torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    ),
    "pow operator": lambda x: x**2,
    "rpow operator": lambda x: 2**x,
    "cumprod": lambda x: x.cumprod(0),
    "cumsum": lambda x: torch.cumsum(x, 0),
    "dist": lambda x: torch.dist(x, x * 2),
    "norm": lambda x: torch.norm(x),
    "norm method": lambda x: x.norm(dim=1),
    "prod": lambda x: x.prod(),
    "std": lambda x: x.std(),
    "sum": lambda x: x.sum(),
    "sum over": lambda x: torch.sum(x, dim=1),
    "var": lambda x: torch.var(x, 0),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "trace": torch.trace,
}
for _name in ("acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan").split():  # noqa: SIM905
    FLOAT32_OPS[_name] = getattr(torch, _name)
MATCH_OPS = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "mean": torch.mean,
    "sqrt": torch.sqrt,
    "silu": F.silu,
    "max_pool": lambda x: F.max_pool2d(x[None], 2),
    "batch_norm": lambda x: nn.BatchNorm1d(4)(x),
    "batch_norm eval": lambda x: nn.BatchNorm1d(4).eval()(x),
    "add_": lambda x: x.clone().add_(w(4, 4)),
    "sum dtype": lambda x: x.sum(dtype=x.dtype),
    "softmax dtype": lambda x: x.softmax(-1, dtype=x.dtype),
    "avg_pool3d": lambda x: F.avg_pool3d(x[None, None], 1),
    "max_pool3d": lambda x: F.max_pool3d(x[None, None], 1),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x[None, None], 2),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x[None, None], 1),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x[None], 2, 2),
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(x.expand(1, 4, 4, 4), 2, 2),
    "max_unpool1d": lambda x: F.max_unpool1d(x[None], torch.arange(4).expand(1, 4, 4), 2),
    "max_unpool3d": lambda x: F.max_unpool3d(x[None, None], torch.arange(16).reshape(1, 1, 4, 4), 1),
    "reflect 1d": lambda x: F.pad(x, (1, 1), "reflect"),
    "reflect 2d": lambda x: F.pad(x[None], (1, 1, 1, 1), "reflect"),
    "replicate 1d": lambda x: F.pad(x, (1, 1), "replicate"),
    "replicate 2d": lambda x: F.pad(x[None], (1, 1, 1, 1), "replicate"),
    "replicate 3d": lambda x: F.pad(x[None, None], (1,) * 6, "replicate"),
    "index_copy": lambda x: x.index_copy(0, torch.tensor([0]), x[1:2]),
    "grid_sampler_2d": lambda x: torch.grid_sampler_2d(
        x[None, None], x[None, :, :2, None].expand(1, 4, 2, 2), 0, 0, False
    ),
}
PROMOTE_OPS = {
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "atan2": torch.atan2,
    "cross": lambda a, b: torch.cross(a[:, :3], b[:, :3], dim=1),
    "bilinear": lambda a, b: F.bilinear(a, b, w(2, 4, 4).to(a.dtype)),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "add": torch.add,
    "div": torch.div,
    "mul": lambda a, b: a * b,
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
}


def dtypes(result):
    return {t.dtype for t in (result if isinstance(result, tuple) else (result,))}


@pytest.mark.contract("4.1", "6.1.test_basic_casts", "6.1.test_rnn", "7.2")
@pytest.mark.parametrize("name", REDUCED_OPS)
def test_operations_in_reduced_precision(reduced, name):
    for dtype in FLOATS:
        x = rand(4, 4, dtype=dtype).requires_grad_()
        out = REDUCED_OPS[name](x)
        assert dtypes(out) == {reduced}, dtype
        sum(t.float().sum() for t in (out if isinstance(out, tuple) else (out,))).backward()
        assert x.grad.dtype is dtype


@pytest.mark.contract("4.1", "6.1.test_basic_casts")
@pytest.mark.parametrize("name", FLOAT32_OPS)
def test_operations_in_float32(o1, name):
    for dtype in FLOATS:
        x = rand(4, 4, dtype=dtype).requires_grad_()
        out = FLOAT32_OPS[name](x)
        assert out.dtype is torch.float32, dtype
        if out.requires_grad:
            out.sum().backward()
            assert x.grad.dtype is dtype


@pytest.mark.contract("4.1", "6.1.test_basic_casts", "6.1.test_promotion")
@pytest.mark.parametrize("name", MATCH_OPS)
def test_unlisted_and_in_place_operations_keep_the_dtype_of_their_input(reduced, name):
    for dtype in FLOATS:
        assert MATCH_OPS[name](rand(4, 4, dtype=dtype)).dtype is dtype


@pytest.mark.contract("4.1")
def test_pairs_seen_as_complex_numbers_share_their_memory(o1):
    x = rand(4, 2, dtype=o1)
    assert torch.view_as_complex(x).data_ptr() == x.data_ptr()


@pytest.mark.contract("4.1", "6.1.test_promotion")
@pytest.mark.parametrize("name", PROMOTE_OPS)
def test_operations_in_the_widest_dtype(reduced, name):
    low, wide = rand(4, 4, dtype=reduced), rand(4, 4)
    assert PROMOTE_OPS[name](low, wide).dtype is torch.float32
    assert PROMOTE_OPS[name](wide, low).dtype is torch.float32
    assert PROMOTE_OPS[name](low, low).dtype is reduced
    assert PROMOTE_OPS[name](wide, wide).dtype is torch.float32
    leaves = [low.requires_grad_(), wide.requires_grad_()]
    out = PROMOTE_OPS[name](*leaves)
    out.sum().backward()
    assert [leaf.grad.dtype for leaf in leaves] == [reduced, torch.float32]


# Operations newer than Apex: (function of two matrices; its result for float32, for reduced, for mixed input). The
# last three are autocast's choices for CUDA.
WIDE, LOW = "float32", "reduced"
UNKNOWN_OPS = {
    "attention": (lambda x, y: F.scaled_dot_product_attention(*(t[None, None] for t in (x, y, y))), LOW, LOW, LOW),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, y), LOW, LOW, LOW),
    "multi_dot": (lambda x, y: torch.linalg.multi_dot([x, y, x]), LOW, LOW, LOW),
    "einsum of sums": (lambda x, y: torch.einsum("ij->i", x), LOW, LOW, LOW),
    "convolution": (
        lambda x, y: torch.convolution(x[None], y[..., None], None, [1], [0], [1], False, [0], 1),
        LOW,
        LOW,
        LOW,
    ),
    "native_layer_norm": (lambda x, y: torch.native_layer_norm(x, (4,), None, None, 1e-5)[0], WIDE, WIDE, WIDE),
    "vecdot": (torch.linalg.vecdot, LOW, LOW, LOW),
    "multihead": (lambda x, y: nn.MultiheadAttention(4, 2)(x[:, None], y[:, None], y[:, None])[0], LOW, LOW, LOW),
    "encoder layer": (lambda x, y: nn.TransformerEncoderLayer(4, 2, 8)(x[None]), WIDE, WIDE, WIDE),
    "encoder layer eval": (lambda x, y: nn.TransformerEncoderLayer(4, 2, 8).eval()(x[None]), WIDE, WIDE, WIDE),
    "rms_norm": (lambda x, y: F.rms_norm(x, (4,), y[0]), WIDE, WIDE, WIDE),
    "log1p": (lambda x, y: x.log1p(), WIDE, WIDE, WIDE),
    "logsumexp": (lambda x, y: x.logsumexp(0), WIDE, WIDE, WIDE),
    "cdist": (torch.cdist, WIDE, WIDE, WIDE),
    "pdist": (lambda x, y: F.pdist(x), WIDE, WIDE, WIDE),
    "huber": (F.huber_loss, WIDE, WIDE, WIDE),
    "nuclear norm": (lambda x, y: torch.linalg.matrix_norm(x, "nuc"), WIDE, WIDE, WIDE),
    "matrix_exp": (lambda x, y: torch.matrix_exp(x), WIDE, WIDE, WIDE),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 1), WIDE, LOW, WIDE),
    "vdot": (lambda x, y: torch.vdot(x[0], y[0]), WIDE, LOW, WIDE),
    "index_put": (lambda x, y: x.index_put((torch.tensor([0]),), y[:1]), WIDE, LOW, WIDE),
    "scatter_add": (lambda x, y: x.scatter_add(0, torch.zeros(4, 4, dtype=torch.long), y), WIDE, LOW, WIDE),
    "silu": (lambda x, y: F.silu(x), WIDE, LOW, WIDE),
    "instance_norm": (lambda x, y: F.instance_norm(x[None]), WIDE, LOW, WIDE),
    "where": (lambda x, y: torch.where(x > 0.5, x, y), WIDE, LOW, WIDE),
}


@pytest.mark.contract("4.2", "7.2")
@pytest.mark.parametrize("name", UNKNOWN_OPS)
def test_operations_new_since_apex_follow_autocast(o1, name):
    op, *expected = UNKNOWN_OPS[name]
    inputs = [(torch.float32, torch.float32), (o1, o1), (torch.float32, o1)]
    for (first, second), wanted in zip(inputs, expected, strict=True):
        x, y = rand(4, 4, dtype=first).requires_grad_(), rand(4, 4, dtype=second).requires_grad_()
        out = op(x, y)
        assert out.dtype is (o1 if wanted is LOW else torch.float32), (first, second)
        out.float().sum().backward()
        assert x.grad.dtype is first


@pytest.mark.contract("4.2")
def test_float64_is_never_cast(reduced):
    x = rand(4, 4, dtype=torch.float64)
    assert (x @ x).dtype is torch.float64
    for op in (torch.exp, torch.sum, lambda t: t.softmax(-1), lambda t: t.cpu(), lambda t: torch.dot(t[0], t[0])):
        assert op(x).dtype is torch.float64


@pytest.mark.contract("4.1", "6.1.test_basic_casts")
def test_binary_cross_entropy_is_banned_for_reduced_input_only(reduced):
    assert F.binary_cross_entropy(rand(4), rand(4)).dtype is torch.float32
    with pytest.raises(NotImplementedError, match="under O1 or O4 [^.]*. Leave.*BCEWithLogitsLoss"):
        F.binary_cross_entropy(rand(4, dtype=reduced), rand(4, dtype=reduced))


@pytest.mark.contract("4.1", "6.1.test_promotion")
@pytest.mark.parametrize("name", ["exp_", "log_", "rsqrt_", "tan_"])
def test_in_place_methods_of_the_float32_list_refuse_reduced_tensors(o1, name):
    x = rand(4, dtype=o1)
    with pytest.raises(NotImplementedError, match=f"x = x.{name[:-1]}"):
        getattr(x, name)()
    with amp.disable_casts():
        assert getattr(x, name)().dtype is o1
    assert getattr(rand(4), name)().dtype is torch.float32
    # operations that use it internally, on tensors of their own, still work
    assert torch.isfinite(torch.logsumexp(rand(4, 4, dtype=o1), 0)).all()
    amp.reset()
    assert name not in torch.Tensor.__dict__


@pytest.mark.contract("4.1")
@pytest.mark.parametrize("name", ["local_response_norm", "normalize", "multilabel_soft_margin_loss"])
def test_composite_functions_compute_in_float32_as_a_whole(o1, name):
    """Not only those of their parts that are listed: squares overflow, and gradients are rounded twice."""
    arguments = {"local_response_norm": {"size": 2}, "multilabel_soft_margin_loss": {"target": w(2, 8, 6).round()}}
    narrow = (rand(2, 8, 6) * 300).to(o1).requires_grad_()
    wide = narrow.detach().float().requires_grad_()
    result = getattr(F, name)(narrow, **arguments.get(name, {}))
    with amp.disable_casts():
        result.sum().backward()
        expected = getattr(F, name)(wide, **arguments.get(name, {}))
        expected.sum().backward()
    assert result.dtype == torch.float32
    assert torch.equal(result, expected)
    assert torch.equal(narrow.grad, wide.grad.to(o1))
    amp.reset()
    assert getattr(F, name).__module__ == "torch.nn.functional"
    assert not hasattr(getattr(F, name), "__wrapped__")


def test_cpu_returns_float32(reduced):
    assert rand(2, dtype=reduced).cpu().dtype is torch.float32
    with amp.disable_casts():
        assert rand(2, dtype=reduced).cpu().dtype is reduced


@pytest.mark.contract("4.1")
def test_values_equal_those_of_casts_by_hand(reduced):
    x, weight = rand(4, 4), w(4, 4)
    with amp.disable_casts():
        expected = (x.to(reduced) @ weight.to(reduced)).float().exp()
    assert torch.equal((x @ weight).exp(), expected)


@pytest.mark.contract("3.6", "10.8")
def test_weights_changed_between_evaluations_are_seen(reduced):
    layer = nn.Linear(4, 4)
    x = rand(4, 4)
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        assert torch.equal(layer(x), before * 2)
        layer.load_state_dict({k: v * 2 for k, v in layer.state_dict().items()})
        assert torch.equal(layer(x), before * 4)


class Weighted(nn.Module):
    """Uses its weight twice per forward, through an operation of one of O1's lists."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter((torch.arange(16.0).reshape(4, 4) / 16).to(dtype))

    def forward(self, x):
        for _ in range(2):
            if self.kind == "reduced":
                x = x.mm(self.weight)
            elif self.kind == "float32":
                x = x + F.log_softmax(self.weight, -1)
            else:
                x = torch.cat([x, self.weight.tanh()]).narrow(0, 0, 4) + self.weight
        return x.float().sum()


@pytest.mark.contract("6.1.test_cache", "3.6")
@pytest.mark.parametrize("kind", ["reduced", "float32", "promoted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_training_evaluating_and_training_again_gives_the_same_gradient(kind, dtype):
    x = torch.arange(16.0).reshape(4, 4) / 8
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model = Weighted(kind, dtype)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=4.0, verbosity=0)

    def gradient():
        optimizer.zero_grad()
        backward(model(x), optimizer)
        return model.weight.grad.clone()

    first = gradient()
    with torch.no_grad():
        evaluated = model(x)
    assert torch.equal(gradient(), first)
    amp.reset()
    expected = (reference if kind != "reduced" else reference.half())(x.half() if kind == "reduced" else x)
    expected.backward()
    torch.testing.assert_close(evaluated, expected.detach(), rtol=2e-3, atol=0)
    torch.testing.assert_close(first.float(), reference.weight.grad.float(), rtol=4e-3, atol=0)
    assert first.dtype is dtype


@pytest.mark.contract("1.6")
def test_disable_casts_nests_and_ends_on_errors(reduced):
    def product():
        return (rand(2, 2) @ rand(2, 2)).dtype

    with amp.disable_casts():
        with amp.disable_casts():
            assert product() is torch.float32
        assert product() is torch.float32
        with pytest.raises(ZeroDivisionError), amp.disable_casts():
            raise ZeroDivisionError
        assert product() is torch.float32
    assert product() is reduced


@pytest.mark.contract("1.2.again", "10.13")
def test_a_later_level_turns_o1_off(reduced):
    for level in ("O0", "O2", "O3", "O5"):
        amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
        assert (rand(2, 2) @ rand(2, 2)).dtype is torch.float32
        assert rand(2, dtype=torch.float16).exp().dtype is torch.float16
        amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
        assert (rand(2, 2) @ rand(2, 2)).dtype is torch.float16
    amp.initialize(nn.Linear(1, 1), opt_level="O1", enabled=False)
    assert (rand(2, 2) @ rand(2, 2)).dtype is torch.float32


@pytest.mark.host
@pytest.mark.contract("10.13")
def test_torch_autocast_is_restored_by_reset(reduced):
    amp.reset()
    with torch.autocast("cpu", dtype=reduced):
        assert rand(2, 2, dtype=reduced).softmax(-1).dtype is reduced
        assert FLOAT32_OPS["grid_sample"](rand(4, 4, dtype=reduced)).dtype is torch.float32
        assert F.binary_cross_entropy(rand(4, dtype=reduced), rand(4, dtype=reduced)).dtype is torch.float32
        assert (rand(2, 2) @ rand(2, 2)).dtype is reduced


@pytest.mark.host
@pytest.mark.contract("4.2")
def test_recurrent_layers_on_cuda_are_left_to_cudnn_in_float16(reduced):
    """torch's rule for cuDNN's operation casts to float16 and flattens the weights; a cast before it leaves them in
    pieces, but O4 has no loss scale for float16."""
    cast_engine.engine.add("cuda")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel("aten::_cudnn_rnn", "AutocastCUDA")
    for name in ("lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_relu.input"):
        assert has_kernel(f"aten::{name}", "AutocastCUDA") is (reduced is torch.bfloat16)
        assert has_kernel(f"aten::{name}", "AutocastCPU")


@fakes
@pytest.mark.host
@pytest.mark.contract("4.2")
@pytest.mark.parametrize("level", LEVELS)
def test_threads_of_data_parallel_cast_as_the_main_thread(level, monkeypatch):
    """torch enters autocast in each of them without a dtype, which is float16 on CUDA, without a loss scale at O4."""
    from torch.nn.parallel import parallel_apply

    with fake_gpu():
        model = nn.Sequential(nn.Linear(4, 4)).to("cuda:0")
        amp.initialize(model, opt_level=level, verbosity=0)
        accelerator = types.SimpleNamespace(type="cuda")
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
        monkeypatch.setattr(torch.accelerator, "device_index", lambda device: contextlib.nullcontext())
        seen = []

        def note(module, args, output):
            state = (
                torch.is_autocast_enabled("cuda"),
                torch.get_autocast_dtype("cuda"),
                torch.is_autocast_cache_enabled(),
            )
            seen.append((threading.get_ident(), *state))

        model[0].register_forward_hook(note)
        replicas = [model._replicate_for_data_parallel() for _ in range(2)]
        for replica in replicas:  # as torch.nn.parallel.replicate does
            replica._modules["0"] = model[0]._replicate_for_data_parallel()
            replica._modules["0"].weight, replica._modules["0"].bias = model[0].weight, model[0].bias
        parallel_apply(replicas, [torch.zeros(2, 4, device="cuda:0")] * 2, devices=[0, 0])
        assert {row[1:] for row in seen} == {(True, LEVELS[level], False)}
        assert len({row[0] for row in seen} | {threading.get_ident()}) >= 2
        amp.reset()


@pytest.mark.host
def test_model_may_get_its_weights_after_initialize():
    model = nn.Linear(4, 4, device="meta")
    amp.initialize(model, opt_level="O1", verbosity=0)
    model.to_empty(device="cpu")
    assert model(rand(2, 4)).dtype is torch.float16


@pytest.mark.contract("3.4")
def test_outputs_are_left_alone_unless_asked():
    model, x = nn.Linear(4, 4), rand(2, 4)
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert model(x).dtype is torch.float16
    amp.initialize(model, opt_level="O1", cast_model_outputs=torch.float32, verbosity=0)
    assert model(x).dtype is torch.float32


@pytest.mark.contract("1.8")
def test_backward_pass_and_optimizer_step_run_without_casts():
    seen = []

    class Sgd(torch.optim.SGD):
        def step(self, closure=None):
            seen.append((rand(2, 2) @ rand(2, 2)).dtype)
            return super().step(closure)

    model = nn.Linear(4, 4)
    optimizer = Sgd(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with amp.scale_loss(model(rand(2, 4)).float().mean(), optimizer) as loss:
        seen.append((rand(2, 2) @ rand(2, 2)).dtype)
        loss.backward()
    assert optimizer.step(lambda: 3.0) == 3.0
    assert seen == [torch.float32] * 2


@pytest.mark.contract("1.5")
def test_decorators_cast_arguments_under_o1():
    @amp.half_function
    def half(a, b=None):
        """doc"""
        return a.dtype, b.dtype

    @amp.float_function
    def full(a):
        return (a @ a).dtype

    @amp.promote_function
    def promote(a, b):
        return a.dtype, b.dtype

    @amp.half_function
    def many(items):
        return {t.dtype for t in items}

    h, f = rand(2, 2, dtype=torch.float16), rand(2, 2)
    assert half.__name__ == "half"
    assert half(f, b=f) == (torch.float32,) * 2
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert half(f, b=f) == (torch.float16,) * 2
    assert half(f.double(), b=f) == (torch.float64, torch.float16)
    assert amp.bfloat16_function(lambda a: a.dtype)(f) is torch.bfloat16
    assert full(h) is torch.float32
    assert promote(h, f) == (torch.float32,) * 2
    assert promote(h, h) == (torch.float16,) * 2
    assert many([nn.Parameter(f), nn.Parameter(f)]) == {torch.float16}
    with amp.disable_casts():
        assert half(f, b=f) == (torch.float32,) * 2
    amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)
    assert half(f, b=f) == (torch.float32,) * 2


@pytest.mark.contract("1.5", "8")
def test_registered_functions_are_replaced_by_initialize(monkeypatch):
    module = types.ModuleType("somebody")
    module.double = lambda t: t * 2
    monkeypatch.setitem(sys.modules, "somebody", module)
    original, sigmoid, softmax, matmul = module.double, torch.sigmoid, torch.softmax, torch.matmul
    normalize = F.normalize
    with pytest.raises(ValueError, match="No function named"):
        amp.register_half_function(module, "triple")
    amp.register_half_function(module, "double")
    amp.register_float_function(torch, "sigmoid")
    amp.register_half_function(torch, "softmax")
    amp.register_half_function(torch.Tensor, "softmax")  # inherited: torch.Tensor itself has none
    amp.register_float_function(torch, "matmul")
    amp.register_float_function(F, "normalize")  # which O1 itself replaces
    assert module.double is original, "applied before initialize"
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert module.double(rand(2)).dtype is torch.float16
    assert torch.sigmoid(rand(2, dtype=torch.float16)).dtype is torch.float32
    assert torch.softmax(rand(2, 2), -1).dtype is torch.float16, "the script's choice overrides the lists"
    assert rand(2, 2).softmax(-1).dtype is torch.float16
    assert torch.matmul(rand(2, 2), rand(2, 2)).dtype is torch.float32
    amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)
    assert module.double is original
    for _ in range(2):  # scripts that train two networks may call it for each
        amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
        assert module.double(rand(2)).dtype is torch.float16
    assert torch.softmax(rand(2, 2), -1).dtype is torch.float16
    amp.reset()
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert module.double is original, "forgotten by reset"
    amp.reset()
    assert (torch.sigmoid, torch.softmax, torch.matmul, F.normalize) == (sigmoid, softmax, matmul, normalize)
    assert "softmax" not in vars(torch.Tensor)
    amp.register_bfloat16_function(module, "double")
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert module.double(rand(2)).dtype is torch.bfloat16, "also where the level's own precision is float16"


class _Products(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return rand(2, 2) @ rand(2, 2)


@pytest.mark.host  # a forked process cannot use CUDA
@pytest.mark.contract("4.2")
def test_loader_workers_are_not_cast(reduced):
    loader = torch.utils.data.DataLoader(_Products(), num_workers=1, multiprocessing_context="fork")
    assert next(iter(loader)).dtype is torch.float32


@pytest.mark.contract("4.2")
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_are_cast_again(reentrant):
    from torch.utils.checkpoint import checkpoint

    seen = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=8.0, verbosity=0)
    x = rand(3, 4).requires_grad_()
    gradients = []
    for forward in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        backward(forward(x).float().pow(2).sum(), optimizer)
        gradients.append(copies(p.grad for p in model.parameters()))
        optimizer.zero_grad()
    assert seen == [torch.float16] * 3, "forward, forward, recomputation"
    assert same(*gradients)
    assert (rand(2, 2) @ rand(2, 2)).dtype is torch.float16


@pytest.mark.parametrize("level", LEVELS)
def test_models_take_float64_data(level):
    """Apex's operations cast float64; here the model's call does, so that scripts with float64 data run."""
    model = amp.initialize(nn.Conv2d(1, 2, 3), opt_level=level, verbosity=0)
    x = torch.rand(2, 1, 5, 5, dtype=torch.float64)
    assert model(x).dtype is LEVELS[level]
    assert torch.equal(model(x), model(x.float()))
    assert torch.equal(model(input=x), model(x.float()))
    assert x.dtype is torch.float64
