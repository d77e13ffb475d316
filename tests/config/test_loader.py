"""Loading configurations: reading, merging, overrides, the three layers of errors, and the text that is saved."""

from __future__ import annotations

import os
import re
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from harness.config import loader, merge
from harness.config.schema import Config, TaskSection
from harness.errors import EXIT_USAGE, ConfigError, OwnCodeError
from harness.tasks.image_csv.config import Task
from tests.conftest import ROOT
from tests.fixtures import settings, write_yaml

GOOD = """\
name: x
task:
  name: image_csv
  train_csv: a.csv
  eval_csv: b.csv
batch:
  global: 8
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    return loader.load(write_yaml(tmp_path / "x.yaml", text), overrides)


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    """The message of the ConfigError for ``text``."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value).replace(f"{tmp_path}/", "")


# Reading and merging


def test_defaults_and_values(tmp_path):
    config = load(tmp_path, GOOD + "optimizer: {lr: 1e-4, momentum: 0.5}\n")
    assert (config.name, config.batch.global_, config.batch.per_rank) == ("x", 8, None)
    assert (config.optimizer.lr, config.optimizer.momentum) == (1e-4, 0.5)
    assert config.task.path_column == "path"
    assert config.best_metric == "top1"


def test_extends_is_relative_and_later_files_win(tmp_path):
    (tmp_path / "bases").mkdir()
    write_yaml(tmp_path / "bases" / "first.yaml", GOOD + "seed: 1\ntrain: {epochs: 3, log_every: 7}\n")
    write_yaml(tmp_path / "bases" / "second.yaml", "extends: first.yaml\nseed: 2\n")
    config = load(tmp_path, "extends: bases/second.yaml\ntrain: {epochs: 5}\n")
    assert (config.seed, config.train.epochs, config.train.log_every.written) == (2, 5, 7)
    assert load(tmp_path, "extends: [bases/second.yaml, bases/first.yaml]\n").seed == 1


def test_lists_are_replaced_not_joined(tmp_path):
    write_yaml(tmp_path / "base.yaml", GOOD + "schedule: {name: step, args: {milestones: [1, 2, 3]}}\n")
    config = load(tmp_path, "extends: base.yaml\nschedule: {args: {milestones: [5]}}\n")
    assert config.schedule.args.model_dump(mode="json") == {"milestones": [5], "gamma": 0.1}


def test_interpolation(tmp_path):
    config = load(tmp_path, GOOD.replace("a.csv", "${task.root}/a.csv"), "task.root=data")
    assert config.task.train_csv == "data/a.csv"


def test_overrides_win_and_are_parsed_as_yaml(tmp_path):
    config = load(
        tmp_path,
        GOOD,
        *("train.epochs=3", "optimizer.lr=2e-3", "optimizer.args={nesterov: true}", "optimizer.momentum=0.9"),
        *("schedule.args.milestones=[1,2]", "schedule.name=step", "task.root=a=b"),
        *("train.clip_norm=1.0", "train.clip_norm=null"),
    )
    assert (config.train.epochs, config.optimizer.lr, config.optimizer.args) == (3, 2e-3, {"nesterov": True})
    assert config.schedule.args.model_dump(mode="json")["milestones"] == [1, 2]
    assert config.task.root == "a=b"
    assert config.train.clip_norm is None


# Layer 1: syntax


