"""Numbers, durations and paths as text."""

from __future__ import annotations

import os

import pytest

from harness.tools.report import formatting


def test_numbers_and_durations_are_rounded_before_their_form_is_chosen():
    assert [formatting.number(value) for value in (9999.4, 9999.6, 1e4, 0.00012346)] == [
        "9,999", "10,000", "10,000", "0.0001235",
    ]  # fmt: skip
    assert [formatting.duration(value) for value in (59.94, 59.97, 3599.7)] == ["59.9 s", "1 min 00 s", "1 h 00 min"]


@pytest.mark.parametrize("before", ["/mnt", "~", "..", "a-"])
def test_only_paths_in_the_working_folder_are_made_relative(before, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"-c {before}{os.getcwd()}/train.yaml"
    assert formatting.without_working_folder(text) == text
    assert formatting.without_working_folder(f"output='{tmp_path}/a b'") == "output='a b'"
