"""Update rule, state and arguments of each fused optimizer, against torch or a plain reference (contract 5.5, 6.2)."""

from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD
from tests.apex.optimizer_cases import (
    BFLOAT,
    HALF,
    assert_close,
    assert_equal,
    copied,
    give_gradients,
    params_of,
    train,
)

both_lambs = pytest.mark.parametrize("kind", [FusedLAMB, FusedMixedPrecisionLamb])
# (fused, torch's class, options of both, options of the fused one, options of torch's)
AS_TORCH = [
    (FusedAdam, torch.optim.AdamW, {}, {}, {"weight_decay": 0.0}),
    (FusedAdam, torch.optim.AdamW, {"lr": 0.02, "betas": (0.6, 0.9), "eps": 1e-3, "weight_decay": 0.3}, {}, {}),
    (FusedAdam, torch.optim.Adam, {"lr": 0.02, "weight_decay": 0.3}, {"adam_w_mode": False}, {}),
    (FusedAdam, torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.3}, {"capturable": True}, {}),
    (FusedAdam, torch.optim.AdamW, {"betas": (0.0, 0.0)}, {}, {"weight_decay": 0.0}),
    (FusedSGD, torch.optim.SGD, {"lr": 0.1}, {}, {}),
    (FusedSGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.3}, {}, {}),
    (FusedSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}, {}, {}),
    (FusedSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, {}, {}),
    (FusedSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.3}, {}, {}),
    (FusedAdagrad, torch.optim.Adagrad, {}, {}, {}),
    (FusedAdagrad, torch.optim.Adagrad, {"lr": 0.1, "eps": 0.01, "weight_decay": 0.3}, {}, {}),
]


@pytest.mark.contract("6.2.TestFusedAdam", "6.2.TestFusedSGD", "6.2.TestFusedAdagrad")
@pytest.mark.parametrize(("fused", "torchs", "options", "own", "theirs"), AS_TORCH)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_equals_torch(fused, torchs, options, own, theirs, dtype, tolerance):
    params = params_of(dtype)
    others = copied(params)
    optimizers = fused(params, **options, **own), torchs(others, **options, **theirs)
    for step in range(7):
        for some, optimizer in zip((params, others), optimizers, strict=True):
            give_gradients(some, step)
            if step < 2 and fused is FusedSGD:
                some[1].grad = None  # its first momentum comes later than the others'
            optimizer.step()
    # lr is a float32 tensor if capturable
    assert_close(params, others, max(tolerance, 1e-8) if "capturable" in own else tolerance)


