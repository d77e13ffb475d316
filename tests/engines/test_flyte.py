"""Engine flyte on flytekit's local runner: the same weights, one report, no process left.

No Flyte cluster was used: what a cluster gets is compared with a golden file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import tarfile
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.distributed.launch_env import Launch
from harness.distributed.monitor import EngineReport
from harness.distributed.rank_exit import RankExit
from harness.engines import launch
from harness.engines.flyte import engine
from harness.errors import ConfigError, LaunchError
from tests.conftest import ROOT
from tests.end_to_end.experiment import Kill, assert_same_run, run, write_config
from tests.end_to_end.processes import END_S, Started, python, started, wait_for_steps, wait_until
from tests.ranks import RankFailure, free_port, run_ranks, start, wait_for

MODELS = "tests.end_to_end.models"
GOLDEN = Path(__file__).parent / "golden"
PAGE = ROOT / "launch" / "flyte_workflow.py"
PYFLYTE = [sys.executable, "-m", "flytekit.clis.sdk_in_container.pyflyte"]
MACHINE = ["launch.flyte.cpu=2", "launch.flyte.memory=4Gi", "launch.flyte.image=registry.example/apex-harness:1"]
START_S = 90  # for flytekit, torch and the ranks to be imported one after the other

needs_flytekit = pytest.mark.skipif(
    importlib.util.find_spec("flytekit") is None or importlib.util.find_spec("flytekitplugins") is None,
    reason="flytekit is not installed: pip install 'apex-harness[flyte]'",
)


SLOW = {"model": {"name": f"{MODELS}.Slow", "args": {"step_s": 0.1}}, "train": {"log_every": 1, "epochs": 5},
        "checkpoint": {"every": 4}}  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, stripes):
    """The run folder of an unbroken run on two ranks, without an engine."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert run(write_config(folder, stripes, **SLOW), 2) == [0, 0]
    return folder / "runs" / "run"


def command(config, *words):
    return [sys.executable, "-m", "harness", "launch", "-c", config, "--engine", "flyte", "--nproc", "2", *words]


def planned(config, words):
    """The job of ``words``, with the engine from the file."""
    return replace(launch.plan(str(config), [*words, "launch.engine=flyte"]), overrides=tuple(words))


KILLED = RankExit.from_code(1, -9)


def golden(name: str, text: str) -> None:
    """``text`` equals the golden file; HARNESS_GOLDEN=write writes it."""
    path = GOLDEN / name
    if os.environ.get("HARNESS_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flyte_node.txt", ["launch.nproc=2"]),
        ("flyte_nodes.txt", ["launch.nnodes=2", "launch.nproc=4", "launch.flyte.gpu=4", "launch.max_restarts=3"]),
    ],
)
def test_render(name, words):
    golden(name, engine.render(planned("configs/digits.yaml", [*MACHINE, *words])))


def test_source_in_launch_is_current():
    words = ["launch.nproc=2", "launch.flyte.cpu=2", "launch.flyte.memory=4Gi"]
    assert PAGE.read_text() == engine.render(planned("configs/digits.yaml", words))


@pytest.mark.parametrize("word", ["nnodes=2", "max_restarts=1"])
def test_settings_that_the_local_runner_refuses(tmp_path, stripes, word):
    job = planned(write_config(tmp_path, stripes), [f"launch.{word}"])
    with pytest.raises(LaunchError, match=rf"launch\.{word.partition('=')[0]}"):
        engine.start(job)
    assert not (tmp_path / "runs").exists()


def test_missing_flytekit_is_reported(tmp_path, stripes, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match="flytekit") as refused:
        engine.start(planned(write_config(tmp_path, stripes), []))
    assert "pip install" in refused.value.hint


@pytest.mark.parametrize(
    ("does", "exits"),
    [
        (f"echo '[{KILLED.to_json()}]' > ${engine.EXITS}; exit 70", [KILLED]),
        ("exit 1", []),  # flytekit itself failed, and has printed why
        # it leaves a process behind, as ranks may be
        (
            'setsid -f sh -c "sleep 1; touch $0.ended"; sleep 0.3; kill -9 $$',
            [RankExit.lost("flytekit's local runner was killed by signal 9")],
        ),
    ],
)
def test_end_of_the_runner(tmp_path, stripes, does, exits):
    """A shell script replaces the interpreter that runs flytekit; the report waits for all that it has started."""
    runner = tmp_path / "python"
    runner.write_text(f"#!/bin/sh\necho $TMPDIR > {tmp_path}/folder.txt\n{does}\n")
    runner.chmod(0o755)
    job = planned(write_config(tmp_path, stripes), [f"launch.python={runner}"])
    assert engine.start(job).follow() == EngineReport(exits)
    assert Path(f"{runner}.ended").exists() == ("setsid" in does)
    assert not Path((tmp_path / "folder.txt").read_text().strip()).exists()


