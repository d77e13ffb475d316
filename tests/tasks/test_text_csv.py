"""The task text_csv: tokens, padding, vocabulary, predictions of new texts, and what is refused."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from harness import cli
from harness.config import loader
from harness.config.schema import ModelSection
from harness.data.table import csv_reader
from harness.data.texts import Bytes, OwnTokenizer, Words, words_of
from harness.errors import ConfigError, DataError
from harness.training.model.model_builder import build
from tests.fixtures import settings, write_yaml
from tests.ranks import run_ranks

LINES = [
    ("Good, GOOD film", "pos"), ("bad film!", "neg"), ('a "good"\nday', "pos"), ("", "neg"),
    ("été İstanbul 北京 x_1", "pos"),
    ("bad " * 50, "neg"),
]  # fmt: skip


def write(folder, name, lines, header=("text", "label")):
    with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *lines])


def section(folder, **options):
    tables = {f"{split}_csv": str(folder / f"{split}.csv") for split in ("train", "eval")}
    return {"name": "text_csv", **tables, **options}


def opened(folder, **options):
    tree = settings(folder)
    tree["task"] = section(folder, **options)
    task = loader.load(write_yaml(folder / "text.yaml", tree)).task
    return task.open(0, folder / "cache")


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "train", LINES)
    write(tmp_path, "eval", LINES[:2] + [("a new word", "pos")])
    return tmp_path


# Tokens


def test_rows_that_are_cut_are_counted(folder):
    """Of a tokenizer that fails, nothing is said here: the first batch says it."""
    task = opened(folder, tokenizer={"max_length": 3})
    assert task.summary["tokens"].endswith("at most 3 per row; 2 of 6 rows looked at are cut; the longest has 50"), (
        "three words are not cut"
    )
    assert not any("lose their end" in note for note in task.notes)
    (note,) = (each for each in opened(folder, tokenizer={"max_length": 1}).notes if "lose their end" in each)
    assert note.startswith("most texts lose their end: ")
    assert note.endswith("; task.tokenizer.max_length is 1")
    assert opened(folder).summary["tokens"].endswith("at most 256 per row; the longest of 6 rows looked at has 50")
    assert replace(task.train, tokenizer=OwnTokenizer("mine", lambda text: [99], 5)).lengths == ""


def test_words():
    """Words of any script, in lower case, without punctuation; a letter with a mark is one in either spelling."""
    words, counts = words_of(pa.array(["Don't STOP, x_1!", "", "e\u0301t\u00e9 北京\n\t\u0130", "¿?"]))
    assert words.to_pylist() == ["don", "t", "stop", "x_1", "e\u0301te\u0301", "北京", "i\u0307"]
    assert counts.tolist() == [4, 0, 3, 0]
    ids, counts = Words(("good", "film")).encode(["Film, film", "good unknown", ""])
    assert (ids.tolist(), counts.tolist()) == ([3, 3, 2, 1], [2, 2, 0])
    ids, counts = Bytes().encode(["aé", ""])
    assert (ids.tolist(), counts.tolist()) == ([98, 0xC3 + 1, 0xA9 + 1], [3, 0])


def test_vocabulary_is_of_the_training_texts_only(folder):
    task = opened(folder)
    vocabulary = task.learned["vocabulary"]
    assert vocabulary[:3] == ["bad", "good", "film"]  # by frequency, then by the alphabet
    assert "new" not in vocabulary
    assert opened(folder, tokenizer={"max_words": 2}).learned["vocabulary"] == ["bad", "good"]
    assert task.notes == [f"rows without text in column 'text': 1 of 6, the first at {folder}/train.csv:6"]
    assert len(list((folder / "cache" / "words").glob("*.json"))) == 2
    assert opened(folder).learned == task.learned  # from the cache


def test_a_damaged_list_of_words_is_counted_again(folder, caplog):
    learned = opened(folder).learned
    (path,) = (folder / "cache" / "words").glob("*.json")
    intact = path.read_bytes()
    path.write_bytes(intact.replace(b"bad", b"bae"))  # one bit, and still JSON
    assert path.read_bytes() != intact
    assert opened(folder).learned == learned
    said = [record.getMessage() for record in caplog.records if "list of words" in record.getMessage()]
    assert said == [f"{folder}/train.csv: the list of words in the cache is damaged; counting again"]
    assert path.read_bytes() == intact


def test_padding_and_length(folder):
    task = opened(folder, tokenizer={"max_length": 5})
    batch = task.train.batch(np.asarray([1, 3, 0]), 0)
    assert batch.inputs.tolist() == [[2, 4, 0], [0, 0, 0], [3, 3, 4]]
    assert batch.targets.tolist() == [0, 0, 1]
    assert task.train.batch(np.asarray([5]), 0).inputs.shape == (1, 5)  # cut off
    assert task.train.batch(np.asarray([3]), 0).inputs.tolist() == [[0]]  # an empty text
    fixed = opened(folder, tokenizer={"name": "bytes", "max_length": 4, "pad": "max_length"})
    assert fixed.train.batch(np.asarray([1]), None).inputs.tolist() == [[99, 98, 101, 33]]
    assert fixed.known(np.asarray([0])) == {"id": [0], "label": ["pos"], "text": ["Good, GOOD film"]}


@pytest.mark.parametrize(
    ("column", "shown"), [("answer", "answer"), ("id", "text_id"), ("prediction", "text_prediction")]
)
def test_texts_keep_the_name_of_their_column(tmp_path, column, shown):
    """Unless another column of the predictions has it."""
    for split in ("train", "eval"):
        write(tmp_path, split, [("one", "a"), ("two", "b")], (column, "label"))
    task = opened(tmp_path, text_column=column)
    assert task.known(np.asarray([1])) == {"id": [1], "label": ["b"], shown: ["two"]}


def test_padding_does_not_change_the_outputs(folder):
    task = opened(folder)
    model = task.model(ModelSection(name="text_cnn")).eval()
    inputs = task.train.batch(np.asarray([0, 3, 4]), None).inputs
    padded = torch.nn.functional.pad(inputs, (0, 7))
    torch.testing.assert_close(model(inputs), model(padded))
    with pytest.raises(ConfigError, match="use a model that takes token ids, such as text_cnn"):
        task.model(ModelSection(name="small_cnn"))
    with pytest.raises(ConfigError, match=r"Flatten returns \(2, 16\) for 2 rows, not 2 outputs for each"):
        task.model(ModelSection(name="torch.nn.Flatten"))
    with pytest.raises(ConfigError, match="kernels must be odd"):
        build("text_cnn", {"kernels": [2]}, {"num_tokens": 9, "num_classes": 2}, inputs)


class Letters:
    """A tokenizer of one's own."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def __call__(self, text: str) -> list[int]:
        return [ord(letter.lower()) - ord("a") + 1 + self.shift for letter in text if "a" <= letter.lower() <= "z"]


