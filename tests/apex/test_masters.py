"""Master weights and exact resume, in every order of loading (contract 3.2, 3.3, 3.5)."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.apex import amp
from tests.apex.shared import backward, copies, same, tensors_in, through_a_file


class Wrapper(torch.optim.Optimizer):
    """The LARS wrappers of many projects: they never call ``Optimizer.__init__`` and pass everything on."""

    def __init__(self, optimizer):
        self.optim = optimizer

    param_groups = property(lambda self: self.optim.param_groups)
    state = property(lambda self: self.optim.state)
    defaults = property(lambda self: self.optim.defaults)

    def state_dict(self):
        return self.optim.state_dict()

    def load_state_dict(self, state_dict):
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none=True):
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group):
        self.optim.add_param_group(param_group)

    def step(self, closure=None):
        return self.optim.step(closure)


OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-4),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=1e-3),
    "wrapper": lambda params: Wrapper(torch.optim.SGD(params, lr=1e-2, momentum=0.9)),
}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


def build(level, kind, seed=0, **overrides):
    model = net(seed)
    optimizer = OPTIMIZERS[kind](model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **overrides)


def train(model, optimizer, steps, start=0):
    losses = []
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 6, generator=generator), torch.randint(0, 3, (16,), generator=generator)
        loss = F.cross_entropy(model(x).float(), y)
        with amp.scale_loss(loss * 1e-2, optimizer) as scaled:  # small gradients: their squares vanish in float16
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def everything(model, optimizer):
    masters = list(amp.master_params(optimizer))
    state = [list(optimizer.state[p].values()) for p in masters]
    return copies(tensors_in([masters, state, model.state_dict()]))


ORDERS = list(itertools.permutations(["model", "optimizer", "amp"]))
MOMENTS = [
    "before initialize",
    pytest.param("before first use", marks=pytest.mark.slow),
    pytest.param("after first use", marks=pytest.mark.slow),
    "after training",
]


@pytest.mark.contract("3.5", "10.1", "6.1.test_checkpointing")
@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])  # O1 and O4 leave weights and state alone
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_resumed_run_equals_the_uninterrupted_one(level, kind, moment):
    model, optimizer = build(level, kind)
    train(model, optimizer, 12)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()})
    expected_losses = train(model, optimizer, 6, start=12)
    expected = everything(model, optimizer)
    for order in ORDERS if level == "O2" else ORDERS[::5]:
        amp.reset()
        if moment == "before initialize":
            model = net(seed=1)
            optimizer = OPTIMIZERS[kind](model.parameters())
        else:
            model, optimizer = build(level, kind, seed=1)
        if moment == "after first use":
            optimizer.zero_grad()
        if moment == "after training":
            train(model, optimizer, 3)
        checkpoint = through_a_file(saved)
        for what in order:
            if what == "model":
                model.load_state_dict(checkpoint["model"])
            elif what == "optimizer":
                optimizer.load_state_dict(checkpoint["optimizer"])
            elif moment != "before initialize":
                amp.load_state_dict(checkpoint["amp"])
        if moment == "before initialize":
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            amp.load_state_dict(checkpoint["amp"])
        assert train(model, optimizer, 6, start=12) == expected_losses, order
        assert same(everything(model, optimizer), expected), order


@pytest.mark.contract("3.5")
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_without_saved_masters_they_follow_the_model(level, caplog):
    model, optimizer = build(level, "adam")
    train(model, optimizer, 5)
    weights, state = through_a_file(model.state_dict()), through_a_file(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["master_params"]
    for order in itertools.permutations("mo"):
        amp.reset()
        model, optimizer = build(level, "adam", seed=3)
        optimizer.zero_grad()
        for what in order:
            model.load_state_dict(weights) if what == "m" else optimizer.load_state_dict(through_a_file(state))
        assert "holds no master weights" in caplog.text
        caplog.clear()
        with amp.scale_loss(model(torch.randn(4, 6)).sum(), optimizer):
            pass
        assert torch.equal(next(amp.master_params(optimizer)), weights["0.weight"])
        assert optimizer.state[next(amp.master_params(optimizer))]["exp_avg_sq"].dtype is torch.float32


@pytest.mark.contract("10.2")
def test_weights_loaded_late_are_not_overwritten():
    model, optimizer = build("O2", "momentum")
    train(model, optimizer, 3)
    other = {name: value + 1 if value.is_floating_point() else value for name, value in net(9).state_dict().items()}
    model.load_state_dict(other)
    optimizer.step()  # without gradients nothing may move
    for name, value in model.state_dict().items():
        assert torch.equal(value, other[name] if name.startswith("1.") else other[name].half().float())


@pytest.mark.contract("3.5")
def test_weights_swapped_out_and_back_keep_the_masters():
    model, optimizer = build("O2", "adam")
    train(model, optimizer, 3)
    masters = copies(amp.master_params(optimizer))
    backup = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(net(4).state_dict())
    model.load_state_dict(backup)
    with amp.scale_loss(model(torch.randn(4, 6)).sum(), optimizer):
        pass
    assert same(masters, amp.master_params(optimizer))


@pytest.mark.contract("3.5")
def test_saved_masters_are_dropped_at_a_level_without_them():
    model, optimizer = build("O2", "adam")
    train(model, optimizer, 3)
    state, weights = through_a_file(optimizer.state_dict()), through_a_file(model.state_dict())
    for level in ("O0", "O1", "O3"):
        amp.reset()
        model, optimizer = build(level, "adam")
        model.load_state_dict(weights)
        optimizer.load_state_dict(through_a_file(state))
        assert "master_params" not in optimizer.param_groups[0]
        train(model, optimizer, 2)
        assert "master_params" not in optimizer.state_dict()["param_groups"][0]


@pytest.mark.contract("1.8", "3.2")
def test_masters_appear_at_first_use_in_the_same_groups():
    model, optimizer = build("O2", "adam")
    group = optimizer.param_groups[0]
    params = group["params"]
    assert params[0] is model[0].weight
    optimizer.zero_grad()
    assert optimizer.param_groups[0] is group, "a scheduler may hold the group"
    assert group["params"] is params
    assert params[0] is not model[0].weight
    assert params[0].dtype is torch.float32
    assert params[2] is model[1].weight, "float32 batch norm is its own master"
    stash = optimizer._amp_stash
    assert stash.lazy_init_called
    assert [id(p) for p in stash.all_fp16_params] == [
        id(p) for layer in (model[0], model[3]) for p in (layer.weight, layer.bias)
    ]
    assert stash.all_fp32_from_fp16_params[0] is params[0]
    assert len(stash.fp16_groups[0]) == 4


@pytest.mark.contract("1.10", "3.5")
def test_private_names_of_apex_for_a_resume_by_hand():
    model, optimizer = build("O2", "adam")
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_lazy_init()
    with torch.no_grad():
        for p in amp.master_params(optimizer):
            p.fill_(0.25)
    optimizer._master_params_to_model_params()
    assert torch.equal(model[0].weight, torch.full_like(model[0].weight, 0.25))
    scaler = amp._amp_state.loss_scalers[0]
    optimizer._prepare_amp_backward()
    (model(torch.randn(4, 6)).sum() * scaler.loss_scale() * 1e-3).backward()
    optimizer._post_amp_backward(scaler)
    assert next(amp.master_params(optimizer)).grad is not None


@pytest.mark.contract("1.8", "7.2")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_model_and_masters(set_to_none):
    model, optimizer = build("O2", "adam")
    backward(model(torch.randn(4, 6)).sum() * 1e-4, optimizer)
    optimizer.zero_grad(set_to_none=set_to_none)
    assert all(p.grad is None for p in optimizer._amp_stash.all_fp32_from_fp16_params)
    if set_to_none:
        assert all(p.grad is None for p in model.parameters())
    else:
        assert all(not p.grad.any() for p in model.parameters())


@pytest.mark.contract("1.8")
def test_step_with_masters_refuses_a_closure():
    model, optimizer = build("O2", "adam")
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: 0.0)
    assert optimizer.step() is None


@pytest.mark.contract("3.2", "10.15")
def test_parameters_unfrozen_later_get_masters():
    torch.manual_seed(0)
    model = net()
    model[0].requires_grad_(False)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    train(model, optimizer, 2)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    model[0].requires_grad_(True)
    before = model[0].weight.detach().float()
    train(model, optimizer, 1)
    master = optimizer.param_groups[0]["params"][0]
    assert master.dtype is torch.float32
    assert master is not model[0].weight
    moved = (master.detach() - before).abs().max()
    assert 0 < moved < 1e-2, "stepped with a scaled gradient"


@pytest.mark.contract("3.2")
def test_masters_of_other_dtypes_are_refused():
    model = nn.Linear(2, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level="O2", cast_model_type=False, verbosity=0)
    with pytest.raises(TypeError, match="float64"):
        optimizer.zero_grad()


@pytest.mark.contract("3.5")
def test_optimizer_state_made_before_initialize_is_kept_in_float32():
    model = net()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    model(torch.randn(4, 6)).sum().mul(1e-6).backward()
    optimizer.step()
    before = optimizer.state[model[0].weight]["exp_avg_sq"].clone()
    assert (before.half() == 0).all(), "the values must not survive float16"
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    optimizer.zero_grad()
    after = optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg_sq"]
    assert torch.equal(before, after)
    assert model[0].weight not in optimizer.state


@pytest.mark.contract("3.5")
def test_state_made_before_initialize_is_saved_alike_before_and_after_the_first_step():
    """Or a run that is killed before its first step has another order in its checkpoints for ever after."""
    model = net()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    first = optimizer.state_dict()["state"]
    train(model, optimizer, 1)
    after = optimizer.state_dict()["state"]
    assert [*first] == [*after]
    assert len(first) == len([*model.parameters()])
    assert {value["momentum_buffer"].dtype for value in first.values()} == {torch.float32}


@pytest.mark.contract("3.5")
def test_step_counters_are_not_rounded():
    """A counter has the shape of a scalar parameter; in float16 it would stop at 2048."""
    for level in ("O2", "O3"):
        amp.reset()
        parameter = nn.Parameter(torch.ones(()))
        model = nn.ParameterList([parameter])
        optimizer = torch.optim.Adam(model.parameters())
        parameter.grad = torch.ones(())
        optimizer.step()
        optimizer.state[parameter]["step"].fill_(4097)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        optimizer.zero_grad()
        assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].item() == 4097


def test_state_dict_of_another_form_is_left_alone(caplog):
    class Wrapped(Wrapper):
        def state_dict(self):
            return {"inner": self.optim.state_dict()}

    model = net()
    optimizer = Wrapped(torch.optim.SGD(model.parameters(), lr=0.1))
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train(model, optimizer, 1)
    assert set(optimizer.state_dict()) == {"inner"}
    assert "Wrapped.state_dict() returns no param_groups, so it does not hold the master weights" in caplog.text
