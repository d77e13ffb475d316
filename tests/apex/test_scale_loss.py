"""``amp.scale_loss``: gradients, skips, several models, losses and optimizers (contract 1.3, 2.3, 2.4, 3.3, 6.1)."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools

import pytest
import torch
from torch import nn

from harness.apex import amp
from harness.apex.optimizers import FusedSGD
from tests.apex import shared

SCALED = [
    ("O0", "dynamic"),
    ("O0", 8.0),
    ("O1", None),
    ("O2", None),
    ("O2", 8.0),
    ("O2", 1.0),
    ("O3", 8.0),
    ("O5", None),
]


class Product(nn.Module):
    """``(weight * x).sum()``, so the gradient is ``x``. One of two weights is a batch norm's, float32 under O2."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.norm = nn.BatchNorm1d(2)  # its affine parameters stay float32 under O2; used as plain numbers

    def forward(self, x):
        return (self.weight * x).sum() + (self.norm.weight * x.to(self.norm.weight.dtype)).sum()


def start(level, scale=None, lr=0.5, **overrides):
    model = Product()
    optimizer = torch.optim.SGD([model.weight, model.norm.weight], lr=lr, momentum=0.5)
    return amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0, **overrides)


def backward(model, optimizer, value, **options):
    with amp.scale_loss(model(torch.full((2,), float(value))), optimizer, **options) as loss:
        loss.backward()


def gradients(optimizer):
    return [p.grad.float().tolist() if p.grad is not None else None for p in amp.master_params(optimizer)]


def scale_of(index=0):
    return amp._amp_state.loss_scalers[index].loss_scale()


@pytest.mark.contract("1.3.5", "1.3.7", "1.3.8", "2.5", "3.3", "10.7", "10.18")
@pytest.mark.parametrize(("level", "scale"), SCALED)
@pytest.mark.parametrize("delays", [(False,), (False, False), (True, False), (False, True, False), (True, True, False)])
def test_accumulated_gradients_are_the_true_sum(level, scale, delays):
    model, optimizer = start(level, scale, max_loss_scale=1024.0)
    for i, delay in enumerate(delays):
        backward(model, optimizer, i + 1, delay_unscale=delay)
    total = float(sum(range(1, len(delays) + 1)))
    assert gradients(optimizer) == [[total] * 2] * 2
    optimizer.step()
    assert model.weight.tolist() == [1.0 - 0.5 * total, 2.0 - 0.5 * total]
    optimizer.zero_grad()
    backward(model, optimizer, 1)
    assert gradients(optimizer) == [[1.0] * 2] * 2, "gradients of the last step are gone"


@pytest.mark.contract("3.3")
@pytest.mark.parametrize(("level", "scale"), SCALED)
def test_two_backward_calls_in_one_context_add_up(level, scale):
    model, optimizer = start(level, scale, max_loss_scale=1024.0)
    with amp.scale_loss(model(torch.ones(2)), optimizer) as loss:
        loss.backward(retain_graph=True)
        loss.backward()
    assert gradients(optimizer) == [[2.0] * 2] * 2


@pytest.mark.contract("1.3.2", "10.11")
@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_any_iterable_of_optimizers_is_accepted(kind):
    model, optimizer = start("O0", 4.0)
    for _ in range(2):
        backward(model, kind([optimizer]), 1)
    assert gradients(optimizer) == [[2.0] * 2] * 2


@pytest.mark.contract("1.3.7", "10.14")
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_scale_may_change_between_delayed_contexts(level):
    model, optimizer = start(level, "dynamic", num_losses=2)
    first, second = amp._amp_state.loss_scalers
    first._loss_scale, second._loss_scale = 4.0, 16.0
    backward(model, optimizer, 1, delay_unscale=True, loss_id=0)
    backward(model, optimizer, 1, loss_id=1)
    assert gradients(optimizer) == [[2.0] * 2] * 2


