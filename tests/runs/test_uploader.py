"""Parcels arrive in the end, the newest of them; nobody waits for a place that has gone."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from harness.runs import uploader
from harness.runs.uploader import Courier, Refused


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(uploader, "MOST_PAUSE_S", 0.01)
    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)


class Place:
    def __init__(self, failures: list[Exception] | None = None) -> None:
        self.failures, self.brought, self.dropped = failures or [], [], []
        self.open = threading.Event()
        self.open.set()
        self.courier: Courier[int] = Courier("s3://bucket", self.bring, self.dropped.append)

    def bring(self, parcel: int) -> None:
        assert self.open.wait(10)
        if self.failures:
            raise self.failures.pop(0)
        self.brought.append(parcel)


def test_the_newest_waiting_parcel_is_brought():
    place = Place()
    place.open.clear()
    for parcel in (1, 2, 3, 4):
        place.courier.send(parcel)
        if parcel == 1:  # under way
            while place.courier._waiting is not None:
                time.sleep(0.01)
    place.open.set()
    assert place.courier.wait()
    assert place.brought == [1, 4]
    assert sorted(place.dropped) == [1, 2, 3, 4]


def test_what_fails_is_tried_again(caplog):
    caplog.set_level(logging.INFO)
    place = Place([OSError("one"), OSError("two")])
    place.courier.send(1)
    assert place.courier.wait()
    assert (place.brought, place.dropped, place.courier.trouble) == ([1], [1], None)
    assert [record.getMessage() for record in caplog.records] == [
        "what is written does not arrive at s3://bucket and will be tried again: one",
        "what is written arrives at s3://bucket again",
    ]


def test_a_place_that_is_away_for_days(monkeypatch):
    monkeypatch.setattr(uploader, "MOST_PAUSE_S", 0.0)
    place = Place([OSError("away")] * 1100)
    place.courier.send(1)
    assert place.courier.wait(20)
    assert place.brought == [1]


def test_a_newer_parcel_replaces_one_that_failed():
    place = Place([OSError("away")])
    place.open.clear()
    place.courier.send(1)
    while place.courier._waiting is not None:
        time.sleep(0.01)
    place.courier.send(2)
    place.open.set()
    assert place.courier.wait()
    assert (place.brought, sorted(place.dropped)) == ([2], [1, 2])


def test_nobody_waits_for_ever(monkeypatch):
    monkeypatch.setattr(uploader, "STALLED_S", 0.3)
    place = Place([OSError("away")] * 1000)
    place.courier.send(1)
    start = time.monotonic()
    assert not place.courier.wait()
    assert 0.2 < time.monotonic() - start < 5
    assert str(place.courier.trouble) == "away"
    place.failures.clear()
    assert place.courier.wait(5)


def test_progress_is_waited_for(monkeypatch):
    monkeypatch.setattr(uploader, "STALLED_S", 0.5)
    place = Place()

    def slowly(parcel: int) -> None:
        for _ in range(10):
            time.sleep(0.1)
            slow.moved()
        place.brought.append(parcel)

    slow: Courier[int] = Courier("s3://bucket", slowly, place.dropped.append)
    slow.send(1)
    assert slow.wait()
    assert place.brought == [1]


def test_refused_is_not_tried_again():
    place = Place([Refused("taken over")])
    place.courier.send(1)
    assert not place.courier.wait()
    assert place.courier.refused
    place.courier.send(2)
    assert not place.courier.wait(1)
    assert place.brought == []
