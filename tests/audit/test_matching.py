"""How the first resumed step is found in the undisturbed start, where several steps would fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.audit import matching
from harness.audit.matching import MatchKind
from tests.audit.synthetic import Starts, Training


def match(starts: Starts, folder: Path) -> matching.StepMatch:
    undisturbed, _, killed, resumed = starts.read(folder)
    return matching.find(undisturbed.processes[0], resumed.processes[0], matching.loaded_after(killed, resumed))


@given(st.floats(-60000, 60000, width=32), st.sampled_from(["float16", "bfloat16"]))
def test_rounding_is_that_of_torch(value: float, type_: str):
    expected = torch.tensor(value).to(getattr(torch, type_)).item()
    assert matching.ROUNDINGS[type_](value) == expected


@pytest.mark.parametrize("type_", ["float16", "bfloat16"])
def test_numbers_beyond_the_range_become_infinite(type_: str):
    """A diverged script may hold float64 numbers that not even a float32 can."""
    found = [matching.ROUNDINGS[type_](value) for value in (1e39, -1e39)]
    assert found == torch.tensor([1e39, -1e39], dtype=torch.float64).to(getattr(torch, type_)).tolist()


def test_steps_with_equal_weights_are_told_apart_by_the_checkpoint(tmp_path: Path):
    starts = Starts(Training(skipped=(12, 13)))  # the weights before 12, 13 and 14 are equal
    assert match(starts, tmp_path) == matching.StepMatch(12, MatchKind.FULL)


def test_steps_with_equal_weights_are_told_apart_by_their_rows(tmp_path: Path):
    starts = Starts(Training(skipped=(12, 13)))
    starts.resumed[0] = [event for event in starts.resumed[0] if event["event"] != "loaded"]
    assert match(starts, tmp_path).offset == 12


def test_frozen_weights_are_no_evidence(tmp_path: Path):
    starts = Starts(Training())
    starts.apart(13)
    for name in ("undisturbed", "killed", "resumed"):
        starts.from_step(1, lambda step: step["weights"].update(frozen="never trained"), name)
    assert match(starts, tmp_path).kind == MatchKind.INPUTS


@pytest.mark.parametrize("begun", [12, 18])
def test_optimizers_are_paired_by_the_names_of_their_weights(begun, tmp_path: Path):
    """A resume between the steps of two optimizers numbers them in another order."""
    starts = Starts(Training(optimizers=2), checkpoint=begun, kill=20)
    starts.from_step(1, lambda step: step.update(optimizer=1 - step["optimizer"]))
    assert match(starts, tmp_path) == matching.StepMatch(begun, MatchKind.FULL)


def test_a_resume_at_the_end(tmp_path: Path):
    starts = Starts(Training(), checkpoint=24, kill=24)
    starts.resumed = [Training(steps=26).events(begun=24)]
    assert match(starts, tmp_path) == matching.StepMatch(24, MatchKind.FULL)


def test_a_folder_that_is_loaded_is_the_checkpoint_of_its_files(tmp_path: Path):
    starts = Starts(Training(save_name="out/step-N/model.pt"))
    starts.resumed[0][1]["path"] = "out/step-12"
    _, _, killed, resumed = starts.read(tmp_path)
    assert matching.loaded_after(killed, resumed) == 12
