"""The facts of a run, or every error in its configuration, before anything is started."""

from __future__ import annotations

import re
import resource

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import nn
from torchvision.io import write_png

from harness.config import loader
from harness.data import loader_workers
from harness.data.images import ImageTable
from harness.distributed import machine
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import EXIT_OWN_CODE, EXIT_USAGE, ConfigError, DataError, TrainingError
from harness.tasks.image_csv.task import ImageCsv
from harness.training import build
from harness.training.check import preflight, trial
from harness.training.run_start import run_folder
from tests.fixtures import settings, write_rows, write_yaml


@pytest.fixture
def folder(tmp_path):
    write_rows(tmp_path, "train", 20)
    write_rows(tmp_path, "eval", 6)
    return tmp_path


def planned(folder, *overrides, world=1, **sections):
    return preflight.examine(str(write_yaml(folder / "x.yaml", settings(folder, **sections))), overrides, world)


def examine(folder, *overrides, **options):
    plan = planned(folder, *overrides, **options)
    return plan.facts, plan.errors


def test_facts(folder):
    facts, problems = examine(folder, "batch.accumulate=2", "train.epochs=3", world=2)
    assert problems == []
    assert facts["model"] == "linear, 195 parameters"
    assert facts["train rows"] == 20
    assert facts["batch"] == "2 per rank, 4 in total, in 2 micro-batches"
    assert (facts["steps per epoch"], facts["steps"]) == (5, 15)
    assert facts["amp"].startswith("O1 by harness.apex; on this CPU, ")
    assert facts["ranks"] == 2
    assert not (folder / "runs").exists()  # nothing was started


@pytest.mark.parametrize(
    ("overrides", "world", "expected"),
    [
        ((), 2, "on 2 processes only; on 1 to 2 with parallel.logical_ranks=2"),
        (("parallel.strategy=fsdp",), 2, "on 1 to 2 with parallel.logical_ranks=2 parallel.strategy=ddp"),
        (
            ("parallel.logical_ranks=4", "batch.global=4"),
            1,
            "on 1 to 4 processes; on 1: 4 passes per step in each, 3 sums of the gradients, ",
        ),
        (("parallel.logical_ranks=4", "batch.global=4"), 4, "one pass per step in each, 1 sum of the gradients"),
    ],
)
def test_what_the_same_bits_cost(folder, overrides, world, expected):
    facts, problems = examine(folder, *overrides, world=world)
    assert problems == []
    assert expected in facts["same bits"]


def test_an_output_that_does_not_answer(folder, monkeypatch):
    url = f"output=file://{folder}/runs"
    assert examine(folder, url)[1] == []

    def find(*_, **__):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(LocalFileSystem, "find", find)
    (problem,) = examine(folder, url)[1]
    assert f"file://{folder}/runs/small" in str(problem)
    assert "Connection refused" in str(problem)


