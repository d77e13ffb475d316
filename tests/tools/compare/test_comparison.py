"""Metrics, paired predictions, means over seeds, settings and logs, against numbers worked out by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harness.errors import ConfigError
from harness.runs.reader import read
from harness.tools.compare import comparison, text


def write_run(folder: Path, evaluations: list[dict[str, Any]], best: int | None = None, **config: Any) -> Path:
    """A finished run with these evaluations; ``best`` is the step of the best one."""
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


def test_newest_and_best_evaluation(tmp_path):
    lines = [{"step": 5, "top1": 0.9, "loss": 0.5, "rows": 7}, {"step": 9, "top1": 0.8, "loss": 0.4, "rows": 7}]
    one = comparison.evaluations(read(write_run(tmp_path / "a", lines, 5)))
    assert (one.step, one.final) == (9, {"loss": 0.4, "top1": 0.8})
    assert (one.best_step, one.best, one.best_metric) == (5, {"loss": 0.5, "top1": 0.9}, "top1")
    none = comparison.evaluations(read(write_run(tmp_path / "b", [])))
    assert (none.step, none.final, none.best_step, none.best) == (None, {}, None, {})
    assert [metric.name for metric in comparison.metrics(one, none)] == ["top1", "loss"]
    assert comparison.metrics(one, none)[0].final == (0.8, None)


def test_predictions_are_paired(tmp_path):
    truth = ["cat", "dog", "cat", "dog", "dog", "NA"]
    one = predictions(tmp_path / "a", [(i, g, t) for i, (g, t) in enumerate(zip(
        ["cat", "dog", "dog", "cat", "dog", "NA"], truth, strict=True))])  # fmt: skip
    other = predictions(tmp_path / "b", [(i, g, t) for i, (g, t) in enumerate(zip(
        ["cat", "cat", "cat", "cat", "", "NA"], truth, strict=True))])  # fmt: skip
    found, why = comparison.paired_predictions(one, other)
    # The row without a guess (an image that could not be read) is left out.
    assert (found.rows, found.both, found.only_one, found.only_other, found.neither, why) == (5, 2, 1, 1, 1, "")
    assert (found.difference, found.p) == (0.0, 1.0)
    assert found.interval[0] == pytest.approx(-found.interval[1])


def test_rows_of_another_order_are_paired_by_id_and_truth(tmp_path):
    one = predictions(tmp_path / "a", [("x.png", 1, 1), ("y.png", 0, 1), ("z.png", 1, 1), ("w.png", 1, 0)])
    other = predictions(tmp_path / "b", [("z.png", 0, 1), ("y.png", 1, 1), ("v.png", 1, 1), ("w.png", 1, 1)])
    found, _ = comparison.paired_predictions(one, other)
    assert (found.rows, found.both, found.only_one, found.only_other, found.neither) == (2, 0, 1, 1, 0)


@pytest.mark.parametrize(
    ("rows", "columns", "why"),
    [
        ([("x", 1, 1), ("x", 0, 1)], "id,prediction,label", "contain different rows"),
        ([("q", 1, 1)], "id,prediction,label", "no row in common"),
        ([("x", 0.5, 1)], "id,score,label", "no predictions.csv with ids, predictions and labels"),
        ([("x", 0.52, 1), ("y", 2, 0)], "id,prediction,label", "they are numbers, not classes; see the error metrics"),
        ([("x", 1)], "id,prediction,label", "no predictions.csv with"),
        (None, "", "no predictions.csv with"),
    ],
)
def test_predictions_that_cannot_be_paired(tmp_path, rows, columns, why):
    one = predictions(tmp_path / "a", [("x", 1, 1), ("y", 0, 1)])
    other = tmp_path / "b" if rows is None else predictions(tmp_path / "b", rows, columns)
    found, said = comparison.paired_predictions(one, other)
    assert found is None
    assert why in said


def test_predictions_from_before_a_resume_are_not_paired(tmp_path):
    one, other = (predictions(write_run(tmp_path / name, []), [("x", 1, 1)]) for name in "ab")
    assert comparison.compare(comparison.side(one), comparison.side(other)).predictions.rows == 1
    summary = json.loads((other / "summary.json").read_text())
    (other / "summary.json").write_text(json.dumps(summary | {"finished": False}))
    found = comparison.compare(comparison.side(one), comparison.side(other))
    assert found.predictions is None
    assert found.why_no_predictions == "B resumed after writing predictions.csv"


@pytest.mark.parametrize("verdict", ["equal", "different"])
def test_numbers_that_are_equal_need_no_other_comparison(tmp_path, verdict):
    sides = [comparison.side(predictions(write_run(tmp_path / name, []), [("x", 0.52, 1)])) for name in "ab"]
    found = comparison.compare(*sides)
    shown = text.render(replace(found, equality=replace(found.equality, verdict=verdict)))
    assert ("predictions of the best weights cannot be compared: they are numbers" in shown) == (verdict != "equal")


@pytest.mark.parametrize("rows", [[], [("x", 1, 1)]])
def test_predictions_are_equal_only_where_there_are_some(tmp_path, rows):
    folders = [write_run(tmp_path / name, []) for name in "ab"]
    sides = [comparison.side(predictions(folder, rows) if rows else folder) for folder in folders]
    found = comparison.compare(*sides)
    shown = text.render(replace(found, equality=replace(found.equality, verdict="equal")))
    assert ("weights, log and predictions." in shown) == bool(rows)
    assert ("log; neither run has predictions." in shown) == (not rows)


def test_best_weights_of_a_run_that_goes_on_may_differ(tmp_path):
    """They are named, and the verdict does not say that nothing differs."""
    one, other = (write_run(tmp_path / name, []) for name in "ab")
    for value, folder in enumerate((one, other)):
        save_file({"w": torch.full((2,), float(value))}, folder / "weights.safetensors")
    summary = json.loads((other / "summary.json").read_text())
    (other / "summary.json").write_text(json.dumps(summary | {"finished": False}))
    shown = text.render(comparison.compare(comparison.side(one), comparison.side(other)))
    assert "No log line or checkpoint that both runs have differs." in shown
    assert "weights.safetensors: w differs by up to 1" in shown
    parts = [shown.index(f"\n\n{title}") for title in ("Results", "Recipe", "Circumstances", "No log line")]
    assert parts == sorted(parts)  # first the metrics, last the bits
    assert "Nothing differs" not in shown


def test_groups_of_seeds(tmp_path):
    one, other = seeds(tmp_path / "a", [0.90, 0.92, 0.91]), seeds(tmp_path / "b", [0.94, 0.96, 0.95])
    result = comparison.compare(comparison.side(one), comparison.side(other))
    top1, loss = result.spreads["final"]
    assert (top1.name, loss.name) == ("top1", "loss")
    assert top1.values == ([0.90, 0.92, 0.91], [0.94, 0.96, 0.95])
    assert top1.means == pytest.approx((0.91, 0.95))
    assert top1.errors == pytest.approx((0.01 / 3**0.5, 0.01 / 3**0.5))
    half = 2.776445 * 0.01 * (2 / 3) ** 0.5  # t of 4 degrees of freedom
    assert top1.interval == pytest.approx((0.04 - half, 0.04 + half), abs=1e-6)
    shown = text.render(result)
    assert "A  " + str(one) + "  (3 runs, seeds 0, 1, 2)" in shown
    assert "0.91 ± 0.0058  0.95 ± 0.0058  +0.04" in shown
    assert not result.same


def test_single_run_against_a_group(tmp_path):
    one, other = write_run(tmp_path / "a", [{"step": 9, "top1": 0.5}], 9), seeds(tmp_path / "b", [0.25, 0.75])
    result = comparison.compare(comparison.side(one), comparison.side(other))
    (top1,) = result.spreads["best"]
    assert (top1.means, top1.errors[0], top1.interval) == ((0.5, 0.5), None, None)
    assert "(one seed)" in text.render(result)
    assert "needs two seeds" in text.render(result)


def test_group_that_differs_by_more_than_seed_is_an_error(tmp_path):
    mixed = seeds(tmp_path / "a", [0.5])
    write_run(mixed / "fast", [{"step": 9, "top1": 0.5}], seed=1, optimizer={"lr": 0.5})
    with pytest.raises(ConfigError, match=r"differ in more than their seed: optimizer\.lr") as error:
        comparison.side(mixed)
    assert error.value.exit_code == 2
    longer = seeds(tmp_path / "longer", [0.5], train={"epochs": 3})
    write_run(longer / "more", [{"step": 9, "top1": 0.5}], seed=1, train={"epochs": 4})
    with pytest.raises(ConfigError, match=r"differ in more than their seed: train\.epochs"):
        comparison.side(longer)
    twice = seeds(tmp_path / "b", [0.5, 0.6])
    write_run(twice / "again", [{"step": 9, "top1": 0.5}], seed=1)
    with pytest.raises(ConfigError, match="the same seed, 1"):
        comparison.side(twice)
    with pytest.raises(ConfigError, match="no such folder"):
        comparison.side(tmp_path / "none")


def test_unfinished_runs_of_a_group_are_left_out(tmp_path):
    group = seeds(tmp_path / "a", [0.5, 0.6, 0.7])
    (group / "seed1" / "failure.json").write_text(json.dumps({"error": "TrainingError", "message": "nan"}))
    side = comparison.side(group)
    assert side.seeds == [0, 2]
    assert side.problems == ["seed1 is left out: failed"]
    for number in (0, 2):
        (group / f"seed{number}" / "failure.json").write_text("{}")
    with pytest.raises(ConfigError, match="none of its 3 runs has finished"):
        comparison.side(group)


def test_length_of_the_training_is_a_difference_of_the_recipe(tmp_path):
    """It may change at a resume, but two runs of different lengths have different schedules."""
    runs = [comparison.side(write_run(tmp_path / f"{n}", [], train={"epochs": n}, launch={"nproc": n})) for n in (3, 4)]
    shown = text.render(comparison.compare(*runs))
    assert re.search(r"\n\nRecipe\n +A +B\n +train.epochs +3 +4\n\n", shown), shown
    assert "launch.nproc" not in shown, "the ranks are in the topology"


def test_arguments_where_there_were_none_are_one_difference(tmp_path):
    runs = [write_run(tmp_path / f"{len(args)}", [], model={"args": args}) for args in ({}, {"width": 8})]
    shown = text.render(comparison.compare(*map(comparison.side, runs)))
    assert "model.args.width" in shown
    assert "{}" not in shown


def test_length_that_changed_at_a_resume_is_a_difference_of_the_recipe(tmp_path):
    """Although the settings of the last start are equal: the schedule was another one until then."""
    one, other = (write_run(tmp_path / name, [], train={"epochs": 12}) for name in "ab")

    def record(folder, *lengths):
        starts = [{"world_size": 1, "length": {"step": step, "train.epochs": epochs, "train.max_steps": limit}}
                  for step, epochs, limit in lengths]  # fmt: skip
        (folder / "provenance.json").write_text(json.dumps(starts))

    record(one, (0, 8, None), (60, 8, None), (120, 12, None))
    record(other, (0, 3, 7), (0, 12, None), (200, 12, None))  # changed before the first checkpoint: no effect
    shown = text.render(comparison.compare(*map(comparison.side, (one, other))))
    assert re.search(r"\n\nRecipe\n +A +B\n +train.epochs +8 until step 120, then 12 +12\n\n", shown), shown
    record(other, (0, 8, None), (130, 12, 400), (120, 12, None))  # resumed from the checkpoint before the newest
    assert "Recipe: equal" in text.render(comparison.compare(*map(comparison.side, (one, other))))


def test_run_that_was_resumed_with_other_packages(tmp_path):
    one, other = write_run(tmp_path / "a", []), write_run(tmp_path / "b", [])
    starts = [{"git": {"commit": "a" * 40, "changed": False}, "packages": {"torch": "2.14"}, "python": "3.11",
               "world_size": 2, "amp": "harness.apex", "launched_by": "x",
               "ranks": [{"host": "n: (", "device": "cuda:1", "name": "A (B)"}] * 2}]  # fmt: skip
    (one / "provenance.json").write_text(json.dumps(starts))
    again = {**starts[0], "git": {"commit": "b" * 40, "changed": False}, "packages": {"torch": "2.15"}}
    (other / "provenance.json").write_text(json.dumps([*starts, again]))
    found = comparison.compare_settings(read(one), read(other))
    assert found.packages == {"torch": ("2.14", "2.14, then 2.15")}
    assert found.topology == {}
    assert found.code.commits == (["a" * 40], ["a" * 40, "b" * 40])
    assert found.code.same is False


@pytest.mark.parametrize(
    ("commits", "changed", "same", "words"),
    [
        (("a", "a"), (False, False), True, "the same commit, aaaaaaaaaaaa"),
        (("a", "a"), (False, True), None, "but B had uncommitted changes: the code may differ"),
        (("a", "a"), (True, True), None, "but both had uncommitted changes"),
        (
            ("a", "bc"),
            (True, False),
            False,
            "A aaaaaaaaaaaa with uncommitted changes; B bbbbbbbbbbbb, then cccccccccccc",
        ),
        (("", ""), (False, False), None, "unknown: the runs were started outside a repository"),
    ],
)
def test_code_is_compared_by_commit(tmp_path, commits, changed, same, words):
    sides = []
    for name, letters, dirty in zip("xy", commits, changed, strict=True):
        folder = write_run(tmp_path / name, [])
        starts = [{"git": {"commit": letter * 40, "changed": dirty}} for letter in letters] or [{"git": None}]
        (folder / "provenance.json").write_text(json.dumps(starts))
        sides.append(comparison.side(folder))
    found = comparison.compare(*sides)
    assert found.settings.code.same is same
    assert words in text.render(found)


@pytest.mark.parametrize(
    ("digests", "same", "words"),
    [
        ("ab", False, "code: A no repository; B no repository; your own modules differ: own.parts a -> b"),
        ("aa", None, "the digests of your own modules are equal; the runs were started outside a repository"),
    ],
)
def test_own_modules_are_compared_by_their_digests(tmp_path, digests, same, words):
    sides = []
    for name, digest in zip("xy", digests, strict=True):
        folder = write_run(tmp_path / name, [])
        start = {"git": None, "own_code": {str(tmp_path): {"git": None, "source": {"own": "0", "own.parts": digest}}}}
        (folder / "provenance.json").write_text(json.dumps([start]))
        sides.append(comparison.side(folder))
    found = comparison.compare(*sides)
    assert found.settings.code.same is same
    assert words in text.render(found)


def test_own_modules_of_one_run_are_not_compared(tmp_path):
    sides = []
    for name, source in (("x", {}), ("y", {"own": "d"})):
        own = {str(tmp_path): {"git": None, "source": source}}
        folder = write_run(tmp_path / name, [])
        (folder / "provenance.json").write_text(json.dumps([{"git": {"commit": "a" * 40}, "own_code": own}]))
        sides.append(comparison.side(folder))
    code = comparison.compare(*sides).settings.code
    assert (code.same, code.sources) == (True, None)


@pytest.mark.parametrize("value", [3, "x", [[]], {"commit": {"a": 1}, "step": [1], "top1": 1.0}])
def test_records_of_wrong_types_are_left_out(tmp_path, value):
    """Those of a file that another program changed."""
    one, other = (write_run(tmp_path / name, [{"step": 9, "top1": 0.5}], 9) for name in "xy")
    (one / "provenance.json").write_text(
        json.dumps([{"git": value, "packages": value, "own_code": value, "python": "3.11"}])
    )
    (one / "summary.json").write_text(json.dumps({"finished": True, "best": value}))
    assert "best evaluation" not in text.render(comparison.compare(*map(comparison.side, (one, other))))


def test_machines_are_compared_by_the_fields_of_their_ranks(tmp_path):
    one, other = write_run(tmp_path / "a", []), write_run(tmp_path / "b", [])
    ranks = [{"host": "n: (", "device": f"cuda:{card}", "name": "A (B)"} for card in range(2)]
    (one / "provenance.json").write_text(json.dumps([{"ranks": ranks}]))
    (other / "provenance.json").write_text(json.dumps([{"ranks": ["n: cpu"] * 2}]))
    assert comparison.compare_settings(read(one), read(other)).topology == {"ranks": ("2 × n: (: cuda (A (B))", "–")}
