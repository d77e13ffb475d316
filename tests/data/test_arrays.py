"""Datasets of arrays, and arrays mapped from IDX files, which are checked first."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.data.arrays import Arrays, map_idx
from harness.errors import DataError
from tests.datasets import write_idx


def test_batch_is_a_copy_of_the_rows():
    images, labels = np.arange(24, dtype=np.uint8).reshape(6, 2, 2), np.arange(6) * 10
    rows = Arrays(images, labels)
    assert len(rows) == 6
    for epoch in (None, 0, 3):
        batch = rows.batch(np.array([4, 1, 4]), epoch)
        assert batch.inputs.tolist() == images[[4, 1, 4]].tolist()
        assert batch.inputs.dtype is torch.uint8
        assert batch.targets.tolist() == [40, 10, 40]
        assert batch.rows.tolist() == [4, 1, 4]
        assert batch.bad == []
    rows.batch(np.array([0]), 0).inputs.zero_()
    assert rows.inputs[0, 0, 1] == 1


def test_map_idx(tmp_path):
    write_idx(tmp_path, "train", 12, size=5)
    images = map_idx(tmp_path / "train-images-idx3-ubyte", 3, "how")
    labels = map_idx(tmp_path / "train-labels-idx1-ubyte", 1, "how")
    assert images.shape == (12, 5, 5)
    assert isinstance(images, np.memmap)
    assert not images.flags.writeable
    assert labels.tolist() == [*range(10), 0, 1]


def test_damaged_idx_files(tmp_path):
    write_idx(tmp_path, "train", 12, size=5)
    path = tmp_path / "train-images-idx3-ubyte"
    content = path.read_bytes()

    def refused(bad: bytes, num_dims: int = 3) -> str:
        path.write_bytes(bad)
        with pytest.raises(DataError) as caught:
            map_idx(path, num_dims, "type this")
        assert str(caught.value).endswith("-> type this")
        return caught.value.message

    assert refused(content[:-1]) == "the file is damaged: 315 bytes instead of 316"
    assert refused(content + b"!") == "the file is damaged: 317 bytes instead of 316"
    assert "not an IDX file" in refused(content, num_dims=1)
    for bad in (b"", b"\x00\x00", content[:7], b"\x1f\x8b" + content):
        assert "not an IDX file" in refused(bad)
    with pytest.raises(DataError, match="does not exist"):
        map_idx(tmp_path / "none", 3, "type this")
    with pytest.raises(DataError, match="cannot be read"):
        map_idx(tmp_path, 3, "type this")
