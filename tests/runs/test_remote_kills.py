"""A run at a URL that is killed, or taken over by another start, at each single operation of the store."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from harness.config import loader
from harness.config.schema import Config
from harness.runs.checkpoint import damage, read
from harness.runs.fetched import local_copy
from harness.runs.remote import RemoteRunFolder, UploadTakenOver

URL = "memory://kills/runs"
OPERATIONS = ("find", "cat_file", "pipe_file", "put_file", "get_file", "cp_file", "rm_file")


class Killed(BaseException):
    """Ends a call as a kill would: no handler for errors sees it."""


def kill() -> None:
    raise Killed


@pytest.fixture
def bucket():
    memory = fsspec.filesystem("memory")
    yield memory
    memory.rm("/kills", recursive=True)


@pytest.fixture
def config(tmp_path):
    def make(cache: str = "cache", lr: float = 0.1) -> Config:
        path = tmp_path / "config.yaml"
        path.write_text(
            f"name: digits\noutput: {URL}\nbatch: {{global: 8}}\ncheckpoint: {{keep: 2}}\noptimizer: {{lr: {lr}}}\n"
            f"data: {{cache_dir: {tmp_path / cache}}}\n"
            "task: {name: image_csv, train_csv: a.csv, eval_csv: b.csv}\n"
        )
        return loader.load(path)

    return make


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


def start(config: Config) -> RemoteRunFolder:
    folder = RemoteRunFolder(config)
    folder.claim(config)
    return folder


def write(folder: RemoteRunFolder, step: int, best: bool = False) -> None:
    """What training writes at a step, in its order."""
    with open(folder.metrics, "a") as file:
        file.write(f'{{"step": {step}}}\n')
    if best:
        folder.checkpoints.mark_best(step, {}, folder.weights)
    folder.checkpoints.write(step, {"lines": folder.metrics.read_text().count("\n")})


def trained(config: Config, bucket: MemoryFileSystem, *steps: int) -> RemoteRunFolder:
    """A fresh run, with its checkpoints uploaded; the first is the best."""
    if bucket.exists("/kills"):
        bucket.rm("/kills", recursive=True)
    folder = start(config)
    for step in steps:
        write(folder, step, best=step == steps[0])
        folder._upload()
    return folder


def files(bucket: MemoryFileSystem, run: str = "digits") -> dict[str, bytes]:
    prefix = f"/kills/runs/{run}/"
    return {path.removeprefix(prefix): bucket.cat(path) for path in bucket.find(prefix)}


def check_pointers(bucket: MemoryFileSystem, tmp_path, run: str = "digits") -> None:
    """`latest` and `best` name complete checkpoints, and the log is as long as `latest` expects."""
    found = files(bucket, run)
    shutil.rmtree(tmp_path / "seen", ignore_errors=True)
    for name, content in found.items():
        path = tmp_path / "seen" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for pointer in ("latest", "best"):
        if name := found.get(f"checkpoints/{pointer}", b"").decode().strip():
            assert damage(tmp_path / "seen/checkpoints" / name) == "", (pointer, name, sorted(found))
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
        again = start(config("elsewhere"))
        assert resumed_step(again) in (3, 4)
        check_pointers(bucket, tmp_path)
        write(again, 5)
        again._upload()
        check_pointers(bucket, tmp_path)
        states = {name.split("/")[1] for name in files(bucket) if name.endswith(("state.pt", "manifest.json"))}
        assert len(states) <= 3  # two newest and the best: nothing incomplete is left


def test_kill_before_the_best_checkpoint_is_uploaded(config, bucket, monkeypatch, tmp_path):
    """An evaluation writes the best weights and the summary before the checkpoint of its step."""

    def prepare():
        folder = trained(config(), bucket, 1, 2, 3)
        folder.checkpoints.mark_best(4, {}, folder.weights)
        return folder._upload

    for _ in at_each_operation(monkeypatch, kill, prepare):
        check_pointers(bucket, tmp_path)


@pytest.mark.slow
def test_kill_while_a_start_takes_over(config, bucket, monkeypatch, tmp_path):
    def prepare():
        trained(config(), bucket, 1, 2, 3)
        return lambda: start(config("elsewhere"))

    for _ in at_each_operation(monkeypatch, kill, prepare):
        assert resumed_step(start(config("third"))) == 3
        check_pointers(bucket, tmp_path)


# The learning rate of the start after the kill; 0.1 is that of the earlier run.
@pytest.mark.slow
@pytest.mark.parametrize("lr", [0.5, 0.1])
def test_kill_while_a_run_is_moved_aside(config, bucket, monkeypatch, tmp_path, lr):
    before: dict[str, bytes] = {}

    def prepare():
        trained(config(), bucket, 1)
        before.clear()
        before.update(files(bucket))
        return lambda: start(config("elsewhere", lr=0.5))

    for _ in at_each_operation(monkeypatch, kill, prepare):
        start(config("third", lr=lr))
        kept = [files(bucket, run) for run in ("digits", "digits.1")]
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
        assert damage(run / "checkpoints/step-3") == ""
        assert (run / "metrics.jsonl").read_bytes() == files(bucket)["metrics.jsonl"]


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
        assert damage(runs[-1] / "checkpoints" / latest) == ""


@pytest.mark.slow
def test_another_run_takes_the_place_during_a_download(config, bucket, monkeypatch, tmp_path):
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "mine"))
    runs = []

    def prepare():
        trained(config(), bucket, 1, 2, 3)
        shutil.rmtree(tmp_path / "mine", ignore_errors=True)
        return lambda: runs.append(local_copy(f"{URL}/digits"))

    def replace():
        write(other := start(config("elsewhere", lr=0.5)), 1)
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
        later.append(start(config("elsewhere")))
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
        assert resumed_step(start(config("third"))) == (7 if later else 4)


@pytest.mark.slow
def test_an_earlier_start_uploads_while_a_later_one_takes_over(config, bucket, monkeypatch, tmp_path):
    folders, later = [], []

    def prepare():
        folders.append(trained(config(), bucket, 1, 2, 3))
        return lambda: later.append(start(config("elsewhere")))

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