# A few hundred bytes that describe a billion values.
BOMB = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
# Merges of 2 to the power of 40 pairs, which overwrite each other.
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 41))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: x\nfoo: {a: 1\nbar: 2\n",
            "x.yaml:2: invalid YAML: the { on this line is not closed, or a comma is missing, "
            "before line 3, column 4 (YAML: expected ',' or '}', but got ':')\n  -> add the missing } or the comma",
        ),
        ("name: x\nfoo: [1\n", "x.yaml:2: invalid YAML: the [ on this line is not closed, or a comma is missing"),
        ("name: x\nmodel: {\n", "x.yaml:3: invalid YAML: the file ends within brackets (YAML: "),
        ("a: 1\nname: 'x\nb: 2\n", "x.yaml:2: invalid YAML: the quote that this line opens is never closed"),
        ("a: " + "[" * 3000 + "]" * 3000, "x.yaml: invalid YAML: nested too deeply"),
        ("[" * 100_000, "x.yaml: invalid YAML: nested too deeply"),
        ("".join(" " * level + "a:\n" for level in range(1200)), "x.yaml: invalid YAML: nested too deeply"),
        ("a: &a {b: *a}\n", "invalid YAML: "),
        ("a: " + "x" * (1 << 20), "x.yaml: this file is larger than 1 MiB"),
        ("path,label\na.png,cat\n", "x.yaml: this is not a configuration: it does not consist of lines such as name: "),
        ("3\n", "x.yaml: this is not a configuration"),
        ("seed: 1\n--- \nseed: 2\n", "x.yaml:2: invalid YAML: "),
        ("null: 2\n", "x.yaml: invalid YAML: "),
        ("? [x, y]\n: 2\n", "x.yaml:1: invalid YAML: "),
        ("a: b: c\n", "x.yaml:1: invalid YAML: this line has two colons (YAML: "),
        ("a:\n  b c\n  d: e\n", "x.yaml:2: invalid YAML: this line has no colon with a space behind it (YAML: "),
        ("a:\n  b:c\n\n  d: e\n", "x.yaml:2: invalid YAML: this line has no colon with a space behind it (YAML: "),
        ("a: 1\nb\n  c: 2\n", "x.yaml:2: invalid YAML: this line has no colon (YAML: "),
        ("a:\n  b: 1\n   c: 2\n", "x.yaml:3: invalid YAML: this line is indented, but the line before has a value"),
        ("a:\n  b: 1\n c: 2\n", "x.yaml:3: invalid YAML: the indentation of this line does not fit the lines"),
        (" a: 1\nb: 2\n", "x.yaml:2: invalid YAML: the indentation of this line does not fit the lines"),
        (
            "a:\n  - b\n - c\n",
            "x.yaml:3: invalid YAML: the indentation of this line does not fit the lines above (YAML: ",
        ),
        ("a:\n  - b\n   - c: 1\n", "x.yaml:3: invalid YAML: this line is indented, but the line before has a value"),
        ("a:\n  - b: 1\n     c: {d: 1}\n", "x.yaml:3: invalid YAML: this line is indented, but the line before has"),
        ("a: {b: 1}}\n", "x.yaml:1: invalid YAML: this line has a } that closes nothing (YAML: expected <block end>"),
        ('a: "b" c\n', "x.yaml:1: invalid YAML: expected <block end>, but found '<scalar>'"),
        ("a: @b\n", "that cannot start any token\n  -> put a value that begins with this character in quotes"),
        ("train:\n\tseed: 3\n", "x.yaml:2: invalid YAML: this line has a tab (YAML: "),
        ("seed: 1\nname: y\nseed: 2\n", "x.yaml:3: invalid YAML: found duplicate key seed"),
        ("- a\n", "x.yaml: this is not a configuration"),
        (
            "task:\n  name:image_csv\n",
            "task.name: it should be a section, {key: value} (found: 'name:image_csv'); write a space",
        ),
        (GOOD + "optimizer: {lr:0.1}\n", "optimizer.lr:0.1: unknown key; write a space after the colon"),
        (GOOD + "extends: 5\n", "x.yaml:8: extends takes a file or a list of files, not 5"),
        (GOOD + "extends: {a: b}\n", "x.yaml:8: extends takes a file or a list of files, not {'a': 'b'}"),
        (MERGES, "its aliases expand to more than 1,000,000 values"),
        (BOMB, "its aliases expand to more than 1,000,000 values"),
        ("a: &a [1, *a]\n", "its aliases expand to more than"),
        (GOOD + "extends: y.yaml\n", "y.yaml: cannot read the configuration: No such file or directory"),
        (GOOD + "seed: ${train.nope}\n", "x.yaml:8: seed: '${train.nope}' cannot be resolved: the configuration"),
        (GOOD.replace("b.csv", "???"), "x.yaml:5: task.eval_csv: a value is missing: ??? stands for one"),
    ],
)
def test_file_that_cannot_be_parsed(tmp_path, text, message):
    assert message in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("${foo", "write ${task.root} for another setting"),
        ("${}", "write ${task.root} for another setting"),
        ("a${", "write ${task.root} for another setting"),
        ("${nope}", "set it as well"),
        ("${task.train_cvs}", "did you mean ${task.train_csv}?"),
        ("${nosuch:3}", "write ${task.root} for another setting"),
        ("${oc.env:HARNESS_NO_SUCH}", "give a default"),
        ("${task.root}", "write the value"),
        ("${batch.global.x}", "write ${task.root} for another setting"),
        ("${oc.env:}", "write ${task.root} for another setting"),
    ],
)
def test_references_that_cannot_be_resolved(tmp_path, text, hint):
    """In a file and on the command line; none of OmegaConf's own sentences is shown."""
    in_file = refused(tmp_path, GOOD.replace("  eval_csv", f"  root: {text}\n  eval_csv"))
    on_line = refused(tmp_path, GOOD, f"task.root={text}")
    for place, said in (("x.yaml:5", in_file), ("command line", on_line)):
        (sentence, shown) = said.split("\n  -> ")
        assert sentence.startswith(f"{place}: task.root: {text!r} cannot be re")
        assert shown.startswith(hint) or hint in shown
        assert "nterpolation" not in said
        assert "viable" not in said


