"""The counters of a run in a checkpoint."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch

from harness.data.shards import Segment
from harness.training.optimizer.schedule import Plateau
from harness.training.state import State, why_ended_early


def test_state_survives_a_file():
    state = State(epoch=3, segments=[Segment(2, 4, 7), Segment(1, 8, 1)], step=40, applied=38, skipped=2, best=0.5,
                  best_step=30, history=[{"step": 30, "top1": 0.5}], wall_s=1.5,
                  plateau=Plateau(0.5, 1, 0, 2))  # fmt: skip
    file = io.BytesIO()
    torch.save(state.to_dict(), file)
    file.seek(0)
    again = State.from_dict(torch.load(file, weights_only=True))
    assert again == state
    assert isinstance(again.segments[0], Segment)


def test_saved_state_is_a_copy():
    state = State(segments=[Segment(1, 4, 1)])
    saved = state.to_dict()
    state.segments[0].steps += 1
    state.history.append({"step": 1})
    assert State.from_dict(saved) == State(segments=[Segment(1, 4, 1)])


def test_an_update_ends_the_skips_in_a_row():
    state = State()
    for skipped in (True, True, False, True):
        state.add_step(skipped)
    assert (state.step, state.applied, state.skipped, state.skipped_in_a_row) == (4, 1, 3, 1)


def test_next_epoch():
    state = State(epoch=1, segments=[Segment(1, 4, 1)])
    assert state.in_epoch
    state.next_epoch()
    assert (state.epoch, state.segments, state.in_epoch) == (2, [], False)
    assert State().segments is not State().segments


@pytest.mark.parametrize(
    ("values", "min_delta", "better", "since"),
    [
        ([0.5, 0.6, 0.65, 0.65], 0.0, "max", 1),
        ([0.5, 0.6, 0.65, 0.65], 0.08, "max", 2),  # all better values count for the best, but not for patience
        ([0.5, 0.55, 0.6, 0.5], 0.08, "max", 1),  # two small gains are one large one
        ([0.5, 0.45, 0.41, 0.4], 0.08, "min", 1),
        ([float("nan"), 0.5, 0.5], 0.1, "max", 1),
    ],
)
def test_patience_counts_from_the_last_gain(values, min_delta, better, since):
    state = State()
    for value in values:
        state.add_evaluation({"top1": value}, "top1", better == "max")
    assert state.best == (max if better == "max" else min)(value for value in values if value == value)
    train = SimpleNamespace(patience=since, min_delta=min_delta)
    config = SimpleNamespace(train=train, best_metric="top1", task=SimpleNamespace(metrics={"top1": better}))
    by = " by more than 0" if min_delta else " in the last"
    assert why_ended_early(config, state).startswith(f"top1 was not better{by}")
    train.patience = since + 1
    assert not why_ended_early(config, state)
