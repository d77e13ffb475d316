"""``harness data digits`` writes a complete folder or none."""

from __future__ import annotations

import builtins
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from torchvision.io import ImageReadMode, decode_image, read_file

from harness.config import loader
from harness.errors import ConfigError, DataError
from harness.tools.data import digits
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    folder = tmp_path_factory.mktemp("data") / "new" / "digits"
    assert digits.write(folder) == f"wrote 1437 training and 360 validation rows to {folder}"
    return folder


def test_every_digit_is_in_one_table(folder):
    train, validation = pd.read_csv(folder / "train.csv"), pd.read_csv(folder / "eval.csv")
    assert list(train) == list(validation) == ["path", "label"]
    assert not train["path"].is_monotonic_increasing  # shuffled
    both = pd.concat([train, validation])
    assert sorted(both["path"]) == [f"images/{i:04d}.png" for i in range(1797)]
    original = pytest.importorskip("sklearn.datasets").load_digits()
    numbers = both["path"].str[7:11].astype(int)
    assert np.array_equal(original.target[numbers], both["label"])
    assert validation["label"].value_counts().min() >= 34  # stratified
    image = decode_image(read_file(str(folder / train["path"][0])), mode=ImageReadMode.UNCHANGED)
    assert image.shape == (1, 8, 8)
    assert np.array_equal(image[0].numpy(), np.round(original.images[numbers.iloc[0]] * 255 / 16))


def test_complete_folder_is_not_changed(folder):
    before = (folder / "train.csv").stat().st_mtime_ns
    assert digits.write(folder) == f"{folder} already has the digits"
    assert (folder / "train.csv").stat().st_mtime_ns == before


def test_configuration_for_the_digits_is_that_of_a_clone(folder, tmp_path, monkeypatch):
    """An installed package has no folder ``configs``."""
    packaged = (ROOT / "harness" / "tools" / "data" / "digits.yaml").read_text()
    assert (ROOT / "configs" / "digits.yaml").read_text() == f"# yaml-language-server: $schema=schema.json\n{packaged}"
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "my: digits"):
        (tmp_path / name).symlink_to(folder)
        path = digits.write_config(Path(name))
        config = loader.load(shlex.split(path)[0])
        assert (config.task.root, config.task.train_csv) == (name, f"{name}/train.csv")
        assert list(config.task.problems()) == []
        (folder / "digits.yaml").write_text("mine")
        digits.write_config(Path(name))
        assert (folder / "digits.yaml").read_text() == "mine"
        (folder / "digits.yaml").unlink()


def test_empty_working_directory_is_used(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "wrote 1437" in digits.write(Path("."))
    assert (tmp_path / "here" / "eval.csv").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(DataError, match="choose an empty or new folder"):
        digits.write(tmp_path / "mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "thesis.txt"]


def test_missing_scikit_learn_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install"):
        digits.write(tmp_path / "digits")
