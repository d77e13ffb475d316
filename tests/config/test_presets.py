"""Presets: what they set, and how a file uses them."""

from __future__ import annotations

import pytest

from harness.config import loader, trust
from harness.config.recipe import recipe_difference
from harness.errors import ConfigError
from tests.fixtures import settings, write_yaml


def load(tmp_path, *overrides, **sections):
    return loader.load(write_yaml(tmp_path / "x.yaml", settings(tmp_path, **sections)), overrides)


def test_default_preset_is_the_default_of_every_setting(tmp_path):
    """A file without ``extends`` means what it always has, and an earlier run is the same recipe."""
    plain, named = load(tmp_path), load(tmp_path, extends="preset:apex-2019")
    assert named == plain
    before = loader.as_tree(plain)
    del before["precision"]["tf32"]  # as written before this setting existed
    assert recipe_difference(before, loader.as_tree(plain)) == {}


def test_modern(tmp_path):
    write_yaml(tmp_path / "base.yaml", {"train": {"epochs": 3}, "model": {"channels_last": False}})
    config = load(tmp_path, "precision.tf32=false", extends=["preset:modern", "base.yaml"])
    assert (config.precision.opt_level, config.parallel.delay_allreduce) == ("O4", False)
    assert config.train.deterministic is False
    assert config.train.epochs == 3
    assert (config.model.channels_last, config.precision.tf32) == (False, False)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("moderm", "did you mean preset:modern?"),
        ("x", "use one of preset:apex-2019, preset:modern"),
        ("../x", "use one"),
    ],
)
def test_unknown_preset(tmp_path, name, hint):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, extends=f"preset:{name}")
    assert f"there is no preset {name!r}" in caught.value.message
    assert "x.yaml:" in caught.value.where
    assert hint in caught.value.hint


def test_preset_in_the_configuration_of_someone_else_reads_no_file_of_theirs(tmp_path):
    trust.require_harmless(write_yaml(tmp_path / "a.yaml", {"extends": "preset:modern"}), [])
    with pytest.raises(ConfigError, match="does more than set values"):
        trust.require_harmless(write_yaml(tmp_path / "b.yaml", {"extends": ["preset:modern", "secret.yaml"]}), [])


@pytest.mark.parametrize(
    ("level", "words"),
    [
        ("bf16", "bfloat16 is O4 (weights stay float32) or O5 (bfloat16 weights with float32 masters): use precision."),
        ("BFloat16", "use precision.opt_level=O4"),
        ("fp16", "or O2 (float16 weights with float32 masters): use precision.opt_level=O1"),
        ("fp32", "float32 is O0: use precision.opt_level=O0"),
        ("o2", "did you mean O2, with the letter O?"),
        ("1", "did you mean O1, with the letter O?"),
        ("'02'", "did you mean O2, with the letter O?"),
        ("O7", "use 'O0', 'O1', 'O2', 'O3', 'O4' or 'O5'"),
    ],
)
def test_level_by_another_name(tmp_path, level, words):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"precision.opt_level={level}")
    assert "precision.opt_level: " in str(caught.value)
    assert words in str(caught.value)
