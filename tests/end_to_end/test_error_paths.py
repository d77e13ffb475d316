"""What goes wrong on a user: one clear message, the exit code of its kind, within seconds, and no rank left hanging."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torchvision.io import write_jpeg

from harness.errors import EXIT_DATA, EXIT_FAILURE, EXIT_USAGE
from tests.conftest import ROOT
from tests.end_to_end.experiment import assert_same_run, write_config, write_images
from tests.end_to_end.processes import END_S, drive_in_terminal, driver, drivers, started, wait_until
from tests.ranks import launch_environment, start, wait_for

MODELS = "tests.end_to_end.models"


@dataclass
class Ended:
    """A run that has ended: exit codes by rank, what its terminal showed, its folder."""

    codes: list[int]
    terminal: str
    folder: Path
    seconds: float

    @property
    def failure(self) -> dict:
        return json.loads((self.folder / "failure.json").read_text())


@pytest.fixture(scope="module")
def stripes(tmp_path_factory):
    """A good data set; tests that spoil it take a copy."""
    return write_images(tmp_path_factory.mktemp("data") / "stripes")


@pytest.fixture
def data(stripes, tmp_path):
    return shutil.copytree(stripes, tmp_path / "data", ignore=shutil.ignore_patterns("cache"))


def train(config: Path, world_size: int, *overrides: str, timeout_s: float = END_S) -> Ended:
    terminal = config.parent / "terminal.txt"
    terminal.unlink(missing_ok=True)
    begin = time.monotonic()
    codes = wait_for(drivers(world_size, ["-c", str(config), *overrides], terminal), timeout_s)
    return Ended(codes, terminal.read_text(), config.parent / "runs" / "run", time.monotonic() - begin)


def assert_told_once(ended: Ended, exit_code: int, *words: str) -> None:
    """One message that holds ``words``, no traceback, and the exit code on every rank."""
    assert ended.codes == [exit_code] * len(ended.codes), ended.terminal
    assert len(re.findall("^(?:rank [0-9]+: )?error: ", ended.terminal, re.MULTILINE)) == 1, ended.terminal
    for word in words:
        assert ended.terminal.count(word) == 1, f"{word!r} in:\n{ended.terminal}"
    assert "Traceback" not in ended.terminal
    assert "Logging error" not in ended.terminal


WRONG_SETTINGS = {
    "unknown key": (["train.epoch=3"], ["command line: train.epoch: unknown key; did you mean train.epochs?"]),
    "wrong type": (["train.epochs=many"], ["command line: train.epochs: it should be a valid integer", "'many'"]),
    "impossible pair": (
        ["optimizer.lr_scaling=linear"],
        ["optimizer.lr_scaling: lr_scaling and lr_base_batch belong together"],
    ),
    "two at once": (["train.epoch=3", "precision.opt_level=O7"], ["2 problems", "did you mean train.epochs?", "'O7'"]),
    "batch for ranks": (["batch.global=7"], ["batch.global: 7 rows cannot be dealt to 2 ranks", "6 or 8"]),
    "strategy": (["parallel.strategy=none"], ["parallel.strategy=none is for one process, but there are 2 processes"]),
}


@pytest.mark.parametrize("case", WRONG_SETTINGS)
def test_wrong_settings(tmp_path, stripes, case):
    overrides, words = WRONG_SETTINGS[case]
    ended = train(write_config(tmp_path, stripes), 2, *overrides)
    assert_told_once(ended, EXIT_USAGE, *words)
    assert ended.seconds < 20


def no_csv(data: Path) -> None:
    (data / "train.csv").unlink()


def rename_column(data: Path) -> None:
    csv = data / "train.csv"
    csv.write_text(csv.read_text().replace("path,label", "path,labels", 1))


def empty(data: Path) -> None:
    (data / "train.csv").write_text("")


def header_only(data: Path) -> None:
    (data / "train.csv").write_text("path,label\n")


def blank_label(data: Path) -> None:
    lines = (data / "train.csv").read_text().splitlines()
    lines[7] = lines[7].partition(",")[0] + ","
    (data / "train.csv").write_text("\n".join(lines) + "\n")


def one_row(data: Path) -> None:
    for name in ("train.csv", "eval.csv"):
        (data / name).write_text("".join((data / "train.csv").read_text().splitlines(keepends=True)[:2]))


def image_of_last_rank(data: Path) -> Path:
    """The image of the last line of the CSV, which the contiguous rule deals to the last rank."""
    return data / (data / "train.csv").read_text().splitlines()[-1].partition(",")[0]


def lose_image(data: Path) -> None:
    image_of_last_rank(data).unlink()


def truncate_image(data: Path) -> None:
    image = image_of_last_rank(data)
    write_jpeg(torch.zeros(1, 8, 8, dtype=torch.uint8), str(image))  # what a file is, its content says
    image.write_bytes(image.read_bytes()[:-40])


BAD_DATA = {
    "missing CSV": (no_csv, ["train.csv: no such annotation file"]),
    "missing column": (rename_column, ["train.csv", "'label'", "did you mean 'labels'?"]),
    "empty CSV": (empty, ["train.csv: the annotation file is empty"]),
    "no rows": (header_only, ["train.csv"]),
    "blank label": (blank_label, ["train.csv:8"]),
    "fewer rows than ranks": (one_row, ["1 training rows for 2 ranks", "start at most 1 processes"]),
    "missing image": (lose_image, ["train.csv:62: image not found:"]),
    "truncated JPEG": (truncate_image, ["train.csv:62: image cannot be decoded:", "incomplete or truncated"]),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data(tmp_path, data, case):
    spoil, words = BAD_DATA[case]
    spoil(data)
    ended = train(write_config(tmp_path, data), 2)
    assert_told_once(ended, EXIT_DATA, *words)
    assert ended.seconds < 20
    assert ended.failure["exit_code"] == EXIT_DATA
    assert words[0] in ended.failure["message"]


def test_numbers_gone_wrong(tmp_path, stripes):
    ended = train(write_config(tmp_path, stripes), 2, "optimizer.lr=1e30")
    assert_told_once(ended, EXIT_FAILURE, "the loss became nan", "lower optimizer.lr")


INCOMPLETE = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "arguments", "words"),
    [
        (INCOMPLETE, [], ["found RANK=0, WORLD_SIZE=2; missing LOCAL_RANK, MASTER_ADDR, MASTER_PORT"]),
        (launch_environment(0, 2, 1), ["--local_rank=1"], ["--local_rank=1 contradicts local rank 0"]),
        (launch_environment(0, 2, 1), ["--local-rank=1"], ["--local_rank=1 contradicts local rank 0"]),
        (launch_environment(1, 2, 1), ["--local_rank=0"], ["--local_rank=0 contradicts local rank 1"]),
        ({}, ["--local_rank=1"], ["--local_rank=1 contradicts local rank 0"]),
        (launch_environment(0, 2, 1) | {"WORLD_SIZE": "two"}, [], ["WORLD_SIZE='two' is not a whole number"]),
        (launch_environment(0, 2, 1) | {"RANK": "2"}, [], ["RANK=2 is out of range: from 0 to 1"]),
    ],
    ids=[
        "incomplete",
        "local_rank",
        "local-rank",
        "local_rank of rank 1",
        "local_rank alone",
        "not a number",
        "out of range",
    ],
)
def test_launch_environment(tmp_path, stripes, environ, arguments, words):
    config, terminal = write_config(tmp_path, stripes), tmp_path / "terminal.txt"
    codes = wait_for([driver([*arguments, "-c", str(config)], environ, terminal)], END_S)
    assert_told_once(Ended(codes, terminal.read_text(), tmp_path, 0), EXIT_USAGE, *words)
    assert not (tmp_path / "runs").exists()


# What cannot be written


@contextmanager
def disk(folder: Path, options: str):
    """A file system of its own at ``folder``: the only one whose limits hold for root too."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"file systems cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_output_below_a_file(tmp_path, stripes):
    (tmp_path / "file").write_text("")
    ended = train(write_config(tmp_path, stripes), 2, f"output={tmp_path}/file/runs")
    assert_told_once(ended, EXIT_USAGE, "the run folder cannot be written: Not a directory", "output=FOLDER")


