"""Engine dask, on a real scheduler with real workers: the same weights, one report, and no process left."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.engines import launch
from harness.engines.dask import cluster_run, run_files
from harness.engines.dask import worker as on_worker
from harness.errors import ConfigError, LaunchError
from harness.runs import run_dir
from harness.runs.checkpoints import Checkpoints
from tests.conftest import ROOT
from tests.end_to_end.experiment import assert_same_run, run, write_config
from tests.end_to_end.processes import END_S, started, wait_for_steps, wait_until
from tests.engines.dask_cluster import START_S, Running, cluster, marked, ranks

pytest.importorskip("distributed", reason="engine dask needs dask.distributed: pip install 'apex-harness[dask]'")
MODELS = "tests.end_to_end.models"
SLOW, FAST = ({"name": f"{MODELS}.Slow", "args": {"step_s": step_s}} for step_s in (0.1, 0.0))
CONSTANT = {"schedule": {"name": "constant", "warmup": None}}  # the same learning rates for any number of epochs
TWO = {"launch": {"nproc": 2}}


@pytest.fixture(scope="module")
def dask_cluster(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("dask"), num_workers=3) as there:
        yield there


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, stripes):
    """The run folder of an uninterrupted run on two ranks, without Dask."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert run(write_config(folder, stripes, model=FAST, **CONSTANT), 2) == [0, 0]
    return folder / "runs" / "run"


@pytest.fixture
def mark():
    """For launch.env: identifies the processes of the test's ranks."""
    return secrets.token_hex(8)


def marking(mark):
    return f"launch.env={{HARNESS_TEST: {mark}}}"


# Without a cluster


class FullDisk:
    """The files of a run whose copies to this machine all fail."""

    def fetch(self, workers):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def ended(tmp_path):
    """A run without a cluster whose only rank has ended; ``.called`` has the functions that ran on the worker."""
    run = cluster_run.ClusterRun.__new__(cluster_run.ClusterRun)
    place = on_worker.Place("tcp://w:1", "w", 1, "/scratch/job", None, True)
    run.called, nothing = [], lambda *_: None
    run._client = SimpleNamespace(
        status="running", cancel=nothing, unsubscribe_topic=nothing, nthreads=lambda workers: dict.fromkeys(workers, 1),
        run=lambda function, *_, **__: run.called.append(function),
    )  # fmt: skip
    run._tasks = [SimpleNamespace(future=None, place=place, exit=0, lost_at=None)]
    run._folder, run._closing = run_dir.RunFolder(tmp_path / "run"), ExitStack()
    run._topic, run._why_lost, run._stop_requested, run._ended = "topic", "", False, threading.Event()
    run._files, run._looked_at, run._failed_at, run._stops_sent = None, 0.0, None, 0
    return run


@pytest.mark.parametrize("full", [False, True])
def test_results_that_could_not_be_copied_stay_on_the_worker(ended, full, capfd):
    ended._files = FullDisk() if full else SimpleNamespace(fetch=lambda workers: None)
    report = ended.follow()
    assert ended.called == ([] if full else [on_worker.forget])
    text = "the results on worker tcp://w:1 are kept there, in /scratch/job"
    assert (text in capfd.readouterr().err) == full
    assert ["No space left" in exit.message for exit in report.exits] == [False, True][: 1 + full]


def test_results_of_a_worker_that_is_gone_are_missed(ended):
    ended._files = SimpleNamespace(fetch=lambda workers: None)
    ended._client.nthreads = lambda workers: {}
    assert ended.follow().exits[-1].message.endswith("could not be copied from the workers: worker tcp://w:1 is gone")


def test_an_exit_code_that_comes_late_is_asked_for_again(ended, monkeypatch):
    late = type("Late", (Exception,), {})
    monkeypatch.setattr(asyncio, "TimeoutError", late)  # which is no TimeoutError on Python 3.10
    answers = iter([late(), 3])

    def result(timeout):
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    ended._tasks[0].exit, ended._tasks[0].future = None, SimpleNamespace(status="finished", result=result)
    assert [exit.exit_code for exit in ended.follow().exits] == [3]


