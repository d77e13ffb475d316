"""Every schedule, point by point against torch's scheduler classes, and at its boundaries."""

from __future__ import annotations

import inspect
import math
import random

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as of_torch

from harness.config import loader, schedules, signatures
from harness.config.schema import ScheduleSection
from harness.errors import ConfigError
from harness.training.optimizer.built_in_schedule import BuiltInSchedule
from harness.training.optimizer.schedule import Plateau
from tests.conftest import ROOT

BUILT_IN = signatures.functions(schedules.BUILT_IN)


def section(name="constant", warmup=None, **args) -> ScheduleSection:
    """The section with its arguments checked, as in a loaded configuration."""
    found: ScheduleSection = schedules.section(name)(name=name, warmup=warmup, args=args)
    return found


def schedule(steps_per_epoch=10, epochs=5, peak=1.0, scale=1.0, **settings) -> BuiltInSchedule:
    return BuiltInSchedule(section(**settings), peak, scale, steps_per_epoch, steps_per_epoch * epochs)


# Against torch


def sgd(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)


def shape(name: str, rng: random.Random, optimizer, ours: dict, total: int, per_epoch: int, floor: float):
    """torch's scheduler for ``total`` steps without warm-up, with its settings added to ``ours``."""
    peak = optimizer.param_groups[0]["lr"]
    if name == "constant":
        return of_torch.ConstantLR(optimizer, factor=1.0)
    if name == "cosine":
        return of_torch.CosineAnnealingLR(optimizer, total, eta_min=floor)
    if name == "polynomial":
        ours["power"] = rng.choice([1.0, 2.0, 0.5])
        return of_torch.PolynomialLR(optimizer, total, power=ours["power"])
    if name == "cosine_restarts":
        ours |= {"cycle_epochs": rng.choice([0.5, 1.0, 2.0]), "cycle_mult": rng.choice([1, 2, 3])}
        length = round(ours["cycle_epochs"] * per_epoch)
        return of_torch.CosineAnnealingWarmRestarts(optimizer, length, ours["cycle_mult"], eta_min=floor)
    if name == "wsd":
        ours |= {"decay_ratio": rng.choice([0.1, 0.25, 0.5]), "decay_type": rng.choice(["linear", "cosine"])}
        decay = max(1, round(ours["decay_ratio"] * total))
        if ours["decay_type"] == "cosine":
            falls = of_torch.CosineAnnealingLR(optimizer, decay, eta_min=floor)
        else:
            falls = of_torch.LinearLR(optimizer, 1.0, floor / peak, total_iters=decay)
        stable = of_torch.ConstantLR(optimizer, factor=1.0)
        return of_torch.SequentialLR(optimizer, [stable, falls], milestones=[total - decay])
    raise AssertionError(name)


