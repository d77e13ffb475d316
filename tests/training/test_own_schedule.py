"""Schedules of the user's own: functions and LRSchedulers, their arguments, their errors, and their state."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as of_torch

from harness.config import loader
from harness.errors import ConfigError, OwnCodeError, TrainingError
from harness.training import counting, loop
from harness.training.checkpoints import checkpointing
from harness.training.optimizer import own_schedule
from tests.fixtures import make_config, write_rows

OWN = """
from collections import deque

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

def triangle(update, total, *, low: float = 0.0, broken: bool = False):
    if broken:
        return 1 / (7 - update)
    return low + (1 - low) * (1 - abs(2 * update / total - 1))

def negative(update, total):
    return -1.0 if update == 5 else 1.0

def nothing(update, total):
    if update < 5:
        return 1.0

def of_one(update): ...

class Other: ...

def odd(update, total, *, other: Other): ...

class Wave(LRScheduler):
    def __init__(self, optimizer, period: int = 3):
        self.period, self.rising = period, True
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch and self.last_epoch % self.period == 0:
            self.rising = not self.rising
        return [group["lr"] * (2.0 if self.rising else 0.5) if self.last_epoch else group["lr"]
                for group in self.optimizer.param_groups]

class Unsaved(Wave):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.seen = deque([1])