@pytest.mark.contract("1.3.4")
def test_static_scale_of_one_leaves_everything_to_autograd():
    model, optimizer = start("O0")
    x = torch.ones(2, dtype=torch.float32)
    loss = model(x)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype is torch.float32
        assert scaled == loss
        scaled.backward()
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 0
    assert not optimizer._amp_stash.already_patched


@pytest.mark.contract("1.3.6")
def test_the_loss_is_yielded_in_float32_times_scale():
    _, optimizer = start("O2", 8.0)
    with amp.scale_loss(torch.ones(3, dtype=torch.float16), optimizer) as scaled:
        assert scaled.dtype is torch.float32
        assert scaled.tolist() == [8.0] * 3


@pytest.mark.contract("1.3.8", "2.3")
@pytest.mark.parametrize(("level", "scale"), [("O0", "dynamic"), ("O1", None), ("O2", None), ("O3", "dynamic")])
def test_overflow_skips_exactly_the_next_step(level, scale):
    model, optimizer = start(level, scale, max_loss_scale=1024.0)
    before = [p.clone() for p in amp.master_params(optimizer)]
    backward(model, optimizer, float("inf"))
    assert optimizer._amp_stash.already_patched
    assert scale_of() == 512.0
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: 0.0)
    assert optimizer.step() is None
    assert not optimizer._amp_stash.already_patched
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(before, amp.master_params(optimizer), strict=True))
    optimizer.zero_grad()
    backward(model, optimizer, 1)
    assert not optimizer._amp_stash.already_patched
    optimizer.step()
    assert model.weight.tolist() == [0.5, 1.5]


@pytest.mark.contract("1.3.7")
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_stepping_on_scaled_gradients_is_refused(level):
    model, optimizer = start(level, 8.0)
    backward(model, optimizer, 1, delay_unscale=True)
    with pytest.raises(RuntimeError, match="delay_unscale"):
        optimizer.step()


@pytest.mark.contract("1.3.7")
@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("to_none", [False, True])
def test_zero_grad_abandons_scaled_gradients(level, to_none):
    model, optimizer = start(level, 8.0)
    backward(model, optimizer, 1, delay_unscale=True)
    optimizer.zero_grad(set_to_none=to_none)
    model(torch.ones(2)).sum().backward()
    optimizer.step()


@pytest.mark.contract("1.3.9")
@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("delay", [False, True])
def test_body_that_raises_keeps_what_was_accumulated(level, delay):
    model, optimizer = start(level, 8.0)
    backward(model, optimizer, 1)

    def failing():
        with amp.scale_loss(model(torch.ones(2)), optimizer, delay_unscale=delay) as loss:
            if not delay:
                loss.backward()  # dropped again
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    if not delay:
        assert gradients(optimizer) == [[1.0] * 2] * 2
    backward(model, optimizer, 1)
    assert gradients(optimizer) == [[2.0] * 2] * 2


@pytest.mark.contract("1.3.9")
@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("delayed_before", [False, True])
def test_body_that_raises_leaves_no_scaled_gradients(level, delayed_before):
    model, optimizer = start(level, 8.0)
    if delayed_before:
        backward(model, optimizer, 1, delay_unscale=True)
    failing_context(model, optimizer)
    if delayed_before:  # what both contexts added cannot be told apart
        backward(model, optimizer, 1)
        assert gradients(optimizer) == [[3.0] * 2] * 2
        return
    assert model.weight.grad is None
    backward(model, optimizer, 1)
    assert gradients(optimizer) == [[1.0] * 2] * 2


@pytest.mark.contract("1.3.3")
def test_unknown_optimizer_leaves_the_gradients_of_others():
    model, optimizer = start("O1", 8.0)
    backward(model, optimizer, 1)
    stranger = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="has not seen"), amp.scale_loss(torch.ones(()), [optimizer, stranger]):
        pass
    assert gradients(optimizer) == [[1.0] * 2] * 2


