"""How often the host waits for the device: the table in docs/strategies.md, counted on the GPU of tests/syncs.py."""

from __future__ import annotations

import pytest

from tests import sync_table


@pytest.mark.parametrize(
    "strategy", ["none", pytest.param("ddp", marks=pytest.mark.slow), pytest.param("fsdp", marks=pytest.mark.slow)]
)
def test_table_of_waits_is_current(tmp_path, strategy):
    counts = sync_table.all_counts(tmp_path, strategy)
    assert sync_table.written(strategy) == sync_table.rows(strategy, counts), "run python -m tests.sync_table"
    for level, parts in counts.items():
        waits = {part: [sync.where for sync in found] for part, found in parts.items()}
        assert not waits["a batch of an evaluation"]
        assert len(waits["the end of an evaluation"]) == 1
        overflow = 1 if level in ("O1", "O2") else 0
        assert len(waits["a step"]) <= overflow, waits["a step"]
        assert waits["a step with `train.clip_norm`"] == waits["a step with `train.ema_decay`"] == waits["a step"]
        assert len(waits["a step with `train.on_nan: skip`"]) == len(waits["a step"]) + 1
