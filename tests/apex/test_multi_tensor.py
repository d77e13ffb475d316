"""``multi_tensor_applier`` and the operations of ``amp_C`` (contract 1.1, 6.1)."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch

from harness.apex import amp_C
from harness.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from harness.apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

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


# The optimizers' updates, each against a step of the optimizer, which test_fused_updates compares with its formula

KINDS = [[torch.float32], [torch.float16], [torch.bfloat16, torch.float32, torch.float64]]
LR, DECAY, EPS, BETAS = 0.25, 0.125, 1e-3, (0.9, 0.99)  # the first two are the same numbers in every dtype


def lists(number, dtypes):
    """``number`` lists of tensors, mixed in dtype and layout; the fourth, second moments, is positive."""
    torch.manual_seed(0)
    made = [random(*dtypes) + [torch.randn(4, 6).t().to(dtypes[0])] for _ in range(number)]
    return [*made[:3], *([each.abs() for each in made[3]] for _ in range(number > 3)), *made[4:]]


def halves(tensors):
    return [each / 2 for each in tensors]


def stepped(kind, given, names, running=None, **options):
    """Weights and the state under ``names`` after the third step of ``kind`` on ``[gradients, weights, *state]``."""
    grads, weights, *state = given
    params = [each.clone().requires_grad_() for each in weights]
    optimizer = kind(params, lr=LR, **options)
    for i, param in enumerate(params):
        param.grad = grads[i]
        optimizer.state[param].update({name: values[i].clone() for name, values in zip(names, state, strict=False)})
    (group,) = optimizer.param_groups
    group["step"] = 2
    if running is not None:  # NovoGrad keeps those of reduced precision apart
        reduced = sum(p.dtype.itemsize == 2 for p in params)
        group["exp_avg_sq"] = list(running.split([reduced, len(params) - reduced]))
    optimizer.step()
    if running is not None:
        running.copy_(torch.cat(group["exp_avg_sq"]))
    return [[p.detach() for p in params], *([optimizer.state[p].get(name) for p in params] for name in names)]


def check(op, given, args, expected, noop=0):
    """Call ``op`` on copies of ``given``. ``expected`` has one entry for each list: its new values, or None."""
    copies, buffer = [[each.clone() for each in tensors] for tensors in given], torch.tensor([noop])
    assert multi_tensor_applier(op, buffer, copies, *args) is None
    for before, after, wanted in zip(given, copies, expected, strict=True):
        for old, new, value in zip(before, after, wanted or before, strict=True):
            assert torch.equal(new, old if value is None else value.to(new.dtype))
            assert (old.dtype, old.stride()) == (new.dtype, new.stride())


@pytest.mark.parametrize("dtypes", KINDS)
def test_sgd(dtypes):
    given = lists(4, dtypes)
    for nesterov, first, after, momentum in itertools.product((False, True), (False, True), (False, True), (0.0, 0.5)):
        if nesterov and not momentum:
            continue
        dampening = 0.25 if momentum and not nesterov else 0.0
        options = dict(momentum=momentum, dampening=dampening, nesterov=nesterov, wd_after_momentum=after)
        before = [halves(given[0]), given[1], *([] if first else [given[2]])]
        names = ["momentum_buffer"] if momentum else []
        weights, *moments = stepped(FusedSGD, before, names, weight_decay=DECAY, **options)
        expected = [None, weights, *(moments or [None])]
        args = DECAY, momentum, dampening, LR, nesterov, first, after, 0.5
        check(amp_C.multi_tensor_sgd, given[:3], args, expected)
        check(amp_C.multi_tensor_sgd, given, args, [*expected, weights])
        check(amp_C.multi_tensor_sgd, given, args, [None] * 4, noop=1)


@pytest.mark.parametrize("dtypes", KINDS)
def test_adam_plain_and_capturable_with_masters(dtypes):
    given = lists(5, dtypes)
    names, smaller = ["exp_avg", "exp_avg_sq"], [halves(given[0]), *given[1:]]
    for mode, correct in itertools.product((0, 1), (0, 1)):
        options = dict(betas=BETAS, eps=EPS, adam_w_mode=bool(mode), bias_correction=bool(correct), weight_decay=DECAY)
        expected = [None, *stepped(FusedAdam, given[:4], names, **options)]
        for noop in (0, 1):  # the plain kernel does not skip
            args = LR, *BETAS, EPS, 3, mode, correct, DECAY
            check(amp_C.multi_tensor_adam, given[:4], args, expected, noop=noop)

        step, inv_scale = torch.tensor([3], dtype=torch.int32), torch.tensor([0.5])
        args = torch.tensor(LR), *BETAS, EPS, step, mode, correct, DECAY, inv_scale
        expected = [smaller[0], *stepped(FusedAdam, smaller[:4], names, **options)]
        check(amp_C.multi_tensor_adam_capturable, given[:4], args, expected)
        check(amp_C.multi_tensor_adam_capturable, given[:4], args, [None] * 4, noop=1)

        masters, *moments = stepped(FusedAdam, [smaller[0], given[4], *given[2:4]], names, **options)
        check(amp_C.multi_tensor_adam_capturable_master, given, args, [smaller[0], masters, *moments, masters])
        check(amp_C.multi_tensor_adam_capturable_master, given, args, [None] * 5, noop=1)


@pytest.mark.parametrize("dtypes", KINDS)
def test_adagrad_and_novograd(dtypes):
    given = lists(4, dtypes)
    for mode in (0, 1):
        lists_of = [*given[:2], given[3]]
        expected = stepped(FusedAdagrad, lists_of, ["sum"], eps=EPS, weight_decay=DECAY, adagrad_w_mode=bool(mode))
        check(amp_C.multi_tensor_adagrad, lists_of, (LR, EPS, mode, DECAY), [None, *expected])

    given = [[each for each in tensors if each.numel()] for tensors in lists(3, dtypes)]
    given = [sorted(each, key=lambda t: t.dtype.itemsize) for each in given]  # reduced precision first, as NovoGrad
    for mode, norm_type, averaging in itertools.product((0, 1), (0, 2), (0, 1)):
        running = torch.rand(len(given[0]))
        own = running.clone()
        options = dict(betas=BETAS, eps=EPS, weight_decay=DECAY, norm_type=norm_type, grad_averaging=bool(averaging))
        expected = stepped(FusedNovoGrad, given, ["exp_avg"], own, reg_inside_moment=mode == 0, **options)
        args = running, LR, *BETAS, EPS, 3, 1, DECAY, averaging, mode, norm_type
        check(amp_C.multi_tensor_novograd, given, args, [None, *expected])
        assert torch.equal(running, own)


@pytest.mark.parametrize("dtypes", KINDS)
def test_lamb_in_one_or_two_stages(dtypes):
    given = lists(5, dtypes)
    smaller = [halves(halves(given[0])), *given[1:4]]
    norm, names = torch.tensor([8.0]), ["exp_avg", "exp_avg_sq"]
    ratios_of = (0.0, False), (0.0, True), (DECAY, False)
    for mode, averaging, (decay, nvlamb) in itertools.product((0, 1), (0, 1), ratios_of):
        options = dict(betas=BETAS, eps=EPS, weight_decay=decay, grad_averaging=bool(averaging), use_nvlamb=nvlamb)
        weights, *moments = stepped(FusedLAMB, smaller, names, adam_w_mode=bool(mode), max_grad_norm=None, **options)
        updates = [each.clone() for each in given[0]]
        args = 3, 1, decay, averaging, mode, norm, 2.0, nvlamb
        copies = [[each.clone() for each in tensors] for tensors in given[1:4]]
        amp_C.multi_tensor_lamb(0, flag(), [updates, *copies], LR, *BETAS, EPS, *args)
        expected = [updates, weights, *moments]
        for noop in (0, 1):
            check(amp_C.multi_tensor_lamb, given[:4], (LR, *BETAS, EPS, *args), expected, noop=noop)
        step, ignored, one = torch.tensor([3], dtype=torch.int32), torch.tensor(0.0), torch.tensor(1.0)
        args = torch.tensor(LR), *BETAS, EPS, step, *args[1:-2], torch.tensor([2.0]), nvlamb, ignored, one
        check(amp_C.multi_tensor_lamb_mp, given, args, [*expected, weights])
        check(amp_C.multi_tensor_lamb_mp, given, args, [None] * 5, noop=1)
        if mode and averaging:
            args = torch.full((len(updates),), decay), 2, *BETAS, EPS, norm, 2.0
            check(amp_C.multi_tensor_lamb_stage1_cuda, given, args, [None, None, *moments, updates])
        norms = (torch.stack([each.double().norm() for each in one]).float() for one in (given[1], updates))
        after = [[each.clone() for each in given[1]], updates]
        amp_C.multi_tensor_lamb_stage2_cuda(0, flag(), after, *norms, LR, decay, nvlamb)
        for new, value in zip(after[0], weights, strict=True):  # from updates that are rounded
            tolerance = {torch.float64: 1e-6, torch.float32: 1e-5}.get(new.dtype, 2e-2)
            torch.testing.assert_close(new, value, rtol=tolerance, atol=tolerance)


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
