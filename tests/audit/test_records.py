"""The records of a start: its processes, checkpoints and what a kill left."""

from __future__ import annotations

import json
from pathlib import Path

from harness.audit.records import read
from tests.audit.synthetic import Training


def write(path: Path, *events: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def process(rank: int = 0, time: float = 1.0) -> dict:
    return {"event": "process", "rank": rank, "world": 1, "time": time}


def begun(path: str) -> dict:
    return {"event": "write", "path": path, "how": "torch.save"}


def written(path: str, after: int, **content) -> dict:
    return {"event": "written", "path": path, "how": "torch.save", "after": after, "bytes": 1, "content": content}


def test_an_empty_folder(tmp_path: Path):
    start = read(tmp_path)
    assert (start.name, start.steps, start.checkpoints, start.first) == (tmp_path.name, [], [], None)
    assert start.last_lines() == []


def test_files_of_one_moment_are_one_checkpoint(tmp_path: Path):
    step = Training().step(1)
    write(
        tmp_path / "rank0-1.jsonl",
        process(), step, begun("a"), written("a", 1, x=1), begun("b"), written("b", 1), written("a", 2),
    )  # fmt: skip
    assert [(each.after, list(each.files)) for each in read(tmp_path).checkpoints] == [(1, ["a", "b"]), (2, ["a"])]


def test_files_of_all_ranks_are_one_checkpoint(tmp_path: Path):
    for rank in range(2):
        write(tmp_path / f"rank{rank}-{rank}.jsonl", process(rank), Training().step(1, rank), written(f"part{rank}", 1))
    (checkpoint,) = read(tmp_path).checkpoints
    assert list(checkpoint.files) == ["part0", "part1"]


def test_renamed_files_and_folders(tmp_path: Path):
    write(
        tmp_path / "rank0-1.jsonl",
        process(), Training().step(1), written("last.tmp", 1, old=1),
        {"event": "renamed", "source": "last.tmp", "target": "last"},
        written("new/model", 2), written("new/optimizer", 2), written("newer", 2),
        {"event": "renamed", "source": "new", "target": "step-2"},
    )  # fmt: skip
    first, second = read(tmp_path).checkpoints
    assert first.files == {"last": {"old": 1}}
    assert list(second.files) == ["step-2/model", "step-2/optimizer", "newer"]


def test_what_a_kill_left_incomplete(tmp_path: Path):
    write(
        tmp_path / "rank0-1.jsonl",
        process(), Training().step(1), begun("a"), written("a", 1), begun("b"), begun("a"),
    )  # fmt: skip
    with open(tmp_path / "rank0-1.jsonl", "a") as file:
        file.write('{"event": "written", "path": "b", "aft')
    start = read(tmp_path)
    assert start.torn == ["b", "a"]
    assert [list(each.files) for each in start.checkpoints] == [["a"]]


def test_processes_of_one_rank_that_both_train(tmp_path: Path):
    """A script that spawns its ranks without a launcher, or a second training in a process of its own."""
    write(tmp_path / "rank0-9.jsonl", process(time=1.0), Training().step(1))
    write(tmp_path / "rank0-5.jsonl", process(time=2.0), Training().step(2), Training().step(3))
    write(tmp_path / "rank0-4.jsonl", process(time=0.5), {"event": "loaded", "path": "data.pt", "how": "torch.load"})
    start = read(tmp_path)
    assert [(each.pid, each.order) for each in start.processes] == [(9, 0), (5, 1)]
    assert start.others == 1
    assert start.loaded == ["data.pt"]


def test_a_start_without_steps_keeps_what_it_loaded(tmp_path: Path):
    write(tmp_path / "rank0-9.jsonl", process(), {"event": "loaded", "path": "last.pt", "how": "torch.load"})
    assert read(tmp_path).loaded == ["last.pt"]


def test_start_of_the_runner(tmp_path: Path):
    (tmp_path / "output.txt").write_text("one\n\ntwo\n")
    about = {"name": "resumed", "command": ["python", "a b.py"], "code": 3, "wall_s": 2, "killed": None,
             "output": str(tmp_path / "output.txt"), "late": "it hung"}  # fmt: skip
    (tmp_path / "ended.json").write_text(json.dumps(about))
    start = read(tmp_path)
    assert (start.name, start.command, start.code, start.late) == ("resumed", ["python", "a b.py"], 3, "it hung")
    assert start.last_lines(1) == ["two"]
