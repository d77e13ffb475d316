"""Thinned lines keep what the eye would miss: extremes, ends, order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.report.downsample import keep

VALUES = st.lists(st.floats(allow_nan=True, allow_infinity=False, width=32), min_size=1, max_size=300)


@given(VALUES, st.integers(min_value=4, max_value=60))
def test_extremes_and_ends_stay(values, limit):
    series = np.array(values)
    kept = keep([series], limit)
    assert (np.diff(kept) > 0).all()
    assert {0, len(series) - 1} <= set(kept.tolist())
    known = series[~np.isnan(series)]
    if len(known):
        thinned = series[kept]
        assert np.nanmin(thinned) == known.min()
        assert np.nanmax(thinned) == known.max()


@given(VALUES, st.integers(min_value=4, max_value=60))
def test_every_stretch_keeps_its_own_extremes(values, limit):
    series = np.array(values)
    kept = keep([series], limit)
    if len(series) <= limit:
        assert kept.tolist() == list(range(len(series)))
        return
    width = -(-len(series) // max(1, (limit - 2) // 2))
    for start in range(0, len(series), width):
        stretch = series[start : start + width]
        mine = series[kept[(kept >= start) & (kept < start + width)]]
        if not np.isnan(stretch).all():
            assert np.nanmin(mine) == np.nanmin(stretch)
            assert np.nanmax(mine) == np.nanmax(stretch)


@given(st.lists(VALUES, min_size=2, max_size=3), st.integers(min_value=8, max_value=40))
def test_of_several_series_each_keeps_its_own(columns, limit):
    num_points = min(map(len, columns))
    series = [np.nan_to_num(np.array(column[:num_points])) for column in columns]
    kept = keep(series, limit)
    assert len(kept) <= max(limit, 2 + 2 * len(series))
    for values in series:
        assert values[kept].min() == values.min()
        assert values[kept].max() == values.max()


@pytest.mark.parametrize("num_points", [100, 10_000, 1_000_003])
def test_a_spike_of_one_point_in_a_long_line_stays(num_points):
    values = np.zeros(num_points)
    values[num_points // 3] = 7.0
    kept = keep([values], 50)
    assert num_points // 3 in kept
    assert len(kept) <= 50


def test_nothing_of_nothing():
    assert keep([], 10).tolist() == []
    assert keep([np.array([])], 10).tolist() == []
