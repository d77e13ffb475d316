"""Engine dask, on a real scheduler with real workers: the same weights as ever, one report, nobody left over."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from harness.engines import launch
from harness.engines.dask import reservation, worker_files
from harness.engines.dask import worker as dask_rank
from harness.errors import ConfigError, LaunchError
from harness.runs import rank_exit
from harness.runs.checkpoint import Checkpoints
from harness.runs.run_dir import RunFolder
from tests.conftest import ROOT
from tests.end_to_end.experiment import assert_same_run, run, write_config, write_images
from tests.end_to_end.processes import END_S, started, wait_for_steps, wait_until
from tests.engines.dask_cluster import START_S, Running, cluster, marked, ranks

pytest.importorskip("distributed", reason="engine dask needs dask.distributed: pip install 'apex-harness[dask]'")
MODELS = "tests.end_to_end.models"
SLOW, FAST = ({"name": f"{MODELS}.Slow", "args": {"step_s": step_s}} for step_s in (0.1, 0.0))
CONSTANT = {"schedule": {"name": "constant", "warmup_epochs": 0.0}}  # the rate is not to depend on the epochs
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
    """The run folder of two ranks that nobody disturbed, without Dask."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert run(write_config(folder, stripes, model=FAST, **CONSTANT), 2) == [0, 0]
    return folder / "runs" / "run"


@pytest.fixture
def mark():
    """For launch.env: whoever carries it is one of the test's ranks."""
    return secrets.token_hex(8)


def marking(mark):
    return f"launch.env={{HARNESS_TEST: {mark}}}"


# What it would do


def test_render(tmp_path, stripes):
    from harness.engines.dask import engine

    words = ["launch.nproc=2", "launch.dask.scheduler=tcp://10.0.0.1:8786", "launch.dask.resources={GPU: 1}"]
    text = engine.render(launch.plan(str(write_config(tmp_path, stripes)), words))
    assert text == (ROOT / "tests" / "engines" / "golden" / "dask.txt").read_text()


@pytest.mark.parametrize("word", ["min_nodes=1", "rendezvous=a:1", "node_rank=0", "max_restarts=1"])
def test_what_means_nothing_here(tmp_path, stripes, word):
    from harness.engines.dask import engine

    job = launch.plan(str(write_config(tmp_path, stripes)), [f"launch.{word}"])
    for call in (engine.render, engine.start):
        with pytest.raises(LaunchError, match="means nothing to engine dask"):
            call(job)


def test_a_worker_never_imports_torch():
    command = "import sys, harness.engines.dask.worker_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT, timeout=60, check=False).returncode == 0


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


def test_workers_are_claimed_all_or_none_and_by_one_run():
    there = scheduler(worker("b:1"), worker("a:1", threads=4), worker("c:1"))
    assert places(reservation.claim("one", "me", 2, {}, there)) == ["a:1", "b:1"]
    refused = reservation.claim("two", "other", 2, {}, there)
    assert refused["places"] == []
    assert [line for line in refused["seen"] if "1 rank(s) of another run: room for 0" in line]
    assert places(reservation.claim("three", "other", 1, {}, there)) == ["c:1"]
    reservation.release("one", there)
    assert places(reservation.claim("two", "other", 2, {}, there)) == ["a:1", "b:1"]
    there.clients = ("me",)  # what the other had claimed, it took along
    assert places(reservation.claim("four", "me", 3, {}, there)) == ["a:1", "b:1", "c:1"]


def test_busy_and_closing_workers_have_no_room():
    busy, mine = worker("a:1", tasks=["sum-1"]), worker("b:1", tasks=["apex-harness-0-rank-0"])
    there = scheduler(busy, mine, worker("c:1", status="closing_gracefully"), worker("d:1", threads=2, tasks=["sum-2"]))
    assert places(reservation.claim("one", "me", 2, {}, there)) == ["b:1", "d:1"]
    assert reservation.claim("two", "me", 1, {}, there)["places"] == []


