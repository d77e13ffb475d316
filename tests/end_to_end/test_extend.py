"""A user adds each kind of part with one file of their own, and edits nothing in the project."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from harness.cli import main
from harness.errors import CheckpointError
from harness.runs import checkpoint, checkpoints
from tests.conftest import ROOT
from tests.end_to_end.experiment import assert_same_run, record
from tests.end_to_end.processes import python

TRACKERS = (ROOT / "docs" / "trackers.md").read_text()
PARTS = {
    "task": '''
from typing import Annotated
import numpy as np
from harness import Mark
from harness.training.task import Arrays, BaseTask, TaskSection

class Task(TaskSection):
    """Learn y = 2x."""

    rows: int = 32
    scratch: Annotated[str, Mark.NO_RECIPE, Mark.OF_MACHINE] | None = "/scratch"
    source: Annotated[str, Mark.OF_MACHINE] = "/data"

    def open(self, seed, cache_dir):
        return Line(self.rows)

class Line(BaseTask):
    def __init__(self, rows):
        x = np.linspace(-1, 1, rows, dtype=np.float32)[:, None]
        self.train = self.eval = Arrays(x, 2 * x)
        self.notes, self.fingerprint, self.summary = ["a note"], "line", {"kind": "a line"}

    def loss(self, outputs, targets):
        return (outputs - targets).square().mean()

    def predictions(self, outputs):
        return {"prediction": outputs[:, 0]}
''',
    "model": """
from torch import nn

class Scale(nn.Linear):
    def __init__(self, bias=True):
        super().__init__(1, 1, bias=bias)
""",
    "optimizer": """
import torch

class SignDescent(torch.optim.Optimizer):
    def __init__(self, params, lr, shrink=1.0):
        super().__init__(params, {"lr": lr, "shrink": shrink})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(group["shrink"]).sub_(param.grad.sign(), alpha=group["lr"])
""",
    "tracker": re.search(r"<!-- tracker -->\n```python\n(.*?)^```$", TRACKERS, re.M | re.S)[1],
    "weights": """
import json
import torch
from harness.inference.formats.base import ExportFormat

class Format(ExportFormat):
    suffix, tolerance = ".json", 0.0

    def write(self, subject, path):
        path.write_text(json.dumps({name: each.tolist() for name, each in subject.model.state_dict().items()}))
        loaded = subject.new()
        loaded.load_state_dict({name: torch.tensor(each) for name, each in json.loads(path.read_text()).items()})
        return loaded
""",
    "child": """
import os
import subprocess
from harness.config.base import Section
from harness.distributed.monitor import EngineReport
from harness.distributed.rank_exit import RankExit

class Settings(Section):
    mark: str

def render(job):
    return f"HARNESS_MARK={job.settings.engine_settings.mark} {' '.join(job.command())}\\n"

def start(job):
    return Child(job)

class Child:
    def __init__(self, job):
        mark = job.settings.engine_settings.mark
        environ = {**os.environ, **job.environ(), "HARNESS_MARK": mark}
        self.process = subprocess.Popen(job.command(), env=environ)

    def follow(self):
        return EngineReport([RankExit.from_code(0, self.process.wait())])

    def stop(self):
        self.process.terminate()
