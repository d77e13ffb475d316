"""A run folder at a URL: killed at any moment, on machines that share nothing, a run is resumed from the URL alone."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.end_to_end.experiment import Kill, assert_same_run, drive_until_killed, run, write_config
from tests.end_to_end.processes import python
from tests.ranks import free_port, launch_environment, start, wait_for

SETTINGS: dict[str, Any] = {
    "model": {"name": "small_cnn", "args": {"width": 4, "dropout": 0.2, "batch_norm": True}},
    "train": {"epochs": 2, "log_every": 2},
    "checkpoint": {"every": 3, "keep": 2},
}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, data) -> dict[int, Path]:
    """Folders of uninterrupted runs, by world size."""
    folders = {}
    for world_size in (1, 2):
        config = write_config(tmp_path_factory.mktemp("unbroken") / str(world_size), data, **SETTINGS)
        assert run(config, world_size) == [0] * world_size
        folders[world_size] = config.parent / "runs" / "run"
    return folders


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 server on this machine, with a bucket called ``bucket``."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install s3fs")
    moto = pytest.importorskip("moto.server", reason="moto is not installed: pip install 'moto[server]'")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line a request
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    fsspec.filesystem("s3", **_keys(address)).mkdir("bucket")
    yield address
    server.stop()


def _keys(address: str) -> dict[str, Any]:
    return {"key": "key", "secret": "secret", "client_kwargs": {"endpoint_url": address}, "skip_instance_cache": True}


def s3_environment(address: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


class Place:
    """Storage of runs in a test: a URL, a file system to inspect it, and environment variables for the ranks."""

    def __init__(self, url: str, environ: dict[str, str] | None = None, **options: Any) -> None:
        self.url, self.environ = url, environ or {}
        self.fs, self.path = fsspec.core.url_to_fs(url, **options)

    def download(self, name: str, target: Path) -> Path:
        """A local copy of the run ``name``."""
        shutil.rmtree(target, ignore_errors=True)
        self.fs.invalidate_cache()
        self.fs.get(f"{self.path}/{name}/", f"{target}/", recursive=True)
        return target

    def read(self, name: str) -> str:
        self.fs.invalidate_cache()
        return self.fs.cat(f"{self.path}/{name}").decode() if self.fs.exists(f"{self.path}/{name}") else ""

    def names(self) -> set[str]:
        self.fs.invalidate_cache()
        return {path.removeprefix(f"{self.path}/") for path in self.fs.find(self.path)}


@pytest.fixture
def bucket(s3, tmp_path) -> Place:
    return Place(f"s3://bucket/{tmp_path.name}/runs", s3_environment(s3), **_keys(s3))


@pytest.fixture
def disk(tmp_path) -> Place:
    return Place(f"file://{tmp_path}/store/runs")


class Upload(Kill):
    """Dies of SIGKILL in the middle of its ``number``-th upload of a file whose name ends in ``name``."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(0, 0)
        self.name, self.left = name, number

    def arm(self, config: Path) -> None:
        from harness.runs.url_store import UrlStore

        put, write = UrlStore.put, UrlStore.write

        def cut(store: UrlStore, content: bytes, name: str) -> None:
            if not name.endswith(self.name):
                return
            self.left -= 1
            if self.left == 0:
                if store.has_folders:  # an object store keeps nothing of an interrupted upload
                    write(store, name + ".part", content[:100].decode("latin-1"))
                os.kill(os.getpid(), signal.SIGKILL)

        def cut_put(store: UrlStore, source: Path, name: str, *rest: Any) -> None:
            cut(store, source.read_bytes(), name)
            put(store, source, name, *rest)

        def cut_write(store: UrlStore, name: str, text: str) -> None:
            cut(store, text.encode(), name)
            write(store, name, text)

        UrlStore.put, UrlStore.write = cut_put, cut_write  # type: ignore[method-assign]


