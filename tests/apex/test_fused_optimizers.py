"""Behaviour that all fused optimizers share: state, copies, all kinds of gradients, amp, GradScaler (contract 5.5)."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

from harness.apex import amp, amp_C
from harness.apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD
from harness.apex.optimizers.step_count import step_for_kernel
from tests.apex.optimizer_cases import (
    BFLOAT,
    CASES,
    HALF,
    assert_close,
    assert_equal,
    assert_same_training,
    copied,
    every_case,
    give_gradients,
    params_of,
    tensors_in,
    train,
)
from tests.apex.shared import floating_dtypes, through_a_file

pytestmark = pytest.mark.contract(
    "5.5.FusedAdam",
    "5.5.FusedSGD",
    "5.5.FusedLAMB",
    "5.5.FusedMixedPrecisionLamb",
    "5.5.FusedNovoGrad",
    "5.5.FusedAdagrad",
)


@every_case
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
                w.data.copy_(p.data)  # the bits that were rounded off are lost
    assert floating_dtypes(narrow_optimizer.state) == {torch.float32}


@every_case
def test_resumes_bit_for_bit_from_disk(make):
    params = params_of(torch.float32, HALF, torch.float64)
    optimizer = make(params)
    train(optimizer, params, 3)
    others = copied(params)
    other = make(others)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_equal(other.state_dict(), optimizer.state_dict())
    assert_same_training([(params, optimizer), (others, other)], 3, start=3)
    assert_equal(other.state_dict(), optimizer.state_dict())


@every_case
def test_hooks_see_the_loaded_state_unrounded(make):
    params = params_of(HALF)
    optimizer = make(params)
    train(optimizer, params, 1)
    seen = set()
    optimizer.register_load_state_dict_post_hook(lambda loaded: seen.update(floating_dtypes(loaded.state)))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == {torch.float32}


@every_case
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_are_complete_and_independent(make, duplicate):
    params = params_of(torch.float32, HALF)
    optimizer = make(params)
    optimizer.set_grad_none = not optimizer.set_grad_none
    train(optimizer, params, 2)
    before = copied(params)
    others, other = duplicate((params, optimizer))
    for name in other.settings:
        assert getattr(other, name) == getattr(optimizer, name), name
    train(other, others, 2, start=2)
    assert_equal(params, before)
    train(optimizer, params, 2, start=2)
    assert_equal(others, params)


@every_case
def test_zero_grad_takes_both_spellings(make):
    params = params_of(torch.float32)
    optimizer = make(params)
    assert optimizer.set_grad_none is not isinstance(optimizer, FusedSGD), "Apex's defaults"
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


@every_case
def test_closure_runs_with_gradients_and_its_loss_is_returned(make):
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


@every_case
def test_groups_have_their_own_options(make):
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


@every_case
def test_parameters_without_gradient_do_not_change_and_may_start_late(make):
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
            state = copy.deepcopy(optimizer.state_dict())
            middle = copied(params)
    other = make(middle)
    other.load_state_dict(state)
    train(other, middle, 2, start=2)
    assert_equal(middle, params)


@every_case
def test_memory_layout_does_not_matter(make):
    """torch's fused kernels read memory in order, whatever the strides of parameters, gradients and state."""
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


@every_case
def test_zero_gradients_and_empty_parameters(make):
    params = [torch.zeros(3, requires_grad=True), torch.ones(2, requires_grad=True), torch.zeros(0, 3)]
    params[2].requires_grad_()
    optimizer = make(params)
    for _ in range(2):
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
    assert all(p.isfinite().all() for p in params)
    assert params[2] not in optimizer.state


@every_case
def test_unsupported_gradients_and_parameters_are_explained(make):
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = make(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"does not support sparse gradients.*\(4, 2\).*sparse=False"):
        optimizer.step()
    number = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    number.grad = torch.ones_like(number)
    with pytest.raises(TypeError, match=r"complex64 parameter of shape \(2,\)"):
        make([number]).step()


