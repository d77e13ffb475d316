"""``multi_tensor_applier`` and the operations of ``amp_C`` (contract 1.1, 6.1)."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch

from harness.apex import amp_C
from harness.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from harness.apex.optimizers import FusedAdam

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


def test_wrong_arguments_are_explained():
    with pytest.raises(RuntimeError, match=r"multi_tensor_scale takes 2 list\(s\).*got lists of lengths \[1\]"):
        multi_tensor_applier(amp_C.multi_tensor_scale, flag(), [[torch.ones(1)]], 1.0)
    with pytest.raises(RuntimeError, match=r"lengths \[1, 0\]"):
        multi_tensor_applier(amp_C.multi_tensor_scale, flag(), [[torch.ones(1)], []], 1.0)
    with pytest.raises(RuntimeError, match=r"multi_tensor_sgd takes 3 or 4 list\(s\).*got lists of lengths \[0, 0\]"):
        multi_tensor_applier(amp_C.multi_tensor_sgd, flag(), [[], []], 0, 0, 0, 0.1, False, True, False, 1.0)
    with pytest.raises(AttributeError, match=r"has no attribute 'multi_tensor_lars'\. It has .*multi_tensor_adam"):
        amp_C.multi_tensor_lars  # noqa: B018


# The optimizers' updates, each against its formula in float64

KINDS = [[torch.float32], [torch.float16], [torch.bfloat16, torch.float32, torch.float64]]
BETAS = 0.9, 0.99


def lists(number, dtypes):
    """``number`` lists of tensors, mixed in dtype and layout; the fourth, second moments, is positive."""
    torch.manual_seed(0)
    made = [random(*dtypes) + [torch.randn(4, 6).t().to(dtypes[0])] for _ in range(number)]
    return [*made[:3], *([each.abs() for each in made[3]] for _ in range(number > 3)), *made[4:]]


def doubles(*tensor_lists):
    return [[each.double() for each in tensors] for tensors in tensor_lists]


def corrections(step, on):
    return [1 - beta**step if on else 1.0 for beta in BETAS]


def adam(g, p, m, v, step, mode, bias_correction, wd, grad_weight=1 - BETAS[0]):
    g = g if mode else g + wd * p
    m = BETAS[0] * m + grad_weight * g
    v = BETAS[1] * v + (1 - BETAS[1]) * g * g
    first, second = corrections(step, bias_correction)
    return (m / first) / ((v / second).sqrt() + 1e-3) + (wd * p if mode else 0), m, v


def check(op, given, args, expected, dtypes, noop=0.0, updated=True):
    """Call ``op`` on copies of ``given``. ``expected`` has one entry for each list: its new values, or None."""
    copies, buffer = [[each.clone() for each in tensors] for tensors in given], torch.tensor([int(noop)])
    assert multi_tensor_applier(op, buffer, copies, *args) is None
    for before, after, wanted in zip(given, copies, expected, strict=True):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            if wanted is None or not updated:
                assert torch.equal(old, new)
            else:
                tolerance = {torch.float64: 1e-6, torch.float32: 1e-5}.get(new.dtype, 2e-2)
                torch.testing.assert_close(new.double(), wanted[i].double(), rtol=tolerance, atol=tolerance)
                assert (old.dtype, old.stride()) == (new.dtype, new.stride())


@pytest.mark.parametrize("dtypes", KINDS)
def test_sgd(dtypes):
    given = lists(4, dtypes)
    for nesterov, first, after, mom in itertools.product((False, True), (False, True), (False, True), (0.0, 0.5)):
        news = []
        for g, p, m, _ in zip(*doubles(*given), strict=True):
            d = g / 2 + (0 if after else 0.1 * p)
            m = d if first else mom * m + 0.75 * d
            step = (d + mom * m if nesterov else m) if mom else d
            news.append((p - 0.2 * (step + (0.1 * p if after else 0)), m if mom else None))
        weights, moments = zip(*news, strict=True)
        args = 0.1, mom, 0.25 if mom else 0.0, 0.2, nesterov and mom > 0, first, after, 0.5
        if nesterov and not mom:
            continue
        check(amp_C.multi_tensor_sgd, given[:3], args, [None, weights, moments if mom else None], dtypes)
        check(amp_C.multi_tensor_sgd, given, args, [None, weights, moments if mom else None, weights], dtypes)
        check(amp_C.multi_tensor_sgd, given, args, [None] * 4, dtypes, noop=1)


@pytest.mark.parametrize("dtypes", KINDS)
def test_adam_plain_and_capturable_with_masters(dtypes):
    given = lists(5, dtypes)
    for mode, correct in itertools.product((0, 1), (0, 1)):
        options = *BETAS, 1e-3, 3, mode, correct, 0.1
        g, p, m, v, master = doubles(*given)
        news = [adam(*each, 3, mode, correct, 0.1) for each in zip(g, p, m, v, strict=True)]
        moments = [new[1] for new in news], [new[2] for new in news]
        weights = [each - 0.2 * new[0] for each, new in zip(p, news, strict=True)]
        for noop in (0, 1):  # the plain kernel does not skip
            check(amp_C.multi_tensor_adam, given[:4], (0.2, *options), [None, weights, *moments], dtypes, noop=noop)

        lr, step, inv_scale = torch.tensor(0.2), torch.tensor([3], dtype=torch.int32), torch.tensor([0.5])
        options = lr, *BETAS, 1e-3, step, mode, correct, 0.1, inv_scale
        halves = [each / 2 for each in g]
        news = [adam(*each, 3, mode, correct, 0.1) for each in zip(halves, p, m, v, strict=True)]
        moments = [new[1] for new in news], [new[2] for new in news]
        weights = [each - 0.2 * new[0] for each, new in zip(p, news, strict=True)]
        expected = [halves, weights, *moments]
        check(amp_C.multi_tensor_adam_capturable, given[:4], options, expected, dtypes)
        check(amp_C.multi_tensor_adam_capturable, given[:4], options, [None] * 4, dtypes, noop=1)

        news = [adam(*each, 3, mode, correct, 0.1) for each in zip(halves, master, m, v, strict=True)]
        moments = [new[1] for new in news], [new[2] for new in news]
        weights = [each - 0.2 * new[0] for each, new in zip(master, news, strict=True)]
        expected = [halves, weights, *moments, weights]
        check(amp_C.multi_tensor_adam_capturable_master, given, options, expected, dtypes)
        check(amp_C.multi_tensor_adam_capturable_master, given, options, [None] * 5, dtypes, noop=1)


@pytest.mark.parametrize("dtypes", KINDS)
def test_adagrad_and_novograd(dtypes):
    given = lists(3, dtypes)
    given[2] = [each.abs() for each in given[2]]
    for mode in (0, 1):
        g, p, h = doubles(*given)
        g = g if mode else [one + 0.1 * other for one, other in zip(g, p, strict=True)]
        h = [one + other**2 for one, other in zip(h, g, strict=True)]
        p = [w - 0.2 * (a / (b.sqrt() + 1e-3) + (0.1 * w if mode else 0)) for w, a, b in zip(p, g, h, strict=True)]
        check(amp_C.multi_tensor_adagrad, given, (0.2, 1e-3, mode, 0.1), [None, p, h], dtypes)

    given = [[each for each in tensors if each.numel()] for tensors in lists(3, dtypes)]
    for mode, norm_type, averaging in itertools.product((0, 1), (0, 2), (0, 1)):
        running = torch.rand(len(given[0]))
        weights, moments, blends = [], [], []
        first, second = corrections(2, True)
        for g, p, m, v in zip(*doubles(*given), running.double(), strict=True):
            v = v * 0.99 + 0.01 * g.abs().max() if norm_type == 0 else v * 0.99
            v = ((v / 0.99) ** 2 * 0.99 + 0.01 * g.pow(2).sum()).sqrt() if norm_type == 2 else v
            blends.append(v)
            unit = v / math.sqrt(second) + 1e-3
            m = 0.9 * m + (0.1 if averaging else 1.0) * (g / unit + 0.1 * p if mode == 0 else g)
            weights.append(p - 0.2 * (m / first if mode == 0 else m / first / unit + 0.1 * p))
            moments.append(m)
        args = running, 0.2, *BETAS, 1e-3, 2, 1, 0.1, averaging, mode, norm_type
        check(amp_C.multi_tensor_novograd, given, args, [None, weights, moments], dtypes)
        torch.testing.assert_close(running, torch.stack(blends).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtypes", KINDS)
def test_lamb_in_one_or_two_stages(dtypes):
    given = lists(5, dtypes)
    ratios_of = (0.0, False), (0.0, True), (0.1, False)
    for mode, averaging, (decay, nvlamb) in itertools.product((0, 1), (0, 1), ratios_of):
        weights, moments, seconds, updates, ratios = [], [], [], [], []
        for g, p, m, v, _ in zip(*doubles(*given), strict=True):
            update, m, v = adam(g / 4, p, m, v, 3, mode, 1, decay, 0.1 if averaging else 1.0)
            ratio = p.norm() / update.norm() if p.norm() > 0 and update.norm() > 0 else 1.0
            ratios.append((p.norm(), update.norm()))
            weights.append(p - 0.2 * update * (ratio if decay or nvlamb else 1.0))
            for store, value in ((moments, m), (seconds, v), (updates, update)):
                store.append(value)
        norm, expected = torch.tensor([8.0]), [updates, weights, moments, seconds]
        options = *BETAS, 1e-3, 3, 1, decay, averaging, mode
        for noop in (0, 1):
            check(amp_C.multi_tensor_lamb, given[:4], (0.2, *options, norm, 2.0, nvlamb), expected, dtypes, noop=noop)
        step, tensors = torch.tensor([3], dtype=torch.int32), [torch.tensor(0.2), *map(torch.tensor, (0.0, 1.0))]
        options = tensors[0], *BETAS, 1e-3, step, 1, decay, averaging, mode, norm, torch.tensor([2.0]), nvlamb
        check(amp_C.multi_tensor_lamb_mp, given, (*options, *tensors[1:]), [*expected, weights], dtypes)
        check(amp_C.multi_tensor_lamb_mp, given, (*options, *tensors[1:]), [None] * 5, dtypes, noop=1)
        if mode and averaging:
            args = torch.full((len(ratios),), decay), 2, *BETAS, 1e-3, norm, 2.0
            check(amp_C.multi_tensor_lamb_stage1_cuda, given, args, [None, None, moments, seconds, updates], dtypes)
            rounded = [each.to(p.dtype) for each, p in zip(updates, given[1], strict=True)]
            args = *(torch.stack(each).float() for each in zip(*ratios, strict=True)), 0.2, decay, nvlamb
            check(amp_C.multi_tensor_lamb_stage2_cuda, [given[1], rounded], args, [weights, None], dtypes)


def test_further_norms_and_the_scale_with_hysteresis():
    xs = random(torch.float32, torch.float16)
    set_flag = torch.ones(1, dtype=torch.int32)
    _, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [xs], True)
    assert torch.equal(multi_tensor_applier(amp_C.multi_tensor_l2norm_mp, flag(), [xs], True)[1], each)
    assert not multi_tensor_applier(amp_C.multi_tensor_l2norm_mp, set_flag, [xs], True)[1].any()

    scale, growth, left = torch.tensor([8.0]), *(torch.tensor([n], dtype=torch.int32) for n in (1, 2))
    seen = []
    for overflow in (1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0):
        amp_C.update_scale_hysteresis(scale, growth, left, torch.tensor([overflow]), 2.0, 0.5, 2, 2)
        seen.append((scale.item(), growth.item(), left.item()))
    assert seen == [(8, 0, 1), (8, 1, 2), (8, 0, 1), (4, 0, 0), (2, 0, -1), (2, 1, 2), (4, 0, 2)]
    scale, left = torch.tensor([torch.finfo(torch.float32).smallest_normal]), torch.ones(1, dtype=torch.int32)
    assert not amp_C.update_scale_hysteresis(scale, growth, left, torch.ones(1), 2.0, 0.5, 2, 2)  # it is subnormal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_of_large_tensors_are_exact_on_the_cpu(dtype):
    x = torch.rand(2**22 + 5).to(dtype)  # torch's own norm of it is wrong by 7e-5
    (total,), _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(), [[x.view(-1, 7)]])
    assert total.item() == pytest.approx(x.double().norm().item(), rel=1e-6)


def test_optimizers_keep_their_kernels_as_attributes():
    optimizer = FusedAdam([torch.zeros(1, requires_grad=True)])
    assert optimizer.multi_tensor_adam is amp_C.multi_tensor_adam
    assert optimizer._dummy_overflow_buf is optimizer._dummy_overflow_buf
    assert optimizer._dummy_overflow_buf.tolist() == [0]
    assert not hasattr(optimizer, "multi_tensor_x")
    assert copy.deepcopy(optimizer).state_dict() == optimizer.state_dict()