def train(
    config: Path, caches: list[Path], environ: dict[str, str], *overrides: str, kill: Kill | None = None
) -> list[int]:
    """Train on one rank per cache, as on machines without a shared disk; return the exit codes."""
    port, world = free_port(), len(caches)
    processes = []
    for rank, cache in enumerate(caches):
        place = launch_environment(rank, world, port) if world > 1 else {}
        if len(set(caches)) > 1:
            place |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        arguments = ["-c", str(config), "data.cache_dir=null", *overrides]
        terminal = str(config.parent / f"terminal-{rank}.txt")
        armed = kill if kill and kill.rank == rank else None
        processes.append(
            start(
                drive_until_killed, (arguments, terminal, armed), {**environ, **place, "APEX_HARNESS_CACHE": str(cache)}
            )
        )
    return wait_for(processes, 90)


def terminal(config: Path, rank: int = 0) -> str:
    return (config.parent / f"terminal-{rank}.txt").read_text()


@pytest.mark.slow
def test_two_machines_without_a_shared_disk(tmp_path, data, unbroken, bucket):
    """Each rank has its own cache, which is lost with every kill."""
    config = write_config(tmp_path / "run", data, **SETTINGS, output=bucket.url, data={"num_workers": 1})
    caches = [tmp_path / "one", tmp_path / "two"]
    for kill in (Kill(1, 4), Kill(0, 5, "evaluation"), Kill(0, 3, "save")):  # in steps of each start
        codes = train(config, caches, bucket.environ, kill=kill)
        assert codes[kill.rank] == -signal.SIGKILL, terminal(config)
        assert codes[1 - kill.rank] == 70, terminal(config)
        for cache in caches:
            shutil.rmtree(cache)
    caches.reverse()
    assert train(config, caches, bucket.environ) == [0, 0], terminal(config)
    there = bucket.download("run", tmp_path / "there")
    assert_same_run(unbroken[2], there)
    assert (there / "predictions.csv").read_bytes() == (unbroken[2] / "predictions.csv").read_bytes()
    assert {path.name for path in (there / "logs").iterdir()} == {
        "rank-0.log", "rank-1.log", "rank-0.exit.json", "rank-1.exit.json",
    }  # fmt: skip
    assert terminal(config).count("resumed from") >= 2
    assert [path for cache in caches for path in cache.rglob("*.pt")] == []  # done: the caches are empty
    steps = {name.split("/")[2] for name in bucket.names() if "/step-" in name}
    assert len(steps) <= 3, steps


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [("state.pt", 1), ("latest", 2)])
def test_killed_in_an_upload(tmp_path, data, unbroken, disk, name, number):
    """The checkpoint on its way is lost and trained again, with the same result. What is left in the cache is ignored.
    (tests/runs/test_remote.py interrupts each single upload, in one process.)"""
    config = write_config(tmp_path / "run", data, **SETTINGS, output=disk.url)
    cache = tmp_path / "cache"
    assert train(config, [cache], {}, kill=Upload(name, number)) == [-signal.SIGKILL]
    newest = disk.read("run/checkpoints/latest")
    assert train(config, [cache], {}) == [0], terminal(config)
    if newest:
        assert f"resumed from {cache}" in terminal(config)
        assert f"checkpoints/{newest.strip()}: " in terminal(config)
    else:
        assert "resumed from" not in terminal(config)
    assert_same_run(unbroken[1], disk.download("run", tmp_path / "there"))


