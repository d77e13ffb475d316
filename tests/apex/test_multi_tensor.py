"""``multi_tensor_applier`` and the operations of ``amp_C`` (contract 1.1, 6.1)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from harness.apex import amp_C
from harness.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from tests.apex.optimizer_cases import NoHostSync

pytestmark = pytest.mark.contract("6.1.multi_tensor")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SHAPES = [(7,), (3, 5), (), (0,), (2, 3, 4)]


def flag():
    return torch.zeros(1, dtype=torch.int32)


def fill(dtype, value):
    return [torch.full(shape, value, dtype=dtype) for shape in SHAPES]


def random(*dtypes):
    return [torch.randn(shape).to(dtype) for dtype in dtypes for shape in SHAPES]


@pytest.mark.contract("1.1")
def test_applier_passes_its_chunk_size():
    seen = []
    buffer = flag()
    applier = MultiTensorApply(128)
    assert applier(lambda *args: seen.append(args) or "result", buffer, [[], []], 1, 2) == "result"
    assert seen == [(128, buffer, [[], []], 1, 2)]
    assert (multi_tensor_applier.available, multi_tensor_applier.chunk_size) == (True, 65536)
    multi_tensor_applier.check_avail()


@pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, DTYPES)))
def test_scale(source, target):
    xs, outs, overflow = random(source), fill(target, 9.0), flag()
    with NoHostSync():
        multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [xs, outs], 1 / 3)
    for x, out in zip(xs, outs, strict=True):
        wide = torch.promote_types(source, torch.float32)
        assert torch.equal(out, (x.to(wide) * (1 / 3)).to(target))
    assert overflow.item() == 0


def test_scale_works_in_place_and_computes_in_float32():
    xs = random(torch.float32, torch.float16)
    expected = [x * 2 for x in xs]
    multi_tensor_applier(amp_C.multi_tensor_scale, flag(), [xs, xs], 2.0)
    assert all(torch.equal(a, b) for a, b in zip(xs, expected, strict=True))
    big, out = [torch.tensor([1e6])], [torch.zeros(1, dtype=torch.float16)]
    overflow = flag()
    multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [big, out], 1e-3)
    assert out[0].item() == 1000.0
    assert overflow.item() == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", [0, 1, 4])
def test_inf_and_nan_anywhere_set_the_flag(bad, dtype, where):
    def poisoned():
        tensors = random(dtype)
        tensors[where].view(-1)[-1] = bad
        return tensors

    for args in (
        (amp_C.multi_tensor_scale, [poisoned(), random(dtype)], 0.5),
        (amp_C.multi_tensor_axpby, [poisoned(), random(dtype), random(dtype)], 1.0, 2.0, -1),
        (amp_C.multi_tensor_axpby, [random(dtype), poisoned(), random(dtype)], 1.0, 2.0, -1),
        (amp_C.multi_tensor_axpby, [poisoned(), random(dtype), random(dtype)], 1.0, 2.0, 0),
        (amp_C.multi_tensor_axpby, [random(dtype), poisoned(), random(dtype)], 1.0, 2.0, 1),
        (amp_C.multi_tensor_l2norm, [poisoned()], True),
        (amp_C.multi_tensor_unscale_l2norm, [poisoned()], torch.tensor([0.5]), False),
    ):
        overflow = flag()
        with NoHostSync():
            multi_tensor_applier(args[0], overflow, *args[1:])
        assert overflow.tolist() == [1]
        assert overflow.dtype is torch.int32
        multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow, [random(dtype)])
        assert overflow.item() == 1, "the flag is the caller's to reset"


def test_axpby_checks_only_the_selected_argument():
    bad, good = [torch.tensor([math.inf])], [torch.ones(1)]
    for xs, ys, look in ((bad, good, 1), (good, bad, 0)):
        overflow = flag()
        multi_tensor_applier(amp_C.multi_tensor_axpby, overflow, [xs, ys, [torch.empty(1)]], 1.0, 1.0, look)
        assert overflow.item() == 0
    with pytest.raises(ValueError, match="arg_to_check is 2"):
        multi_tensor_applier(amp_C.multi_tensor_axpby, flag(), [good, good, good], 1.0, 1.0, 2)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("x_type", "y_type", "out_type"), list(itertools.product(DTYPES[:3], repeat=3)))
def test_axpby(x_type, y_type, out_type, layout):
    x = torch.randn(2, 3, 4, 5).to(x_type)
    y = torch.randn(2, 3, 4, 5).to(y_type, memory_format=layout)
    xs, ys, outs = [x, x * 2], [y, y * 3], [torch.zeros_like(y, dtype=out_type) for _ in range(2)]
    overflow = flag()
    multi_tensor_applier(amp_C.multi_tensor_axpby, overflow, [xs, ys, outs], 0.5, -4.0, -1)
    for x, y, out in zip(xs, ys, outs, strict=True):
        assert torch.equal(out, (x.float() * 0.5 + y.float() * -4.0).to(out_type))
    assert overflow.item() == 0


def test_l2norm():
    xs = random(torch.float32, torch.float16, torch.bfloat16)
    expected = [x.double().norm().item() for x in xs]
    with NoHostSync():
        total, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [xs], True)
    assert total.shape == (1,)
    assert each.tolist() == pytest.approx(expected, rel=1e-6)
    assert total.item() == pytest.approx(math.sqrt(sum(n * n for n in expected)), rel=1e-6)
    assert total.dtype is each.dtype is torch.float32
    assert multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [xs])[1].numel() == 0


def test_l2norm_of_float16_does_not_overflow_and_of_nothing_is_zero():
    total, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [[torch.full((100,), 6e4).half()]], False)
    assert total.item() == pytest.approx(6e5, rel=1e-3)
    total, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [[]], True)
    assert (total.tolist(), each.tolist()) == ([0.0], [])


@pytest.mark.parametrize("inv_scale", [0.25, torch.tensor([0.25]), torch.tensor(-0.25)])
def test_unscale_l2norm_leaves_the_tensors_alone(inv_scale):
    xs = [torch.tensor([3.0]), torch.tensor([4.0])]
    overflow = flag()
    total, each = multi_tensor_applier(amp_C.multi_tensor_unscale_l2norm, overflow, [xs], inv_scale, True)
    assert (total.tolist(), each.tolist()) == ([1.25], [0.75, 1.0])
    assert [x.item() for x in xs] == [3.0, 4.0]
    assert overflow.item() == 0


def test_clipping_as_in_bert_scripts():
    grads = [torch.full((4,), 3.0), torch.full((9,), 2.0)]
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [grads], False)
    clip = 1.0 / (norm.item() + 1e-6)
    multi_tensor_applier(amp_C.multi_tensor_scale, flag(), [grads, grads], clip)
    assert torch.cat(grads).norm().item() == pytest.approx(1.0, rel=1e-5)


def test_wrong_arguments_are_explained():
    with pytest.raises(RuntimeError, match=r"multi_tensor_scale takes 2 list\(s\).*got 1 of length \[1\]"):
        multi_tensor_applier(amp_C.multi_tensor_scale, flag(), [[torch.ones(1)]], 1.0)
    with pytest.raises(RuntimeError, match=r"length \[1, 0\]"):
        multi_tensor_applier(amp_C.multi_tensor_scale, flag(), [[torch.ones(1)], []], 1.0)
    with pytest.raises(AttributeError, match="amp_C.multi_tensor_adam is not provided.*FusedAdam"):
        amp_C.multi_tensor_adam  # noqa: B018
    assert not hasattr(amp_C, "something_else")
