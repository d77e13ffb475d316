from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.audit import kills
from harness.audit.kills import RunShape
from harness.audit.plan import PlannedKill

OUT = Path("/s/out")


def shape(
    steps: int, checkpoints: dict[int, list[str]] | list[int], epoch: int = 10**6, evaluated: tuple[int, ...] = ()
) -> RunShape:
    """A run that writes files ({after: names}), begins an epoch every ``epoch`` steps, and is evaluated after the files
    of the steps ``evaluated``."""
    events: list[dict] = []
    names = checkpoints if isinstance(checkpoints, dict) else {after: [f"{after}.pt"] for after in checkpoints}
    for done in range(steps + 1):
        for name in names.get(done, []):
            events.append({"event": "write", "path": str(OUT / name)})
            size = 100 if "optimizer" in name else 10
            calls = sum(each < done for each in evaluated)
            written = {"event": "written", "path": str(OUT / name), "after": done, "bytes": size, "evaluations": calls}
            events.append(written)
        calls = sum(each <= done for each in evaluated)
        if done < steps:
            events += [{"event": "epoch", "after": done}] * (done % epoch == 0)
            events.append({"event": "step", "number": done + 1, "evaluations": calls})
    events.append({"event": "end", "evaluations": calls})
    return RunShape(events, [OUT])


def only(made: RunShape, how: str = kills.MIDDLE) -> PlannedKill:
    (found,) = kills.choose(made, how, 0)
    return found.kill


def test_between_two_checkpoints():
    assert only(shape(12, [6])) == PlannedKill("step", 10)  # 9 steps are done
    assert only(shape(30, [10, 20, 30])) == PlannedKill("step", 16)
    assert only(shape(12, [6, 12])) == PlannedKill("step", 10)


def test_in_the_middle_of_an_epoch():
    # 10 and 20 are ends of epochs, 15 is not; nor is the step before the kill
    assert only(shape(30, [10, 15, 20, 30], epoch=10)) == PlannedKill("step", 18)
    assert only(shape(30, [10, 14], epoch=11)) == PlannedKill("step", 22)  # done: 21, as 22 is an end
    # checkpoints at the ends of epochs only
    assert only(shape(30, [10, 20, 30], epoch=10)) == PlannedKill("step", 16)


def test_a_checkpoint_after_each_step():
    assert only(shape(8, list(range(1, 9)), epoch=4)).place == "step"
    assert only(shape(2, [1])) == PlannedKill("step", 2)


def test_no_kill_is_possible():
    assert "wrote no checkpoint" in kills.why_none(shape(8, []))
    assert "wrote no checkpoint" in kills.why_none(shape(8, [0]))
    assert "at the very end, after step 8" in kills.why_none(shape(8, [8]))
    for how in (kills.MIDDLE, kills.ALL, "3"):
        assert kills.choose(shape(8, [8]), how, 0) == []
    assert kills.why_none(shape(8, [7])) == ""


def test_checkpoints_elsewhere_do_not_count():
    events = [
        {"event": "write", "path": "/tmp/1.pt"},
        {"event": "written", "path": "/tmp/1.pt", "after": 1},
        *[{"event": "step", "number": number} for number in range(4)],
        {"event": "write", "path": str(OUT / "2.pt")},
        {"event": "written", "path": str(OUT / "2.pt"), "after": 2},
    ]
    made = RunShape(events, [OUT])
    assert list(made.checkpoints) == [2]
    assert made.checkpoints[2][0].number == 2


def test_all():
    names = {after: [f"{after}/model", f"{after}/optimizer", f"{after}/random"] for after in (5, 10, 15, 20)}
    found = kills.choose(shape(20, names, epoch=10), kills.ALL, 0)
    assert [kill.kill for kill in found] == [
        PlannedKill("checkpoint", 3),  # the last file of step 5, in the middle of an epoch
        PlannedKill("step", 8),
        PlannedKill("step", 11),  # an epoch begins after 10 steps, which has a checkpoint
        PlannedKill("write", 5),  # the largest file of step 10
    ]
    assert [kill.after for kill in found] == [5, 7, 10, 10]
    assert "2 steps after the checkpoint of step 5" in found[1].text


def test_all_without_a_second_epoch_or_checkpoint():
    found = kills.choose(shape(20, [10]), kills.ALL, 0)
    assert [kill.kill.place for kill in found] == ["checkpoint", "step"]