def test_a_rank_a_gpu_and_workers_with_gpus_first():
    there = scheduler(worker("a:1"), worker("b:1", threads=8, GPU=2), worker("c:1", threads=1, GPU=4))
    found = reservation.claim("one", "me", 4, {}, there)
    assert found["places"] == [("b:1", {"GPU": 1}), ("b:1", {"GPU": 1}), ("c:1", {"GPU": 1}), ("a:1", {})]
    there = scheduler(worker("a:1"), worker("b:1", BIG=1.0), worker("c:1", threads=4, BIG=3.0))
    assert places(reservation.claim("one", "me", 2, {"BIG": 1.0}, there)) == ["b:1", "c:1"]
    assert reservation.claim("two", "me", 1, {"BIG": 1.0}, there)["places"] == []


def refusing(error):
    def run(*words, **options):
        raise error

    return SimpleNamespace(run=run, scheduler=SimpleNamespace(address="tcp://there:1"))


@pytest.mark.parametrize(
    ("error", "told"),
    [(ModuleNotFoundError("No module named 'harness'"), "install the project"), (ConnectionError("reset"), "reset")],
)
def test_a_worker_that_cannot_be_asked(error, told):
    from harness.engines.dask.placement import ask

    with pytest.raises(LaunchError, match=told):
        ask(refusing(error), dask_rank.look, "")


def test_workers_of_different_releases_are_refused(tmp_path, stripes):
    from harness.engines.dask import placement
    from harness.version import __version__

    def facts(**versions):
        known = {"harness": __version__, "torch": "2.15.0", "python": "3.11.7"}
        return {"host": "a", "devices": None, "sees": True, "versions": known | versions}

    seen = {"a:1": facts(), "b:1": facts()}
    there = SimpleNamespace(
        run_on_scheduler=lambda *words: {"places": [("b:1", {}), ("a:1", {})]}, run=lambda *words, workers: seen,
        scheduler=SimpleNamespace(address="tcp://there:1"), id="me",
    )  # fmt: skip
    job = launch.plan(str(write_config(tmp_path, stripes)), ["launch.nproc=2"])
    seats, shared = placement.find(there, job, "name", 0.0)
    assert [seat.worker for seat in seats] == ["a:1", "b:1"]
    assert shared
    for versions, told in (({"torch": "2.6.0"}, "b:1 has torch 2.6.0, others 2.15.0"), ({"harness": "0"}, "harness 0")):
        seen["b:1"] = facts(**versions)
        with pytest.raises(LaunchError, match=told):
            placement.find(there, job, "name", 0.0)
    seen["b:1"] = facts() | {"sees": False}
    assert placement.find(there, job, "name", 0.0)[1] is False
    job = launch.plan(str(write_config(tmp_path, stripes)), ["launch.nproc=2", "launch.dask.shared=true"])
    with pytest.raises(LaunchError, match="b:1 cannot see"):
        placement.find(there, job, "name", 0.0)


def test_a_path_a_dictionary_or_a_config_may_be_given(tmp_path, stripes):
    from harness.engines.dask import engine

    path = write_config(tmp_path, stripes, **TWO)
    jobs = [engine._job(each, ["train.epochs=2"]) for each in (path, str(path), yaml.safe_load(path.read_text()))]
    jobs.append(engine._job(jobs[0].config, []))
    assert all(job.config == jobs[0].config for job in jobs)
    assert jobs[0].world_size == jobs[0].config.train.epochs == 2
    with pytest.raises(LaunchError, match="asynchronous"):
        engine.run(SimpleNamespace(asynchronous=True), path)


def test_a_batch_that_cannot_be_dealt(tmp_path, stripes):
    from harness.engines.dask import engine

    with pytest.raises(ConfigError, match="8 examples cannot be divided among 3 ranks"):
        engine.run(SimpleNamespace(asynchronous=False), write_config(tmp_path, stripes), ["launch.nproc=3"])


@pytest.fixture
def placed(tmp_path, stripes, monkeypatch):
    """Two ranks that nobody has started, after a start that has left words."""
    from harness.engines.dask.cluster_run import Placed

    logs = tmp_path / "runs" / "run" / "logs"
    logs.mkdir(parents=True)
    rank_exit.leave(logs, 1, 7, 75, "stopped")
    monkeypatch.setattr(Placed, "_start", lambda self: None)
    job = launch.plan(str(write_config(tmp_path, stripes)), ["launch.nproc=2"])
    placed = Placed(SimpleNamespace(status="closed"), job, None, ExitStack())
    placed._seats = [None, None]
    return placed


