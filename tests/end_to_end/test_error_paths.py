"""Errors as users see them: one clear message, the right exit code, within seconds, and no rank left hanging."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import cli
from harness.errors import EXIT_DATA, EXIT_FAILURE, EXIT_OWN_CODE, EXIT_USAGE
from harness.runs import layout
from tests.conftest import ROOT
from tests.end_to_end.experiment import assert_same_run, run_folder, write_config, write_images
from tests.end_to_end.processes import END_S, drive_in_terminal, driver, drivers, shell, started, wait_until
from tests.ranks import free_port, launch_environment, start, wait_for

MODELS = "tests.end_to_end.models"


@dataclass
class Ended:
    """A run that has ended: exit codes by rank, terminal output, run folder."""

    codes: list[int]
    terminal: str
    folder: Path
    seconds: float

    @property
    def failure(self) -> dict:
        return json.loads((self.folder / "failure.json").read_text())


def train(config: Path, world_size: int, *overrides: str, timeout_s: float = END_S) -> Ended:
    terminal = config.parent / "terminal.txt"
    terminal.unlink(missing_ok=True)
    begin = time.monotonic()
    codes = wait_for(drivers(world_size, ["-c", str(config), *overrides], terminal), timeout_s)
    return Ended(codes, terminal.read_text(), config.parent / "runs" / "run", time.monotonic() - begin)


def assert_reported_once(ended: Ended, exit_code: int, *words: str) -> None:
    """Assert that there is one message with ``words``, no traceback, and ``exit_code`` on every rank."""
    assert ended.codes == [exit_code] * len(ended.codes), ended.terminal
    assert len(re.findall("^(?:rank [0-9]+: )?error: ", ended.terminal, re.MULTILINE)) == 1, ended.terminal
    for word in words:
        assert ended.terminal.count(word) == 1, f"{word!r} in:\n{ended.terminal}"
    assert "Traceback" not in ended.terminal
    assert "Logging error" not in ended.terminal


WRONG_SETTINGS = {
    "two problems at once": (
        ["train.epoch=3", "precision.opt_level=O7"],
        ["2 problems", "command line: train.epoch: unknown key; did you mean train.epochs?", "'O7'"],
    ),
    "strategy": (["parallel.strategy=none"], ["parallel.strategy=none runs in one process, but 2 were started"]),
}


@pytest.mark.parametrize("case", WRONG_SETTINGS)
def test_wrong_settings_are_reported_once(tmp_path, data, case):
    """tests/config and tests/training/test_preflight.py have every kind of wrong setting."""
    overrides, words = WRONG_SETTINGS[case]
    ended = train(write_config(tmp_path, data), 2, *overrides)
    assert_reported_once(ended, EXIT_USAGE, *words)
    assert ended.seconds < 20


def test_a_start_that_is_refused_moves_no_earlier_run(tmp_path, data):
    config = write_config(tmp_path, data, train={"epochs": 1})
    assert train(config, 2).codes == [0, 0]
    summary = (run_folder(config) / "summary.json").read_text()
    ended = train(config, 2, "batch.global=7")
    assert_reported_once(
        ended,
        EXIT_USAGE,
        "batch.global: 7 rows cannot be divided evenly among 2 ranks\n",
        "use batch.global=6 or batch.global=8",
    )
    assert sorted(path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()) == ["run"]
    assert (run_folder(config) / "summary.json").read_text() == summary
    assert not (run_folder(config) / "failure.json").exists()


def empty_csv(data: Path) -> None:
    (data / "train.csv").write_text("")


def image_of_last_rank(data: Path) -> Path:
    """The image of the last line of the CSV, which the contiguous rule assigns to the last rank."""
    return data / (data / "train.csv").read_text().splitlines()[-1].partition(",")[0]


def missing_image(data: Path) -> None:
    image_of_last_rank(data).unlink()


BAD_DATA = [
    (empty_csv, ["train.csv: the annotation file is empty"]),
    (missing_image, ["train.csv:62: image not found:"]),
]


@pytest.mark.parametrize(("spoil", "words"), BAD_DATA, ids=lambda value: getattr(value, "__name__", ""))
def test_bad_data_are_reported_once(tmp_path, spoil, words):
    """tests/data/table/test_table_errors.py has every kind of bad table."""
    data = write_images(tmp_path / "data")
    spoil(data)
    ended = train(write_config(tmp_path, data), 2)
    assert_reported_once(ended, EXIT_DATA, *words)
    assert ended.seconds < 20
    assert ended.failure["exit_code"] == EXIT_DATA
    assert words[0] in ended.failure["message"]


# Ranks that were started differently


def train_each(config: Path, *words: list[str], timeout_s: float = END_S) -> Ended:
    """Train with one rank for each of ``words``, its own arguments."""
    terminal, port = config.parent / "terminal.txt", free_port()
    terminal.unlink(missing_ok=True)
    ranks = [
        driver(own, launch_environment(rank, len(words), port), terminal) for rank, own in enumerate(words)
    ]  # fmt: skip
    begin = time.monotonic()  # the first start also starts the fork server
    codes = wait_for(ranks, timeout_s)
    return Ended(codes, terminal.read_text(), config.parent / "runs" / "run", time.monotonic() - begin)


def test_ranks_with_different_recipes_are_refused(tmp_path, data):
    """Settings with which a mixture would be trained, and settings with which gloo would abort."""
    config = write_config(tmp_path, data)
    stale = [
        "optimizer.lr=0.5",
        "train.clip_norm=1",
        "batch.accumulate=2",
        "train.max_steps=3",
        "checkpoint.resume=never",
    ]
    ended = train_each(
        config, ["-c", str(config)], ["-c", str(config), *stale], ["-c", str(config), "optimizer.lr=0.7"]
    )
    host = socket.gethostname()
    assert_reported_once(
        ended,
        EXIT_USAGE,
        "the ranks were started differently: 5 values differ",
        f"  optimizer.lr: 0.05 on rank 0 ({host}); 0.5 on rank 1 ({host}); 0.7 on rank 2 ({host})\n",
        f"  train.clip_norm: null on ranks 0, 2 ({host}); 1.0 on rank 1 ({host})\n",
        "  batch.accumulate: 1 on",
        "  train.max_steps: null on",
        "-> give every machine the same configuration file and overrides\n",
    )
    assert ended.seconds < 20
    assert not (tmp_path / "runs").exists()  # nothing was claimed

    allowed = [
        "data.num_workers=1",
        f"output={tmp_path}/of_rank_1",
        f"data.cache_dir={tmp_path}/other",
        "runtime.timeout_s=40",
        "launch.torchrun.node_rank=1",
    ]
    short = ["train.epochs=1", "-c", str(config)]
    assert train_each(config, short, [*short, *allowed]).codes == [0, 0]


@pytest.mark.slow
def test_ranks_with_different_checkpoints_are_refused(tmp_path, data):
    """Machines without a shared disk: each has a folder of its own."""
    config = write_config(tmp_path, data)
    start, outputs = ["-c", str(config), "train.epochs=1"], [f"output={tmp_path}/{name}" for name in "ab"]
    assert train_each(config, [*start, outputs[0]], [*start, outputs[0]]).codes == [0, 0]
    assert train_each(config, [*start, outputs[1]]).codes == [0]  # the same recipe, but the weights of one rank
    more = ["-c", str(config), "train.epochs=2"]
    ended = train_each(config, [*more, outputs[0]], [*more, outputs[1]])
    assert_reported_once(ended, EXIT_FAILURE, "rank 1 cannot find the checkpoint that rank 0 resumes from")
    borrows = [f"checkpoint.resume={next((tmp_path / name).glob('*/checkpoints/step-*'))}" for name in "ab"]
    ended = train_each(config, *([*more, f"output={tmp_path}/c", each] for each in borrows))
    assert_reported_once(ended, EXIT_FAILURE, "rank 1 cannot find the checkpoint", "the same checkpoint.resume")

    shutil.rmtree(tmp_path / "b")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (state,) = (tmp_path / "b").rglob("state.pt")
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1  # torch would read it
    state.write_bytes(content)
    ended = train_each(config, [*more, outputs[0]], [*more, outputs[1]])
    assert_reported_once(ended, EXIT_FAILURE, "the copy of rank 1: state.pt is damaged")


OWN_MODEL = """
from torch import nn
from {package}.width import WIDTH

