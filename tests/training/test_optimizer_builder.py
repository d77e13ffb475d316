"""Optimizers by name."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from torch import nn

from harness.config import loader
from harness.config.schema import OptimizerSection
from harness.errors import ConfigError, OwnCodeError
from harness.training.build import require_optimizer
from harness.training.model import model_builder
from harness.training.optimizer.optimizer_builder import (
    build,
    clear_gradients,
    scaled_lr,
    start_momentum,
)
from harness.training.optimizer.registry import built_in
from tests.config.test_schema import make
from tests.fixtures import settings, write_yaml


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]


class Plain(torch.optim.SGD):
    """An optimizer of the user's own that passes its arguments on."""

    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)


# Building


def test_by_name_with_arguments():
    optimizer = build(
        OptimizerSection(name="sgd", momentum=0.9, weight_decay=0.1, args={"nesterov": True}), params(), lr=0.4
    )
    assert type(optimizer) is torch.optim.SGD
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"], group["nesterov"]) == (0.4, 0.9, 0.1, True)
    assert len(optimizer.param_groups) == 1


def test_null_is_the_default_of_the_optimizer():
    assert build(OptimizerSection(name="adamw"), params(), 0.1).param_groups[0]["weight_decay"] == 0.01
    assert build(OptimizerSection(name="adamw", weight_decay=0.0), params(), 0.1).param_groups[0]["weight_decay"] == 0


class Counted(torch.optim.SGD):
    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("make", [torch.optim.SGD, Counted])
def test_clear_gradients(make):
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))]
    optimizer = make([{"params": weights[:1]}, {"params": weights[1:]}], lr=0.1)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    clear_gradients(optimizer)
    assert [weight.grad for weight in weights] == [None, None]
    assert getattr(optimizer, "calls", 1) == 1


def test_implementation():
    def used(name: str, **args) -> tuple[bool | None, bool | None]:
        group = build(OptimizerSection(name=name, args=args), params(), 0.1).param_groups[0]
        return group.get("fused"), group["foreach"]

    assert used("adamw") == used("sgd") == (True, None)
    assert used("adagrad") == used("adam", fused=None) == used("sgd", dampening=0.5) == (None, None)
    for name in ("sgd", "adamw", "rmsprop"):
        assert used(name, foreach=True) == (None, True)
        assert used(name, foreach=False) == (None, False)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_parameter_whose_first_gradient_comes_late(name):
    """The kernels of torch that update one parameter after the other give the expected values."""

    def updated(**args: bool) -> list[torch.Tensor]:
        weights, rng = params(), torch.Generator().manual_seed(0)
        optimizer = build(OptimizerSection(name=name, args=args), weights, 0.1)
        start_momentum(optimizer)
        for index in range(4):
            for weight in weights[: 1 if index < 2 else None]:
                weight.grad = torch.randn(weight.shape, generator=rng)
            optimizer.step()
        return [weight.detach() for weight in weights]

    torch.testing.assert_close(updated(), updated(foreach=False))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_fused_update_depends_on_neither_threads_nor_a_resume(name):
    def updated(threads: int, resumed_at: int | None = None) -> torch.Tensor:
        weight, rng = nn.Parameter(torch.ones(40_003)), torch.Generator().manual_seed(0)
        section = OptimizerSection(name=name, weight_decay=0.01)
        optimizer, before = build(section, [weight], 0.1), torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for index in range(4):
                if index == resumed_at:
                    state, optimizer = optimizer.state_dict(), build(section, [weight], 0.1)
                    optimizer.load_state_dict(state)
                weight.grad = torch.randn(weight.shape, generator=rng)
                optimizer.step()
        finally:
            torch.set_num_threads(before)
        return weight.detach()

    once = updated(1)
    assert torch.equal(once, updated(3))
    assert torch.equal(once, updated(1, resumed_at=2))


def test_by_path():
    assert type(build(OptimizerSection(name="torch.optim.Adam"), params(), 0.1)) is torch.optim.Adam
    own = build(OptimizerSection(name="tests.training.test_optimizer_builder.Plain", momentum=0.5), params(), 0.1)
    assert own.param_groups[0]["momentum"] == 0.5


class NoStep(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})


def test_one_without_a_step_is_refused():
    with pytest.raises(OwnCodeError, match=rf"test_optimizer_builder.py:\d+: {__name__}.NoStep has no step\(\)"):
        build(OptimizerSection(name=f"{__name__}.NoStep"), params(), 0.1)


class OfNorms(torch.optim.SGD):
    needs_whole_parameters = True


def test_one_that_needs_complete_parameters_is_refused_for_shards():
    name = "tests.training.test_optimizer_builder.OfNorms"
    replicated, sharded = (make(parallel={"strategy": each}, optimizer={"name": name}) for each in ("ddp", "fsdp"))
    require_optimizer(replicated)
    with pytest.raises(ConfigError, match="OfNorms needs complete parameters, but each rank holds only a shard"):
        require_optimizer(sharded)