def test_a_rank_that_has_lost_its_worker_runs_until_it_has_left_its_own_words(tmp_path, placed):
    placed._lose([1], "worker b:1 is gone")
    assert placed._is_running(1)
    rank_exit.leave(tmp_path / "runs" / "run" / "logs", 1, 9, 75, "stopped")
    assert not placed._is_running(1)
    placed._exits[0] = 70
    outcome = placed.follow()
    assert (outcome.lost, outcome.lost_rank) == ("worker b:1 is gone", 1)


# Files, without a disk in common


def test_results_of_two_starts_do_not_come_home_to_one_folder(placed, monkeypatch):
    monkeypatch.setattr("harness.runs.run_dir._HOLD_S", 0.0)
    other = RunFolder(placed._job.folder)
    placed._send(SimpleNamespace(send=lambda foreign: None))
    with pytest.raises(ConfigError, match="another start"):
        other.hold()
    following = threading.Thread(target=placed._clear)  # as whoever follows it does
    following.start()
    following.join(10)
    other.hold()
    other.release()


class Disks:
    """Stands for a client of workers whose disks are folders; ``break_at`` counts down to a connection that breaks."""

    def __init__(self, **disks: Path) -> None:
        self._workers = {name: SimpleNamespace(local_directory=disk) for name, disk in disks.items()}
        self.alive, self.break_at = set(disks), -1

    def nthreads(self, workers):
        return {name: 1 for name in workers if name in self.alive}

    def run(self, function, job, *words, workers):
        self.break_at -= 1
        if self.break_at == 0:
            raise ConnectionError("the connection broke")
        return {name: asyncio.run(function(job, *words, dask_worker=self._workers[name])) for name in workers}


@pytest.fixture
def apart(tmp_path):
    """The run folder at home, that of rank 0 and that of rank 1, and what stands between them."""
    from harness.engines.dask.file_sync import Home

    disks = Disks(one=tmp_path / "one", two=tmp_path / "two")
    home = Home(disks, "job", tmp_path / "run", 2, {"one": [0], "two": [1]})
    folders = [tmp_path / "run", *(tmp_path / disk / "apex-harness-job/output/run" for disk in ("one", "two"))]
    for folder in folders:
        folder.mkdir(parents=True)
    return SimpleNamespace(disks=disks, home=home, folders=folders)


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def save(folder: Path, step: int, **content) -> None:
    (folder / "checkpoints").mkdir(exist_ok=True)
    Checkpoints(folder / "checkpoints", 2).write(step, {"state": {"step": step}, **content})


def test_files_come_home_as_they_grow(apart):
    home, first, second = apart.folders
    write(first, "metrics.jsonl", "one\n")
    write(first, "config.yaml", "of the worker")
    write(first, "summary.json.tmp", "half")
    write(second, "metrics.jsonl", "not the record")
    for text in ("a\n", "a\nb\n", "x\ny\nz\n", "x\n"):  # grown, written anew, cut
        write(first, "metrics.jsonl", text)
        write(second, "logs/rank-1.log", text)
        apart.home.fetch(["one", "two"])
        assert (home / "metrics.jsonl").read_text() == (home / "logs" / "rank-1.log").read_text() == text
    assert {path.name for path in home.rglob("*") if path.is_file()} == {"metrics.jsonl", "rank-1.log"}


def test_large_files_come_in_chunks(apart, monkeypatch):
    monkeypatch.setattr(worker_files, "CHUNK_BYTES", 1000)
    home, first, _ = apart.folders
    for size in (2500, 4000, 3000, 0):
        (first / "weights.safetensors").write_bytes(os.urandom(size))
        apart.home.fetch(["one"])
        assert (home / "weights.safetensors").read_bytes() == (first / "weights.safetensors").read_bytes()


