"""The cache: one conversion however many processes ask, and no crash, stale file or full disk that spoils it."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from harness.data.table import cache, convert, single_conversion
from harness.data.table.table import open_table
from harness.errors import DataError

FORK = multiprocessing.get_context("fork")  # children see what monkeypatch changed


def make(path: Path, rows: int = 500) -> Path:
    path.write_bytes(b"path,label\n" + b"".join(b"p%d,%d\n" % (i, i % 3) for i in range(rows)))
    return path


def files(folder: Path) -> list[str]:
    """Suffixes of all files in the cache but the lock."""
    found = (p.name.split(".", 1)[1] for p in folder.rglob("*") if p.is_file() and p.name != "lock")
    return sorted(found)


@pytest.fixture
def csv(tmp_path):
    return make(tmp_path / "a.csv")


@pytest.fixture
def conversions(monkeypatch, tmp_path):
    """Counts conversions over all processes, and makes each take half a second."""
    record, real = tmp_path / "conversions", convert.convert

    def counted(*arguments):
        with open(record, "a") as stream:
            stream.write("x")
        time.sleep(0.5)
        return real(*arguments)

    monkeypatch.setattr(single_conversion, "convert", counted)
    return lambda: len(record.read_text()) if record.exists() else 0


def in_processes(count: int, target, *arguments) -> list:
    """What ``target`` returned, or the exception it raised, in each of ``count`` processes started together."""
    results, barrier = FORK.Queue(), FORK.Barrier(count)
    children = [FORK.Process(target=_child, args=(results, barrier, target, arguments)) for _ in range(count)]
    for child in children:
        child.start()
    found = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join(10)
    return found


def _child(results, barrier, target, arguments) -> None:
    barrier.wait()
    try:
        results.put(target(*arguments))
    except Exception as error:
        results.put(error)


def opened_and_told(path: Path, folder: Path) -> tuple[int, str, list[str]]:
    said: list[str] = []
    table = open_table(path, label="label", cache_dir=folder, on_wait=said.append)
    return table.num_rows, table.digest, said


def test_four_processes_convert_once(csv, tmp_path, conversions):
    found = in_processes(4, opened_and_told, csv, tmp_path / "cache")
    assert conversions() == 1
    assert {(rows, digest) for rows, digest, _ in found} == {(500, found[0][1])}
    told = [said for _, _, said in found if said]
    assert told == [[f"waiting while another process converts {csv}"]] * 3
    assert files(tmp_path / "cache") == ["arrow", "codes", "json"]


def test_four_processes_learn_of_one_failure(tmp_path, conversions):
    path = tmp_path / "a.csv"
    path.write_text("path,label\na\n")
    found = in_processes(4, opened_and_told, path, tmp_path / "cache")
    assert conversions() == 1
    assert {str(error) for error in found} == {str(found[0])}
    assert all(isinstance(error, DataError) and "line 2 has 1" in error.message for error in found)


def test_a_failure_is_not_remembered_longer(tmp_path, conversions):
    path = tmp_path / "a.csv"
    path.write_text("path,label\na\n")
    for _ in range(2):
        with pytest.raises(DataError, match="line 2 has 1"):
            open_table(path, label="label", cache_dir=tmp_path / "cache")
    assert conversions() == 2


def test_a_missing_column_of_one_is_no_failure_of_others(csv, tmp_path, conversions):
    def opened(text):
        return open_table(csv, text=text, cache_dir=tmp_path / "cache").num_rows

    wrong = FORK.Process(target=_child, args=(FORK.Queue(), FORK.Barrier(1), opened, [["nothing"]]))
    wrong.start()
    time.sleep(0.25)
    assert opened(["path"]) == 500
    wrong.join(10)


def test_second_open_converts_nothing(csv, tmp_path, conversions):
    first = open_table(csv, label="label", cache_dir=tmp_path / "cache")
    second = open_table(csv, label="label", cache_dir=tmp_path / "cache")
    assert conversions() == 1
    assert second.digest == first.digest


def test_converted_between_the_look_and_the_lock(csv, tmp_path, conversions, monkeypatch):
    real = cache.Entry.try_lock

    def late(entry):
        monkeypatch.setattr(cache.Entry, "try_lock", real)
        open_table(csv, label="label", cache_dir=tmp_path / "cache")
        return real(entry)

    monkeypatch.setattr(cache.Entry, "try_lock", late)
    open_table(csv, label="label", cache_dir=tmp_path / "cache")
    assert conversions() == 1


def test_another_name_of_the_same_file_converts_nothing(csv, tmp_path, conversions, monkeypatch):
    (tmp_path / "link.csv").symlink_to(csv)
    monkeypatch.chdir(tmp_path)
    for name in (csv, str(csv), "a.csv", tmp_path / "link.csv", f"file://{csv}"):
        open_table(name, label="label", cache_dir=tmp_path / "cache")
    assert conversions() == 1


def test_rewritten_source_is_converted_anew_and_the_old_files_go(csv, tmp_path):
    folder = tmp_path / "cache"
    assert len(open_table(csv, label="label", cache_dir=folder)) == 500
    gc.collect()
    make(csv, 600)
    assert len(open_table(csv, label="label", cache_dir=folder)) == 600
    assert files(folder) == ["arrow", "codes", "json"]


def test_touched_source_is_converted_anew(csv, tmp_path, conversions):
    for moment in (1, 2):
        os.utime(csv, ns=(moment, moment))
        open_table(csv, label="label", cache_dir=tmp_path / "cache")
    assert conversions() == 2


def test_an_old_version_in_use_stays(csv, tmp_path):
    folder = tmp_path / "cache"
    old = open_table(csv, label="label", cache_dir=folder)
    make(csv, 600)
    assert len(open_table(csv, label="label", cache_dir=folder)) == 600
    assert pickle.loads(pickle.dumps(old)).strings("path", np.array([499])) == ["p499"]
    assert old.line_of(3) == 0  # the file is another one
    del old
    gc.collect()
    make(csv, 700)
    open_table(csv, label="label", cache_dir=folder)
    assert files(folder) == ["arrow", "codes", "json"]


def test_other_label_columns_live_side_by_side(csv, tmp_path, conversions):
    for label in ("label", None, "path", "label", None, "path"):
        assert open_table(csv, label=label, cache_dir=tmp_path / "cache").label == label
    assert conversions() == 3


@pytest.mark.parametrize("kind", ["arrow", "codes", "json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "empty"])
def test_damaged_cache_is_rebuilt(csv, tmp_path, kind, damage):
    folder = tmp_path / "cache"
    open_table(csv, label="label", cache_dir=folder)
    (path,) = folder.rglob(f"*.{kind}")
    if damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif damage == "gone":
        path.unlink()
    else:
        os.truncate(path, 0)
    table = open_table(csv, label="label", cache_dir=folder)
    assert table.strings("path", np.array([499])) == ["p499"]
    assert table.labels(np.array([499])).tolist() == [499 % 3]
    assert files(folder) == ["arrow", "codes", "json"]


def test_other_format_is_rebuilt(csv, tmp_path, conversions):
    folder = tmp_path / "cache"
    open_table(csv, label="label", cache_dir=folder)
    (path,) = folder.rglob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": -1}))
    open_table(csv, label="label", cache_dir=folder)
    assert conversions() == 2


def test_cache_gone_under_a_pickle(csv, tmp_path):
    pickled = pickle.dumps(open_table(csv, label="label", cache_dir=tmp_path / "cache"))
    for path in (tmp_path / "cache").rglob("*.json"):
        path.unlink()
    with pytest.raises(DataError, match="no longer in the cache"):
        pickle.loads(pickled)


def test_deleted_cache_does_not_disturb_an_open_table(csv, tmp_path):
    table = open_table(csv, label="label", cache_dir=tmp_path / "cache")
    table.strings("path", np.array([0])), table.labels(np.array([0]))
    for path in (tmp_path / "cache").rglob("*.*"):
        if path.is_file():
            path.unlink()
    assert table.strings("path", np.array([499])) == ["p499"]
    assert table.labels(np.array([499])).tolist() == [1]


def _convert_forever(path: Path, folder: Path) -> None:
    def endless(*arguments):
        time.sleep(100)

    convert._digest = endless  # after both temporary files are written
    open_table(path, label="label", cache_dir=folder)


def test_killed_converter_is_replaced_and_its_files_swept(csv, tmp_path):
    folder = tmp_path / "cache"
    victim = FORK.Process(target=_convert_forever, args=(csv, folder))
    victim.start()
    _until(lambda: files(folder) == ["arrow.tmp", "codes.tmp"])
    waiting = FORK.Queue()
    heir = FORK.Process(target=_child, args=(waiting, FORK.Barrier(1), opened_and_told, (csv, folder)))
    heir.start()
    time.sleep(0.3)
    assert waiting.empty()
    os.kill(victim.pid, signal.SIGKILL)
    rows, _, said = waiting.get(timeout=20)
    assert rows == 500
    assert len(said) == 1
    assert files(folder) == ["arrow", "codes", "json"]
    victim.join(10), heir.join(10)


def _until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


@pytest.mark.parametrize("sizes", [[5000], [20_000], [100_000]])
def test_write_failure_is_clean(tmp_path, sizes):
    """A limit on file size fails as a full disk does: at some write, in the middle of a file."""
    path, folder = make(tmp_path / "a.csv", 20_000), tmp_path / "cache"
    script = (
        "import resource, sys; from pathlib import Path; from harness.data.table.table import open_table\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({sizes[0]}, {sizes[0]}))\n"
        "try: open_table(sys.argv[1], label='label', cache_dir=Path(sys.argv[2]))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", script, str(path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("DataError"), done.stdout + done.stderr
    assert "the table cache cannot be written: File too large" in done.stdout
    assert "APEX_HARNESS_CACHE" in done.stdout
    assert [name for name in files(folder) if name != "error.json"] == []
    assert len(open_table(path, label="label", cache_dir=folder)) == 20_000


@pytest.mark.parametrize("obstacle", ["file", "read-only"])
def test_cache_that_cannot_be_written(csv, tmp_path, obstacle):
    folder = tmp_path / "cache"
    if obstacle == "file":
        folder.write_text("in the way")
    else:
        folder = Path("/proc/cache")
    with pytest.raises(DataError, match="the table cache cannot be written") as caught:
        open_table(csv, cache_dir=folder)
    assert "APEX_HARNESS_CACHE" in caught.value.hint


def test_complete_cache_needs_no_writing(csv, tmp_path, monkeypatch):
    open_table(csv, label="label", cache_dir=tmp_path / "cache")
    monkeypatch.setattr(cache.Entry, "try_lock", lambda self: pytest.fail("locked"))
    open_table(csv, label="label", cache_dir=tmp_path / "cache")


def test_default_cache_folder(monkeypatch):
    monkeypatch.setenv("APEX_HARNESS_CACHE", "/chosen")
    assert cache.default_cache_dir() == Path("/chosen")
    monkeypatch.delenv("APEX_HARNESS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.default_cache_dir() == Path("/xdg/apex-harness")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache.default_cache_dir() == Path("/home/somebody/.cache/apex-harness")


def test_default_cache_is_used(csv, tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "chosen"))
    open_table(csv)
    assert files(tmp_path / "chosen") == ["arrow", "json"]


def test_forked_workers_share_the_mapping(csv, tmp_path):
    table = open_table(csv, label="label", cache_dir=tmp_path / "cache")
    rows = np.arange(0, 500, 7)
    found = in_processes(2, lambda: (table.strings("path", rows), table.labels(rows).tolist()))
    assert found == [([f"p{i}" for i in rows], (rows % 3).tolist())] * 2


def test_spawned_process_maps_it_again(csv, tmp_path):
    table = open_table(csv, label="label", cache_dir=tmp_path / "cache")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(table.strings, ("path", np.array([3, 1]))) == ["p3", "p1"]


def test_no_thread_or_file_is_left_after_an_error(tmp_path):
    path = make(tmp_path / "a.csv", 5000)
    with open(path, "ab") as stream:
        stream.write(b"short\n")
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(3):
        with contextlib.suppress(DataError):
            open_table(path, label="label", cache_dir=tmp_path / "cache")
    gc.collect()
    after = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    assert after[0] <= before[0]
    assert after[1] <= before[1] + 4  # pyarrow keeps a pool of its own