class Model(nn.Sequential):
    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.LazyLinear(WIDTH), nn.Linear(WIDTH, num_classes))
"""


def _drive_with(folder: str, arguments: list[str], terminal: str) -> None:
    sys.path.insert(0, folder)
    drive_in_terminal(arguments, terminal)


def test_ranks_with_different_code_are_refused(tmp_path, data):
    """As where one machine has an older checkout: a module that the model imports is another."""
    config, terminal, port = write_config(tmp_path, data), tmp_path / "terminal.txt", free_port()
    ranks = []
    for rank in range(2):
        package = tmp_path / f"machine{rank}" / "own_parts"
        package.mkdir(parents=True)
        (package / "net.py").write_text(OWN_MODEL.format(package="own_parts"))
        (package / "width.py").write_text(f"WIDTH = {8 * (rank + 1)}\n")
        arguments = ["-c", str(config), "model.name=own_parts.net.Model", "model.args=null"]
        place = launch_environment(rank, 2, port)
        ranks.append(start(_drive_with, (str(package.parent), arguments, str(terminal)), place))
    ended = Ended(wait_for(ranks, END_S), terminal.read_text(), tmp_path, 0)
    assert_reported_once(ended, EXIT_USAGE, "1 value differs\n  source code of own_parts.width: ", "copy the same code")


def test_error_of_one_rank_ends_all(tmp_path, data):
    """The configuration of one machine cannot be read; rank 0 would wait for its rank."""
    config = write_config(tmp_path, data)
    ended = train_each(config, ["-c", str(config)], ["-c", str(config), "train.epoch=3"])
    assert_reported_once(
        ended, EXIT_USAGE, f"rank 1 on {socket.gethostname()} cannot start", "did you mean train.epochs?"
    )
    assert ended.seconds < 20


# The run folder cannot be written


@contextmanager
def disk(folder: Path, options: str):
    """Mount a small file system at ``folder``. Only this has limits that also apply to root."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"file systems cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


