"""The end of a rank: its waits when it stops, and its report of an error. Whole runs: end_to_end."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import re
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from harness import cli
from harness.config import loader
from harness.data.loader_workers import LoadError
from harness.distributed.launch_env import Launch, detect
from harness.distributed.process_group import open_runtime
from harness.distributed.rank_exit import Cause, RankExit
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.distributed.store import LimitedStore
from harness.distributed.watchdog import Watchdog
from harness.errors import (
    EXIT_DATA,
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_OWN_CODE,
    EXIT_USAGE,
    ConfigError,
    DataError,
    LaunchError,
    exit_code_of,
)
from harness.runs import exit_files
from harness.runs.run_dir import RunFolder
from harness.training import description, main, run_start, train_command
from harness.training.exit_report import ExitReporter, explained, failed_early
from harness.training.rows.mixing import mixed_loss
from harness.training.run_start import RunStart
from harness.training.state import State
from harness.training.task import BaseTask
from tests.conftest import ROOT
from tests.fixtures import make_config, settings, write_rows, write_yaml
from tests.ranks import run_ranks

TWO_MACHINES = {"world_size": 2, "local_world_size": 1, "elastic": True, "may_grow": True}


def seconds_to_wait(stop: Stop, **launch) -> float:
    begin = time.monotonic()
    run_start.wait_for_launcher(Launch(**launch), stop)
    return time.monotonic() - begin


def test_rank_without_a_signal_waits_for_its_own_launcher(monkeypatch):
    monkeypatch.setattr(run_start, "_LAUNCHER_S", 100.0)
    stop = Stop(Runtime())
    threading.Timer(0.3, stop.request, ["SIGTERM"]).start()
    assert 0.2 < seconds_to_wait(stop, **TWO_MACHINES) < 100
    assert seconds_to_wait(stop, **TWO_MACHINES) < 100


def test_wait_for_the_launcher_is_bounded(monkeypatch):
    monkeypatch.setattr(run_start, "_LAUNCHER_S", 0.3)
    assert seconds_to_wait(Stop(Runtime()), **TWO_MACHINES) > 0.2


@pytest.mark.parametrize("difference", [{"may_grow": False}, {"local_world_size": 2}])
def test_no_rank_waits_where_no_machine_can_join(monkeypatch, difference):
    monkeypatch.setattr(run_start, "_LAUNCHER_S", 100.0)
    assert seconds_to_wait(Stop(Runtime()), **{**TWO_MACHINES, **difference}) < 100


@pytest.mark.parametrize("local_rank", [0, 1])
def test_error_before_rendezvous_is_printed_once_and_recorded_by_all(tmp_path, caplog, local_rank):
    file = tmp_path / "error.json"
    launch = Launch(rank=local_rank + 2, local_rank=local_rank, world_size=4, error_file=str(file))
    assert failed_early(launch, LaunchError("no port")) == 2
    assert caplog.text.count("error: no port") == (1 if local_rank == 0 else 0)
    exit, world_size = exit_files.from_torch_error_file(file.read_text())
    assert (exit.rank, exit.cause, exit.step, exit.exit_code, world_size) == (local_rank + 2, Cause.ERROR, None, 2, 4)


GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4000")


def test_peer_lost_at_rendezvous_is_a_consequence(tmp_path, caplog):
    """A killed rank leaves no error file: the one of its peer must not look like the cause."""
    file = tmp_path / "error.json"
    assert failed_early(Launch(world_size=2, error_file=str(file)), GLOO) == 70
    exit, _ = exit_files.from_torch_error_file(file.read_text())
    assert (exit.cause, exit.error) == (Cause.PEER_LOST, "TrainingError")
    assert "error: lost contact with the other ranks" in caplog.text


class Unreadable(BaseException):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("CUDA error: device is busy"), "CUDA error: device is busy"),
        (SystemExit(0), "sys.exit(0)"),
        (Unreadable(), "Unreadable, whose text cannot be read"),
    ],
)
def test_unexpected_error_before_rendezvous_is_recorded(tmp_path, monkeypatch, caplog, error, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(run_start, "open_runtime", fail)
    monkeypatch.setattr(main.determinism, "require", lambda level: None)  # it changes settings of the whole process
    monkeypatch.setattr(main.console, "to_terminal", lambda *words: None)  # it replaces the log's handlers
    file = tmp_path / "error.json"
    environ = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
               "TORCHELASTIC_ERROR_FILE": str(file)}  # fmt: skip
    assert main.main(str(ROOT / "configs" / "digits.yaml"), [], environ, None) == EXIT_OWN_CODE
    exit, _ = exit_files.from_torch_error_file(file.read_text())
    assert (exit.rank, exit.cause, exit.exit_code) == (1, Cause.ERROR, EXIT_OWN_CODE)
    assert message in exit.message
    assert message in caplog.text
    assert ("Traceback" in caplog.text) == (not isinstance(error, SystemExit))


def failed(tmp_path, error, *, store=None, rank=0):
    """The report of ``error`` by one rank: its exit code, its record, and failure.json."""
    folder = RunFolder(tmp_path)
    folder.logs.mkdir(exist_ok=True)
    folder.claimed = True
    runtime = Runtime(Launch(rank=rank), store=store and LimitedStore(store))
    code = ExitReporter(runtime, folder).failed(error, Watchdog(runtime, Stop(runtime)))
    failure = tmp_path / "failure.json"
    return code, exit_files.read(folder.logs)[rank], json.loads(failure.read_text()) if failure.exists() else None


def test_own_error_is_recorded_and_printed(tmp_path, caplog):
    code, exit, failure = failed(tmp_path, DataError("bad row", where="a.csv:3", hint="mend it"))
    assert code == exit.exit_code == failure["exit_code"] == 65
    assert (exit.cause, exit.error, exit.message, exit.step) == (Cause.ERROR, "DataError", "a.csv:3: bad row", 0)
    assert exit.hint == "mend it"
    assert failure == asdict(exit)
    assert "error: a.csv:3: bad row" in caplog.text


@pytest.mark.parametrize("in_worker", [False, True])
def test_own_exception_is_printed_without_calls_of_the_harness(tmp_path, caplog, in_worker):
    class Own(BaseTask):
        def loss(self, outputs, targets):
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong") as caught:
        mixed_loss(Own().loss, None, None, None)
    if in_worker:
        sent = pickle.loads(pickle.dumps(LoadError.of(caught.value)))
        with pytest.raises(ValueError, match="wrong") as caught:
            sent.reraise()
    *_, failure = failed(tmp_path, caught.value)
    (shown,) = [record.getMessage() for record in caplog.records if "wrong" in record.getMessage()]
    assert re.match(r"error: tests/training/test_main.py:\d+: ValueError: wrong\nTraceback", shown)
    assert shown.endswith(
        f"ValueError: wrong\n  -> {tmp_path}/failure.json has the traceback with the calls of the harness"
    )
    assert shown.count("Traceback") == 1
    assert "harness/training/rows/mixing.py" not in shown
    assert "harness/training/rows/mixing.py" in "".join(failure["traceback"])


def test_lost_peer_is_a_consequence(tmp_path):
    code, exit, failure = failed(tmp_path, GLOO)
    assert (code, exit.cause, failure["cause"]) == (70, Cause.PEER_LOST, "peer_lost")
    assert exit.message.startswith("lost contact with the other ranks: Connection closed by peer")


def test_error_of_nccl_on_this_rank_is_its_own(tmp_path, caplog):
    text = (
        "NCCL error in: NCCLUtils.hpp:275, unhandled cuda error, NCCL version 2.20.5\nncclUnhandledCudaError: Call to "
    )
    error = dist.DistBackendError(f"{text}CUDA function failed.\nLast error:\nCuda failure 999 'unknown error'")
    code, exit, failure = failed(tmp_path, error)
    assert (code, exit.cause, failure["cause"]) == (70, Cause.ERROR, "error")
    assert "Cuda failure 999 'unknown error'" in failure["message"]
    assert "Cuda failure 999 'unknown error'" in caplog.text


def test_later_failure_takes_the_exit_code_of_the_first(tmp_path, caplog):
    store = dist.HashStore()
    failed(tmp_path, DataError("bad row"), store=store)
    caplog.clear()
    code, exit, failure = failed(tmp_path, ArithmeticError("mine"), store=store, rank=1)
    assert (code, exit.exit_code, exit.cause) == (65, 65, Cause.ERROR)
    assert failure["rank"] == 0
    assert "error" not in caplog.text


def test_error_that_all_ranks_raise_is_reported_by_its_origin(tmp_path, caplog):
    error = DataError("bad row")
    error.origin_rank = 0
    code, exit, failure = failed(tmp_path, error, rank=1)
    assert (code, exit.cause, failure) == (65, Cause.PEER_LOST, None)
    assert "bad row" not in caplog.text


def test_blocked_rank_is_recorded(tmp_path):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.claimed = True
    exit, first = (
        RankExit(0, Cause.PEER_LOST, 70, "here", 4),
        RankExit(1, Cause.ERROR, 65, "there", 5, message="bad row"),
    )
    ExitReporter(Runtime(), folder).blocked(exit, first)
    assert exit_files.read(folder.logs) == {0: exit}
    assert json.loads((tmp_path / "failure.json").read_text()) == asdict(first)


@pytest.mark.parametrize(("cores", "supervised"), [(2, True), (8, True), (2, False)])
def test_ranks_that_share_cores_are_noted(caplog, monkeypatch, cores, supervised):
    """Not those of srun, which may have cores of their own."""
    caplog.set_level("INFO", "harness")
    monkeypatch.setattr(description.machine, "usable_cores", lambda: cores)
    launch = Launch(world_size=8, local_world_size=8, supervised=supervised)
    description._note_few_cores(SimpleNamespace(launch=launch, device=torch.device("cpu")))
    assert ("8 ranks share 2 cores" in caplog.text) == (cores == 2 and supervised)


def test_a_step_that_is_not_counted_yet_is_in_the_record():
    reporter = ExitReporter(Runtime())
    reporter.run = SimpleNamespace(step=4, state=State(step=3))
    assert reporter.step() == 4


@pytest.mark.parametrize("supervised", [False, True])
def test_the_signal_of_harness_launch_is_printed_once(caplog, supervised):
    """It sends its ranks SIGTERM, whichever signal it got and has printed."""
    caplog.set_level("INFO", "harness")
    runtime = Runtime(Launch(supervised=supervised))
    run = SimpleNamespace(runtime=runtime, stop=Stop(runtime), state=State(step=7), config=None)
    run.stop.signal = signal.SIGTERM
    run.stop.request("SIGTERM")
    description.conclude(run, done=False)
    alone = "stopped early (SIGTERM) at step 7, with a checkpoint; the same command resumes from it"
    assert caplog.messages == ["stopped at step 7, with a checkpoint" if supervised else alone]


def test_full_disk_is_explained():
    shown = str(explained(OSError(28, "No space left on device", "x.pt")))
    assert shown.startswith("x.pt: a file could not be read or written: No space left on device\n  -> free some space")


def test_a_path_that_the_users_code_cannot_open(tmp_path):
    """Its line comes first, and the exit code is that of the user's own code, as in ``harness check``."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory") as caught:
        (tmp_path / "file" / "x").read_text()
    found = explained(caught.value)
    line = caught.value.__traceback__.tb_lineno
    assert str(found).startswith(f"tests/training/test_main.py:{line}: NotADirectoryError: [Errno 20] Not a directory")
    assert str(found).partition("\n  -> ")[2].startswith("a part of this path is a file, not a folder: ")
    assert exit_code_of(found) == EXIT_OWN_CODE