def test_a_checkpoint_comes_whole_wherever_the_connection_breaks(apart):
    home, first, _ = apart.folders
    at_home = Checkpoints(home / "checkpoints", 2)
    save(first, 10)
    apart.home.fetch(["one"])
    for before, step in ((10, 20), (20, 30), (30, 40)):
        save(first, step)
        for breaks in itertools.count(1):
            apart.disks.break_at = breaks
            with suppress(ConnectionError):
                apart.home.fetch(["one"])
            found = at_home.newest()
            assert found is not None  # whole, as ``newest`` makes sure
            if apart.disks.break_at > 0:
                break
            assert found.name in (f"step-{before}", f"step-{step}")
        assert breaks > 5
        assert found.name == f"step-{step}"
    assert {path.name for path in (home / "checkpoints").iterdir()} == {"step-30", "step-40", "latest"}


def test_a_damaged_checkpoint_stays_away(apart):
    home, first, _ = apart.folders
    save(first, 10)
    (first / "checkpoints" / "step-10" / "state.pt").write_bytes(b"half")
    apart.home.fetch(["one"])
    assert list((home / "checkpoints").iterdir()) == []


def test_what_a_resume_needs_is_sent(apart):
    home, first, second = apart.folders
    for step in (10, 20, 30):
        save(home, step)
    write(home, "checkpoints/best", "step-20\n")
    for name in ("metrics.jsonl", "failure.json", "config.yaml", "logs/rank-0.log", "logs/rank-1.log", "events/a"):
        write(home, name, name)
    apart.home.send(None)

    def names(folder):
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    newest = {"checkpoints/step-30/state.pt", "checkpoints/step-30/manifest.json"}
    best = {"checkpoints/step-20/state.pt", "checkpoints/step-20/manifest.json"}
    assert names(second) == {*newest, "logs/rank-1.log"}
    pointers = {"checkpoints/latest", "checkpoints/best"}
    assert names(first) == {*newest, *best, *pointers, "metrics.jsonl", "events/a", "logs/rank-0.log"}
    assert Checkpoints(first / "checkpoints", 2).newest().name == "step-30"


def test_a_checkpoint_of_another_run_is_sent_to_all(apart, tmp_path):
    save(tmp_path / "one", 7)
    apart.home.send(tmp_path / "one" / "checkpoints" / "step-7")
    for disk in ("one", "two"):
        sent = tmp_path / disk / "apex-harness-job" / "from"
        assert {path.name for path in sent.iterdir()} == {"state.pt", "manifest.json"}


def test_the_failure_that_tells_more_is_kept(apart):
    home, first, second = apart.folders
    write(first, "failure.json", json.dumps({"rank": 0, "message": "lost contact with the other ranks: closed"}))
    apart.home.fetch(["one", "two"])
    assert json.loads((home / "failure.json").read_text())["rank"] == 0
    write(second, "failure.json", json.dumps({"rank": 1, "message": "division by zero"}))
    apart.home.fetch(["one", "two"])
    assert json.loads((home / "failure.json").read_text())["rank"] == 1


def test_a_worker_that_was_started_anew_has_nothing(apart):
    home, first, second = apart.folders
    shutil.rmtree(first.parents[1])
    write(second, "logs/rank-1.log", "a\n")
    apart.home.fetch(["one", "two"])
    assert [path.name for path in home.rglob("*") if path.is_file()] == ["rank-1.log"]


def test_a_worker_that_is_gone_is_not_waited_for(apart):
    apart.disks.alive = {"two"}
    with pytest.raises(ConnectionError, match="worker one is gone"):
        apart.home.fetch(["one", "two"])


def test_lines_are_told_once_each(tmp_path):
    path = tmp_path / "log"
    path.write_text("before\n")
    tail = dask_rank.Tail(path)
    assert tail.read() == []
    with open(path, "a") as file:
        file.write("one\ntwo\nhal")
    assert tail.read() == ["one", "two"]
    assert tail.read() == []
    with open(path, "a") as file:
        file.write("f\n")
    assert tail.read() == ["half"]
    shutil.copy(path, tmp_path / "other")
    path.write_text("new\n")  # cut, and written on
    assert tail.read() == []
    with open(path, "a") as file:
        file.write("more\n")
    assert tail.read() == ["more"]
    assert dask_rank.Tail(tmp_path / "absent").read() == []


