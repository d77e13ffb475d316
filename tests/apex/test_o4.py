"""O4's dtypes are those of ``torch.autocast("cuda", torch.bfloat16)``, operation by operation, also on a CPU.

FakeTensorMode runs torch's own CUDA rules of autocast without a device.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.apex import amp
from harness.apex.amp import cast_engine, cast_lists
from tests.apex.test_o1 import FLOAT32_OPS, MATCH_OPS, PROMOTE_OPS, REDUCED_OPS, UNKNOWN_OPS, rand, w

FLOAT, BFLOAT = torch.float32, torch.bfloat16
LIKE_CUDNN = ("lstm", "lstm state", "packed lstm", "gru", "rnn tanh", "rnn relu")  # need cuDNN: see test_o1
REFUSED_BY_AUTOCAST = {  # though it could compute the float32 result of O4
    "trace": "is a sum on CUDA, and cast as one; without a device, only the dtype of its input is seen",
    "matrix_exp": "casts parts of the algorithm; without a device, only the dtype of its input is seen",
    "nuclear": "asks for a float32 result, but leaves the input in bfloat16",
    "nuclear norm": "likewise",
    "ctc": "needs a device",
}

UNARY = {**REDUCED_OPS, **FLOAT32_OPS, **MATCH_OPS}
UNARY |= {
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "nn.GELU": nn.GELU(),
    "erf": torch.erf,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "avg_pool1d": lambda x: F.avg_pool1d(x[None], 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x[None], 2),
    "conv1d same": lambda x: F.conv1d(x, w(4, 4, 1), padding="same"),
    "frobenius": lambda x: torch.linalg.matrix_norm(x),
    "vector_norm": lambda x: torch.linalg.vector_norm(x),
    "upsample trilinear": lambda x: F.interpolate(x[None, None, None], scale_factor=2, mode="trilinear"),
    "upsample nearest 1d": lambda x: F.interpolate(x[None], scale_factor=2),
    "upsample nearest 3d": lambda x: F.interpolate(x[None, None, None], scale_factor=2),
    "upsample exact 1d": lambda x: F.interpolate(x[None], scale_factor=2, mode="nearest-exact"),
    "upsample exact 3d": lambda x: F.interpolate(x[None, None, None], scale_factor=2, mode="nearest-exact"),
    "upsample exact": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="nearest-exact"),
    "upsample bilinear aa": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear", antialias=True),
    "upsample bicubic aa": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bicubic", antialias=True),
    "norm p": lambda x: torch.norm(x, 1),
    "prod dim": lambda x: x.prod(0),
    "nuclear": lambda x: torch.norm(x, "nuc"),
    "frobenius_norm": lambda x: torch.norm(x, "fro", 0),
    "sum float": lambda x: x.sum(dtype=torch.float64),
    "exp_": lambda x: x.clone().exp_(),
    "pow_": lambda x: x.clone().pow_(2),
    "pow of numbers": lambda x: torch.pow(2, x),
}
BINARY = {**PROMOTE_OPS, **{name: row[0] for name, row in UNKNOWN_OPS.items()}}
BINARY |= {
    "pow": torch.pow,
    "chain_matmul": lambda a, b: torch.chain_matmul(a, b),
    "matmul": torch.matmul,
    "bce with logits": F.binary_cross_entropy_with_logits,
    "grid_sample": lambda a, b: F.grid_sample(
        a[None, None], b[None, :, :2, None].expand(1, 4, 2, 2), align_corners=False
    ),
    "linear": F.linear,
    "mse": F.mse_loss,
    "sub": torch.sub,
    "attention mask": lambda a, b: F.scaled_dot_product_attention(a[None, None], a[None, None], a[None, None], b),
}
CASES = {(name, (dtype,)): op for name, op in UNARY.items() if name not in LIKE_CUDNN for dtype in (FLOAT, BFLOAT)}
CASES |= {
    (name, pair): op
    for name, op in BINARY.items()
    for pair in ((FLOAT, FLOAT), (FLOAT, BFLOAT), (BFLOAT, FLOAT), (BFLOAT, BFLOAT))
}


def dtypes_of(op, dtypes):
    """The dtypes of the results of ``op``, or the kind of error."""
    try:
        result = op(*[rand(4, 4, dtype=dtype) for dtype in dtypes])
    except (RuntimeError, NotImplementedError):
        return "refused"
    return [t.dtype for t in (result if isinstance(result, tuple) else (result,))]


@contextmanager
def fake_cuda():
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda:0"):
        yield


@contextmanager
def autocast():
    """``torch.autocast("cuda", torch.bfloat16)``, which turns itself off on a machine without CUDA."""
    torch.set_autocast_dtype("cuda", BFLOAT)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


pytestmark = pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
torch_of_the_lists = pytest.mark.skipif(
    TORCH < (2, 15),
    reason="the lists are those of torch 2.15; an older torch casts other operations, or aborts without a GPU",
)


@pytest.fixture(scope="module")
def expected():
    with fake_cuda(), autocast():
        return {case: dtypes_of(op, case[1]) for case, op in CASES.items()}


@torch_of_the_lists
@pytest.mark.contract("8")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dtypes_are_those_of_autocast_for_cuda(expected, device):
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    if device == "cuda":
        cast_engine.engine.add("cuda")
        with fake_cuda():
            found = {case: dtypes_of(op, case[1]) for case, op in CASES.items()}
    else:
        found = {case: dtypes_of(op, case[1]) for case, op in CASES.items()}
    differ = {case for case in CASES if found[case] != expected[case]}
    assert {name for name, _ in differ} <= set(REFUSED_BY_AUTOCAST)
    assert all(found[case] == [FLOAT] for case in differ)


@pytest.mark.skipif(TORCH < (2, 14), reason="an older torch aborts without a GPU")
@pytest.mark.contract("4.2")
def test_dtypes_at_o1_are_the_same_on_a_cpu():
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    half = {(op, tuple(torch.float16 if d is BFLOAT else d for d in dtypes)) for (_, dtypes), op in CASES.items()}
    found = {case: dtypes_of(*case) for case in half}
    cast_engine.engine.add("cuda")
    with fake_cuda():
        on_cuda = {case: dtypes_of(*case) for case in half}
    differ = {op for op, dtypes in half if on_cuda[op, dtypes] not in ("refused", found[op, dtypes])}
    assert differ == {torch.trace}, "see REFUSED_BY_AUTOCAST"


@torch_of_the_lists
@pytest.mark.contract("8")
def test_lists_hold_every_operation_that_autocast_casts_on_cuda():
    """Of the installed torch; those of cuDNN and of fused kernels exist on CUDA only."""
    only_cuda = {"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose", "binary_cross_entropy"}
    only_cuda |= {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention"}
    every = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    cast = {name for name in every if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")}
    names = {name.removeprefix("aten::").partition(".")[0] for name in cast} - only_cuda - {"cat", "stack"}
    listed = [*cast_lists.AUTOCAST.reduced, *cast_lists.AUTOCAST.float32, *cast_lists.AUTOCAST.widest]
    assert len(listed) == len(set(listed))
    assert names <= set(listed)
    newer = {"linalg_matrix_sqrth"}  # not in every torch that is supported
    assert set(listed) - names <= {*cast_lists.REGISTERED_EVEN_ON_CUDA, *newer}


@pytest.mark.contract("8")
def test_operations_without_a_reduced_kernel_leave_float64_as_it_is():
    x = rand(1, 1, 4, 4, 4, dtype=torch.float64)
    expected = F.avg_pool3d(x, 2)
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    assert torch.equal(F.avg_pool3d(x, 2), expected)


@pytest.mark.contract("8")
def test_gelu_of_a_transformer_moves_no_float32():
    """Apex's list, kept at O1, computes it in float32, which is most of what a transformer's forward writes."""
    layer = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    seen = []
    layer[1].register_forward_hook(lambda module, args, output: seen.append((args[0].dtype, output.dtype)))
    for level in ("O4", "O1"):
        amp.initialize(layer, opt_level=level, verbosity=0)
        layer(rand(2, 4))
    assert seen == [(BFLOAT, BFLOAT), (torch.float16, FLOAT)]
