"""MixUp and CutMix: what is mixed, in which shares, and that the draws depend on the seed and the step alone."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torchvision.transforms import v2

from harness import cli
from harness.config.schema import TrainSection
from harness.errors import ConfigError
from harness.training.rows import mixing
from harness.training.rows.mixing import mixed, mixed_loss
from tests import datasets
from tests.end_to_end.experiment import of_split
from tests.fixtures import settings, write_rows, write_yaml
from tests.ranks import run_ranks

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40))
SETTINGS = dict(seed=st.integers(0, 2**32 - 1), step=st.integers(0, 2**31), alpha=st.floats(0.05, 8.0))


def images(*shape: int) -> torch.Tensor:
    """Every pixel of every row differs."""
    return torch.arange(float(np.prod(shape))).view(shape)


def test_off():
    inputs = images(2, 1, 4, 4)
    found, own = mixed(TrainSection(), 0, 0, inputs)
    assert found is inputs
    assert own == 1.0


@given(shape=SHAPES, **SETTINGS)
def test_mixup_is_the_weighted_sum_of_two_rows(shape, seed, step, alpha):
    inputs = images(*shape)
    found, own = mixed(TrainSection(mixup=alpha), seed, step, inputs)
    assert 0 <= own <= 1
    expected = own * inputs + (1 - own) * inputs.roll(1, 0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * inputs.max().item())


@given(shape=SHAPES, **SETTINGS)
def test_cutmix_pastes_a_box_and_its_share_is_counted_in_pixels(shape, seed, step, alpha):
    inputs = images(*shape)
    before = inputs.clone()
    found, own = mixed(TrainSection(cutmix=alpha), seed, step, inputs)
    assert torch.equal(inputs, before)
    pasted = found != inputs
    assert torch.equal(found[pasted], inputs.roll(1, 0)[pasted])
    if shape[0] > 1:
        assert pasted.float().mean().item() == pytest.approx(1 - own, abs=1e-6)
        rows, columns = pasted[0, 0].any(1), pasted[0, 0].any(0)
        assert torch.equal(pasted, (rows[:, None] & columns).expand(shape)), "one box, the same in every row"
        for side in (rows, columns):
            assert side.diff(prepend=torch.tensor([False]), append=torch.tensor([False])).sum() in (0, 2)


@pytest.mark.slow
def test_shares_have_the_distribution_of_torchvision():
    """Over 4000 steps: moments of the share, and how often each kind is drawn."""
    inputs = images(2, 3, 24, 24)
    torch.manual_seed(0)
    for name, alpha, theirs in (("mixup", 0.2, v2.MixUp), ("cutmix", 1.0, v2.CutMix)):
        transform, targets = theirs(alpha=alpha, num_classes=2), torch.tensor([0, 1])
        wanted = np.array([transform(inputs, targets)[1][0, 0].item() for _ in range(4000)])
        section = TrainSection.model_validate({name: alpha})
        found = np.array([mixed(section, 1, step, inputs)[1] for step in range(4000)])
        assert found.mean() == pytest.approx(wanted.mean(), abs=0.03)
        assert found.std() == pytest.approx(wanted.std(), abs=0.03)
    both = TrainSection(mixup=0.2, cutmix=1.0)
    pasted = [(mixed(both, 1, step, inputs)[0] % 1 == 0).all().item() for step in range(1000)]
    assert np.mean(pasted) == pytest.approx(0.5, abs=0.06)


def test_draws_depend_on_seed_and_step_alone():
    inputs, both = images(4, 1, 9, 9), TrainSection(mixup=0.5, cutmix=1.0)
    torch.manual_seed(3)
    np.random.seed(3)
    states = torch.get_rng_state(), np.random.get_state()[1]
    shares = {(seed, step): mixed(both, seed, step, inputs)[1] for seed in range(3) for step in range(20)}
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert len({share for share in shares.values() if share < 1}) > 45
    for (seed, step), share in reversed(shares.items()):  # in any order, for any batch
        assert mixed(both, seed, step, inputs[:2])[1] == share


@pytest.mark.parametrize("section", [{"mixup": 0.5}, {"cutmix": 1.0}])
def test_channels_last_stays(section):
    inputs = images(4, 3, 8, 6).contiguous(memory_format=torch.channels_last)
    for step in range(5):
        found, _ = mixed(TrainSection.model_validate(section), 0, step, inputs)
        assert found.is_contiguous(memory_format=torch.channels_last)


def test_loss_is_that_of_mixed_labels():
    torch.manual_seed(0)
    outputs, targets = torch.randn(6, 4, requires_grad=True), torch.tensor([0, 1, 2, 3, 1, 0])
    soft = functional.one_hot(targets, 4).float()
    for smoothing in (0.0, 0.1):

        def loss(outputs, targets, smoothing=smoothing):
            return functional.cross_entropy(outputs, targets, label_smoothing=smoothing)

        expected = loss(outputs, 0.3 * soft + 0.7 * soft.roll(1, 0))
        torch.testing.assert_close(mixed_loss(loss, outputs, targets, 0.3), expected)
        assert torch.equal(mixed_loss(loss, outputs, targets, 1.0), loss(outputs, targets))
    found = mixed_loss(functional.mse_loss, outputs, torch.randn(6, 4), 0.5)  # any loss of rows
    assert torch.autograd.grad(found, outputs)[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("section", "inputs", "message", "hint"),
    [
        ({"mixup": 0.2}, torch.zeros(2, 8, dtype=torch.int64), "train.mixup: int64 inputs cannot be mixed", "mixup=0"),
        ({"cutmix": 1.0}, torch.zeros(2, 8, dtype=torch.int64), "train.cutmix: int64 inputs", "train.cutmix=0"),
        ({"mixup": 0.2, "cutmix": 1.0}, torch.zeros(2, 3, 8), "train.cutmix: CutMix needs images, but the shape of "
                                                              "a row is 3x8",
         "use train.mixup"),
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_mixed(section, inputs, message, hint):
    with pytest.raises(ConfigError) as caught:
        mixing.require(TrainSection.model_validate(section), inputs)
    assert message in str(caught.value)
    assert hint in caught.value.hint


def codes(*commands: list[str]) -> tuple[list[int], str]:
    """The exit codes of these commands and what they print, in a process of their own, since training sets global
    switches of torch."""
    return run_ranks(1, _codes, list(commands), group=False)[0]


def _codes(commands: list[list[str]]) -> tuple[list[int], str]:
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        return [cli.main(words) for words in commands], printed.getvalue()


def test_task_without_images_is_refused_before_training(tmp_path):
    names = datasets.write_names(tmp_path / "names.txt")
    task = {"name": "pet_names", "names": str(names), "rows": "names"}
    tree = {**settings(tmp_path), "task": task, "model": {"name": "char_gru"}, "train": {"mixup": 0.2, "epochs": 1}}
    config = str(write_yaml(tmp_path / "x.yaml", tree))
    found, printed = codes(["check", "-c", config], ["train", "-c", config])
    assert found == [2, 2]
    message = "train.mixup: int64 inputs cannot be mixed; this task has no images\n  -> set train.mixup=0"
    assert printed.count(message) == 2


@pytest.mark.slow
def test_training_learns_with_both(tmp_path):
    """The logged loss is the one that is minimized; validation is not mixed."""
    write_rows(tmp_path, "train", 60)
    write_rows(tmp_path, "eval", 30)
    sections = {"batch": {"global": 10}, "precision": {"opt_level": "O0"}}
    commands = []
    for name, alphas in (("plain", {}), ("mixed", {"mixup": 1.0, "cutmix": 1.0})):
        tree = settings(tmp_path, **sections, name=name, train={"epochs": 6, "log_every": 6, **alphas})
        commands.append(["train", "-c", str(write_yaml(tmp_path / f"{name}.yaml", tree))])
    assert codes(*commands)[0] == [0, 0]
    ends = {(name, split): of_split(tmp_path / "runs" / name, split)[-1]
            for name in ("plain", "mixed") for split in ("train", "eval")}  # fmt: skip
    assert ends["plain", "eval"]["top1"] == ends["mixed", "eval"]["top1"] == 1.0
    assert ends["mixed", "train"]["loss"] > 2 * ends["plain", "train"]["loss"]
