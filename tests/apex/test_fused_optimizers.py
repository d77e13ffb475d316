"""What all fused optimizers have in common: state, copies, gradients of every kind, amp, GradScaler (contract 5.5)."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.apex import amp
from harness.apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD

HALF = torch.float16
BFLOAT = torch.bfloat16
MAKE = {
    "adam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.1),
    "adam, L2": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.1, adam_w_mode=False),
    "adam, capturable": lambda params: FusedAdam(params, lr=0.01, capturable=True),
    "adam, masters": lambda params: FusedAdam(params, lr=0.01, capturable=True, master_weights=True),
    "sgd": lambda params: FusedSGD(params, lr=0.01, momentum=0.9, weight_decay=0.1),
    "sgd, decay after": lambda params: FusedSGD(params, 0.01, 0.9, weight_decay=0.1, wd_after_momentum=True),
    "lamb": lambda params: FusedLAMB(params, lr=0.01),
    "mixed lamb": lambda params: FusedMixedPrecisionLamb(params, lr=0.01, reduced_precision_dtype=HALF),
    "mixed lamb, sums": lambda params: FusedMixedPrecisionLamb(params, lr=0.01, grad_averaging=False, max_grad_norm=0),
    "novograd": lambda params: FusedNovoGrad(params, lr=0.01, weight_decay=0.1),
    "novograd, inside": lambda params: FusedNovoGrad(params, 0.01, weight_decay=0.1, reg_inside_moment=True),
    "adagrad": lambda params: FusedAdagrad(params, lr=0.01, weight_decay=0.1),
    "adagrad, decoupled": lambda params: FusedAdagrad(params, lr=0.01, weight_decay=0.1, adagrad_w_mode=True),
}
ALL = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
EVERY_POINT = pytest.mark.contract(
    "5.5.FusedAdam",
    "5.5.FusedSGD",
    "5.5.FusedLAMB",
    "5.5.FusedMixedPrecisionLamb",
    "5.5.FusedNovoGrad",
    "5.5.FusedAdagrad",
)
pytestmark = EVERY_POINT


def params_of(*dtypes, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (2, 1, 3), ()]
    return [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for dtype in dtypes
        for shape in shapes
    ]


def give_gradients(params, step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.device, param.dtype)


def train(optimizer, params, steps, start=0):
    for step in range(start, start + steps):
        give_gradients(params, step)
        optimizer.step()


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, dict):
        return [t for key in sorted(value, key=str) for t in tensors_in(value[key])]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_in(item)]
    return [torch.tensor(value)] if isinstance(value, (int, float)) else []


def assert_equal(a, b):
    a, b = tensors_in(a), tensors_in(b)
    assert len(a) == len(b) > 0
    for first, second in zip(a, b, strict=True):
        assert first.dtype is second.dtype
        assert torch.equal(first, second)


def copied(params):
    return [p.detach().clone().requires_grad_() for p in params]


@ALL
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_reduced_precision_is_the_float32_update_rounded(make, dtype):
    params = params_of(dtype)
    wide = [p.detach().float().requires_grad_() for p in params]
    narrow_optimizer, wide_optimizer = make(params), make(wide)
    has_masters = dtype in narrow_optimizer.mastered
    for step in range(4):
        give_gradients(params, step)
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float()
        narrow_optimizer.step()
        wide_optimizer.step()
        for p, w in zip(params, wide, strict=True):
            assert torch.equal(p, w.to(dtype))
            if not has_masters:
                w.data.copy_(p.data)  # what was rounded away is gone
    for state in narrow_optimizer.state.values():
        assert {value.dtype for value in state.values()} == {torch.float32}


@ALL
def test_continues_bit_for_bit_from_disk(make):
    params = params_of(torch.float32, HALF, torch.float64)
    optimizer = make(params)
    train(optimizer, params, 3)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)

    others = copied(params)
    other = make(others)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert_equal(other.state_dict(), optimizer.state_dict())
    for some, their in ((params, optimizer), (others, other)):
        train(their, some, 3, start=3)
    assert_equal(others, params)
    assert_equal(other.state_dict(), optimizer.state_dict())


@ALL
def test_loading_weights_after_the_optimizer_changes_nothing(make):
    params = params_of(HALF)
    optimizer = make(params)
    train(optimizer, params, 2)
    others = params_of(HALF)
    other = make(others)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for mine, theirs in zip(others, params, strict=True):
        mine.data.copy_(theirs)
    for some, their in ((params, optimizer), (others, other)):
        train(their, some, 2, start=2)
    assert_equal(others, params)


@ALL
def test_hooks_see_the_loaded_state_unrounded(make):
    params = params_of(HALF)
    optimizer = make(params)
    train(optimizer, params, 1)
    seen = []
    optimizer.register_load_state_dict_post_hook(
        lambda it: seen.extend(v.dtype for state in it.state.values() for v in state.values())
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert set(seen) == {torch.float32}


@ALL
def test_state_that_was_cast_to_half_is_widened_again(make):
    """As ``amp.initialize`` does at O3 to an optimizer that has stepped before."""
    params = params_of(HALF)
    optimizer = make(params)
    train(optimizer, params, 1)
    for state in optimizer.state.values():
        state.update((key, value.half()) for key, value in state.items())
    train(optimizer, params, 1, start=1)
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {torch.float32}


@ALL
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_are_complete_and_independent(make, duplicate):
    params = params_of(torch.float32, HALF)
    optimizer = make(params)
    optimizer.set_grad_none = not optimizer.set_grad_none
    train(optimizer, params, 2)
    before = copied(params)
    others, other = duplicate((params, optimizer))
    assert {name: getattr(other, name) for name in other.settings} == {
        name: getattr(optimizer, name) for name in other.settings
    }
    train(other, others, 2, start=2)
    assert_equal(params, before)
    train(optimizer, params, 2, start=2)
    assert_equal(others, params)


@ALL
def test_zero_grad_takes_both_spellings(make):
    params = params_of(torch.float32)
    optimizer = make(params)
    give_gradients(params, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in params)
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in params)
    for default in (True, False):
        give_gradients(params, 0)
        optimizer.set_grad_none = default
        optimizer.zero_grad()
        assert all((p.grad is None) is default for p in params)


def test_default_of_zero_grad_is_apexs():
    params = params_of(torch.float32)
    for name, make in MAKE.items():
        assert make(params).set_grad_none is not name.startswith("sgd")
    for made in (FusedAdam(params, set_grad_none=False), FusedSGD(params, 0.1, set_grad_none=True)):
        assert made.set_grad_none is isinstance(made, FusedSGD)


@ALL
def test_a_closure_runs_with_gradients_and_its_loss_is_returned(make):
    params = params_of(torch.float32)
    optimizer = make(params)
    before = copied(params)

    def closure():
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in params)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(sum((p**2).sum().item() for p in before))
    assert all(not torch.equal(p, b) for p, b in zip(params, before, strict=True))


@ALL
def test_groups_have_options_of_their_own(make):
    params = params_of(torch.float32)
    optimizer = make([{"params": params[:2]}, {"params": [], "lr": 3.0}, {"params": [params[2]], "lr": 0.0}])
    fixed, late = params[2].detach().clone(), params[3].detach().clone()
    train(optimizer, params, 1)
    assert torch.equal(params[2], fixed)
    assert torch.equal(params[3], late)
    optimizer.add_param_group({"params": params[3], "lr": 0.02})
    train(optimizer, params, 1, start=1)
    assert torch.equal(params[2], fixed)
    assert not torch.equal(params[3], late)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.01, 3.0, 0.0, 0.02])


@ALL
def test_parameters_without_gradient_stay_and_may_start_late(make):
    params = params_of(torch.float32, HALF)
    optimizer = make(params)
    late = (0, 5)
    before = copied(params)
    for step in range(4):
        give_gradients(params, step)
        if step < 2:
            for i in late:
                params[i].grad = None
        optimizer.step()
        if step == 1:
            assert all(torch.equal(params[i], before[i]) for i in late)
            assert all(params[i] not in optimizer.state for i in late)
            saved = copy.deepcopy(optimizer.state_dict())
            middle = copied(params)
    other = make(middle)
    other.load_state_dict(saved)
    train(other, middle, 2, start=2)
    assert_equal(middle, params)


@ALL
def test_memory_layout_does_not_matter(make):
    """torch's fused kernels read memory in order; parameters, gradients and state may lie in others."""
    plain = [torch.arange(1.0, 25.0).reshape(2, 3, 2, 2).requires_grad_(), torch.ones(3, 4, requires_grad=True)]
    channels_last = plain[0].detach().clone(memory_format=torch.channels_last).requires_grad_()
    gaps = torch.ones(3, 8)[:, ::2].detach().requires_grad_()
    odd = [channels_last, gaps]
    assert [p.is_contiguous() for p in odd] == [False, False]
    first, second = make(plain), make(odd)
    for step in range(3):
        give_gradients(plain, step)
        odd[0].grad, odd[1].grad = plain[0].grad.clone(), plain[1].grad.t().contiguous().t()
        first.step()
        second.step()
        if step == 0:
            odd[0].data = odd[0].data.contiguous()  # model.to(memory_format=...) between steps
    for a, b in zip(plain, odd, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@ALL
def test_empty_parameters_are_left_alone(make):
    params = [torch.zeros(0, 3, requires_grad=True), torch.ones(2, requires_grad=True)]
    optimizer = make(params)
    train(optimizer, params, 2)
    assert params[0] not in optimizer.state
    assert params[1].isfinite().all()


@ALL
def test_zero_gradients_make_finite_steps(make):
    params = [torch.zeros(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    optimizer = make(params)
    for _ in range(2):
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
    assert all(p.isfinite().all() for p in params)


@ALL
def test_what_cannot_be_optimized_is_explained(make):
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = make(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"does not support sparse gradients.*\(4, 2\).*sparse=False"):
        optimizer.step()
    number = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    number.grad = torch.ones_like(number)
    with pytest.raises(TypeError, match=r"complex64 parameter of shape \(2,\)"):
        make([number]).step()


@ALL
def test_schedulers_work(make):
    params = params_of(torch.float32)
    optimizer = make(params)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)
    train(optimizer, params, 1)
    scheduler.step()
    before = copied(params)
    train(optimizer, params, 1)
    assert_equal(params, before)  # lr is 0 now
    assert float(optimizer.param_groups[0]["lr"]) == 0.0


class NoHostSync(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for a value"
        return func(*args, **(kwargs or {}))


@ALL
def test_no_host_sync(make):
    params = params_of(torch.float32, HALF)
    optimizer = make(params)
    for step in range(3):
        give_gradients(params, step)
        with NoHostSync():
            optimizer.step()
            optimizer.zero_grad()


def test_capture_into_a_graph_needs_a_capturable_optimizer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for name, make in MAKE.items():
        params = params_of(torch.float32)
        optimizer = make(params)
        give_gradients(params, 0)
        if optimizer.capturable:
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match="capturable=True"):
                optimizer.step()
        assert optimizer.capturable == (name in ("adam, capturable", "adam, masters") or "mixed" in name)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda p: FusedAdam(p, lr=-1.0), "FusedAdam was given lr=-1.0"),
        (lambda p: FusedAdam(p, lr=math.nan), "lr=nan"),
        (lambda p: FusedAdam(p, betas=(0.9, 1.0)), r"betas=\(0.9, 1.0\)"),
        (lambda p: FusedSGD(p, lr=-1.0), "lr=-1.0"),
        (lambda p: FusedSGD(p, lr=0.1, momentum=-0.5), "momentum=-0.5"),
        (lambda p: FusedSGD(p, lr=0.1, nesterov=True), "nesterov=True with momentum=0.0"),
        (lambda p: FusedSGD(p, lr=0.1, momentum=0.5, dampening=0.5, nesterov=True), "dampening=0.5"),
        (lambda p: FusedSGD(p), "required optimization parameter lr"),
        (lambda p: FusedLAMB(p, eps=-1.0), "eps=-1.0"),
        (lambda p: FusedLAMB(p, max_grad_norm=-1.0), "max_grad_norm=-1.0"),
        (lambda p: FusedMixedPrecisionLamb(p, step=-1), "step=-1"),
        (lambda p: FusedMixedPrecisionLamb(p, reduced_precision_dtype=torch.float32), "torch.bfloat16 and None"),
        (lambda p: FusedNovoGrad(p, weight_decay=-1.0), "weight_decay=-1.0"),
        (lambda p: FusedAdagrad(p, eps=-1.0), "eps=-1.0"),
    ],
)
def test_impossible_options_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        wrong(params_of(torch.float32))