@pytest.mark.parametrize("how", [kills.ALL, "1", "2", "5"])
def test_a_kill_follows_an_evaluation(how):
    """Between the checkpoint of step 13, which is before it, and the end; the first evaluation is a trial."""
    made = shape(19, [*range(2, 13, 2), 13, 14, 16, 18, 19], epoch=13, evaluated=(0, 13, 19))
    for seed in range(20):
        chosen = kills.choose(made, how, seed)
        assert [kill for kill in chosen if kill.kill.place in ("step", "checkpoint") and 14 <= kill.after < 19]
        assert kills.untested(made, chosen) == ""


def test_what_no_kill_after_an_evaluation_tests_is_said():
    never, at_end = (shape(20, [5, 10, 20], evaluated=evaluated) for evaluated in ((0,), (0, 10, 20)))
    early = shape(20, [5, 10, 15, 20], evaluated=(10, 20))
    assert kills.untested(never, kills.choose(never, "1", 0)) == ""
    assert "evaluate more often" in kills.untested(at_end, kills.choose(at_end, "9", 0))
    assert "--kills all" in kills.untested(early, kills.choose(early, kills.MIDDLE, 0))


def test_the_last_file_is_torn_only_if_there_is_no_other():
    assert kills.choose(shape(20, [5, 15, 20]), kills.ALL, 0)[-1].kill == PlannedKill("write", 2)
    assert kills.choose(shape(20, [10, 20]), kills.ALL, 0)[-1].kill == PlannedKill("write", 2)


@pytest.mark.parametrize("number", [1, 5, 8, 1000])
def test_random_places_are_usable_and_repeatable(number):
    made = shape(20, [5, 10, 15, 20], epoch=7)
    found = kills.choose(made, str(number), 3)
    places = [kill.kill for kill in found]
    assert len(set(places)) == len(places) == min(number, 14 + 3 + 3)
    assert found == kills.choose(made, str(number), 3)
    assert number > 100 or found != kills.choose(made, str(number), 4)
    for kill in found:
        assert kill.kill.place != "step" or 5 < kill.after < 20
        assert kill.kill.place != "write" or kill.after > 5
        assert kill.kill.place != "checkpoint" or kill.after < 20


def test_a_kill_before_the_first_checkpoint_is_renamed_tells_nothing():
    made = shape(20, [10, 15, 20])
    for files in made.checkpoints.values():
        files[:] = [replace(file, is_moved=True) for file in files]
    found = {kill.kill for kill in kills.choose(made, "100", 0)}
    assert PlannedKill("checkpoint", 2) in found
    assert PlannedKill("checkpoint", 1) not in found
    assert PlannedKill("checkpoint", 1) in {kill.kill for kill in kills.choose(shape(20, [10, 15, 20]), "100", 0)}


def test_random_kills_before_operations_and_in_evaluations():
    events = [
        {"event": "step", "evaluations": 0},
        {"event": "operation", "number": 1, "name": "rename", "path": "/out/a.tmp"},
        {"event": "step", "evaluations": 1},
        {"event": "end", "evaluations": 3},
    ]
    read = kills.RunShape(events, [])
    assert [(kill.kill, kill.after) for kill in read.operations] == [(PlannedKill("operation", 1), 1)]
    assert read.operations[0].text == "before it renames a.tmp, after step 1"
    assert [(kill.kill.number, kill.kill.after) for kill in read.evaluations] == [(1, 1), (1, 2), (2, 2)]
    assert [(each.kill.number, each.after) for each in RunShape(events, []).on_any_ranks().evaluations] == [
        (1, 1), (1, 2)
    ]  # fmt: skip
    whole = shape(30, [10, 20, 30])
    whole.operations, whole.evaluations = read.operations, read.evaluations
    hit: set[int] = set()
    for seed in range(20):
        chosen = kills.choose(whole, "100", seed, ranks=3, alone=0.5)
        assert chosen[0].kill.place in ("step", "checkpoint"), "the first one is after a checkpoint"
        assert {kill.kill.place for kill in chosen} == {"step", "checkpoint", "write", "operation", "evaluation"}
        steps = [kill.kill for kill in chosen if kill.kill.place == "step"]
        assert {kill.target for kill in steps} == {"rank", "all"}
        hit |= {kill.rank for kill in steps if kill.target == "rank"}
        assert not any(kill.kill.rank for kill in chosen if kill.kill.target == "all" or kill.kill.place != "step")
        assert all(
            kill.text.endswith(f"rank {kill.kill.rank} alone") == (kill.kill.target == "rank") for kill in chosen
        )
    assert hit == {0, 1, 2}
    assert all(kill.kill.target == "all" for kill in kills.choose(whole, "100", 0))