@pytest.mark.parametrize("number", range(25))
@pytest.mark.parametrize("name", ["constant", "cosine", "polynomial", "cosine_restarts", "wsd"])
def test_shapes_with_a_warm_up_equal_torch(name, number):
    rng = random.Random(f"{name} {number}")
    per_epoch, epochs, peak = rng.randint(4, 30), rng.randint(2, 8), 10 ** rng.uniform(-4, 1)
    floor = 0.0 if name in ("constant", "polynomial") else rng.choice([0.0, peak * rng.random()])
    warmup = rng.choice([0, 0, 2, per_epoch // 2])
    ours = {"name": name, "warmup": f"{warmup} steps" if warmup else None}
    total, optimizer = per_epoch * epochs, sgd(peak)
    if name in ("cosine", "cosine_restarts", "wsd"):
        ours["min_lr"] = floor
    theirs: of_torch.LRScheduler = shape(name, rng, optimizer, ours, total - warmup, per_epoch, floor)
    expected = [peak * (step + 1) / warmup for step in range(warmup)]  # compared with torch below
    for _ in range(total - warmup):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    found = BuiltInSchedule(section(**ours), peak, 1.0, per_epoch, total)
    assert [found.lr(step) for step in range(total)] == pytest.approx(expected, rel=1e-9, abs=1e-12 * peak)
    line = of_torch.LinearLR(sgd(peak), 1 / max(1, warmup), 1.0, total_iters=max(1, warmup - 1))
    for step in range(warmup):
        assert found.lr(step) == pytest.approx(line.get_last_lr()[0])
        line.optimizer.step()
        line.step()


@pytest.mark.parametrize("number", range(25))
def test_step_equals_torch(number):
    rng = random.Random(number)
    per_epoch, epochs = rng.randint(3, 20), rng.randint(3, 9)
    milestones = sorted(rng.sample(range(1, epochs), rng.randint(1, 2)))
    optimizer = sgd(2.0)
    theirs = of_torch.MultiStepLR(optimizer, [epoch * per_epoch for epoch in milestones], gamma=0.3)
    found = schedule(per_epoch, epochs, 2.0, name="step", milestones=milestones, gamma=0.3)
    for step in range(per_epoch * epochs):
        assert found.lr(step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("number", range(25))
def test_one_cycle_equals_torch(number):
    """The learning rate and the momentum (or beta1) of each group."""
    rng = random.Random(number)
    total, peak = rng.randint(8, 200), 10 ** rng.uniform(-4, 1)
    chosen = {
        "pct_start": rng.uniform(0.2, 0.7), "div_factor": rng.uniform(1, 50), "final_div_factor": 10.0 ** number,
        "cycle_momentum": rng.random() < 0.7, "base_momentum": 0.8, "max_momentum": rng.uniform(0.8, 0.99),
    }  # fmt: skip
    kind = rng.choice([torch.optim.SGD, torch.optim.AdamW])
    theirs, mine = (kind([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
    cycle = of_torch.OneCycleLR(theirs, peak, total_steps=total, **chosen)
    found = schedule(total, 1, peak, name="one_cycle", **chosen)
    for step in range(total):
        found.set_lr(mine, step)
        for key in ("lr", "momentum" if kind is torch.optim.SGD else "betas"):
            assert mine.param_groups[0][key] == pytest.approx(theirs.param_groups[0][key], rel=1e-9), (step, key)
        theirs.step()
        cycle.step()
    assert found.lr(total + 5) == found.lr(total - 1)


@pytest.mark.parametrize("number", range(40))
def test_plateau_equals_torch(number):
    rng = random.Random(number)
    increases = rng.random() < 0.5
    factor, patience, cooldown = rng.choice([0.1, 0.5]), rng.randint(0, 3), rng.randint(0, 3)
    threshold, floor = rng.choice([0.0, 1e-4, 0.05]), rng.choice([0.0, 0.02])
    optimizer = sgd(1.0)
    theirs = of_torch.ReduceLROnPlateau(
        optimizer, "max" if increases else "min", factor, patience, threshold, cooldown=cooldown, min_lr=floor, eps=0.0
    )
    found = schedule(
        name="plateau", min_lr=floor, factor=factor, patience=patience, threshold=threshold, cooldown=cooldown
    )
    plateau, value = Plateau(), rng.uniform(0.5, 2.0)
    for evaluation in range(60):
        value *= rng.choice([0.9, 0.99, 1.0, 1.01, 1.1])
        shown = math.nan if rng.random() < 0.05 else value
        lowered = found.after_evaluation(plateau, shown, increases, evaluation)
        before = optimizer.param_groups[0]["lr"]
        theirs.step(shown)
        after = optimizer.param_groups[0]["lr"]
        assert found.lr(evaluation, plateau.reductions) == pytest.approx(after)
        assert lowered == (after < before)


# At their boundaries


def test_warm_up_of_all_epochs():
    rates = [schedule(name="cosine", warmup=5).lr(step) for step in range(51)]
    assert rates[:50] == pytest.approx([(step + 1) / 50 for step in range(50)])
    assert rates[50] == 1.0  # not reached; and no division by zero


@pytest.mark.parametrize("name", ["cosine", "polynomial", "wsd"])
def test_a_run_that_is_extended_stays_at_the_floor(name):
    assert [schedule(name=name, min_lr=0.1).lr(step) for step in (50, 80)] == pytest.approx([0.1, 0.1])


def test_step_at_its_milestones():
    steps = schedule(name="step", milestones=[1, 2.5], gamma=0.5, warmup=0.2)
    assert [steps.lr(step) for step in (1, 2, 9, 10, 24, 25, 49)] == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert steps.lr(0) == 0.5
    steps = schedule(name="step", milestones=["10 steps", "25 steps"], gamma=0.5)
    assert [steps.lr(step) for step in (9, 10, 24, 25, 49)] == [1.0, 0.5, 0.5, 0.25, 0.25]


def test_set_lr_reaches_all_groups():
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(3))], "lr": rate} for rate in (1.0, 3.0)])
    assert schedule(warmup=1).set_lr(optimizer, 4) == 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_plateau_leaves_out_the_warm_up():
    found, plateau = schedule(name="plateau", patience=0, warmup=1), Plateau()
    assert not found.after_evaluation(plateau, 1.0, True, 9)
    assert plateau == Plateau()
    found.after_evaluation(plateau, 1.0, True, 10)
    assert found.after_evaluation(plateau, 0.5, True, 20)
    assert found.lr(20, plateau.reductions) == 0.1
    plateau.num_bad = 3
    plateau.forget_best()  # a new run that starts from this one's checkpoint keeps the learning rate
    assert plateau == Plateau(reductions=1)


def test_decay_of_wsd_is_a_share_of_what_follows_the_warm_up():
    """train.max_steps may end a run before its warm-up does."""
    short = BuiltInSchedule(section("wsd", warmup="20 steps", decay_ratio=0.8), 1.0, 1.0, 10, 25)
    assert short.lr(19) == short.lr(20) == 1.0
    assert short.lr(24) == pytest.approx(0.25)
    assert schedule(name="wsd", decay_ratio=0.4, decay_type="sqrt").lr(35) == pytest.approx(0.5)


@pytest.mark.parametrize(("warmup", "steps"), [(0.5, 5), ("5 steps", 5), ("10%", 5), ("2.5 %", 1), (None, 0)])
def test_a_warm_up_in_epochs_steps_or_a_share_of_the_run(warmup, steps):
    """Of 5 epochs with 10 steps."""
    assert schedule(name="cosine", warmup=warmup).warmup_steps == steps


@pytest.mark.parametrize("warmup", [0, "0%", "101%", "10", "%", -1])
def test_what_is_no_warm_up(warmup):
    with pytest.raises(ValueError, match='"10%" of the run; or null'):
        section(warmup=warmup)


def test_a_warm_up_that_does_not_fit():
    schedule(name="cosine", warmup="50 steps").require_fit(50)
    schedule(name="cosine", warmup="100%").require_fit(50)
    with pytest.raises(ConfigError, match=r"schedule.warmup: a warm-up of 51 updates is longer than .* of 50"):
        schedule(name="cosine", warmup="51 steps").require_fit(50)


def test_one_cycle_needs_a_momentum():
    without = torch.optim.Adagrad([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigError, match="Adagrad has none"):
        schedule(name="one_cycle").require_momentum(without)
    schedule(name="one_cycle", cycle_momentum=False).require_momentum(without)
    schedule(name="one_cycle").require_momentum(sgd(0.1))


TASK = "task: {name: mnist}\nname: x\nbatch: {global: 8}\n"


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("{name: step}", "schedule.args.milestones: required, but not set"),
        ("{name: step, args: {milestones: [2, 1]}}", "schedule.args.milestones: it should be epochs that increase"),
        ("{name: step, args: {milestones: [1, 20 steps]}}", "schedule.args.milestones: it should be epochs that incr"),
        ("{name: step, args: {milestones: [fast]}}", "schedule.args.milestones.0: 'fast' is not allowed; write a numb"),
        ("{name: plateau, args: {gamma: 0.5}}", "schedule.args.gamma: unknown key; "),
        ("{name: cosine, args: {minlr: 0.01}}", "schedule.args.minlr: unknown key; did you mean schedule.args.min_lr?"),
        ("{name: cosine, args: {min_lr: low}}", "schedule.args.min_lr: it should be a valid number"),
        ("{name: wsd, args: {decay_type: linea}}", "did you mean linear?"),
        ("{name: OneCycleLR}", "schedule.name: unknown schedule 'OneCycleLR'; did you mean one_cycle?"),
        ("{name: 3}", "schedule.name: it should be text"),
        ("{name: math.tau}", "schedule.name: the schedule 'math.tau' is neither a function nor a torch LRScheduler"),
        ("{name: math.no}", "schedule.name: the schedule 'math.no' cannot be imported"),
    ],
)
def test_arguments_are_checked_with_the_configuration(tmp_path, written, problem):
    """At their lines, and together with other problems."""
    path = tmp_path / "x.yaml"
    path.write_text(f"{TASK}schedule: {written}\ntrain: {{epoch: 3}}\n")
    with pytest.raises(ConfigError) as caught:
        loader.load(path)
    assert problem in str(caught.value)
    assert "task.name" not in str(caught.value)
    assert f"{path}:4: schedule" in str(caught.value)
    assert f"{path}:5: train.epoch: unknown key" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "constant"),
        ({"name": "cosine", "warmup": "10 steps", "min_lr": 0.01},
         "cosine, 0.1 at the start, 1 at the peak (update 10), 0.0115 at the end (update 50)"),
        ({"name": "plateau"}, "plateau, 1 at the start, multiplied by 0.1 after 11 evaluations without improvement"),
    ],
)  # fmt: skip
def test_described(settings, text):
    assert schedule(**settings).describe() == text


def test_page_names_every_schedule_and_setting():
    page = (ROOT / "docs" / "schedules.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    rows.pop("schedule.name")
    assert set(rows) == set(BUILT_IN)
    for name, function in BUILT_IN.items():
        for key in list(inspect.signature(function).parameters)[1:]:
            assert f"`{key}`" in rows[name], (name, key)