ARGUMENTS = {
    FusedAdam: "lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none capturable master_weights",
    FusedSGD: "lr momentum dampening weight_decay nesterov wd_after_momentum materialize_master_grads set_grad_none",
    FusedLAMB: "lr bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging set_grad_none "
    "max_grad_norm use_nvlamb",
    FusedMixedPrecisionLamb: "lr step bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging "
    "max_grad_norm use_nvlamb reduced_precision_dtype",
    FusedNovoGrad: "lr bias_correction betas eps weight_decay amsgrad reg_inside_moment grad_averaging norm_type "
    "init_zero set_grad_none",
    FusedAdagrad: "lr eps weight_decay set_grad_none adagrad_w_mode",
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_are_apexs_in_their_order_and_are_kept(kind):
    names = ARGUMENTS[kind].split()
    assert list(inspect.signature(kind).parameters)[1 : len(names) + 1] == names
    given = {name: 0.5 for name in names} | {"betas": (0.1, 0.2), "amsgrad": False, "step": 7, "norm_type": 0}
    given |= {"reduced_precision_dtype": BFLOAT, "nesterov": True, "dampening": 0.0}
    given = {name: given[name] for name in names}
    made = kind(params_of(torch.float32), *given.values())
    for name, value in given.items():
        if name != "amsgrad":
            assert made.param_groups[0].get(name, getattr(made, name, None)) == value, name


@pytest.mark.parametrize(
    ("make", "state", "in_group"),
    [
        (FusedAdam, {"exp_avg", "exp_avg_sq"}, {"step"}),
        (lambda params: FusedSGD(params, 0.1, 0.9), {"momentum_buffer"}, set()),
        (FusedLAMB, {"exp_avg", "exp_avg_sq"}, {"step"}),
        (FusedNovoGrad, {"exp_avg"}, {"step", "exp_avg_sq"}),
        (FusedAdagrad, {"sum"}, set()),
    ],
)
def test_state_has_apexs_names(make, state, in_group):
    params = params_of(HALF)
    optimizer = make(params)
    before = set(optimizer.param_groups[0])
    train(optimizer, params, 2)
    saved = optimizer.state_dict()
    assert set(saved["param_groups"][0]) - before == in_group
    assert saved["param_groups"][0].get("step", 2) == 2
    assert all(set(each) == state for each in saved["state"].values())


# Adam


@pytest.mark.parametrize("capturable", [False, True])
def test_adam_without_bias_correction(capturable):
    w, g = torch.tensor([2.0], requires_grad=True), 3.0
    optimizer = FusedAdam(
        [w], lr=0.1, betas=(0.9, 0.99), eps=0.5, bias_correction=False, weight_decay=0.2, capturable=capturable
    )
    expected, m, v = 2.0, 0.0, 0.0
    for _ in range(3):
        w.grad = torch.tensor([g])
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        expected -= 0.1 * (m / (v**0.5 + 0.5) + 0.2 * expected)
    assert w.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("step", [3, torch.tensor([3], dtype=torch.int32)])
def test_adam_loads_a_state_dict_of_apex(capturable, step):
    group = {"lr": 0.5, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    state = {0: {"exp_avg": torch.tensor([1e-9]), "exp_avg_sq": torch.tensor([1e-12])}}
    w = torch.tensor([1.0], dtype=HALF, requires_grad=True)
    optimizer = FusedAdam([w], capturable=capturable)
    optimizer.load_state_dict({"state": state, "param_groups": [group | {"step": step, "params": [0]}]})
    assert optimizer.state[w]["exp_avg"].dtype is torch.float32
    assert optimizer.state[w]["exp_avg"].item() == pytest.approx(1e-9)  # 0 in float16
    assert optimizer.state[w]["exp_avg_sq"].item() == pytest.approx(1e-12)
    w.grad = torch.zeros(1, dtype=HALF)
    optimizer.step()
    loaded = optimizer.param_groups[0]
    assert isinstance(loaded["step"], torch.Tensor) is capturable
    assert (loaded["step"], float(loaded["lr"])) == (4, 0.5)


@pytest.mark.parametrize(
    ("make", "make_other", "tolerance"),
    [
        (lambda params: torch.optim.AdamW(params, lr=0.02), FusedAdam, 1e-6),
        (lambda params: FusedLAMB(params, lr=0.01), FusedMixedPrecisionLamb, 1e-6),
        (lambda params: FusedMixedPrecisionLamb(params, lr=0.01), FusedLAMB, 1e-6),
    ],
)
def test_state_dict_of_a_related_optimizer_loads(make, make_other, tolerance):
    params = params_of(torch.float32)
    optimizer = make(params)
    train(optimizer, params, 3)
    others = copied(params)
    other = make_other(others)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["step"] == 3
    train(optimizer, params, 2, start=3)
    train(other, others, 2, start=3)
    assert_close(others, params, tolerance)


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms", "grad_scaler"])
def test_other_arguments_of_step_are_refused(name):
    """Those of FusedAdam before 2019, and the one for which GradScaler would pass itself."""
    optimizer = FusedAdam(params_of(torch.float32))
    with pytest.raises(RuntimeError, match=rf"given {name}; only a closure.*scaler.step\(optimizer\)"):
        optimizer.step(None, **{name: 1.0})
    assert optimizer.step(None, None, None, None, None, **{name: None} if name == "grad_scaler" else {}) is None


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_capturable_adam_keeps_lr_and_step_in_its_own_tensors(lr):
    params = params_of(torch.float32)
    optimizer = FusedAdam([{"params": params[:2]}, {"params": params[2:]}], lr=lr, capturable=True)
    first, second = optimizer.param_groups
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: 1.0])
    train(optimizer, params, 1)
    tensors = [first["lr"], first["step"]]
    scheduler.step()
    train(optimizer, params, 1)
    assert first["lr"] is tensors[0]
    assert first["step"] is tensors[1]
    assert (first["lr"].item(), second["lr"].item(), first["step"].item()) == (0.25, 0.5, 2)
    assert float(lr) == 0.5


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_adams_masters_take_over_weights_that_are_written(dtype):
    w = torch.ones(1, dtype=dtype, requires_grad=True)
    optimizer = FusedAdam([w], lr=0.0, capturable=True, master_weights=True)
    for value in (1.0, 2.0):
        with torch.no_grad():
            w.fill_(value)
        w.grad = torch.zeros(1, dtype=dtype)
        optimizer.step()
        assert optimizer.state[w]["master_param"].item() == value


