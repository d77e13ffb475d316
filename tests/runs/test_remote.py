"""A run folder at a URL, without training: what is uploaded, what a start downloads, who may write, and any kill."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from harness.config import loader
from harness.config.schema import Config
from harness.errors import CheckpointError, ConfigError
from harness.runs import borrowed, layout, remote, run_dir, uploader
from harness.runs.checkpoint import damage
from harness.runs.checkpoints import read
from harness.runs.fetched import local_copy, require_out
from harness.runs.remote import RemoteRunFolder
from harness.runs.uploader import UploadTakenOver

URL = "memory://bucket/runs"


@pytest.fixture(autouse=True)
def bucket(monkeypatch):
    monkeypatch.setattr(uploader, "MAX_PAUSE_S", 0.01)
    memory = fsspec.filesystem("memory")
    yield memory
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


@pytest.fixture
def config(tmp_path):
    def make(cache: str = "cache", **settings: object) -> Config:
        path = tmp_path / "config.yaml"
        path.write_text(
            f"name: digits\noutput: {URL}\nbatch: {{global: 8}}\ncheckpoint: {{keep: 2}}\n"
            f"data: {{cache_dir: {tmp_path / cache}}}\n"
            "task: {name: image_csv, train_csv: a.csv, eval_csv: b.csv}\n"
        )
        return loader.load(path, [f"{key}={value}" for key, value in settings.items()])

    return make


def run_folder(config: Config) -> RemoteRunFolder:
    return RemoteRunFolder(config)


def started(config: Config) -> RemoteRunFolder:
    folder = run_folder(config)
    folder.claim(config)
    folder.attach(0, folder.start)
    return folder


def save(folder: RemoteRunFolder, *steps: int, wait: bool = True) -> None:
    """Write a line of the log and a checkpoint per step, and upload them."""
    for step in steps:
        with open(folder.metrics, "a") as file:
            file.write(f'{{"step": {step}}}\n')
        folder.checkpoints.write(step, {"lines": folder.metrics.read_text().count("\n")})
        folder.publish()
        if wait:
            folder.wait_published()


def uploaded(bucket: MemoryFileSystem, run: str = "digits") -> dict[str, bytes]:
    found = bucket.find(f"/bucket/runs/{run}")
    return {path.removeprefix(f"/bucket/runs/{run}/"): bucket.cat(path) for path in found}


def steps(bucket: MemoryFileSystem) -> set[str]:
    return {name.split("/")[1] for name in uploaded(bucket) if name.startswith("checkpoints/step-")}


# Uploading and resuming


def test_memory_is_no_place_for_a_run(config):
    with pytest.raises(ConfigError, match="memory://bucket/runs exists only in memory"):
        remote.run_folder(config())


def test_a_run_is_resumed_from_the_url_alone(config, bucket, tmp_path):
    folder = started(config())
    copy = f"{layout.of_hub('bert')}/config.json"
    (folder.path / copy).parent.mkdir(parents=True)
    (folder.path / copy).write_text("{}")
    save(folder, 1, 2, 3, 4)
    assert steps(bucket) == {"step-3", "step-4"}  # as many as are kept
    (folder.logs / "rank-0.log").write_text("a log\n")
    folder.detach(0, done=False)
    shutil.rmtree(tmp_path / "cache")
    again = started(config())
    assert again.checkpoints.newest() == again.checkpoints.folder / "step-4"
    assert again.metrics.read_text().count("\n") == 4
    assert (again.logs / "rank-0.log").read_text() == "a log\n"
    other = run_folder(config("other"))  # another machine
    other.attach(1, again.start)
    assert read(other.checkpoints.folder / "step-4") == read(again.checkpoints.folder / "step-4")
    assert (again.path / copy).read_text() == (other.path / copy).read_text() == "{}"
    assert not other.metrics.exists()


def test_files_are_uploaded_in_the_order_that_keeps_the_url_resumable(config, monkeypatch):
    folder, order = started(config()), []
    real = MemoryFileSystem.pipe_file, MemoryFileSystem.put_file
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda *a, **k: (order.append(a[1]), real[0](*a, **k)))
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *a, **k: (order.append(a[2]), real[1](*a, **k)))
    for file in (folder.weights, folder.path / "summary.json", folder.checkpoints.folder / "best"):
        file.write_text("step-7\n")
    save(folder, 7)
    names = [path.partition("/digits/")[2] for path in dict.fromkeys(order)]
    step = "checkpoints/step-7"
    pointers = ["checkpoints/best", "checkpoints/latest"]
    assert names[-4:] == [f"{step}/state.pt", f"{step}/manifest.json", *pointers]
    assert {"summary.json", "metrics.jsonl", "weights.safetensors"} == set(names[:-4])


def test_a_checkpoint_on_its_way_is_not_removed(config, bucket, monkeypatch):
    """Training writes more checkpoints than it keeps while a slow upload takes place."""
    folder = started(config())
    real, reached, resume = MemoryFileSystem.put_file, threading.Event(), threading.Event()

    def slow(self, source, target, **options):
        if target.endswith("step-1/state.pt"):
            reached.set()
            assert resume.wait(20)
        real(self, source, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", slow)
    save(folder, 1, wait=False)
    assert reached.wait(20)
    save(folder, 2, 3, 4, wait=False)
    assert damage(folder.checkpoints.folder / "step-1") is None
    resume.set()
    folder.wait_published()
    assert steps(bucket) == {"step-1", "step-4"}  # those between were superseded
    assert uploaded(bucket)["checkpoints/latest"] == b"step-4\n"
    save(folder, 5)
    assert {path.name for path in folder.checkpoints.folder.glob("step-*")} == {"step-4", "step-5"}


def test_the_best_checkpoint_is_kept_at_the_url(config, bucket):
    folder = started(config())
    save(folder, 1)
    folder.checkpoints.mark_best(1, {}, folder.weights)
    save(folder, 2, 3, 4)
    assert steps(bucket) == {"step-1", "step-3", "step-4"}
    again = started(config("other"))  # downloads the newest alone
    save(again, 5)
    assert steps(bucket) == {"step-1", "step-4", "step-5"}


@pytest.mark.parametrize("kind", ["cut", "no manifest", "gone", "latest names nothing", "latest leads elsewhere"])
def test_a_run_whose_newest_checkpoint_is_damaged_is_not_continued(config, bucket, kind):
    save(started(config()), 1, 2)
    last, latest = "/bucket/runs/digits/checkpoints/step-2", "/bucket/runs/digits/checkpoints/latest"
    if kind == "cut":
        bucket.pipe(f"{last}/state.pt", bucket.cat(f"{last}/state.pt")[:-10])
    elif kind == "no manifest":
        bucket.rm(f"{last}/manifest.json")
    elif kind == "gone":
        bucket.rm(last, recursive=True)
    else:
        bucket.pipe(latest, b"step-x\n" if kind == "latest names nothing" else b"../../../elsewhere\n")
    before = uploaded(bucket)
    with pytest.raises(
        CheckpointError, match="newest checkpoint of this run cannot be used(.|\n)*resume=never"
    ) as caught:
        started(config("other"))
    after = uploaded(bucket)
    assert after.pop("start.json") != before.pop("start.json")  # of this start
    assert after == before
    earlier = f"{URL}/digits/checkpoints/step-1"
    assert f"checkpoint.resume={URL}/digits/checkpoints/step-N" in caught.value.hint
    assert read(borrowed.borrow(config("other", **{"checkpoint.resume": earlier})))["lines"] == 1
    again = run_folder(never := config("other", **{"checkpoint.resume": "never"}))
    assert again.claim(never) == f"the earlier run was moved to {URL}/digits.1: checkpoint.resume=never"
    assert uploaded(bucket, "digits.1")["metrics.jsonl"] == before["metrics.jsonl"]


def test_results_without_a_checkpoint_are_moved_aside(config, bucket):
    folder = started(config())
    folder.weights.write_text("weights")
    save(folder, 1)
    bucket.rm("/bucket/runs/digits/checkpoints", recursive=True)
    again = run_folder(config("other"))
    assert again.claim(config("other")).endswith("digits.1: it has results, but no checkpoint to resume from")
    assert uploaded(bucket, "digits.1")["weights.safetensors"] == b"weights"


def test_the_scratch_folder_never_outweighs_the_url(config):
    """It may be newer, after a kill, or damaged: each start fills it from the URL."""
    folder = started(config())
    save(folder, 1)
    folder.checkpoints.write(2, {})
    folder.metrics.unlink()
    again = started(config())
    assert again.checkpoints.newest() == again.checkpoints.folder / "step-1"
    assert not (again.checkpoints.folder / "step-2").exists()
    assert again.metrics.exists()


# Two starts


def test_an_earlier_start_leaves_the_url_to_the_later_one(config, bucket):
    """A machine that was thought dead continues."""
    earlier = started(config())
    save(earlier, 1)
    later = started(config("elsewhere"))
    with pytest.raises(CheckpointError, match="only the newer start may upload its results"):
        save(earlier, 2)
    with pytest.raises(CheckpointError, match="only the newer start may upload its results"):
        earlier.publish()
    save(later, 2)
    before = uploaded(bucket)
    earlier.detach(0, done=True)
    assert uploaded(bucket) == before


def test_a_start_ends_when_its_run_was_removed(config, bucket):
    folder = started(config())
    bucket.rm("/bucket/runs/digits", recursive=True)
    with pytest.raises(CheckpointError, match="the run was removed: its start.json is missing"):
        save(folder, 1)


def test_a_start_that_is_taken_over_during_an_upload(config, bucket, monkeypatch):
    earlier, real = started(config()), MemoryFileSystem.put_file
    later = run_folder(config("elsewhere"))

    def slow(self, source, target, **options):
        real(self, source, target, **options)
        if target.endswith("state.pt"):
            monkeypatch.setattr(MemoryFileSystem, "put_file", real)
            later.claim(config("elsewhere"))

    monkeypatch.setattr(MemoryFileSystem, "put_file", slow)
    with pytest.raises(CheckpointError, match="only the newer start may upload its results"):
        save(earlier, 1)
    assert "checkpoints/latest" not in uploaded(bucket)


def test_one_start_at_a_time_on_a_machine(config, monkeypatch):
    monkeypatch.setattr(run_dir, "_LOCK_S", 0.1)
    first, second = run_folder(config()), run_folder(config())
    first.lock()
    with pytest.raises(ConfigError, match=f"{URL}/digits: another process is already training in this run folder"):
        second.lock()
    run_folder(config("elsewhere")).lock()  # another machine takes the run over
    first.unlock()
    second.lock()


# Stores that fail


def test_results_that_cannot_be_uploaded_are_an_error(config, bucket, monkeypatch):
    folder = started(config())

    def unreachable(self, *args, **options):
        raise ConnectionError("the network is down")

    with monkeypatch.context() as broken:
        broken.setattr(MemoryFileSystem, "put_file", unreachable)
        with pytest.raises(CheckpointError, match="the network is down") as caught:
            save(folder, 1)
        assert str(folder.path) in caught.value.hint
    folder.wait_published()  # the network is back
    assert uploaded(bucket)["checkpoints/latest"] == b"step-1\n"


def test_a_store_that_may_not_be_written(config, monkeypatch):
    def refuse(self, *args, **options):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(ConfigError, match="Access Denied"):
        started(config())


# Moving an earlier run aside


def test_another_recipe_moves_the_run_aside(config, bucket):
    save(started(config()), 1)
    before = uploaded(bucket)
    other = run_folder(config(**{"optimizer.lr": 0.5}))
    note = other.claim(config(**{"optimizer.lr": 0.5}))
    assert note == f"the earlier run was moved to {URL}/digits.1: its recipe differs (optimizer.lr 0.1 -> 0.5)"
    assert uploaded(bucket, "digits.1") == before
    assert set(uploaded(bucket)) == {"config.yaml", "start.json"}
    assert not list(other.checkpoints.folder.iterdir())
    again = config(**{"optimizer.lr": 0.5, "checkpoint.resume": "never"})
    assert other.claim(again).startswith(f"the earlier run was moved to {URL}/digits.2")


def test_a_run_that_cannot_start_moves_nothing(config, bucket):
    save(started(config()), 1)
    before = uploaded(bucket)

    def rehearse() -> None:
        raise ConfigError("too few rows")

    other = config(**{"optimizer.lr": 0.5})
    with pytest.raises(ConfigError, match="too few rows"):
        run_folder(other).claim(other, rehearse)
    assert uploaded(bucket) == before
    assert not bucket.exists("/bucket/runs/digits.1")


def test_an_error_of_the_users_code_is_no_error_of_the_cache(config, bucket):
    save(started(config()), 1)

    def rehearse() -> None:
        Path("no_such_file_of_the_model").read_text()

    other = config(**{"optimizer.lr": 0.5})
    with pytest.raises(FileNotFoundError, match="no_such_file_of_the_model"):
        run_folder(other).claim(other, rehearse)
    started(config())  # the lock is free


# Checkpoints of other runs, the end of a run, and reading results


def test_a_checkpoint_at_another_url(config, bucket):
    save(started(config("elsewhere", name="other")), 7)
    named = config(**{"checkpoint.resume": f"{URL}/other/checkpoints/step-7"})
    path = borrowed.borrow(named)
    assert damage(path) is None
    (path / "state.pt").write_bytes(b"half")  # of the local copy
    assert borrowed.borrow(named) == path
    assert damage(path) is None
    bucket.pipe("/bucket/runs/other/checkpoints/step-7/manifest.json", b"{}")
    with pytest.raises(CheckpointError, match="manifest.json cannot be used"):
        borrowed.borrow(named)
    bucket.rm("/bucket/runs/other", recursive=True)
    with pytest.raises(ConfigError, match="there is no checkpoint there"):
        borrowed.borrow(named)


def test_a_finished_run_leaves_nothing_in_the_cache(config, bucket, tmp_path):
    folder = started(config())
    save(folder, 1)
    for rank in (0, 1):
        (folder.logs / f"rank-{rank}.log").write_text(f"log of {rank}")
    folder.wait_published()
    folder.detach(0, done=True)
    assert folder.path.exists()  # rank 1 still runs
    peer = run_folder(config())
    peer.start = folder.start
    peer.detach(1, done=True)
    assert not folder.path.exists()
    assert uploaded(bucket)["logs/rank-1.log"] == b"log of 1"


def test_results_that_are_not_uploaded_in_time_are_told(config, bucket, monkeypatch, caplog):
    folder = started(config())
    save(folder, 1)
    (folder.path / "predictions.csv").write_text("late")
    monkeypatch.setattr(folder._uploader, "wait", lambda limit_s: False)
    folder.detach(0, done=True)
    assert f"not uploaded to {folder.where} within 5 s; until the next start they are in {folder.path}" in caplog.text
    assert (folder.path / "predictions.csv").exists()


def test_the_failure_of_the_first_rank_is_uploaded(config, bucket):
    folder = started(config())
    peer = run_folder(config("other"))
    peer.attach(1, folder.start)
    report = {"rank": 1, "message": "a layer went wrong"}
    (peer.path / "failure.json").write_text(json.dumps(report))
    (folder.path / "failure.json").write_text(json.dumps({**report, "message": "rank 1 has failed"}))
    peer.detach(1, done=False)
    folder.detach(0, done=False)
    assert json.loads(uploaded(bucket)["failure.json"]) == report
    started(config())
    assert "failure.json" not in uploaded(bucket)


def test_results_are_read_from_the_url(config, bucket, monkeypatch, tmp_path):
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "mine"))
    folder = started(config())
    folder.weights.write_text("weights")
    save(folder, 1)
    downloaded, real = [], MemoryFileSystem.get_file
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda *a, **k: (downloaded.append(a[1]), real(*a, **k)))
    run = local_copy(f"{URL}/digits")
    assert (run.name, (run / "weights.safetensors").read_text()) == ("digits", "weights")
    assert not (run / "checkpoints").exists()
    before = len(downloaded)
    assert local_copy(f"{URL}/digits") == run
    assert len(downloaded) == before  # nothing has changed
    folder.weights.write_text("better")
    folder.wait_published()
    assert (local_copy(f"{URL}/digits") / "weights.safetensors").read_text() == "better"
    saved = local_copy(f"{URL}/digits", checkpoint=True) / "checkpoints" / "step-1" / "state.pt"
    local_copy(f"{URL}/digits")  # by another command, while the first one reads
    assert saved.exists()
    assert local_copy(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="this is not a run"):
        local_copy(f"{URL}/letters")
    with pytest.raises(ConfigError, match="results cannot be written to a run at a URL"):
        require_out(f"{URL}/digits", None, "report.html")


# A kill, or another start, at each single operation of the store

OPERATIONS = ("find", "cat_file", "pipe_file", "put_file", "get_file", "cp_file", "rm_file")


class Killed(BaseException):
    """Ends a call as a kill would: no handler for errors sees it."""


def kill() -> None:
    raise Killed


def at_each_operation(monkeypatch, event: Callable[[], None], prepare: Callable[[], Callable[[], object]]) -> Iterator:
    """Call what ``prepare`` returns again and again, with ``event`` before its first operation of the store, before its
    second, and so on. Yields after each call."""
    for number in itertools.count():
        call = prepare()
        left, reached = number, False

        def counted(real):
            def operation(*args, **options):
                nonlocal left, reached
                left -= 1
                if left == -1:
                    reached = True
                    event()
                return real(*args, **options)

            return operation

        with monkeypatch.context() as patch:
            for name in OPERATIONS:
                patch.setattr(MemoryFileSystem, name, counted(getattr(MemoryFileSystem, name)))
            with suppress(Killed, UploadTakenOver):
                call()
        yield number
        if not reached:
            assert number > 3
            return


def write(folder: RemoteRunFolder, step: int, best: bool = False) -> None:
    """What training writes at a step, in its order."""
    with open(folder.metrics, "a") as file:
        file.write(f'{{"step": {step}}}\n')
    if best:
        folder.checkpoints.mark_best(step, {}, folder.weights)
    folder.checkpoints.write(step, {"lines": folder.metrics.read_text().count("\n")})


def trained(config: Config, bucket: MemoryFileSystem, *steps: int) -> RemoteRunFolder:
    """A fresh run, with its checkpoints uploaded; the first is the best."""
    if bucket.exists("/bucket"):
        bucket.rm("/bucket", recursive=True)
    folder = started(config)
    for step in steps:
        write(folder, step, best=step == steps[0])
        folder._upload()
    return folder


def check_pointers(bucket: MemoryFileSystem, tmp_path, run: str = "digits") -> None:
    """`latest` and `best` name complete checkpoints, and the log is as long as `latest` expects."""
    found = uploaded(bucket, run)
    shutil.rmtree(tmp_path / "seen", ignore_errors=True)
    for name, content in found.items():
        path = tmp_path / "seen" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for pointer in ("latest", "best"):
        if name := found.get(f"checkpoints/{pointer}", b"").decode().strip():
            assert damage(tmp_path / "seen/checkpoints" / name) is None, (pointer, name, sorted(found))
            if pointer == "latest":
                assert found["metrics.jsonl"].count(b"\n") >= read(tmp_path / "seen/checkpoints" / name)["lines"]


def resumed_step(folder: RemoteRunFolder) -> int:
    """The step that ``folder`` resumes from, with a log that is long enough."""
    newest = folder.checkpoints.newest()
    assert newest is not None
    assert folder.metrics.read_text().count("\n") >= read(newest)["lines"]
    return int(newest.name.removeprefix("step-"))


@pytest.mark.parametrize("best", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kill_during_an_upload(config, bucket, monkeypatch, tmp_path, best):
    def prepare():
        folder = trained(config(), bucket, 1, 2, 3)
        write(folder, 4, best)
        return folder._upload

    for _ in at_each_operation(monkeypatch, kill, prepare):
        check_pointers(bucket, tmp_path)
        again = started(config("elsewhere"))
        assert resumed_step(again) in (3, 4)
        check_pointers(bucket, tmp_path)
        write(again, 5)
        again._upload()
        check_pointers(bucket, tmp_path)
        states = {name.split("/")[1] for name in uploaded(bucket) if name.endswith(("state.pt", "manifest.json"))}
        assert len(states) <= 3  # two newest and the best: nothing incomplete is left


def test_kill_before_the_best_checkpoint_is_uploaded(config, bucket, monkeypatch, tmp_path):
    """An evaluation writes the best weights and the summary before the checkpoint of its step."""

    def prepare():
        folder = trained(config(), bucket, 1, 2, 3)
        folder.checkpoints.mark_best(4, {}, folder.weights)
        return folder._upload

    for _ in at_each_operation(monkeypatch, kill, prepare):
        check_pointers(bucket, tmp_path)


def test_a_start_removes_what_a_kill_left_half_written(config, tmp_path):
    folder = started(config(output=f"file://{tmp_path}/runs"))
    save(folder, 1)
    whole = set((tmp_path / "runs").rglob("*"))
    for name in ("checkpoints/latest.1a2b.part", "checkpoints/step-2/state.pt.part", "metrics.jsonl.part"):
        path = tmp_path / "runs/digits" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("torn")
    assert resumed_step(started(config("elsewhere", output=f"file://{tmp_path}/runs"))) == 1
    assert set((tmp_path / "runs").rglob("*")) == whole


@pytest.mark.slow
def test_kill_while_a_start_takes_over(config, bucket, monkeypatch, tmp_path):
    def prepare():
        trained(config(), bucket, 1, 2, 3)
        return lambda: started(config("elsewhere"))

    for _ in at_each_operation(monkeypatch, kill, prepare):
        assert resumed_step(started(config("third"))) == 3
        check_pointers(bucket, tmp_path)


# The learning rate of the start after the kill; 0.1 is that of the earlier run.
@pytest.mark.slow
@pytest.mark.parametrize("lr", [0.5, 0.1])
def test_kill_while_a_run_is_moved_aside(config, bucket, monkeypatch, tmp_path, lr):
    before: dict[str, bytes] = {}

    def prepare():
        trained(config(), bucket, 1)
        before.clear()
        before.update(uploaded(bucket))
        return lambda: started(config("elsewhere", **{"optimizer.lr": 0.5}))

    for _ in at_each_operation(monkeypatch, kill, prepare):
        started(config("third", **{"optimizer.lr": lr}))
        kept = [uploaded(bucket, run) for run in ("digits", "digits.1")]
        if lr == 0.5:
            assert kept[1] == before
            assert set(kept[0]) == {"config.yaml", "start.json"}
        for name in before.keys() - {"start.json", "config.yaml", "checkpoints/latest"}:
            assert before[name] in (kept[0].get(name), kept[1].get(name)), name
        for run in ("digits", "digits.1"):
            check_pointers(bucket, tmp_path, run)


def test_kill_during_a_download(config, bucket, monkeypatch, tmp_path):
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "mine"))

    def prepare():
        trained(config(), bucket, 1, 2, 3)
        shutil.rmtree(tmp_path / "mine", ignore_errors=True)
        return lambda: local_copy(f"{URL}/digits", checkpoint=True)

    for _ in at_each_operation(monkeypatch, kill, prepare):
        run = local_copy(f"{URL}/digits", checkpoint=True)
        assert damage(run / "checkpoints/step-3") is None
        assert (run / "metrics.jsonl").read_bytes() == uploaded(bucket)["metrics.jsonl"]


def test_training_continues_during_a_download(config, bucket, monkeypatch, tmp_path):
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "mine"))
    folders, runs = [], []

    def prepare():
        folders.append(trained(config(), bucket, 1, 2, 3))
        shutil.rmtree(tmp_path / "mine", ignore_errors=True)
        return lambda: runs.append(local_copy(f"{URL}/digits", checkpoint=True))

    def train():
        for step in (4, 5, 6):
            write(folders[-1], step)
            folders[-1]._upload()

    for _ in at_each_operation(monkeypatch, train, prepare):
        latest = (runs[-1] / "checkpoints/latest").read_text().strip()
        assert damage(runs[-1] / "checkpoints" / latest) is None


@pytest.mark.slow
def test_another_run_takes_the_place_during_a_download(config, bucket, monkeypatch, tmp_path):
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "mine"))
    runs = []

    def prepare():
        trained(config(), bucket, 1, 2, 3)
        shutil.rmtree(tmp_path / "mine", ignore_errors=True)
        return lambda: runs.append(local_copy(f"{URL}/digits"))

    def replace():
        write(other := started(config("elsewhere", **{"optimizer.lr": 0.5})), 1)
        other._upload()

    for _ in at_each_operation(monkeypatch, replace, prepare):
        is_new = loader.load(runs[-1] / "config.yaml").optimizer.lr == 0.5
        assert (runs[-1] / "metrics.jsonl").read_text().count("\n") == (1 if is_new else 3)


@pytest.mark.slow
def test_a_later_start_takes_over_during_an_upload(config, bucket, monkeypatch, tmp_path):
    later = []

    def prepare():
        later.clear()
        folder = trained(config(), bucket, 1, 2, 3)
        write(folder, 4, best=True)
        return folder._upload

    def take_over():
        later.append(started(config("elsewhere")))
        newest = resumed_step(later[-1])
        assert newest in (3, 4)
        for step in range(newest + 1, 7):  # the earlier start was suspended for long
            write(later[-1], step, best=step == 4)
            later[-1]._upload()

    for _ in at_each_operation(monkeypatch, take_over, prepare):
        # One file may be the earlier start's, which wrote it after its check. The next upload makes up for that.
        if later:
            write(later[-1], 7)
            later[-1]._upload()
        assert resumed_step(started(config("third"))) == (7 if later else 4)


@pytest.mark.slow
def test_an_earlier_start_uploads_while_a_later_one_takes_over(config, bucket, monkeypatch, tmp_path):
    folders, later = [], []

    def prepare():
        folders.append(trained(config(), bucket, 1, 2, 3))
        return lambda: later.append(started(config("elsewhere")))

    def train():
        for step in (4, 5, 6, 7):
            write(folders[-1], step)
            try:
                folders[-1]._upload()
            except UploadTakenOver:
                return

    for _ in at_each_operation(monkeypatch, train, prepare):
        assert resumed_step(later[-1]) in (3, 7)
        check_pointers(bucket, tmp_path)
        write(later[-1], 8)
        later[-1]._upload()
        check_pointers(bucket, tmp_path)
