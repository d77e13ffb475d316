"""The labels of rows."""

from __future__ import annotations

import numpy as np
import pytest

from harness.data.row_labels import class_indices
from harness.errors import DataError


class Vocabulary(tuple):
    """Labels of which none may be searched for: with a million of them, a search for each takes hours."""

    index = None


class Table:
    """A table with a label per row."""

    label, vocabulary = "label", Vocabulary("abcd")

    def __len__(self):
        return 4

    def labels(self, rows):
        return np.array([0, 2, 3, 1])[rows]

    def where(self, row):
        return f"row {row}"


def test_unknown_labels_are_named_without_a_search_for_each():
    with pytest.raises(DataError) as caught:
        class_indices(Table(), ["a", "c"], "train.csv")
    assert (caught.value.message, caught.value.where) == ("2 labels that train.csv does not have: 'b', 'd'", "row 2")


def test_unknown_numbers_may_be_no_classes(monkeypatch):
    monkeypatch.setattr(Table, "vocabulary", Vocabulary(["3", "-5", "35", "4"]))
    with pytest.raises(DataError, match="to predict the number, set task.labels.kind=regression"):
        class_indices(Table(), [-5, 4, 35], "train.csv")
    with pytest.raises(DataError, match="write numbers alike in both tables: 3 is 3.0 in train.csv"):
        class_indices(Table(), ["3.0", "4.0", "35.0", "-5.0"], "train.csv")