@needs_flytekit
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stopped_run_ends_with_the_same_weights(tmp_path, stripes, unbroken):
    """A stop, and then the source in launch/ under flytekit's own command."""
    config = write_config(tmp_path, stripes, **SLOW)
    folder = tmp_path / "runs" / "run"
    with started(command(config), tmp_path / "first.txt", fork=True, TMPDIR=str(tmp_path)) as run_:
        wait_for_steps(folder, 5, START_S)
        run_.signal(signal.SIGTERM)
        assert run_.wait(END_S) == 75, run_.text()
        assert not run_.alive(), run_.text()
    assert "stopped early with a checkpoint" in run_.text()
    assert "Traceback" not in run_.text()
    assert not list(tmp_path.glob("harness-flyte-*")), "flytekit's files were left"
    words = ["experiment", "--config", config, "--overrides", '["launch.nproc=2"]']
    with started([*PYFLYTE, "run", PAGE, *words], tmp_path / "last.txt", fork=True, TMPDIR=str(tmp_path)) as run_:
        assert run_.wait(START_S + END_S) == 0, run_.text()
        assert not run_.alive()
    assert_same_run(unbroken, folder)
    returned = dict(re.findall(r"(\w+)=([^,\s)]+)", run_.text().rpartition("Results(")[2]))
    names = {"weights": "weights.safetensors", "epochs": "epochs.jsonl", "summary": "summary.json",
             "record": "metrics.jsonl"}  # fmt: skip
    assert {key: Path(returned[key]).name for key in names} == names
    assert all(Path(returned[key]).stat().st_size for key in names)
    epochs = [json.loads(line)["epoch"] for line in Path(returned["epochs"]).read_text().splitlines()]
    assert epochs == [1, 2, 3, 4, 5]  # finished


def train_node(config, pipe, environ):
    """What the runner does, with ``pipe`` as standard input."""
    from harness.engines.flyte import task

    os.environ.update(environ)
    os.dup2(os.open(pipe, os.O_RDONLY), 0)
    task.current_context = lambda: SimpleNamespace(checkpoint=SimpleNamespace(prev_exists=lambda: False))
    task.train_node(str(config), ["launch.nproc=2"])


@needs_flytekit
@pytest.mark.slow
def test_ranks_end_with_a_killed_command(tmp_path, stripes):
    """The runner and its ranks, whose command closes the pipe when it ends."""
    config, pipe, exits = write_config(tmp_path, stripes, **SLOW), tmp_path / "pipe", tmp_path / "exits.json"
    os.mkfifo(pipe)
    runner = start(train_node, (config, pipe, {engine.EXITS: str(exits)}))
    with open(pipe, "wb"):
        wait_for_steps(tmp_path / "runs" / "run", 1, START_S)
    assert wait_for([runner], END_S) == [75]
    assert [exit["exit_code"] for exit in json.loads(exits.read_text())] == [75, 75]  # no rank is left


def train_rank(config):
    from harness.engines.flyte.task import train_rank

    train_rank(str(config), [])


@needs_flytekit
@pytest.mark.slow
def test_failed_rank_of_several_machines_fails_its_task(tmp_path, stripes):
    model = {"name": f"{MODELS}.Raises", "args": {"rank": 0, "step": 11}}
    with pytest.raises(RankFailure, match="(?s)FlyteRecoverableException.*rank 0 failed at step 10: ArithmeticError"):
        run_ranks(1, train_rank, write_config(tmp_path, stripes, model=model), group=False)