def warm(optimizer, total_iters: int, share: float = 0.5) -> LRScheduler:
    first = lr_scheduler.ConstantLR(optimizer, share, total_iters // 2)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.5)], [total_iters // 2])

def wrong(optimizer) -> LRScheduler:
    return 3

def line(update, total):
    return 1 - update / (total - 1)
"""
TASK = "task: {name: mnist}\nname: x\nbatch: {global: 8}\n"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A function that returns the schedule of a configuration, for 12 updates."""
    (tmp_path / "own_rates.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rates", raising=False)  # of another test, whose folder is gone
    monkeypatch.chdir(tmp_path)

    def made(section: str, *overrides: str, total: int = 12):
        path = tmp_path / "x.yaml"
        path.write_text(f"{TASK}schedule: {section}\n")
        config = loader.load(path, ["optimizer.lr=1.0", *overrides])
        assert loader.load(path, ["optimizer.lr=1.0", *overrides]) == config
        path.write_text(loader.to_text(config))
        assert loader.load(path).schedule == config.schedule  # config.yaml of a run folder
        schedule = own_schedule.build(config, 2.0, 10, total)
        schedule.require_call()
        return schedule

    return made


def test_a_function_returns_the_factor_after_the_warm_up(made):
    rates = made("{name: own_rates.triangle, args: {low: 0.2}, warmup: 2 steps}")
    assert [rates.lr(step) for step in (0, 1, 2, 7, 12)] == pytest.approx([1.0, 2.0, 0.4, 2.0, 0.4])
    assert (
        rates.describe() == "own_rates.triangle, 1 at the start, 2 at the peak (update 2), 0.72 at the end (update 12)"
    )


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("{name: own_rates.triangle, args: {lo: 0.2}}", "x.yaml:4: schedule.args.lo: unknown key; did you mean sch"),
        ("{name: own_rates.triangle, args: {low: x}}", "x.yaml:4: schedule.args.low: it should be a valid number"),
        ("{name: own_rates.odd}", "the parameters of own_rates.odd cannot be settings"),
        ("{name: own_rates.of_one}", "x.yaml:4: schedule.name: the schedule 'own_rates.of_one' takes 1 positional"),
        ("{name: own_rates.negative}", "schedule.name: the schedule own_rates.negative returns -1 times optimizer.lr"),
        ("{name: own_rates.triangle, args: {broken: true}}",
         "own_rates.py:9: the schedule own_rates.triangle fails at update 8: ZeroDivisionError: "),
        ("{name: own_rates.nothing, warmup: 2 steps}",
         "own_rates.py:15: the schedule own_rates.nothing returned None at update 8"),
        ("{name: torch.optim.lr_scheduler.OneCycleLR, args: {pct_start: 0.5}}",
         "x.yaml:4: schedule.args.max_lr: required, but not set"),
        ("{name: torch.optim.lr_scheduler.OneCycleLR, args: {max_lr: 1.0, last_epoch: 3}}",
         "x.yaml:4: schedule.args.last_epoch: unknown key"),
        ("{name: torch.optim.lr_scheduler.OneCycleLR, args: {max_lr: 1.0, total_steps: 5}}",
         "schedule: the schedule torch.optim.lr_scheduler.OneCycleLR fails at update 7: ValueError: Tried to step 6"),
        ("{name: torch.optim.lr_scheduler.ReduceLROnPlateau}",
         "x.yaml:4: schedule.name: torch.optim.lr_scheduler.ReduceLROnPlateau needs metrics at each step, but a "
         "schedule follows the updates; schedule.name=plateau is"),
        ("{name: own_rates.wrong}", "schedule.name: own_rates.wrong returns an object of type int, not an LRScheduler"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_early(made, section, problem):
    with pytest.raises(OwnCodeError if "own_rates.py:" in problem else ConfigError, match=re.escape(problem)):
        made(section)


def test_no_rate_is_refused_when_it_is_used(made, monkeypatch):
    """Later than the updates that are computed before the run. After the last update, none is used."""
    monkeypatch.setattr(own_schedule, "_FORESEEN", 4)
    rates = made("{name: own_rates.negative}")
    with pytest.raises(ConfigError, match="own_rates.negative returns -1 times optimizer.lr at update 6"):
        rates.lr(5)
    assert made("{name: own_rates.line}").lr(12) < 0


def test_a_state_that_no_checkpoint_holds_is_refused(made):
    with pytest.raises(
        TrainingError, match=r"schedule.name: the state of own_rates.Unsaved\['scheduler'\]\['seen'\] is"
    ):
        made("{name: own_rates.Unsaved}").state_dict()


@pytest.mark.parametrize(
    ("name", "args", "make"),
    [
        ("torch.optim.lr_scheduler.OneCycleLR", "{max_lr: 0.5}", lambda o: of_torch.OneCycleLR(o, 0.5, 12)),
        ("torch.optim.lr_scheduler.OneCycleLR", "{max_lr: 0.5, epochs: 3, steps_per_epoch: 5}",
         lambda o: of_torch.OneCycleLR(o, 0.5, epochs=3, steps_per_epoch=5)),
        ("torch.optim.lr_scheduler.LinearLR", "{start_factor: 0.5}",
         lambda o: of_torch.LinearLR(o, 0.5, total_iters=12)),
        ("torch.optim.lr_scheduler.PolynomialLR", "{total_iters: 4}", lambda o: of_torch.PolynomialLR(o, 4)),
        ("torch.optim.lr_scheduler.CosineAnnealingLR", "{}", lambda o: of_torch.CosineAnnealingLR(o, 12)),
        ("torch.optim.lr_scheduler.MultiStepLR", "{milestones: [2, 5]}", lambda o: of_torch.MultiStepLR(o, [2, 5])),
        ("torch.optim.lr_scheduler.CyclicLR", "{base_lr: 0.1, max_lr: 0.5, step_size_up: 3}",
         lambda o: of_torch.CyclicLR(o, 0.1, 0.5, 3)),
        ("own_rates.warm", "{share: 0.25}", None),
        ("own_rates.Wave", "{period: 2}", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_scheduler_of_torch(made, name, args, make, optimizer):
    """Its rates and momentum, scaled, on the groups of the run; and from a state in the middle, as from the start."""
    schedule = made(f"{{name: {name}, args: {args}}}", f"optimizer.name={optimizer}")
    groups = [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [nn.Parameter(torch.zeros(1))], "lr_scale": 0.5}]
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    ours, theirs = kind(groups, lr=7.0), kind([nn.Parameter(torch.zeros(1))], lr=1.0)
    expected = make(theirs) if make else None
    key = "momentum" if optimizer == "sgd" else "betas"
    resumed = None
    for step in range(12):
        assert schedule.set_lr(ours, step) == schedule.foreseen(step) == ours.param_groups[0]["lr"]
        assert ours.param_groups[1]["lr"] == ours.param_groups[0]["lr"] / 2
        if expected is not None:
            assert ours.param_groups[0]["lr"] == 2.0 * theirs.param_groups[0]["lr"]
            assert ours.param_groups[1][key] == theirs.param_groups[0][key]
            theirs.step()
            expected.step()
        if resumed:
            assert resumed.lr(step) == schedule.lr(step)
            assert resumed.momentum(step) == schedule.momentum(step)
        if step == 5:
            state = schedule.state_dict()
            resumed = made(f"{{name: {name}, args: {args}}}", f"optimizer.name={optimizer}")
            resumed.load_state_dict(state)


def test_a_scheduler_counts_after_the_warm_up_and_stretches(made):
    section = "{name: torch.optim.lr_scheduler.LinearLR, args: {start_factor: 1.0, end_factor: 0.0}, warmup: 2 steps}"
    schedule = made(section)
    assert [schedule.lr(step) for step in (0, 1, 2, 7)] == pytest.approx([1.0, 2.0, 2.0, 1.0])
    longer = made(section, total=22)
    longer.load_state_dict(schedule.state_dict())  # of a run of another length: it starts anew
    assert longer.lr(12) == pytest.approx(1.0)
    assert schedule.describe().endswith("0.2 at the end (update 12)")


def test_a_skipped_step_does_not_advance_it(tmp_path, built, monkeypatch):
    """And a checkpoint holds its state."""
    (tmp_path / "own_rates.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    write_rows(tmp_path, "train", 24)
    write_rows(tmp_path, "eval", 4)
    sections = {
        "schedule": {"name": "own_rates.Wave", "args": {"period": 2}},
        "train": {"epochs": 1, "deterministic": False},
    }
    run = built(make_config(tmp_path, **sections))
    monkeypatch.setattr(type(run.precision), "skip_flag", lambda self, optimizer: run.state.step in (1, 2))
    rates = []
    for group in run.train_data.groups(0, []):
        loop.step(run, group)
        rates.append(run.lr)
    counting.catch_up(run)
    assert rates == [rates[0] * factor for factor in (1, 2, 2, 2, 1, 0.5)]
    checkpointing.save(run)
    run.writer.wait()
    content = run.checkpoints.read(run.checkpoints.newest(), False, [])
    assert content["schedule"]["updates"] == run.state.applied - 1
    assert content["schedule"]["scheduler"]["period"] == 2
