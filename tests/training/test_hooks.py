"""Hooks: what is refused early, when they are called, how they end training, and errors in them.

tests/end_to_end/test_hooks.py kills and resumes runs with hooks.
"""

from __future__ import annotations

import json
import re
from collections import deque
from pathlib import Path

import pytest
import torch

from harness.config import loader
from harness.errors import EXIT_OWN_CODE, EXIT_USAGE, ConfigError, HarnessError, TrainingError
from harness.training import hooks, loop
from harness.training.check import preflight
from harness.training.checkpoints import checkpointing
from tests.fixtures import make_config, write_rows

HERE = "tests.training.test_hooks"
seen: list[tuple] = []


class Records:
    def __init__(self, ends=()):
        self.ends = dict(ends)

    def before_training(self, run):
        seen.append(("start", run.state.step))
        return self.ends.get("training")

    def after_step(self, run):
        grads = [param.grad for param in run.module.parameters() if param.grad is not None]
        seen.append(("step", run.state.step, run.state.skipped, len(grads)))
        return self.ends.get("step") if run.state.step == 4 else None

    def after_evaluation(self, run, report):
        seen.append(("evaluation", run.state.step, round(report["loss"], 6)))
        return self.ends.get("evaluation")

    def before_checkpoint(self, run):
        seen.append(("checkpoint", run.state.step))
        return self.ends.get("checkpoint")


class Fails:
    def __init__(self, early=None):
        if early:
            raise {"ValueError": ValueError, "OSError": OSError}[early]("no such file")

    def after_step(self, run):
        return {}["absent"]


class Stateful:
    value = 3

    def after_step(self, run): ...

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class OnlyState:
    value = 3
    state_dict, load_state_dict = Stateful.state_dict, Stateful.load_state_dict


class ForgetsReturn(Stateful):
    def state_dict(self):
        self.saved = {"value": self.value}


class MisspellsState(Stateful):
    def state_dict(self):
        return {"value": self.valeu}


class MadeLater(MisspellsState):
    def before_training(self, run):
        self.valeu = 3


class OfList:
    def __init__(self):
        self.values = [1]

    def after_step(self, run): ...

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = state


class Draws:
    def __init__(self):
        self.drawn = torch.rand(3).tolist()

    def after_step(self, run): ...


class Nothing: ...


class Misspelled:
    def after_steps(self, run): ...


class OfNoArguments:
    def after_step(self): ...


class HalfState:
    def after_step(self, run): ...

    def state_dict(self): ...


def function(run): ...


def at(text: str) -> str:
    """The start of an error in the first line of this file that has ``text``."""
    lines = Path(__file__).read_text().splitlines()
    return f"tests/training/test_hooks.py:{next(n for n, line in enumerate(lines, 1) if text in line)}: "


@pytest.fixture
def start(tmp_path, built):
    """A function that builds a run of 3 epochs of 3 steps with hooks."""
    seen.clear()
    write_rows(tmp_path, "train", 12)
    write_rows(tmp_path, "eval", 4)
    train = {"epochs": 3, "deterministic": False, "log_every": 2}
    return lambda *listed, **sections: built(
        make_config(tmp_path, **{"hooks": list(listed), "train": train, "batch": {"global": 4}, **sections})
    )


def test_when_they_are_called(start):
    run = start(f"{HERE}.Records", f"{HERE}.Stateful", checkpoint={"every": 2})
    assert run.hooks.describe() == {
        "hooks": f"{HERE}.Records (before_training, after_step, after_evaluation, before_checkpoint), "
        f"{HERE}.Stateful (after_step, state_dict)"
    }
    assert loop.train(run)
    assert [entry[:2] for entry in seen[:8]] == [
        ("start", 0), ("step", 1), ("step", 2), ("checkpoint", 2), ("step", 3), ("checkpoint", 3), ("evaluation", 3),
        ("step", 4),
    ]  # fmt: skip
    assert all(entry[3] > 0 for entry in seen if entry[0] == "step"), "the gradients are there"
    assert [entry[1] for entry in seen if entry[0] == "step"] == list(range(1, 10))


class Clock:
    def before_checkpoint(self, run):
        seen.append((run.state.step, run.meter.is_running))


def test_only_a_checkpoint_between_two_steps_of_an_epoch_is_training_time(start):
    run = start(f"{HERE}.Clock", checkpoint={"every": 2}, train={"epochs": 1, "log_every": 1, "deterministic": False,
                "evaluate_every": "3 steps"}, batch={"global": 2})  # fmt: skip
    assert loop.train(run)
    assert seen == [(2, True), (3, False), (4, True), (6, False)]
    lines = [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]
    cost = {line["step"]: line["cost"].get("checkpoint", 0) > 0 for line in lines if line["split"] == "train"}
    assert cost == {1: False, 2: False, 3: True, 4: False, 5: True, 6: False}


