"""Fewer points for a line that looks the same: each bucket of points keeps its least and its largest value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def keep(series: Sequence[np.ndarray], limit: int) -> np.ndarray:
    """Which points to keep of ``series``, each (points,): indices, ascending, about ``limit`` of them at most.

    The first and the last point stay, and of every bucket of neighbours the least and the largest value of each of the
    series, so that a spike of a single point is never lost. NaN is no value. All points stay where there are no more
    than ``limit``.
    """
    num_points = len(series[0]) if series else 0
    if num_points <= limit:
        return np.arange(num_points)
    num_buckets = max(1, (limit - 2) // (2 * len(series)))
    width = -(-num_points // num_buckets)
    kept = {0, num_points - 1}
    starts = np.arange(0, num_points, width)
    for values in series:
        padded = np.full(len(starts) * width, np.nan)
        padded[:num_points] = values
        buckets = padded.reshape(len(starts), width)
        known = ~np.isnan(buckets).all(axis=1)
        least = np.where(np.isnan(buckets), np.inf, buckets).argmin(axis=1)
        largest = np.where(np.isnan(buckets), -np.inf, buckets).argmax(axis=1)
        kept.update((starts + least)[known].tolist(), (starts + largest)[known].tolist())
    return np.array(sorted(kept))
