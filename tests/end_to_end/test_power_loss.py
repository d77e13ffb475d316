"""A power cut at any moment: what the harness claims to be safe is, and the same command resumes exactly."""

from __future__ import annotations

import hashlib
import random
import signal
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from harness.errors import CheckpointError
from harness.runs.checkpoints import Checkpoints, read
from harness.runs.weights_file import weights_metadata
from harness.tools.compare.exactness import differences
from tests.end_to_end.experiment import Kill, run, write_config
from tests.end_to_end.power_loss import Disk, record, write
from tests.ranks import start, wait_for

SETTINGS: dict[str, Any] = {
    "model": {"name": "small_cnn", "args": {"width": 2, "dropout": 0.2}},
    "batch": {"global": 16},
    "train": {"epochs": 2, "log_every": 1},
    "checkpoint": {"every": 2, "keep": 1},
}
WAYS = ("nothing", "entries", "zeros", "torn", "any", "any")
NUM_RESUMED = 4


def recorded(config: Path, recording: Path, *overrides: str) -> Path:
    """Train ``config`` to its end with a recorder; return the recording. The disk begins with what is there."""
    root = config.parent / "disk"
    root.mkdir(exist_ok=True)
    words = ["-c", str(config), f"output={root}/runs", *overrides]
    process = start(record, (words, str(config.parent / "terminal.txt"), str(root), str(recording)))
    assert wait_for([process], 90) == [0], (config.parent / "terminal.txt").read_text()
    return recording


@pytest.fixture(scope="module")
def recordings(tmp_path_factory, data):
    """A whole run, and the rest of a run that was killed after 5 of its 8 steps."""
    folder = tmp_path_factory.mktemp("power")
    whole = recorded(write_config(folder / "whole", data, **SETTINGS), folder / "whole.pickle")
    config = write_config(folder / "rest", data, **SETTINGS)
    (folder / "rest/disk").mkdir()
    assert run(config, 1, f"output={folder}/rest/disk/runs", kill=Kill(0, 5)) == [-signal.SIGKILL]
    return whole, recorded(config, folder / "rest.pickle")


def crashes(
    recording: Path, folder: Path, forget: Callable[[str], bool] = lambda path: False
) -> Iterator[tuple[Path, dict[str, Any], str]]:
    """Write every state that a crash may leave, once: (folder of the run, what was claimed by then, when and how)."""
    disk, dice, seen = Disk(recording, forget), random.Random(0), set()
    folder.mkdir(exist_ok=True)
    for number, moment in enumerate(disk.replay()):
        for way in WAYS:
            content = disk.after_crash(way, dice)
            mark = hashlib.sha256(repr((sorted(content.items()), disk.claims)).encode()).digest()
            if mark in seen:
                continue
            seen.add(mark)
            place = folder / f"{number}-{len(seen)}"
            write(content, place)
            yield place / "runs/run", dict(disk.claims), f"before operation {number} on {moment.path or '?'}, {way}"


def broken_promises(folder: Path, claims: dict[str, Any], whole: Path) -> list[str]:
    """What was claimed, but is not in ``folder``; ``whole`` is the run that did not crash."""
    found = []
    try:
        newest = Checkpoints(folder / "checkpoints", 1).newest()
    except CheckpointError as error:  # the same command would refuse to start
        return [str(error)]
    step = int(newest.name.removeprefix("step-")) if newest else 0
    if step < claims.get("checkpoint", 0):
        found.append(f"resumes from step {step}, but {claims['checkpoint']} was saved")
    if newest:
        size = read(newest)["log_offset"]
        log = folder / "metrics.jsonl"
        if not log.exists() or log.read_bytes()[:size] != (whole / "metrics.jsonl").read_bytes()[:size]:
            found.append(f"the log does not reach the checkpoint of step {step}")
    if "best" in claims or (newest and read(newest)["state"]["best_step"]):
        wanted = max(claims.get("best", 0), read(newest)["state"]["best_step"] if newest else 0)
        try:
            with safe_open(folder / "weights.safetensors", "pt") as file:
                found += [] if int(weights_metadata(file)["step"]) >= wanted else ["older best weights"]
                assert all(file.get_tensor(name) is not None for name in file.keys())  # noqa: SIM118
        except Exception as error:
            found.append(f"the best weights of step {wanted}: {error}")
    if claims.get("done"):
        for name in ("summary.json", "predictions.csv", "confusion.csv", "config.yaml", "task.json"):
            path = folder / name
            if not path.exists() or path.read_bytes() != (whole / name).read_bytes():
                found.append(f"{name} of the finished run")
    return found


def resumable(folder: Path) -> str:
    """A digest of everything that a resume depends on."""
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != "logs" and path.name not in ("provenance.json", "summary.json")
    }
    return hashlib.sha256(repr(files).encode()).hexdigest()


@pytest.mark.slow
def test_what_is_claimed_survives_a_power_cut_and_resumes_exactly(recordings, tmp_path, data):
    states: dict[str, tuple[Path, str]] = {}
    for number, recording in enumerate(recordings):
        whole = recording.with_suffix("") / "disk/runs/run"
        count = 0
        for folder, claims, when in crashes(recording, tmp_path / str(number)):
            assert broken_promises(folder, claims, whole) == [], when
            states.setdefault(resumable(folder), (folder, when))
            count += 1
        assert count > 100, "the recorder saw too few operations"
    chosen = random.Random(1).sample(sorted(states), min(NUM_RESUMED, len(states)))
    whole = recordings[0].with_suffix("") / "disk/runs/run"
    for index, mark in enumerate(chosen):
        folder, when = states[mark]
        config = write_config(tmp_path / f"resumed-{index}", data, **SETTINGS)
        folder.parent.mkdir(parents=True, exist_ok=True)
        assert run(config, 1, f"output={folder.parent}") == [0], (when, (config.parent / "terminal-0.txt").read_text())
        assert differences(whole, folder) == [], when


# A sync that is left out: its path, and the promise that breaks.
@pytest.mark.parametrize(
    ("left_out", "broken"),
    [
        ("*/state.pt", "no checkpoint of this run can be used"),
        ("*/manifest.json.tmp", "no checkpoint of this run can be used"),
        ("*/step-*.tmp", "no checkpoint of this run can be used"),
        ("*/checkpoints", "resumes from step"),
        ("*/metrics.jsonl", "the log does not reach"),
        ("*/weights.safetensors.tmp", "the best weights"),
        ("*/runs/run", "the best weights"),
        ("*/predictions.csv.tmp", "predictions.csv"),
        ("*/runs", "resumes from step"),
    ],
)
@pytest.mark.slow
def test_a_sync_that_is_left_out_is_found(recordings, tmp_path, left_out, broken):
    whole = recordings[0].with_suffix("") / "disk/runs/run"
    states = crashes(recordings[0], tmp_path, lambda path: fnmatch(path, left_out))
    found = (promise for folder, claims, _ in states for promise in broken_promises(folder, claims, whole))
    assert any(broken in promise for promise in found)