def test_output_on_a_read_only_disk(tmp_path, stripes):
    config = write_config(tmp_path, stripes)
    with disk(tmp_path / "runs", "ro"):
        ended = train(config, 2)
    assert_told_once(ended, EXIT_USAGE, "the run folder cannot be written: Read-only file system", "output=FOLDER")


LARGE = {"model": {"name": "mlp", "args": {"hidden": 512}}}  # a checkpoint of about 290 KB, weights of 145 KB


def test_full_disk_costs_nothing_but_time(tmp_path, stripes):
    """The disk holds one checkpoint and is full at the second; made larger, the same command ends as if nothing was."""
    config = write_config(tmp_path / "full", stripes, **LARGE)
    folder = config.parent / "runs" / "run"
    with disk(config.parent / "runs", "size=720k"):
        ended = train(config, 2)
        assert_told_once(ended, EXIT_FAILURE, "could not be written: No space left on device", "MiB free")
        assert (folder / "checkpoints" / "latest").read_text() == "step-8\n"
        assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == ["step-8"]
        assert ended.failure["error"] == "CheckpointError"
        subprocess.run(["mount", "-o", "remount,size=4m", folder.parent], check=True)
        assert train(config, 2).codes == [0, 0]
        unbroken = write_config(tmp_path / "unbroken", stripes, **LARGE)
        assert train(unbroken, 2).codes == [0, 0]
        assert_same_run(unbroken.parent / "runs" / "run", folder)