def test_unsupported_variants_are_refused():
    params = params_of(torch.float32)
    for kind in (FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad):
        with pytest.raises(RuntimeError, match=f"{kind.__name__} has no AMSGrad"):
            kind(params, amsgrad=True)
    with pytest.raises(RuntimeError, match="capturable=True"):
        FusedAdam(params, master_weights=True)
    with pytest.raises(RuntimeError, match="norm_type=1"):
        FusedNovoGrad(params, norm_type=1)


# Under amp


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def amp_step(model, optimizer, step, poison=False):
    generator = torch.Generator().manual_seed(step)
    loss = (model(torch.randn(8, 4, generator=generator)).float() - 3.0).pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
        if poison:
            next(p for group in optimizer.param_groups for p in model.parameters()).grad.view(-1)[0] = math.inf
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def start(make, level):
    model = net()
    return amp.initialize(model, make(model.parameters()), opt_level=level, loss_scale="dynamic", verbosity=0)


@ALL
@pytest.mark.contract("1.8", "2.3")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_under_amp_an_overflow_skips_exactly_one_step(make, level):
    model, optimizer = start(make, level)
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    losses = [amp_step(model, optimizer, 0) for _ in range(2)]
    weights, state = tensors_in(list(model.parameters())), tensors_in(optimizer.state_dict())
    amp_step(model, optimizer, 0, poison=True)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 4.0
    assert_equal(list(model.parameters()), weights)
    assert_equal(optimizer.state_dict(), state)
    losses += [amp_step(model, optimizer, 0) for _ in range(4)]
    assert losses[-1] < losses[0]
    kept = {v.dtype for s in optimizer.state.values() for v in s.values()}
    assert kept == {torch.float32}