# SGD and Adagrad


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_with_decay_after_momentum(nesterov):
    w = torch.tensor([2.0], requires_grad=True)
    optimizer = FusedSGD([w], lr=0.1, momentum=0.5, weight_decay=0.2, nesterov=nesterov, wd_after_momentum=True)
    expected, momentum = 2.0, None
    for step in range(4):
        g = 1.0 + step
        w.grad = torch.tensor([g])
        optimizer.step()
        momentum = g if momentum is None else 0.5 * momentum + g
        direction = g + 0.5 * momentum if nesterov else momentum
        expected -= 0.1 * (direction + 0.2 * expected)
        assert optimizer.state[w]["momentum_buffer"].item() == momentum
    assert w.item() == pytest.approx(expected, rel=1e-6)


def test_sgd_takes_a_learning_rate_per_group():
    params = params_of(torch.float32)
    before = copied(params)
    optimizer = FusedSGD([{"params": params[:2], "lr": 0.5}, {"params": params[2:], "lr": 0.25}])
    train(optimizer, params, 1)
    for param, old, lr in zip(params, before, (0.5, 0.5, 0.25, 0.25), strict=True):
        torch.testing.assert_close(param, old - lr * param.grad)


def test_sgd_loads_a_state_dict_of_torch_without_momentum_buffers():
    params = params_of(torch.float32)
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9)
    state = {i: {"momentum_buffer": None} for i in range(len(params))}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    train(optimizer, params, 1)
    assert_equal([optimizer.state[p]["momentum_buffer"] for p in params], [p.grad for p in params])


def test_adagrad_with_decoupled_weight_decay():
    w, expected, total = torch.tensor([2.0], requires_grad=True), 2.0, 0.0
    optimizer = FusedAdagrad([w], lr=0.1, eps=0.5, weight_decay=0.2, adagrad_w_mode=True)
    for g in (1.0, -3.0, 2.0):
        w.grad = torch.tensor([g])
        optimizer.step()
        total += g * g
        expected -= 0.1 * (g / (total**0.5 + 0.5) + 0.2 * expected)
    assert w.item() == pytest.approx(expected, rel=1e-6)
    assert w.grad.item() == 2.0


# LAMB