LARGE = {"model": {"name": "mlp", "args": {"hidden": 512}}}  # a checkpoint of about 290 KB, weights of 145 KB


@pytest.mark.slow
def test_run_resumes_exactly_after_a_full_disk(tmp_path, data):
    """The disk is full at the second checkpoint. Once it is larger, the same command resumes and ends exactly."""
    config = write_config(tmp_path / "full", data, **LARGE)
    folder = config.parent / "runs" / "run"
    with disk(config.parent / "runs", "size=720k"):
        ended = train(config, 2)
        assert_reported_once(ended, EXIT_FAILURE, "could not be written: No space left on device", "MiB free")
        assert (folder / "checkpoints" / "latest").read_text() == "step-8\n"
        assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == ["step-8"]
        assert ended.failure["error"] == "CheckpointError"
        subprocess.run(["mount", "-o", "remount,size=4m", folder.parent], check=True)
        assert train(config, 2).codes == [0, 0]
        unbroken = write_config(tmp_path / "unbroken", data, **LARGE)
        assert train(unbroken, 2).codes == [0, 0]
        assert_same_run(unbroken.parent / "runs" / "run", folder)


@pytest.mark.slow
def test_disk_without_a_free_byte_leaves_the_checkpoint_intact(tmp_path, data):
    """Even the error log cannot be written: still one clear message, and the checkpoint stays valid."""
    config = write_config(tmp_path, data, model={"name": f"{MODELS}.Slow", "args": {}}, train={"log_every": 1})
    with disk(tmp_path / "runs", "size=256k"):
        terminal = tmp_path / "terminal.txt"
        ranks = drivers(2, ["-c", str(config)], terminal)
        latest = tmp_path / "runs" / "run" / "checkpoints" / "latest"
        wait_until(latest.exists, END_S, "a checkpoint")
        with suppress(OSError), open(tmp_path / "runs" / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 100)
        codes = wait_for(ranks, END_S)
        assert_reported_once(Ended(codes, terminal.read_text(), tmp_path, 0), EXIT_FAILURE, "No space left on device")
        (tmp_path / "runs" / "filler").unlink()
        ended = train(config, 2)
        assert ended.codes == [0, 0]
        assert "resumed from" in ended.terminal


# A damaged run folder