# On a cluster


@pytest.fixture
def others_task(tmp_path, dask_cluster):
    """Somebody else's work on the cluster, which ends when the test does: (future, what ends it)."""
    flag = tmp_path / "flag"
    flag.touch()
    waiting = ["sh", "-c", f"while [ -e {flag} ]; do sleep 0.1; done"]
    future = dask_cluster.client.submit(subprocess.run, waiting, pure=False)
    wait_until(lambda: any(dask_cluster.client.processing().values()), START_S, "the other task runs")
    yield future, flag.unlink
    flag.unlink(missing_ok=True)


@pytest.mark.slow
def test_the_same_weights_again_and_again(tmp_path, stripes, unbroken, dask_cluster, others_task, mark):
    """Two submissions of one configuration, the second for more epochs: each trains, and together they are one run.
    Other work on the cluster goes on meanwhile."""
    content = yaml.safe_load(write_config(tmp_path, stripes, model=FAST, **CONSTANT, **TWO).read_text())
    first = Running(dask_cluster.client, content, "train.epochs=1", marking(mark))
    assert first.end(START_S).exit_code == 0
    second = Running(dask_cluster.client, content, marking(mark))
    assert second.end(START_S).exit_code == 0
    assert "done: " in second.conclusion.text
    assert not marked(mark)
    assert_same_run(unbroken, tmp_path / "runs" / "run")
    assert json.loads([line for line in second.lines(0, "metrics.jsonl") if '"train"' in line][-1])["step"] == 24
    assert any("24 in all" in line for line in second.lines(0, "terminal"))
    assert second.lines(1, "logs/rank-1.log")
    future, end = others_task
    assert future.status == "pending"
    end()
    assert future.result(END_S).returncode == 0


@pytest.mark.slow
def test_killed_rank_and_an_exact_restart_without_a_disk_in_common(tmp_path, stripes, unbroken, dask_cluster, mark):
    """What the second start goes on from has come home, and is sent to workers that have nothing."""
    settings = {"launch": {"nproc": 2, "dask": {"shared": False}}, "checkpoint": {"every_steps": 2}}
    config = write_config(tmp_path, stripes, model=SLOW, **CONSTANT, **settings)
    folder = tmp_path / "runs" / "run"
    first = Running(dask_cluster.client, config, marking(mark))
    wait_until((folder / "checkpoints" / "latest").exists, START_S, "a checkpoint at home")
    os.kill(ranks(mark)[1], signal.SIGKILL)
    killed = time.monotonic()
    assert first.end(END_S).exit_code == 70
    assert time.monotonic() - killed < END_S
    assert "failed: rank 1 at step" in first.conclusion.text
    assert "Killed: it died of SIGKILL" in first.conclusion.text
    assert "rank 0: failed on" in first.conclusion.text
    assert not marked(mark)
    assert not scratch(dask_cluster)
    second = Running(dask_cluster.client, config, marking(mark))
    assert second.end(START_S).exit_code == 0
    assert any("resumed from" in line for line in second.lines(0, "terminal"))
    assert_same_run(unbroken, folder)
    assert not scratch(dask_cluster)
    assert len((folder / "logs" / "rank-1.log").read_text().split("resumed from")) == 2


@pytest.mark.slow
def test_exception_on_rank_1(tmp_path, stripes, dask_cluster, mark, capfd):
    model = {"name": f"{MODELS}.Raises", "args": {"rank": 1, "step": 11}}
    run_ = Running(dask_cluster.client, write_config(tmp_path, stripes, model=model, **TWO), marking(mark))
    text = run_.end(START_S).text
    assert run_.conclusion.exit_code == 70
    assert capfd.readouterr().err.count("Traceback") == 1
    assert "failed: rank 1 on" in text
    assert "at step 10: ArithmeticError: a layer went wrong, only here" in text
    assert "  rank 0: " in text
    assert set(json.loads((tmp_path / "runs" / "run" / "failure.json").read_text())["ranks"]) == {"0", "1"}
    assert not marked(mark)


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
        engine.start(launch.plan(str(config), words))
    assert "5 rank(s) need 5 worker(s) with a free thread" in str(refused.value)
    assert str(refused.value).count("1 thread(s), running: room for 1") == 3
    assert not list(tmp_path.glob("runs/*"))
    with pytest.raises(LaunchError, match="that have {'GPU': 1.0} each"):
        engine.run(dask_cluster.client, config, ["launch.dask.timeout_s=1", "launch.dask.resources={GPU: 1.0}"])


