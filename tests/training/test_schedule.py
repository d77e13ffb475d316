"""Every schedule, point by point against torch's scheduler classes, and at its boundaries."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.optim import lr_scheduler as of_torch

from harness.cli import main
from harness.config.schedule import USED_BY, ScheduleSection
from harness.data import digits
from harness.errors import ConfigError
from harness.training.schedule import Plateau, Schedule
from tests.conftest import ROOT


def schedule(steps_per_epoch=10, epochs=5, peak=1.0, floor=0.0, **section) -> Schedule:
    return Schedule(ScheduleSection(**section), peak, floor, steps_per_epoch, steps_per_epoch * epochs)


# Against torch

Drawn = tuple[Schedule, of_torch.LRScheduler, torch.optim.Optimizer]


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
        decay = round(ours["decay_ratio"] * (total + ours.get("warmup_steps", 0)))
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
    ours = {"name": name, "warmup_steps": warmup}
    total, optimizer = per_epoch * epochs, sgd(peak)
    theirs: of_torch.LRScheduler = shape(name, rng, optimizer, ours, total - warmup, per_epoch, floor)
    expected = [peak * (step + 1) / warmup for step in range(warmup)]  # compared with torch below
    for _ in range(total - warmup):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    found = Schedule(ScheduleSection(**ours), peak, floor, per_epoch, total)
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
        name="plateau", floor=floor, factor=factor, patience=patience, threshold=threshold, cooldown=cooldown
    )
    plateau, value = Plateau(), rng.uniform(0.5, 2.0)
    for evaluation in range(60):
        value *= rng.choice([0.9, 0.99, 1.0, 1.01, 1.1])
        shown = math.nan if rng.random() < 0.05 else value
        lowered = found.evaluated(plateau, shown, increases, evaluation)
        before = optimizer.param_groups[0]["lr"]
        theirs.step(shown)
        after = optimizer.param_groups[0]["lr"]
        assert found.lr(evaluation, plateau.reductions) == pytest.approx(after)
        assert lowered == (after < before)


# At their boundaries


def test_constant():
    assert {schedule().lr(step) for step in range(60)} == {1.0}


@pytest.mark.parametrize("name", ["constant", "cosine", "polynomial"])
def test_warm_up_is_linear(name):
    rates = [schedule(name=name, warmup_epochs=0.4, floor=0.2).lr(step) for step in range(6)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])  # never zero, and the peak is its last step
    assert rates[4] == 1.0  # from which the shape starts
    assert rates[5] == 1.0 if name == "constant" else rates[5] < 1.0


def test_warm_up_of_all_epochs():
    rates = [schedule(name="cosine", warmup_epochs=5).lr(step) for step in range(51)]
    assert rates[:50] == pytest.approx([(step + 1) / 50 for step in range(50)])
    assert rates[50] == 1.0  # not reached; and no division by zero


def test_cosine_falls_from_peak_to_floor():
    cosine = schedule(name="cosine", peak=2.0, floor=0.5)
    assert cosine.lr(0) == 2.0
    assert cosine.lr(25) == pytest.approx(1.25)
    assert cosine.lr(50) == pytest.approx(0.5)
    assert cosine.lr(80) == pytest.approx(0.5)  # stays there if train.epochs is raised later
    assert cosine.lr(10) == pytest.approx(0.5 + 1.5 * (1 + math.cos(math.pi / 5)) / 2)
    rates = [cosine.lr(step) for step in range(51)]
    assert rates == sorted(rates, reverse=True)


def test_polynomial():
    line = schedule(name="polynomial", floor=0.1)
    assert [line.lr(step) for step in (0, 25, 50, 60)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert schedule(name="polynomial", power=2.0).lr(25) == pytest.approx(0.25)


def test_step_at_its_milestones():
    steps = schedule(name="step", milestones=[1, 2.5], gamma=0.5, warmup_epochs=0.2)
    assert [steps.lr(step) for step in (1, 2, 9, 10, 24, 25, 49)] == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert steps.lr(0) == 0.5


def test_set_lr_reaches_all_groups():
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(3))], "lr": rate} for rate in (1.0, 3.0)])
    assert schedule(warmup_epochs=1).set_lr(optimizer, 4) == 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_plateau_leaves_out_the_warm_up():
    found, plateau = schedule(name="plateau", patience=0, warmup_epochs=1), Plateau()
    assert not found.evaluated(plateau, 1.0, True, 9)
    assert plateau == Plateau()
    found.evaluated(plateau, 1.0, True, 10)
    assert found.evaluated(plateau, 0.5, True, 20)
    assert found.lr(20, plateau.reductions) == 0.1
    plateau.forget_best()  # a new run that starts from this one's checkpoint keeps the learning rate
    assert (plateau.best, plateau.reductions) == (None, 1)


def test_decay_of_wsd_is_cut_in_a_short_trial():
    """train.max_steps may end a run before its warm-up does."""
    short = Schedule(ScheduleSection(name="wsd", warmup_steps=20, decay_ratio=0.5), 1.0, 0.0, 10, 25)
    assert short.lr(19) == short.lr(20) == 1.0
    assert short.lr(24) == pytest.approx(0.2)
    assert schedule(name="wsd", decay_ratio=0.4, decay_type="sqrt").lr(35) == pytest.approx(0.5)


def test_a_warm_up_that_does_not_fit():
    schedule(name="cosine", warmup_steps=50).require_fit(50)
    with pytest.raises(ConfigError, match=r"schedule.warmup_steps: a warm-up of 51 updates is longer than .* of 50"):
        schedule(name="cosine", warmup_steps=51).require_fit(50)
    with pytest.raises(ConfigError, match="a warm-up of 46 updates and a decay of 5 take longer than the 50 updates"):
        schedule(name="wsd", warmup_steps=46).require_fit(50)


def test_one_cycle_needs_a_momentum():
    without = torch.optim.Adagrad([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigError, match="Adagrad has none"):
        schedule(name="one_cycle").require_momentum(without)
    schedule(name="one_cycle", cycle_momentum=False).require_momentum(without)
    schedule(name="one_cycle").require_momentum(sgd(0.1))


@pytest.mark.parametrize(
    ("guess", "name"),
    [("onecycle", "one_cycle"), ("OneCycleLR", "one_cycle"), ("reduce_on_plateau", "plateau"),
     ("reduce_lr_on_plateau", "plateau"), ("ReduceLROnPlateau", "plateau"), ("cosine_with_restarts", "cosine_restarts"),
     ("CosineAnnealingWarmRestarts", "cosine_restarts"), ("warmup_stable_decay", "wsd"), ("WSD", "wsd"),
     ("cosine-annealing", "cosine"), ("multistep", "step"), ("linear", "polynomial"), ("poly", "polynomial"),
     ("constant_with_warmup", "constant"), ("Cosine", "cosine")],
)  # fmt: skip
def test_names_of_other_libraries_are_hinted(guess, name):
    with pytest.raises(ValidationError, match=f"did you mean schedule.name={name}[? ]"):
        ScheduleSection(name=guess)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({}, "constant"),
        ({"name": "cosine", "warmup_steps": 10, "floor": 0.01},
         "cosine, 0.1 at the start, 1 at the peak (update 10), 0.0115 at the end (update 50)"),
        ({"name": "polynomial"}, "polynomial, 1 at the start, 0.02 at the end (update 50)"),
        ({"name": "one_cycle"},
         "one_cycle, 0.04 at the start, 1 at the peak (update 15), 4e-06 at the end (update 50)"),
        ({"name": "plateau"}, "plateau, 1 at the start, multiplied by 0.1 after 11 evaluations without improvement"),
    ],
)  # fmt: skip
def test_described(section, text):
    assert schedule(**section).described() == text


@pytest.mark.slow
def test_page_names_every_schedule_and_setting(tmp_path, monkeypatch, capsys):
    """And its command works."""
    page = (ROOT / "docs" / "schedules.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    rows.pop("schedule.name")
    for key, names in USED_BY.items():
        assert {name for name, row in rows.items() if f"`{key}`" in row} == set(names), key
    (command,) = [line.split() for line in page.splitlines() if line.startswith("harness ")]
    command[command.index("configs/digits.yaml")] = str(ROOT / "configs" / "digits.yaml")
    digits.write(tmp_path / "data" / "digits")
    monkeypatch.chdir(tmp_path)
    assert main(command[1:]) == 0
    assert re.search(r"schedule: wsd, 0\.\d+ at the start, 0\.1 at the peak .update \d+., ", capsys.readouterr().out)
