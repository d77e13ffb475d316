"""The user's function on gradients: what it gets at each level, and when. tests/end_to_end/test_extend.py adds one."""

from __future__ import annotations

import itertools

import pytest
import torch

from harness.errors import ConfigError, TrainingError
from harness.training import loop
from harness.training.optimizer.on_gradients import OnGradients, find
from tests.fixtures import make_config, write_rows

HERE = "tests.training.test_on_gradients"
CPU = torch.device("cpu")
seen: list[tuple[int, dict[str, torch.Tensor]]] = []


def record(gradients, generator, step):
    seen.append((step, {name: gradient.clone() for name, gradient in gradients}))


def noise(gradients, generator, step):
    for _, gradient in gradients:
        gradient.normal_(generator=generator)


def spoil(gradients, generator, step):
    for _, gradient in gradients:
        gradient.fill_(torch.nan)


def returning(gradients, generator, step):
    return [(name, gradient + 1) for name, gradient in gradients]


def of_one_argument(gradients): ...


@pytest.fixture
def start(tmp_path, built):
    """A function that builds a run; its first step's batch has 4 rows."""
    seen.clear()
    write_rows(tmp_path, "train", 12)
    write_rows(tmp_path, "eval", 4)
    names = (f"run-{number}" for number in itertools.count())
    sections = {"optimizer": {"lr": 0.5}, "train": {"epochs": 1, "deterministic": False}}
    model = {"name": "small_cnn", "args": {"width": 2}}
    return lambda *overrides: built(make_config(tmp_path, overrides, name=next(names), model=model, **sections))


def first_gradients(run):
    loop.step(run, next(iter(run.train_data.groups(0, []))))
    return seen.pop()[1]


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_those_of_the_whole_step_in_float32(start, level, accumulate):
    named = f"train.on_gradients={HERE}.record"
    expected = first_gradients(start(named, "precision.opt_level=O0"))
    scale = "precision.loss_scale=1024" if level in ("O1", "O2") else "precision.loss_scale=1"
    settings = [scale, f"precision.opt_level={level}", f"batch.accumulate={accumulate}", "train.clip_norm=1e-3"]
    found = first_gradients(start(named, *settings))
    assert found.keys() == expected.keys()
    assert len(found) > 3
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        assert gradient.shape == expected[name].shape
        assert (gradient - expected[name]).abs().max() < 0.05 * largest, name


def test_what_it_changes_is_clipped_and_applied(start):
    run = start(f"train.on_gradients={HERE}.noise", "train.clip_norm=0.001", "precision.opt_level=O2",
                "precision.loss_scale=1024")  # fmt: skip
    groups = iter(run.train_data.groups(0, []))
    loop.step(run, next(groups))  # after which the masters exist
    before = [param.detach().clone() for param in run.precision.master_params(run.optimizer)]
    loop.step(run, next(groups))
    pairs = list(zip(run.precision.master_params(run.optimizer), before, strict=True))
    moved = [(param - old) / -run.lr for param, old in pairs]
    assert torch.nn.utils.get_total_norm(moved).item() == pytest.approx(0.001, rel=1e-2)
    params = [torch.nn.Parameter(torch.zeros_like(old)) for old in before]
    for param in params:
        param.grad = torch.zeros_like(param)
    names = [str(number) for number in range(len(params))]
    OnGradients(noise, names, CPU, run.config.seed)(params, 1)  # as every rank draws it
    drawn = torch.cat([param.grad.flatten() for param in params])
    angle = torch.nn.functional.cosine_similarity(drawn, torch.cat([part.flatten() for part in moved]), 0)
    assert angle.item() == pytest.approx(1, abs=1e-4)


def test_step_with_an_overflow_does_not_call_it(start):
    run = start(f"train.on_gradients={HERE}.record", "precision.opt_level=O2", "precision.max_loss_scale=1e30")
    run.precision.amp._amp_state.loss_scalers[0]._loss_scale = 2.0**60
    groups = iter(run.train_data.groups(0, []))
    loop.step(run, next(groups))
    assert (run.state.skipped, seen) == (1, [])
    run.precision.amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    loop.step(run, next(groups))
    assert [step for step, _ in seen] == [1]


def test_nan_of_the_function_skips_the_step(start):
    run = start(f"train.on_gradients={HERE}.spoil", "train.on_nan=skip")
    loop.step(run, next(iter(run.train_data.groups(0, []))))
    assert (run.state.skipped, run.state.applied) == (1, 0)


def test_nan_of_the_function_is_an_error_that_names_it(start):
    with pytest.raises(TrainingError, match=f"train.on_gradients={HERE}.spoil"):
        loop.train(start(f"train.on_gradients={HERE}.spoil"))


def test_draws_depend_on_the_seed_and_the_step_alone():
    def drawn(seed, step, calls=1):
        param = torch.nn.Parameter(torch.zeros(5))
        hook = OnGradients(noise, ["w"], CPU, seed)
        for _ in range(calls):
            param.grad = torch.zeros(5)
            hook([param], step)
        return param.grad.tolist()

    before = torch.get_rng_state()
    assert drawn(0, 3) == drawn(0, 3, calls=2)
    assert len({tuple(drawn(seed, step)) for seed in (0, 1) for step in (0, 1)}) == 4
    assert torch.equal(torch.get_rng_state(), before)


def test_parameter_without_gradient_is_left_out():
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    params[1].grad = torch.ones(1)
    seen.clear()
    OnGradients(record, ["a", "b", "c"], CPU, 0)(params, 7)
    assert seen == [(7, {"b": torch.ones(1)})]


def test_function_that_returns_gradients_is_an_error(start):
    run = start(f"train.on_gradients={HERE}.returning")
    group = next(iter(run.train_data.groups(0, [])))
    with pytest.raises(TrainingError, match="would not be used"):
        loop.step(run, group)


@pytest.mark.parametrize("name", [f"{HERE}.of_one_argument", f"{HERE}.seen", f"{HERE}.missing", "builtins.min"])
def test_wrong_function_is_an_error_before_training(name):
    with pytest.raises(ConfigError) as error:
        find(name)
    assert error.value.where == "train.on_gradients"