@ALL
@pytest.mark.parametrize(
    "level", ["O0", "O1", "O2", "O3", "O5", "O0 early", "O1 early", "O2 early", "O3 early", "O5 early"]
)
def test_under_amp_training_resumes_bit_for_bit(make, level):
    """Loaded after ``initialize`` or, as some scripts do, before it."""
    level, _, early = level.partition(" ")
    model, optimizer = start(make, level)
    for step in range(2):
        amp_step(model, optimizer, step)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    expected = [amp_step(model, optimizer, step) for step in (2, 3)]
    final = tensors_in(list(model.parameters()))

    amp.reset()
    model = net()
    optimizer = make(model.parameters())
    if early:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    if not early:
        optimizer.load_state_dict(saved[1])
        model.load_state_dict(saved[0])
    amp.load_state_dict(saved[2])
    assert [amp_step(model, optimizer, step) for step in (2, 3)] == expected
    assert_equal(list(model.parameters()), final)


# Under torch.autocast and GradScaler


@ALL
@pytest.mark.contract("6.2.AdamTest")
@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler_unscales_and_skips(make, unscale_first):
    scaled_params = params_of(torch.float32)
    plain_params = copied(scaled_params)
    scaled_optimizer, plain_optimizer = make(scaled_params), make(plain_params)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    scaler.scale(torch.ones(()))
    for step in range(6):
        give_gradients(scaled_params, step, scale=scaler.get_scale())
        poison = step in (0, 2)
        if poison:
            scaled_params[0].grad[0, 0] = math.nan if step else math.inf
        before, state = copied(scaled_params), tensors_in(scaled_optimizer.state_dict())
        if unscale_first:
            scaler.unscale_(scaled_optimizer)
        scaler.step(scaled_optimizer)
        scaler.update()
        if poison:
            assert_equal(scaled_params, before)
            if step:  # state exists
                assert_equal(scaled_optimizer.state_dict(), state)
        else:
            give_gradients(plain_params, step)
            plain_optimizer.step()
    assert scaler.get_scale() == 2.0
    for a, b in zip(scaled_params, plain_params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert not hasattr(scaled_optimizer, "found_inf")


@pytest.mark.contract("6.2.AdamTest")
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"capturable": True, "master_weights": True}])
def test_a_network_under_autocast_and_grad_scaler_follows_torchs_adam(options, recwarn):
    def run(make):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(30):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.randint(10, (4,)))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [t for p in model.parameters() for t in (p.detach(), p.grad)]

    expected = run(lambda params: torch.optim.Adam(params, lr=1e-3))
    found = run(lambda params: FusedAdam(params, lr=1e-3, adam_w_mode=False, **options))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert not [warning for warning in recwarn if "grad_scaler" in str(warning.message)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@ALL
def test_cuda_equals_cpu_without_host_sync(make):
    on_cpu, on_gpu = params_of(torch.float32, HALF), params_of(torch.float32, HALF, device="cuda")
    first, second = make(on_cpu), make(on_gpu)
    train(first, on_cpu, 3)
    for step in range(3):
        give_gradients(on_gpu, step)
        torch.cuda.set_sync_debug_mode("error")
        try:
            second.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-3 if a.dtype is HALF else 1e-5, atol=1e-5)
    others = copied(on_gpu)
    other = make(others)
    other.load_state_dict(torch.load(_saved(second), map_location="cpu", weights_only=True))
    train(second, on_gpu, 1, start=3)
    train(other, others, 1, start=3)
    assert_equal(others, on_gpu)


def _saved(optimizer):
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return buffer