LAMB_DEFAULTS = {
    **{"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01},
    **{"adam_w_mode": True, "grad_averaging": True, "max_grad_norm": 1.0, "use_nvlamb": False},
}


def norm(values):
    return math.sqrt(sum(value * value for value in values))


def lamb(weights, steps, **options):
    """LAMB element by element; ``weights`` and each of ``steps`` (gradients) are lists of lists of numbers."""
    o = {**LAMB_DEFAULTS, **options}
    beta1, beta2 = o["betas"]
    m, v = ([[0.0] * len(w) for w in weights] for _ in range(2))
    for count, grads in enumerate(steps, 1):
        clip = max(1.0, norm([g for gs in grads for g in gs]) / o["max_grad_norm"]) if o["max_grad_norm"] else 1.0
        bias1, bias2 = (1 - beta1**count, 1 - beta2**count) if o["bias_correction"] else (1.0, 1.0)
        for k, w in enumerate(weights):
            update = []
            for i, g in enumerate(grads[k]):
                g = g / clip + (0.0 if o["adam_w_mode"] else o["weight_decay"] * w[i])
                m[k][i] = beta1 * m[k][i] + (1 - beta1 if o["grad_averaging"] else 1.0) * g
                v[k][i] = beta2 * v[k][i] + (1 - beta2) * g * g
                u = m[k][i] / bias1 / (math.sqrt(v[k][i] / bias2) + o["eps"])
                update.append(u + (o["weight_decay"] * w[i] if o["adam_w_mode"] else 0.0))
            trusted = (o["weight_decay"] != 0 or o["use_nvlamb"]) and norm(w) > 0 and norm(update) > 0
            ratio = norm(w) / norm(update) if trusted else 1.0
            weights[k] = [a - o["lr"] * ratio * b for a, b in zip(w, update, strict=True)]
    return weights


@both_lambs
@pytest.mark.contract("6.2.TestFusedLAMB")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "betas": (0.6, 0.9), "weight_decay": 0.3},
        {"lr": 0.1, "weight_decay": 0.3, "adam_w_mode": False},
        {"lr": 0.1, "weight_decay": 0.0},
        {"lr": 0.1, "weight_decay": 0.0, "use_nvlamb": True},
        {"lr": 0.1, "bias_correction": False, "eps": 0.1},
        {"lr": 0.1, "grad_averaging": False, "max_grad_norm": 100.0},
        {"lr": 0.1, "max_grad_norm": 0.5},
        {"lr": 0.1, "max_grad_norm": None},
        {"lr": 0.1, "max_grad_norm": 0},
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_lamb_equals_the_reference(kind, options, dtype, tolerance):
    params = params_of(dtype)
    with torch.no_grad():
        params[1].zero_()  # no trust ratio in its first step
    weights, steps = [p.detach().flatten().tolist() for p in params], []
    optimizer = kind([{"params": params[:2]}, {"params": params[2:]}], **options)
    for step in range(5):
        give_gradients(params, step, scale=10.0**-step)  # only the first ones are clipped
        steps.append([p.grad.flatten().tolist() for p in params])
        optimizer.step()
    expected = [torch.tensor(each, dtype=dtype) for each in lamb(weights, steps, **options)]
    # lr is a float32 tensor in FusedMixedPrecisionLamb
    assert_close(
        [p.detach().flatten() for p in params], expected, tolerance if kind is FusedLAMB else max(tolerance, 1e-6)
    )


def test_lamb_clips_the_norm_of_all_groups_to_the_constructors_bound():
    a, b = (torch.tensor([1.0], requires_grad=True) for _ in range(2))
    optimizer = FusedLAMB([{"params": [a], "max_grad_norm": 100.0}, {"params": [b]}], max_grad_norm=1.0)
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.step()
    assert optimizer.state[a]["exp_avg"].item() == pytest.approx(0.1 * 3 / 5)
    assert optimizer.state[b]["exp_avg"].item() == pytest.approx(0.1 * 4 / 5)


@both_lambs
def test_lamb_does_not_change_gradients(kind):
    params = params_of(torch.float32)
    optimizer = kind(params)
    give_gradients(params, 0, scale=10.0)
    before = [p.grad.clone() for p in params]
    optimizer.step()
    assert_equal([p.grad for p in params], before)


def test_mixed_lamb_that_starts_at_a_later_step_corrects_the_bias_of_that_step():
    params = params_of(torch.float32)
    before = copied(params)
    optimizer = FusedMixedPrecisionLamb(params, 0.1, step=50, weight_decay=0.0)
    train(optimizer, params, 1)
    assert optimizer.param_groups[0]["step"].item() == 51
    expected = 0.1 * (1 - 0.9) / (1 - 0.9**51) * math.sqrt((1 - 0.999**51) / (1 - 0.999))
    assert (before[0] - params[0]).abs().max().item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_mixed_lamb_has_masters_of_the_named_dtype_only(dtype):
    params = params_of(torch.float32, HALF, BFLOAT)
    optimizer = FusedMixedPrecisionLamb(params, lr=1e-6, reduced_precision_dtype=dtype)
    train(optimizer, params, 3)
    for param, state in optimizer.state.items():
        assert ("master_param" in state) is (param.dtype is dtype)
        if param.dtype is dtype:
            assert not torch.equal(state["master_param"], param.float())  # more than the parameter can hold
            assert torch.equal(state["master_param"].to(dtype), param)


