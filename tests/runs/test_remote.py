"""A run folder at a URL, without training: what is believed, what goes there in which order, and who may write."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from harness.config import loader
from harness.config.schema import Config
from harness.distributed.runtime import Runtime
from harness.errors import CheckpointError, ConfigError
from harness.runs import remote, uploader
from harness.runs import run_dir as folders
from harness.runs.checkpoint import Checkpoints, damage, read
from harness.runs.fetched import at_hand, check_out
from harness.runs.remote import MirroredFolder
from harness.training import build

URL = "memory://bucket/runs"


@pytest.fixture(autouse=True)
def bucket(monkeypatch):
    monkeypatch.setattr(uploader, "MOST_PAUSE_S", 0.01)
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


def started(config: Config) -> MirroredFolder:
    folder = remote.run_folder(config)
    assert isinstance(folder, MirroredFolder)
    folder.claim(config)
    folder.join(0, folder.begun)
    return folder


def save(folder: MirroredFolder, step: int, text: str = "") -> None:
    """A checkpoint and a line of the record, as a run leaves them, on their way to the URL."""
    with open(folder.metrics, "a") as file:
        file.write(f'{{"step": {step}}}\n')
    Checkpoints(folder.checkpoints, 2).write(step, {"text": text or f"of {step}"})
    folder.changed()


def there(bucket: MemoryFileSystem) -> set[str]:
    return {path.removeprefix("/bucket/runs/digits/") for path in bucket.find("/bucket/runs/digits")}


def steps(bucket: MemoryFileSystem) -> set[str]:
    return {name.split("/")[1] for name in there(bucket) if name.startswith("checkpoints/step-")}


def test_a_run_comes_back_from_the_url_alone(config, bucket, tmp_path):
    folder = started(config())
    for step in (1, 2, 3, 4):
        save(folder, step)
        folder.deliver()
    assert steps(bucket) == {"step-3", "step-4"}  # as many as are kept
    (folder.logs / "rank-0.log").write_text("a log\n")
    folder.leave(0, done=False)
    shutil.rmtree(tmp_path / "cache")
    again = started(config())
    assert [path.name for path in again.checkpoints.glob("step-*")] == ["step-4"]
    assert again.metrics.read_text().count("\n") == 4
    assert (again.logs / "rank-0.log").read_text() == "a log\n"
    assert Checkpoints(again.checkpoints, 2).newest() == again.checkpoints / "step-4"
    other = remote.run_folder(config("other"))  # a machine of its own
    other.join(1, again.begun)
    assert (other.checkpoints / "step-4" / "state.pt").read_bytes() == (
        again.checkpoints / "step-4" / "state.pt"
    ).read_bytes()


def test_the_order_in_which_files_arrive(config, bucket, monkeypatch):
    folder, put = started(config()), []
    monkeypatch.setattr(folder.url, "put", lambda source, name, *_: put.append(name))
    folder.weights.write_text("weights")
    (folder.path / "summary.json").write_text("{}")
    (folder.checkpoints / "best").write_text("step-7\n")
    save(folder, 7)
    folder.deliver()
    step = "checkpoints/step-7"
    assert put[-3:] == [f"{step}/state.pt", f"{step}/manifest.json", "checkpoints/latest"]
    assert set(put[:-3]) >= {"checkpoints/best", "summary.json", "config.yaml", "metrics.jsonl", "weights.safetensors"}


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("before", [0, 1])
def test_killed_at_any_upload_what_the_newest_checkpoint_vouches_for_is_there(config, bucket, number, before):
    """With the cache gone. The first state that arrives, and one after others that were left out meanwhile."""
    folder = started(config())
    for step in range(1, before + 1):
        save(folder, step)
        folder.deliver()
    folder.weights.write_text("of step 2")
    for step in (2, 3):
        with open(folder.metrics, "a") as file:
            file.write(f'{{"step": {step}}}\n')
        Checkpoints(folder.checkpoints, 2).write(step, {"lines": step if before else step - 1})
    put, left = folder.url.put, [number]

    def cut(source: Path, name: str, *rest: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        put(source, name, *rest)

    folder.url.put = cut  # type: ignore[method-assign]
    with contextlib.suppress(KeyboardInterrupt):
        folder._bring(folder._pack())
    again = started(config("other"))
    newest = Checkpoints(again.checkpoints, 2).newest()
    if newest == again.checkpoints / "step-3":
        assert again.metrics.read_text().count("\n") >= read(newest)["lines"]
        assert again.weights.read_text() == "of step 2"
    else:
        assert newest == (again.checkpoints / "step-1" if before else None)


def test_what_is_written_on_the_way_is_not_mixed_in(config, bucket, monkeypatch):
    """While a state is being brought, training goes on: what arrives is of one moment."""
    folder = started(config())
    put, waits = folder.url.put, []

    def slowly(source: Path, name: str, *rest: object) -> None:
        if name.endswith("step-1/state.pt") and not waits:
            waits.append(name)
            with open(folder.metrics, "a") as file:
                file.write('{"step": 2, "later": true}\n')
            shutil.rmtree(folder.checkpoints / "step-1")  # swept
            (folder.path / "summary.json").unlink()
        put(source, name, *rest)

    monkeypatch.setattr(folder.url, "put", slowly)
    (folder.path / "summary.json").write_text('{"step": 1}')
    save(folder, 1)
    assert folder._courier.wait()
    assert waits
    assert folder.url.read("metrics.jsonl") == '{"step": 1}\n'
    assert folder.url.read("summary.json") == '{"step": 1}'
    assert steps(bucket) == {"step-1"}


@pytest.mark.parametrize("damage", ["cut", "no manifest", "latest names nothing"])
def test_a_damaged_newest_checkpoint_is_passed_over(config, bucket, caplog, damage):
    folder = started(config())
    for step in (1, 2):
        save(folder, step)
        folder.deliver()
    last = "/bucket/runs/digits/checkpoints/step-2"
    if damage == "cut":
        bucket.pipe(f"{last}/state.pt", bucket.cat(f"{last}/state.pt")[:-10])
    elif damage == "no manifest":
        bucket.rm(f"{last}/manifest.json")
    else:
        bucket.rm(last, recursive=True)
    again = started(config("other"))
    assert Checkpoints(again.checkpoints, 2).newest() == again.checkpoints / "step-1"
    assert again.url.read("checkpoints/latest") == "step-1\n"
    save(again, 3)
    again.deliver()
    left = set() if damage == "latest names nothing" else {"step-2"}  # not taken into account, and not removed
    assert steps(bucket) == {"step-1", "step-3", *left}


def test_the_cache_is_believed_where_it_is_the_newest(config, bucket, monkeypatch):
    folder = started(config())
    save(folder, 1)
    folder.deliver()
    monkeypatch.setattr(MirroredFolder, "changed", lambda self: None)  # killed before it arrived
    save(folder, 2)
    monkeypatch.undo()
    again = started(config())
    assert Checkpoints(again.checkpoints, 2).newest() == again.checkpoints / "step-2"
    assert again.url.read("checkpoints/latest") == "step-2\n"
    assert "step-2" in steps(bucket)


@pytest.mark.parametrize("loss", ["record", "damaged", "all checkpoints", "another start"])
def test_the_cache_is_not_believed_otherwise(config, bucket, loss):
    folder = started(config())
    for step in (1, 2):
        save(folder, step)
        folder.deliver()
    state = folder.checkpoints / "step-2" / "state.pt"
    if loss == "record":
        folder.metrics.unlink()
    elif loss == "damaged":
        state.write_bytes(state.read_bytes()[:-10])
    elif loss == "all checkpoints":
        shutil.rmtree(folder.checkpoints)
    else:
        elsewhere = started(config("elsewhere"))
        save(elsewhere, 3)
        elsewhere.deliver()
    again = started(config())
    newest = "step-3" if loss == "another start" else "step-2"
    assert Checkpoints(again.checkpoints, 2).newest() == again.checkpoints / newest
    assert again.metrics.read_text().count("\n") == int(newest[-1])


def test_an_earlier_start_leaves_the_url_to_the_later_one(config, bucket):
    """A machine that was thought dead comes back."""
    earlier = started(config())
    save(earlier, 1)
    earlier.deliver()
    later = started(config("elsewhere"))
    save(earlier, 2, "of the earlier")
    with pytest.raises(CheckpointError, match="has taken it over"):
        earlier.deliver()
    with pytest.raises(CheckpointError, match="has taken it over"):
        earlier.changed()
    save(later, 2, "of the later")
    later.deliver()
    before = later.url.read("metrics.jsonl")
    earlier.leave(0, done=True)
    assert later.url.read("metrics.jsonl") == before
    assert earlier.path.exists()  # what did not arrive is not removed


def test_a_store_that_is_away_for_a_while(config, bucket, monkeypatch, caplog):
    folder, put, left = started(config()), MemoryFileSystem.put_file, [5]

    def away(self, *args, **options):
        if left[0]:
            left[0] -= 1
            raise ConnectionError("the network is down")
        put(self, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", away)
    save(folder, 1)
    folder.deliver()
    assert left == [0]
    assert folder.url.read("checkpoints/latest") == "step-1\n"


def test_a_store_that_is_away_for_good(config, bucket, monkeypatch):
    folder = started(config())
    monkeypatch.setattr(uploader, "STALLED_S", 0.3)

    def away(self, *args, **options):
        raise ConnectionError("the network is down")

    with monkeypatch.context() as broken:
        broken.setattr(MemoryFileSystem, "put_file", away)
        save(folder, 1)
        with pytest.raises(CheckpointError, match="the network is down") as caught:
            folder.deliver()
        assert str(folder.path) in caught.value.hint  # where they are, and what brings them
    again = started(config())
    assert again.url.read("checkpoints/latest") == "step-1\n"


def test_a_store_that_may_not_be_written(config, monkeypatch):
    def refuse(self, *args, **options):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(ConfigError, match="Access Denied"):
        started(config())


def test_another_recipe_moves_the_run_aside(config, bucket):
    folder = started(config())
    save(folder, 1)
    folder.deliver()
    before = {name: bucket.cat(f"/bucket/runs/digits/{name}") for name in there(bucket)}
    other = remote.run_folder(config(**{"optimizer.lr": 0.5}))
    told = other.claim(config(**{"optimizer.lr": 0.5}))
    assert told == f"the earlier run was moved to {URL}/digits.1: its recipe differs (optimizer.lr 0.1 -> 0.5)"
    assert {name: bucket.cat(f"/bucket/runs/digits.1/{name}") for name in before} == before
    assert there(bucket) == {"config.yaml", "start.json"}
    assert not list(other.checkpoints.iterdir())
    assert other.claim(config(**{"optimizer.lr": 0.5, "checkpoint.resume": "never"})).startswith(
        f"the earlier run was moved to {URL}/digits.2"
    )


def test_a_run_that_cannot_begin_moves_nothing(config, bucket):
    folder = started(config())
    save(folder, 1)
    folder.deliver()
    before = there(bucket)

    def rehearse() -> None:
        raise ConfigError("7 rows cannot be dealt")

    for cache in ("cache", "elsewhere"):
        other = config(cache, **{"optimizer.lr": 0.5})
        with pytest.raises(ConfigError, match="7 rows"):
            remote.run_folder(other).claim(other, rehearse)
    assert there(bucket) == before
    assert not bucket.exists("/bucket/runs/digits.1")
    again = remote.run_folder(config())
    again.claim(config(), rehearse)  # nothing is moved
    assert Checkpoints(again.checkpoints, 2).newest() == again.checkpoints / "step-1"


def test_one_start_at_a_time_on_a_machine(config, bucket, monkeypatch):
    monkeypatch.setattr(folders, "_HOLD_S", 0.1)
    first, second = remote.run_folder(config()), remote.run_folder(config())
    first.hold()
    with pytest.raises(ConfigError, match=f"{URL}/digits: another start is training in this run folder"):
        second.hold()
    remote.run_folder(config("elsewhere")).hold()  # another machine takes it over


def test_a_checkpoint_at_another_url(config, bucket, tmp_path):
    other = started(config("elsewhere", name="other"))
    save(other, 7)
    other.deliver()
    place = f"{URL}/other/checkpoints/step-7"
    named = config(**{"checkpoint.resume": place})
    path = remote.borrow(named)
    assert damage(path) == ""
    (path / "state.pt").write_bytes(b"half")  # of the copy here
    assert remote.borrow(named) == path
    assert damage(path) == ""
    bucket.pipe("/bucket/runs/other/checkpoints/step-7/manifest.json", b"{}")
    with pytest.raises(CheckpointError, match="manifest.json cannot be read"):
        remote.borrow(named)
    bucket.rm("/bucket/runs/other", recursive=True)
    with pytest.raises(ConfigError, match="there is no checkpoint there"):
        remote.borrow(named)


def test_a_run_with_checkpoints_of_its_own_does_not_ask_for_the_one_it_began_with(config, bucket):
    named = config(**{"checkpoint.resume": f"{URL}/gone/checkpoints/step-7"})
    folder, restored = started(named), []
    save(folder, 8)
    run = SimpleNamespace(
        config=named, runtime=Runtime(), folder=folder, checkpoints=Checkpoints(folder.checkpoints, 2), log_offset=9,
        restore=restored.append, tracker=SimpleNamespace(rewind=restored.append),
    )  # fmt: skip
    build.restore(run)
    assert restored == [folder.checkpoints / "step-8", 9]


@pytest.mark.parametrize("after", range(1, 12, 2))
def test_a_move_that_was_cut_short_is_gone_on_with(config, bucket, monkeypatch, after):
    """Whatever moment it is killed at, nothing is lost and nothing is there twice."""
    folder = started(config())
    save(folder, 1)
    folder.deliver()
    before = {name: bucket.cat(f"/bucket/runs/digits/{name}") for name in there(bucket)}
    left = [after]

    def counted(method: str):
        real = getattr(MemoryFileSystem, method)

        def call(self, *args, **options):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return real(self, *args, **options)

        return call

    other = config(**{"optimizer.lr": 0.5})
    with monkeypatch.context() as cut:
        for method in ("cp_file", "rm_file"):
            cut.setattr(MemoryFileSystem, method, counted(method))
        with pytest.raises(KeyboardInterrupt):
            remote.run_folder(other).claim(other)
    started(other)
    assert {name: bucket.cat(f"/bucket/runs/digits.1/{name}") for name in before} == before
    assert {path.split("/")[3] for path in bucket.find("/bucket/runs")} == {"digits", "digits.1"}
    assert there(bucket) == {"config.yaml", "start.json"}


def test_what_is_done_leaves_nothing_in_the_cache(config, bucket, tmp_path):
    folder = started(config())
    save(folder, 1)
    for rank in (0, 1):
        (folder.logs / f"rank-{rank}.log").write_text(f"log of {rank}")
    folder.deliver()
    folder.leave(0, done=True)
    assert folder.path.exists()  # rank 1 is not through
    peer = remote.run_folder(config())
    peer.begun = folder.begun
    peer.leave(1, done=True)
    assert not folder.path.exists()
    assert folder.url.read("logs/rank-1.log") == "log of 1"
    assert not list((tmp_path / "cache").rglob("*.pt"))


def test_a_failure_is_told_once(config, bucket):
    folder = started(config())
    peer = remote.run_folder(config("other"))
    peer.join(1, folder.begun)
    report = {"rank": 1, "message": "a layer went wrong"}
    for one in (folder, peer):  # each machine has a file of its own
        (one.path / "failure.json").write_text(json.dumps(report))
    peer.leave(1, done=False)
    (folder.path / "failure.json").write_text(json.dumps({**report, "message": "heard of it"}))
    folder.leave(0, done=False)
    assert json.loads(folder.url.read("failure.json") or "") == report
    assert "failure.json" not in there_after_a_start(config, bucket)


def there_after_a_start(config, bucket) -> set[str]:
    started(config())
    return there(bucket)


def test_results_are_read_from_the_url(config, bucket, monkeypatch, tmp_path):
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "mine"))
    folder = started(config())
    save(folder, 1)
    folder.weights.write_text("weights")
    folder.deliver()
    got, real = [], MemoryFileSystem.get_file
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda *a, **k: (got.append(a[1]), real(*a, **k)))
    run = at_hand(f"{URL}/digits")
    assert run.name == "digits"
    assert (run / "weights.safetensors").read_text() == "weights"
    assert not (run / "checkpoints").exists()
    first = len(got)
    assert at_hand(f"{URL}/digits") == run
    assert len(got) == first  # nothing has changed
    assert (at_hand(f"{URL}/digits", checkpoint=True) / "checkpoints" / "step-1" / "state.pt").exists()
    assert at_hand(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="this is not a run"):
        at_hand(f"{URL}/letters")
    with pytest.raises(ConfigError, match="nothing is written into a run at a URL"):
        check_out(f"{URL}/digits", None, "report.html")
