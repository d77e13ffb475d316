"""Expansion of a space into trials, and settings as words of a command line."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from harness.tools.sweep import spec
from harness.tools.sweep.spec import SweepSpec


def sweep(**content) -> SweepSpec:
    return SweepSpec.model_validate({"name": "x", "base": "b.yaml", **content})


def test_grid_is_the_product_in_file_order():
    found = spec.grid(sweep(space={"launch.nproc": [1, 2], "optimizer.lr": [0.1, 0.2, 0.3]}))
    assert [tuple(trial.values()) for trial in found] == list(itertools.product([1, 2], [0.1, 0.2, 0.3]))
    assert list(found[0]) == ["launch.nproc", "optimizer.lr"]


def test_list_is_kept_and_seeds_vary_fastest():
    trials = [{"optimizer.lr": 0.1}, {"optimizer.name": "adam"}]
    assert spec.grid(sweep(space=trials)) == trials
    found = spec.grid(sweep(space=trials, seeds=[3, 4]))
    assert found == [{**trial, "seed": seed} for trial in trials for seed in (3, 4)]


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
    found = spec.corners(
        sweep(sampler="tpe", trials=3, space={"a": {"low": 1, "high": 9}, "b": {"choices": ["u", "v", None]}})
    )
    assert found == [{"a": 1, "b": "u"}, {"a": 9, "b": "u"}, {"a": 1, "b": "v"}, {"a": 1, "b": None}]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="$\x7f\x85", exclude_categories=("Cs", "Cc", "Zl", "Zp", "Cn", "Co"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@given(VALUES)
def test_typed_settings_are_read_back_exactly(value):
    read = OmegaConf.to_container(OmegaConf.from_dotlist([f"a={spec.spelled(value)}"]))["a"]
    assert json.dumps(read) == json.dumps(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [("adam", "adam"), ("0007", '"0007"'), (0.001, "0.001"), (None, "null"), (True, "true"), ("true", '"true"'),
     ("1e5", '"1e5"'), ([1, 2], "[1, 2]"), ("", '""'), ("{\U00010000", '"{\U00010000"')],
)  # fmt: skip
def test_settings_are_typed_without_needless_quotes(value, text):
    assert spec.spelled(value) == text
