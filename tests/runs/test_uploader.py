"""The background uploader: it uploads the newest state, retries, and nobody waits for a store that is gone."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable

import pytest

from harness.runs import uploader
from harness.runs.uploader import Uploader, UploadTakenOver


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(uploader, "MAX_PAUSE_S", 0.0)
    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)


class Target:
    """Counts uploads; raises ``failures`` first, and waits while ``open`` is not set."""

    def __init__(self, failures: Iterable[Exception] = ()) -> None:
        self.failures, self.uploads = iter(failures), 0
        self.started, self.open = threading.Event(), threading.Event()
        self.open.set()
        self.uploader = Uploader("s3://bucket", self.upload)

    def upload(self) -> None:
        self.started.set()
        assert self.open.wait(10)
        for failure in self.failures:
            raise failure
        self.uploads += 1


def test_requests_during_an_upload_are_one_upload():
    target = Target()
    target.open.clear()
    target.uploader.request()
    assert target.started.wait(10)
    for _ in range(3):
        target.uploader.request()
    target.open.set()
    assert target.uploader.wait()
    assert target.uploads == 2


def test_failed_upload_is_retried(caplog):
    caplog.set_level(logging.INFO)
    target = Target([OSError("one"), OSError("two"), *[OSError("more")] * 1100])  # 2.0 ** 1100 would overflow
    target.uploader.request()
    assert target.uploader.wait(20)
    assert (target.uploads, target.uploader.error) == (1, None)
    assert [record.getMessage() for record in caplog.records] == [
        "upload to s3://bucket failed and will be retried: one",
        "upload to s3://bucket works again",
    ]


def test_wait_ends_after_some_failed_attempts_or_at_its_limit():
    target = Target(itertools.repeat(OSError("no space left")))
    target.uploader.request()
    assert not target.uploader.wait()
    assert str(target.uploader.error) == "no space left"
    target.failures = iter(())
    blocked = Target()
    blocked.open.clear()
    blocked.uploader.request()
    assert not blocked.uploader.wait(0.1)
    blocked.open.set()
    assert blocked.uploader.wait(10)


def test_nothing_is_uploaded_once_another_start_has_taken_over():
    target = Target([UploadTakenOver("another start")])
    for _ in range(2):
        target.uploader.request()
        assert not target.uploader.wait(1)
    assert target.uploader.taken_over
    assert target.uploads == 0
