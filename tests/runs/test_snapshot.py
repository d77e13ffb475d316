"""What is kept of a run folder while it is brought away: the state of one moment, whatever happens to the files."""

from __future__ import annotations

import os

import pytest

from harness.runs.snapshot import Outbox, identify


@pytest.fixture(params=["links", "no links"])
def outbox(request, tmp_path, monkeypatch) -> Outbox:
    if request.param == "no links":

        def refuse(*_):
            raise OSError("not on this file system")

        monkeypatch.setattr(os, "link", refuse)
    return Outbox(tmp_path / "outbox")


def test_a_moment_is_kept(outbox, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("grows", "replaced", "deleted", "known"):
        (run / name).write_text(f"{name}\n")
    known = {"known": identify(run / "known")}
    parcel = outbox.pack(run, ["grows", "replaced", "deleted", "known", "gone before"], known, {"latest": "step-1"})
    with open(run / "grows", "a") as file:
        file.write("more\n")
    (run / "new").write_text("other")
    os.replace(run / "new", run / "replaced")
    (run / "deleted").unlink()
    kept = {name: outbox.whole(*parcel.files[name]).read_text() for name in parcel.files}
    assert kept == {name: f"{name}\n" for name in ("grows", "replaced", "deleted")}
    again = outbox.pack(run, ["grows", "replaced"], {name: found[0] for name, found in parcel.files.items()}, {})
    assert {name: outbox.whole(*again.files[name]).read_text() for name in again.files} == {
        "grows": "grows\nmore\n",
        "replaced": "other",
    }
    outbox.drop(parcel)
    outbox.drop(again)
    assert not list((tmp_path / "outbox").iterdir())


def test_what_a_killed_start_left_goes(tmp_path):
    (tmp_path / "outbox" / "7").mkdir(parents=True)
    Outbox(tmp_path / "outbox")
    assert not (tmp_path / "outbox").exists()
