"""``FusedAdam`` against torch's Adam and AdamW (contract 5.5, 6.2)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from harness.apex import amp
from harness.apex.optimizers import FusedAdam
from tests.apex.test_fused_optimizers import assert_equal, copied, give_gradients, params_of, train

pytestmark = pytest.mark.contract("5.5.FusedAdam", "6.2.TestFusedAdam")
AS_TORCH = [
    ({}, {"weight_decay": 0.0}),
    ({"lr": 0.02, "betas": (0.6, 0.9), "eps": 1e-3, "weight_decay": 0.3}, {}),
    ({"lr": 0.02, "adam_w_mode": False, "weight_decay": 0.3}, {}),
    ({"lr": 0.02, "weight_decay": 0.3, "capturable": True}, {}),
    ({"betas": (0.0, 0.0)}, {"weight_decay": 0.0}),
]


def torch_twin(params, options, changes):
    options = {**options, **changes}
    kind = torch.optim.AdamW if options.pop("adam_w_mode", True) else torch.optim.Adam
    options.pop("capturable", None)
    return kind(params, **options)


@pytest.mark.parametrize(("options", "changes"), AS_TORCH)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_equals_torch(options, changes, dtype, tolerance):
    params = params_of(dtype)
    others = copied(params)
    train(FusedAdam(params, **options), params, 7)
    train(torch_twin(others, options, changes), others, 7)
    if options.get("capturable"):
        tolerance = max(tolerance, 1e-8)  # lr is a float32 tensor then
    for a, b in zip(params, others, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("capturable", [False, True])
def test_without_bias_correction(capturable):
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


def test_positional_order_is_apexs():
    params = params_of(torch.float32)
    optimizer = FusedAdam(params, 0.5, False, (0.1, 0.2), 0.3, False, 0.4, False, False, True, True)
    group = optimizer.param_groups[0]
    found = [float(group["lr"]), *(group[k] for k in ("bias_correction", "betas", "eps", "weight_decay"))]
    assert found == [0.5, False, (0.1, 0.2), 0.3, 0.4]
    assert (optimizer.adam_w_mode, optimizer.set_grad_none) == (False, False)
    assert (optimizer.capturable, optimizer.master_weights) == (True, True)


def test_state_has_apexs_names():
    params = params_of(torch.float16)
    optimizer = FusedAdam(params)
    assert "step" not in optimizer.param_groups[0]
    train(optimizer, params, 2)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["step"] == 2
    assert set(saved["param_groups"][0]) == {"lr", "bias_correction", "betas", "eps", "weight_decay", "step", "params"}
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in saved["state"].values())


def test_takes_a_state_dict_as_apex_wrote_it():
    def apex_dict(step):
        return {
            "state": {0: {"exp_avg": torch.tensor([1e-9]), "exp_avg_sq": torch.tensor([1e-12])}},
            "param_groups": [
                {
                    **{"lr": 0.5, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0},
                    **{"step": step, "params": [0]},
                }
            ],
        }

    w = torch.tensor([1.0], dtype=torch.float16, requires_grad=True)
    for capturable, step in ((False, 3), (True, 3), (False, torch.tensor([3], dtype=torch.int32))):
        optimizer = FusedAdam([w], capturable=capturable)
        optimizer.load_state_dict(apex_dict(step))
        state, group = optimizer.state[w], optimizer.param_groups[0]
        assert state["exp_avg"].dtype is torch.float32
        assert state["exp_avg"].item() == pytest.approx(1e-9)  # 0 in float16
        assert state["exp_avg_sq"].item() == pytest.approx(1e-12)
        assert isinstance(group["step"], torch.Tensor) is capturable
        w.grad = torch.zeros(1, dtype=torch.float16)
        optimizer.step()
        assert group["step"] == 4
        assert float(group["lr"]) == 0.5


def test_takes_a_state_dict_of_torchs_adamw():
    params = params_of(torch.float32)
    optimizer = torch.optim.AdamW(params, lr=0.02)
    train(optimizer, params, 3)
    others = copied(params)
    other = FusedAdam(others)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["step"] == 3
    for some, their in ((params, optimizer), (others, other)):
        train(their, some, 2, start=3)
    for a, b in zip(others, params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_older_arguments_of_step_say_what_to_do():
    optimizer = FusedAdam(params_of(torch.float32))
    for name in ("grads", "output_params", "scale", "grad_norms", "grad_scaler"):
        with pytest.raises(RuntimeError, match=f"given {name}; only a closure"):
            optimizer.step(**{name: 1.0})
    with pytest.raises(RuntimeError, match="given grads;"):
        optimizer.step(None, [torch.ones(1)])
    assert optimizer.step(None, None, None, None, None, grad_scaler=None) is None


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_capturable_keeps_counters_in_tensors_of_its_own(lr):
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_keep_what_the_weights_round_away(dtype):
    w = torch.ones(1, dtype=dtype, requires_grad=True)
    optimizer = FusedAdam([w], lr=1e-5, capturable=True, master_weights=True)
    for _ in range(5):
        w.grad = torch.ones(1, dtype=dtype)
        optimizer.step()
    assert w.item() == 1.0
    assert optimizer.state[w]["master_param"].item() == pytest.approx(1 - 5e-5, rel=1e-7)
    with torch.no_grad():
        w.copy_(torch.tensor([2.0]))  # weights loaded late are the truth
    w.grad = torch.zeros(1, dtype=dtype)
    optimizer.param_groups[0]["lr"].fill_(0.0)
    optimizer.step()
    assert optimizer.state[w]["master_param"].item() == 2.0


def test_masters_survive_saving():
    params = params_of(torch.float16)
    optimizer = FusedAdam(params, lr=1e-4, capturable=True, master_weights=True)
    train(optimizer, params, 3)
    others = copied(params)
    other = FusedAdam(others, capturable=True, master_weights=True)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for some, their in ((params, optimizer), (others, other)):
        train(their, some, 3, start=3)
    masters = [[their.state[p]["master_param"] for p in some] for some, their in ((params, optimizer), (others, other))]
    assert_equal(*masters)


def test_gradients_are_unscaled_in_place_as_apex_did():
    params = params_of(torch.float32)
    optimizer = FusedAdam(params, capturable=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    give_gradients(params, 0)
    expected = [p.grad / 4.0 for p in params]
    scaler.step(optimizer)
    assert_equal([p.grad for p in params], expected)


def test_a_frozen_model_is_no_error():
    model = nn.Linear(2, 2).requires_grad_(False)
    optimizer = FusedAdam([{"params": list(model.parameters())}, {"params": []}])
    before = copied(model.parameters())
    optimizer.step()
    assert_equal(list(model.parameters()), before)


def test_o2_steps_on_masters_as_torchs_adam_does():
    def run(make):
        amp.reset()
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        model, optimizer = amp.initialize(
            model, make(model.parameters()), opt_level="O2", loss_scale="dynamic", verbosity=0
        )
        for step in range(6):
            x = torch.full((4, 3), 0.5 + step)
            with amp.scale_loss(model(x).float().pow(2).mean(), optimizer) as loss:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in amp.master_params(optimizer)]

    expected = run(lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1))
    found = run(lambda params: FusedAdam(params, lr=0.01, weight_decay=0.1))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