@pytest.mark.parametrize("case", CASES)
def test_only_a_capturable_optimizer_may_be_captured_into_a_graph(case, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    params = params_of(torch.float32)
    optimizer = CASES[case](params)
    if case in ("adam, capturable", "adam, masters") or "mixed" in case:
        train(optimizer, params, 1)
    else:
        with pytest.raises(RuntimeError, match="capturable=True"):
            optimizer.step()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p: FusedAdam(p, lr=-1.0), ValueError, "FusedAdam was given lr=-1.0"),
        (lambda p: FusedAdam(p, lr=math.nan), ValueError, "lr=nan"),
        (lambda p: FusedAdam(p, betas=(0.9, 1.0)), ValueError, r"betas=\(0.9, 1.0\)"),
        (lambda p: FusedAdam(p, master_weights=True), RuntimeError, "capturable=True"),
        (lambda p: FusedSGD(p, lr=-1.0), ValueError, "lr=-1.0"),
        (lambda p: FusedSGD(p, lr=0.1, momentum=-0.5), ValueError, "momentum=-0.5"),
        (lambda p: FusedSGD(p, lr=0.1, nesterov=True), ValueError, "nesterov=True with momentum=0.0"),
        (lambda p: FusedSGD(p, lr=0.1, momentum=0.5, dampening=0.5, nesterov=True), ValueError, "dampening=0.5"),
        (lambda p: FusedSGD(p), ValueError, "required optimization parameter lr"),
        (lambda p: FusedLAMB(p, eps=-1.0), ValueError, "eps=-1.0"),
        (lambda p: FusedLAMB(p, max_grad_norm=-1.0), ValueError, "max_grad_norm=-1.0"),
        (lambda p: FusedMixedPrecisionLamb(p, step=-1), ValueError, "step=-1"),
        (lambda p: FusedMixedPrecisionLamb(p, reduced_precision_dtype=torch.float32), ValueError, "bfloat16 or None"),
        (lambda p: FusedNovoGrad(p, weight_decay=-1.0), ValueError, "weight_decay=-1.0"),
        (lambda p: FusedNovoGrad(p, norm_type=1), RuntimeError, "norm_type=1"),
        (lambda p: FusedAdagrad(p, eps=-1.0), ValueError, "eps=-1.0"),
        (lambda p: FusedAdam(p, amsgrad=True), RuntimeError, "FusedAdam has no AMSGrad"),
        (lambda p: FusedLAMB(p, amsgrad=True), RuntimeError, "FusedLAMB has no AMSGrad"),
        (lambda p: FusedMixedPrecisionLamb(p, amsgrad=True), RuntimeError, "Lamb has no AMSGrad"),
        (lambda p: FusedNovoGrad(p, amsgrad=True), RuntimeError, "FusedNovoGrad has no AMSGrad"),
    ],
)
def test_invalid_options_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make(params_of(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_adam_clips_large_and_scaled_gradients(dtype, scale):
    """The norm of 16 gradients of 60,000 is beyond float16. ``scale``: as a GradScaler gives it to the step."""
    if dtype is torch.float16 and scale is not None:
        gradient = 58.0  # scaled: 59,392
    else:
        gradient = 60_000.0
    weight = nn.Parameter(torch.zeros(16, dtype=dtype))
    optimizer = FusedAdam([weight], lr=0.1, capturable=scale is not None, max_grad_norm=0.5)
    weight.grad = torch.full_like(weight, gradient * (scale or 1.0))
    if scale is not None:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
    optimizer.step()
    expected = torch.full((16,), 0.1 * 0.5 / 4)  # of exp_avg, clipped to a norm of 0.5
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], expected, rtol=1e-3, atol=0.0)
    torch.testing.assert_close(weight.detach().float(), torch.full((16,), -0.1), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("off", [0.0, None])
def test_adam_does_not_clip_a_group_whose_norm_is_zero_or_none(off):
    clipped, free = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = FusedAdam([{"params": [clipped]}, {"params": [free], "max_grad_norm": off}], max_grad_norm=1.0)
    loaded = FusedAdam([nn.Parameter(torch.zeros(2))], max_grad_norm=1.0)
    state = loaded.state_dict()
    state["param_groups"][0]["max_grad_norm"] = off
    loaded.load_state_dict(state)
    for each in (optimizer, loaded):
        for group in each.param_groups:
            group["params"][0].grad = torch.full((2,), 3.0)
        each.step()
    assert torch.linalg.vector_norm(clipped.grad).item() == pytest.approx(1.0)
    assert free.grad.tolist() == loaded.param_groups[0]["params"][0].grad.tolist() == [3.0, 3.0]
    assert (optimizer.state_key_for_device_skip, loaded.state_key_for_device_skip) == (None, "exp_avg")


def test_lamb_steps_where_all_gradients_are_empty():
    weight = nn.Parameter(torch.zeros(0, 3))
    optimizer = FusedLAMB([weight])
    weight.grad = torch.zeros(0, 3)
    optimizer.step()
    assert weight.shape == (0, 3)


# Under amp


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def amp_step(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    loss = (model(torch.randn(8, 4, generator=generator)).float() - 3.0).pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def initialized(model, optimizer, level):
    return amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)


@every_case
@pytest.mark.parametrize(("level", "load_first"), [("O0", False), ("O2", False), ("O2", True), ("O3", True)])
def test_training_under_amp_resumes_bit_for_bit(make, level, load_first):
    model = network()
    model, optimizer = initialized(model, make(model.parameters()), level)
    for step in range(2):
        amp_step(model, optimizer, step)
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    expected = [amp_step(model, optimizer, step) for step in (2, 3)]
    final = tensors_in(list(model.parameters()))

    amp.reset()
    model = network()
    optimizer = make(model.parameters())
    if load_first:
        model.load_state_dict(checkpoint[0])
        optimizer.load_state_dict(checkpoint[1])
    model, optimizer = initialized(model, optimizer, level)
    if not load_first:
        optimizer.load_state_dict(checkpoint[1])
        model.load_state_dict(checkpoint[0])
    amp.load_state_dict(checkpoint[2])
    assert [amp_step(model, optimizer, step) for step in (2, 3)] == expected
    assert_equal(list(model.parameters()), final)


# Under torch.autocast and GradScaler


@every_case
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
        overflow = step in (0, 2)
        if overflow:
            scaled_params[0].grad[0, 0] = math.nan if step else math.inf
        before, state = copied(scaled_params), tensors_in(scaled_optimizer.state_dict())
        if unscale_first:
            scaler.unscale_(scaled_optimizer)
        scaler.step(scaled_optimizer)
        scaler.update()
        if overflow:
            assert_equal(scaled_params, before)
            if step:  # state exists
                assert_equal(scaled_optimizer.state_dict(), state)
        else:
            give_gradients(plain_params, step)
            plain_optimizer.step()
    assert scaler.get_scale() == 2.0
    assert_close(scaled_params, plain_params, 1e-6)
    assert scaled_optimizer.found_inf is None


@pytest.mark.contract("6.2.AdamTest")
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"capturable": True, "master_weights": True}])
def test_network_under_autocast_and_grad_scaler_follows_torchs_adam(options, recwarn):
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
    assert_close(found, expected, 1e-5)
    assert not [warning for warning in recwarn if "grad_scaler" in str(warning.message)]


