from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from harness.audit import saved_files
from harness.audit.saved_files import SavedFiles
from harness.audit.starts import HOOK

sys.path.insert(0, str(HOOK))
import resume_digest as digest  # noqa: E402

sys.path.remove(str(HOOK))
WEIGHT = torch.arange(3.0)


class Saves:
    """Events of checkpoints in a folder. The files are created as well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[dict] = []

    def write(self, name: str, *, is_complete: int | None = None) -> Saves:
        """``is_complete``: after so many steps; None: the file is torn."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        self.events.append({"event": "write", "path": str(path), "how": "torch.save"})
        if is_complete is not None:
            self.events.append({"event": "written", "path": str(path), "after": is_complete, "bytes": 7})
        return self

    def save(self, after: int, *names: str) -> Saves:
        self.events.append({"event": "step"})
        for name in names:
            self.write(name, is_complete=after)
        return self

    def rename(self, source: str, target: str) -> Saves:
        os.rename(self.folder / source, self.folder / target)
        self.events.append(
            {"event": "renamed", "source": str(self.folder / source), "target": str(self.folder / target)}
        )
        return self


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def newest(out: Path, saves: Saves, undisturbed: Saves | None = None, *others: Saves, torn=False) -> str | None:
    """The result of ``latest``, relative to ``out``. Without ``undisturbed``, it did the same."""
    ranks = {rank: each.events for rank, each in enumerate([saves, *others])}
    found = saved_files.newest(ranks, {0: (undisturbed or saves).events}, [out], torn)
    return None if found is None else str(found.relative_to(out))


def test_a_file(out):
    assert newest(out, Saves(out).save(5, "5.pt").save(10, "10.pt")) == "10.pt"
    assert newest(out, Saves(out)) is None


def test_results_of_an_evaluation_are_no_checkpoint(out):
    """The digest of a weight before a step, as a checkpoint has it, tells which file a resume needs."""
    saves = Saves(out).save(5, "5.pt", "results.pt")
    saves.events[2]["content"] = {"model.w": digest.resolve(digest.content({"w": WEIGHT})["w"]), "epoch": 1}
    saves.events[4]["content"] = {"precision": "0123456789abcdef", "epoch": 1}
    assert newest(out, saves) == "results.pt"  # of two files without a known weight, the newest
    saves.events.append({"event": "step", "weights": {"w": digest.tensor(WEIGHT)}})
    assert newest(out, saves) == "5.pt"


def test_a_folder_of_one_moment(out):
    saves = Saves(out).save(5, "c-5/model", "c-5/optimizer").save(10, "c-10/model", "c-10/optimizer")
    assert newest(out, saves) == "c-10"
    assert newest(out, Saves(out).save(5, "c-5/model").save(10, "c-10/model")) == "c-10/model"


def test_a_folder_with_parts_in_folders(out):
    first = Saves(out).save(5, "run/c-5/model/0", "run/c-5/random", "run/c-5/optimizer/0")
    second = Saves(out).save(5, "run/c-5/model/1", "run/c-5/optimizer/1")
    assert newest(out, first, None, second) == "run/c-5"
    assert newest(out, Saves(out).save(5, "run/c-5/model/0", "run/c-5/model/1", "run/c-5/a")) == "run/c-5"


def test_the_undisturbed_run_shows_which_folder_is_no_checkpoint(out):
    undisturbed = Saves(out).save(5, "run/best", "run/last").save(10, "run/last")
    assert newest(out, Saves(out).save(5, "run/best", "run/last"), undisturbed) == "run/last"


def test_the_folder_for_output_is_no_checkpoint(out):
    assert newest(out, Saves(out).save(5, "model", "optimizer")) == "optimizer"


def test_renames_are_followed(out):
    saves = Saves(out).save(5, "tmp-5/model", "tmp-5/optimizer").rename("tmp-5", "c-5")
    assert newest(out, saves) == "c-5"
    saves.save(10, "tmp").rename("tmp", "last")
    assert newest(out, saves) == "last"
    saves.save(15, "tmp").rename("tmp", "last")
    assert newest(out, saves) == "last"
    assert [file.path.name for file in SavedFiles(saves.events).all] == ["model", "optimizer", "last", "last"]


