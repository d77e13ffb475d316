"""LARC around torch optimizers, plain and under amp (contract 5.4)."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from harness.apex import amp
from harness.apex.parallel import LARC as LARC_MODULE
from harness.apex.parallel.LARC import LARC
from tests.apex.shared import LEVELS, backward, copies, same

pytestmark = pytest.mark.contract("5.4")


def _parameter(values, gradient=None, dtype=torch.float32):
    parameter = nn.Parameter(torch.tensor(values, dtype=dtype))
    parameter.grad = None if gradient is None else torch.tensor(gradient, dtype=dtype)
    return parameter


@pytest.mark.parametrize(("clip", "expected"), [(True, [2.94, 3.92]), (False, [2.994, 3.992])])
def test_values_of_the_contract(clip, expected):
    for lr in (0.1, torch.tensor(0.1)):
        p = _parameter([3.0, 4.0], [0.6, 0.8])
        LARC(SGD([p], lr=lr, weight_decay=0.5), clip=clip).step()
        assert p.tolist() == pytest.approx(expected, abs=1e-6)


def test_arithmetic_is_that_of_apex_to_the_last_bit():
    """Weight decay is multiplied and rounded, then added and rounded."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(64, 64, generator=generator))
    p.grad = torch.randn(64, 64, generator=generator) / 100
    rate = 0.02 * p.detach().norm() / (p.grad.norm() + p.detach().norm() * 0.01 + 1e-8)
    expected = (p.grad + 0.01 * p.detach()) * rate.div(0.1).clamp(max=1.0)
    LARC(SGD([p], lr=0.1, weight_decay=0.01)).step()
    assert torch.equal(p.grad, expected)


def _by_hand(p, g, lr, decay, trust, clip, eps):
    """The rule for one parameter in float64: its scaled gradient."""
    p, g = p.double(), g.double()
    p_norm, g_norm = p.norm().item(), g.norm().item()
    if p_norm == 0 or g_norm == 0:
        return g
    rate = trust * p_norm / (g_norm + decay * p_norm + eps)
    if clip:
        rate = min(rate / lr, 1.0)
    return (g + decay * p) * rate


@pytest.mark.parametrize(("clip", "trust", "eps"), [(True, 0.02, 1e-8), (False, 0.02, 1e-8), (False, 0.5, 0.3)])
def test_arithmetic_of_every_parameter(clip, trust, eps):
    """Mixed shapes and dtypes; zero weights and zero gradients are left alone; groups have their own settings."""
    generator = torch.Generator().manual_seed(0)

    def make(shape, dtype=torch.float32, scale=1.0):
        p = nn.Parameter((torch.randn(shape, generator=generator) * scale).to(dtype))
        p.grad = torch.randn(shape, generator=generator).to(dtype)
        return p

    first = [make((3, 4)), make((5,), torch.float64), make(()), make((0,)), make((4,), scale=0.0)]
    first += [make((6,), scale=9.0)]
    second = [make((2, 2, 2)), make((7,), torch.float16), make((7,), torch.bfloat16)]
    first[0].grad.zero_()
    unused = nn.Parameter(torch.ones(2))
    groups = [{"params": [*first, unused], "lr": 0.1, "weight_decay": 0.25}, {"params": second, "lr": 0.01}]
    larc = LARC(SGD(groups, lr=1.0), trust_coefficient=trust, clip=clip, eps=eps)
    expected = [
        (p, _by_hand(p.detach(), p.grad, group["lr"], group["weight_decay"], trust, clip, eps), p.detach().clone())
        for group in larc.param_groups
        for p in group["params"]
        if p.grad is not None
    ]
    larc.step()
    for p, gradient, before in expected:
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(p.dtype, 1e-6)
        close = {"rtol": tolerance, "atol": tolerance * 1e-2}
        torch.testing.assert_close(p.grad.double(), gradient, **close)
        lr = 0.1 if any(p is q for q in first) else 0.01
        torch.testing.assert_close(p.detach().double(), before.double() - lr * gradient, **close)
    assert torch.equal(first[0].detach(), expected[0][2]), "no weight decay where the gradient is zero"
    assert unused.grad is None
    assert unused.tolist() == [1.0, 1.0]


def test_half_precision_norms_do_not_overflow():
    p = _parameter([3.0e4] * 16, [1.0e4] * 16, torch.float16)  # norms of 120000 and 40000
    LARC(SGD([p], lr=1.0), trust_coefficient=1e-3, clip=False).step()
    assert p.grad.tolist() == pytest.approx([30.0] * 16, rel=1e-3)


