"""Sweep files: valid ones, errors with their lines, the trials of a space, settings as words of a command line."""

from __future__ import annotations

import itertools
import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from harness.config import loader
from harness.config.merge import spelled, typed
from harness.errors import EXIT_USAGE, ConfigError
from harness.tools.sweep import spec
from harness.tools.sweep.spec import SweepSpec, corners, grid, load
from tests.conftest import ROOT

SHIPPED = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
GOOD = "name: x\nbase: base.yaml\nspace:\n  optimizer.lr: [0.1, 0.2]\n"


def refused(tmp_path, text: str, *overrides: str) -> str:
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(str(tmp_path / "sweep.yaml"), overrides)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value).replace(f"{tmp_path}/", "")


def sweep(**content) -> SweepSpec:
    return SweepSpec.model_validate({"name": "x", "base": "b.yaml", **content})


def test_grid_is_the_product_in_file_order():
    found = spec.grid(sweep(space={"launch.nproc": [1, 2], "optimizer.lr": [0.1, 0.2, 0.3]}))
    assert [tuple(trial.values()) for trial in found] == list(itertools.product([1, 2], [0.1, 0.2, 0.3]))
    assert list(found[0]) == ["launch.nproc", "optimizer.lr"]


def test_seeds_vary_fastest():
    found = spec.grid(sweep(space={"optimizer.lr": [0.1, 0.2]}, seeds=[3, 4]))
    assert found == [{"optimizer.lr": lr, "seed": seed} for lr in (0.1, 0.2) for seed in (3, 4)]


@given(
    st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(), min_size=1, max_size=3, unique=True), min_size=1)
)
def test_grid_has_every_combination_once(axes):
    found = spec.grid(sweep(space=axes))
    assert len({spec.identity(trial) for trial in found}) == len(found)
    count = 1
    for values in axes.values():
        count *= len(values)
    assert len(found) == count