@pytest.mark.parametrize("name", ["Adam", "LAMB", "SGD", "NovoGrad", "Adagrad"])
def test_fused_by_short_name(name):
    """Apex's optimizers by their short names; YAML gives pairs as lists."""
    args = {"betas": [0.8, 0.9]} if name in ("Adam", "LAMB", "NovoGrad") else {}
    given = params()
    optimizer = build(OptimizerSection(name=f"fused_{name.lower()}", args=args), given, lr=0.1)
    assert type(optimizer).__module__.startswith("harness.apex.optimizers")
    assert type(optimizer).__name__ == f"Fused{name}"
    for param in given:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all((param < 1).all() for param in given)
    for pair in args.values():
        assert list(optimizer.param_groups[0]["betas"]) == pair


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "fused_adm"}, "did you mean fused_adam?"),
        ({"name": "adamw_torch"}, "did you mean adamw?"),
        ({"name": "lbfgs"}, "unknown optimizer"),  # needs a closure
        ({"name": "optimizer"}, "unknown optimizer"),
        ({"name": "torch.optim.Nope"}, "cannot be imported"),
        ({"name": "pathlib.Path"}, "is not a torch.optim.Optimizer"),
        ({"name": "adam", "momentum": 0.9}, "adam has no argument momentum\n  -> its arguments are: lr, betas"),
        ({"name": "adam", "momentum": 0.9}, "; to leave it out, set optimizer.momentum=null"),
        ({"args": {"nestrov": True}}, "sgd has no argument nestrov"),
        ({"args": {"nesterov": True}}, "cannot build sgd: Nesterov momentum requires a momentum"),
        ({"args": {"params": []}}, "sgd has no argument params"),
        ({"name": "adam", "args": {"betas": [2, 3]}}, "cannot build adam: Invalid beta"),
        ({"momentum": 0.9, "args": {"nesterov": "yes"}}, "nesterov: sgd takes a value of type bool, not 'yes'"),
        ({"args": {"maximize": "no"}}, "for example maximize: false"),
        ({"args": {"foreach": "no"}}, "for example foreach: true"),
        ({"name": "muon", "args": {"adjust_lr_fn": 3}}, "for example adjust_lr_fn: null"),
        ({"name": "rmsprop", "args": {"alpha": True}}, "rmsprop takes a value of type float, not True"),
        ({"name": "adam", "args": {"betas": [0.9]}}, "for example betas: [0.9, 0.999]"),
        ({"name": "fused_adam", "args": {"adam_w_mode": "no"}}, "fused_adam takes a value of type bool, not 'no'"),
    ],
)
def test_optimizer_builderizer_that_cannot_be_built(section, message):
    with pytest.raises(ConfigError) as caught:
        build(OptimizerSection(**section), params(), 0.1)
    assert any(part in str(caught.value) for part in message.split("|"))
    assert caught.value.where.startswith("optimizer")


def test_arguments_in_a_file_for_another_optimizer_or_model(tmp_path):
    """The override that drops them is named, and works."""
    sections = {"optimizer": {"name": "adamw", "args": {"amsgrad": True}}, "precision": {"opt_level": "O0"}}
    sections["model"] = {"name": "resnet18", "args": {"width_per_group": 8}}
    file = write_yaml(tmp_path / "x.yaml", settings(tmp_path, **sections))
    named = ["optimizer.name=sgd", "model.name=linear"]

    def problems(*more):
        config = loader.load(file, [*named, *more])
        for built in (
            lambda: build(config.optimizer, params(), 0.1),
            lambda: model_builder.build(config.model.name, config.model.args, {"num_classes": 2}, torch.zeros(1, 3)),
        ):
            try:
                built()
            except ConfigError as error:
                yield str(loader.placed(error, config))

    of_optimizer, of_model = problems()
    for text, key in ((of_optimizer, "optimizer.args"), (of_model, "model.args")):
        assert f": {key}." in text
        assert f"; to drop those of {file}, set {key}=null" in text
    assert [*problems("optimizer.args=null", "model.args=null")] == []
    (typed,) = problems("model.args=null", "optimizer.args=null", "optimizer.args={amsgrad: true}")
    assert "to drop" not in typed


@pytest.mark.parametrize("name", sorted(set(built_in()) - {"sparseadam"}))
def test_default_arguments_can_be_written(name):
    """Each argument, with the value that it has anyway."""
    takes = inspect.signature(built_in()[name]).parameters.items()
    for key, parameter in takes:
        if key not in ("params", "lr"):
            value = json.loads(json.dumps(parameter.default))  # as from YAML
            build(OptimizerSection(name=name, args={key: value}), [nn.Parameter(torch.ones(2, 2))], 0.1)


def test_no_parameters():
    with pytest.raises(ConfigError, match="empty parameter list"):
        build(OptimizerSection(), [], 0.1)


@pytest.mark.parametrize(("scaling", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_scaled_lr(scaling, expected):
    section = OptimizerSection(lr=0.1, lr_scaling=scaling, lr_base_batch=None if scaling == "none" else 64)
    assert scaled_lr(section, 256) == pytest.approx(expected)
    assert scaled_lr(section, 64) == pytest.approx(0.1)
    assert scaled_lr(section, 16) == pytest.approx(0.1 * {"none": 1, "linear": 1 / 4, "sqrt": 1 / 2}[scaling])