@pytest.mark.host  # torch cannot unscale bfloat16 gradients on CUDA
@pytest.mark.contract("6.2.AdamTest")
@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.bfloat16])
def test_grad_scaler_leaves_unscaled_gradients(dtype):
    params = [torch.ones(3, dtype=dtype, requires_grad=True)]
    optimizer = FusedAdam(params, capturable=True, master_weights=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(params[0].float().sum()).backward()
    scaler.step(optimizer)
    assert params[0].grad.tolist() == [1.0] * 3


@pytest.mark.contract("5.5.FusedMixedPrecisionLamb")
def test_reduced_precision_dtype_may_be_set_after_construction():
    optimizer = FusedMixedPrecisionLamb([param := torch.ones(3, dtype=HALF, requires_grad=True)])
    optimizer.reduced_precision_dtype = HALF
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state[param]["master_param"].dtype is torch.float32


@pytest.mark.gpu
@pytest.mark.host  # both
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_case
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
    file = io.BytesIO()
    torch.save(second.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, map_location="cpu"))
    assert_same_training([(on_gpu, second), (others, other)], 1, start=3)


def test_kernels_are_given_float32_under_another_default_dtype():
    """CUDA's read float32 from tensors of any dtype; those that unscale refuse others."""
    torch.set_default_dtype(torch.float64)
    try:
        params = params_of(torch.float32)
        cpu, optimizer = torch.device("cpu"), FusedAdam(params)
        for corrected, expected in ((True, 3.0), (False, math.inf)):
            step = step_for_kernel({"step": 3, "bias_correction": corrected}, cpu)
            assert (step.dtype, step.item()) == (torch.float32, expected)
        amp.initialize(nn.Linear(1, 1).float(), optimizer, opt_level="O1", verbosity=0)
        with amp.scale_loss(sum(p.sum() for p in params), optimizer) as loss:
            loss.backward()
        assert all((p.grad == 1).all() for p in params)
        flag = torch.zeros(1, dtype=torch.int32)
        amp_C.multi_tensor_scale(1, flag, [params, copied(params)], 2.0)
        assert amp_C.multi_tensor_l2norm(1, flag, [[]], True)[1].dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