@pytest.mark.slow
def test_another_recipe_moves_the_run_aside(tmp_path, data, bucket):
    config = write_config(tmp_path / "run", data, **SETTINGS, output=bucket.url)
    cache = [tmp_path / "cache"]
    assert train(config, cache, bucket.environ) == [0]
    before = {
        path.name: path.read_bytes() for path in bucket.download("run", tmp_path / "before").iterdir() if path.is_file()
    }
    assert train(config, cache, bucket.environ, "optimizer.lr=0.01", "train.epochs=1") == [0]
    note = f"the earlier run was moved to {bucket.url}/run.1: its recipe differs (optimizer.lr 0.05 -> 0.01)"
    assert note in terminal(config)
    aside = bucket.download("run.1", tmp_path / "aside")
    assert {path.name: path.read_bytes() for path in aside.iterdir() if path.is_file()} == before
    assert json.loads((bucket.download("run", tmp_path / "now") / "summary.json").read_text())["epoch"] == 1
    other = f"checkpoint.resume={bucket.url}/run.1/checkpoints/{(aside / 'checkpoints' / 'latest').read_text().strip()}"
    assert train(config, cache, bucket.environ, other, "name=next", "train.epochs=3") == [0], terminal(config)
    assert json.loads((bucket.download("next", tmp_path / "next") / "summary.json").read_text())["epoch"] == 3
    own = f"checkpoint.resume={bucket.url}/next/checkpoints/step-3"
    assert train(config, cache, bucket.environ, own, "name=next") == [2]
    assert "is a checkpoint of this run itself" in terminal(config)


@pytest.mark.slow
def test_missing_bucket_is_reported_before_training(tmp_path, data, s3):
    config = write_config(tmp_path / "run", data, **SETTINGS, output="s3://nowhere/runs")
    cache = tmp_path / "cache"
    assert train(config, [cache, cache], s3_environment(s3)) == [2, 2]
    text = terminal(config)
    assert "s3://nowhere/runs/run" in text
    assert "check that the bucket exists" in text
    assert "epoch" not in text
    assert "nowhere" not in str(fsspec.filesystem("s3", **_keys(s3)).ls(""))  # nor was it made