def test_ids_of_an_own_tokenizer_are_from_zero_to_the_largest():
    tokenizer = OwnTokenizer("own", lambda text: [int(digit) - 1 for digit in text], 3)
    ids, counts = tokenizer.encode(["13", "", "2"])
    assert (ids.tolist(), counts.tolist()) == ([0, 2, 1], [2, 0, 1])
    assert tokenizer.encode([])[0].tolist() == []
    for wrong, found in (("4", 3), ("10", -1)):
        with pytest.raises(DataError, match=f"the id {found};"):
            tokenizer.encode(["1", wrong])


def test_own_tokenizer(folder):
    own = {"name": "tests.tasks.test_text_csv.Letters", "num_tokens": 30, "args": {"shift": 2}}
    task = opened(folder, tokenizer=own)
    assert task.train.batch(np.asarray([1]), 0).inputs[0, :3].tolist() == [4, 3, 6]
    assert "vocabulary" not in task.learned
    with pytest.raises(ConfigError, match="returned the id 26; ids are from 0 to 24"):
        opened(folder, tokenizer={**own, "num_tokens": 25})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'shft'"):
        opened(folder, tokenizer={**own, "args": {"shft": 2}})


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({"name": "word"}, "there is no tokenizer 'word'; use words, bytes"),
        ({"name": "a.b"}, "a.b needs num_tokens"),
        ({"num_tokens": 3}, "num_tokens is for a tokenizer of your own"),
        ({"name": "bytes", "args": {"a": 1}}, "the tokenizer bytes takes no args"),
        ({"name": "bytes", "max_words": 9}, "max_words is for the tokenizer words, not for bytes; remove it"),
        ({"max_length": 0}, "task.tokenizer.max_length"),
    ],
)
def test_invalid_options(folder, tokenizer, message):
    with pytest.raises(ConfigError, match=message):
        opened(folder, tokenizer=tokenizer)