def a_folder(path: Path) -> None:
    path.mkdir()
    (path / "file").write_text("")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "folder": a_folder,
    "pipe": os.mkfifo,
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 20),
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(b'{"a": [1, {"b'),
    "list": lambda path: path.write_bytes(b'[1, {"a": 2}, null]'),
    "number": lambda path: path.write_bytes(b"3"),
    "nested": lambda path: path.write_bytes(b"[" * 100_000),
    "dangling": lambda path: path.symlink_to("/nowhere/file"),
}
FILES = sorted(layout.OF_TRAINING - {layout.CHECKPOINTS} | {layout.REPORT})
INSIDE = (layout.LOGS, layout.CHECKPOINTS, f"{layout.CHECKPOINTS}/{layout.LATEST}", f"{layout.LOGS}/rank-0.log",
          f"{layout.LOGS}/rank-0.exit.json", f"{layout.CHECKPOINTS}/step-8/{layout.MANIFEST}",
          f"{layout.CHECKPOINTS}/step-8/{layout.STATE}")  # fmt: skip
LIMIT_S = 30.0  # for a verb on a damaged folder


def faults_of(folder: str, cases: list[tuple[str, str, str]]) -> list[str]:
    """Damage a copy of the run in ``folder`` for each (file, damage, verb), run the verb in a forked process, and
    return what it should not have done."""
    faults, base = [], Path(folder)
    for number, (file, damage, verb) in enumerate(cases):
        runs = base / "copies" / str(number)
        copy = runs / "run"
        shutil.copytree(base / "runs" / "run", copy)
        path = copy / file
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        DAMAGES[damage](path)
        words = {
            "train": ["-c", str(base / "config.yaml"), f"output={runs}"],
            "predict": [str(copy), "--csv", str(base / "new.csv"), "--out", str(runs / "out.csv")],
            "export": [str(copy), "--format", "safetensors", "--out", str(runs / "model.safetensors")],
            "report": [str(copy), "-o", str(runs / "report.html")],
            "compare": [str(copy), str(base / "runs" / "run")],
        }[verb]
        if (child := os.fork()) == 0:
            terminal = os.open(runs / "terminal.txt", os.O_CREAT | os.O_WRONLY)
            os.dup2(terminal, 1)
            os.dup2(terminal, 2)
            signal.setitimer(signal.ITIMER_REAL, LIMIT_S)  # its default action kills
            code = 1
            with suppress(SystemExit):
                try:
                    code = cli.main([verb, *words])
                except Exception:
                    traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = (runs / "terminal.txt").read_text(errors="replace")
        allowed = {0, EXIT_USAGE, EXIT_DATA, EXIT_FAILURE} | ({1} if verb == "compare" else set())  # 1: they differ
        errors = text.count("error: ")
        if code not in allowed or "Traceback" in text or (code > 1 and errors != 1):
            faults.append(f"{verb} with {damage} as {file}: exit code {code}, {errors} errors\n{text[-500:]}")
        elif code > 1 and path.name not in text and file.split("/")[0] not in text:
            faults.append(f"{verb} with {damage} as {file} does not name the file\n{text[-500:]}")
        shutil.rmtree(runs)
    return faults


def assert_no_faults(folder: Path, data: Path, cases: list[tuple[str, str, str]], timeout_s: float) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed: pip install 'apex-harness[report]'")
    config = write_config(folder, data, train={"epochs": 1})
    assert train(config, 1).codes == [0]
    shutil.copy(data / "eval.csv", folder / "new.csv")
    process, results = start(faults_of, (str(folder), cases))
    assert results.poll(timeout_s), "the verbs hang"
    kind, faults = results.recv()
    process.join()
    assert (kind, faults) == ("value", [])


def test_a_damaged_file_of_a_run_is_one_message(tmp_path, data):
    """One case of each kind; the slow test has all of them."""
    cases = [
        (layout.METRICS, "folder", "train"), (layout.CONFIG, "nested", "train"), (layout.LOGS, "binary", "train"),
        (f"{layout.CHECKPOINTS}/{layout.LATEST}", "binary", "train"), (layout.TASK, "list", "predict"),
        (layout.CONFIG, "pipe", "report"), (layout.PREDICTIONS, "pipe", "compare"),
    ]  # fmt: skip
    assert_no_faults(tmp_path, data, cases, timeout_s=100)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(2))
def test_any_damaged_file_of_a_run_is_one_message(tmp_path, data, turn):
    """Each verb meets each file and each damage: the damages take turns."""
    verbs = ["train", "predict", "export", "report", "compare"]
    damages = list(DAMAGES)
    pairs = itertools.product((*FILES, *INSIDE), verbs)
    cases = [(file, damages[place % len(damages)], verb) for place, (file, verb) in enumerate(pairs)]
    assert len({(damage, verb) for _, damage, verb in cases}) == len(damages) * len(verbs)
    assert_no_faults(tmp_path, data, cases[turn::2], timeout_s=250)


