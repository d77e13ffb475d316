"""The counters of a run in a checkpoint, and the rows of an epoch."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.data.shards import Segment
from harness.distributed.launch_env import detect
from harness.distributed.runtime import Runtime, open_runtime
from harness.training.progress import Coverage, Covered, State
from tests.ranks import run_ranks


def test_state_survives_a_file():
    state = State(epoch=3, segments=[Segment(2, 4, 7), Segment(1, 8, 1)], step=40, applied=38, skipped=2, best=0.5,
                  best_step=30, history=[{"step": 30, "top1": 0.5}], wall_s=1.5)  # fmt: skip
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


def covered(num_rows: int, rows: Iterable[int]) -> Covered:
    """After ``rows``, the first third of them before a resume."""
    parts = np.array_split(np.fromiter(rows, np.int64), 3)
    before, after = Coverage(num_rows), Coverage(num_rows)
    before.add(parts[0], skipped=True)
    after.load(before.reduced(Runtime()))
    for part in parts[1:]:
        after.add(part)
    found = after.covered(Runtime(), lambda row: f"row{row}.png")
    assert found.skipped == len(parts[0])
    after.clear()
    after.add(np.arange(num_rows))
    assert after.covered(Runtime()) == (num_rows, 0, 0, [])
    return found


@settings(max_examples=60)
@given(st.integers(2, 9000), st.data())
def test_any_lost_or_repeated_row_is_counted(num_rows, data):
    row = st.integers(0, num_rows - 1)
    lost, more = data.draw(st.sets(row, max_size=6)), data.draw(st.lists(row, max_size=6))
    uses = Counter([*(row for row in range(num_rows) if row not in lost), *more])
    found = covered(num_rows, uses.elements())
    assert (found.used, found.repeated) == (len(uses), uses.total() - len(uses))
    assert found.missing == [f"row{row}.png" for row in sorted(lost - set(more))[:3]]


def _covered_by_ranks() -> list[Covered]:
    with open_runtime(detect(os.environ), "cpu", 20.0) as runtime:
        mine, both, again = (Coverage(1000) for _ in range(3))
        mine.add(np.arange(500 * runtime.rank, 500 * runtime.rank + 500))
        both.add(np.arange(490 * runtime.rank, 490 * runtime.rank + 500))
        reduced = mine.reduced(runtime)
        if runtime.rank == 0:
            again.load(reduced)
        return [coverage.covered(runtime) for coverage in (mine, both, again)]


def test_rows_of_two_ranks():
    """Rows that two ranks have used are repeated: here 490 to 499, while 990 to 999 are missing."""
    for mine, both, again in run_ranks(2, _covered_by_ranks, group=False, timeout_s=30):
        assert mine == again == (1000, 0, 0, [])
        assert both == (990, 10, 0, ["990", "991", "992"])


def test_record_is_a_bit_per_row():
    """It is in every checkpoint."""
    assert Coverage(10_000_000).reduced(Runtime()).nbytes <= 1_250_032
