"""Copies of batches to a CUDA device, in the order in which they are queued on the GPU of tests/syncs.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.data.batch import AHEAD, Batch, copied_ahead
from tests.syncs import CUDA, fake_gpu


def batches(number, fail_at=None):
    for index in range(number):
        if index == fail_at:
            raise ValueError("planned")
        part = torch.full((2,), float(index))
        yield Batch(part, part.long(), np.arange(2)).pin_memory()


def test_copies_run_ahead_on_a_stream_of_their_own():
    with fake_gpu() as gpu:
        delivered = copied_ahead(batches(5), CUDA)
        for index in range(5):
            gpu.order.clear()
            batch = next(delivered)
            side = [what for stream, what in gpu.order if stream != "default"]
            copies = [what for what in side if what == "copy from pinned memory"]
            expected = 1 + AHEAD if index == 0 else int(index < 5 - AHEAD)
            assert len(copies) == 2 * expected  # inputs and targets
            here = [what for stream, what in gpu.order if stream == "default"]
            assert here[0].startswith("wait for event")
            assert here[1:] == ["record_stream", "record_stream"]
            if index == 0:  # of the first batch, not of the last one that is on its way
                assert (
                    here[0].split(" of ")[0]
                    == f"wait for event {min(int(w.split()[-1]) for w in side if 'event' in w)}"
                )
            batch.inputs.add_(1)
            assert gpu.order[-1] == ("default", "add_")
            assert batch.inputs.held.tolist() == [index + 1.0] * 2
        assert next(delivered, None) is None
    assert not gpu.syncs


def test_error_is_raised_in_its_place():
    with fake_gpu():
        delivered = copied_ahead(batches(5, fail_at=3), CUDA)
        assert [next(delivered).targets.held[0].item() for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="planned"):
            next(delivered)


def test_fewer_batches_than_are_copied_ahead():
    with fake_gpu():
        assert len(list(copied_ahead(batches(1), CUDA))) == 1
        assert not list(copied_ahead(batches(0), CUDA))