def test_no_words_and_no_column(folder):
    write(folder, "train", [("!!!", "pos"), ("", "neg")])
    write(folder, "eval", [("!!!", "pos")])
    with pytest.raises(DataError, match="no row has a word in column 'text'"):
        opened(folder)
    with pytest.raises(DataError, match="(?s)no column 'review'.* -> set task.text_column=text"):
        opened(folder, text_column="review")
    with pytest.raises(ConfigError, match="column 'label' is in text_column and is that of the labels"):
        opened(folder, text_column="label", label_column="label")


# A run


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("words", marks=pytest.mark.slow)])
def test_train_predict_export(folder, tokenizer, capsys, monkeypatch):
    """Several labels per text: predictions of the same rows are equal bit for bit, after training and of a new file."""
    monkeypatch.chdir(folder)
    words = [["sun", "rain"], ["wind", "snow"]]
    rows = [(f"{words[0][n % 2]} and {words[1][n // 2 % 2]} {n}", f"{n % 2}, {2 + n // 2 % 2}") for n in range(40)]
    write(folder, "train", rows, ("text", "tags"))
    write(folder, "eval", rows[:9], ("text", "tags"))
    tree = settings(folder, model={"name": "text_cnn", "args": {"dropout": 0.0}}, train={"epochs": 6})
    labels = {"column": "tags", "separator": ","}
    tree["task"] = section(folder, labels=labels, tokenizer={"name": tokenizer, "max_length": 24})
    tree |= {"optimizer": {"name": "adam", "lr": 0.01}, "name": tokenizer}
    write_yaml(folder / "text.yaml", tree)
    assert run_ranks(1, cli.main, ["train", "-c", str(folder / "text.yaml")], group=False) == [0]
    run = folder / "runs" / tokenizer
    summary = json.loads((run / "summary.json").read_text())
    assert summary["evaluation"]["exact_match"] == 1.0
    lines = (run / "predictions.csv").read_text().splitlines()
    assert lines[0] == "id,prediction,label,text,score_0,score_1,score_2,score_3"
    assert lines[2].startswith('1,"1,2","1,2",rain and wind 1,0.')
    assert cli.main(["predict", str(run), "--csv", str(folder / "eval.csv"), "--out", "new.csv"]) == 0
    new = (folder / "new.csv").read_text().splitlines()
    assert [line.split(",")[-4:] for line in new[1:]] == [line.split(",")[-4:] for line in lines[1:]]

    assert cli.main(["export", str(run), "--format", "torch_export", "--out", "model.pt2"]) == 0
    facts = json.loads((folder / "model.pt2.json").read_text())
    assert facts["inputs"] == [{"name": "tokens", "type": "int64", "shape": ["batch", "length"]}]
    assert facts["postprocessing"]["probability"] == "sigmoid of each logit"
    assert facts["preprocessing"]["tokenizer"] == tokenizer
    model = torch.export.load("model.pt2").module()
    assert model(torch.ones(3, 7, dtype=torch.int64)).shape == (3, 4)
    write(folder, "new", [("sun", ""), ("", ""), (" ", "meh"), ("fog", "hm")], ("text", "tags"))
    monkeypatch.setattr("harness.data.table.table._FEW_ROWS", 2)  # as if it were long
    calls, lines_of = list[list[int]](), csv_reader.lines_of
    monkeypatch.setattr(csv_reader, "lines_of", lambda path, rows: calls.append(list(rows)) or lines_of(path, rows))
    capsys.readouterr()
    assert cli.main(["predict", str(run), "--csv", "new.csv", "--out", "new2.csv"]) == 0
    assert calls[-1] == [2, 3]  # in one pass
    told = capsys.readouterr().err
    assert told.count("rows without text in column 'text': 2 of 4, the first at new.csv:3") == 1, told
    assert "never predicts: 'meh' (new.csv:4), 'hm' (new.csv:5); it predicts" in told
    (run / "task.json").write_text("{}")
    assert cli.main(["predict", str(run), "--csv", str(folder / "eval.csv"), "--out", "new3.csv"]) == 2
    assert "task.json lacks" in capsys.readouterr().err


def test_unreadable_rows_are_refused_with_the_reason(folder):
    with pytest.raises(ConfigError, match="text_csv has no on_bad_row, since the texts are in the table"):
        opened(folder, on_bad_row="skip")
