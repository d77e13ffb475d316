"""Confusion matrices and the most confident mistakes of a run, with their images."""

from __future__ import annotations

import base64
import io
import json
import os
import struct

import numpy as np
import pytest
from PIL import Image

from benchmarks.synthetic_runs import Fake, write_run
from harness.runs import exit_files, reader
from harness.tools.report import mistakes, page, run_set, sections
from tests.config.test_loader import BOMB

pytest.importorskip("plotly", reason="plotly is not installed: pip install 'apex-harness[report]'")

TABLE = """id,prediction,label,score_cat,score_dog
a.png,cat,cat,0.9,0.1
b.png,dog,cat,0.2,0.8
c.png,cat,dog,0.99,0.01
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    return write_run(tmp_path / "runs" / "fake", Fake())


def notes(folder):
    found = run_set.build([reader.read(folder)])
    groups = sections.choose(found, [])[1]
    return next(group for group in groups if group.key == "mistakes").notes[0].partition(". ")[2]


def run(folder):
    return run_set.build([reader.read(folder)]).runs[0]


def test_confusion_matrix(folder):
    (folder / "confusion.csv").write_text("label,cat,dog\ncat,5,2\ndog,3,7\n")
    found = mistakes.confusion(run(folder))
    assert found.classes == ["cat", "dog"]
    assert found.counts == [[5, 2], [3, 7]]


def test_classes_have_precision_recall_and_f1_the_worst_first():
    found = mistakes.Confusion(["cat", "dog", "eel", "fox"], [[5, 1, 2, 0], [3, 7, 0, 0], [0, 0, 4, 0], [0, 0, 0, 0]])
    table = mistakes.by_class(found)
    assert table.header == ["class", "F1", "precision", "recall", "rows", "most often taken for"]
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["cat", "0.625", "0.625", "0.625", "8", "eel (2)"],
        ["dog", "0.7778", "0.875", "0.7", "10", "cat (3)"],
        ["eel", "0.8", "0.6667", "1", "4", "–"],
        ["fox", "–", "–", "–", "0", "–"],
    ]
    many = mistakes.by_class(mistakes.Confusion([str(n) for n in range(30)], [[1] * 30] * 30))
    assert (len(many.rows), many.caption) == (24, "By class, the 24 worst of 30")


def test_matrix_and_list_are_from_the_same_weights(folder):
    """confusion.csv is of the best evaluation, predictions.csv of the best weights when the run last ended."""
    saved = [[5, 2], [3, 7]]
    (folder / "confusion.csv").write_text("label,cat,dog\ncat,5,2\ndog,3,7\n")
    assert mistakes.confusion(run(folder)).counts == saved
    assert notes(folder) == "The metrics are from its best evaluation so far."
    (folder / "predictions.csv").write_text(TABLE + "unreadable.png,,dog,,\n")
    assert mistakes.confusion(run(folder)).counts == [[1, 1], [1, 0]]
    assert notes(folder) == "All below is of its best weights."
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"finished": False}))  # resumed with more epochs
    assert notes(folder) == "All below is of its best weights as of the last time it finished."
    (folder / "predictions.csv").write_text(TABLE.replace("dog", "cow"))  # of another table
    assert mistakes.confusion(run(folder)).counts == saved
    assert "best evaluation so far, the list of its best weights" in notes(folder)


@pytest.mark.parametrize("text", ["", "label,cat\n", "label,cat,dog\ncat,5,2\n", "label,cat\ncat,many\n", "a\0b"])
def test_damaged_confusion_matrix_is_ignored(folder, text):
    (folder / "confusion.csv").write_text(text)
    assert mistakes.confusion(run(folder)) is None


def test_most_confident_mistakes_first_with_their_images(folder, tmp_path):
    (folder / "predictions.csv").write_text(TABLE)
    Image.new("RGB", (200, 100), (255, 0, 0)).save(tmp_path / "data" / "c.png")
    found = mistakes.most_confident(run(folder))
    assert (found.number, found.num_rows) == (2, 3)
    assert [(m.row, m.prediction, m.label, m.score) for m in found.shown] == [
        ("c.png", "cat", "dog", 0.99),
        ("b.png", "dog", "cat", 0.8),
    ]
    assert found.shown[1].image == "", "that file is not there"
    image = Image.open(io.BytesIO(base64.b64decode(found.shown[0].image.partition(",")[2])))
    assert image.size == (96, 48)
    assert image.convert("RGB").getpixel((5, 5)) == (255, 0, 0)


def test_images_are_searched_above_the_run_folder(folder, tmp_path, monkeypatch):
    (folder / "predictions.csv").write_text(TABLE)
    Image.new("L", (8, 8)).save(tmp_path / "data" / "c.png")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert mistakes.most_confident(run(folder)).shown[0].image


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n" + b"\0" * 50])
def test_unreadable_image_is_left_out(folder, tmp_path, content):
    (folder / "predictions.csv").write_text(TABLE)
    (tmp_path / "data" / "c.png").write_bytes(content)
    assert mistakes.most_confident(run(folder)).shown[0].image == ""


def test_files_that_are_not_images_are_not_opened(folder, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "predictions.csv").write_text(
        "id,prediction,label,score\n../secret.txt,a,b,0.9\n,a,b,0.8\n/dev/zero,a,b,0.7\n"
    )
    assert [mistake.image for mistake in mistakes.most_confident(run(folder)).shown] == ["", "", ""]


def test_images_outside_the_data_folder_are_not_shown(folder, tmp_path):
    """predictions.csv may have been written by someone else. A pipe would never end."""
    for name in ("secret.png", "data/here.png"):
        Image.new("L", (8, 8)).save(tmp_path / name)
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(tmp_path / "data" / "pipe.png")
    outside = ["../secret.png", str(tmp_path / "secret.png"), "x/../../secret.png", "link.png", "pipe.png"]
    inside = ["here.png", str(tmp_path / "data" / "here.png")]
    lines = [f"{name},a,b,{0.9 - 0.1 * place}" for place, name in enumerate([*outside, *inside])]
    (folder / "predictions.csv").write_text("\n".join(["id,prediction,label,score", *lines]) + "\n")
    shown = {mistake.row: bool(mistake.image) for mistake in mistakes.most_confident(run(folder)).shown}
    assert shown == {**dict.fromkeys(outside, False), **dict.fromkeys(inside, True)}
    assert not any(mistake.image for mistake in mistakes.most_confident(run(folder), with_images=False).shown)


@pytest.mark.timeout(30)
def test_pipes_and_devices_in_a_run_folder_do_not_block(folder):
    """None is opened: nobody writes to them."""
    names = ("predictions.csv", "confusion.csv", "metrics.jsonl", "summary.json", "provenance.json", "config.yaml")
    for name in (*names, "logs/rank-0.exit.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    (folder / "failure.json").symlink_to("/dev/zero")
    record = reader.read(folder)
    assert record.state == "unreadable"
    assert "failure.json cannot be read: it is a" in "; ".join(record.problems)
    assert len(record.metrics()) == 0
    assert mistakes.read_predictions(folder / "predictions.csv") is None
    assert mistakes.confusion(run(folder)) is None
    assert exit_files.read(folder / "logs") == {}


@pytest.mark.timeout(30)
def test_a_configuration_that_expands_without_end_is_left_out(folder):
    (folder / "config.yaml").write_text(BOMB)
    assert "config.yaml cannot be read: its aliases expand to too many values" in reader.read(folder).problems


def test_images_of_published_datasets_by_row_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4)
    (raw / "t10k-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, *images.shape) + images.tobytes())
    folder = write_run(tmp_path / "fake", Fake(settings={"task.name": "mnist"}))
    (folder / "predictions.csv").write_text("id,prediction,label,score_0,score_1\n2,0,1,0.7,0.3\n9,0,1,0.6,0.4\n")
    shown = mistakes.most_confident(run(folder)).shown
    image = Image.open(io.BytesIO(base64.b64decode(shown[0].image.partition(",")[2])))
    assert np.array_equal(np.asarray(image), images[2])
    assert shown[1].image == "", "there is no image of that number"


def test_predicted_images_are_shown(folder, tmp_path):
    """Of rows that have some, beside the input, if it is found and trusted; masks so bright that classes differ."""
    masks = folder / "predictions_files" / "mask"
    masks.mkdir(parents=True)
    for name, value in (("0", 1), ("1", 2), ("blank", 0)):
        Image.new("L", (8, 8), value).save(masks / f"{name}.png")
    Image.new("L", (8, 8), 9).save(tmp_path / "data" / "b.png")
    Image.new("L", (8, 8), 255).save(tmp_path / "outside.png")
    (masks / "3.png").symlink_to(tmp_path / "outside.png")
    cells = ["predictions_files/mask/0.png", "predictions_files/mask/1.png", "", "predictions_files/mask/3.png"]
    blanks = ["predictions_files/mask/blank.png", "", "", ""]
    rows = [",".join(row) for row in zip(["a.png", "b.png", "c.png", "d.png"], cells, blanks, strict=True)]
    (folder / "predictions.csv").write_text("\n".join(["id,mask,none", *rows]) + "\n")
    for trust, of_b in ((True, [("input", 9), ("mask", 254)]), (False, [("mask", 254)])):
        found = run_set.build([reader.read(folder)], trust=trust)
        group = sections.choose(found, [])[1][-1]
        shown = [(row, [(what, pixel(uri)) for what, uri in images]) for row, images in group.images]
        assert shown == [("a.png", [("mask", 127), ("none", 0)]), ("b.png", of_b)]
        assert page.render(found).count("<img src") == 2 + len(of_b)


def pixel(uri):
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).getpixel((0, 0))


@pytest.mark.parametrize(
    "text", ["", "id,prediction\n1,2\n", "a,b,c\n1\n", "id,prediction,label\n", "id,prediction,label\n1,,cat\n"]
)
def test_predictions_without_mistakes(folder, text):
    (folder / "predictions.csv").write_text(text)
    assert mistakes.most_confident(run(folder)).shown == []


def test_mistakes_without_scores_and_with_a_class_named_na(folder):
    (folder / "predictions.csv").write_text("id,prediction,label\n1,NA,dog\n")
    assert [mistake.score for mistake in mistakes.most_confident(run(folder)).shown] == [0.0]


def test_several_labels_and_numbers(folder):
    """A row without a predicted label is a mistake, too; the most confident one is the worst label of a row."""
    subject = run(folder)
    subject.settings["task.labels.separator"] = "|"
    (folder / "predictions.csv").write_text(
        "id,prediction,label,score_a,score_b,text\n0,a,a|b,0.9,0.4,one\n1,,a,0.05,0.1,two\n2,b,b,0.1,0.9,three\n"
        "3,a,,0.7,0.0,four\n4,,,0.1,0.1,five\n5,,a,,,\n"
    )
    found = mistakes.most_confident(subject)
    assert [(m.row, m.label, m.prediction, m.shown) for m in found.shown] == [
        ("two", "a", "", "95.0 %"), ("four", "", "a", "70.0 %"), ("one", "a|b", "a", "60.0 %"),
    ]  # fmt: skip
    assert (found.number, found.num_rows, found.num_unread) == (3, 5, 1)

    (folder / "predictions.csv").write_text(
        "id,prediction,label,error\n0,84.42657557540909,84.0,0.42657557540909\n1,-3.0,7.0,-10.0\n"
    )
    shown = mistakes.most_confident(run(folder)).shown
    assert [(m.row, m.prediction, m.label, m.shown) for m in shown] == [
        ("1", "-3", "7", "off by 10"), ("0", "84.4266", "84", "off by 0.4266"),
    ]  # fmt: skip
    summary = {"by_label": {"a": {"f1": 0.9, "rows": 3}, "b": {"f1": None, "rows": 0}, "c": {"f1": 0.2, "rows": 9}}}
    subject.record.summary["evaluation"] = summary
    table = mistakes.by_name(subject)
    assert table.header == ["label", "f1", "rows"]
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["c", "0.2", "9"],
        ["a", "0.9", "3"],
        ["b", "–", "0"],
    ]


def test_of_many_labels_the_five_best_are_named_in_each_row(folder):
    """score_1 is of label_1, whose name may look like a number."""
    subject = run(folder)
    subject.settings["task.labels.separator"] = "|"
    (folder / "predictions.csv").write_text(
        "id,prediction,label,label_1,score_1,label_2,score_2\n0,01|7,01,01,0.95,7,0.6\n1,,7,7,0.3,01,0.2\n"
    )
    shown = mistakes.most_confident(subject).shown
    assert [(m.row, m.shown) for m in shown] == [("1", "70.0 %"), ("0", "60.0 %")]


def test_texts_of_a_long_table_may_have_line_breaks(folder):
    text = "\n".join(["a line of a text"] * 5)
    lines = [f'{row},a,{"ab"[row % 2]},0.9,"{text}"\n' for row in range(20_000)]  # more than a block of the reader
    (folder / "predictions.csv").write_text("id,prediction,label,score,text\n" + "".join(lines))
    found = mistakes.most_confident(run(folder))
    assert (found.number, found.num_rows) == (10_000, 20_000)
    assert found.shown[0].row == text


def test_pairs_of_texts_are_shown_whole(tmp_path):
    """predictions.csv has the columns of text_column by their own names; a text that is empty is left out."""
    settings = {"task.name": "text_csv", "task.text_column": ["question", "answer"]}
    folder = write_run(tmp_path / "pairs", Fake(settings=settings))
    (folder / "confusion.csv").write_text("label,no,yes\nno,0,1\nyes,1,0\n")
    (folder / "predictions.csv").write_text(
        "id,prediction,label,score_no,score_yes,question,answer\n"
        "0,yes,no,0.1,0.9,Is it late?,The <clock> says so\n1,no,yes,0.8,0.2,Why?,\n2,no,yes,0.7,0.3,,\n"
    )
    shown = mistakes.most_confident(run(folder)).shown
    assert [m.row for m in shown] == ["Is it late? / The <clock> says so", "Why?", "2"]
    text = page.render(run_set.build([reader.read(folder)]))
    assert "Is it late? / The &lt;clock&gt; says so" in text
    assert "no image" not in text


@pytest.mark.parametrize(("column", "shown"), [("answer", "answer"), ("id", "text_id")])
def test_a_text_column_of_another_name_is_shown(tmp_path, column, shown):
    settings = {"task.name": "text_csv", "task.text_column": column}
    folder = write_run(tmp_path / "texts", Fake(settings=settings))
    (folder / "predictions.csv").write_text(f"id,prediction,label,score_no,score_yes,{shown}\n0,yes,no,0.1,0.9,Hello\n")
    assert [m.row for m in mistakes.most_confident(run(folder)).shown] == ["Hello"]