""",
    "verb": '''
"""Count the lines of the metrics of a run."""

from pathlib import Path

HELP = "count the lines of metrics.jsonl"

def add_arguments(parser):
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--split", default="eval")

def run(arguments):
    text = (arguments.run_folder / "metrics.jsonl").read_text()
    print(text.count(f'"split": "{arguments.split}"'), "lines")
    return 3
''',
}
CONFIG = {
    "name": "line",
    "task": {"name": "mine.task", "rows": 16},
    "data": {"num_workers": 0},
    "model": {"name": "mine.model.Scale", "args": {"bias": False}},
    "batch": {"global": 8},
    "optimizer": {"name": "mine.optimizer.SignDescent", "lr": 0.25},
    "precision": {"opt_level": "O0"},
    "train": {"epochs": 4, "log_every": 1},
    "trackers": ["mine.tracker"],
    "runtime": {"device": "cpu"},
    "launch": {"engine": "mine.child", "child": {"mark": "seen"}},
}


def in_its_own_process(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of a command of the harness in ``folder``."""
    (terminal := folder / "terminal.txt").unlink(missing_ok=True)
    cache = {name: os.environ[name] for name in ("APEX_HARNESS_CACHE",) if name in os.environ}
    code = python(["-m", "harness", *words], terminal, folder, **cache)
    return code, terminal.read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with the files, in which the run has been launched."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine").mkdir()
    for kind, text in PARTS.items():
        (folder / "mine" / f"{kind}.py").write_text(text)
    (folder / "line.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "plain.yaml").write_text(yaml.safe_dump({key: CONFIG[key] for key in CONFIG if key != "launch"}))
    code, text = in_its_own_process(folder, "launch", "-c", "line.yaml")
    assert code == 0, text
    return folder


@pytest.fixture
def harness(folder, monkeypatch, capsys):
    """A function that runs a command in ``folder``, in this process: (exit code, output, errors)."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)

    def command(*words: str) -> tuple[int, str, str]:
        try:
            code = main(list(words))
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    yield command
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def evaluations(folder: Path) -> list[dict]:
    lines = (folder / "runs" / "line" / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["split"] == "eval"]


def test_task_model_and_optimizer_train(folder):
    losses = [entry["loss"] for entry in evaluations(folder)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    saved = yaml.safe_load((folder / "runs" / "line" / "config.yaml").read_text())
    assert saved["task"] == {"name": "mine.task", "rows": 16, "scratch": "/scratch", "source": "/data"}


def test_own_predictions_without_known_are_written_beside_the_numbers_of_the_rows(folder):
    lines = (folder / "runs" / "line" / "predictions.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["id", *map(str, range(16))]
    assert lines[0] == "id,prediction"


def test_marks_on_the_settings_of_an_own_task(harness):
    """Of those of the task ``mine.task``; other tasks may have settings of the same names."""
    from harness.config import loader, recipe

    before, now = (
        loader.as_tree(loader.load("line.yaml", [f"task.{key}=/{place}" for key in ("scratch", "source")]))
        for place in "ab"
    )
    assert recipe.recipe_difference(before, now) == {"task.source": ("/a", "/b")}
    keys = "task.scratch", "task.source", "task.rows", "seed"
    assert [recipe.may_differ_between_ranks(key, "mine.task") for key in keys] == [True, True, False, False]
    assert recipe.in_recipe("task.scratch", "image_csv")


def test_tracker_gets_every_entry(folder):
    """The one of docs/trackers.md."""
    tracked = (folder / "runs" / "line" / "loss.txt").read_text().splitlines()
    logged = (folder / "runs" / "line" / "metrics.jsonl").read_text().splitlines()
    assert tracked == [f"{e['step']} {e['loss']}" for e in map(json.loads, logged) if e["split"] == "train"]
    assert tracked


def test_engine_brings_its_settings(harness, folder):
    assert harness("launch", "-c", "line.yaml", "--dry-run")[1].startswith("HARNESS_MARK=seen ")
    line = (folder / "line.yaml").read_text().splitlines().index("  child:") + 2
    for words, problem in (
        (["launch.child.mrk=x"], "command line: launch.child.mrk: unknown key; did you mean launch.child.mark?"),
        (["launch.child.mark=1"], "command line: launch.child.mark: it should be text"),
        (["--engine", "local"], f"line.yaml:{line - 1}: launch.child: unknown key"),
    ):
        for verb in ("launch", "check")[: 1 + ("--engine" not in words)]:
            code, _, err = harness(verb, "-c", "line.yaml", *words)
            assert code == 2
            assert problem in err
    (folder / "mine" / "env.py").write_text((folder / "mine" / "child.py").read_text())
    code, _, err = harness("launch", "-c", "line.yaml", "--engine", "mine.env")
    assert code == 2
    assert "launch.engine: the settings of mine.env would be launch.env" in err


def test_only_the_launch_imports_the_engine(harness, folder):
    """A machine that has only the run may lack the engine."""
    from harness.config import loader

    (folder / "elsewhere.yaml").write_text((folder / "line.yaml").read_text().replace("mine.child", "absent.child"))
    assert loader.load("elsewhere.yaml").launch.engine_settings == {"mark": "seen"}
    code, _, err = harness("launch", "-c", "elsewhere.yaml")
    assert code == 2
    assert "launch.engine: the engine 'absent.child' cannot be imported" in err


def test_export_format_writes_its_file(harness, folder):
    code, out, err = harness("export", "runs/line", "--format", "mine.weights")
    assert code == 0, err
    assert out.strip() == "runs/line/model.json"
    assert list(json.loads((folder / out.strip()).read_text())) == ["weight"]
    code, _, err = harness("export", "runs/line", "--format", "mine.task.Task")
    assert code == 2
    assert "--format: mine.task.Task is not a harness.inference.formats.base.ExportFormat" in err


def test_verb(folder):
    assert in_its_own_process(folder, "mine.verb", "runs/line", "--split", "train") == (3, "8 lines\n")
    assert "count the lines of metrics.jsonl" in in_its_own_process(folder, "mine.verb", "--help")[1]


def test_misspelled_parts_are_reported(harness):
    wrong = ["optimizer.name=mine.o.X", "trackers=[mine.trakcer]"]
    code, _, err = harness("check", "-c", "line.yaml", *wrong)
    assert code == 2
    for message in (
        "optimizer.name: the optimizer 'mine.o.X' cannot be imported (ModuleNotFoundError: No module named 'mine.o')",
        "trackers: the tracker 'mine.trakcer' cannot be imported (AttributeError: ",
    ):
        assert message in err
    code, _, err = harness("check", "-c", "line.yaml", "model.name=mine.model.Scael")  # built by the own task
    assert code == 2
    assert "model.name: the model 'mine.model.Scael' cannot be imported (AttributeError: " in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch", "-c", "plain.yaml", "--engine", "mine.task"], "launch.engine: mine.task has no function render"),
        (["launch", "-c", "line.yaml", "--engine", "mine.x"], "launch.engine: the engine 'mine.x' cannot be imported"),
        (["launch", "-c", "line.yaml", "parallel.strategy=mine.x"], "command line: parallel.strategy: the strategy"),
        (["launch", "-c", "line.yaml", "parallel.strategy=mine.task.Task"], "Task is not a harness.training.strat"),
        (["launch", "-c", "line.yaml", "task.name=mine.tsk"], "task.name: the task 'mine.tsk' cannot be imported"),
        (["mine.vreb"], "harness: the verb 'mine.vreb' cannot be imported"),
    ],
)
def test_misspelled_part_ends_the_command(harness, words, message):
    code, _, err = harness(*words)
    assert code == 2
    assert message in err


STRATEGY = """
from torch.nn.parallel import DistributedDataParallel

from harness.config.constraints import Conflict
from harness.training.strategies.base import ParallelStrategy

class Strategy(ParallelStrategy):
    @classmethod
    def conflicts(cls, config):
        if config.parallel.sync_batchnorm:
            yield Conflict("parallel.sync_batchnorm", "torch's replicas have none", "remove it")

    def wrap(self, model):
        super().wrap(model)
        self.model, self.exchanges, self.summary = DistributedDataParallel(model), True, "torch's replicas"

    def switch_sync(self, on):
        self.model.require_backward_grad_sync = on
"""


@pytest.mark.slow
def test_strategy_trains_on_two_ranks_as_ddp(harness, folder):
    (folder / "mine" / "strategy.py").write_text(STRATEGY)
    config = {**CONFIG, "batch": {"global": 8, "accumulate": 2}, "trackers": [], "launch": {"nproc": 2}}
    (folder / "ranks.yaml").write_text(yaml.safe_dump(config))
    words, own = ["launch", "-c", "ranks.yaml"], ["parallel.strategy=mine.strategy"]
    for more in ([*own, "name=own"], ["name=ddp"]):
        code, text = in_its_own_process(folder, *words, *more)
        assert code == 0, text
        assert ("torch's replicas" in text) == ("name=own" in more)
    assert_same_run(folder / "runs" / "ddp", folder / "runs" / "own")
    code, _, err = harness(*words, *own, "parallel.sync_batchnorm=true")
    assert code == 2
    assert "parallel.sync_batchnorm: torch's replicas have none" in err


NOISE = """
import os
import signal
from pathlib import Path

import torch

def gaussian(gradients, generator, step):
    for name, gradient in gradients:
        gradient.add_(torch.empty_like(gradient).normal_(0.0, 0.5, generator=generator))
    if step == 5 and os.environ["RANK"] == "1" and Path("kill").exists():
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_noise_on_gradients_is_the_same_after_a_kill(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "task.py").write_text(PARTS["task"])
    (tmp_path / "mine" / "noise.py").write_text(NOISE)
    config = {
        **CONFIG, "model": {"name": "mlp", "args": {"num_classes": 1, "hidden": 4}},
        "optimizer": {"name": "adam", "lr": 0.1},
        "precision": {"opt_level": "O2", "max_loss_scale": 64.0}, "trackers": [], "launch": {"nproc": 2},
        "train": {"epochs": 4, "log_every": 1, "clip_norm": 1.0, "on_gradients": "mine.noise.gaussian"},
        "checkpoint": {"every": 3},
    }  # fmt: skip
    (tmp_path / "line.yaml").write_text(yaml.safe_dump(config))

    def launched(*words: str) -> tuple[int, list[dict]]:
        code, _ = in_its_own_process(tmp_path, "launch", "-c", "line.yaml", *words)
        name = next((word.removeprefix("name=") for word in words if word.startswith("name=")), "line")
        return code, record(tmp_path / "runs" / name)

    assert launched()[0] == 0
    (tmp_path / "kill").touch()
    code, lines = launched("name=killed")
    assert code not in (0, 75)
    assert lines[-1]["step"] < 8
    (tmp_path / "kill").unlink()
    assert launched("name=killed")[0] == 0
    assert_same_run(tmp_path / "runs" / "line", tmp_path / "runs" / "killed")


FORMAT = """
import gzip
import io
import os
import signal
from pathlib import Path

import torch
from harness.runs.formats import base

class Format(base.Format):
    def write(self, folder, content, ranks):
        file = io.BytesIO()
        torch.save(content, file)
        data = gzip.compress(file.getvalue(), 1)
        if content["state"]["step"] == 6 and Path("kill").exists():
            (folder / "state.gz").write_bytes(data[:1000])
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / "state.gz").write_bytes(data)
        return ["state.gz"]

    def read(self, folder, mapped, own):
        return torch.load(io.BytesIO(gzip.decompress((folder / "state.gz").read_bytes())), weights_only=True)
"""


@pytest.mark.slow
def test_a_checkpoint_format_is_one_file(tmp_path, monkeypatch):
    """A run in a stranger's format is killed in the middle of a checkpoint, and resumes exactly. Who did not start it
    must trust its author before the format is imported."""
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "task.py").write_text(PARTS["task"])
    (tmp_path / "packed" / "gz.py").write_text(FORMAT)
    config = {
        **CONFIG, "task": {"name": "packed.task", "rows": 16},
        "model": {"name": "mlp", "args": {"num_classes": 1, "hidden": 4}},
        "optimizer": {"name": "adam", "lr": 0.1}, "trackers": [], "launch": {},
        "checkpoint": {"every": 3, "format": "packed.gz"},
    }  # fmt: skip
    (tmp_path / "line.yaml").write_text(yaml.safe_dump(config))

    def trained(name: str, *words: str) -> int:
        return in_its_own_process(tmp_path, "train", "-c", "line.yaml", f"name={name}", *words)[0]

    assert trained("line") == 0
    (tmp_path / "kill").touch()
    assert trained("killed") == -9
    (tmp_path / "kill").unlink()
    killed = tmp_path / "runs" / "killed" / "checkpoints"
    assert {path.name for path in killed.glob("step-*")} == {"step-2", "step-3", "step-4", "step-6.tmp"}
    assert trained("killed") == 0
    assert {path.name for path in (killed / "step-6").iterdir()} == {"state.gz", "manifest.json"}
    monkeypatch.syspath_prepend(tmp_path)
    assert_same_run(tmp_path / "runs" / "line", tmp_path / "runs" / "killed")

    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "of another user"))
    with pytest.raises(CheckpointError, match="its format is packed.gz, whose code would be imported"):
        checkpoints.read(killed / "step-6")
    assert checkpoint.damage(killed / "step-6") is None
    assert trained("copy", f"checkpoint.resume={killed / 'step-6'}") == 0  # which names the format
    words = ["compare", "runs/line", "runs/killed"]
    code, text = in_its_own_process(tmp_path, *words)
    assert "whose code would be imported" in text
    assert code == 1
    assert in_its_own_process(tmp_path, *words, "--trust")[0] == 0
