"""The rows that an epoch has used."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.distributed.launch_env import detect
from harness.distributed.process_group import open_runtime
from harness.distributed.runtime import Runtime
from harness.training.rows import coverage
from harness.training.rows.coverage import Coverage, Covered
from tests.ranks import run_ranks


@pytest.fixture(params=["marks", "blocks"])
def keeps(request, monkeypatch):
    """What Coverage keeps: a mark of each row, or, as for a large table, hashes of blocks, here of 25 rows or fewer."""
    if request.param == "blocks":
        monkeypatch.setattr(coverage, "EXACT_ROWS", 0)
        monkeypatch.setattr(coverage, "_BLOCKS", 4096)
    return request.param


def covered(num_rows: int, rows: Iterable[int]) -> Covered:
    """After ``rows``, the first third of them before a resume."""
    parts = np.array_split(np.fromiter(rows, np.int64), 3)
    before, after = Coverage(num_rows), Coverage(num_rows)
    before.add(parts[0], skipped=True)
    after.load(before.reduced(Runtime()))
    for part in parts[1:]:
        after.add(part)
    found = after.covered(Runtime(), lambda row: f"{row} (row{row}.png)")
    assert found.skipped == len(parts[0])
    after.clear()
    after.add(np.arange(num_rows))
    assert after.covered(Runtime()) == (num_rows, 0, 0, [])
    return found


@pytest.mark.parametrize("num_rows", [1, 61, 4096, 4097, 100_003])
def test_each_missing_row_is_named(keeps, num_rows):
    rows = np.random.default_rng(num_rows).permutation(num_rows).tolist()
    assert covered(num_rows, rows)[:2] == (num_rows, 0)
    found = covered(num_rows, rows[1:])
    assert (found.used, found.repeated, found.missing) == (num_rows - 1, 0, [f"{rows[0]} (row{rows[0]}.png)"])


def test_several_missing_rows_are_named_or_their_block(keeps):
    found = covered(100_003, [row for row in range(100_003) if row not in (7, 8, 60, 90_000, 99_990)])
    assert found.used == 99_998
    expected = ["7 (row7.png)", "8 (row8.png)", "60 (row60.png)"]
    if keeps == "blocks":
        expected = ["some of 0 (row0.png) to 24 (row24.png)", "60 (row60.png)", "90000 (row90000.png)"]
    assert found.missing == expected


@pytest.mark.parametrize(
    ("lost", "twice"),
    [((2, 3, 7), (1, 5, 6)), ((0, 3, 5, 6), (1, 2, 4, 7)), ((0, 4, 9, 17, 22, 26), (1, 2, 12, 14, 24, 25))],
)
def test_rows_with_equal_sums_of_powers_are_told_apart(keeps, lost, twice):
    """The sums of their numbers, of the squares, and of the third, fourth and fifth powers: a checksum of these would
    take one for the other."""
    num_rows = 500_000  # the largest blocks of the test: 123 rows
    found = covered(num_rows, [*(row for row in range(num_rows) if row not in lost), *twice])
    assert found.missing
    if keeps == "marks":
        assert found[:2] == (num_rows - len(lost), len(twice))
    else:
        assert found.used < num_rows
        assert found.repeated > 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.integers(2, 9000), st.data())
def test_any_lost_or_repeated_row_is_detected(keeps, num_rows, data):
    row = st.integers(0, num_rows - 1)
    lost, more = data.draw(st.sets(row, max_size=6)), data.draw(st.lists(row, max_size=6))
    uses = Counter([*(row for row in range(num_rows) if row not in lost), *more])
    found = covered(num_rows, uses.elements())
    missing, repeated = num_rows - len(uses), uses.total() - len(uses)
    assert (found.used == num_rows and not found.missing and not found.repeated) == (not missing and not repeated)
    assert found.used + found.repeated == uses.total()
    if keeps == "marks" or not repeated:
        assert (found.used, found.repeated) == (len(uses), repeated)


def _covered_by_ranks(exact_rows: int) -> list[Covered]:
    coverage.EXACT_ROWS, coverage._BLOCKS = exact_rows, 100
    with open_runtime(detect(os.environ), "cpu", 20.0) as runtime:
        mine, both, again = (Coverage(1000) for _ in range(3))
        mine.add(np.arange(500 * runtime.rank, 500 * runtime.rank + 500))
        both.add(np.arange(490 * runtime.rank, 490 * runtime.rank + 500))
        reduced = mine.reduced(runtime)
        if runtime.rank == 0:
            again.load(reduced)
        return [each.covered(runtime) for each in (mine, both, again)]


@pytest.mark.parametrize("exact_rows", [1000, 0])
def test_rows_of_two_ranks(exact_rows):
    """Rows that two ranks have used are repeated: here 490 to 499, while 990 to 999 are missing."""
    for mine, both, again in run_ranks(2, _covered_by_ranks, exact_rows, group=False, timeout_s=30):
        assert mine == again == (1000, 0, 0, [])
        if exact_rows:
            assert (both.used, both.repeated, both.missing) == (990, 10, ["990", "991", "992"])
        else:
            assert both.used < 990
            assert "some of 990 to 999" in both.missing


def test_record_stays_small():
    """A bit per row, or 1 MiB: it is in every checkpoint."""
    for num_rows, most in (
        (61, 32),
        (1797, 256),
        (10_000_000, 1_250_032),
        (10_000_001, (1 << 20) + 32),
        (10**9, 2**21),
    ):
        record = Coverage(num_rows)
        record.add(np.arange(min(num_rows, 1000)))
        assert record.reduced(Runtime()).nbytes <= most


def test_a_row_that_is_repeated_in_a_skipped_step_has_updated_the_weights():
    record = Coverage(3)
    record.add(np.arange(3))
    record.add(np.array([2]), skipped=True)
    assert record.covered(Runtime()).updated == 3