def test_references_in_lists_and_through_others(tmp_path):
    through = GOOD + "seed: ${optimizer.lr}\noptimizer: {lr: '${no.such}'}\n"
    assert "the configuration does not set no.such" in refused(tmp_path, through)
    in_list = GOOD + "schedule: {name: step, args: {milestones: [1, '${x']}}\n"
    assert refused(tmp_path, in_list).startswith("x.yaml:8: schedule.args.milestones[1]: '${x' cannot be resolved")


def test_a_merged_mapping_may_extend_a_file(tmp_path):
    (tmp_path / "x.yaml").write_text("seed: &x {extends: base.yaml}\n<<: *x\n")
    with pytest.raises(ConfigError, match=r"base.yaml: no such|extends"):
        loader.load(str(tmp_path / "x.yaml"))


def test_a_mark_of_the_byte_order_is_no_column(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xef\xbb\xbfname: [1, 2\nseed: 3\n")
    with pytest.raises(ConfigError, match=re.escape("x.yaml:1: invalid YAML: the [ on this line is not closed")):
        loader.load(str(tmp_path / "x.yaml"))


def test_extended_file_that_is_missing_is_placed_at_its_line(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "name: a\nextends: gone.yml\n")
    assert str(caught.value.where).endswith(f":2: extends: {tmp_path}/gone.yml")


def test_a_sweep_file_is_not_a_run(tmp_path):
    with pytest.raises(ConfigError, match=r"this is a sweep file\n  -> harness sweep -c "):
        load(tmp_path, "name: a\nbase: b.yaml\nspace: {optimizer.lr: [1]}\n")


def test_circular_extends_names_the_chain(tmp_path):
    write_yaml(tmp_path / "a.yaml", "extends: x.yaml\n")
    assert "extends is circular: x.yaml -> a.yaml -> x.yaml" in refused(tmp_path, "extends: a.yaml\n")


def test_unreadable_file(tmp_path):
    (tmp_path / "digits.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="this file is not UTF-8 text\n  -> save it as UTF-8"):
        loader.load(tmp_path / "digits.yaml")
    with pytest.raises(ConfigError, match="did you mean .*digits.yaml"):
        loader.load(tmp_path / "digit.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "gone.yaml")
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    for name, reason in {
        "pipe.yaml": "it is a named pipe, not a regular file",
        "link.yaml": f"it is a link to {tmp_path}/gone.yaml, which does not exist",
        "loop.yaml": "Too many levels of symbolic links",
        "/dev/zero": "it is a device or a socket, not a regular file",
        ".": "it is a folder, not a regular file",
        "x" * 300: "File name too long",
        "a\0b": "(stat: )?embedded null",  # the words of Python 3.13, and of those before
    }.items():
        with pytest.raises(ConfigError, match=f"cannot read the configuration: {reason}") as caught:
            loader.load(tmp_path / name)
        assert caught.value.hint != f"did you mean {tmp_path / name}?"


@pytest.mark.parametrize("base", ["", "a\\0b", "."])
def test_extends_without_a_file(tmp_path, base):
    message = refused(tmp_path, GOOD + f'extends: "{base}"\n')
    assert "extends takes a file or a list of files" in message or "cannot read the configuration" in message


@pytest.mark.parametrize("override", ["+train.epochs=3", "++train.epochs=3"])
def test_a_plus_before_a_key_is_not_needed(tmp_path, override):
    message = refused(tmp_path, GOOD, override)
    assert message == f'command line: {override!r}: a key needs no "+" here, also a new one\n  -> type train.epochs=3'


@pytest.mark.parametrize("override", ["epochs", "=3", "--epochs=3", "", "-x"])
def test_override_without_key_or_value(tmp_path, override):
    message = refused(tmp_path, GOOD, override)
    assert message.startswith(f"command line: {override!r} is not an override")
    assert "train.epochs=3" in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"name={'x' * 300}", "(300 characters) is not allowed; use up to 200 letters, digits"),
        ("name=a/b", "name: 'a/b' is not allowed; use up to 200 letters"),
        ("name=.x", "name: '.x' is not allowed"),
        ("name=-x", "name: '-x' is not allowed"),
        ('name="a\\nb"', "name: 'a\\nb' is not allowed; use up to 200 letters"),
        ('name=""', "name: '' is not allowed"),
        ("name=[a]", "name: it should be text; put it in quotes if necessary (found: ['a'])"),
        ("train=[1]", "train: it should be a section of settings"),
        ("task=[1]", "this is a section, {key: value}, and cannot be replaced by a list"),
        ('output=""', "output: '' is not allowed; write a path"),
        ("output=~/runs", "output: '~/runs' is not allowed; write a path without ~"),
        ('output="a\\nb"', "output: 'a\\nb' is not allowed"),
        ('data.cache_dir="a\\0b"', "data.cache_dir: 'a\\x00b' has a NUL character"),
        ('task.train_csv="a\\0b"', "task.train_csv: 'a\\x00b' has a NUL character"),
        ('task.train_csv=""', "task.train_csv: '' is not allowed"),
        ('checkpoint.resume="a\\0b"', "checkpoint.resume: 'a\\x00b' has a NUL character"),
        ("task.image_size=[200000,200000]", "task.image_size.0: it should be less than or equal to 65536"),
        (f"batch.eval_per_rank=1{'0' * 30}", "batch.eval_per_rank: the number is too large"),
        ("optimizer.lr=1e300", "optimizer.lr: 1e+300 is too large for a float32"),
        ("task.std=[1e-3,1,1e300]", "task.std: 1e+300 is too large for a float32"),
        ("data.num_workers=1000000", "data.num_workers: it should be less than or equal to 1000"),
        ("runtime.timeout_s=1e30", "runtime.timeout_s: it should be less than or equal to 10000000"),
    ],
)  # fmt: skip
def test_values_that_nothing_can_use(tmp_path, override, message):
    seen = refused(tmp_path, GOOD, override)
    assert message in seen
    assert len(seen) < 1000


@pytest.mark.parametrize("override", ["train.epochs=[", "train.epochs={a", "name='x"])
def test_override_with_invalid_yaml(tmp_path, override):
    assert refused(tmp_path, GOOD, override).startswith("command line: ")


# Layer 2: schema, all errors at once


def test_all_errors_of_the_schema_in_one_message(tmp_path):
    text = """\
name: bad name
seed: -1
task:
  name: image_csv
  train_csv: 7
  colour: gray
  transforms:
    train: RandAugment
    evaluate: []
batch:
  global: 8
optimiser: {lr: 1}
train:
  epoch: 3
  clip_norm: abc
  on_nan: stopp
parallel: {strategy: fsdpp}
precision:
  loss_scale: dynamite
schedule: {name: step, args:
  {milestones: [1, a]}}
trackers: [wandbb]
"""
    message = refused(tmp_path, text)
    expected = {
        1: "name: ",
        2: "seed: it should be greater than or equal to 0 (found: -1)",
        5: "task.train_csv: it should be text; put it in quotes if necessary (found: 7)",
        6: "task.colour: unknown key; did you mean task.color?",
        8: "task.transforms.train: it should be a list (found: 'RandAugment'): write [RandAugment], on a command line '"
        "task.transforms.train=[RandAugment]'",
        9: "task.transforms.evaluate: unknown key; did you mean task.transforms.eval?",
        12: "optimiser: unknown key; did you mean optimizer?",
        14: "train.epoch: unknown key; did you mean train.epochs?",
        15: "train.clip_norm: it should be a valid number",
        16: "train.on_nan: 'stopp' is not allowed; use 'stop' or 'skip'; did you mean stop?",
        17: "parallel.strategy: unknown strategy 'fsdpp'; did you mean fsdp?",
        19: "precision.loss_scale: 'dynamite' is not allowed",
        21: "schedule.args.milestones.1: ",
        22: "trackers.0: unknown tracker 'wandbb'; did you mean wandb?",
    }
    for line, problem in expected.items():
        assert f"x.yaml:{line}: {problem}" in message, message
    assert "task.eval_csv: required, but not set" in message
    assert f"{len(expected) + 1} problems in the configuration" in message
    assert message.count("\n") == len(expected) + 1


def test_values_of_other_tools_are_answered_with_ours(tmp_path):
    two = "it should be a list of two numbers, [height, width]"
    answers = {
        "runtime.device=gpu": "'gpu' is not allowed; use runtime.device=cuda",
        "runtime.device=cuda:1": "'cuda:1' is not allowed; use runtime.device=cuda; CUDA_VISIBLE_DEVICES=1 selects the",
        "task.image_size=32": f"{two} (found: 32): use task.image_size=[32,32]\n",
        "task.image_size=[96]": f"{two} (found: [96]): use task.image_size=[96,96]\n",
        "task.image_size=[1,2,3]": f"{two} (found: [1, 2, 3])\n",
    }
    for override, answer in answers.items():
        assert f"{override.partition('=')[0]}: {answer}" in refused(tmp_path, GOOD, override) + "\n"


def test_empty_braces_empty_a_section(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(GOOD + "model: {name: mlp, args: {hidden: 8}}\n")
    assert loader.load(path).model.args == {"hidden": 8}
    assert loader.load(path, ["model.args={}"]).model.args == {}
    assert loader.load(path, ["model.args={}", "model.args.depth=2"]).model.args == {"depth": 2}
    assert loader.load(path, ["model={}"]).model.name == "small_cnn"


def test_nested_list_of_transforms(tmp_path):
    text = GOOD.replace("task:", "task:\n  transforms: {train: [[RandomHorizontalFlip]]}")
    assert "task.transforms.train.0: it should be a name such as RandomHorizontalFlip" in refused(tmp_path, text)


def test_numbers_must_be_finite_everywhere(tmp_path):
    """Also in the sections of tasks, in lists and in the arguments of models and optimizers, which have no schema."""
    text = (
        GOOD.replace("task:", "task:\n  mean: [0.5, .nan, 0.5]\n  transforms: {train: [{RandomRotation: .inf}]}")
        + f"""
optimizer:
  lr: .inf
  weight_decay: 1e400
  args:
    betas: [0.9, -.inf]
model: {{args: {{nested: {{deep: [{{x: .NaN}}]}}}}}}
schedule: {{name: step, args: {{milestones: [1.0, .inf]}}}}
train: {{clip_norm: {"9" * 400}}}
"""
    )
    message = refused(tmp_path, text, "runtime.timeout_s=.inf")
    lines = text.splitlines()
    for key, start, found in [
        ("task.mean.1", "  mean", "nan"), ("task.transforms.train.0.RandomRotation", "  transforms", "inf"),
        ("optimizer.lr", "  lr", "inf"), ("optimizer.weight_decay", "  weight_decay", "inf"),
        ("optimizer.args.betas.1", "    betas", "-inf"), ("model.args.nested.deep.0.x", "model", "nan"),
        ("schedule.args.milestones.1", "schedule", "inf"), ("train.clip_norm", "train", "more than 300 digits"),
    ]:  # fmt: skip
        number = next(number for number, line in enumerate(lines, 1) if line.startswith(start))
        assert f"x.yaml:{number}: {key}: it should be a finite number (found: {found})" in message, message
    assert "command line: runtime.timeout_s: it should be a finite number (found: inf)" in message
    assert "9 problems in the configuration" in message


def test_errors_in_overrides_are_on_the_command_line(tmp_path):
    text = GOOD + "optimizer:\n  lr: 0.1\n  name: sgd\n"
    message = refused(tmp_path, text, "optimizer={lr: -1, nam: adam}", "seed=-1")
    assert "command line: optimizer.lr: " in message
    assert "command line: optimizer.nam: unknown key; did you mean optimizer.name?" in message
    assert "command line: seed: " in message
    assert "command line: train: " in refused(tmp_path, GOOD, "train=5")
    assert "command line: train.epochs" in refused(tmp_path, GOOD, "train.epochs.x=5")


def test_arguments_of_a_file_that_a_new_name_does_not_have(tmp_path):
    text = GOOD + "schedule:\n  name: cosine\n  args: {min_lr: 0.001}\n"
    what = "x.yaml:10: schedule.args.min_lr: unknown key; known keys: none; to drop those of x.yaml, set "
    assert f"{what}schedule.args=null" in refused(tmp_path, text, "schedule.name=constant")
    assert "to drop" not in refused(tmp_path, text.replace("cosine", "constant"))
    assert "to drop" not in refused(tmp_path, text, "schedule.args.power=2")
    assert load(tmp_path, text, "schedule={name: wsd, args: null}").schedule.name == "wsd"
    write_yaml(tmp_path / "base.yaml", text)
    assert "to drop those of base.yaml" in refused(tmp_path, "extends: base.yaml\nschedule: {name: constant}\n")


def test_key_of_another_section_is_suggested(tmp_path):
    assert "did you mean train.epochs?" in refused(tmp_path, GOOD + "epochs: 3\n")
    assert "did you mean optimizer.momentum?" in refused(tmp_path, GOOD + "train: {momentum: 0.9}\n")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("seed: '1'", "seed"),
        ("seed: 1.5", "seed"),
        ("seed: true", "seed"),
        ("train: {deterministic: 1}", "train.deterministic"),
        ("train: {deterministic: 'yes'}", "train.deterministic"),
        ("optimizer: {lr: '0.1'}", "optimizer.lr"),
        ("optimizer: {args: [1]}", "optimizer.args"),
        ("data: 3", "data"),
        ("data: null", "data"),
        ("output: null", "output"),
        ("launch: {engine: slurmm}", "launch.engine"),
    ],
)
def test_types_are_not_converted(tmp_path, line, key):
    message = refused(tmp_path, GOOD + line + "\n")
    assert f"x.yaml:8: {key}: " in message
    assert "1 problem in" in message


