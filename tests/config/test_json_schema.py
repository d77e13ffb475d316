"""The schemas for editors, and the files that refer to them."""

from __future__ import annotations

import json

import yaml

from harness.config import json_schema, loader
from harness.config.schema import Config
from tests.conftest import ROOT


def test_every_property_in_the_schemas_has_a_description():
    """What an editor shows: the property's own description, or that of the section that it refers to."""
    missing = []

    def walk(node, path, sections):
        for name, item in node.get("properties", {}).items() if isinstance(node, dict) else ():
            of_section = sections.get(item.get("$ref", "").rpartition("/")[2], {})
            if not (item.get("description") or of_section.get("description")):
                missing.append(f"{path}.{name}")
        for key, item in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            walk(item, f"{path}.{key}", sections)

    for name in ("schema.json", "sweeps/schema.json"):
        schema = json.loads((ROOT / "configs" / name).read_text())
        walk(schema, name, schema.get("$defs", {}))
    assert not missing


def test_schema_in_the_repository_is_current():
    committed = (ROOT / "configs" / "schema.json").read_text()
    assert committed == json_schema.text(), "run: harness schema > configs/schema.json"


def test_schema_has_the_keys_of_the_yaml():
    schema = json.loads(json_schema.text())
    assert set(schema["properties"]) == set(Config.model_fields) | {"extends"}
    assert "global" in schema["$defs"]["BatchSection"]["properties"]
    assert schema["additionalProperties"] is False
    assert "slurm" in schema["$defs"]["LaunchSection"]["properties"]["engine"]["anyOf"][0]["enum"]


def test_every_experiment_refers_to_the_schema_and_loads():
    files = sorted((ROOT / "configs").glob("*.yaml"))
    assert [path.stem for path in files] == [
        "digits",
        "fashion_mnist",
        "finetune",
        "imagenet",
        "mnist",
        "multi_label",
        "pet_names",
        "pet_names_gru",
        "regression",
        "text",
    ]
    for path in files:
        first = path.read_text().splitlines()[0]
        assert first.startswith("# yaml-language-server: $schema="), path
        assert (path.parent / first.split("$schema=")[1]).resolve() == ROOT / "configs" / "schema.json"
        assert loader.load(path).name == path.stem
        assert yaml.safe_load(path.read_text())["name"] == path.stem
