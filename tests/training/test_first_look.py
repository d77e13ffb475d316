"""A damaged evaluation row ends a run in its first epoch, not after it."""

from __future__ import annotations

from concurrent.futures import wait

import pytest

from harness.distributed.runtime import Runtime
from harness.errors import DataError
from harness.tasks.image_csv.task import ImageCsv
from harness.training import loop
from harness.training.rows.first_look import FirstLook
from harness.training.run_start import RunStart
from tests.fixtures import make_config, write_rows


@pytest.fixture
def folder(tmp_path):
    write_rows(tmp_path, "train", 40)
    write_rows(tmp_path, "eval", 30)
    (tmp_path / "eval_images" / "25.png").write_bytes(b"no image")
    return tmp_path


def train(folder, *overrides):
    with RunStart(make_config(folder, ("train.epochs=1", "train.deterministic=false", *overrides)), Runtime()) as run:
        loop.train(run)
        return run


def test_a_damaged_image_is_found_before_the_first_evaluation(folder, monkeypatch):
    poll = FirstLook.poll

    def waiting(look):
        poll(look)
        wait([look._work], 60)

    monkeypatch.setattr(ImageCsv, "require_files", lambda *_: None)  # which finds it in a small table
    monkeypatch.setattr(loop, "evaluate", lambda run: pytest.fail("the evaluation was the first to read it"))
    monkeypatch.setattr(FirstLook, "poll", waiting)
    with pytest.raises(DataError, match=r"eval\.csv:27: image cannot be decoded: .*25\.png"):
        train(folder)


def test_a_small_table_is_read_before_the_first_step(folder, monkeypatch):
    """All of it: the damaged image is none of the sixteen that a start decodes of a larger table."""
    monkeypatch.setattr(loop, "epoch", lambda run: pytest.fail("a step was taken"))
    with pytest.raises(DataError, match=r"eval\.csv:27: image cannot be decoded: .*25\.png"):
        train(folder)


def test_damaged_images_may_be_skipped_and_the_look_ends_with_the_first_evaluation(folder):
    run = train(folder, "task.on_bad_row=skip")
    assert run.first_look._ended.is_set()
    assert run.state.evaluated == 10


def test_the_thread_ends_when_it_is_told_to():
    class Endless:
        def look(self, rows, ended):
            while not ended():
                pass

    look = FirstLook(Endless(), range(3))
    look.poll()
    work = look._work
    look.end()
    assert work.done()
    look.poll()  # reads nothing any more
    assert look._work is None
