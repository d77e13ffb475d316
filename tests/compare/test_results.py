"""Metrics out of records, rows paired by what they are, and means over seeds: numbers done by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.compare import found, history, page, results, settings
from harness.errors import ConfigError
from harness.runs.reader import read


def write_run(folder: Path, evaluations: list[dict[str, Any]], best: int | None = None, **config: Any) -> Path:
    """A finished run with a record of evaluations; ``best`` is the step of the best one."""
    folder.mkdir(parents=True)
    tree = {"name": folder.name, "seed": 0, "task": {"name": "image_csv"}, **config}
    (folder / "config.yaml").write_text(json.dumps(tree))  # JSON is YAML
    (folder / "provenance.json").write_text(json.dumps([{"world_size": 1, "ranks": ["here: cpu"], "packages": {}}]))
    lines = [{"split": "eval", "epoch": 1, **line, "wall_s": 1.0} for line in evaluations]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = {"top1": next(line["top1"] for line in evaluations if line["step"] == best), "step": best} if best else {}
    (folder / "summary.json").write_text(json.dumps({"name": folder.name, "finished": True, "best": kept}))
    return folder


def seeds(folder: Path, values: list[float], **config: Any) -> Path:
    for seed, value in enumerate(values):
        write_run(folder / f"seed{seed}", [{"step": 9, "top1": value, "loss": 1 - value}], 9, seed=seed, **config)
    return folder


def predictions(folder: Path, rows: list[tuple[Any, Any, Any]], columns: str = "id,prediction,label") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    (folder / "predictions.csv").write_text(f"{columns}\n{text}")
    return folder


def test_newest_and_best(tmp_path):
    lines = [{"step": 5, "top1": 0.9, "loss": 0.5, "rows": 7}, {"step": 9, "top1": 0.8, "loss": 0.4, "rows": 7}]
    one = results.evaluations(read(write_run(tmp_path / "a", lines, 5)))
    assert (one.step, one.final) == (9, {"loss": 0.4, "top1": 0.8})
    assert (one.best_step, one.best, one.best_metric) == (5, {"loss": 0.5, "top1": 0.9}, "top1")
    none = results.evaluations(read(write_run(tmp_path / "b", [])))
    assert (none.step, none.final, none.best_step, none.best) == (None, {}, None, {})
    assert [metric.name for metric in results.metrics(one, none)] == ["top1", "loss"]
    assert results.metrics(one, none)[0].final == (0.8, None)


def test_rows_are_paired(tmp_path):
    truth = ["cat", "dog", "cat", "dog", "dog", "NA"]
    one = predictions(tmp_path / "a", [(i, g, t) for i, (g, t) in enumerate(zip(
        ["cat", "dog", "dog", "cat", "dog", "NA"], truth, strict=True))])  # fmt: skip
    other = predictions(tmp_path / "b", [(i, g, t) for i, (g, t) in enumerate(zip(
        ["cat", "cat", "cat", "cat", "", "NA"], truth, strict=True))])  # fmt: skip
    found, why = results.guesses(one, other)
    # The row without a guess (an image that could not be read) is left out.
    assert (found.rows, found.both, found.only_one, found.only_other, found.neither, why) == (5, 2, 1, 1, 1, "")
    assert (found.difference, found.p) == (0.0, 1.0)
    assert found.interval[0] == pytest.approx(-found.interval[1])


def test_rows_of_another_order_are_paired_by_id_and_truth(tmp_path):
    one = predictions(tmp_path / "a", [("x.png", 1, 1), ("y.png", 0, 1), ("z.png", 1, 1), ("w.png", 1, 0)])
    other = predictions(tmp_path / "b", [("z.png", 0, 1), ("y.png", 1, 1), ("v.png", 1, 1), ("w.png", 1, 1)])
    found, _ = results.guesses(one, other)
    assert (found.rows, found.both, found.only_one, found.only_other, found.neither) == (2, 0, 1, 1, 0)


@pytest.mark.parametrize(
    ("rows", "columns", "why"),
    [
        ([("x", 1, 1), ("x", 0, 1)], "id,prediction,label", "of other rows"),
        ([("q", 1, 1)], "id,prediction,label", "no row in common"),
        ([("x", 0.5, 1)], "id,score,label", "without predictions and labels"),
        ([("x", 1)], "id,prediction,label", "no predictions.csv with a prediction"),
        (None, "", "no predictions.csv"),
    ],
)
def test_rows_that_cannot_be_paired(tmp_path, rows, columns, why):
    one = predictions(tmp_path / "a", [("x", 1, 1), ("y", 0, 1)])
    other = tmp_path / "b" if rows is None else predictions(tmp_path / "b", rows, columns)
    found, said = results.guesses(one, other)
    assert found is None
    assert why in said


def test_over_seeds(tmp_path):
    one, other = seeds(tmp_path / "a", [0.90, 0.92, 0.91]), seeds(tmp_path / "b", [0.94, 0.96, 0.95])
    result = found.compare(found.side(one), found.side(other))
    top1, loss = result.spreads["final"]
    assert (top1.name, loss.name) == ("top1", "loss")
    assert top1.values == ([0.90, 0.92, 0.91], [0.94, 0.96, 0.95])
    assert top1.means == pytest.approx((0.91, 0.95))
    assert top1.errors == pytest.approx((0.01 / 3**0.5, 0.01 / 3**0.5))
    half = 2.776445 * 0.01 * (2 / 3) ** 0.5  # t of 4 degrees of freedom
    assert top1.interval == pytest.approx((0.04 - half, 0.04 + half), abs=1e-6)
    text = page.text(result)
    assert "A  " + str(one) + "  (3 runs, seeds 0, 1, 2)" in text
    assert "0.91 ± 0.0058  0.95 ± 0.0058  +0.04" in text
    assert not result.same


def test_one_run_against_seeds(tmp_path):
    one, other = write_run(tmp_path / "a", [{"step": 9, "top1": 0.5}], 9), seeds(tmp_path / "b", [0.25, 0.75])
    result = found.compare(found.side(one), found.side(other))
    (top1,) = result.spreads["best"]
    assert (top1.means, top1.errors[0], top1.interval) == ((0.5, 0.5), None, None)
    assert "(one seed)" in page.text(result)
    assert "not from one seed" in page.text(result)


def test_a_folder_of_other_things_is_refused(tmp_path):
    mixed = seeds(tmp_path / "a", [0.5])
    write_run(mixed / "fast", [{"step": 9, "top1": 0.5}], seed=1, optimizer={"lr": 0.5})
    with pytest.raises(ConfigError, match=r"differ by more than their seed: optimizer\.lr") as error:
        found.side(mixed)
    assert error.value.exit_code == 2
    longer = seeds(tmp_path / "longer", [0.5], train={"epochs": 3})
    write_run(longer / "more", [{"step": 9, "top1": 0.5}], seed=1, train={"epochs": 4})
    with pytest.raises(ConfigError, match=r"differ by more than their seed: train\.epochs"):
        found.side(longer)
    twice = seeds(tmp_path / "b", [0.5, 0.6])
    write_run(twice / "again", [{"step": 9, "top1": 0.5}], seed=1)
    with pytest.raises(ConfigError, match="of one seed, 1"):
        found.side(twice)
    with pytest.raises(ConfigError, match="no such folder"):
        found.side(tmp_path / "none")


def test_who_is_left_out_of_a_group_is_told(tmp_path):
    group = seeds(tmp_path / "a", [0.5, 0.6, 0.7])
    (group / "seed1" / "failure.json").write_text(json.dumps({"error": "TrainingError", "message": "nan"}))
    side = found.side(group)
    assert side.seeds == [0, 2]
    assert side.problems == ["seed1 is left out: failed"]
    for number in (0, 2):
        (group / f"seed{number}" / "failure.json").write_text("{}")
    with pytest.raises(ConfigError, match="none of its 3 runs is finished"):
        found.side(group)


def test_settings_of_an_older_version_are_at_their_defaults(tmp_path):
    """A run of before a setting was there, and one that has it at its default, are of one recipe."""
    one = read(write_run(tmp_path / "a", [], optimizer={"name": "sgd", "lr": 0.1}))
    other = read(write_run(tmp_path / "b", [], optimizer={"name": "sgd", "lr": 0.1, "larc": None, "args": {}}))
    told = settings.compare(one, other)
    assert told.recipe == {}
    assert told.other == {"name": ("a", "b")}


def test_a_run_that_was_resumed_elsewhere(tmp_path):
    one, other = write_run(tmp_path / "a", []), write_run(tmp_path / "b", [])
    starts = [{"git": {"commit": "a" * 40, "changed": False}, "packages": {"torch": "2.14"}, "python": "3.11",
               "world_size": 2, "ranks": ["n: cpu"] * 2, "amp": "harness.apex", "launched_by": "x"}]  # fmt: skip
    (one / "provenance.json").write_text(json.dumps(starts))
    again = {**starts[0], "git": {"commit": "b" * 40, "changed": False}, "packages": {"torch": "2.15"}}
    (other / "provenance.json").write_text(json.dumps([*starts, again]))
    told = settings.compare(read(one), read(other))
    assert told.packages == {"torch": ("2.14", "2.14, then 2.15")}
    assert told.topology == {}
    assert told.code.commits == (["a" * 40], ["a" * 40, "b" * 40])
    assert told.code.same is False


def lines(folder: Path, *rows: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"epoch": 0, **row}) + "\n" for row in rows))
    return folder


def test_losses_over_other_windows_are_not_compared(tmp_path):
    one = lines(tmp_path / "a", *({"split": "train", "step": s, "loss": 1 / s} for s in (2, 4, 6)))
    other = lines(tmp_path / "b", *({"split": "train", "step": s, "loss": 2 / s} for s in (3, 6)))
    record = history.compare(read(one), read(other))
    assert (record.compared, record.same, record.first, record.whole) == (0, None, None, False)


def test_the_first_line_that_differs(tmp_path):
    rows = [{"split": "train", "step": s, "loss": 1.0, "lr": 0.1, "wall_s": s} for s in (2, 4, 6, 8)]
    rows.insert(2, {"split": "eval", "step": 4, "top1": 0.5, "class_accuracy": {"a": 0.5, "b": None}})
    changed = [dict(row, wall_s=99, time_host=0.5) for row in rows]
    changed[3] |= {"loss": 1.5}
    changed[4] |= {"loss": 0.25, "lr": 0.2}
    record = history.compare(read(lines(tmp_path / "a", *rows)), read(lines(tmp_path / "b", *changed)))
    assert (record.compared, record.equal, record.same, record.whole) == (5, 3, False, True)
    assert (record.first.split, record.first.steps) == ("train", (5, 6))
    assert record.first.fields == {"loss": (1.0, 1.5)}
    assert record.low == 5  # the evaluation after step 4 is the same
    assert record.loss == (0.75, 8)


@pytest.mark.parametrize(
    ("commits", "changed", "same", "words"),
    [
        ((["a" * 40], ["a" * 40]), (False, False), True, "the same commit, aaaaaaaaaaaa"),
        ((["a" * 40], ["a" * 40]), (False, True), None, "but B with changes that are not committed: the code may"),
        ((["a" * 40], ["a" * 40]), (True, True), None, "but both with changes that are not committed"),
        ((["a" * 40], ["b" * 40, "c" * 40]), (True, False), False, "committed; B bbbbbbbbbbbb, then cccccccccccc"),
        (([None], [None]), (False, False), None, "outside a repository"),
    ],
)
def test_what_is_said_of_the_code(commits, changed, same, words):
    assert words in page._code(settings.Code(commits, changed, same))
