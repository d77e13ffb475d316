"""Statistical tests and intervals, for paired predictions and over seeds.

The tests compare the results with scipy, which is not a dependency, and with published examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance

LEVEL = 0.95  # of every interval
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


def mcnemar(only_one: int, only_other: int) -> float:
    """Two-sided p of the exact McNemar test, from the numbers of rows that only one or only the other model gets right.

    If both models are equally good, each such row is the toss of a fair coin.
    """
    count = only_one + only_other
    fewer = min(only_one, only_other)
    logs = [math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(fewer + 1)]
    return min(1.0, 2 * math.fsum(math.exp(log - count * math.log(2)) for log in logs))


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Wilson's score interval of ``hits`` out of ``count``."""
    share, square = hits / count, _Z**2 / count
    middle, half = share + square / 2, _Z * math.sqrt((share * (1 - share) + square / 4) / count)
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def paired_interval(both: int, only_one: int, only_other: int, neither: int) -> tuple[float, float]:
    """Interval of the other model's accuracy minus the first's, over rows that both predict.

    Newcombe's square-and-add method for paired rows (Statistics in Medicine 17, 1998, pages 2635-2650): Wilson's
    intervals of the two accuracies, combined with their correlation, which is corrected for continuity.
    """
    count = both + only_one + only_other + neither
    hits, other_hits = both + only_one, both + only_other
    margins = hits * (count - hits) * other_hits * (count - other_hits)
    alike = both * neither - only_one * only_other
    correlation = min(alike, max(0.0, alike - count / 2)) / math.sqrt(margins) if margins else 0.0
    (low, high), (other_low, other_high) = wilson(hits, count), wilson(other_hits, count)
    share, other_share = hits / count, other_hits / count

    def reach(away: float, other_away: float) -> float:
        return math.sqrt(max(0.0, away**2 - 2 * correlation * away * other_away + other_away**2))

    difference = other_share - share
    return (
        difference - reach(high - share, other_share - other_low),
        difference + reach(share - low, other_high - other_share),
    )


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean; None for a single value."""
    return math.sqrt(variance(values) / len(values)) if len(values) > 1 else None


def welch(values_a: Sequence[float], values_b: Sequence[float]) -> tuple[float, float] | None:
    """Welch's interval of the other mean minus the first; None if a side has a single value.

    Degrees of freedom are rounded down, which makes the interval slightly wider.
    """
    squares = [variance(values) / len(values) for values in (values_a, values_b) if len(values) > 1]
    if len(squares) < 2:
        return None
    difference, total = fmean(values_b) - fmean(values_a), sum(squares)
    if not total:
        return difference, difference
    freedom = total**2 / sum(square**2 / (len(v) - 1) for square, v in zip(squares, (values_a, values_b), strict=True))
    half = student(max(1, math.floor(freedom + 1e-9))) * math.sqrt(total)
    return difference - half, difference + half


def student(freedom: int) -> float:
    """Return the two-sided critical value t of Student's distribution at LEVEL, for a whole number of degrees of
    freedom."""
    low, high = 0.0, 20.0  # of one degree it is 12.7
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < LEVEL else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| <= t): the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