def summed(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def not_finite(outputs, targets):
    return outputs.sum() * float("nan")


def test_an_own_loss_that_is_not_finite_is_named(folder):
    (error,) = examine(folder, f"task.loss.name={__name__}.not_finite")[1]
    line = not_finite.__code__.co_firstlineno
    assert error.where == f"tests/training/test_preflight.py:{line}"
    assert error.message.startswith(f"{__name__}.not_finite returned nan")


def test_an_own_loss_of_a_built_in_task_that_is_a_sum_is_named(folder):
    facts, problems = examine(folder, "task.loss.name=tests.training.test_preflight.summed")
    assert problems == []
    line = summed.__code__.co_firstlineno
    assert f"tests/training/test_preflight.py:{line}: loss() is " in facts["warning"]
    assert "so it is a sum" not in examine(folder)[0].get("warning", "")


def of_one_argument(gradients): ...


def test_a_wrong_function_on_gradients_is_one_error(folder):
    (problem,) = examine(folder, "train.on_gradients=tests.training.test_preflight.of_one_argument")[1]
    assert "cannot be called with the gradients of a step" in problem.message


def test_operation_without_a_deterministic_implementation(folder, monkeypatch):
    """Named for any machine; an error where training would run on CUDA and refuse it."""
    model = {"model": {"name": "tests.training.test_preflight.Pooled"}}
    facts, problems = examine(folder, **model)
    assert facts["deterministic"].endswith(
        "others raise an error; no deterministic algorithm on CUDA for: AdaptiveAvgPool2d"
    )
    assert problems == []
    monkeypatch.setattr(preflight.devices, "choose", lambda *_: torch.device("cuda"))
    (problem,) = examine(folder, **model)[1]
    assert "train.deterministic: on CUDA, torch has no deterministic implementation of AdaptiveAvgPool2d" in str(
        problem
    )
    assert "x.mean((-2, -1))" in problem.hint
    for level in ("warn", "false"):
        assert examine(folder, f"train.deterministic={level}", **model)[1] == []


class Pooled(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features, self.layer = nn.Conv2d(1, 1, 3), nn.Linear(4, num_classes)

    def forward(self, images):
        return self.layer(nn.functional.adaptive_avg_pool2d(self.features(images), 2).flatten(1))


@pytest.mark.parametrize(
    ("pace_s", "batch", "expected"), [(0.0, 10, ("at most", 4)), (1e6, 10, ("about", 10)), (1e6, 1000, ("about", 20))]
)
def test_duration_at_the_pace_of_a_step_of_the_run(folder, monkeypatch, pace_s, batch, expected):
    """Of fewer rows, at most that long, if it takes longer than is given. An epoch has no more rows than the data."""
    monkeypatch.setattr(trial, "_PACE_S", pace_s)
    path = write_yaml(folder / "x.yaml", settings(folder))
    plan = preflight.examine(str(path), [f"batch.global={batch}"], 1, limit_s=1e6)
    assert plan.errors == []
    shown = r"(at most|about) \d+ \w+ for ([\d,]+) training rows per rank, at the pace of (\d+) here"
    least, rows, pace = re.fullmatch(shown, plan.facts["duration"]).groups()
    assert (least, int(pace)) == expected
    assert int(rows) == min(batch, 20) * plan.facts["steps"]


def test_files_and_one_batch(folder):
    """Both splits are sampled, and a few rows take a step and an evaluation."""
    plan = planned(folder, "optimizer.name=adam", "train.ema_decay=0.9")
    assert plan.errors == []
    assert plan.facts["files"] == "training: 20 of 20 images decoded (8x8); validation: 6 of 6 images decoded (8x8)"
    assert "4 training rows through prepare, model, loss 1." in plan.facts["one batch"]
    assert "4 validation rows through prepare, model and metrics" in plan.facts["one batch"]
    for part in ("parameters", "gradients", "optimizer state", "moving average"):
        assert part in plan.facts["memory"]
    plan = preflight.examine(str(folder / "x.yaml"), ("optimizer.name=adam",), 1, limit_s=0.0)
    assert "stopped after 0 s" in plan.facts["one batch"]
    assert "8 of 20 images" in plan.facts["files"]
    assert "; ".join(plan.untried).startswith(
        "a training step and an evaluation (stopped after 0 s, in prepare() of the task"
    )
    for part in (
        " KiB, optimizer state ",
        " KiB of activations for 4 rows at a time (computed from the shapes)",
    ):
        assert part in plan.facts["memory"]


def slow_backward(self, outputs, targets):
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, gradient):
            raise trial.OutOfTime

    return Waits.apply(nn.functional.cross_entropy(outputs, targets))


def test_what_was_not_tried_is_named_with_the_reason(folder, monkeypatch):
    plan = planned(folder, "precision.opt_level=O0")
    assert plan.untried == []
    plan = planned(folder, "precision.opt_level=O4", "model.compile=true", world=2)
    assert (
        "; ".join(plan.untried)
        == "O4 on cpu (the trial is in float32 on the CPU); 2 ranks (the trial is of one); model.compile"
    )
    plan = planned(folder, "optimizer.args={nope: 1}")
    assert len(plan.errors) == 1
    assert "; ".join(plan.untried) == "a training step and an evaluation (because of the errors)"
    monkeypatch.setattr(ImageCsv, "loss", slow_backward)
    plan = planned(folder, "precision.opt_level=O0", "optimizer.name=adam")
    assert plan.errors == []
    assert "; ".join(plan.untried) == (
        "a training step and an evaluation (stopped after 2 s, in the backward pass on the training data)"
    )
    assert re.search(r"optimizer state [\d.]+ KiB per rank; about [\d.]+ KiB of activations", plan.facts["memory"])
    assert "measured on 4 rows" in plan.facts["memory"]


class Deep(nn.Sequential):
    """It keeps 11 times the bytes of a row, with the input."""

    def __init__(self, num_classes: int) -> None:
        layers = [layer for _ in range(10) for layer in (nn.Conv2d(1, 1, 3, padding=1), nn.Sigmoid())]
        super().__init__(*layers, nn.Flatten(), nn.LazyLinear(num_classes))


class Branches(Deep):
    """It needs the values of a tensor."""

    def forward(self, images):
        return super().forward(images * 2 if images.sum().item() > 3 else images)


@pytest.mark.parametrize("limit_s", [0.0, 60.0])
def test_more_memory_than_the_device_has_is_an_error(folder, monkeypatch, limit_s):
    """Also if nothing was computed: a batch of 20 rows of 512 x 512 needs 220 MiB."""
    model = {"name": "tests.training.test_preflight.Deep"}
    words = ("task.image_size=[512,512]", "batch.global=20", "precision.opt_level=O0")
    path = str(write_yaml(folder / "x.yaml", settings(folder, model=model)))
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(2**27, 2**27))
    plan = preflight.examine(path, words, 1, limit_s)
    (problem,) = plan.errors
    assert "a rank needs about 2" in problem.message
    assert "MiB are activations of 20 rows, but has 128.0 MiB of memory on cpu here" in problem.message
    assert problem.hint.startswith("use one of: batch.accumulate=2 (10 rows at a time; the same batch size)")
    assert preflight.examine(path, (*words, "batch.accumulate=5"), 1, limit_s).errors == []
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(2**25, 2**25))  # for two rows
    (problem,) = preflight.examine(path, words, 1, limit_s).errors
    assert "batch.accumulate=10 (2 rows at a time" in problem.hint
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(2**24, 2**24))  # for none
    (problem,) = preflight.examine(path, words, 1, limit_s).errors
    assert "accumulate" not in problem.hint
    assert "a smaller task.image_size" in problem.hint


