"""The cache of tables: one conversion for any number of processes; crashes, stale files and full disks do no harm."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harness.data.table import convert, csv_reader
from harness.data.table.table import open_table
from harness.errors import DataError
from harness.runs import locks
from harness.runs.files import default_cache_dir

FORK = multiprocessing.get_context("fork")  # children inherit what monkeypatch changed
COMPLETE = ["arrow", "codes", "json"]


def make(path: Path, rows: int = 500) -> Path:
    path.write_bytes(b"path,label\n" + b"".join(b"p%d,%d\n" % (i, i % 3) for i in range(rows)))
    return path


def files(folder: Path) -> list[str]:
    """Suffixes of all files in the cache except locks."""
    found = [p.name.split(".", 1)[1] for p in folder.rglob("*.*") if p.is_file() and p.suffix != ".lock"]
    return sorted(re.sub(r"\w{16}\.tmp", "tmp", suffix) for suffix in found)


@pytest.fixture
def csv(tmp_path):
    return make(tmp_path / "a.csv")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch, tmp_path):
    """Counts conversions over all processes, and makes each take half a second."""
    record, real = tmp_path / "conversions", convert.convert

    def counted(*arguments):
        with open(record, "a") as stream:
            stream.write("x")
        time.sleep(0.5)
        return real(*arguments)

    monkeypatch.setattr(convert, "convert", counted)
    return lambda: len(record.read_text()) if record.exists() else 0


def in_processes(count: int, target, *arguments) -> list:
    """The result of ``target``, or its exception, in each of ``count`` processes started together."""
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


def a_day_later(folder: Path) -> None:
    for path in folder.rglob("*.*"):
        os.utime(path, (time.time() - convert.OLD_S - 1,) * 2)


def open_and_report(path: Path, folder: Path) -> tuple[int, str]:
    table = open_table(path, label="label", cache_dir=folder)
    return table.num_rows, table.digest


def test_four_processes_convert_once(csv, folder, conversions):
    found = in_processes(4, open_and_report, csv, folder)
    assert conversions() == 1
    assert set(found) == {(500, found[0][1])}
    assert files(folder) == COMPLETE


def test_four_processes_get_the_same_failure(tmp_path, folder):
    path = tmp_path / "a.csv"
    path.write_text("path,label\na\n")
    found = in_processes(4, open_and_report, path, folder)
    assert {str(error) for error in found} == {str(found[0])}
    assert all(isinstance(error, DataError) and "line 2 has 1" in error.message for error in found)


def test_missing_column_of_one_process_does_not_fail_others(csv, folder, conversions):
    def opened(text):
        return open_table(csv, text=text, cache_dir=folder).num_rows

    wrong = FORK.Process(target=_child, args=(FORK.Queue(), FORK.Barrier(1), opened, [["nothing"]]))
    wrong.start()
    time.sleep(0.25)
    assert opened(["path"]) == 500
    wrong.join(10)


def test_second_open_converts_nothing(csv, folder, conversions, monkeypatch, caplog):
    """Not under another name of the file either, and without taking the lock. The first is announced in a line."""
    (csv.parent / "link.csv").symlink_to(csv)
    monkeypatch.chdir(csv.parent)
    caplog.set_level("INFO")
    digest = open_table(csv, label="label", cache_dir=folder).digest
    monkeypatch.setattr(convert, "made_once", lambda path: pytest.fail("locked"))
    for name in (csv, str(csv), "a.csv", csv.parent / "link.csv", f"file://{csv}"):
        assert open_table(name, label="label", cache_dir=folder).digest == digest
    assert conversions() == 1
    assert len(caplog.records) == 1
    assert f"{csv}: converting it, once" in caplog.text


def test_conversion_between_the_check_and_the_lock(csv, folder, conversions, monkeypatch):
    real = convert.made_once

    def late(path):
        monkeypatch.setattr(convert, "made_once", real)
        open_table(csv, label="label", cache_dir=folder)
        return real(path)

    monkeypatch.setattr(convert, "made_once", late)
    open_table(csv, label="label", cache_dir=folder)
    assert conversions() == 1


def test_changed_source_is_converted_again_and_old_files_are_deleted(csv, folder, conversions):
    """An open table of the old version stays; a young one may be the copy that another machine has of the file."""
    old = open_table(csv, label="label", cache_dir=folder)
    assert len(open_table(make(csv, 600), label="label", cache_dir=folder)) == 600
    assert pickle.loads(pickle.dumps(old)).strings("path", np.array([499])) == ["p499"]  # as a loader process does
    assert files(folder) == sorted(COMPLETE * 2)
    a_day_later(folder)
    os.utime(csv, ns=(1, 1))
    open_table(csv, label="label", cache_dir=folder)
    assert files(folder) == COMPLETE
    assert conversions() == 3
    assert old.strings("path", np.array([499])) == ["p499"]
    assert old.where(3) == f"{csv}, row 3 (from 0)"  # the lines of the file have changed


def test_changed_source_on_a_file_system_that_records_whole_seconds(csv, folder, monkeypatch):
    """An edit in the second of the conversion changes neither size nor times."""
    real = os.stat

    def coarse(path, *args, **kwargs):
        found = real(path, *args, **kwargs)
        if path != str(csv):
            return found
        whole = {name: getattr(found, name) // 10**9 * 10**9 for name in ("st_mtime_ns", "st_ctime_ns")}
        return SimpleNamespace(st_mode=found.st_mode, st_size=found.st_size, st_ino=found.st_ino, **whole)

    monkeypatch.setattr(os, "stat", coarse)
    for _ in range(2):
        before = open_table(csv, label="label", cache_dir=folder).digest
        text = csv.read_bytes()
        csv.write_bytes(text.replace(b"p0,0\n", b"p0,2\n") if b"p0,0\n" in text else text.replace(b"p0,2\n", b"p0,0\n"))
        assert open_table(csv, label="label", cache_dir=folder).digest != before


@pytest.mark.parametrize("replaced", [False, True])
def test_changed_source_of_the_same_size_and_time(csv, folder, replaced):
    """Archives and ``cp -p`` give two versions of a file the same mtime."""
    before = open_table(csv, label="label", cache_dir=folder).digest
    stat, text = csv.stat(), csv.read_bytes().replace(b"p0,0\n", b"p0,1\n")
    target = csv.with_suffix(".new") if replaced else csv
    target.write_bytes(text)
    os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    target.rename(csv)
    assert open_table(csv, label="label", cache_dir=folder).digest != before


def test_open_table_survives_an_emptied_cache(csv, folder):
    """As cleaners of /tmp and ~/.cache do. It is opened before training, but may be read much later."""
    table = open_table(csv, label="label", cache_dir=folder)
    state = pickle.dumps(table)
    shutil.rmtree(folder)
    assert table.strings("path", np.array([0, 499])) == ["p0", "p499"]
    assert table.labels(np.arange(2)).shape == (2,)
    with pytest.raises(DataError, match="no longer in the cache\\n  -> the cache was emptied while it was in use"):
        pickle.loads(state)


def test_label_columns_have_entries_of_their_own(csv, folder, conversions):
    for label in ("label", None, "path", "label", None, "path"):
        assert open_table(csv, label=label, cache_dir=folder).label == label
    assert conversions() == 3


@pytest.mark.parametrize("kind", COMPLETE)
@pytest.mark.parametrize("damage", ["truncated", "missing", "empty"])
def test_damaged_cache_is_rebuilt(csv, folder, kind, damage):
    open_table(csv, label="label", cache_dir=folder)
    (path,) = folder.rglob(f"*.{kind}")
    if damage == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 2 if damage == "truncated" else 0)
    table = open_table(csv, label="label", cache_dir=folder)
    assert table.strings("path", np.array([499])) == ["p499"]
    assert table.labels(np.array([499])).tolist() == [499 % 3]
    assert files(folder) == COMPLETE


def _convert_forever(path: Path, folder: Path) -> None:
    real = csv_reader.read_batches

    def endless(*arguments):
        yield from real(*arguments)
        time.sleep(100)

    csv_reader.read_batches = endless
    open_table(path, label="label", cache_dir=folder)


def test_killed_converter_is_replaced_and_its_files_are_deleted(csv, folder):
    victim = FORK.Process(target=_convert_forever, args=(csv, folder))
    victim.start()
    _until(lambda: files(folder) == ["arrow.tmp", "codes.tmp"])
    waiting = FORK.Queue()
    heir = FORK.Process(target=_child, args=(waiting, FORK.Barrier(1), open_and_report, (csv, folder)))
    heir.start()
    time.sleep(0.3)
    assert waiting.empty()
    os.kill(victim.pid, signal.SIGKILL)
    rows, _ = waiting.get(timeout=20)
    assert rows == 500
    assert files(folder) == [*COMPLETE[:1], "arrow.tmp", *COMPLETE[1:2], "codes.tmp", *COMPLETE[2:]]
    a_day_later(folder)
    open_table(make(csv, 600), label="label", cache_dir=folder)
    assert files(folder) == COMPLETE
    victim.join(10), heir.join(10)


def test_machines_that_see_no_locks_of_each_other_all_convert(csv, folder, conversions, monkeypatch):
    monkeypatch.setattr(locks.Lock, "try_acquire", lambda _: True)
    found = in_processes(4, open_and_report, csv, folder)
    assert 1 <= conversions() <= 4
    assert set(found) == {(500, found[0][1])}
    assert files(folder) == COMPLETE


def _until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


@pytest.mark.parametrize("limit", [5000, 20_000, 100_000])
def test_full_disk_leaves_no_files(tmp_path, folder, limit):
    """A limit on file size fails as a full disk does: in the middle of a write."""
    path = make(tmp_path / "a.csv", 20_000)
    script = (
        "import resource, sys; from pathlib import Path; from harness.data.table.table import open_table\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "try: open_table(sys.argv[1], label='label', cache_dir=Path(sys.argv[2]))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", script, str(path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("DataError"), done.stdout + done.stderr
    assert "the cache cannot be written: File too large" in done.stdout
    assert "APEX_HARNESS_CACHE" in done.stdout
    assert files(folder) == []
    assert len(open_table(path, label="label", cache_dir=folder)) == 20_000


@pytest.mark.parametrize("obstacle", ["file", "read-only"])
def test_unwritable_cache_is_an_error_with_a_remedy(csv, folder, obstacle):
    if obstacle == "file":
        folder.write_text("a file in the way")
    with pytest.raises(DataError, match="the cache cannot be written") as caught:
        open_table(csv, cache_dir=folder if obstacle == "file" else Path("/proc/cache"))
    assert "APEX_HARNESS_CACHE" in caught.value.hint


def test_default_cache_folder(csv, tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "chosen"))
    open_table(csv)
    assert files(tmp_path / "chosen") == ["arrow", "json"]
    monkeypatch.delenv("APEX_HARNESS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/apex-harness")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "apex-harness"


def test_forked_and_spawned_workers_read_the_table(csv, folder):
    table = open_table(csv, label="label", cache_dir=folder)
    rows = np.arange(0, 500, 7)
    found = in_processes(2, lambda: (table.strings("path", rows), table.labels(rows).tolist()))
    assert found == [([f"p{i}" for i in rows], (rows % 3).tolist())] * 2
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(table.strings, ("path", np.array([3, 1]))) == ["p3", "p1"]


def test_errors_leak_no_threads_or_files(tmp_path, folder):
    path = make(tmp_path / "a.csv", 5000)
    with open(path, "ab") as stream:
        stream.write(b"short\n")
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(3):
        with contextlib.suppress(DataError):
            open_table(path, label="label", cache_dir=folder)
    gc.collect()
    after = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    assert after[0] <= before[0]
    assert after[1] <= before[1] + 4  # pyarrow keeps a pool of its own
