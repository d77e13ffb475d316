"""The intervals of ``train.evaluate_every``: whole epochs end with epochs of any length, and steps count from the start
of the run."""

from __future__ import annotations

from harness.config.duration import RunPosition
from harness.config.schema import TrainSection
from harness.data.own_loop import ADVANCE
from harness.data.rank_data import TrainData
from harness.data.shards import Segment
from harness.errors import TrainingError, plural
from harness.training.state import State


def has_ended(train: TrainSection, state: State, data: TrainData) -> bool:
    """Return True if the last step has ended an interval: of an epoch as long as the ranks that took it would make it.

    On 2 ranks, step 3 of 6 ends half an epoch. For one rank that resumes there, the epoch has 9 steps, of which none
    ends a half; yet that evaluation is still due. Raises TrainingError if a loop of the user's own has counted more
    steps than the epoch has.
    """
    position = _position(state, data, state.segments[-1] if state.segments else None)
    counted = state.epoch_applied + state.epoch_skipped
    if counted > position.per_epoch:
        raise TrainingError(
            f"the loop has counted {plural(counted, 'step')} of epoch {position.epoch + 1}, which has "
            f"{position.per_epoch}, and advanced by {position.done}",
            hint=ADVANCE,
        )
    return train.evaluate_every.ends_at(position)


def steps_left(train: TrainSection, state: State, data: TrainData) -> int:
    """Return the number of steps to the next end of an interval, at least 1."""
    return train.evaluate_every.steps_left(_position(state, data))


def _position(state: State, data: TrainData, ranks_of: Segment | None = None) -> RunPosition:
    """Return the position of the run if the ranks of the segment ``ranks_of``, by default the present ones, take the
    rest of the epoch."""
    done = sum(segment.steps for segment in state.segments)
    return RunPosition(state.step, state.epoch, done, done + data.steps_left(state.segments, ranks_of))
