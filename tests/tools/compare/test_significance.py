"""Intervals and tests, compared with scipy, with published examples, and with properties that must always hold."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.tools.compare.significance import mcnemar, paired_interval, standard_error, student, welch, wilson

counts = st.integers(0, 400)


@pytest.mark.parametrize("pair", [(0, 0), (0, 1), (1, 7), (5, 7), (50, 90), (3000, 3100), (0, 2000)])
def test_mcnemar_is_the_exact_binomial_test(pair):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(pair[0], sum(pair), 0.5).pvalue if sum(pair) else 1.0
    assert mcnemar(*pair) == pytest.approx(expected, rel=1e-6)
    assert mcnemar(*reversed(pair)) == mcnemar(*pair)


def test_mcnemar_by_hand():
    """Seven tosses, one of them heads: twice (1 + 7) / 128."""
    assert mcnemar(1, 6) == pytest.approx(2 * 8 / 128)
    assert mcnemar(4, 4) == 1.0


def test_mcnemar_with_many_rows():
    assert 0 < mcnemar(99_000, 101_000) < 1e-4


@pytest.mark.parametrize("hits", [0, 1, 15, 20])
def test_wilson_is_scipys(hits):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(hits, 20).proportion_ci(method="wilson")
    assert wilson(hits, 20) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_paired_interval_of_a_published_table():
    """Hyper-responsiveness of 21 airways before and after (Bentur et al. 2009), as in Fagerland, Lydersen and Laake,
    Statistical Analysis of Contingency Tables, chapter 8: -0.507 to -0.026, before minus after."""
    assert paired_interval(1, 1, 7, 12) == pytest.approx((0.026, 0.507), abs=5e-4)


@given(counts, counts, counts, counts)
@settings(max_examples=200)
def test_paired_interval_contains_the_difference(both, one, other, neither):
    count = both + one + other + neither
    if not count:
        return
    low, high = paired_interval(both, one, other, neither)
    assert -1 - 1e-9 <= low <= (other - one) / count <= high <= 1 + 1e-9
    mirrored = paired_interval(both, other, one, neither)
    assert (-mirrored[1], -mirrored[0]) == pytest.approx((low, high), abs=1e-12)
    assert low < high


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 7, 10, 29, 30, 1000])
def test_student_is_scipys(freedom):
    stats = pytest.importorskip("scipy.stats")
    assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def test_welch_with_whole_degrees_of_freedom():
    """Equal variances and sizes: 2 (n - 1) degrees of freedom, as in scipy."""
    stats = pytest.importorskip("scipy.stats")
    one, other = [0.90, 0.92, 0.91], [0.94, 0.96, 0.95]
    expected = stats.ttest_ind(other, one, equal_var=False).confidence_interval()
    assert welch(one, other) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_welch_is_never_narrower_than_scipy():
    stats = pytest.importorskip("scipy.stats")
    one, other = [1.0, 2.0, 3.0], [2.0, 3.0, 5.0, 9.0]
    expected = stats.ttest_ind(other, one, equal_var=False).confidence_interval()
    low, high = welch(one, other)
    assert low <= expected.low < expected.high <= high
    assert high - low < 1.5 * (expected.high - expected.low)


def test_single_seed_has_no_spread():
    assert standard_error([0.5]) is None
    assert welch([0.5], [0.4, 0.6]) is None
    assert standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    assert welch([0.5, 0.5], [0.75, 0.75]) == (0.25, 0.25)
