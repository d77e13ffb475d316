"""O1's lists, one operation at a time, and the functions a script adds to them."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.oracle.cells.kit import Result, cells, fit, images, sgd, vectors

_NARROW = (
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear prelu addmm addmv addr"
)
_NARROW += " matmul mm mv addbmm baddbmm bmm"
_UNARY = "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan cumprod cumsum prod std sum var norm"
_BINARY = "add sub mul div atan2 eq ge gt le lt ne dist dot"
_FUNCTIONAL = "softplus softmin log_softmax softmax gelu normalize local_response_norm"
_LOSSES = "poisson_nll_loss hinge_embedding_loss kl_div l1_loss mse_loss smooth_l1_loss soft_margin_loss"
_LOSSES += " multilabel_soft_margin_loss binary_cross_entropy_with_logits cosine_similarity margin_ranking_loss"
_LOSSES += " triplet_margin_loss cosine_embedding_loss interpolate grid_sample layer_norm group_norm"
_MATCHING = "relu sigmoid tanh sqrt abs mean silu leaky_relu"


def _operands(name: str) -> list[Tensor]:
    """Operands between 0.1 and 0.9, where every operation is finite."""
    sizes = {
        **{"conv1d": ((2, 3, 8), (4, 3, 3)), "conv2d": ((2, 3, 8, 8), (4, 3, 3, 3)), "linear": ((4, 6), (5, 6))},
        **{"conv3d": ((2, 3, 4, 4, 4), (4, 3, 3, 3, 3)), "conv_transpose1d": ((2, 3, 8), (3, 4, 3))},
        **{"conv_transpose2d": ((2, 3, 4, 4), (3, 4, 3, 3)), "conv_transpose3d": ((2, 3, 4, 4, 4), (3, 4, 3, 3, 3))},
        **{"conv_tbc": ((8, 2, 3), (3, 3, 4), (4,)), "prelu": ((4, 6), (6,)), "addmm": ((4, 5), (4, 6), (6, 5))},
        **{
            "addmv": ((4,), (4, 6), (6,)),
            "addr": ((4, 5), (4,), (5,)),
            "matmul": ((4, 6), (6, 5)),
            "mv": ((4, 6), (6,)),
        },
        **{"mm": ((4, 6), (6, 5)), "bmm": ((2, 4, 6), (2, 6, 5)), "addbmm": ((4, 5), (2, 4, 6), (2, 6, 5))},
        **{"baddbmm": ((2, 4, 5), (2, 4, 6), (2, 6, 5)), "dot": ((6,), (6,)), "local_response_norm": ((2, 4, 6),)},
        **{"margin_ranking_loss": ((4,), (4,)), "triplet_margin_loss": ((4, 6),) * 3, "interpolate": ((2, 3, 6),)},
        **{"grid_sample": ((2, 3, 4, 4), (2, 4, 4, 2)), "layer_norm": ((4, 6),), "group_norm": ((2, 4, 6), (4,), (4,))},
    }.get(name, ((4, 6), (4, 6)) if name in (*_BINARY.split(), *_LOSSES.split()) else ((4, 6),))
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    return [torch.rand(size, generator=generator) * 0.8 + 0.1 for size in sizes]


def _call(name: str, operands: list[Tensor]) -> Tensor:
    function = getattr(functional, name, None) or getattr(torch, name)
    extra = {"cumprod": {"dim": 0}, "cumsum": {"dim": 0}, "local_response_norm": {"size": 2}}.get(name, {})
    extra = {"dim": -1} if name in ("softmin", "log_softmax", "softmax") else extra
    if name in ("margin_ranking_loss", "cosine_embedding_loss"):
        operands = [*operands, torch.tensor([1.0, -1.0, 1.0, 1.0])]
    extra = {"layer_norm": {"normalized_shape": (6,)}, "interpolate": {"scale_factor": 2.0}}.get(name, extra)
    if name == "group_norm":
        operands = [operands[0], 2, *operands[1:]]
    return function(*operands, **extra)


def _o1() -> None:
    from apex import amp

    net = nn.Linear(2, 2)
    amp.initialize(net, sgd(net.parameters()), opt_level="O1", verbosity=0)


@cells(
    "operation",
    name=" ".join((_NARROW, _UNARY, _BINARY, _FUNCTIONAL, _LOSSES, _MATCHING)).split(),
)
def operation(name: str) -> Result:
    """Each operation on float32, on float16 and, with several operands, on a mixture: dtypes, values, gradients."""
    from apex import amp

    _o1()
    result: Result = {}
    for kind in ("float32", "float16", "mixed"):
        operands = _operands(name)
        if kind == "mixed" and len(operands) == 1:
            continue
        for i, operand in enumerate(operands):
            narrow = kind == "float16" or (kind == "mixed" and i > 0)
            operands[i] = (operand.half() if narrow else operand).requires_grad_()
        try:
            value = _call(name, operands)
            result[kind] = value.detach()
            if value.requires_grad:
                with amp.disable_casts():  # as in scale_loss
                    value.float().sum().backward()
                result[f"{kind} gradients"] = [operand.grad for operand in operands]
        except (RuntimeError, NotImplementedError) as error:
            result[kind] = type(error).__name__
    return result


def _by_name(name: str) -> Tensor:
    x = torch.linspace(0.1, 0.9, 24).reshape(4, 6).half()
    y, weight = torch.linspace(0.2, 0.8, 24).reshape(4, 6), torch.full((1,), 0.25)
    calls = {
        "torch.softmax": lambda: torch.softmax(x, -1),
        "Tensor.softmax": lambda: x.softmax(-1),
        "torch.log_softmax": lambda: torch.log_softmax(x, -1),
        "torch.einsum of float32": lambda: torch.einsum("ij,kj->ik", y, y),
        "torch.einsum of both": lambda: torch.einsum("ij,kj->ik", x, y),
        "scaled_dot_product_attention of float32": lambda: functional.scaled_dot_product_attention(y, y, y),
        "F.prelu": lambda: functional.prelu(x, weight),
        "torch.prelu": lambda: torch.prelu(y, weight),
        "Tensor.matmul": lambda: y.matmul(y.t()),
        "matmul operator": lambda: y @ y.t(),
        "pow operator": lambda: x**2,
        "reverse pow": lambda: 2.0**x,
        "Tensor.sum": lambda: x.sum(0),
        "Tensor.norm": lambda: x.norm(),
        "torch.linalg.norm": lambda: torch.linalg.norm(x),
        "torch.layer_norm": lambda: torch.layer_norm(x, (6,)),
        "F.layer_norm": lambda: functional.layer_norm(x, (6,)),
        "F.rms_norm": lambda: functional.rms_norm(x, (6,)),
        "logsumexp": lambda: torch.logsumexp(x, -1),
        "log1p": lambda: torch.log1p(x),
        "add in place": lambda: x.clone().add_(y),
        "operator +=": lambda: _plus_equals(x.clone(), y),
        "cat": lambda: torch.cat([x, y]),
        "where": lambda: torch.where(x > 0.5, x, y),
        "addcmul": lambda: torch.addcmul(x, y, y),
        "cdist": lambda: torch.cdist(x, x),
        "huber_loss": lambda: functional.huber_loss(x, x.flip(0)),
        "Tensor.cpu": lambda: x.cpu(),
        "float64 matmul": lambda: y.double() @ y.double().t(),
        "float64 exp": lambda: y.double().exp(),
        "float64 plus float32": lambda: y.double() + y,
    }
    return calls[name]()


def _plus_equals(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x


@cells(
    "spelling",
    name=(
        *("torch.softmax", "Tensor.softmax", "torch.log_softmax", "torch.einsum of float32", "torch.einsum of both"),
        *("scaled_dot_product_attention of float32", "F.prelu", "torch.prelu", "Tensor.matmul", "matmul operator"),
        *("pow operator", "reverse pow", "Tensor.sum", "Tensor.norm", "torch.linalg.norm", "torch.layer_norm"),
        *("F.layer_norm", "F.rms_norm", "logsumexp", "log1p", "add in place", "operator +=", "cat", "where", "addcmul"),
        *("cdist", "huber_loss", "Tensor.cpu", "float64 matmul", "float64 exp", "float64 plus float32"),
    ),
)
def spelling(name: str) -> Result:
    """Operations by the name under which a script calls them."""
    _o1()
    try:
        return {"value": _by_name(name)}
    except (RuntimeError, NotImplementedError) as error:
        return {"value": type(error).__name__}


def _module_with(function: Any) -> Any:
    module = types.ModuleType("of_the_script")
    module.function = function  # type: ignore[attr-defined]
    return module


def _double(x: Tensor) -> Tensor:
    return x * 2 + 1


def _both(x: Tensor, y: Tensor) -> Tensor:
    return x * y


@cells("decorator", kind=("half", "float", "promote"), level=("O0", "O1", "O2"))
def decorators(kind: str, level: str) -> Result:
    from apex import amp

    function = getattr(amp, f"{kind}_function")(_both)
    net = nn.Linear(16, 10)
    net, optimizer = amp.initialize(net, sgd(net.parameters()), opt_level=level, verbosity=0)
    x, y = torch.linspace(-1, 1, 8), torch.linspace(0, 1, 8).half()
    values = [function(x, x), function(x, y), function(y, y), function(x, y=y)]
    trained = fit(net, optimizer, vectors(3), loss=lambda output, _: function(output, output).float().mean())
    return {"values": values, **trained}


@cells("registration", kind=("half", "float", "promote"), level=("O0", "O1"))
def registrations(kind: str, level: str) -> Result:
    from apex import amp

    module = _module_with(_both)
    getattr(amp, f"register_{kind}_function")(module, "function")
    net = nn.Linear(16, 10)
    amp.initialize(net, sgd(net.parameters()), opt_level=level, verbosity=0)
    x, y = torch.linspace(-1, 1, 8), torch.linspace(0, 1, 8).half()
    return {"values": [module.function(x, x), module.function(x, y), module.function(y, y)]}


@cells("registration of a torch function", kind=("half", "float"))
def registered_torch(kind: str) -> Result:
    from apex import amp

    getattr(amp, f"register_{kind}_function")(torch, "sigmoid")
    _o1()
    return {"values": [torch.sigmoid(torch.linspace(-1, 1, 8)), torch.sigmoid(torch.linspace(-1, 1, 8).half())]}


class _PartlyUncast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        from apex import amp

        x = self.first(x).mean((2, 3))
        with amp.disable_casts():
            return self.second(x.float())


@cells("disable_casts", level=("O1",))
def disable_casts(level: str) -> Result:
    from apex import amp

    net = _PartlyUncast()
    return fit(*amp.initialize(net, sgd(net.parameters()), opt_level=level, verbosity=0), images(6))


@cells("binary_cross_entropy under O1", dtype=(torch.float16, torch.float32))
def banned(dtype: torch.dtype) -> Result:
    _o1()
    x = torch.linspace(0.1, 0.9, 8).to(dtype)
    try:
        return {"value": functional.binary_cross_entropy(x, x.round())}
    except NotImplementedError:
        return {"value": "NotImplementedError"}
