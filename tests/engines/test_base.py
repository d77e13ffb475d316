"""What all engines promise: settings without a meaning are refused, and a failure on one rank is one report."""

from __future__ import annotations

import json
import re
import sys

import pytest

from harness.config import plugins
from harness.engines import launch
from harness.errors import ConfigError, LaunchError
from tests.end_to_end.experiment import write_config
from tests.end_to_end.processes import END_S, started

NEEDS = {"dask": "distributed", "flyte": "flytekit"}
WITHOUT_A_MEANING = {
    "local": "nnodes=2",
    "dask": "max_restarts=1",
}


@pytest.mark.parametrize(
    ("engine", "word"), [(engine, word) for engine, words in WITHOUT_A_MEANING.items() for word in words.split()]
)
def test_settings_without_a_meaning_are_refused(tmp_path, stripes, engine, word):
    pytest.importorskip(NEEDS.get(engine, "torch"))
    job = launch.plan(str(write_config(tmp_path, stripes)), [f"launch.engine={engine}", f"launch.{word}"])
    part = plugins.find("engine", engine, "here")
    for call in (part.render, part.start):
        with pytest.raises(LaunchError, match=rf"launch\.{word} does not apply to engine {engine}"):
            call(job)


def test_restarts_from_scratch_are_refused(tmp_path, stripes):
    config, never = str(write_config(tmp_path, stripes)), "checkpoint.resume=never"
    for engine in ("local", "torchrun", "flyte"):
        launch.plan(config, [f"launch.engine={engine}", never])
        with pytest.raises(ConfigError, match="each restart, which would begin at step 0"):
            launch.plan(config, [f"launch.engine={engine}", "launch.max_restarts=1", never])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "torchrun", "flyte"])
def test_exception_on_rank_1(tmp_path, stripes, engine):
    pytest.importorskip(NEEDS.get(engine, "torch"))
    model = {"name": "tests.end_to_end.models.Raises", "args": {"rank": 1, "step": 11}}
    config = write_config(tmp_path, stripes, model=model)
    command = [sys.executable, "-m", "harness", "launch", "-c", config, "--engine", engine, "--nproc", "2"]
    with started(command, tmp_path / "terminal.txt") as run_:
        assert run_.wait(90 + END_S) == 1, run_.text()  # one import of torch after the other
        assert not run_.alive()
    text = run_.text()
    assert text.count("failed: rank 1 on") == 1
    report = text[text.index("failed: rank 1 on") :]
    assert re.search(r"at step 10: ArithmeticError: \S+models\.py:\d+: a layer went wrong", report), report
    assert re.search(r"  rank 0: [\w ]+ on .* at step \d+", report), report
    assert set(json.loads((tmp_path / "runs" / "run" / "failure.json").read_text())["ranks"]) == {"0", "1"}
    own = text.partition("Root Cause (first observed failure)")[0]  # of torchrun, whose summary repeats the error
    once = (
        "Traceback (most recent call last)" if engine == "flyte" else "ArithmeticError: a layer went wrong, only here"
    )
    assert own.count(once) == (1 if engine == "flyte" else 2)  # first with its place, then after the traceback
    if engine == "torchrun":
        assert re.search(r"rank      : 1 \(local_rank: 1\)\n\s+exitcode  : 1 ", text)
        assert "error_file: <N/A>" not in text
