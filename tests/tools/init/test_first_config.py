"""``harness init``: what it guesses, what it says about it, and that its file works."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import pytest
import torch
from torchvision.io import write_jpeg, write_png

from harness import cli
from harness.apex.on_cpu import half_kernels
from harness.config import loader
from harness.errors import ConfigError, DataError
from harness.tools.init import first_config, images
from harness.training.check import preflight


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (here := tmp_path / "here").mkdir()  # whose neighbors are looked at, too
    monkeypatch.chdir(here)
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "cache"))
    return here


def photos(split: str, count: int, **columns: list[object]) -> None:
    """Photos of mixed sizes, in a folder below that of the CSV, with columns before and after their names."""
    (data := Path("pets/photos")).mkdir(parents=True, exist_ok=True)
    lines = ["id,place,file,breed,when"]
    for row in range(count):
        height, width = 70 + 5 * (row % 7), 120 - row % 3
        pixels = torch.full((3, height, width), 20 * (row % 3), dtype=torch.uint8)
        write_jpeg(pixels, str(data / f"{split} {row}.jpg"))
        lines.append(f"{row},{'ab'[row % 2]},{split} {row}.jpg,{('pür', 'no', 'a: b')[row % 3]},day {row}")
    (data.parent / f"{split}.csv").write_text("\n".join(lines) + "\n")


def test_photos_of_mixed_sizes(folder, capsys):
    photos("train", 60)
    photos("val", 12)
    assert cli.main(["init", "pets"]) == 0
    text = capsys.readouterr().out
    config = loader.load("pets.yaml")
    task = config.task
    assert (task.train_csv, task.eval_csv, task.root) == ("pets/train.csv", "pets/val.csv", "pets/photos")
    assert (task.path_column, task.label_column, task.image_size) == ("file", "breed", (64, 64))
    assert (config.batch.global_, config.model.name, config.data.shard) == (4, "small_cnn", "global")
    for reason in ("60 of 60 values", "3 classes: 'a: b', 'no', pür", "place (2 values)", "50 of the first 50 paths",
                   "70x118 to 100x120", "extends: preset:modern", "harness check -c pets.yaml"):  # fmt: skip
        assert reason in text, reason
    plan = preflight.examine("pets.yaml", ["runtime.device=cpu"], 2)
    assert (plan.errors, plan.facts["train rows"], plan.facts["eval rows"]) == ([], 60, 12)
    Path("pets/photos/train 3.jpg").write_bytes(b"")
    file = Path("pets.yaml")
    (error,) = preflight.examine("pets.yaml", ["runtime.device=cpu"], 2).errors
    assert "pets/photos/train 3.jpg" in str(error)
    file.write_text(file.read_text().replace("# on_bad_row: skip", "on_bad_row: skip"))
    assert preflight.examine("pets.yaml", ["runtime.device=cpu"], 2).errors == []


@pytest.mark.parametrize(
    ("suffix", "side", "decode"), [("jpg", 192, "reduced"), ("jpg", 191, "full"), ("png", 192, "full")]
)
def test_jpegs_at_least_twice_as_large_are_decoded_at_a_reduced_size(folder, monkeypatch, suffix, side, decode):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write = write_jpeg if suffix == "jpg" else write_png
    for row in range(8):
        write(torch.zeros(3, side, 230, dtype=torch.uint8), f"{row}.{suffix}")
    for split in ("train", "val"):
        Path(f"{split}.csv").write_text("path,label\n" + "".join(f"{row}.{suffix},{row % 2}\n" for row in range(8)))
    assert cli.main(["init", "train.csv", "-o", "new.yaml"]) == 0
    task = loader.load("new.yaml").task
    assert (task.image_size, task.decode) == ((96, 96), decode)


@pytest.mark.parametrize(("gpu", "side"), [(True, 224), (False, 96)])
def test_large_photos_are_smaller_without_a_gpu(folder, monkeypatch, gpu, side):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    for row in range(4):
        write_jpeg(torch.zeros(3, 224, 230 + row, dtype=torch.uint8), f"{row}.jpg")
    assert images.image_size(".", [f"{row}.jpg" for row in range(4)])[0] == (side, side)


@pytest.mark.parametrize(
    ("gpu", "bfloat16", "preset", "level"),
    [(True, True, "modern", "O4"), (True, False, "apex-2019", "O1"), (False, True, "modern", "O4"),
     (False, False, "modern", "O0")],
)  # fmt: skip
def test_the_precision_is_one_that_this_machine_computes_fast(
    folder, monkeypatch, capsys, gpu, bfloat16, preset, level
):
    photos("train", 8)
    photos("val", 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16 or including_emulation)
    monkeypatch.setattr(half_kernels, "has_bfloat16", lambda: bfloat16)
    assert cli.main(["init", "pets"]) == 0
    text = capsys.readouterr().out
    assert f"extends: preset:{preset}  # " in text
    assert ("precision: {opt_level: O0}  # float32: this CPU has no bfloat16; on a GPU, remove" in text) == (
        level == "O0"
    )
    assert loader.load("pets.yaml").precision.opt_level == level


def boxes(columns: list[str], row: str) -> None:
    for split, count in (("train", 40), ("val", 10)):
        lines = [row.format(*(f"{7 * at % 13 + number}" for number in range(4)), at % 2) for at in range(count)]
        (Path("pets") / f"{split}.csv").write_text("\n".join([",".join(["file", *columns]), *(
            f"{split} {at}.jpg,{line}" for at, line in enumerate(lines))]) + "\n")  # fmt: skip


def test_numbers_of_a_box_are_no_classes(folder, capsys):
    photos("train", 40)
    photos("val", 10)
    boxes(["xmin", "ymin", "XMax", "ymax"], "{0},{1},{2},{3}")
    assert cli.main(["init", "pets"]) == 0
    assert "# the numbers of a box, one per image; other columns: none" in capsys.readouterr().out
    labels = loader.load("pets.yaml").task.labels
    assert (labels.kind, labels.column) == ("regression", ("xmin", "ymin", "XMax", "ymax"))
    plan = preflight.examine("pets.yaml", ["runtime.device=cpu"], 1)
    assert (plan.errors, plan.facts["train rows"]) == ([], 40)
    boxes(["x", "y", "w", "h", "kind"], "{0},{1},{2},{3},{4}")
    assert cli.main(["init", "pets", "--out", "kinds.yaml"]) == 0
    assert loader.load("kinds.yaml").task.label_column == "kind"
    for packed in ("{0} {1} {2} {3}", '"[{0}, {1}, {2}, {3}]"'):
        boxes(["bbox"], packed)
        assert cli.main(["init", "pets", "--out", "no.yaml"]) == 2
        assert "the four numbers in bbox need a column each, such as xmin, ymin, xmax and" in capsys.readouterr().err


def test_an_existing_file_is_kept(folder, capsys):
    photos("train", 8)
    photos("eval", 4)
    (folder / "pets.yaml").write_text("mine")
    assert cli.main(["init", "pets/train.csv", "pets/eval.csv"]) == 2
    assert "--out pets-new.yaml" in capsys.readouterr().err
    assert (folder / "pets.yaml").read_text() == "mine"
    assert cli.main(["init", "pets/train.csv", "--out", "other.yaml"]) == 0  # eval.csv is found beside it
    other = loader.load("other.yaml")
    assert (other.name, other.task.eval_csv) == ("other", "pets/eval.csv")


def test_a_configuration_is_not_a_table(folder):
    Path("a.yaml").write_text("name: a\n")
    with pytest.raises(ConfigError, match="this is a configuration") as caught:
        first_config.write(["a.yaml"], None)
    assert "harness check -c a.yaml;" in caught.value.hint


def test_a_split_comes_before_another_file_beside_it(folder):
    """The test rows of train.csv and test.csv are not for choosing the weights."""
    for name in ("train", "train.train", "train.eval", "test"):
        (folder / f"{name}.csv").write_text("text,label\n" + "".join(f"{name} {row},{row % 2}\n" for row in range(8)))
    first_config.write(["train.csv"], folder / "x.yaml")
    task = loader.load("x.yaml").task
    assert (task.train_csv, task.eval_csv) == ("train.train.csv", "train.eval.csv")


def test_test_rows_that_would_choose_the_weights_are_named(folder):
    for name in ("a_train", "a_test"):
        (folder / f"{name}.csv").write_text("text,label\n" + "".join(f"{name} {row},{row % 2}\n" for row in range(40)))
    *_, warning = first_config.write(["a_train.csv"], Path("a.yaml")).splitlines()
    assert warning.startswith("warning: a_test.csv will choose the best weights; for other rows than test rows: ")
    assert "warning" not in first_config.write(["a_train.csv", "a_test.csv"], Path("given.yaml"))
    remove, split = warning.rpartition(": ")[2].split("; ")
    assert remove == "rm a.yaml"
    assert cli.main(split.split()[1:]) == 0
    assert "warning" not in first_config.write(["a_train.csv"], Path("b.yaml"))
    assert loader.load("b.yaml").task.eval_csv == "a_train.eval.csv"


@pytest.mark.parametrize(
    ("column", "value", "setting", "reason"),
    [
        ("tags", lambda row: ("cat|dog", "dog", "cat|bird")[row % 3], {"separator": "|", "column": "tags"},
         "several of 3 labels per row: bird, cat, dog"),
        ("tags", lambda row: ("cat|dog", "", "bird| cat|")[row % 3],
         {"separator": "|", "column": "tags", "empty": "allow"},
         "several of 3 labels per row, or none: bird, cat, dog"),
        ("weight", lambda row: f"{row / 7:.3f}", {"kind": "regression", "column": "weight"}, "numbers from "),
        ("target", lambda row: str(row * 3), {"kind": "regression", "column": "target"}, "numbers from "),
        ("score", lambda row: str(row % 11 - 5), {"kind": "regression", "column": "score"}, "numbers from "),
        ("score", lambda row: str(row % 11), {},
         "; for numbers instead of classes: labels: {kind: regression, column: score}; other columns: id"),
    ],
)  # fmt: skip
def test_other_kinds_of_labels(folder, column, value, setting, reason):
    """After a split of one file; the written file trains."""
    from harness import load_config, train

    (folder / "images").mkdir()
    rows = [f"file,{column},id"]
    for row in range(40):
        write_png(torch.full((1, 8, 8), 3 * row, dtype=torch.uint8), str(folder / "images" / f"{row}.png"))
        rows.append(f"images/{row}.png,{value(row)},x{row}")
    (folder / "all.csv").write_text("\n".join(rows) + "\n")
    assert cli.main(["data", "split", "all.csv", "--eval", "0.3"]) == 0
    for words in (["all.csv"], ["."]):
        first_config.write(words, folder / "same.yaml")
        assert loader.load("same.yaml").task.train_csv == "all.train.csv"
        (folder / "same.yaml").unlink()
    first_config.write(["all.train.csv"], None)
    assert reason in (folder / "all.yaml").read_text()
    config = load_config("all.yaml", {"train.max_steps": 2, "runtime.device": "cpu", "data.num_workers": 0})
    found = config.task.labels.model_dump(exclude_defaults=True)
    assert (found, config.task.eval_csv) == (setting, "all.eval.csv")
    assert preflight.examine("all.yaml", ["runtime.device=cpu"], 2).errors == []
    assert train(config).finished


def test_texts(folder):
    """Of several columns of words, the longest; the written file trains."""
    from harness import load_config, train

    for split, count in (("train", 40), ("test", 10)):
        rows = ["id,place,review,verdict"]
        for row in range(count):
            rows.append(f"{row},sold in {row % 3},it was {('bad and sad', 'good')[row % 2]},{('no', 'buy')[row % 2]}")
        (folder / f"{split}.csv").write_text("\n".join(rows) + "\n")
    first_config.write([], Path("reviews.yaml"))
    written = Path("reviews.yaml").read_text()
    assert "text_column: review  # 4.0 words per row" in written
    assert "label_column: verdict  # 2 classes: buy, 'no'; other columns: id (40 values), place (3 values)" in written
    assert preflight.examine("reviews.yaml", ["runtime.device=cpu"], 2).errors == []
    config = load_config("reviews.yaml", {"train.max_steps": 2, "runtime.device": "cpu", "data.num_workers": 0})
    assert train(config).finished


def pairs(label) -> None:
    """Tables with two columns of texts and ``label`` of the number of a row, beside two other columns."""
    for split, count in (("train", 40), ("test", 10)):
        rows = ["id,question,source,answer,result"]
        for row in range(count):
            rows.append(f'{row},"is it {row // 2}, or not",s{row},it was {row} times {row + 1},{label(row)}')
        Path(f"{split}.csv").write_text("\n".join(rows) + "\n")


@pytest.mark.parametrize(
    ("label", "setting"),
    [(lambda row: ["yes", "no"][row % 2], {"label_column": "result"}),
     (lambda row: row / 8, {"labels": {"kind": "regression", "column": "result"}})],
)  # fmt: skip
def test_pairs_of_texts_for_a_model_of_hugging_face(folder, label, setting):
    pairs(label)
    Path("a folder").mkdir()
    Path("a folder/config.json").write_text("{}")
    text = first_config.write([], Path("pairs.yaml"), "hf:a folder")
    assert "model: {name: hf:a folder}  # all weights; with small matrices" in text
    again = text.splitlines()[-2].split()
    assert again[:4] == ["harness", "train", "-c", "pairs.yaml"]
    adapted = loader.load("pairs.yaml", again[4:])
    assert (adapted.model.lora.r, adapted.optimizer.lr, loader.load("pairs.yaml").optimizer.lr) == (8, 5e-4, 5e-5)
    few, most = (loader.load("pairs.yaml"), "patience: 3, evaluate_every: ")
    assert (few.train.clip_norm, few.schedule.warmup.written, most in text) == (1.0, "10%", True)
    task, model = (getattr(loader.load("pairs.yaml"), section) for section in ("task", "model"))
    assert "text_column: [question, answer]  # 5.0 and 5.0 words per row\n" in text
    assert task.text_columns == ("question", "answer")
    assert task.model_dump(include={"label_column", "labels"}, exclude_defaults=True) == setting
    assert (task.tokenizer.name, task.tokenizer.max_length) == ("hf:a folder", 16)
    assert (model.name, model.lora) == ("hf:a folder", None)


def test_a_model_of_hugging_face_that_is_not_there_or_lacks_its_prefix_is_refused(folder):
    pairs(lambda row: row % 2)
    Path("a brt").mkdir()
    with pytest.raises(ConfigError, match="the folder a brt has no config.json"):
        first_config.write([], Path("pairs.yaml"), "hf:a brt")
    for gone in ("no such model", "brt"):
        with pytest.raises(ConfigError, match=f"there is no folder {gone}, nor a model of this name"):
            first_config.write([], Path("pairs.yaml"), f"hf:{gone}")
    assert not Path("pairs.yaml").exists()
    first_config.write([], Path("hub.yaml"), "hf:owner/name")
    Path("a bert").mkdir()
    Path("a bert/config.json").write_text("{}")
    with pytest.raises(ConfigError, match="did you mean --model 'hf:a bert'\\?"):
        first_config.write([], Path("pairs.yaml"), "a bert")
    assert not Path("pairs.yaml").exists()


def test_pairs_of_texts_without_a_model_are_named(folder, capsys):
    """One of the columns is used until the reader follows the comment, which has the command."""
    pairs(lambda row: row % 2)
    assert cli.main(["init", "--out", "pairs.yaml"]) == 0
    text = capsys.readouterr().out
    assert loader.load("pairs.yaml").task.text_column == "question"
    last = text.splitlines()[-1]
    assert last.startswith("warning: text_column: question  # 5.0 words per row; not used: answer: for both texts")
    assert last.endswith("add --model hf:FOLDER_OR_NAME to harness init")
    assert "# model: {name: hf:FOLDER_OR_NAME}" in text
    (again,) = re.findall("are written by: harness (.*)", text)
    again = again.replace("FOLDER_OR_NAME", "owner/name")
    assert cli.main([*again.split(), "--out", "again.yaml"]) == 0
    assert loader.load("again.yaml").task.text_columns == ("question", "answer")


def test_classes_of_several_words_are_no_text_of_a_pair(folder):
    pairs(lambda row: f"{row % 5} of five")
    for split in ("train", "test"):
        Path(f"{split}.csv").write_text(
            re.sub(",[^,]*,[^,]*,([^,]*)$", r",\1", Path(f"{split}.csv").read_text(), flags=re.M)
        )
    Path("model").mkdir()
    Path("model/config.json").write_text('{"max_position_embeddings": 12}')
    first_config.write([], Path("classes.yaml"), "hf:model")
    task = loader.load("classes.yaml").task
    assert task.text_columns == ("question",)
    assert task.tokenizer.max_length == 12, "the model has no more positions"


def test_names_with_line_breaks_become_yaml_on_one_line(folder):
    """As the header cells of a spreadsheet may have them."""
    pairs(lambda row: row % 2)
    for split in ("train", "test"):
        text = Path(f"{split}.csv").read_text()
        Path(f"{split}.csv").write_text(text.replace("question", '"the\nquestion"').replace("answer", '"an\nanswer"'))
    assert 'text_column: "the\\nquestion"  # ' in first_config.write([], Path("new.yaml"))
    assert loader.load("new.yaml").task.text_column == "the\nquestion"


def test_a_model_below_the_home_folder(folder, monkeypatch):
    pairs(lambda row: row % 2)
    Path("model").mkdir()
    Path("model/config.json").write_text('{"max_position_embeddings": 12}')
    monkeypatch.setenv("HOME", str(folder))
    first_config.write([], Path("new.yaml"), "hf:~/model")
    assert loader.load("new.yaml").task.tokenizer.max_length == 12


def test_the_model_that_was_asked_for(folder):
    photos("train", 8)
    photos("val", 4)
    first_config.write(["pets"], None, "resnet34")
    assert loader.load("pets.yaml").model.name == "resnet34"


@pytest.mark.parametrize(
    ("size", "in_processor", "expected"),
    [
        (32, {}, (32, 32)),
        ([24, 32], {}, (24, 32)),
        (None, {"size": {"shortest_edge": 48}}, (48, 48)),
        (None, {}, (64, 64)),
    ],
)
def test_images_as_a_model_of_hugging_face_takes_them(folder, size, in_processor, expected):
    photos("train", 8)
    photos("val", 4)
    Path("vit").mkdir()
    Path("vit/config.json").write_text(json.dumps({"num_channels": 1} | ({"image_size": size} if size else {})))
    Path("vit/preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.4], "image_std": [0.2], **in_processor})
    )
    first_config.write(["pets"], None, "hf:vit")
    task = loader.load("pets.yaml").task
    assert (task.image_size, task.color, task.mean, task.std) == (expected, "gray", (0.4,), (0.2,))


def test_small_gray_images_named_by_their_place(folder):
    """Equal sizes are kept; numbers that differ in every row are no classes; paths may be relative to this folder."""
    for split, count in (("train", 40), ("test", 10)):
        for row in range(count):
            write_png(torch.zeros(1, 8, 12, dtype=torch.uint8), str(folder / f"{split}{row}.png"))
        rows = [f"{row * 0.5},{folder.name}/../{split}{row}.png,{row % 2}" for row in range(count)]
        (folder / f"{split}.csv").write_text("\n".join(["weight,image,label", *rows]) + "\n")
    printed = first_config.write([], folder / "x y.yaml")
    text = (folder / "x y.yaml").read_text()
    assert re.search(r"correct it: none of the first 40 paths, such as \S+/../train0.png, exists here", text)
    assert re.search(r"warning: root: .*  # correct it: none of the first 40 paths, .*exists here$", printed)
    assert f"  harness train -c '{folder}/x y.yaml'\n" in printed
    (folder / "train.csv").write_text((folder / "train.csv").read_text().replace(f"{folder.name}/../", ""))
    assert "warning" not in first_config.write(["train.csv", "test.csv"], folder / "y.yaml")
    task = loader.load("y.yaml").task
    assert (task.image_size, task.color, task.label_column, task.root) == ((8, 12), "gray", "label", ".")
    with tarfile.open(folder / "a.tar", "w") as archive:
        archive.add("train0.png")
    Path("rows.csv").write_text("path,label\n" + "".join(f"a.tar/train0.png,{row % 2}\n" for row in range(4)))
    assert "warning" not in first_config.write(["rows.csv", "rows.csv"], folder / "z.yaml")
    assert loader.load("z.yaml").task.image_size == (8, 12)
    Path("train0.png").write_text("no image")
    Path("rows.csv").write_text("path,label\n" + "".join(f"train0.png,{row % 2}\n" for row in range(4)))
    printed = first_config.write(["rows.csv", "rows.csv"], folder / "no.yaml")
    assert re.search("warning: image_size: .*# correct it: .*no image could be read$", printed)


def test_the_folder_of_the_images_is_not_guessed_among_several(folder, capsys):
    for root in ("more", "photos"):
        (folder / root).mkdir()
        write_png(torch.zeros(3, 8, 12, dtype=torch.uint8), str(folder / root / "a.png"))
    (folder / "link").symlink_to("photos")
    Path("train.csv").write_text("path,label\n" + "".join(f"a.png,{row % 2}\n" for row in range(4)))
    words = ["init", "train.csv", "train.csv", "-o", "new.yaml"]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.endswith("folders: photos, more\n  -> say which: add --root link to the command\n")
    assert cli.main([*words, "--root", "photos"]) == 0
    assert loader.load("new.yaml").task.root == "photos"
    (folder / "more").rename(folder / ".." / "more")
    assert cli.main([*words[:-1], "nearer.yaml"]) == 0
    assert re.search("root: link  # 4 of .* this folder, the nearest", Path("nearer.yaml").read_text())
    Path("train.csv").write_text(Path("train.csv").read_text().replace("a.png", f"{folder}/photos/a.png"))
    assert cli.main([*words[:-1], "absolute.yaml"]) == 0
    assert cli.main([*words[:-1], "wrong.yaml", "--root", "gone"]) == 0


def test_a_root_at_a_url_is_not_looked_at_and_texts_have_none(folder, capsys, monkeypatch):
    monkeypatch.setattr("harness.tools.init.images.image_size", lambda *_: (None, False, 0, "no image"))
    Path("train.csv").write_text("path,label\n" + "".join(f"a.png,{row % 2}\n" for row in range(4)))
    words = ["init", "train.csv", "train.csv", "-o", "new.yaml", "--root"]
    assert cli.main([*words, "s3://bucket/photos"]) == 0
    assert re.search("root: s3://bucket/photos  # not looked at$", Path("new.yaml").read_text(), re.MULTILINE)
    Path("train.csv").write_text("text,label\n" + "".join(f"a film of {row} words,{row % 2}\n" for row in range(4)))
    capsys.readouterr()
    assert cli.main([*words[:-2], "texts.yaml", "--root", "photos"]) == 2
    assert "texts and no paths of images\n  -> remove --root" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "words", "expected"),
    [
        ({}, ["nothing.csv"], "no such annotation file"),
        ({"a.csv": "file,label\nx.png,1\n"}, ["a.csv"], "harness data split a.csv --eval 0.1"),
        ({"a.jsonl": '{"text": "x"}\n'}, ["a.jsonl"], "the file is JSON Lines"),
        ({"my pets/cat/1.jpg": ""}, ["my pets"], "harness data folder 'my pets' 'my pets.csv'"),
        ({"notes/a.txt": ""}, ["notes"], "this folder has no table"),
        ({"a.csv": "name,label\nx,1\ny,2\n"}, ["a.csv", "a.csv"], "no column contains image paths"),
        ({"a.csv": "f,n\nx.png,1\ny.png,2\nz.png,3\n"}, ["a.csv", "a.csv"], "columns other than f: n (3 values)"),
        ({"a.csv": "file,n\n"}, ["a.csv", "a.csv"], "the file has a header and no rows"),
    ],
)  # fmt: skip
def test_what_it_cannot_use_gets_one_clear_message(folder, capsys, files, words, expected):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert cli.main(["init", *words]) in (2, 65)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err
    assert not list(folder.glob("*.yaml"))


@pytest.mark.parametrize(("images", "task"), [(3, "image_csv"), (2, "text_csv")])
def test_a_column_of_images_has_more_paths_than_other_values(folder, images, task):
    """Out of four."""
    for split in ("train", "eval"):
        values = [f"{split} {row}.png" if row < images else f"a photo of {row} without a file" for row in range(4)]
        lines = [f"{value},{'ab'[row % 2]}" for row, value in enumerate(values)]
        (folder / f"{split}.csv").write_text("\n".join(["what,label", *lines]) + "\n")
    assert f"name: {task} " in first_config.write([], folder / "new.yaml")


def test_files_with_other_columns(folder):
    (folder / "train.csv").write_text("file,label\nx.png,1\n")
    (folder / "eval.csv").write_text("file\nx.png\n")
    with pytest.raises(DataError, match="it has no column label"):
        first_config.write([], None)