class Odd(BaseException):
    """An error that is no Exception."""


@pytest.mark.parametrize(("module", "name"), [(run_start.build, "build"), (run_start.emulated_half, "half_on_cpu")])
def test_error_that_is_no_exception_is_recorded_while_a_run_is_built(tmp_path, monkeypatch, module, name):
    def build(*_):
        raise Odd("of the user's own code")

    monkeypatch.setattr(module, name, build)
    start = RunStart(make_config(tmp_path), Runtime())
    with pytest.raises(Odd), start:
        pytest.fail("the run was built")
    failure = json.loads((tmp_path / "runs" / "small" / "failure.json").read_text())
    assert (failure["error"], start.code) == ("Odd", EXIT_OWN_CODE)
    assert re.fullmatch(r"tests/training/test_main\.py:\d+: of the user's own code", failure["message"])


def _without_folder(folder: Path) -> tuple[int, RankExit | None]:
    """The exit code of a rank, and its record. Rank 1 cannot have a run folder."""
    rank, early = os.environ["RANK"], folder / f"early-{os.environ['RANK']}.json"
    os.environ[exit_files.EARLY] = str(early)
    config = make_config(folder / rank, ["output=memory://runs"] if rank == "1" else ())
    with open_runtime(detect(os.environ), "cpu", 20.0) as runtime, contextlib.suppress(ConfigError):
        start = RunStart(config, runtime)
        with start:
            pytest.fail("the run was built")
    return start.code, exit_files.read_record(early)