def test_alias_is_the_only_spelling(tmp_path):
    assert "batch.global_: unknown key" in refused(tmp_path, GOOD.replace("global:", "global_:"))


@pytest.mark.parametrize("line", ["1: 3", "yes: 3", "model: {args: {1: 2}}", "model: {1: 2}", "task: {2: 3}"])
def test_keys_that_are_not_text(tmp_path, line):
    assert "problem" in refused(tmp_path, GOOD.split("task:")[0] + line + "\n")


def test_a_table_beside_the_configuration_of_another_folder(tmp_path, monkeypatch):
    """It is named; one that is in the working folder, or nowhere, is not."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "a.csv").touch()
    message = refused(tmp_path, GOOD)
    assert "task.train_csv: a.csv is looked for in the working folder, but is in that of the configuration" in message
    assert f"-> run the command in {tmp_path}, or set task.train_csv=a.csv" in message  # without what ``refused`` drops
    assert "1 problem in" in message
    (tmp_path / "elsewhere" / "a.csv").touch()
    assert loader.load(tmp_path / "x.yaml").task.train_csv == "a.csv"


def test_unknown_task_is_reported_with_the_other_errors(tmp_path):
    message = refused(tmp_path, GOOD.replace("image_csv", "imagecsv") + "seed: -1\nlaunch: {local: {}}\n")
    assert "x.yaml:3: task.name: unknown task 'imagecsv'; did you mean image_csv?" in message
    assert "x.yaml:8: seed: " in message
    assert "2 problems in" in message  # those of an unknown task are not judged, those of engines are known
    for text in ("", "name: x\n", GOOD.split("task:")[0] + "task: image_csv\n"):
        message = refused(tmp_path, text)
        assert "task.name: required, but not set; use one of fashion_mnist, image_csv, mnist, pet_names" in message
    assert "name: required, but not set" in refused(tmp_path, "")


# Layer 3: constraints


def test_constraints_are_checked_when_the_schema_holds(tmp_path):
    text = GOOD.replace("global: 8", "global: 8\n  per_rank: 2")
    message = refused(tmp_path, text + "checkpoint: {best_metric: f1}\n")
    assert "x.yaml:7: batch.global: set exactly one of batch.global and batch.per_rank" in message
    assert "both are set\n     -> batch.global=null batch.per_rank=2; or" in message
    assert "x.yaml:9: checkpoint.best_metric: task image_csv has no metric 'f1'" in message
    assert "2 problems" in message
    message = refused(tmp_path, text + "train: {epoch: 1}\n")
    assert "1 problem in" in message
    assert "train.epoch: unknown key" in message


# The text that is saved


def test_saved_text_loads_to_the_same(tmp_path):
    config = loader.load(ROOT / "configs" / "digits.yaml", ["optimizer.args={nesterov: true}", "seed=3"])
    again = load(tmp_path, loader.to_text(config))
    assert again == config
    assert loader.to_text(again) == loader.to_text(config)


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)
numbers_to_others = st.sampled_from(["1e5", "12E3", "1e-05", "null", "yes", "0x1F", "1.e5"])
texts = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="$\\\ufeff\x85\u2028\u2029"))
plain = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()


@hypothesis_settings(max_examples=40)
@given(
    names | numbers_to_others,
    texts.filter(lambda text: text != "???"),
    st.floats(1e-12, 1e6),
    st.dictionaries(st.sampled_from(["a", "b"]), plain),
)
def test_any_value_survives_saving(tmp_path_factory, name, text, number, args):
    folder = tmp_path_factory.mktemp("saved")
    tree = settings(folder, name=name, optimizer={"lr": number, "args": args})
    config = loader.config_class(Task).model_validate({**tree, "task": {**tree["task"], "root": text}})
    assert load(folder, loader.to_text(config)) == config


# Tasks of the user's own


class Options(TaskSection):
    size: int = 3
    metrics: typing.ClassVar[dict[str, str]] = {"f1": "max"}


@pytest.fixture
def own_tasks(tmp_path, monkeypatch):
    folder = tmp_path / "own_tasks"
    folder.mkdir()
    (folder / "good.py").write_text("from tests.config.test_loader import Options as Task\n")
    (folder / "empty.py").write_text("")
    (folder / "other.py").write_text("class Task: pass\n")
    (folder / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return GOOD.replace("image_csv", "own_tasks.good").replace("  train_csv: a.csv\n  eval_csv: b.csv\n", "  size: 4\n")


@pytest.mark.parametrize("name", ["own_tasks.good", "own_tasks.good.Task"])
def test_own_task_by_its_dotted_name(tmp_path, own_tasks, name):
    text = own_tasks.replace("own_tasks.good", name)
    config = load(tmp_path, text)
    assert (config.task.name, config.task.size, config.best_metric) == (name, 4, "f1")
    assert load(tmp_path, loader.to_text(config)) == config
    assert "did you mean task.size?" in refused(tmp_path, text.replace("size: 4", "sise: 4"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_tasks.none", "(AttributeError: module 'own_tasks' has no attribute 'none')"),
        ("own_tasks.empty", "(AttributeError: module 'own_tasks.empty' has no attribute 'Task')"),
        ("no_such_package.task", "(ModuleNotFoundError: No module named 'no_such_package')"),
        ("own_tasks.other", "Task of own_tasks.other is not a subclass of harness.config.schema.TaskSection"),
        (".good", "cannot be imported"),
    ],
)
def test_own_task_that_cannot_be_imported(tmp_path, own_tasks, name, message):
    found = refused(tmp_path, own_tasks.replace("own_tasks.good", name))
    assert message in found
    assert "x.yaml:3: task.name: " in found
    assert "1 problem" in found


def test_own_task_whose_code_fails(tmp_path, own_tasks):
    with pytest.raises(OwnCodeError, match=r"broken\.py:\d+: the task 'own_tasks.broken' cannot be imported \(ZeroDiv"):
        load(tmp_path, own_tasks.replace("own_tasks.good", "own_tasks.broken"))
    found = refused(tmp_path, own_tasks.replace("own_tasks.good", "own_tasks.broken") + "foo: 1\n")
    assert "2 problems" in found
    assert re.search(r"x\.yaml:3: task\.name: .*broken\.py:\d+: the task 'own_tasks\.broken' cannot be imported", found)


def test_a_module_beside_the_configuration_that_an_own_task_imports(tmp_path, own_tasks, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "beside_it.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "outer_tasks").mkdir()
    (tmp_path / "outer_tasks" / "imports_it.py").write_text("import beside_it\n")
    with pytest.raises(
        OwnCodeError, match="(?s)cannot be imported .*-> the folder of the configuration has it"
    ) as caught:
        load(tmp_path / "configs", own_tasks.replace("own_tasks.good", "outer_tasks.imports_it"))
    assert "imports_it.py:1" in caught.value.where


def test_own_modules_beside_the_configuration_of_another_folder(tmp_path, monkeypatch):
    """They are named where Python does not find them; the folder of a run's name is none."""
    for part in ("waves_task", "waves_nets"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "one.py").write_text("from tests.config.test_loader import Options as Task\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    hint = "the folder of the configuration has it: run the command in {0}, or set PYTHONPATH={0}"
    text = GOOD.replace("a.csv", "/a.csv").replace("b.csv", "/b.csv")
    model = text + "model: {name: waves_nets.one.Net}\n"
    for found in (refused(tmp_path, text.replace("image_csv", "waves_task.one")), refused(tmp_path, model)):
        assert hint.format(".") in found.replace(str(tmp_path), ".")
    load(tmp_path, text.replace("name: x", "name: waves_nets.one"))
    monkeypatch.syspath_prepend(str(tmp_path))
    load(tmp_path, model)


@pytest.mark.parametrize("value", ["my label #1", "#", " "])
def test_override_that_yaml_would_cut_off(tmp_path, value):
    with pytest.raises(ConfigError, match="quote it: 'task.label_column=\"") as caught:
        loader.load(write_yaml(tmp_path / "x.yaml", settings(tmp_path)), [f"task.label_column={value}"])
    assert caught.value.where == merge.COMMAND_LINE
    config = loader.load(tmp_path / "x.yaml", [f'task.label_column="{value}"'])
    assert config.task.label_column == value


def test_error_about_a_long_text_is_no_error_of_its_own(tmp_path):
    error = ConfigError("wrong", where="x " * 5000)
    assert loader.placed(error, loader.load(write_yaml(tmp_path / "c.yaml", settings(tmp_path)))).where == "x " * 5000


@pytest.mark.parametrize(
    ("theirs", "hint"),
    [
        ("learning_rate=1", "learning_rate: unknown key; did you mean optimizer.lr?"),
        ("weight_decay=1", "weight_decay: unknown key; did you mean optimizer.weight_decay?"),
        ("train.bf16=true", "train.bf16: unknown key; did you mean precision.opt_level=O4?"),
        ("optimizer.eps=1", "optimizer.eps: unknown key; did you mean optimizer.args.eps?"),
        ("model.lora.rank=4", "model.lora.rank: unknown key; did you mean model.lora.r?"),
        (
            "warmup_ratio=0.1",
            "did you mean schedule.warmup? a number counts epochs; a share of the run is schedule.warmup=10%",
        ),
        ("schedule.warmup_ratio=0.1", "a share of the run is schedule.warmup=10%"),
        ("schedule.warmup=0", '0 is not allowed; write a number of epochs above 0, "500 steps"'),
        ("train.load_best_model_at_end=true", "the best weights are always kept"),
        ("train.evaluation_strategy=steps", "did you mean train.evaluate_every? a number counts epochs"),
        ("train.eval_strategy=steps", "steps are 'train.evaluate_every=500 steps'"),
        ("r=4", "r: unknown key; did you mean model.lora.r?"),
        ("batch.eps=1", "batch.eps: unknown key; known keys: global, "),
        ("data.per_device_train_batch_size=8", "did you mean batch.per_rank?"),
        (
            "warmup_steps=0.1",
            "did you mean schedule.warmup? a number counts epochs; steps are 'schedule.warmup=500 steps'",
        ),
        ("per_device_train_batch_size=8", "8 rows, 4 times, are batch.per_rank=32 batch.accumulate=4"),
        (
            "train.eval_steps=500",
            "did you mean train.evaluate_every? a number counts epochs; steps are 'train.",
        ),
        ("callbacks=x", "callbacks: unknown key; did you mean hooks?"),
        ("truncation=true", "did you mean task.tokenizer.max_length?"),
        ("train_file=a.csv", "did you mean task.train_csv?"),
        ("train.max_steps=10,000", "it should be a valid integer (found: '10,000'): did you mean 10000?"),
        ("trackers=wandb", "(found: 'wandb'): write [wandb], on a command line 'trackers=[wandb]'"),
        ("task.image_size=96x64", "(found: '96x64'): write [96,64], on a command line 'task.image_size=[96,64]'"),
        ("optimizer.lr=0,001", "optimizer.lr: it should be a valid number (found: '0,001'): did you mean 0.001?"),
        ("train.greater_is_better=true", "unknown key; not available: each metric knows its better direction"),
        ("task.metrics=[f1_score]", "did you mean macro_f1 (the mean of the F1 of each class)?"),
        ("checkpoint.best_metric=eval_loss", "has no metric 'eval_loss'\n     -> did you mean loss?"),
        ("save_strategy=epoch", "did you mean checkpoint.every? a checkpoint is also written at the end of each epoch"),
        ("training_args.fp16=true", "unknown key; not available: each argument is a setting"),
        ("model.lora.bias=none", "unknown key; not available: model.lora trains no biases but"),
        ("model.lora.task_type=SEQ_CLS", "unknown key; not available: it follows from the task"),
        ("full_determinism=true", "did you mean train.deterministic?"),
        ("lr_scheduler_kwargs={}", "did you mean schedule.name? its arguments are schedule.args.NAME=VALUE"),
        ("id2label={}", "unknown key; not available: the classes are the labels"),
        ("eval_on_start=true", "unknown key; not available: the first evaluation is after"),
        ("schedule.name=cosine_with_restarts", "use cosine_restarts with schedule.args.cycle_epochs"),
        ("schedule.name=linear", "unknown schedule 'linear'; use polynomial, by default a straight line down to 0"),
    ],
)
def test_names_of_hugging_face_lead_to_ours(tmp_path, theirs, hint):
    assert hint in refused(tmp_path, GOOD, theirs)


def test_a_decimal_comma_is_no_integer(tmp_path):
    assert refused(tmp_path, GOOD, "train.max_steps=10,5").endswith("it should be a valid integer (found: '10,5')")


def test_texts_under_fsdp_with_the_preset_for_images_and_texts(tmp_path):
    task = {"name": "text_csv", "train_csv": "a.csv", "eval_csv": "b.csv"}
    tree = {"extends": "preset:modern", "name": "x", "task": task, "model": {"name": "text_cnn"}}
    path = write_yaml(tmp_path / "x.yaml", {**tree, "batch": {"global": 8}})
    assert loader.load(path, ["parallel.strategy=fsdp"]).model.channels_last
