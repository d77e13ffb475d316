"""Casts of models, of their inputs and outputs, and of their state dicts (contract 3.1, 3.4, 3.5)."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from harness.apex import amp, fp16_utils
from tests.apex.shared import same

HALF = torch.float16
Point = namedtuple("Point", "x y")  # noqa: PYI024


@dataclass
class Output:
    logits: torch.Tensor
    loss: Any = None


@dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor


class ModelOutput(OrderedDict):
    """As in the transformers library: an ordered dict whose keys are attributes too."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Batch:
    def __init__(self, x):
        self.x = x

    def to(self, dtype):
        return Batch(self.x.to(dtype))


class Boxes(list):
    """A list that is made from something else than its items."""

    def __init__(self, *, size):
        super().__init__()
        self.size = size


def boxes(*items):
    result = Boxes(size=len(items))
    result.extend(items)
    return result


def f(*shape):
    return torch.ones(*shape or (2,))


half = fp16_utils.tofp16()


# name: (value, how to reach its tensor)
CONTAINERS: dict[str, tuple[Any, Callable[[Any], torch.Tensor]]] = {
    "list": ([f(), 1, "text"], lambda v: v[0]),
    "nested": ({"a": [(f(), 1)]}, lambda v: v["a"][0][0]),
    "list with another constructor": (boxes(f(), 1), lambda v: v[v.size - 2]),
    "deque": (deque([f(), 1], maxlen=2), lambda v: v[v.maxlen - 2]),
    "named tuple": (Point(f(), torch.tensor([1])), lambda v: v.x),
    "dataclass": (Output(f(), None), lambda v: v.logits),
    "frozen dataclass": (Frozen(f()), lambda v: v.logits),
    "ordered dict": (OrderedDict(a=f()), lambda v: v["a"]),
    "default dict": (defaultdict(list, a=f()), lambda v: v["a"]),
    "model output": (ModelOutput(logits=f()), lambda v: v.logits),
    "object with to()": (Batch(f()), lambda v: v.x),
    "packed sequence": (nn.utils.rnn.pack_padded_sequence(f(3, 2, 4), [3, 2]), lambda v: v.data),
    "packed sequence of ids": (nn.utils.rnn.pack_padded_sequence(f(3, 2).long(), [3, 2]), lambda v: v.data),
    "float64": (f().double(), lambda v: v),
    "bfloat16": (f().bfloat16(), lambda v: v),
}


@pytest.mark.contract("3.4", "7.2")
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_keep_their_type_and_are_not_changed(name):
    value, tensor = CONTAINERS[name]
    before = tensor(value).dtype
    found = half(value)
    assert type(found) is type(value)
    assert tensor(found).dtype is HALF
    assert tensor(value).dtype is before
    if name == "model output":
        assert found["logits"].dtype is HALF, "as a key too"
    if name == "default dict":
        assert found.default_factory is list


@pytest.mark.contract("3.4")
@pytest.mark.parametrize(
    "value",
    [None, 1, 2.0, "text", b"bytes", range(3), torch.Size([1]), torch.tensor([1]), {"a": 1}, [1, "b"], int, object()]
    + [(t for t in [f()]), nn.Linear(1, 1), Output(None, None)],
)
def test_value_without_floating_tensors_is_returned_itself(value):
    assert half(value) is value
    if isinstance(value, nn.Module):
        assert value.weight.dtype is torch.float32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.plain_norm = nn.BatchNorm1d(4, affine=False)
        self.layer_norm = nn.LayerNorm(4)
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("counts", torch.ones(4, dtype=torch.int64))
        self.seen: list = []

    def forward(self, x, *, extra=None):
        self.seen.append((x.dtype, extra.dtype if extra is not None else None))
        return {"out": self.plain_norm(self.layer_norm(self.norm(self.first(x)))) * self.table}


def start(level, **overrides):
    return amp.initialize(Net(), [], opt_level=level, verbosity=0, **overrides)[0]