def test_mixed_lamb_with_masters_under_grad_scaler():
    params = params_of(HALF)
    wide = [p.detach().float().requires_grad_() for p in params]
    optimizer = FusedMixedPrecisionLamb(params, lr=0.01, reduced_precision_dtype=HALF)
    reference_optimizer = FusedLAMB(wide, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.ones(()))
    for step in range(4):
        give_gradients(params, step, scale=16.0)
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float() / 16.0
        scaler.step(optimizer)
        scaler.update()
        reference_optimizer.step()
    assert_close([optimizer.state[p]["master_param"] for p in params], wide, 1e-6)


# NovoGrad

NOVOGRAD_DEFAULTS = {
    **{"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    **{"reg_inside_moment": False, "grad_averaging": True, "norm_type": 2, "init_zero": False},
}


def novograd(w, steps, **options):
    """NovoGrad of one tensor, element by element: ``w`` and each of ``steps`` (gradients) are lists of numbers."""
    o = {**NOVOGRAD_DEFAULTS, **options}
    beta1, beta2 = o["betas"]
    m, v = [0.0] * len(w), 0.0
    for count, grads in enumerate(steps, 1):
        # v is the running square with norm_type 2
        size = sum(g * g for g in grads) if o["norm_type"] == 2 else max(abs(g) for g in grads)
        v = size if count == 1 and not o["init_zero"] else beta2 * v + (1 - beta2) * size
        bias1, bias2 = (1 - beta1**count, 1 - beta2**count) if o["bias_correction"] else (1.0, 1.0)
        denominator = (math.sqrt(v) if o["norm_type"] == 2 else v) / math.sqrt(bias2) + o["eps"]
        for i, g in enumerate(grads):
            if o["reg_inside_moment"]:
                g = g / denominator + o["weight_decay"] * w[i]
            m[i] = beta1 * m[i] + (1 - beta1 if o["grad_averaging"] else 1.0) * g
            update = m[i] / bias1
            if not o["reg_inside_moment"]:
                update = update / denominator + o["weight_decay"] * w[i]
            w[i] -= o["lr"] * update
    return w


@pytest.mark.contract("6.2.TestFusedNovoGrad")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "weight_decay": 0.3, "betas": (0.95, 0.5)},
        {"lr": 0.1, "weight_decay": 0.3, "reg_inside_moment": True, "betas": (0.95, 0.5)},
        {"lr": 0.1, "norm_type": 0, "betas": (0.95, 0.5)},
        {"lr": 0.1, "init_zero": True, "betas": (0.95, 0.5)},
        {"lr": 0.1, "init_zero": True, "norm_type": 0, "reg_inside_moment": True},
        {"lr": 0.1, "bias_correction": False, "grad_averaging": False, "eps": 0.1},
        {"lr": 0.1, "grad_averaging": False, "reg_inside_moment": True, "betas": (0.0, 0.0)},
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_novograd_equals_the_reference(options, dtype, tolerance):
    params = params_of(dtype)
    weights, steps = [p.detach().flatten().tolist() for p in params], []
    optimizer = FusedNovoGrad(params, **options)
    for step in range(5):
        give_gradients(params, step)
        steps.append([p.grad.flatten().tolist() for p in params])
        optimizer.step()
    expected = [novograd(w, [grads[k] for grads in steps], **options) for k, w in enumerate(weights)]
    found = [p.detach().flatten() for p in params]
    assert_close(found, [torch.tensor(each, dtype=dtype) for each in expected], tolerance)


