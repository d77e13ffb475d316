"""Seals: no flipped bit gives another value."""

from __future__ import annotations

import json

import pytest

from harness.config import loader, merge, seals
from harness.errors import ConfigError
from tests.fixtures import make_config

FACTS = {"classes": ["a", "é"], "size": [8, 8], "mean": 0.1, "by": {1: None, "x": True}, "n": 10**20}


def flipped(text: str) -> list[bytes]:
    """``text`` with each of its bits flipped in turn."""
    whole = text.encode()
    return [
        whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
        for place in range(len(whole))
        for bit in range(8)
    ]


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 9])
def test_no_flipped_bit_changes_a_configuration(tmp_path, every):
    text = loader.to_text(make_config(tmp_path))
    tree, path, accepted = merge.load_yaml(text), tmp_path / "flipped.yaml", 0
    for content in flipped(text)[::every]:  # another bit of each next byte
        try:
            merge.load_yaml(content.decode())
        except Exception:  # what cannot be read gives no other result; tests of the loader check the messages
            continue
        path.write_bytes(content)
        assert merge.parsed(path) == tree, content
        accepted += 1
    assert accepted < 8 * 70, "only the words before the digest may change"


def test_no_flipped_bit_changes_an_object():
    text = json.dumps(seals.sealed(FACTS), indent=1, ensure_ascii=False)
    assert seals.unsealed(json.loads(text)) == json.loads(json.dumps(FACTS))
    original, accepted = json.loads(json.dumps(FACTS)), 0
    for content in flipped(text):
        try:
            found = seals.unsealed(json.loads(content.decode()))
        except ValueError:
            continue
        assert {key: found.get(key) for key in original} == original, content
        accepted += 1
    assert accepted < 8 * 40, "only the name of the digest and white space may change"


@pytest.mark.parametrize("edit", [lambda text: text.replace("seed: 0", "seed: 1"), lambda text: text + "seed: 1\n"])
def test_an_edited_configuration_loads_without_its_last_line(tmp_path, edit):
    text = loader.to_text(make_config(tmp_path, seed=0))
    path = tmp_path / "edited.yaml"
    path.write_text(edit(text))
    with pytest.raises(ConfigError, match=r"edited.yaml.*damaged or edited(.|\n)*remove its last line"):
        loader.load(path)
    path.write_text(text.rpartition("# ")[0].replace("seed: 0", "seed: 1"))
    assert loader.load(path).seed == 1