def test_error_of_one_rank_in_opening_the_run_folder_reaches_all(tmp_path):
    for rank in "01":
        (tmp_path / rank).mkdir()
    (first, _), (second, record) = run_ranks(2, _without_folder, tmp_path, group=False, timeout_s=60)
    assert (first, second) == (EXIT_USAGE, EXIT_USAGE)
    assert (record.cause, record.error, record.rank) == (Cause.ERROR, "ConfigError", 1)


def test_error_at_the_end_of_a_run_is_recorded(tmp_path, monkeypatch):
    def finish(*_):
        raise OSError(28, "No space left on device")

    write_rows(tmp_path, "train", 4)
    write_rows(tmp_path, "eval", 4)
    monkeypatch.setattr(description, "conclude", finish)
    monkeypatch.setattr(main.determinism, "require", lambda level: None)  # it changes settings of the whole process
    start = RunStart(make_config(tmp_path), Runtime())
    with pytest.raises(OSError, match="No space"), start:
        pass
    failure = json.loads((tmp_path / "runs" / "small" / "failure.json").read_text())
    assert "No space left on device" in failure["message"]
    assert start.code == EXIT_FAILURE


def test_error_while_a_run_is_built_names_the_line_of_the_setting(tmp_path):
    write_rows(tmp_path, "train", 4)
    write_rows(tmp_path, "eval", 4)
    path = write_yaml(tmp_path / "x.yaml", {"optimizer": {"name": "adamv"}, **settings(tmp_path)})
    start = RunStart(loader.load(path, ["train.deterministic=false"]), Runtime())
    with pytest.raises(ConfigError, match=f"^{path}:2: optimizer.name: unknown optimizer 'adamv'"), start:
        pytest.fail("the run was built")
    failure = json.loads((tmp_path / "runs" / "small" / "failure.json").read_text())
    assert failure["message"].startswith(f"{path}:2: optimizer.name: ")
    (tmp_path / "train.csv").unlink()
    with pytest.raises(DataError, match=f"^{path}:7: task.train_csv: {tmp_path}/train.csv: no such annotation file"):
        train_command.run(argparse.Namespace(config=str(path), overrides=[], local_rank=None))


def test_ranks_that_cannot_extend_a_finished_run_leave_it_finished(tmp_path):
    """All ranks know that it is finished, not only the one that has claimed the folder."""
    write_rows(tmp_path, "eval", 6)
    table = write_rows(tmp_path, "train", 12)
    tree = settings(tmp_path, train={"epochs": 1}, runtime={"device": "cpu", "timeout_s": 30})
    path, longer = write_yaml(tmp_path / "x.yaml", tree), "train.epochs=2"

    def trained(*words: str) -> list[int]:
        return run_ranks(2, cli.main, ["train", "-c", str(path), *words], group=False, timeout_s=90)

    assert trained() == [EXIT_DONE] * 2
    run = tmp_path / "runs" / "small"
    before = exit_files.read(run / "logs")
    gone = table.rename(tmp_path / "moved.csv")
    assert trained(longer) == [EXIT_DATA] * 2
    assert exit_files.read(run / "logs") == before
    assert not (run / "failure.json").exists()
    gone.rename(table)
    assert trained(longer) == [EXIT_DONE] * 2
    assert [each.step for each in exit_files.read(run / "logs").values()] == [2 * before[0].step] * 2