# Exceptions


def test_exception_on_the_last_rank_is_reported_with_rank_and_step(tmp_path, data):
    model = {"name": f"{MODELS}.Raises", "args": {"rank": 1, "step": 11}}
    ended = train(write_config(tmp_path, data, model=model), 2)
    assert ended.codes == [EXIT_OWN_CODE] * 2
    assert ended.seconds < END_S
    assert ended.terminal.count("Traceback") == 1
    said = re.findall("^.*ArithmeticError: a layer went wrong, only here", ended.terminal, re.MULTILINE)
    assert len(said) == 2  # and at the end of the traceback
    assert re.match(r"rank 1: error: tests/end_to_end/models\.py:\d+: ", said[0])
    failure = ended.failure
    assert (failure["rank"], failure["step"], failure["error"]) == (1, 10, "ArithmeticError")
    assert failure["host"] == socket.gethostname()
    assert "in forward" in "".join(failure["traceback"])
    assert (ended.folder / "checkpoints" / "latest").read_text() == "step-8\n"
    logs = [(ended.folder / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert "ArithmeticError" in logs[1]
    assert "exiting: rank 1 failed first" in logs[0]


SLOW_FIRST_RANK = "import os, time; time.sleep(3 if os.environ.get('LOCAL_RANK') == '0' else 0)"


@pytest.mark.parametrize(("kind", "ranks"), [("Odd", 1), ("Mute", 2)])
def test_unusual_exceptions_are_failures_of_the_run(tmp_path, data, kind, ranks):
    """One that is no Exception, and one whose text cannot be read."""
    config = write_config(tmp_path, data, model={"name": f"{MODELS}.RaisesUnusual", "args": {"kind": kind}})
    ended = train(config, ranks)
    assert ended.codes == [EXIT_OWN_CODE] * ranks
    assert kind in ended.failure["message" if kind == "Mute" else "error"]
    assert ended.failure["step"] == 2
    assert "Traceback" in ended.terminal
    assert kind in ended.terminal


@pytest.mark.slow
def test_forked_processes_that_end_do_not_end_the_run(tmp_path, data):
    """One calls sys.exit(3), the other raises an error."""
    settings = {"model": {"name": f"{MODELS}.Forks", "args": {}}, "train": {"epochs": 1, "log_every": 1}}
    ended = train(write_config(tmp_path, data, **settings), 1)
    assert ended.codes == [0], ended.terminal
    assert [line for line in ended.terminal.splitlines() if line.startswith("child: ")] == ["child: 3", "child: 1"]
    assert "ArithmeticError: of the child" in ended.terminal
    assert not (ended.folder / "failure.json").exists()
    steps = [json.loads(line)["step"] for line in (ended.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert ended.terminal.count("run folder: ") == 2  # at the start and at the end


@pytest.mark.slow
def test_errors_through_the_launcher(tmp_path, data):
    """An exception on rank 1, and a mistyped key."""
    model = {"name": f"{MODELS}.Raises", "args": {"rank": 1, "step": 3}}
    config = write_config(tmp_path, data, model=model)
    command = [ROOT / "launch" / "single_node.sh", "2", config]
    terminal = tmp_path / "raised.txt"
    assert shell(["launch/single_node.sh", "2", str(config)], terminal, tmp_path) == 1
    # Twice from the rank, once in the summary of torch's launcher.
    assert terminal.read_text().count(": a layer went wrong, only here") == 3
    assert "exitcode  : 1 " in terminal.read_text()
    assert json.loads((tmp_path / "runs" / "run" / "failure.json").read_text())["rank"] == 1

    (tmp_path / "sitecustomize.py").write_text(SLOW_FIRST_RANK)  # local rank 0 still prints the error
    with started([*command, "train.epoch=3"], tmp_path / "terminal.txt", PYTHONPATH=str(tmp_path)) as run:
        assert run.wait(60) == 1
    own, _, summary = run.text().partition("driver.py FAILED")
    assert own.count("did you mean train.epochs?") == 1
    assert "exitcode  : 2" in summary


@pytest.mark.slow
@pytest.mark.parametrize(("override", "code"), [("seed=0", EXIT_FAILURE), ("optimzer.lr=3", EXIT_USAGE)])
def test_rank_without_a_first_rank_says_so(tmp_path, data, override, code):
    """Nobody else reports an error before the ranks have met."""
    terminal = tmp_path / "terminal.txt"
    config = write_config(tmp_path, data, runtime={"device": "cpu", "timeout_s": 2})
    rank = driver(["-c", str(config), override], launch_environment(1, 2, free_port()), terminal)
    assert wait_for([rank], END_S) == [code]
    (line, *_) = terminal.read_text().splitlines()
    assert line.startswith("rank 1: error: ")
    assert "Traceback" not in terminal.read_text()


# The user's own code


OWN = """
import os

import torch
from torch import nn


def broken(what):
    return os.environ.get("BROKEN") == what


class Model(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.LazyLinear(num_classes)

    def forward(self, images):
        if broken("step" if torch.is_grad_enabled() else "evaluation"):
            raise LookupError("of forward")  # forward
        return self.layer(images.flatten(1))


def loss(outputs, targets):
    if broken("loss"):
        raise LookupError("of loss")  # loss
    return nn.functional.cross_entropy(outputs, targets)


def metric(outputs, targets):
    if broken("metric"):
        raise LookupError("of metric")  # metric
    return outputs.argmax(1).eq(targets).float().mean()


def schedule(update, total):
    if broken("schedule"):
        raise LookupError("of schedule")  # schedule
    return 1.0


if broken("import"):
    raise LookupError("of import")  # import
"""


def _verb(folder, words, terminal):
    os.chdir(folder)
    file = os.open(terminal, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    raise SystemExit(cli.main(words))


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    """A folder with a run of parts of the user's own."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_parts.py").write_text(OWN)
    write_config(
        folder, write_images(folder / "data"), model={"name": "own_parts.Model", "args": {}},
        train={"epochs": 1, "log_every": 3}, schedule={"name": "own_parts.schedule", "warmup": None},
        task={"loss": {"name": "own_parts.loss"},
              "metrics": [{"name": "own_parts.metric", "better": "max", "key": "mine"}]},
    )  # fmt: skip
    assert ended_with(folder, "train")[0] == 0
    return folder


def ended_with(folder: Path, verb: str, broken: str = "") -> tuple[int, str]:
    """(exit code, terminal output) of ``verb`` with ``own_parts.py`` broken in one place."""
    config = str(folder / "config.yaml")
    words = {
        "train": ["-c", config, *(["name=broken"] if broken else [])], "check": ["-c", config],
        "launch": ["-c", config, "--nproc", "2", "name=broken"],
        "predict": ["runs/run", "--csv", str(folder / "data" / "eval.csv"), "--out", "out.csv"],
        "export": ["runs/run", "--format", "safetensors", "--out", "model.safetensors"],
    }[verb]  # fmt: skip
    terminal = folder / "terminal.txt"
    codes = wait_for([start(_verb, (folder, [verb, *words], terminal), {"BROKEN": broken})], END_S)
    return codes[0], terminal.read_text()


@pytest.mark.parametrize(
    ("verb", "broken", "line"),
    [
        ("train", "step", "forward"), ("train", "evaluation", "forward"),
        ("train", "schedule", "schedule"), ("train", "loss", "loss"),
        ("train", "metric", "metric"), ("train", "import", "import"),
        ("launch", "import", "import"),
        ("check", "step", "forward"), ("check", "schedule", "schedule"),
        ("check", "metric", "metric"), ("check", "import", "import"), ("predict", "evaluation", "forward"),
        ("export", "evaluation", "forward"),
    ],
)  # fmt: skip
def test_an_error_in_own_code_begins_with_its_file_and_line(own_run, verb, broken, line):
    """In every verb that runs it, with the same exit code."""
    number = next(n for n, text in enumerate(OWN.splitlines(), 1) if text.endswith(f"# {line}"))
    found, text = ended_with(own_run, verb, broken)
    errors = [each for each in text.splitlines() if "error: " in each]
    assert found == EXIT_OWN_CODE, text
    assert len(errors) == 1, text
    assert re.match(rf"(rank 0: )?error: own_parts\.py:{number}: .*LookupError: of {line}", errors[0]), text
    assert "<frozen importlib" not in text
    if verb in ("train", "check") and broken != "import":  # the calls that led there
        assert re.search(rf'own_parts\.py", line {number}, in \w+\n', text), text