@pytest.mark.slow
def test_images_in_a_bucket(tmp_path, data, unbroken, s3):
    """Two ranks with loader workers train on images behind URLs as on files, and a start without access says so."""
    files = fsspec.filesystem("s3", **_keys(s3))
    files.put(f"{data}/", "bucket/photos/", recursive=True)
    at_url = {**SETTINGS, "task": {"root": "s3://bucket/photos"}, "data": {"num_workers": 1}}
    config = write_config(tmp_path / "run", data, **at_url)
    cache = tmp_path / "cache"
    assert train(config, [cache, cache], s3_environment(s3)) == [0, 0], terminal(config)
    assert_same_run(config.parent / "runs" / "run", unbroken[2])
    assert any((cache / "urls").rglob("*"))
    for name, root, environ, message in (
        ("gone", "s3://nowhere/photos", s3_environment(s3), "image not found: s3://nowhere/photos/"),
        ("keys", "s3://bucket/photos", {"AWS_ENDPOINT_URL": s3, "AWS_EC2_METADATA_DISABLED": "true",
         "AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}, "AWS_ACCESS_KEY_ID"),
    ):  # fmt: skip
        config = write_config(tmp_path / name, data, **{**at_url, "task": {"root": root}})
        assert train(config, [tmp_path / "other"], environ) == [65]
        assert message in terminal(config)


class Term(Kill):
    """Receives SIGTERM at the end of a step."""

    def arm(self, config: Path) -> None:
        from harness.training.state import State

        count = State.add_step

        def add_step(state: State, skipped: bool) -> None:
            count(state, skipped)
            if state.step == self.step:
                os.kill(os.getpid(), signal.SIGTERM)

        State.add_step = add_step


@pytest.mark.slow
def test_everything_of_a_stopped_run_is_uploaded(tmp_path, data, unbroken, disk):
    config = write_config(tmp_path / "run", data, **SETTINGS, output=disk.url)
    assert train(config, [tmp_path / "one"], {}, kill=Term(0, 5)) == [75]
    assert disk.read("run/checkpoints/latest") == "step-5\n"
    assert json.loads(disk.read("run/logs/rank-0.exit.json"))["cause"] == "stopped"
    assert train(config, [tmp_path / "two"], {}) == [0]
    assert_same_run(unbroken[1], disk.download("run", tmp_path / "there"))


class Unreachable(Kill):
    """The store refuses everything from the ``number``-th upload on."""

    def __init__(self, number: int) -> None:
        super().__init__(0, 0)
        self.left = number

    def arm(self, config: Path) -> None:
        from harness.runs import uploader
        from harness.runs.url_store import UrlStore

        put = UrlStore.put
        uploader.MAX_PAUSE_S = 0.1

        def refuse(store: UrlStore, *args: Any) -> None:
            self.left -= 1
            if self.left <= 0:
                raise ConnectionError("the network is down")
            put(store, *args)

        UrlStore.put = refuse  # type: ignore[method-assign]


@pytest.mark.slow
def test_results_that_cannot_be_uploaded_fail_the_run(tmp_path, data, unbroken, disk):
    """Training continues without the store. The failure is reported at the end, and a retry finishes the run."""
    config = write_config(tmp_path / "run", data, **SETTINGS, output=disk.url)
    cache = tmp_path / "cache"
    assert train(config, [cache, cache], {}, kill=Unreachable(8)) == [70, 70]
    text = terminal(config)
    assert text.count("failed and will be retried") == 1
    assert "error: " in text
    assert "the network is down" in text
    assert "run the same command again" in text
    assert train(config, [cache, cache], {}) == [0, 0]
    assert_same_run(unbroken[2], disk.download("run", tmp_path / "there"))


def launch(config: Path, environ: dict[str, str], *words: str) -> tuple[int, str]:
    """Run ``harness launch`` on two ranks; return its exit code and output."""
    terminal = config.parent / "terminal.txt"
    terminal.unlink(missing_ok=True)
    code = python(["-m", "harness", "launch", "-c", config, "--nproc", "2", *words], terminal, **environ)
    return code, terminal.read_text()


@pytest.mark.slow
def test_harness_launch_reports_on_a_run_at_a_url(tmp_path, data, unbroken, bucket):
    environ = {**bucket.environ, "APEX_HARNESS_CACHE": str(tmp_path / "cache")}
    raises = {"name": "tests.end_to_end.models.Raises", "args": {"rank": 1, "step": 5}}
    config = write_config(
        tmp_path / "run", data, **{**SETTINGS, "model": raises}, output=bucket.url, data={"cache_dir": None}
    )
    code, text = launch(config, environ)
    assert code == 1, text
    assert "failed: rank 1" in text
    assert f"report: {bucket.url}/run/failure.json" in text
    there = bucket.download("run", tmp_path / "there")
    report = json.loads((there / "failure.json").read_text())
    assert (report["rank"], report["error"]) == (1, "ArithmeticError")
    assert set(report["ranks"]) == {"0", "1"}
    assert "a layer went wrong" in (there / "logs" / "rank-1.log").read_text()

    config = write_config(tmp_path / "run", data, **SETTINGS, output=bucket.url, data={"cache_dir": None})
    code, text = launch(config, environ)
    assert code == 0, text
    assert f"the earlier run was moved to {bucket.url}/run.1" in text
    assert f"done: {bucket.url}/run\n" in text
    there = bucket.download("run", tmp_path / "there")
    assert_same_run(unbroken[2], there)
    assert not list((tmp_path / "cache").rglob("*.pt"))

    words, out = ["-m", "harness", "predict", f"{bucket.url}/run", "--csv", data / "eval.csv"], tmp_path / "new.csv"
    assert python([*words, "--out", out], terminal := tmp_path / "predict.txt", **environ) == 0, terminal.read_text()
    predictions = [line.split(",")[1] for line in (tmp_path / "new.csv").read_text().splitlines()]
    assert predictions == [line.split(",")[1] for line in (there / "predictions.csv").read_text().splitlines()]