def test_torn_files_are_left_out(out):
    undisturbed = Saves(out).save(5, "5.pt").save(10, "10.pt")
    assert newest(out, Saves(out).save(5, "5.pt").write("10.pt"), undisturbed) == "5.pt"
    undisturbed = Saves(out).save(5, "c-5/a", "c-5/b").save(10, "c-10/a", "c-10/b")
    assert newest(out, Saves(out).save(5, "c-5/a", "c-5/b").save(10, "c-10/a").write("c-10/b"), undisturbed) == "c-5"
    # killed between two files
    assert newest(out, Saves(out).save(5, "c-5/a", "c-5/b").save(10, "c-10/a"), undisturbed) == "c-5"


def test_a_file_that_is_overwritten_is_torn(out):
    undisturbed = Saves(out).save(5, "last.pt").save(10, "last.pt")
    saves = Saves(out).save(5, "last.pt").write("last.pt")
    assert newest(out, saves, undisturbed) is None
    assert newest(out, saves, undisturbed, torn=True) == "last.pt"
    saves.write("previous.pt")
    assert newest(out, saves, undisturbed, torn=True) == "previous.pt"
    assert newest(out, saves.write("last.pt"), undisturbed, torn=True) == "last.pt"


def test_a_file_under_its_temporary_name_is_left_out(out):
    undisturbed = Saves(out).save(5, "tmp").rename("tmp", "5.pt").save(10, "tmp").rename("tmp", "10.pt")
    assert newest(out, Saves(out).save(5, "tmp").rename("tmp", "5.pt").save(10, "tmp"), undisturbed) == "5.pt"


def test_a_file_that_is_kept_under_another_name_later_is_complete(out):
    undisturbed = Saves(out).save(5, "last").save(10).rename("last", "previous").save(10, "last")
    saves = Saves(out).save(5, "last")
    (out / "previous").unlink()
    assert newest(out, saves, undisturbed) == "last"


def test_removed_files_are_left_out(out):
    saves = Saves(out).save(5, "5.pt").save(10, "10.pt")
    (out / "10.pt").unlink()
    assert newest(out, saves) == "5.pt"


def test_checkpoints_elsewhere(out, tmp_path):
    saves = Saves(tmp_path / "elsewhere").save(5, "5.pt")
    assert saved_files.outside_file(saves.events, [out]) == tmp_path / "elsewhere" / "5.pt"
    assert saved_files.newest({0: saves.events}, {0: saves.events}, [out]) is None
    saves.events += Saves(out).save(10, "10.pt").events
    assert saved_files.outside_file(saves.events, [out]) is None
    assert newest(out, saves) == "10.pt"


def test_newest_match(out, tmp_path):
    for place, name in enumerate(["out/b/x.pt", "out/a/x.pt", "out/c/x.txt", "work/y.pt"]):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (place, place))
    assert saved_files.newest_match("{out}/**/*.pt", tmp_path / "work", out) == out / "a" / "x.pt"
    assert saved_files.newest_match("*.pt", tmp_path / "work", out) == tmp_path / "work" / "y.pt"
    assert saved_files.newest_match("*.ckpt", tmp_path / "work", out) is None


def test_newest_match_in_folders_with_brackets_and_dangling_links(tmp_path):
    work, out = tmp_path / "work[1]", tmp_path / "run[1]"
    for folder in (work, out):
        folder.mkdir()
        (folder / "latest.pt").symlink_to("missing.pt")
        assert saved_files.newest_match("*.pt" if folder == work else "{out}/*.pt", work, out) is None
        (folder / "5.pt").touch()
    assert saved_files.newest_match("*.pt", work, out) == work / "5.pt"
    assert saved_files.newest_match("{out}/*.pt", work, out) == out / "5.pt"


def test_events_of_the_process_that_trains(tmp_path):
    (tmp_path / "rank0-1.jsonl").write_text('{"event": "process"}\n{"event": "end"}\n{"event": "loaded"}\n')
    (tmp_path / "rank0-2.jsonl").write_text('{"event": "step", "number": 1}\n{"event": "st')
    (tmp_path / "rank1-3.jsonl").write_text('{"event": "process"}\n')
    (tmp_path / "ended.json").write_text("{}")
    assert saved_files.events_by_rank(tmp_path) == {0: [{"event": "step", "number": 1}], 1: [{"event": "process"}]}