def test_training_begins_before_the_first_checkpoint_of_a_run_that_resumed_from_another(start):
    first = start(train={"epochs": 1, "deterministic": False})
    assert loop.train(first)
    run = start(f"{HERE}.Records", name="second",
                checkpoint={"resume": str(first.checkpoints.newest())})  # fmt: skip
    assert loop.train(run)
    assert seen[:2] == [("start", 3), ("checkpoint", 3)]


@pytest.mark.parametrize(("when", "step", "lines"), [("step", 4, [2, 3, 4]), ("evaluation", 3, [2, 3])])
def test_a_reason_ends_training(start, when, step, lines):
    """With a checkpoint, a last line of the log, and an evaluation of that step."""
    run = start({"name": f"{HERE}.Records", "args": {"ends": {when: "long enough"}}})
    assert loop.train(run)
    assert (run.state.step, run.state.ended) == (step, "long enough")
    assert run.finished()
    summary = json.loads((run.folder.path / "summary.json").read_text())
    assert (summary["finished"], summary["ended_early"]) == (True, "long enough")
    assert run.state.history[-1]["step"] == step
    log = [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log if entry["split"] == "train"] == lines
    content = run.checkpoints.read(run.checkpoints.newest(), False, [])
    assert content["state"]["step"] == step
    assert content["state"]["ended"] == ("long enough" if when == "step" else "")
    run.state.forget_evaluations()
    assert not run.finished()
    assert (run.state.best, run.state.best_step, run.state.history) == (None, 0, [])


@pytest.mark.parametrize("when", ["training", "step", "evaluation", "checkpoint"])
def test_what_they_must_not_return(start, when):
    value = "now" if when in ("training", "checkpoint") else True
    run = start({"name": f"{HERE}.Records", "args": {"ends": {when: value}}})
    named = f"{'before' if value == 'now' else 'after'}_{when}"
    with pytest.raises(TrainingError, match=f"hooks.0: {named} of the hook {HERE}.Records returned {value!r}"):
        loop.train(run)


def test_state_of_an_object_without_calls_is_saved_and_restored(start):
    run = start(f"{HERE}.OnlyState")
    run.hooks.all[0].object.value = 4
    again = start(f"{HERE}.OnlyState", name="again")
    again.hooks.load_state_dict(run.hooks.state_dict())
    assert again.hooks.all[0].object.value == 4


def test_their_state_is_plain_data(start, monkeypatch):
    run = start(f"{HERE}.Stateful", f"{HERE}.Stateful")
    run.hooks.all[0].object.value, run.hooks.all[1].object.value = 4, [5]
    saved = run.hooks.state_dict()
    run.hooks.all[1].object.value.append(6)
    again = start({"name": f"{HERE}.Stateful", "args": None}, f"{HERE}.Stateful", name="again")
    again.hooks.load_state_dict(saved)
    assert [hook.object.value for hook in again.hooks.all] == [4, [5]]
    run.hooks.all[0].object.value = deque([1])
    what = re.escape(f"hooks.0: state_dict() of the hook {HERE}.Stateful['value'] is a collections.deque")
    with pytest.raises(TrainingError, match=what):
        checkpointing.save(run)


class Forgetful:
    def __init__(self):
        self.count, self.same, self.weight, self.rows = 0, [1], None, deque()

    def after_step(self, run):
        self.count += 1
        self.last = torch.ones(2) * self.count
        self.weight = next(run.module.parameters())
        self.rows.append(1)


class MakesAgain(Forgetful):
    def before_training(self, run):
        self.count = run.state.step


class Remembers(Forgetful):
    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


def test_attributes_that_training_changes_and_no_checkpoint_holds(start, caplog):
    """Once for each hook, and neither of weights nor of what is not changed."""
    run = start(*(f"{HERE}.{each}" for each in ("Forgetful", "MakesAgain", "Remembers")), checkpoint={"every": 1})
    checkpointing.save(run)
    assert not caplog.messages
    assert loop.train(run)
    told = [message for message in caplog.messages if "no checkpoint holds" in message]
    assert [message.partition(", which no")[0] for message in told] == [
        f"training changes count, last of the hook {HERE}.Forgetful"
    ]
    assert "which returns {'count': self.count, 'last': self.last}, and load_state_dict(state)" in told[0]


def test_check_tries_their_state(tmp_path):
    """Unless it may be made when training starts."""
    write_rows(tmp_path, "train", 12)
    write_rows(tmp_path, "eval", 4)
    names = [f"{HERE}.{each.__name__}" for each in (ForgetsReturn, MisspellsState, MadeLater)]
    config = make_config(tmp_path, hooks=names, train={"deterministic": False})
    path = tmp_path / "x.yaml"
    path.write_text(loader.to_text(config))
    plan = preflight.examine(str(path), [], 1, 1.0)
    (forgets,) = map(str, plan.errors)
    assert forgets.startswith(f"{path}:")
    assert f"state_dict() of the hook {names[0]} returned None" in forgets
    warned = f"{at('self.valeu}')}before training, the hook {names[1]} fails in state_dict: AttributeError"
    assert plan.facts["warning"].startswith(warned)
    assert names[2] not in plan.facts["warning"]
    assert "the methods of hooks except state_dict" in "; ".join(plan.untried)


