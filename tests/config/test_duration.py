"""Lengths in steps or epochs: what they mean, and at which steps their intervals end."""

from __future__ import annotations

from fractions import Fraction

import pytest

from harness.config import loader
from harness.config.duration import Duration, RunPosition
from harness.errors import ConfigError

START = "task: {name: mnist}\nname: x\nbatch: {global: 8}\n"


@pytest.mark.parametrize(
    ("written", "bare", "amount", "unit"),
    [
        (3, "steps", 3, "steps"),
        (3, "epochs", 3, "epochs"),
        (0.25, "epochs", Fraction(1, 4), "epochs"),
        ("500 steps", "epochs", 500, "steps"),
        ("1 step", "epochs", 1, "steps"),
        ("2 epochs", "steps", 2, "epochs"),
        ("0.1 epochs", "steps", Fraction(1, 10), "epochs"),
    ],
)
def test_what_is_written(written, bare, amount, unit):
    found = Duration.parse(written, bare)
    assert (found.amount, found.unit, found.written) == (amount, unit, written)


@pytest.mark.parametrize(
    "written", [0, -1, 2.5, "0 steps", "2.5 steps", "1e3 steps", "-1 epochs", "many", True, None, []]
)
def test_what_is_refused(written):
    with pytest.raises(ValueError, match=r'is not allowed; write a whole number of steps above 0, "500 steps"'):
        Duration.parse(written, "steps")


@pytest.mark.parametrize(
    ("written", "per_epoch", "ends"),
    [
        ("4 steps", 10, [4, 8, 12, 16, 20]),
        ("1 epochs", 10, [10, 20]),
        ("0.25 epochs", 10, [3, 5, 8, 10, 13, 15, 18, 20]),
        ("0.1 epochs", 3, [1, 2, 3, 4, 5, 6]),
        ("1.5 epochs", 5, [8]),
        ("7 epochs", 2, []),
    ],
)
def test_where_intervals_end(written, per_epoch, ends):
    every, found = Duration.parse(written, "steps"), []
    for step in range(2 * per_epoch):
        left = every.steps_left(RunPosition(step, step // per_epoch, step % per_epoch, per_epoch))
        assert left >= 1
        found += [step + 1] if left == 1 else []
    assert found == ends


def test_whole_epochs_end_with_epochs_of_another_size():
    """A run that was resumed on another number of ranks: 35 steps in 3 epochs, now 8 per epoch."""
    assert Duration.parse(2, "epochs").steps_left(RunPosition(35, 3, 0, 8)) == 8
    assert Duration.parse(2, "epochs").steps(8) == 16


def test_settings(tmp_path):
    path = tmp_path / "x.yaml"
    lengths = "{evaluate_every: 0.5 epochs, log_every: 20 steps, max_steps: 30}"
    path.write_text(f"{START}train: {lengths}\ncheckpoint: {{every: 2 epochs}}\n")
    config = loader.load(path)
    assert config.train.epochs is None
    assert config.train.evaluate_every == Duration(Fraction(1, 2), "epochs", "0.5 epochs")
    path.write_text(loader.to_text(config))
    assert loader.load(path) == config
    assert loader.as_tree(config)["checkpoint"]["every"] == "2 epochs"
    assert loader.load(path, ["train.epochs=3", "train.max_steps=null"]).train.epochs == 3
    with pytest.raises(
        ConfigError, match=r"train.epochs: train.epochs and train.max_steps are null, so training would never end"
    ):
        loader.load(path, ["train.max_steps=null"])
    with pytest.raises(ConfigError, match=r"checkpoint.every: 'often' is not allowed; write a whole number of steps"):
        loader.load(path, ["checkpoint.every=often"])


def test_epochs_have_a_default_without_max_steps(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(START)
    assert loader.load(path).train.epochs == 10
    assert loader.load(path, ["train.epochs=2", "train.max_steps=9"]).train.epochs == 2