@pytest.mark.contract("3.1", "8")
@pytest.mark.parametrize(("level", "dtype"), [("O2", HALF), ("O5", torch.bfloat16)])
def test_o2_keeps_affine_batch_norm_only(level, dtype):
    net = start(level)
    assert net.first.weight.dtype is dtype
    assert net.norm.weight.dtype is torch.float32
    assert net.norm.running_mean.dtype is torch.float32
    assert net.plain_norm.running_mean.dtype is dtype
    assert net.layer_norm.weight.dtype is dtype
    assert net.table.dtype is dtype
    assert net.counts.dtype is torch.int64
    out = net(torch.randn(3, 4), extra=torch.randn(2).double())
    assert net.seen == [(dtype, dtype)]
    assert out["out"].dtype is torch.float32


@pytest.mark.contract("3.1")
def test_levels_and_overrides_change_what_is_cast():
    assert amp.initialize(Net().double(), [], opt_level="O0", verbosity=0)[0].first.weight.dtype is torch.float32
    assert start("O3").norm.weight.dtype is HALF
    assert start("O3", keep_batchnorm_fp32=True).norm.weight.dtype is torch.float32
    assert start("O2", keep_batchnorm_fp32=False).norm.weight.dtype is HALF
    net = start("O2", cast_model_outputs=torch.float64)
    assert net(torch.randn(3, 4))["out"].dtype is torch.float64
    net = start("O2", cast_model_type=False)
    assert net.first.weight.dtype is torch.float32
    assert not net._forward_pre_hooks


@pytest.mark.contract("3.1")
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_complex_tensors_stay_complex(level):
    net = nn.Linear(2, 2)
    net.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    net.register_buffer("frequencies", torch.full((2,), 1j))
    amp.initialize(net, opt_level=level, verbosity=0)
    assert net.weight.dtype is (torch.float32 if level == "O0" else HALF)
    assert net.phase.dtype is torch.complex64
    assert net.frequencies.tolist() == [1j, 1j]


@pytest.mark.parametrize("child", [False, True])
def test_scripted_modules(child):
    model = torch.jit.script(nn.Linear(2, 2))
    model = nn.Sequential(model) if child else model
    for level in ("O0", "O2"):
        with pytest.raises(RuntimeError, match=f"ScriptModule with opt_level='{level}'"):
            amp.initialize(model, opt_level=level, verbosity=0)
    assert not amp._amp_state.initialized
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    if not child:
        with pytest.raises(RuntimeError, match="and cast_model_outputs"):
            amp.initialize(model, opt_level="O1", cast_model_outputs=torch.float32, verbosity=0)
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert model(torch.ones(1, 2)).dtype is HALF


@pytest.mark.contract("3.1")
def test_parameters_keep_identity_and_gradients():
    net = Net()
    before = list(net.parameters())
    net.first.weight.grad = torch.ones(4, 4)
    amp.initialize(net, opt_level="O2", verbosity=0)
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    assert net.first.weight.grad.dtype is HALF


@pytest.mark.contract("3.5")
@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_state_dicts_are_float32_and_load_back(level):
    net = start(level)
    saved = net.state_dict()
    assert {v.dtype for v in saved.values() if v.is_floating_point()} == {torch.float32}
    assert {v.dtype for v in net.first.state_dict().values()} == {torch.float32}, "a part of the model"
    wrapped = nn.Sequential(net)
    assert set(wrapped.state_dict()) == {f"0.{name}" for name in saved}
    twin = start(level)
    twin.load_state_dict(saved)
    assert same(net.parameters(), twin.parameters())


@pytest.mark.contract("3.5", "7.2")
def test_extra_state_is_left_alone():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"version": 3}

        def set_extra_state(self, state):
            self.version = state["version"]

    net = amp.initialize(Extra(2, 2), opt_level="O2", verbosity=0)
    saved = net.state_dict()
    assert saved["_extra_state"] == {"version": 3}
    net.load_state_dict(saved)
    assert net.version == 3


@pytest.mark.contract("3.4", "10.9")
@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_copies_are_bound_to_their_own_weights(level):
    net = amp.initialize(nn.Linear(4, 4), opt_level=level, verbosity=0)
    x = torch.randn(2, 4)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        before = twin(x)
        with torch.no_grad():
            net.weight.add_(1)
        assert torch.equal(twin(x), before)
        assert not torch.equal(net(x), before)
        assert twin(x).dtype is torch.float32
        assert twin.state_dict()["weight"].dtype is torch.float32