@needs_flytekit
@pytest.mark.slow
def test_two_machines_under_the_kubeflow_plugin(tmp_path, stripes, unbroken):
    """As in the two pods of its PyTorchJob: each runs the source, and torch's elastic agents meet at the endpoint. The
    run is at a URL, without a shared disk, and resumes one whose rank was killed."""
    config = write_config(tmp_path, stripes, **SLOW, output=f"file://{tmp_path}/runs", data={"cache_dir": None})
    page = tmp_path / engine.FILE
    page.write_text(engine.render(planned(config, ["launch.nnodes=2"])))
    pod = {"PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}", "PET_NNODES": "2", "TMPDIR": str(tmp_path)}
    words = [*PYFLYTE, "run", page, "experiment", "--config", config]
    folder = tmp_path / "runs" / "run"
    assert run(config, 2, kill=Kill(1, 10), APEX_HARNESS_CACHE=str(tmp_path / "cache-0")) == [70, -signal.SIGKILL]

    def machine(number: int) -> AbstractContextManager[Started]:
        environ = {**pod, "APEX_HARNESS_CACHE": str(tmp_path / f"cache-{number}")}
        return started(words, tmp_path / f"{number}.txt", fork=True, **environ)

    with machine(1) as one, machine(2) as other:
        codes = {one.wait(START_S + END_S), other.wait(END_S)}
        # Python's own helper of a spawned process ends a moment after it.
        wait_until(lambda: not one.alive() and not other.alive(), 5, "nothing left of either machine")
    told = one.text() + other.text()
    assert codes == {0, 1}, told  # what the machine without rank 0 returns is IgnoreOutputs, as a pod's
    assert "IgnoreOutputs" in told
    assert "resumed from" in told
    assert_same_run(unbroken, folder)


@pytest.mark.slow
@needs_flytekit
def test_registered_tasks(tmp_path):
    """The tasks that ``pyflyte package`` registers on a cluster, compared with a golden file."""
    from flyteidl.admin.task_pb2 import TaskSpec
    from google.protobuf.json_format import MessageToDict

    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "__init__.py").touch()
    for name, words in {
        "node": [],
        "nodes": ["launch.nnodes=2", "launch.max_restarts=3", "launch.flyte.gpu=4"],
    }.items():
        plan = planned("configs/digits.yaml", [*MACHINE, "launch.nproc=4", *words])
        (pages / f"{name}.py").write_text(engine.render(plan))
    words = ["--pkgs", "pages", "package", "--image", "flyte:1", "--source", ".", "--output", "out.tgz"]
    terminal = tmp_path / "terminal.txt"
    assert python([*PYFLYTE[1:], *words], terminal, tmp_path, TMPDIR=str(tmp_path)) == 0, terminal.read_text()
    told = []
    with tarfile.open(tmp_path / "out.tgz") as archive:
        names = sorted(archive.getnames())
        assert len(names) == 6, names  # of each page the task, the workflow and its launch plan
        for name in (name for name in names if ".train_" in name):
            message = MessageToDict(TaskSpec.FromString(archive.extractfile(name).read()))
            message["template"]["metadata"]["runtime"].pop("version")  # of flytekit
            told.append(message)
    golden("flyte_registered.json", json.dumps(told, indent=1, sort_keys=True) + "\n")


@needs_flytekit
@pytest.mark.parametrize(("body", "words"), [("train_node", ["launch.nproc=3"]), ("train_rank", [])])
def test_batch_that_cannot_be_divided_is_refused(tmp_path, stripes, monkeypatch, body, words):
    from harness.engines.flyte import task

    monkeypatch.setattr(task, "detect", lambda environ: Launch(world_size=3))
    with pytest.raises(ConfigError, match="8 rows cannot be divided evenly among 3 ranks"):
        getattr(task, body)(str(write_config(tmp_path, stripes)), words)


@needs_flytekit
def test_retry_without_a_shared_disk_restores_the_run_folder(tmp_path, monkeypatch):
    """The next attempt of the task gets the run folder that the last one handed to Flyte."""
    from flytekit.core.checkpointer import SyncCheckpoint

    from harness.engines.flyte import task

    kept = []
    monkeypatch.setattr(task, "current_context", lambda: SimpleNamespace(checkpoint=kept[-1]))
    monkeypatch.chdir(tmp_path)
    folder = Path("runs", "run")
    (folder / "checkpoints" / "step-4").mkdir(parents=True)
    (folder / "checkpoints" / "latest").write_text("step-4\n")
    (folder / "checkpoints" / "step-4" / "state.pt").write_bytes(b"state")
    kept.append(SyncCheckpoint(str(tmp_path / "kept")))
    task._keep(folder)
    shutil.rmtree("runs")
    kept.append(SyncCheckpoint(str(tmp_path / "next"), str(tmp_path / "kept")))
    task._restore(folder)
    assert (folder / "checkpoints" / "latest").read_text() == "step-4\n"
    assert (folder / "checkpoints" / "step-4" / "state.pt").read_bytes() == b"state"
    (folder / "checkpoints" / "latest").write_text("step-8\n")
    task._restore(folder)  # newer than the kept one
    assert (folder / "checkpoints" / "latest").read_text() == "step-8\n"