def test_a_cluster_that_is_busy_with_tasks_of_other_people(ended):
    ended._where, ended._client.nthreads = "tcp://s:1", lambda: {"tcp://w:1": 2}
    ended._client.processing = lambda: {"tcp://w:1": [("read-csv", 0), "topic-0"]}
    assert "tcp://w:1: 2 threads, 1 other task" in str(ended._too_few({}, 1.0))


def test_the_first_copy_that_fails_is_reported(ended, capfd):
    ended._files, ended._ended = (
        FullDisk(),
        SimpleNamespace(wait=lambda pause_s, answers=[False, False, True]: answers.pop(0)),
    )
    assert ended._copy().errno == errno.ENOSPC
    assert capfd.readouterr().err.count("warning: the results cannot be copied") == 1


def test_results_are_copied_before_they_are_removed_after_an_interruption(ended, monkeypatch):
    ended._files = SimpleNamespace(fetch=lambda workers: (time.sleep(0.2), ended.called.append("copied")))
    monkeypatch.setattr(ended, "_is_running", lambda rank: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ended.follow()
    assert ended.called == ["copied", on_worker.forget]


@pytest.mark.parametrize("restarted", [False, True])
def test_events_that_come_early(restarted, tmp_path, stripes, monkeypatch):
    """On a busy machine a rank's first event comes while ``submit`` has not returned, or another while the ranks are
    numbered."""
    order = cluster_run._order

    def order_later(task):
        if restarted:
            subscribed[0]((0.0, asdict(on_worker.TaskEvent(task.key, task.place))))
        return order(task)

    monkeypatch.setattr(cluster_run, "_order", order_later)
    monkeypatch.setattr(cluster_run.ClusterRun, "_start_ranks", lambda run, shared: None)
    subscribed = []

    def submit(*_, key, **__):
        place = on_worker.Place("tcp://w:1", "w", 1, "/scratch/job", None, True)
        subscribed[0]((0.0, asdict(on_worker.TaskEvent(key, place))))
        return SimpleNamespace(status="pending", key=key)

    client = SimpleNamespace(
        status="running", scheduler=SimpleNamespace(address="tcp://s:1"), submit=submit,
        subscribe_topic=lambda topic, receive: subscribed.append(receive), nthreads=lambda workers: workers,
    )  # fmt: skip
    job = planned(write_config(tmp_path, stripes), "launch.nproc=2")
    run = cluster_run.ClusterRun.start(client, job, ExitStack())
    assert len(run._places) == 2
    assert ("has restarted" in run._why_lost) == restarted


def planned(config, *words):
    return launch.plan(str(config), ["launch.engine=dask", *words])


def test_a_lost_connection_is_no_error_of_the_output_folder(tmp_path):
    def submit(*_: object, **__: object) -> None:
        raise OSError("Timed out trying to connect")

    client = SimpleNamespace(
        scheduler=SimpleNamespace(address="tcp://s:1"), status="closed", subscribe_topic=lambda *_: None, submit=submit
    )
    settings = SimpleNamespace(timeout_s=1.0, resources={})
    checkpoint = SimpleNamespace(keep=1)
    config = SimpleNamespace(output=str(tmp_path), checkpoint=checkpoint)
    job = SimpleNamespace(
        folder=tmp_path / "run", config=config, url="", world_size=1, settings=SimpleNamespace(engine_settings=settings)
    )
    with pytest.raises(LaunchError, match="tcp://s:1: the ranks could not be placed: Timed out"):
        cluster_run.ClusterRun.start(client, job, ExitStack())
    assert not list(tmp_path.iterdir())


def test_render(tmp_path, stripes):
    from harness.engines.dask import engine

    words = ["launch.nproc=2", "launch.dask.scheduler=tcp://10.0.0.1:8786", "launch.dask.resources={GPU: 1}"]
    text = engine.render(planned(write_config(tmp_path, stripes), *words))
    assert text == (ROOT / "tests" / "engines" / "golden" / "dask.txt").read_text()


def test_what_is_refused_before_anything_starts(tmp_path, stripes):
    from harness.engines.dask import engine

    config = write_config(tmp_path, stripes)
    with pytest.raises(LaunchError, match="asynchronous"):
        engine.run(SimpleNamespace(asynchronous=True), config)
    with pytest.raises(ConfigError, match="3 ranks"):
        engine.run(SimpleNamespace(asynchronous=False), config, ["launch.nproc=3"])


def test_a_worker_never_imports_torch():
    command = "import sys, harness.engines.dask.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT, timeout=250, check=False).returncode == 0


# Files, without a shared disk


class Disks:
    """Stands for the client of two workers; ``break_at`` counts down to a connection that breaks."""

    def __init__(self) -> None:
        self.alive, self.break_at = {"one", "two"}, -1

    def before(self) -> None:
        """Called before each request."""

    def nthreads(self, workers):
        return {name: 1 for name in workers if name in self.alive}

    def run(self, function, *arguments, workers):
        self.before()
        self.break_at -= 1
        if self.break_at == 0:
            raise ConnectionError("the connection broke")
        return {name: asyncio.run(function(*arguments)) for name in workers}


@pytest.fixture
def apart(tmp_path):
    """The run folders of the client, of rank 0 and of rank 1, on three disks, and the RunFiles between them."""
    folders = [tmp_path / name / "run" for name in ("client", "one", "two")]
    for folder in folders:
        folder.mkdir(parents=True)
    disks, checkpoints = Disks(), Checkpoints(folders[0] / "checkpoints", 2)
    there = {name: str(folder) for name, folder in zip(("one", "two"), folders[1:], strict=True)}
    return SimpleNamespace(
        disks=disks, files=run_files.RunFiles(disks, checkpoints, there, {"one": [0], "two": [1]}), folders=folders
    )


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def save(folder: Path, step: int) -> None:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    Checkpoints(folder / "checkpoints", 2).write(step, {"state": {"step": step}})


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_files_are_fetched_as_they_grow(apart):
    client, first, second = apart.folders
    write(first, "config.yaml", "of the worker")
    write(first, "summary.json.tmp", "half")
    write(second, "metrics.jsonl", "not the log of rank 0")
    for text in ("a\n", "a\nb\n", "x\ny\nz\n", "x\n"):  # grown, rewritten, truncated
        write(first, "metrics.jsonl", text)
        write(second, "logs/rank-1.log", text)
        apart.files.fetch(["one", "two"])
        assert (client / "metrics.jsonl").read_text() == (client / "logs" / "rank-1.log").read_text() == text
    shutil.rmtree(first)  # the worker was restarted
    apart.files.fetch(["one", "two"])
    assert names(client) == {"metrics.jsonl", "logs/rank-1.log"}
    apart.disks.alive = {"two"}
    with pytest.raises(ConnectionError, match="worker one is gone"):
        apart.files.fetch(["one", "two"])


def test_large_files_are_copied_in_chunks(apart, monkeypatch):
    monkeypatch.setattr(on_worker, "CHUNK_BYTES", 1000)
    client, first, _ = apart.folders
    for size in (2500, 4000, 3000, 0):
        (first / "weights.safetensors").write_bytes(os.urandom(size))
        apart.files.fetch(["one"])
        assert (client / "weights.safetensors").read_bytes() == (first / "weights.safetensors").read_bytes()
        apart.files.send()
        assert (client / "weights.safetensors").read_bytes() == (first / "weights.safetensors").read_bytes()


def test_the_client_has_a_complete_checkpoint_wherever_the_connection_breaks(apart):
    client, first, _ = apart.folders
    checkpoints = Checkpoints(client / "checkpoints", 2)
    save(first, 10)
    apart.files.fetch(["one"])
    for before, step in ((10, 20), (20, 30), (30, 40)):
        save(first, step)
        for breaks in itertools.count(1):
            apart.disks.break_at = breaks
            with suppress(ConnectionError):
                apart.files.fetch(["one"])
            newest = checkpoints.newest()  # verifies it
            assert newest is not None
            if apart.disks.break_at > 0:
                break
            assert newest.name in (f"step-{before}", f"step-{step}")
        assert breaks > 5
        assert newest.name == f"step-{step}"
    assert {path.name for path in (client / "checkpoints").iterdir()} == {"step-30", "step-40", "latest"}
    apart.disks.break_at = -1
    save(first, 50)
    (first / "checkpoints" / "step-50" / "state.pt").write_bytes(b"half")
    apart.files.fetch(["one"])
    assert (client / "checkpoints" / "latest").read_text() == "step-40\n"


def test_a_checkpoint_that_is_removed_while_it_is_copied_leaves_nothing(apart):
    """At each request to the worker, that of the best step is replaced."""
    client, first, _ = apart.folders
    for request in range(1, 12):
        for folder in (client, first):
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        for step in (10, 20):
            save(first, step)
        write(first, "checkpoints/best", "step-10\n")

        left = itertools.count(request, -1)
        apart.disks.before = lambda left=left: next(left) == 1 and shutil.rmtree(first / "checkpoints" / "step-10")
        files = run_files.RunFiles(
            apart.disks, Checkpoints(client / "checkpoints", 2), {"one": str(first)}, {"one": [0]}
        )
        files.fetch(["one"])
        found = {path.parent.name for path in client.glob("checkpoints/step-*/manifest.json")}
        assert {path.name for path in client.glob("checkpoints/step-*")} == found
        assert "step-20" in found


def test_what_a_resume_needs_is_sent(apart, tmp_path):
    client, first, second = apart.folders
    for step in (10, 20, 30):
        save(client, step)
    write(client, "checkpoints/best", "step-20\n")
    for name in ("metrics.jsonl", "failure.json", "config.yaml", "logs/rank-0.log", "logs/rank-1.log", "events/a"):
        write(client, name, name)
    apart.files.send()
    newest = {"checkpoints/step-30/state.pt", "checkpoints/step-30/manifest.json", "checkpoints/latest"}
    best = {"checkpoints/step-20/state.pt", "checkpoints/step-20/manifest.json", "checkpoints/best"}
    assert names(second) == {*newest, "logs/rank-1.log"}
    assert names(first) == {*newest, *best, "metrics.jsonl", "config.yaml", "events/a", "logs/rank-0.log"}
    assert Checkpoints(first / "checkpoints", 2).newest().name == "step-30"


# On a cluster


@pytest.fixture
def others_task(tmp_path, dask_cluster):
    """Other people's work on the cluster, which ends with the test: (future, function that ends it)."""
    flag = tmp_path / "flag"
    flag.touch()
    waiting = ["sh", "-c", f"while [ -e {flag} ]; do sleep 0.1; done"]
    future = dask_cluster.client.submit(subprocess.run, waiting, pure=False)
    wait_until(lambda: any(dask_cluster.client.processing().values()), START_S, "the other task runs")
    yield future, flag.unlink
    flag.unlink(missing_ok=True)


@pytest.mark.slow
def test_two_submissions_make_one_run(tmp_path, stripes, unbroken, dask_cluster, others_task, mark, capfd):
    """An exception on rank 1 ends the first with one report, and the second resumes it. Other work continues."""
    model = {"name": f"{MODELS}.Raises", "args": {"rank": 1, "step": 13}}  # of a process: the second trains only 12
    config = write_config(tmp_path, stripes, model=model, **CONSTANT, **TWO, checkpoint={"every": 4})
    first = Running(dask_cluster.client, config, marking(mark))
    text = first.end(START_S).text
    assert first.conclusion.exit_code == 1
    assert capfd.readouterr().err.count("Traceback") == 1
    assert "failed: rank 1 on" in text
    assert re.search(r"at step 12: ArithmeticError: \S+models.py:\d+: a layer went wrong, only here", text)
    assert "  rank 0: " in text
    assert set(json.loads((tmp_path / "runs" / "run" / "failure.json").read_text())["ranks"]) == {"0", "1"}
    assert not marked(mark)
    second = Running(dask_cluster.client, config, marking(mark))
    assert second.end(START_S).exit_code == 0
    assert "done: " in second.conclusion.text
    assert not marked(mark)
    assert_same_run(unbroken, tmp_path / "runs" / "run")
    assert "resumed from" in capfd.readouterr().err
    future, end = others_task
    assert future.status == "pending"
    end()
    assert future.result(END_S).returncode == 0


@pytest.mark.slow
def test_not_enough_workers(tmp_path, stripes, dask_cluster):
    from harness.engines.dask import engine

    config = write_config(tmp_path, stripes)
    words = [
        f"launch.dask.scheduler={dask_cluster.address}",
        "launch.dask.timeout_s=1",
        "launch.nnodes=5",
        "batch.global=10",
    ]
    with pytest.raises(LaunchError, match="[0-3] of 5 ranks found a worker with a free thread within 1 s"):
        engine.start(planned(config, *words))
    assert not list(tmp_path.glob("runs/*"))
    with pytest.raises(LaunchError, match="0 of 1 rank found .* and resources {'GPU': 1.0}"):
        engine.run(dask_cluster.client, config, ["launch.dask.timeout_s=1", "launch.dask.resources={GPU: 1.0}"])
    wait_until(lambda: not any(dask_cluster.client.processing().values()), END_S, "their tasks are gone")


@pytest.mark.parametrize("sends", [None, b"", b"SSH-2.0-x"])
def test_a_scheduler_that_does_not_answer(tmp_path, stripes, monkeypatch, sends):
    """Nothing listens at its port, or another program, which may send something."""
    from harness.engines.dask import engine

    monkeypatch.setattr(engine, "_CLOSE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        if sends is None:
            server.close()
        else:
            answered = pool.submit(lambda: (connection := server.accept()[0], connection.sendall(sends)))
        words = [f"launch.dask.scheduler=tcp://127.0.0.1:{port}", "launch.dask.timeout_s=1"]
        with pytest.raises(LaunchError, match=f"127.0.0.1:{port}: the scheduler does not answer"):
            engine.start(planned(write_config(tmp_path, stripes), *words))
        if sends is not None:
            answered.result(END_S)[0].close()


@pytest.mark.slow
def test_two_runs_at_once_and_a_killed_client(tmp_path, stripes, dask_cluster):
    """Two runs reserve one worker each; a third that needs two has to wait. When a client dies, its ranks end and its
    workers are free; the other run is stopped by its own client, with a checkpoint."""
    runs, endless = {}, {"model": SLOW, "train": {"epochs": 1000}}
    page = [sys.executable, ROOT / "launch" / "dask_cluster.py", "--scheduler", dask_cluster.address]
    for name in ("one", "two"):
        words = [write_config(tmp_path / name, stripes, **endless), f"launch.env={{HARNESS_TEST: {tmp_path / name}}}"]
        runs[name] = started([*page, *words], tmp_path / f"{name}.txt")
    with runs["one"] as one, runs["two"] as two:
        for name in ("one", "two"):
            wait_for_steps(tmp_path / name / "runs" / "run", 1, START_S)
        third = Running(
            dask_cluster.client, write_config(tmp_path / "three", stripes, **TWO), "launch.dask.timeout_s=1"
        )
        with pytest.raises(LaunchError, match="1 of 2 ranks found a worker"):
            third.end(30)
        one.signal(signal.SIGKILL)
        two.signal(signal.SIGINT)
        assert two.wait(END_S) == 75
        assert "stopped early with a checkpoint" in two.text().splitlines()[-1]
        wait_until(lambda: not marked(str(tmp_path / "one")), END_S, "the ranks of the killed client are gone")
    assert not marked(str(tmp_path / "two"))
    latest = [(tmp_path / name / "runs" / "run" / "checkpoints" / "latest").read_text() for name in ("one", "two")]
    assert all(step.startswith("step-") for step in latest)


@pytest.mark.slow
def test_killed_rank_and_worker_and_an_exact_restart_without_a_shared_disk(
    tmp_path, stripes, unbroken, dask_cluster, mark, monkeypatch, capfd
):
    """The third start resumes from files that the client has, on workers that have none. After kill -9 of a worker and
    its nanny, their rank ends, and so do its peers."""
    hurry = tmp_path / "hurry"  # until it exists, no run ends before its kill, however busy the machine
    model = {**SLOW, "args": {"step_s": 2.0, "until": str(hurry)}}
    config = write_config(tmp_path, stripes, model=model, **CONSTANT, **TWO, checkpoint={"every": 2})
    marker, unseen = cluster_run._marker, nullcontext(str(tmp_path / "unseen"))
    monkeypatch.setattr(cluster_run, "_marker", lambda job: unseen)
    folder, before = tmp_path / "runs" / "run", scratch(dask_cluster)
    first = Running(dask_cluster.client, config, marking(mark))
    first.until((folder / "checkpoints" / "latest").exists, "a fetched checkpoint")
    monkeypatch.setattr(run_dir, "_LOCK_S", 0.1)
    with pytest.raises(ConfigError, match="another process is already training in this run folder"):
        Running(dask_cluster.client, config, "launch.nproc=1").end(START_S)
    os.kill(ranks(mark)[1], signal.SIGKILL)
    killed = time.monotonic()
    assert first.end(END_S).exit_code == 70
    assert time.monotonic() - killed < END_S
    assert "failed: rank 1 at step" in first.conclusion.text
    assert "Killed: the process received SIGKILL" in first.conclusion.text
    assert "rank 0: lost contact on" in first.conclusion.text
    assert not marked(mark)
    assert scratch(dask_cluster) == before

    steps = (folder / "metrics.jsonl").read_text().count('"train"')
    monkeypatch.setattr(cluster_run, "_marker", marker)
    second = Running(dask_cluster.client, config, marking(mark))
    wait_for_steps(folder, steps + 1, START_S)
    worker = re.findall(r"rank 1: worker (\S+) on ", capfd.readouterr().err)[-1]
    dask_cluster.kill_worker(worker)
    killed = time.monotonic()
    assert second.end(END_S).exit_code == 70
    wait_until(lambda: not marked(mark), END_S, "the rank that has lost its worker has ended")
    assert time.monotonic() - killed < END_S
    assert "failed: rank 1 on" in second.conclusion.text
    assert f"worker {worker} on " in second.conclusion.text
    before = scratch(dask_cluster)  # a killed worker cannot clean up

    hurry.touch()
    monkeypatch.setattr(cluster_run, "_marker", lambda job: unseen)
    third = Running(dask_cluster.client, config, marking(mark))
    assert third.end(START_S).exit_code == 0
    assert "resumed from" in capfd.readouterr().err
    assert_same_run(unbroken, folder)
    assert scratch(dask_cluster) == before
    assert len((folder / "logs" / "rank-1.log").read_text().split("resumed from")) == 3


@pytest.mark.slow
def test_lost_scheduler(tmp_path, stripes, dask_cluster, mark):
    """Runs after all other tests that use the cluster, which has no scheduler after this."""
    config = write_config(tmp_path, stripes, model=SLOW, train={"epochs": 1000})
    run_ = Running(dask_cluster.client, config, marking(mark))
    wait_for_steps(tmp_path / "runs" / "run", 1, START_S)
    dask_cluster.scheduler.signal(signal.SIGKILL)
    assert run_.end(END_S).exit_code == 70
    assert f"the scheduler {dask_cluster.address} is gone" in run_.conclusion.text
    wait_until(lambda: not marked(mark), END_S, "no rank left")


@pytest.mark.slow
def test_interrupt_in_a_terminal(tmp_path, stripes):
    """A terminal sends Ctrl-C to all processes of its job, also to the workers of the run's own cluster."""
    config = write_config(tmp_path, stripes, model=SLOW, train={"epochs": 1000})
    command = [sys.executable, "-m", "harness", "launch", "-c", config, "--engine", "dask"]
    with started(command, tmp_path / "terminal.txt") as run_:
        wait_for_steps(tmp_path / "runs" / "run", 1, START_S)
        os.killpg(run_.process.pid, signal.SIGINT)
        assert run_.wait(END_S) == 75
        assert not run_.ranks()
        wait_until(lambda: not run_.alive(), 10, "multiprocessing's resource tracker has ended")
    assert "stopped early with a checkpoint" in run_.text().splitlines()[-1]


def scratch(there) -> list[Path]:
    """Files that runs have left on the workers' disks."""
    return list(there.folder.glob("disk-*/**/apex-harness-*"))