def test_their_state_may_be_no_dict(start):
    run = start(f"{HERE}.OfList")
    run.hooks.all[0].object.values.append(2)
    again = start(f"{HERE}.OfList", name="again")
    again.hooks.load_state_dict(run.hooks.state_dict())
    assert again.hooks.all[0].object.values == [1, 2]


def test_an_error_names_the_line(start):
    with pytest.raises(TrainingError, match="KeyError: 'absent'") as caught:
        loop.train(start(f"{HERE}.Fails"))
    assert str(caught.value).startswith(f"{at('return {}[')}the hook {HERE}.Fails fails in after_step: KeyError")


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        ("no_package.Absent", "hooks.0: the hook 'no_package.Absent' cannot be imported (ModuleNotFoundError"),
        (f"{HERE}.function", f"hooks.0: {HERE}.function is not a class"),
        (HERE, f"hooks.0: {HERE} is not a class"),
        (f"{HERE}.Nothing", f"{at('class Nothing')}{HERE}.Nothing has no method of a hook\n  -> define any of before"),
        (f"{HERE}.Mispelled", f"{HERE}' has no attribute 'Mispelled')\n  -> did you mean {HERE}.Misspelled?"),
        (f"{HERE}.Misspelled", f"{at('def after_steps(')}{HERE}.Misspelled has after_steps, which is never called\n"),
        (f"{HERE}.Misspelled", "which is never called\n  -> did you mean after_step?"),
        (f"{HERE}.OfNoArguments", f"{at('def after_step(self):')}after_step of {HERE}.OfNoArguments cannot be called"),
        (f"{HERE}.HalfState", f"{at('class HalfState')}{HERE}.HalfState has only one of state_dict and "),
        ({"name": f"{HERE}.Records", "args": {"end": 1}}, "hooks.0.args.end: tests.training.test_hooks.Records has"),
        ({"name": "tests.end_to_end.hooks.SavedDrift", "args": {"end": 1, "of": 2}}, "has no argument of"),
        ({"name": f"{HERE}.Fails", "args": {"early": "ValueError"}}, f"{at('raise {')}the hook {HERE}.Fails cannot be"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_hook(tmp_path, hook, problem):
    """``check`` finds it, beside other problems."""
    write_rows(tmp_path, "train", 12)
    write_rows(tmp_path, "eval", 4)
    config = make_config(tmp_path, hooks=[f"{HERE}.Records", hook], train={"deterministic": False})
    with pytest.raises(ConfigError) as caught:
        hooks.build(config.hooks[1:])
    assert problem in str(caught.value)
    path = tmp_path / "x.yaml"
    path.write_text(loader.to_text(config))
    assert loader.load(path) == config
    assert hooks.build(config.hooks[:1]).all
    plan = preflight.examine(str(path), ["model.name=absent"], 1, 0.0)
    assert len(plan.errors) == 2, plan.errors
    assert any(problem.replace("hooks.0", "hooks.1") in str(error) for error in plan.errors)


def test_it_is_refused_before_the_data_is_read(start, tmp_path):
    (tmp_path / "train.csv").unlink()
    with pytest.raises(ConfigError, match="Misspelled has after_steps, which is never called"):
        start(f"{HERE}.Misspelled")


@pytest.mark.parametrize(("early", "code"), [("ValueError", EXIT_USAGE), ("OSError", EXIT_OWN_CODE)])
def test_a_constructor_that_fails(start, early, code):
    with pytest.raises(HarnessError, match="no such file\n  -> see its __init__ and hooks.0.args") as caught:
        start({"name": f"{HERE}.Fails", "args": {"early": early}})
    assert (caught.value.where, caught.value.exit_code) == (at("raise {").removesuffix(": "), code)


def test_what_a_constructor_draws_depends_only_on_the_seed(start):
    drawn = [start(f"{HERE}.Draws", name=name).hooks.all[0].object.drawn for name in ("one", "two")]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("[Unfreeze]", "hooks.0: 'Unfreeze' is not allowed; name your class with its module, as in my_module.Unfreeze"),
        ("[{name: Unfreeze}]", "hooks.0: 'Unfreeze' is not allowed; name"),
        ("mine.Unfreeze", "hooks: it should be a list"),
        ("[{name: mine.Unfreeze, arg: {}}]", "hooks.0.arg: unknown key; did you mean hooks.0.args?"),
        ("[3]", "hooks.0: it should be a section of settings"),
    ],
)
def test_the_setting_is_checked_at_its_line(tmp_path, written, problem):
    (tmp_path / "x.yaml").write_text(f"task: {{name: mnist}}\nname: x\nbatch: {{global: 8}}\nhooks: {written}\n")
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        loader.load(tmp_path / "x.yaml")
    assert "x.yaml:4: hooks" in str(caught.value)