@pytest.mark.slow
def test_a_scheduler_that_is_not_there(tmp_path, stripes):
    from harness.engines.dask import engine

    words = ["launch.dask.scheduler=tcp://127.0.0.1:1", "launch.dask.timeout_s=1"]
    with pytest.raises(LaunchError, match="tcp://127.0.0.1:1: the scheduler does not answer"):
        engine.start(launch.plan(str(write_config(tmp_path, stripes)), words))


@pytest.mark.slow
def test_two_runs_at_once_and_a_killed_client(tmp_path, stripes, dask_cluster):
    """Two runs hold workers of their own; a third one that needs two has to wait. When a client dies, its ranks end,
    and its workers are free; the other run is stopped by its own client, with a checkpoint."""
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
        with pytest.raises(LaunchError, match="1 rank.s. of another run: room for 0"):
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
def test_killed_worker_and_an_exact_restart_on_others(tmp_path, stripes, unbroken, dask_cluster, mark):
    """kill -9 of a worker and of its nanny: its rank does not outlive it, and its peers end."""
    config = write_config(tmp_path, stripes, model=SLOW, **CONSTANT, **TWO)
    folder = tmp_path / "runs" / "run"
    first = Running(dask_cluster.client, config, marking(mark))
    wait_for_steps(folder, 2, START_S)
    worker = next(event["worker"] for event in first.events if event.get("rank") == 1 and "worker" in event)
    dask_cluster.kill_worker(worker)
    killed = time.monotonic()
    assert first.end(END_S).exit_code == 70
    wait_until(lambda: not marked(mark), END_S, "the rank that has lost its worker has left Python, too")
    assert time.monotonic() - killed < END_S
    assert "failed: rank 1 on" in first.conclusion.text
    assert f"worker {worker} on " in first.conclusion.text
    second = Running(dask_cluster.client, config, marking(mark))
    assert second.end(START_S).exit_code == 0
    assert_same_run(unbroken, folder)


@pytest.mark.slow
def test_lost_scheduler(tmp_path, stripes, dask_cluster, mark):
    """Stays behind all tests that use the cluster: it has none any more after this."""
    config = write_config(tmp_path, stripes, model=SLOW, train={"epochs": 1000})
    run_ = Running(dask_cluster.client, config, marking(mark))
    wait_for_steps(tmp_path / "runs" / "run", 1, START_S)
    dask_cluster.scheduler.signal(signal.SIGKILL)
    assert run_.end(END_S).exit_code == 70
    assert f"the scheduler {dask_cluster.address} is gone" in run_.conclusion.text
    wait_until(lambda: not marked(mark), END_S, "no rank left")


@pytest.mark.slow
def test_interrupt_in_a_terminal_of_a_cluster_for_the_run_alone(tmp_path, stripes):
    """A terminal sends Ctrl-C to all processes of its job: also to the workers, which must not die of it."""
    config = write_config(tmp_path, stripes, model=SLOW, train={"epochs": 1000})
    with started([sys.executable, "-m", "harness", "launch", "-c", config, "--engine", "dask", "--nproc", "2"],
                 tmp_path / "terminal.txt") as run_:  # fmt: skip
        wait_for_steps(tmp_path / "runs" / "run", 1, START_S)
        os.killpg(run_.process.pid, signal.SIGINT)
        assert run_.wait(END_S) == 75
        assert not run_.ranks()
        wait_until(lambda: not run_.alive(), 10, "multiprocessing's resource tracker ends by itself")
    assert "stopped early with a checkpoint" in run_.text().splitlines()[-1]


def scratch(there) -> list[Path]:
    """What runs have left on the workers' disks."""
    return list(there.folder.glob("disk-*/**/apex-harness-*"))