def test_corners_of_a_search():
    found = spec.corners(sweep(sampler="tpe", trials=3, space={"a": {"low": 1, "high": 9}, "b": ["u", "v", None]}))
    assert found == [{"a": 1, "b": "u"}, {"a": 9, "b": "u"}, {"a": 1, "b": "v"}, {"a": 1, "b": None}]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="$\x7f\x85", exclude_categories=("Cs", "Cc", "Zl", "Zp", "Cn", "Co"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@given(VALUES)
def test_typed_settings_are_read_back_exactly(value):
    read = OmegaConf.to_container(OmegaConf.from_dotlist([f"a={spelled(value)}"]))["a"]
    assert json.dumps(read) == json.dumps(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [("adam", "adam"), ("0007", '"0007"'), (0.001, "0.001"), (None, "null"), (True, "true"), ("true", '"true"'),
     ("1e5", '"1e5"'), ([1, 2], "[1, 2]"), ("", '""'), ("{\U00010000", '"{\U00010000"')],
)  # fmt: skip
def test_settings_are_typed_without_needless_quotes(value, text):
    assert spelled(value) == text


# The file alone


def test_all_problems_at_once_with_lines(tmp_path):
    message = refused(
        tmp_path,
        "name: a b\nbaze: base.yaml\nspace:\n  optimizer.lr: 0.1\n  seed: {low: 1, hihg: 3}\n"
        "parallel: 0\nsampler: tpee\n",
    )
    expected = {
        1: "name: ",
        2: "baze: unknown key; did you mean base?",
        4: "space.optimizer.lr: it should be a list (found: 0.1)",
        5: "space.seed.hihg: unknown key",
        6: "parallel: it should be greater than or equal to 1 (found: 0)",
        7: "sampler: 'tpee' is not allowed; use 'grid'",
    }
    for line, problem in expected.items():
        assert f"sweep.yaml:{line}: {problem}" in message, message
    assert "base: required, but not set" in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("space: {}\n", "space: nothing varies"),
        ("output: s3://bucket/runs\n", "output: a sweep needs a local folder to follow its trials"),
        ("set: {optimizer.lr: 1}\n", "space.optimizer.lr: varied by space and fixed by set"),
        ("set: {optimizer: {lr: 1}}\n", "space.optimizer.lr: varied by space and fixed by set"),
        ("set: {output: here}\n", "set.output: the sweep sets it for each trial"),
        ("space: {name: [a, b]}\n", "space.name: the sweep sets it for each trial"),
        ("space: {seed: [1, 2]}\nseeds: [3]\n", "seeds: the seed is varied twice"),
        ("seeds: [0, 1, 0]\n", "seeds: a seed is listed twice"),
        ("sampler: tpe\ntrials: 3\nspace: {seed: {low: 1, high: 3}}\n", "space.seed: a search over seeds finds chance"),
        ("trials: 3\n", "trials: trials is only for a search, but this is a grid"),
        ("sampler: tpe\n", "sampler: a search needs a number of trials"),
        ("sampler: tpe\ntrials: 3\nseeds: [1]\n", "seeds: a search trains each draw once"),
        ("sampler: tpe\ntrials: 3\nspace: {a: [[1], 2]}\n", "space.a: a search chooses only among numbers, words"),
        ("space: {a: {low: 1, high: 2}}\n", "space.a: a grid needs single values"),
        ("space: {a: [1, 2, 1]}\n", "space.a: a value is listed twice"),
        ("sampler: tpe\ntrials: 3\nspace: {a: {low: 2, high: 2}}\n", "space.a: low 2 is not below high 2"),
        ("sampler: tpe\ntrials: 3\nspace: {a: {low: 0, high: 2, log: true}}\n", "space.a: log: true needs low > 0"),
        ("sampler: tpe\ntrials: 3\nspace: {a: {low: 1, high: 2, log: true, step: 1}}\n", "space.a: log and step"),
        ("sampler: tpe\ntrials: 3\nspace: {a: {low: 1, high: .inf}}\n", "space.a.high: it should be a finite number"),
        ("pruner_args: {n_warmup_steps: 1}\n", "pruner_args: there is no pruner to use them"),
    ],
)
def test_contradicting_settings_are_refused(tmp_path, text, problem):
    tree = {**yaml.safe_load(GOOD), **yaml.safe_load(text)}
    assert problem in refused(tmp_path, yaml.safe_dump(tree, sort_keys=False))


def test_overrides_change_the_file_or_every_trial(tmp_path):
    (tmp_path / "sweep.yaml").write_text(GOOD + "set: {train.epochs: 3, seed: 1}\n")
    found = load(str(tmp_path / "sweep.yaml"), ["name=y", "parallel=2", "train.epochs=5", "optimizer.args={a: 1}"])
    assert (found.spec.name, found.spec.parallel) == ("y", 2)
    assert found.fixed == {"train.epochs": 5, "seed": 1, "optimizer.args.a": 1}
    assert found.base == str(tmp_path / "base.yaml")
    search = ["sampler=tpe", "trials=4", "seeds=[]", "sampler_args.n_startup_trials=3", "parallel.logical_ranks=4"]
    found = load(str(tmp_path / "sweep.yaml"), search)
    assert found.spec.sampler_args == {"n_startup_trials": 3}
    assert found.fixed["parallel.logical_ranks"] == 4
    assert "optimizer.lr is varied by the space" in refused(tmp_path, GOOD, "optimizer.lr=1")
    assert "'nonsense' is not an override" in refused(tmp_path, GOOD, "nonsense")
    assert "command line: 'train.epochs={': " in refused(tmp_path, GOOD, "train.epochs={")


# Files of the repository


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_sweeps_are_valid(path):
    assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n")
    found = load(str(path))
    for settings in corners(found.spec) if found.spec.is_search else grid(found.spec):
        loader.load(found.base, typed({**found.fixed, **settings}))


def test_schema_is_current():
    committed = (ROOT / "configs" / "sweeps" / "schema.json").read_text()
    assert committed == spec.json_schema(), "run: harness schema --of sweep > configs/sweeps/schema.json"
    schema = json.loads(committed)
    assert schema["additionalProperties"] is False
    assert all("description" in field for name, field in schema["properties"].items() if name != "name")