def test_novograd_keeps_running_norms_where_apex_did():
    half, single, brain = torch.ones(2, dtype=HALF), torch.ones(2), torch.ones(1, dtype=BFLOAT)
    params = [p.requires_grad_() for p in (single, half, single.clone(), brain)]
    optimizer = FusedNovoGrad(params)
    for param, size in zip(params, (1.0, 2.0, 3.0, 4.0), strict=True):
        param.grad = torch.zeros_like(param)
        param.grad[0] = size
    optimizer.step()
    norms = optimizer.state_dict()["param_groups"][0]["exp_avg_sq"]
    assert [vector.tolist() for vector in norms] == [[2.0, 4.0], [1.0, 3.0]]
    assert [vector.dtype for vector in norms] == [torch.float32] * 2


def test_novograd_loads_a_state_dict_of_apex():
    params = [torch.ones(2, requires_grad=True), torch.ones(3, dtype=HALF, requires_grad=True)]
    optimizer = FusedNovoGrad(params, betas=(0.9, 0.75), bias_correction=False)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(step=5, exp_avg_sq=[torch.tensor([3.0]), torch.tensor([0.0])])
    saved["state"] = {i: {"exp_avg": torch.full_like(p, 1e-6).detach()} for i, p in enumerate(params)}
    optimizer.load_state_dict(saved)
    params[0].grad = torch.tensor([0.0, 2.0])
    params[1].grad = torch.zeros_like(params[1])
    optimizer.step()
    group = optimizer.param_groups[0]
    assert group["step"] == 6
    assert group["exp_avg_sq"][0].item() == pytest.approx(math.sqrt(0.75 * 9.0))
    assert group["exp_avg_sq"][1].item() == pytest.approx(math.sqrt(0.25 * 4.0))


def test_novograd_assigns_norms_saved_in_one_dtype_to_parameters_of_several():
    params = params_of(torch.float32)
    optimizer = FusedNovoGrad(params)
    train(optimizer, params, 2)
    mixed = [p.detach().to(HALF if i % 2 else torch.float32).requires_grad_() for i, p in enumerate(params)]
    other = FusedNovoGrad(mixed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    norms = optimizer.param_groups[0]["exp_avg_sq"][1]
    assert_equal(other.param_groups[0]["exp_avg_sq"], [norms[1::2], norms[::2]])


def test_novograd_refuses_norms_that_it_cannot_assign():
    params = params_of(torch.float32, HALF)
    optimizer = FusedNovoGrad(params)
    train(optimizer, params, 1)
    others = [p.detach().float().requires_grad_() for p in params]
    with pytest.raises(ValueError, match=r"holds \[4, 4\] running norms, but \[0, 8\] parameters"):
        FusedNovoGrad(others).load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_novograd_keeps_norms_of_parameters_without_gradient():
    params = params_of(torch.float32)
    optimizer = FusedNovoGrad(params, init_zero=True)
    train(optimizer, params, 1)
    before = copied(optimizer.param_groups[0]["exp_avg_sq"])[1]
    give_gradients(params, 1)
    params[2].grad = None
    optimizer.step()
    after = optimizer.param_groups[0]["exp_avg_sq"][1]
    assert (after == before).tolist() == [False, False, True, False]


@pytest.mark.host
def test_lamb_updates_many_weights_in_parts_that_fit_into_the_cache():
    """Of 16 MiB of weights, at most 2 MiB are copied at a time, with the results of a group per weight."""

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten._foreach_mul.Tensor:
                self.largest = max(self.largest, sum(tensor.nbytes for tensor in result))
            return result

    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(1 << 17, generator=generator) for _ in range(32)]
    found = []
    for one_group in (True, False):
        weights = [value.clone().requires_grad_() for value in values]
        optimizer = FusedLAMB(weights if one_group else [{"params": [weight]} for weight in weights])
        for _ in range(2):
            for weight in weights:
                weight.grad = weight.detach().sin()
            with Sizes() as sizes:
                optimizer.step()
        assert 0 < sizes.largest <= 2**21
        found.append(weights)
    assert all(map(torch.equal, *found))
