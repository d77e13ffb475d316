"""Places of files: paths and URLs."""

from __future__ import annotations


def is_url(place: str) -> bool:
    """True for a URL of any scheme, such as s3://bucket/run; False for a path."""
    return "://" in place