def test_memory_of_a_model_that_needs_values(folder):
    model = {"name": "tests.training.test_preflight.Branches"}
    path = str(write_yaml(folder / "x.yaml", settings(folder, model=model)))
    plan = preflight.examine(path, (), 1, 0.0)
    assert plan.errors == []
    assert "come on top (not known: the model cannot run without values: " in plan.facts["memory"]


def damaged(folder):
    (folder / "eval_images" / "4.png").write_bytes(b"<html>404</html>")


def of_another_size(folder):
    write_png(torch.zeros(1, 9, 8, dtype=torch.uint8), str(folder / "eval_images" / "5.png"))


def all_missing(folder):
    for image in (folder / "eval_images").iterdir():
        image.unlink()


def no_outputs(self, outputs):
    raise KeyError("score")


@pytest.mark.parametrize(
    ("spoil", "overrides", "kind", "message"),
    [
        (damaged, (), DataError, "eval.csv:6: image cannot be decoded: "),
        (of_another_size, (), DataError, "eval.csv:7: images differ in size: (8, 8) and (9, 8) (height, width)\n"
         "  -> set task.image_size"),
        (all_missing, ("task.on_bad_row=skip",), DataError, "eval.csv:2: the image of this row cannot be read, and"),
        (None, ("task.on_bad_row=skip", "task.root=/nowhere/photos"), DataError,
         "task.root: the folder /nowhere/photos does not exist"),
        (None, ("model.name=tests.training.test_preflight.Pair", "train.deterministic=false"),
         TrainingError, "loss() of the task fails on the training data: AttributeError: "),
        (("loss", lambda self, outputs, targets: outputs.sum(1)), ("train.deterministic=false",), TrainingError,
         "ImageCsv.loss() returned a tensor of shape (4,)\n"),
        (("loss", lambda self, outputs, targets: outputs.sum() / 0), (), TrainingError, "with the initial weights"),
        (("evaluate", lambda self, outputs, targets: {"loss": (nn.functional.nll_loss(outputs, targets + 3), 1)}), (),
         TrainingError, "evaluate() of the task fails on the validation data: IndexError: Target "),
        (("report", lambda self, sums: {"loss": 1.0}), (), TrainingError, "ImageCsv.report() returned no metric"),
        (("predictions", no_outputs), (), TrainingError,
         "predictions() or known() of the task fails on the validation data: KeyError: 'score'"),
        (("known", lambda self, rows: {"id": []}), (), TrainingError, "known() returned 0 values of 'id' for 4 rows"),
    ],
)  # fmt: skip
def test_faults_that_would_show_after_the_start(folder, monkeypatch, spoil, overrides, kind, message):
    """Each of these has passed this check, and failed a run after it had waited for its machines."""
    if isinstance(spoil, tuple):
        monkeypatch.setattr(ImageCsv, *spoil)
    elif spoil:
        spoil(folder)
    (problem,) = examine(folder, *overrides)[1]
    assert isinstance(problem, kind)
    assert message in str(problem)