@pytest.mark.contract("1.10")
def test_scripts_may_write_the_scale():
    model, optimizer = start("O2")
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    backward(model, optimizer, 1)
    assert model.weight.grad.tolist() == [4.0, 4.0]
    assert gradients(optimizer)[0] == [1.0, 1.0]


@pytest.mark.contract("1.3.1", "1.3.3")
def test_wrong_use_is_explained():
    model, optimizer = start("O1")
    with pytest.raises(IndexError, match="num_losses=2"), amp.scale_loss(torch.ones(()), optimizer, loss_id=1):
        pass
    stranger = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="has not seen"), amp.scale_loss(torch.ones(()), stranger):
        pass


@pytest.mark.contract("3.3")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sparse_gradients(level):
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    before = model.weight.detach().float().clone()
    for _ in range(2):
        with amp.scale_loss(model(torch.tensor([1, 1, 3])).float().sum(), optimizer) as loss:
            loss.backward()
    optimizer.step()
    moved = (before - model.weight.detach().float()).round(decimals=2)
    assert moved.tolist() == [[0, 0], [4, 4], [0, 0], [2, 2], [0, 0]]


UNCHECKED = {
    "delayed check": lambda a, b, optimizer: (
        shared.backward(a(), optimizer, delay_overflow_check=True),
        shared.backward(b(), optimizer),
    ),
    "skipped, not cleared": lambda a, b, optimizer: (
        shared.backward(a(), optimizer),
        optimizer.step(),
        shared.backward(b(), optimizer),
    ),
    "delayed check, other scaler": lambda a, b, optimizer: (
        shared.backward(a(), optimizer, delay_overflow_check=True),
        shared.backward(b(), optimizer, loss_id=1),
    ),
}


@pytest.mark.contract("1.3.6", "3.3")
@pytest.mark.parametrize("case", UNCHECKED)
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_inf_is_found_where_the_next_loss_does_not_reach_it(case, level):
    model = shared.Numbers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", num_losses=2, verbosity=0)
    losses = (lambda: model([float("inf"), None, 1.0]), lambda: model([None, 1.0, 1.0]))
    UNCHECKED[case](*losses, optimizer)
    optimizer.step()
    assert shared.distinct(model.parameters()) == [[1.0]] * 3
    optimizer.zero_grad()
    shared.backward(losses[1](), optimizer)
    optimizer.step()
    assert shared.distinct(model.parameters()) == [[1.0], [0.0], [0.0]]


