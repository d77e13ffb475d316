"""Engine dask, on a real scheduler with real workers: the same weights, one report, and no process left."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from harness.config import loader
from harness.engines import launch
from harness.engines.dask import placement, reservation, store
from harness.engines.dask import worker as on_worker
from harness.errors import ConfigError, LaunchError
from harness.runs import run_dir
from harness.runs.checkpoint import Checkpoints
from harness.version import __version__
from tests.conftest import ROOT
from tests.end_to_end.experiment import assert_same_run, run, write_config, write_images
from tests.end_to_end.processes import END_S, started, wait_for_steps, wait_until
from tests.engines.dask_cluster import START_S, Running, cluster, marked, ranks

pytest.importorskip("distributed", reason="engine dask needs dask.distributed: pip install 'apex-harness[dask]'")
MODELS = "tests.end_to_end.models"
SLOW, FAST = ({"name": f"{MODELS}.Slow", "args": {"step_s": step_s}} for step_s in (0.1, 0.0))
CONSTANT = {"schedule": {"name": "constant", "warmup_epochs": 0.0}}  # the same learning rates for any number of epochs
TWO = {"launch": {"nproc": 2}}


@pytest.fixture(scope="module")
def stripes(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("stripes"))


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


def planned(config, *words):
    return launch.plan(str(config), ["launch.engine=dask", *words])


def test_render(tmp_path, stripes):
    from harness.engines.dask import engine

    words = ["launch.nproc=2", "launch.dask.scheduler=tcp://10.0.0.1:8786", "launch.dask.resources={GPU: 1}"]
    text = engine.render(planned(write_config(tmp_path, stripes), *words))
    assert text == (ROOT / "tests" / "engines" / "golden" / "dask.txt").read_text()


@pytest.mark.parametrize("word", ["min_nodes=1", "rendezvous=a:1", "node_rank=0", "max_restarts=1"])
def test_settings_without_a_meaning_are_refused(tmp_path, stripes, word):
    from harness.engines.dask import engine

    job = planned(write_config(tmp_path, stripes), f"launch.{word}")
    for call in (engine.render, engine.start):
        with pytest.raises(LaunchError, match="does not apply to engine dask"):
            call(job)


def test_what_is_refused_before_anything_starts(tmp_path, stripes):
    from harness.engines.dask import engine

    config = write_config(tmp_path, stripes)
    with pytest.raises(LaunchError, match="asynchronous"):
        engine.run(SimpleNamespace(asynchronous=True), config)
    with pytest.raises(ConfigError, match="3 ranks"):
        engine.run(SimpleNamespace(asynchronous=False), config, ["launch.nproc=3"])


def test_a_worker_never_imports_torch():
    command = "import sys, harness.engines.dask.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT, timeout=250, check=False).returncode == 0


# Which workers: in the scheduler


def worker(address, *, threads=1, tasks=(), status="running", **resources):
    return SimpleNamespace(
        address=address, host=address.partition(":")[0], nthreads=threads, resources=resources,
        processing=[SimpleNamespace(key=key, resource_restrictions=None) for key in tasks],
        status=SimpleNamespace(name=status),
    )  # fmt: skip


def scheduler(*workers, clients=("me", "other")):
    return SimpleNamespace(workers={each.address: each for each in workers}, clients=clients)


def places(found):
    return [address for address, _ in found["places"]]


def test_workers_are_reserved_all_or_none_and_by_one_run():
    there = scheduler(worker("b:1"), worker("a:1", threads=4), worker("c:1"))
    assert places(reservation.reserve("one", "me", 2, {}, there)) == ["a:1", "b:1"]
    refused = reservation.reserve("two", "other", 2, {}, there)
    assert refused["places"] == []
    assert [line for line in refused["seen"] if "1 rank of another run: room for 0" in line]
    assert places(reservation.reserve("three", "other", 1, {}, there)) == ["c:1"]
    reservation.release("one", there)
    assert places(reservation.reserve("two", "other", 2, {}, there)) == ["a:1", "b:1"]
    there.clients = ("me",)  # reservations end with their client
    assert places(reservation.reserve("four", "me", 3, {}, there)) == ["a:1", "b:1", "c:1"]


def test_busy_and_closing_workers_have_no_room():
    busy, mine = worker("a:1", tasks=["sum-1"]), worker("b:1", tasks=["apex-harness-0-rank-0"])
    there = scheduler(busy, mine, worker("c:1", status="closing_gracefully"), worker("d:1", threads=2, tasks=["sum-2"]))
    assert places(reservation.reserve("one", "me", 2, {}, there)) == ["b:1", "d:1"]
    assert reservation.reserve("two", "me", 1, {}, there)["places"] == []


def test_one_rank_per_gpu_and_workers_with_gpus_first():
    there = scheduler(worker("a:1"), worker("b:1", threads=8, GPU=2), worker("c:1", threads=1, GPU=4))
    found = reservation.reserve("one", "me", 4, {}, there)
    assert found["places"] == [("b:1", {"GPU": 1}), ("b:1", {"GPU": 1}), ("c:1", {"GPU": 1}), ("a:1", {})]
    there = scheduler(worker("a:1"), worker("b:1", BIG=1.0), worker("c:1", threads=4, BIG=3.0))
    assert places(reservation.reserve("one", "me", 2, {"BIG": 1.0}, there)) == ["b:1", "c:1"]
    assert reservation.reserve("two", "me", 1, {"BIG": 1.0}, there)["places"] == []


@pytest.mark.parametrize(
    ("error", "hint"),
    [(ModuleNotFoundError("No module named 'harness'"), "install the project"), (ConnectionError("reset"), "reset")],
)
def test_a_worker_that_cannot_be_called(error, hint):
    def run(*words, **options):
        raise error

    client = SimpleNamespace(run=run, scheduler=SimpleNamespace(address="tcp://there:1"))
    with pytest.raises(LaunchError, match=hint):
        placement.call(client, on_worker.describe, "")


def test_workers_of_different_releases_are_refused(tmp_path, stripes):
    def facts(**versions):
        known = {"harness": __version__, "torch": "2.15.0", "python": "3.11.7"}
        return {"host": "a", "devices": None, "sees": True, "versions": known | versions}

    seen = {"a:1": facts(), "b:1": facts()}
    there = SimpleNamespace(
        run_on_scheduler=lambda *words: {"places": [("b:1", {}), ("a:1", {})]}, run=lambda *words, workers: seen,
        scheduler=SimpleNamespace(address="tcp://there:1"), id="me",
    )  # fmt: skip
    job = planned(write_config(tmp_path, stripes), "launch.nproc=2")
    found, shared = placement.find(there, job, "name", 0.0)
    assert [each.worker for each in found] == ["a:1", "b:1"]
    assert shared
    for versions, text in (({"torch": "2.6.0"}, "b:1 has torch 2.6.0, others 2.15.0"), ({"harness": "0"}, "harness 0")):
        seen["b:1"] = facts(**versions)
        with pytest.raises(LaunchError, match=text):
            placement.find(there, job, "name", 0.0)
    seen["b:1"] = facts() | {"sees": False}
    assert placement.find(there, job, "name", 0.0)[1] is False
    job = planned(write_config(tmp_path, stripes), "launch.nproc=2", "launch.dask.shared=true")
    with pytest.raises(LaunchError, match="b:1 cannot see"):
        placement.find(there, job, "name", 0.0)


# Files, without a shared disk


class Disks:
    """Stands for a client of workers whose disks are folders; ``break_at`` counts down to a connection that breaks."""

    def __init__(self, **disks: Path) -> None:
        self._workers = {name: SimpleNamespace(local_directory=disk) for name, disk in disks.items()}
        self.alive, self.break_at = set(disks), -1

    def nthreads(self, workers):
        return {name: 1 for name in workers if name in self.alive}

    def run(self, function, *arguments, workers):
        self.break_at -= 1
        if self.break_at == 0:
            raise ConnectionError("the connection broke")
        return {name: asyncio.run(function(*arguments, dask_worker=self._workers[name])) for name in workers}


@pytest.fixture
def apart(tmp_path):
    """The run folders of the client, of rank 0 and of rank 1, on three disks, and the FileSync between them."""
    from harness.engines.dask.file_sync import FileSync

    disks = Disks(one=tmp_path / "one", two=tmp_path / "two")
    folders = [tmp_path / "run", *(tmp_path / disk / "apex-harness-job/output/run" for disk in ("one", "two"))]
    for folder in folders:
        folder.mkdir(parents=True)
    sync = FileSync(disks, "job", Checkpoints(tmp_path / "run" / "checkpoints", 2), {"one": [0], "two": [1]})
    return SimpleNamespace(disks=disks, sync=sync, folders=folders)


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
        apart.sync.fetch(["one", "two"])
        assert (client / "metrics.jsonl").read_text() == (client / "logs" / "rank-1.log").read_text() == text
    shutil.rmtree(first.parents[1])  # the worker was restarted
    apart.sync.fetch(["one", "two"])
    assert names(client) == {"metrics.jsonl", "logs/rank-1.log"}
    apart.disks.alive = {"two"}
    with pytest.raises(ConnectionError, match="worker one is gone"):
        apart.sync.fetch(["one", "two"])


def test_large_files_are_copied_in_chunks(apart, monkeypatch):
    monkeypatch.setattr(store, "CHUNK_BYTES", 1000)
    client, first, _ = apart.folders
    for size in (2500, 4000, 3000, 0):
        (first / "weights.safetensors").write_bytes(os.urandom(size))
        apart.sync.fetch(["one"])
        assert (client / "weights.safetensors").read_bytes() == (first / "weights.safetensors").read_bytes()
        apart.sync.send(None)
        assert (client / "weights.safetensors").read_bytes() == (first / "weights.safetensors").read_bytes()


def test_the_client_has_a_complete_checkpoint_wherever_the_connection_breaks(apart):
    client, first, _ = apart.folders
    checkpoints = Checkpoints(client / "checkpoints", 2)
    save(first, 10)
    apart.sync.fetch(["one"])
    for before, step in ((10, 20), (20, 30), (30, 40)):
        save(first, step)
        for breaks in itertools.count(1):
            apart.disks.break_at = breaks
            with suppress(ConnectionError):
                apart.sync.fetch(["one"])
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
    apart.sync.fetch(["one"])
    assert (client / "checkpoints" / "latest").read_text() == "step-40\n"


def test_what_a_resume_needs_is_sent(apart, tmp_path):
    client, first, second = apart.folders
    for step in (10, 20, 30):
        save(client, step)
    write(client, "checkpoints/best", "step-20\n")
    for name in ("metrics.jsonl", "failure.json", "config.yaml", "logs/rank-0.log", "logs/rank-1.log", "events/a"):
        write(client, name, name)
    apart.sync.send(None)
    newest = {"checkpoints/step-30/state.pt", "checkpoints/step-30/manifest.json", "checkpoints/latest"}
    best = {"checkpoints/step-20/state.pt", "checkpoints/step-20/manifest.json", "checkpoints/best"}
    assert names(second) == {*newest, "logs/rank-1.log"}
    assert names(first) == {*newest, *best, "metrics.jsonl", "config.yaml", "events/a", "logs/rank-0.log"}
    assert Checkpoints(first / "checkpoints", 2).newest().name == "step-30"


def test_a_borrowed_checkpoint_is_sent_to_all(apart, tmp_path):
    save(tmp_path / "other", 7)
    apart.sync.send(tmp_path / "other" / "checkpoints" / "step-7")
    for disk in ("one", "two"):
        assert names(tmp_path / disk / "apex-harness-job" / "borrowed") == {"state.pt", "manifest.json"}


def test_each_new_line_is_read_once(tmp_path):
    path = tmp_path / "log"
    path.write_text("before\n")
    tail = on_worker.Tail(path)
    for text, mode, expected in (
        ("", "a", []), ("one\ntwo\nhal", "a", ["one", "two"]), ("f\n", "a", ["half"]), ("new\n", "w", []),
        ("more\n", "a", ["more"]),
    ):  # fmt: skip
        with open(path, mode) as file:
            file.write(text)
        assert tail.read() == expected
    assert on_worker.Tail(tmp_path / "absent").read() == []


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
    config = write_config(tmp_path, stripes, model=model, **CONSTANT, **TWO, checkpoint={"every_steps": 4})
    first = Running(dask_cluster.client, loader.load(config, ()), marking(mark))
    text = first.end(START_S).text
    assert first.conclusion.exit_code == 70
    assert capfd.readouterr().err.count("Traceback") == 1
    assert "failed: rank 1 on" in text
    assert "at step 12: ArithmeticError: a layer went wrong, only here" in text
    assert "  rank 0: " in text
    assert set(json.loads((tmp_path / "runs" / "run" / "failure.json").read_text())["ranks"]) == {"0", "1"}
    assert not marked(mark)
    second = Running(dask_cluster.client, yaml.safe_load(config.read_text()), marking(mark))
    assert second.end(START_S).exit_code == 0
    assert "done: " in second.conclusion.text
    assert not marked(mark)
    assert_same_run(unbroken, tmp_path / "runs" / "run")
    assert json.loads([line for line in second.lines(0, "metrics.jsonl") if '"train"' in line][-1])["step"] == 24
    assert any("resumed from" in line for line in second.lines(0, "terminal"))
    assert second.lines(1, "logs/rank-1.log")
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
    with pytest.raises(LaunchError) as refused:
        engine.start(planned(config, *words))
    assert "the run needs 5 workers with a free thread, one per rank" in str(refused.value)
    assert str(refused.value).count("1 thread, running: room for 1") == 3
    assert not list(tmp_path.glob("runs/*"))
    with pytest.raises(LaunchError, match="and resources {'GPU': 1.0}"):
        engine.run(dask_cluster.client, config, ["launch.dask.timeout_s=1", "launch.dask.resources={GPU: 1.0}"])


@pytest.mark.slow
def test_a_scheduler_that_does_not_answer(tmp_path, stripes, capsys, monkeypatch):
    """It says what it waits for, and gives up in time."""
    from harness.engines.dask import engine

    monkeypatch.setattr(engine, "_SILENT_S", 0.1)
    words = ["launch.dask.scheduler=tcp://127.0.0.1:1", "launch.dask.timeout_s=1"]
    start = time.monotonic()
    with pytest.raises(LaunchError, match="tcp://127.0.0.1:1: the scheduler does not answer: Connection refused"):
        engine.start(planned(write_config(tmp_path, stripes), *words))
    assert time.monotonic() - start < 10
    waiting = "waiting for the Dask scheduler at tcp://127.0.0.1:1, up to 1 s: Connection refused"
    assert capsys.readouterr().err.splitlines() == [waiting]


@pytest.mark.parametrize(("sends", "reason"), [(b"", "sent nothing within 0.3 s"), (b"SSH-2.0-x", "sends b'SSH-2.0-'")])
def test_another_program_at_the_port_of_the_scheduler(tmp_path, stripes, monkeypatch, sends, reason):
    from harness.engines.dask import engine

    monkeypatch.setattr(engine, "_GREETING_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        words = [f"launch.dask.scheduler=tcp://127.0.0.1:{server.getsockname()[1]}", "launch.dask.timeout_s=20"]
        answered = pool.submit(lambda: (connection := server.accept()[0], connection.sendall(sends)))
        start = time.monotonic()
        with pytest.raises(LaunchError, match=f"the scheduler does not answer: .*{reason}.* not a Dask scheduler"):
            engine.start(planned(write_config(tmp_path, stripes), *words))
        assert time.monotonic() - start < 10
        answered.result()[0].close()


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
        with pytest.raises(LaunchError, match="1 rank of another run: room for 0"):
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
    tmp_path, stripes, unbroken, dask_cluster, mark, monkeypatch
):
    """The third start resumes from files that the client has, on workers that have none. After kill -9 of a worker and
    its nanny, their rank ends, and so do its peers."""
    settings = {"launch": {"nproc": 2, "dask": {"shared": False}}, "checkpoint": {"every_steps": 2}}
    config = write_config(tmp_path, stripes, model=SLOW, **CONSTANT, **settings)
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
    second = Running(dask_cluster.client, config, "launch.dask.shared=true", marking(mark))
    wait_for_steps(folder, steps + 1, START_S)
    worker = next(event["worker"] for event in second.events if event.get("rank") == 1 and "worker" in event)
    dask_cluster.kill_worker(worker)
    killed = time.monotonic()
    assert second.end(END_S).exit_code == 70
    wait_until(lambda: not marked(mark), END_S, "the rank that has lost its worker has ended")
    assert time.monotonic() - killed < END_S
    assert "failed: rank 1 on" in second.conclusion.text
    assert f"worker {worker} on " in second.conclusion.text
    before = scratch(dask_cluster)  # a killed worker cannot clean up

    third = Running(dask_cluster.client, config, marking(mark))
    assert third.end(START_S).exit_code == 0
    assert any("resumed from" in line for line in third.lines(0, "terminal"))
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
