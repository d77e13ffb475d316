"""docs/settings.md and ``harness settings``: current, complete, with examples that load, and found by usual words."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from harness import cli
from harness.config import loader, reference
from harness.config.schema import ScheduleSection
from harness.errors import ConfigError
from tests.conftest import ROOT

SETTINGS = [setting for chapter in reference.chapters() for setting in chapter.settings]
TABLE = ["task.train_csv=a.csv", "task.eval_csv=b.csv"]
# What another setting must be, so that an example is not refused.
WITH = {
    "batch.per_rank": ["batch.global=null"],
    "checkpoint.format": ["parallel.strategy=fsdp"],
    "optimizer.lr_base_batch": ["optimizer.lr_scaling=linear"],
    "optimizer.lr_scaling": ["optimizer.lr_base_batch=256"],
    "optimizer.args": ["optimizer.momentum=0.9"],
    "parallel.param_dtype": ["parallel.strategy=fsdp", "precision.opt_level=O0"],
    "precision.keep_batchnorm_fp32": ["precision.opt_level=O2"],
    "task.labels.column": ["task.labels.kind=regression"],
    "task.labels.empty": ["task.labels.separator=;"],
    "task.labels.separator": ["task.labels.kind=multi_label"],
    "task.tokenizer.args": ["task.tokenizer.name=mine.tokens", "task.tokenizer.num_tokens=9"],
    "task.text_column": ["task.tokenizer.name=hf:folder"],
    "task.tokenizer.num_tokens": ["task.tokenizer.name=mine.tokens"],
}
# The arguments without which a schedule is refused.
ARGUMENTS = {"cosine_restarts": ["schedule.args.cycle_epochs=10"], "step": ["schedule.args.milestones=[30, 60]"]}


def test_page_is_current():
    hint = "run: harness settings --markdown > docs/settings.md"
    assert (ROOT / "docs" / "settings.md").read_text() == reference.markdown(), hint


def test_every_setting_of_the_schema_is_there_once():
    keys = {setting.key for setting in SETTINGS}
    assert {"name", "extends", "task.loss.class_weights", "optimizer.groups[].match", "optimizer.larc.clip"} <= keys
    assert {"schedule.args.milestones", "launch.slurm.partition", "trackers", "task.tokenizer.pad"} <= keys
    assert len({(setting.key, setting.kind, setting.text) for setting in SETTINGS}) == len(SETTINGS)
    one = {setting.key: setting for setting in SETTINGS}
    assert one["task.tokenizer.pad"].parts == ("text_csv",)
    assert one["train.patience"].value == "whole number at least 1 or null; default: null"
    assert one["task.train_csv"].value == "text; required"
    assert [setting.key for setting in SETTINGS if not setting.text] == []


def test_examples_are_accepted(tmp_path):
    path = tmp_path / "experiment.yaml"
    path.write_text("name: x\nbatch: {global: 256}\n")
    for setting in SETTINGS:
        if "[]" in setting.key or setting.key == "extends":  # shown by the list, and written in the file
            continue
        (word,) = shlex.split(setting.example)
        assert word.startswith(f"{setting.key}=")
        assert word.partition("=")[2] != "null", f'{setting.key}: say "such as VALUE" in the docstring'
        part = setting.parts[0] if setting.parts else ""
        task = part if setting.key.startswith("task.") and part and "image_csv" not in setting.parts else "image_csv"
        words = [f"task.name={task}", *(TABLE if task.endswith("_csv") else []), *WITH.get(setting.key, [])]
        if setting.key.startswith("schedule.") and part:
            words += [f"schedule.name={part}", *ARGUMENTS.get(part, [])]
        loader.load(path, [*words, word])


@pytest.mark.parametrize(("words", "key"), [
    ("early stopping", "train.patience"),
    ("batch size", "batch.global"),
    ("gradient accumulation", "batch.accumulate"),
    ("gradient clipping", "train.clip_norm"),
    ("gradient checkpointing", "model.activation_checkpointing"),
    ("learning rate", "optimizer.lr"),
    ("weight decay", "optimizer.weight_decay"),
    ("warm-up", "schedule.warmup"),
    ("mixed precision", "precision.opt_level"),
    ("pretrained", "model.weights"),
    ("fine-tuning", "model.weights"),
    ("augmentation", "task.transforms.train"),
    ("imbalanced classes", "task.loss.class_weights"),
    ("validation data", "task.eval_csv"),
    ("dataloader workers", "data.num_workers"),
    ("moving average", "train.ema_decay"),
    ("distributed training", "parallel.strategy"),
    ("torch.compile", "model.compile"),
    ("tensorboard", "trackers"),
    ("processes per gpu", "launch.nproc"),
    ("evaluate within epoch", "train.evaluate_every"),
    ("evaluate in the middle of epochs", "train.evaluate_every"),
    ("train.patience", "train.patience"),
])  # fmt: skip
def test_usual_words_find_the_setting(words, key):
    assert key in [each.key for each in reference.search(words.split())[:5]]


@pytest.mark.parametrize(("word", "keys"), [
    ("learning_rate", ["optimizer.lr"]),
    ("callbacks", ["hooks"]),
    ("compute_loss", ["task.loss.name"]),
    ("compute_metrics", ["task.metrics"]),
    ("fp16", ["precision.opt_level"]),
    ("early_stopping_threshold", ["train.min_delta"]),
    ("adam_epsilon", ["optimizer.args"]),
    ("eps", ["optimizer.args"]),
    ("lora_alpha", ["model.lora.alpha"]),
    ("eval_batch", ["batch.eval_per_rank"]),
    ("polynomial", ["schedule.name", "schedule.args.power", "schedule.args.min_lr"]),
])  # fmt: skip
def test_names_of_hugging_face_of_schedules_and_of_arguments(word, keys):
    found = reference.search([word])
    assert [each.key for each in found] == keys
    assert word != "polynomial" or {each.parts for each in found} == {("polynomial",)}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("group_by_length", "a batch has rows"),
        ("load in 4bit", "weights are in 16"),
        ("neftune", "there is no noise"),
        ("data_collator", "a batch of texts"),
        ("padding_side", "it is that of the tokenizer"),
        ("IA3", "of the methods of peft, there are LoRA"),
    ],
)
def test_what_there_is_not_is_answered_with_the_reason(name, reason):
    called = name.lower().replace(" ", "_")
    with pytest.raises(ConfigError, match=f"(?s){called} of Hugging Face is not available\n  -> {reason}"):
        reference.search([name])


def test_all_schedules_are_found_by_the_name_of_hugging_face():
    found = reference.search(["lr_scheduler_type"])
    assert {each.key for each in found} == {"schedule.name"}
    assert found == [each for each in reference.search(["schedule"]) if each.key == "schedule.name"]
    assert len(found) > 1


def test_schedule_with_a_common_word_as_name():
    found = [each.key for each in reference.search(["step"])]
    assert found[:3] == ["schedule.name", "schedule.args.milestones", "schedule.args.gamma"]
    assert {"train.max_steps"} < set(found)


def test_other_forms_of_a_word_are_found():
    for words in ("evaluation frequency", "evaluating", "evaluations epoch"):
        assert reference.search(words.split())[0].key == "train.evaluate_every"


def test_names_come_first_and_then_keys(capsys):
    found = [each.key for each in reference.search(["lr"])]
    named, in_key = ([bool(re.search(pattern, key)) for key in found] for pattern in (r"\.lr$", r"[._]lr"))
    assert found[0] == "optimizer.lr"
    assert all(each == sorted(each, reverse=True) for each in (named, in_key))
    assert len(in_key) > sum(in_key) > sum(named)


def test_a_misspelled_word_beside_others_is_the_nearest():
    assert reference.search(["learning", "rte"]) == reference.search(["learning", "rate"])
    assert reference.search(["clp", "norm"])[0].key == "train.clip_norm"


def test_command_prints_text_lines_and_records(capsys):
    assert cli.main(["settings", "early", "stopping"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("train.patience\n  whole number at least 1 or null; default: null\n  Early stopping: ")
    assert shown.endswith("  example: train.patience=5\n")
    assert cli.main(["settings", "train"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert all(line.startswith("train.") for line in lines)
    assert cli.main(["settings"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(SETTINGS)
    assert cli.main(["settings", "--json", "train.patience"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert list(record) == ["key", "kind", "default", "text", "example", "parts"]
    assert (record["key"], record["default"], record["parts"]) == ("train.patience", "null", [])
    assert cli.main(["settings", "pacience"]) == 2
    assert "did you mean patience?" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["model", "loss", "metric", "optimizer", "schedule", "task"])
def test_a_part_of_ones_own_is_found_with_an_example(part):
    (found,) = reference.search(["own", part])
    (word,) = shlex.split(found.example)
    assert word.startswith(f"{found.key}=")
    assert "my_module." in word
    assert found.text
    assert reference.search([f"own {part}s"]) == [found]
    if part not in ("task", "schedule"):  # which loading imports
        loader.load(str(ROOT / "configs" / "digits.yaml"), [word])


def test_a_schedule_is_described_once_on_the_page():
    of_schedules = [each for each in SETTINGS if each.key.startswith("schedule.args.")]
    page = reference.markdown()
    shape = " ".join(ScheduleSection.model_fields["name"].description.split())
    for text in {shape, *(each.text for each in of_schedules)}:
        assert page.count(reference._escaped(text)) == 1