def test_full_disk_at_any_file(tmp_path, stripes):
    """Not a byte is left, for the log of the error neither: still one clear message, and the checkpoint stays good."""
    config = write_config(tmp_path, stripes, model={"name": f"{MODELS}.Slow", "args": {}}, train={"log_every": 1})
    with disk(tmp_path / "runs", "size=256k"):
        terminal = tmp_path / "terminal.txt"
        ranks = drivers(2, ["-c", str(config)], terminal)
        latest = tmp_path / "runs" / "run" / "checkpoints" / "latest"
        wait_until(latest.exists, END_S, "a checkpoint")
        with suppress(OSError), open(tmp_path / "runs" / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 100)
        codes = wait_for(ranks, END_S)
        assert_told_once(Ended(codes, terminal.read_text(), tmp_path, 0), EXIT_FAILURE, "No space left on device")
        (tmp_path / "runs" / "filler").unlink()
        ended = train(config, 2)
        assert ended.codes == [0, 0]
        assert "resumed from" in ended.terminal


def _train_on_a_full_disk(arguments: list[str], terminal: str) -> None:
    import torch

    save = torch.save

    def full(content, file):
        if content["state"]["step"] > 8:
            file.write(b"half a checkpoint")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(content, file)

    torch.save = full
    drive_in_terminal(arguments, terminal)


def test_full_disk_pretended(tmp_path, stripes):
    """The same where no file system can be mounted."""
    config, terminal = write_config(tmp_path, stripes), tmp_path / "terminal.txt"
    codes = wait_for([start(_train_on_a_full_disk, (["-c", str(config)], str(terminal)))], END_S)
    ended = Ended(codes, terminal.read_text(), tmp_path / "runs" / "run", 0)
    assert_told_once(ended, EXIT_FAILURE, "the checkpoint of step 16 could not be written: No space left on device")
    assert [path.name for path in (ended.folder / "checkpoints").glob("step-*")] == ["step-8"]
    assert (ended.folder / "checkpoints" / "latest").read_text() == "step-8\n"


# What fails inside


@pytest.mark.parametrize("world_size", [1, 2])
def test_exception_on_the_last_rank(tmp_path, stripes, world_size):
    model = {"name": f"{MODELS}.Raises", "args": {"rank": world_size - 1, "step": 11}}
    ended = train(write_config(tmp_path, stripes, model=model), world_size)
    assert ended.codes == [EXIT_FAILURE] * world_size
    assert ended.seconds < END_S
    assert ended.terminal.count("Traceback") == 1
    assert ended.terminal.count("ArithmeticError: a layer went wrong, only here") == 1
    failure = ended.failure
    assert (failure["rank"], failure["step"], failure["error"]) == (world_size - 1, 10, "ArithmeticError")
    assert failure["host"] == socket.gethostname()
    assert "in forward" in "".join(failure["traceback"])
    assert (ended.folder / "checkpoints" / "latest").read_text() == "step-8\n"
    logs = [(ended.folder / "logs" / f"rank-{rank}.log").read_text() for rank in range(world_size)]
    assert "ArithmeticError" in logs[-1]
    assert world_size == 1 or "ended, since rank 1 failed" in logs[0]


SLOW_FIRST_RANK = "import os, time; time.sleep(3 if os.environ.get('LOCAL_RANK') == '0' else 0)"


@pytest.mark.slow
def test_through_the_launcher(tmp_path, stripes):
    """An exception on rank 1, and a mistyped key, as a user sees them."""
    model = {"name": f"{MODELS}.Raises", "args": {"rank": 1, "step": 3}}
    config = write_config(tmp_path, stripes, model=model)
    command = [ROOT / "launch" / "single_node.sh", "2", config]
    with started(command, tmp_path / "terminal.txt") as run:
        assert run.wait(60) == 1
        assert not run.alive()
    # By the rank, and in the summary of torch's launcher.
    assert run.text().count("ArithmeticError: a layer went wrong, only here") == 2
    assert "exitcode  : 70" in run.text()
    assert json.loads((tmp_path / "runs" / "run" / "failure.json").read_text())["rank"] == 1

    (tmp_path / "sitecustomize.py").write_text(SLOW_FIRST_RANK)  # which is yet the one to tell
    with started([*command, "train.epoch=3"], tmp_path / "terminal.txt", PYTHONPATH=str(tmp_path)) as run:
        assert run.wait(60) == 1
    own, _, summary = run.text().partition("driver.py FAILED")
    assert own.count("did you mean train.epochs?") == 1
    assert "exitcode  : 2" in summary