def test_zero_learning_rate():
    p = _parameter([3.0, 4.0], [0.6, 0.8])
    LARC(SGD([p], lr=0.0, weight_decay=0.5)).step()
    assert p.tolist() == [3.0, 4.0]
    assert p.grad.tolist() == pytest.approx([2.1, 2.8]), "clipped to 1, not nan"


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    larc = LARC(SGD(table.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="sparse=False"):
        larc.step()


@pytest.mark.contract("1.1")
def test_module_can_be_used_as_the_class():
    from harness.apex import parallel

    assert parallel.LARC is LARC_MODULE
    assert LARC_MODULE.LARC is LARC
    larc = LARC_MODULE(SGD([_parameter([1.0])], lr=0.1), trust_coefficient=0.5)
    assert type(larc) is LARC
    assert larc.trust_coefficient == 0.5
    assert isinstance(larc, LARC_MODULE)
    assert not isinstance(larc.optim, LARC_MODULE)

    class Mine(LARC_MODULE):
        pass

    assert issubclass(Mine, LARC)
    assert issubclass(Mine, LARC_MODULE)
    assert isinstance(Mine(SGD([_parameter([1.0])], lr=0.1)), LARC_MODULE)
    with pytest.raises(TypeError, match="got an object of type list"):
        LARC_MODULE([_parameter([1.0])])


def test_it_is_an_optimizer_with_everything_of_the_wrapped_one():
    p, q = _parameter([3.0, 4.0], [0.6, 0.8]), _parameter([1.0], [1.0])
    inner = SGD([p], lr=0.1, momentum=0.9, weight_decay=0.5)
    larc = LARC(inner)
    assert isinstance(larc, Optimizer)
    assert larc.optim is inner
    assert larc.defaults is inner.defaults
    larc.add_param_group({"params": [q], "lr": 0.2})
    assert larc.param_groups is inner.param_groups
    assert len(inner.param_groups) == 2
    larc.step()
    assert larc.state is inner.state
    assert set(inner.state) == {p, q}
    larc.zero_grad(set_to_none=False)
    assert p.grad.tolist() == [0.0, 0.0]
    larc.zero_grad()
    assert p.grad is None
    larc.param_groups = larc.param_groups[:1]
    assert len(inner.param_groups) == 1
    assert "LARC" in repr(larc)
    assert "momentum: 0.9" in repr(larc)
    with pytest.raises(AttributeError, match="no_such_thing"):
        larc.no_such_thing  # noqa: B018


def test_schedulers_and_hooks_work():
    calls = []
    for wrap in (lambda larc: larc, lambda larc: larc.optim):
        calls.clear()
        p = _parameter([3.0, 4.0], [0.6, 0.8])
        larc = LARC(SGD([p], lr=0.1, weight_decay=0.5), clip=False)
        scheduler = StepLR(wrap(larc), 1, gamma=0.5)
        larc.register_step_pre_hook(lambda *_: calls.append("before"))
        larc.register_step_post_hook(lambda *_: calls.append("after"))
        larc.step()
        scheduler.step()
        assert p.tolist() == pytest.approx([2.994, 3.992], abs=1e-6)
        assert larc.param_groups[0]["lr"] == 0.05
        assert calls == ["before", "after"]
    ReduceLROnPlateau(larc, patience=0).step(1.0)
    LambdaLR(larc, lambda epoch: 0.1)


def test_closures_are_scaled_at_each_call():
    p = _parameter([3.0, 4.0])
    larc = LARC(SGD([p], lr=0.1, weight_decay=0.5), clip=False)
    calls = []

    def closure():
        calls.append(larc.param_groups[0]["weight_decay"])
        larc.zero_grad()
        loss = (p * torch.tensor([0.6, 0.8])).sum()
        loss.backward()
        return loss

    assert larc.step(closure).item() == pytest.approx(5.0)
    assert len(calls) == 1
    assert p.tolist() == pytest.approx([2.994, 3.992], abs=1e-6)
    q = _parameter([3.0, 4.0])
    lbfgs = LARC(torch.optim.LBFGS([q], lr=0.1, max_iter=3), clip=False)  # has no weight decay, calls repeatedly
    evaluations = []

    def quadratic():
        lbfgs.zero_grad()
        loss = q.pow(2).sum()
        loss.backward()
        evaluations.append(loss.item())
        return loss

    lbfgs.step(quadratic)
    assert len(evaluations) > 1
    assert evaluations[-1] < evaluations[0]
    assert "weight_decay" not in lbfgs.param_groups[0]


def test_weight_decay_is_restored_when_step_raises():
    p = _parameter([3.0, 4.0], [0.6, 0.8])
    inner = SGD([{"params": [p]}, {"params": [_parameter([1.0])], "weight_decay": 0.125}], lr=0.1, weight_decay=0.5)
    larc = LARC(inner)

    def fails(*_):
        assert [group["weight_decay"] for group in inner.param_groups] == [0.0, 0.0]
        raise ZeroDivisionError

    inner.register_step_pre_hook(fails)
    with pytest.raises(ZeroDivisionError):
        larc.step()
    assert [group["weight_decay"] for group in inner.param_groups] == [0.5, 0.125]


def test_state_dicts_interchange_with_the_wrapped_optimizer():
    p, q = _parameter([3.0, 4.0], [0.6, 0.8]), _parameter([3.0, 4.0], [0.6, 0.8])
    larc, plain = LARC(Adam([p], lr=0.1)), Adam([q], lr=0.1)
    larc.step()
    saved = larc.state_dict()
    assert list(saved) == ["state", "param_groups"]
    assert saved["param_groups"] == larc.optim.state_dict()["param_groups"]
    plain.load_state_dict(saved)
    assert torch.equal(plain.state[q]["exp_avg"], larc.state[p]["exp_avg"])
    other = LARC(Adam([_parameter([0.0, 0.0])], lr=9.0))
    other.load_state_dict(plain.state_dict())
    assert other.param_groups[0]["lr"] == 0.1
    assert torch.equal(next(iter(other.state.values()))["exp_avg"], larc.state[p]["exp_avg"])
    seen = []
    other.register_state_dict_post_hook(lambda _, saved: {**saved, "mine": 1})
    other.register_load_state_dict_pre_hook(lambda _, saved: seen.append(saved["mine"]))
    other.load_state_dict(other.state_dict())
    assert seen == [1]


def test_copies_and_pickles_train_on():
    p = _parameter([3.0, 4.0], [0.6, 0.8])
    larc = LARC(SGD([p], lr=0.1, momentum=0.9, weight_decay=0.5), trust_coefficient=0.5, clip=False, eps=1e-3)
    larc.step()
    assert not hasattr(LARC.__new__(LARC), "lr")  # as copies are made; it has no optimizer yet
    for twin in (copy.deepcopy(larc), pickle.loads(pickle.dumps(larc))):
        assert type(twin) is LARC
        assert (twin.trust_coefficient, twin.clip, twin.eps) == (0.5, False, 1e-3)
        (mine,) = twin.param_groups[0]["params"]
        assert mine is not p
        assert twin.param_groups[0] is twin.optim.param_groups[0]
        mine.grad = torch.tensor([0.6, 0.8])
        twin.step()
        assert mine.tolist() != p.tolist()
        StepLR(twin, 1)


def test_grad_scaler_unscales_before_norms_are_taken():
    """Also around an optimizer that could unscale by itself, such as fused Adam."""
    p = _parameter([3.0, 4.0])
    larc = LARC(Adam([p], lr=0.01, fused=True))  # a rate of 10 times lr is clipped; with the scale it would not be
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((p * torch.tensor([0.6, 0.8])).sum()).backward()
    scaler.step(larc)
    assert p.grad.tolist() == pytest.approx([0.6, 0.8])


# Under amp.


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def _train(level, wrap, steps=3, overflow_at=None, scale=8.0, given="larc"):
    """Return masters and amp state. ``wrap``: 'before' or 'after' initialize, or 'list'; ``given``: to scale_loss."""
    amp.reset()
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    if wrap == "after":
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=scale)
        larc = LARC(optimizer)
    else:
        larc = LARC(optimizer)
        optimizers = [larc] if wrap == "list" else larc
        model, returned = amp.initialize(model, optimizers, opt_level=level, verbosity=0, loss_scale=scale)
        assert returned is optimizers
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(8, 4, generator=generator)
        loss = model(x).float().pow(2).mean()
        if step == overflow_at:
            loss = loss * float("inf")
        target = [larc] if wrap == "list" else larc.optim if given == "inner" else larc
        backward(loss, target)
        larc.step()
        assert larc.param_groups[0]["weight_decay"] == 0.1
        larc.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    masters = copies(amp.master_params(larc))
    assert same([m.to(p.dtype) for m, p in zip(masters, model.parameters(), strict=True)], model.parameters())
    return masters, amp.state_dict()