class Pair(nn.Linear):
    """Like torchvision's googlenet, which returns more while it is trained."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(64, num_classes)

    def forward(self, images):
        logits = super().forward(images.flatten(1))
        return (logits, logits) if self.training else logits


def test_all_kinds_of_problems_of_the_rows_are_listed_at_once(folder):
    """With their number and first lines; a kind that rows may have is left out."""
    train, eval_ = (folder / f"{split}.csv" for split in ("train", "eval"))
    lines = train.read_text().splitlines()
    lines[3] = "train_images/2.png,"
    lines[5] = "gone.png,1"
    train.write_text("\n".join(lines) + "\n")
    (folder / "train_images" / "7.png").write_bytes(b"no image")
    lines = eval_.read_text().splitlines()
    lines[1:4] = ["eval_images/0.png,other", "eval_images/1.png,other", "eval_images/2.png, "]
    eval_.write_text("\n".join(lines) + "\n")
    damaged(folder)
    labels = [
        f"{train}:4: 1 row without a label",
        f"{eval_}:4: 1 row without a label",
        f"{eval_}:2: 2 rows with a label that {train} does not have ('other'); also {eval_}:3",
    ]
    images = [
        f"{train}:6: image not found: {folder}/gone.png (missing: 1 of 20 rows looked at)",
        f"{train}:9: image cannot be decoded: {folder}/train_images/7.png: ",
        f"{eval_}:6: image cannot be decoded: {folder}/eval_images/4.png: ",
    ]
    for overrides, expected in (((), [*labels, *images]), (("task.on_bad_row=skip",), labels)):
        found = [str(error).splitlines()[0] for error in examine(folder, *overrides)[1]]
        assert len(found) == len(expected), found
        assert all(map(str.startswith, found, expected)), found
    assert "(unreadable: 1 of 19 images looked at)" in str(examine(folder)[1][4])
    train.write_text(train.read_text().replace("train_images/2.png,\n", "train_images/2.png,1\n"))
    eval_.write_text(eval_.read_text().replace(", \n", ",1\n").replace("other", "11"))
    first = examine(folder, "task.on_bad_row=skip")[1][0]
    assert first.message == f"2 rows with a label that {train} does not have ('11'); also {eval_}:3"
    assert "task.labels.kind=regression" in first.hint, "the hint of the error that training would show"
    eval_.write_text(eval_.read_text().replace("0.png,11", "0.png,one").replace("1.png,11", "1.png,00"))
    train.write_text(train.read_text().replace("/1.png,1", "/1.png,One"))
    (error,) = examine(folder, "task.on_bad_row=skip")[1]
    assert (error.where, error.hint) == (f"{eval_}:2", "did you mean '0', 'One'?"), "one error for one cause"


def test_rows_without_labels_can_be_allowed_in_both_tables(folder):
    """Where a row may have several labels."""
    for split in ("train", "eval"):
        table = folder / f"{split}.csv"
        lines = table.read_text().splitlines()
        table.write_text("\n".join([*lines[:-1], lines[-1].rpartition(",")[0] + ","]) + "\n")
    labels = ("task.labels={column: label, separator: '|'}",)
    assert all("task.labels.empty=allow" in error.hint for error in examine(folder, *labels)[1])
    assert not any("empty=allow" in error.hint for error in examine(folder)[1])
    assert not examine(folder, "task.labels={column: label, separator: '|', empty: allow}")[1]


def test_a_checkpoint_to_resume_from_that_does_not_exist_is_an_error(folder):
    """Here, and before a start with another recipe moves a finished run aside."""
    (error,) = examine(folder, "checkpoint.resume=runs/nope")[1]
    assert error.message == "there is no checkpoint folder runs/nope"
    assert error.exit_code == EXIT_USAGE
    with pytest.raises(ConfigError, match="there is no checkpoint folder runs/nope"):
        build.rehearse(loader.load(folder / "x.yaml", ["checkpoint.resume=runs/nope"]), 1)


def test_every_damaged_image_is_named(folder):
    """Of both splits at once, and those that no sample of a larger table would include."""
    write_rows(folder, "train", 480)
    damaged(folder)
    for row in (7, 470):
        (folder / "train_images" / f"{row}.png").write_bytes(b"no image")
    problem, other = examine(folder)[1]
    first, hint = str(problem).splitlines()
    assert f"train.csv:9: image cannot be decoded: {folder}/train_images/7.png: " in first
    assert "train.csv:472: train_images/470.png" in first
    assert "harness check" not in hint
    assert str(other).startswith(f"{folder}/eval.csv:6: image cannot be decoded: ")
    (folder / "eval_images" / "4.png").unlink()
    assert str(examine(folder)[1][1]).startswith(f"{folder}/eval.csv:6: image not found: ")


def test_few_unreadable_images_may_be_skipped(folder):
    damaged(folder)
    facts, problems = examine(folder, "task.on_bad_row=skip")
    assert problems == []
    named = f"{folder}/eval.csv:6: eval_images/4.png"
    assert facts["files"].endswith(f"5 of 6 images decoded (8x8); skipped 1 damaged image: {named}")
    (folder / "eval_images" / "4.png").unlink()
    facts, _ = examine(folder, "task.on_bad_row=skip")
    assert facts["files"].endswith(f"; skipped 1 missing image: {named}")


def test_more_memory_than_there_is(folder, monkeypatch):
    """An image that is too large is refused before it is in memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(2**33, 2**33))
    (problem,) = examine(folder, "task.image_size=[65536,65536]")[1]
    assert "task.image_size: two images of 65536x65536 take 32.0 GiB" in str(problem)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