@pytest.mark.contract("3.3")
@pytest.mark.parametrize("rows", [[1], [2], None])
def test_inf_in_sparse_gradients_is_found(rows):
    """With a new gradient in the same row, in another one, or none."""
    model = nn.ModuleList([nn.Embedding(5, 2, sparse=True), nn.Linear(1, 1)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
    before = model[0].weight.detach().clone()
    inf = model[0](torch.tensor([1])).float().sum() * float("inf")
    shared.backward(inf, optimizer, delay_overflow_check=True)
    finite = model[1].weight.sum() if rows is None else model[0](torch.tensor(rows)).float().sum()
    shared.backward(finite, optimizer)
    assert optimizer._amp_stash.already_patched
    optimizer.step()
    assert torch.equal(model[0].weight, before)


# The conformance core: models x losses x optimizers, an inf in one of them, against plain SGD without the same steps.

WIRINGS = {
    # name: (number of models; per loss its models and the optimizers passed to scale_loss; models of each optimizer)
    "2 models, 2 losses, 1 optimizer": (2, [([0], [0]), ([1], [0])], [[0, 1]]),
    "3 models, 2 losses, 1 optimizer": (3, [([0, 2], [0]), ([1, 2], [0])], [[0, 1, 2]]),
    "2 models, 2 losses, 2 optimizers": (2, [([0], [0]), ([1], [1])], [[0], [1]]),
    "3 models, 2 losses, 2 optimizers": (3, [([0, 2], [0, 1]), ([1, 2], [1])], [[0], [1, 2]]),
}


def zero(style, models, optimizers):
    if style == "optimizer":
        for optimizer in optimizers:
            optimizer.zero_grad()
    elif style == "model":
        for model in models:
            model.zero_grad()
        for optimizer in optimizers:  # step itself clears the masters of a skipped or finished step
            assert all(p.grad is None or not p.grad.any() for p in amp.master_params(optimizer))
    else:
        for optimizer in optimizers:
            for p in amp.master_params(optimizer):
                p.grad = None


def weights(models):
    return [p for model in models for p in (model.weight, model.norm.weight)]


def make(count, owners, sgd=torch.optim.SGD):
    models = [Product() for _ in range(count)]
    return models, [sgd(weights(models[m] for m in own), lr=0.25, momentum=0.5) for own in owners]


def inputs(step, loss):
    return [torch.full((2,), 0.5 + step + loss), torch.full((2,), 0.25 * (step + 1))]


def reference(wiring, skipped):
    """Return the weights after plain SGD in float32, without the pairs (step, optimizer) in ``skipped``."""
    count, losses, owners = WIRINGS[wiring]
    models, sgds = make(count, owners)
    for step in range(3):
        for k, (reached, _) in enumerate(losses):
            sum(models[m](inputs(step, k)[i % 2]) for i, m in enumerate(reached)).backward()
        for k, sgd in enumerate(sgds):
            if (step, k) not in skipped:
                sgd.step()
            sgd.zero_grad()
    return weights(models)


@pytest.mark.contract(
    "2.4",
    "6.1.2models2losses1optimizer",
    "6.1.3models2losses1optimizer",
    "6.1.2models2losses2optimizers",
    "6.1.3models2losses2optimizers",
    "6.1.test_fused_sgd",
    "6.1.test_loss_scale_decrease",
)
@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize(
    ("level", "sgd", "style", "steps"),
    [
        *((level, torch.optim.SGD, "optimizer", (1,)) for level in ("O0", "O1", "O2", "O3")),
        ("O2", functools.partial(FusedSGD, materialize_master_grads=False), "model", (0,)),
        *(
            pytest.param(level, sgd, style, (0, 1), marks=pytest.mark.slow)
            for level in ("O0", "O1", "O2", "O3")
            for sgd, style in (
                (torch.optim.SGD, "model"),
                (torch.optim.SGD, "by hand"),
                (FusedSGD, "optimizer"),
                (functools.partial(FusedSGD, materialize_master_grads=False), "model"),
            )
        ),
    ],
)
def test_weights_equal_sgd_without_the_skipped_steps(wiring, level, sgd, style, steps):
    count, losses, owners = WIRINGS[wiring]
    where = [None, *itertools.product(steps, range(2), range(2), ("float16", "float32"))]
    for num_losses, bad in itertools.product((1, 2), where):
        amp.reset()
        models, optimizers = make(count, owners, sgd)
        amp.initialize(models, optimizers, opt_level=level, loss_scale="dynamic", num_losses=num_losses, verbosity=0)
        for i, scaler in enumerate(amp._amp_state.loss_scalers):
            scaler._loss_scale = (4.0, 16.0)[i]
        skipped = set()
        for step in range(3):
            for k, (reached, given) in enumerate(losses):
                total = sum(models[m](inputs(step, k)[i % 2]) for i, m in enumerate(reached))
                chosen = [optimizers[o] for o in given]
                with amp.scale_loss(total, chosen, loss_id=k if num_losses == 2 else 0) as loss:
                    loss.backward()
                    if bad is not None and bad[:2] == (step, k):
                        victim = models[reached[bad[2] % len(reached)]]
                        parameter = victim.weight if bad[3] == "float16" else victim.norm.weight
                        parameter.grad[0] = float("inf")
                        skipped |= {(step, o) for o in given}
            for k, optimizer in enumerate(optimizers):
                assert optimizer._amp_stash.already_patched == ((step, k) in skipped)
                optimizer.step()
            zero(style, models, optimizers)
        halved = -1 if bad is None else bad[1] if num_losses == 2 else 0
        scales = [scale * (0.5 if i == halved else 1.0) for i, scale in enumerate((4.0, 16.0)[:num_losses])]
        assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == scales
        expected = reference(wiring, skipped)
        for a, b in zip(expected, weights(models), strict=True):
            torch.testing.assert_close(b.detach().float(), a.detach(), rtol=0, atol=0 if level != "O3" else 0.02)
        for stash in [optimizer._amp_stash for optimizer in optimizers if level == "O2"]:
            pairs = zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True)
            assert all(torch.equal(model, master.half()) for model, master in pairs)


@pytest.mark.contract("1.8", "6.1.test_add_param_group")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("zero_before", [False, True])
def test_added_param_group_trains_like_plain_sgd(level, accumulate, zero_before):
    models = [Product(), Product()]
    plain = copy.deepcopy(models)

    def train(models, optimizer, contexts):
        for step in range(4):
            if step == 2:
                if zero_before:
                    optimizer.zero_grad()
                optimizer.add_param_group({"params": weights(models[1:]), "lr": 0.125})
                if not zero_before:
                    optimizer.zero_grad()
            for micro in range(2 if accumulate else 1):
                for model in models:
                    contexts(model, 1 + step + micro)
            optimizer.step()
            if step != 1:
                optimizer.zero_grad()
            for parameter in weights(models[1:]):
                parameter.grad = parameter.grad if step > 1 else None

    def optimizer_of(models):
        return torch.optim.SGD(weights(models[:1]), lr=0.25, momentum=0.5)

    expected = optimizer_of(plain)
    train(plain, expected, lambda model, value: model(torch.full((2,), float(value))).backward())
    optimizer = optimizer_of(models)
    amp.initialize(models, optimizer, opt_level=level, loss_scale=4.0, verbosity=0)
    train(models, optimizer, lambda model, value: backward(model, optimizer, value))
    for a, b in zip(weights(plain), weights(models), strict=True):
        torch.testing.assert_close(b.detach().float(), a.detach(), rtol=1e-3, atol=1e-3)


def failing_context(model, optimizer):
    with contextlib.suppress(KeyError), amp.scale_loss(model(torch.ones(2)), optimizer) as loss:
        loss.backward()
        raise KeyError


ACTIONS = {
    "scaled": lambda model, optimizer: backward(model, optimizer, 1.0),
    "inf": lambda model, optimizer: backward(model, optimizer, float("inf")),
    "delayed_inf": lambda model, optimizer: backward(model, optimizer, float("inf"), delay_unscale=True),
    "unchecked_inf": lambda model, optimizer: backward(model, optimizer, float("inf"), delay_overflow_check=True),
    "step": lambda model, optimizer: optimizer.step(),
}


@pytest.mark.contract("1.3.7", "1.3.8", "2.2", "2.3", "10.10")
@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize(
    ("script", "skips", "scale", "unskipped"),
    [
        ("inf inf", True, 256, 0),
        ("inf inf step", False, 256, 0),
        ("inf scaled", True, 512, 1),
        ("inf step scaled", True, 256, 0),  # no zero_grad: inf is still in the sum
        ("delayed_inf", False, 1024, 0),
        ("delayed_inf scaled", True, 512, 0),
        ("unchecked_inf", False, 1024, 0),
        ("unchecked_inf scaled", True, 512, 0),
    ],
)
def test_overflows_around_a_step(level, script, skips, scale, unskipped):
    model, optimizer = start(level, "dynamic", max_loss_scale=1024.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)  # which wraps step
    for action in script.split():
        ACTIONS[action](model, optimizer)
    assert optimizer._amp_stash.already_patched == skips
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": scale, "unskipped": unskipped}