@pytest.mark.contract("6.1.test_larc", "1.8")
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_trains_like_float32(level):
    amp.reset()
    model = _model()
    larc = LARC(SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        model(torch.randn(8, 4, generator=generator)).pow(2).mean().backward()
        larc.step()
        larc.zero_grad()
    reference = [p.detach() for p in model.parameters()]
    found, _ = _train(level, "before")
    expected_dtype = {"O3": torch.float16}.get(level, torch.float32)
    tolerance = {"O0": 1e-6, "O4": 3e-2, "O5": 3e-2}.get(level, 4e-3)
    for a, b in zip(found, reference, strict=True):
        assert a.dtype is expected_dtype
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance)
    for wrap, given in (("list", "larc"), ("after", "larc"), ("after", "inner")):
        assert same(found, _train(level, wrap, given=given)[0]), (wrap, given)


@pytest.mark.contract("2.3")
@pytest.mark.parametrize(("level", "wrap"), [*((level, "before") for level in LEVELS), ("O2", "list"), ("O2", "after")])
def test_overflow_skips_exactly_one_step(level, wrap):
    found, state = _train(level, wrap, steps=3, overflow_at=2, scale="dynamic")
    two_steps, _ = _train(level, wrap, steps=2, scale="dynamic")
    assert all(torch.isfinite(a).all() for a in found)
    assert same(found, two_steps)
    assert state["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 0}
    first, _ = _train(level, wrap, steps=2, overflow_at=0, scale="dynamic")
    assert not torch.equal(first[0], _train(level, wrap, steps=0, scale="dynamic")[0][0]), "the next step is taken"
