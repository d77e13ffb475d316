"""The settings of an engine stand under the last word of its name, whatever that word is."""

from __future__ import annotations

import sys

import pytest

from harness.config.launch import LaunchSection, section_class
from harness.errors import ConfigError

OWN = "from harness.config.base import Section\nclass Settings(Section):\n    queue: str = 'a'\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that makes the engine my_engines.NAME of ``text``."""
    (folder := tmp_path / "my_engines").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_engines", raising=False)

    def add(name: str, text: str = "") -> str:
        (folder / f"{name}.py").write_text(text)
        return f"my_engines.{name}"

    return add


def launch(raw: dict, launching: bool = True) -> LaunchSection:
    return section_class(raw, launching)(**raw)


@pytest.mark.parametrize("launching", [True, False])
@pytest.mark.parametrize("name", ["copy", "env", "engine_settings", "model_fields"])
def test_engine_without_settings_has_none(package, name, launching):
    """Not a method or an attribute of that name."""
    assert launch({"engine": package(name)}, launching).engine_settings is None


def test_settings_of_an_engine(package):
    assert launch({}).engine_settings.min_ranks is None
    assert launch({"engine": "torchrun", "torchrun": {"node_rank": 1}}).engine_settings.node_rank == 1
    engine = package("queued", OWN)
    assert launch({"engine": engine}).engine_settings.queue == "a"
    assert launch({"engine": engine, "queued": {"queue": 3}}, launching=False).engine_settings == {"queue": 3}
    assert launch({"engine": engine}, launching=False).engine_settings is None


def test_engine_with_the_name_of_a_setting(package):
    with pytest.raises(ConfigError, match="which every engine has"):
        section_class({"engine": package("threads", OWN)}, True)
    assert launch({"engine": package("threads", OWN)}, False).engine_settings is None


def test_misspelled_engine_is_compared_with_all():
    assert {"slurm", "dask"} <= section_class({"slurmm": {}}, True).model_fields.keys()