class Wide(nn.Sequential):
    """262,144 weights, and few others."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 4096, bias=False), nn.Linear(4096, num_classes))


@pytest.mark.parametrize(
    ("overrides", "world", "expected"),
    [
        (("precision.opt_level=O0",), 1, "parameters 1.0 MiB, gradients 1.0 MiB, optimizer state 2.1 MiB per rank"),
        (("precision.opt_level=O2",), 1, "half-precision copies of weights and gradients 1.0 MiB per rank"),
        (("precision.opt_level=O3",), 1, "parameters 536.0 KiB, gradients 536.0 KiB, optimizer state 1.0 MiB per rank"),
        (("precision.opt_level=O0", "parallel.strategy=fsdp"), 2, "parameters 536.0 KiB, gradients 536.0 KiB"),
    ],
)
def test_memory_of_a_rank(folder, overrides, world, expected):
    model = {"name": "tests.training.test_preflight.Wide"}
    facts, problems = examine(folder, "optimizer.name=adam", *overrides, world=world, model=model)
    assert problems == []
    assert expected in facts["memory"]


def test_too_little_shared_memory_for_the_batches(folder, monkeypatch):
    """Two rows of 8 x 8 pixels and a label of 8 bytes are 144 bytes; 2 ranks with 3 workers keep 14 such batches."""
    usage = type("Usage", (), {"total": 2**20, "used": 0, "free": 14 * 144})
    monkeypatch.setattr(loader_workers, "SHARED_MEMORY", str(folder))
    monkeypatch.setattr(loader_workers.shutil, "disk_usage", lambda _: usage)
    assert examine(folder, "data.num_workers=3", world=2)[1] == []
    for within in ("train.evaluate_every=3 steps", "train.max_steps=8"):
        (problem,) = examine(folder, "data.num_workers=3", within, world=2)[1]  # as many for the evaluation
        assert f"need up to {28 * 144 / 2**20:.1f} MiB" in problem.message
    usage.free -= 1
    (problem,) = examine(folder, "data.num_workers=3", world=2)[1]
    assert problem.where == "command line: data.num_workers=3"
    assert examine(folder, "data.num_workers=0", world=2)[1] == []


def test_scaled_learning_rate(folder):
    facts, _ = examine(folder, optimizer={"lr": 0.1, "lr_scaling": "linear", "lr_base_batch": 2})
    assert facts["learning rate"] == "0.2 (linear scaling of 0.1)"


def test_independent_errors_are_reported_together(folder):
    facts, problems = examine(
        folder, world=3, model={"name": "small_cnm"}, optimizer={"name": "adamm"}, precision={"backend": "apex"},
        runtime={"device": "auto"}, parallel={"strategy": "none"},
    )  # fmt: skip
    text = "\n".join(str(problem) for problem in problems)
    for words in (
        "precision.backend=apex, but",
        "4 rows cannot be divided evenly among 3 ranks",
        "use batch.global=3 or batch.global=6",
        "unknown model 'small_cnm'",
        "unknown optimizer 'adamm'",
        "parallel.strategy=none runs in one process, but 3 were started",
    ):
        assert words in text
    assert len(problems) == 5
    assert {type(problem) for problem in problems} == {ConfigError}


def test_errors_of_data_do_not_hide_other_errors(folder):
    (folder / "eval.csv").unlink()
    (folder / "images").mkdir()
    _, problems = examine(folder, "task.label_column=kind", f"task.root={folder}/imagse", optimizer={"name": "adamm"})
    messages = [str(problem).removeprefix(f"{folder}/") for problem in problems]
    assert "unknown optimizer 'adamm'" in messages.pop(0)
    assert messages[0].startswith(
        "train.csv: no column 'kind'; the columns are 'path', 'label'\n  -> set task.label_column"
    )
    assert messages[1].startswith(f"x.yaml:6: task.eval_csv: {folder}/eval.csv: no such annotation file")
    assert messages[2].startswith(
        f"command line: task.root: the folder {folder}/imagse does not exist\n  -> did you mean {folder}/images? "
    )
    assert len(messages) == 3


@pytest.mark.parametrize(
    ("setting", "hint"),
    [("optimizer.name=adamm", "adam"), ("model.name=small_cnm", "small_cnn"), ("model.weights=DEFALT", "file")],
)
def test_wrong_names_are_refused_before_images_are_decoded(folder, monkeypatch, setting, hint):
    def decode(*_):
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(ImageCsv, "require_files", decode)
    monkeypatch.setattr(build.determinism, "require", lambda *_: None)
    facts, (problem,) = examine(folder, setting)
    assert facts == {}
    assert problem.where == f"command line: {setting.partition('=')[0]}"
    assert hint in problem.hint
    config = loader.load(str(folder / "x.yaml"), [setting])
    with pytest.raises(ConfigError, match="unknown|no published"):
        build.build(config, Runtime(), run_folder(config), Stop(Runtime()))


def test_errors_that_only_building_finds_name_the_line_of_the_setting(folder):
    path = folder / "x.yaml"
    _, problems = examine(folder, "hooks=[nowhere.Hook]", model={"name": "linaer"}, optimizer={"name": "adamv"})
    line = {text.strip(): number for number, text in enumerate(path.read_text().splitlines(), 1)}
    shown = "\n".join(map(str, problems))
    assert f"{path}:{line['name: linaer']}: model.name: unknown model 'linaer'\n  -> did you mean linear?" in shown
    assert (
        f"{path}:{line['name: adamv']}: optimizer.name: unknown optimizer 'adamv'\n  -> did you mean adam or adamw?"
        in shown
    )
    assert "command line: hooks.0: the hook 'nowhere.Hook' cannot be imported" in shown
    _, (problem,) = examine(folder, "task.path_column=kind", task={"eval_csv": f"{folder}/train.csv"})
    assert problem.where == f"{folder}/train.csv"  # which says more about a table than the setting


@pytest.mark.parametrize("other", ["model.name=linaer", "optimizer.groups=[{match: absent, lr_scale: 2}]"])
def test_a_wrong_argument_of_the_optimizer_is_found_beside_another_error(folder, other):
    _, problems = examine(folder, "optimizer={name: adamw, args: {betas: [0.9, 2]}}", other)
    assert len(problems) == 2
    assert "cannot build adamw: Invalid beta parameter at index 1: 2" in str(problems[1])


def test_an_optimizer_of_matrices_is_no_error_beside_a_wrong_model(folder):
    _, (problem,) = examine(folder, "model.name=linaer", optimizer={"name": "muon"})
    assert "unknown model 'linaer'" in problem.message


def test_unreadable_configuration_is_the_only_error(folder):
    facts, problems = examine(folder, "train.epoch=3")
    assert facts == {}
    assert len(problems) == 1


def test_too_few_rows(folder, monkeypatch):
    _, problems = examine(folder, "batch.global=48", world=24)
    assert "only 20 training rows for 24 ranks" in str(problems[0])
    _, problems = examine(folder, "batch.global=32", "data.tail=drop")
    assert "cannot fill one global batch of 32" in str(problems[0])
    facts, problems = examine(folder, "batch.global=4096", "batch.accumulate=2", world=2)
    assert problems == []
    assert facts["warning"].startswith("the global batch of 4096 is larger than the training data: each epoch is one")
    monkeypatch.setattr(ImageTable, "__len__", lambda self: 0)
    assert "the training dataset has no rows" in str(examine(folder)[1][0])


def test_what_is_hardly_meant_is_a_warning(folder):
    facts, problems = examine(folder, "train.evaluate_every=500", "train.epochs=5")
    assert problems == []
    assert "for steps, type train.evaluate_every='500 steps'" in facts["warning"]
    assert "evaluate_every" not in examine(folder, "train.evaluate_every=5", "train.epochs=5")[0].get("warning", "")
    facts, _ = examine(folder, "schedule.warmup=0.1", "train.epochs=5")
    assert "schedule.warmup=0.1 is in epochs: 1 step of " in facts["warning"]
    assert "; a share of the run is schedule.warmup=10%" in facts["warning"]
    for meant in ("schedule.warmup=10%", "schedule.warmup=0.1 epochs", "schedule.warmup=1"):
        assert "warmup" not in examine(folder, meant, "train.epochs=5")[0].get("warning", "")
    facts, _ = examine(folder, f"task.eval_csv={folder / 'train.csv'}")
    assert "task.eval_csv is task.train_csv" in facts["warning"]
    facts, problems = examine(folder, "train.min_delta=0.1", "train.patience=null")
    assert not problems
    assert "train.min_delta changes nothing without train.patience" in facts["warning"]
    for every, epochs, told in (
        ("2 steps", 1, "has 3 evaluations"), ("500 steps", 2, "1 evaluation:"), (1, 3, "3 eval"), (1, 4, ""),
        ("0.5 epochs", 2, ""), ("1 steps", 1, ""),
    ):  # fmt: skip
        facts, _ = examine(folder, "train.patience=2", f"train.evaluate_every={every}", f"train.epochs={epochs}")
        warned = "train.patience=2 cannot end this run early, which has " in facts.get("warning", "")
        assert (warned, told in facts.get("warning", "")) == (bool(told), True), (every, facts)
    one_cycle = "schedule={name: one_cycle, warmup: null}", "optimizer={name: adamw, lr: 0.01}"
    facts, problems = examine(folder, *one_cycle, "optimizer.args.betas=[0.5,0.99]")
    assert not problems
    assert "one_cycle varies beta1 from 0.95 to 0.85 and back, not from the 0.5 of" in facts["warning"]
    assert "beta1" not in examine(folder, *one_cycle, "optimizer.args.betas=[0.95,0.99]")[0].get("warning", "")
    for file in (folder / "train.csv", folder / "eval.csv"):
        file.write_text("path,label\n" + "eval_images/0.png,bag\n" * 9 + "eval_images/1.png,bagg\n")
    assert f"line 11 of {folder}/train.csv: 1 row with the label 'bagg', 9 with" in examine(folder)[0]["warning"]
    (folder / "train.csv").write_text((folder / "train.csv").read_text() + "gone.png,bag\neval_images/1.png,\n")
    facts, problems = examine(folder)
    assert facts["warning"] == (
        f"{folder}/train.csv:11: 1 row with the label 'bagg', 10 with 'bag': if it is a misspelling, correct it, or it "
        "stays a class of its own"
    )
    found = [str(error).split(" (")[0].splitlines()[0] for error in problems]
    places = ["13: 1 row without a label", "12: image not found"]
    assert [each.partition(f"{folder}/gone")[0].rstrip(": ") for each in found] == [
        f"{folder}/train.csv:{place}" for place in places
    ]


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), KeyError("x")])
def test_unusual_error_of_an_own_model_is_one_of_the_errors(folder, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(preflight.build, "build_model", fail)
    (problem,) = examine(folder)[1]
    assert problem.exit_code == EXIT_OWN_CODE
    assert type(error).__name__ in problem.message


def test_error_of_an_own_task_is_one_of_the_errors(folder, monkeypatch):
    def fails(*_):
        raise KeyError("planned")

    def fails_too(*_):
        raise ZeroDivisionError("of problems()")

    monkeypatch.setattr("harness.tasks.image_csv.config.Task.open", fails)
    monkeypatch.setattr("harness.tasks.image_csv.config.Task.problems", fails_too)
    _, errors = examine(folder, "trackers=[wandb]")
    text = "\n".join(map(str, errors))
    assert "tests/training/test_preflight.py:" in text
    assert "KeyError: 'planned'" in text
    assert "ZeroDivisionError: of problems()" in text


def test_a_task_without_words_for_its_sample_takes_a_step_as_well(folder, monkeypatch):
    monkeypatch.setattr(ImageCsv, "sample", lambda self, limit_s: "")
    assert "4 training rows through prepare" in examine(folder)[0]["one batch"]
