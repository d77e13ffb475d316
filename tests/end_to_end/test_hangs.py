"""A rank that keeps the others waiting is named, with the place where it is, and all ranks end."""

from __future__ import annotations

import json
import re
import sys
import time

import pytest

from benchmarks.campaign.start import descendants
from harness.errors import EXIT_DONE, EXIT_FAILURE, EXIT_OWN_CODE
from tests.end_to_end.experiment import run, run_folder, write_config
from tests.end_to_end.models import Hangs
from tests.end_to_end.processes import (
    END_S,
    START_S,
    drivers,
    environment_of,
    start_python,
    started,
    wait_for_steps,
    wait_until,
    without_greetings,
)
from tests.ranks import free_port, launch_environment, wait_for

MODELS = "tests.end_to_end.models"
TIMEOUT_S = 8.0  # a busy machine may need some seconds for a step
STEP = 3  # in which it happens; two steps are done by then


def hanging(folder, data, how, rank=1, **settings):
    model = {"name": f"{MODELS}.{Hangs.__name__}", "args": {"rank": rank, "step": STEP, "how": how}}
    runtime = {"device": "cpu", "timeout_s": TIMEOUT_S}
    return write_config(folder, data, model=model, runtime=runtime, train={"log_every": 1}, **settings)


def failure_of(config):
    return json.loads((run_folder(config) / "failure.json").read_text())


# What rank 1 does; the cause, parts of the message, and a part of its stack.
ENDS = {
    "sleep": ("hung", ["calling <lambda> (models.py:", "rank 0 waited for it in _wait (harness/apex/"], "time.sleep"),
    "exit": ("error", ["the code called sys.exit(0) before the end"], "sys.exit"),
    "no gradient": ("error", ["no parameter of the model received a gradient"], "strategies/ddp.py"),
}


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.slow) for how in ("sleep", "no gradient")), "exit"]
)
def test_rank_that_goes_wrong_is_named(tmp_path, data, how):
    cause, words, line = ENDS[how]
    config, terminal = hanging(tmp_path, data, how), tmp_path / "terminal.txt"
    world_size = 3 if how == "sleep" else 2
    codes = wait_for(drivers(world_size, ["-c", str(config), "batch.global=12"], terminal), START_S)
    assert codes == [EXIT_OWN_CODE if how == "exit" else EXIT_FAILURE] * world_size
    failure, text = failure_of(config), terminal.read_text()
    assert (failure["rank"], failure["cause"], failure["step"]) == (1, cause, STEP - 1)
    assert line in "".join(failure["traceback"])
    for word in words:
        assert word in failure["message"]
        assert text.count(word) == 1
    assert "gloo" not in without_greetings(text)


# What a rank does, which one, the launcher ("hand": none, and rank 0 holds the store), and parts of the message.
FROZEN = [
    ("stopped", 0, "hand", "is stopped, by SIGSTOP or a debugger"),
    ("stopped", 1, "local", "is stopped, by SIGSTOP or a debugger"),
    ("c call", 1, "torchrun", "it is running C code that does not release the GIL"),
    ("lock", 0, "torch.distributed.launch", "calling _wait_for_another_thread (models.py:"),
    ("vanish", 1, "local", "ended without a report"),
    ("extra collective", 1, "local", "ranks called different collectives"),
]


def commands(config, launcher):
    """Python's words that start two ranks, each with its environment."""
    driver = ["driver.py", "-c", config]
    if launcher == "hand":
        port = free_port()
        return [(driver, launch_environment(rank, 2, port)) for rank in range(2)]
    if launcher == "torch.distributed.launch":
        return [(["-m", launcher, "--standalone", "--nproc_per_node=2", *driver], {})]
    return [(["-m", "harness", "launch", "-c", config, "--engine", launcher, "--nproc", "2"], {})]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "rank", "launcher", "message"), FROZEN)
def test_hung_rank_is_named_and_ended(tmp_path, data, how, rank, launcher, message):
    config = hanging(tmp_path, data, how, rank)
    terminal = tmp_path / "terminal.txt"
    runs = [start_python(words, terminal, **environ) for words, environ in commands(config, launcher)]
    ranks: list[int] = []
    try:
        wait_for_steps(run_folder(config), STEP - 1)
        ranks = [pid for run in runs for pid in descendants(run[0].pid)]
        assert ranks or launcher == "hand"
        wait_until(lambda: (run_folder(config) / "failure.json").exists(), START_S, "the report")
    finally:
        codes = wait_for(runs, END_S)
    wait_until(lambda: not any(map(environment_of, ranks)), 5, "nothing is left")
    assert EXIT_DONE not in codes
    failure = failure_of(config)
    if how != "extra collective":  # gloo ends the rank that receives too much
        assert failure["rank"] == rank
        assert failure["cause"] == ("node_lost" if how == "vanish" else "hung")
    assert failure["step"] == STEP - 1
    assert message in failure["message"]
    assert message in terminal.read_text()
    assert "out of memory" not in json.dumps(failure)


@pytest.mark.slow
def test_thread_of_the_user_does_not_keep_a_failed_rank(tmp_path, data):
    config = hanging(tmp_path, data, "thread", rank=0)
    with started([sys.executable, "driver.py", "-c", config], tmp_path / "terminal.txt", fork=True) as one:
        wait_until(lambda: (run_folder(config) / "failure.json").exists(), START_S, "the report")
        assert one.wait(END_S) == EXIT_OWN_CODE
    assert one.text().count("ArithmeticError: a layer went wrong, only here") == 2  # first, and in the traceback


class Blocks:
    """The dataset's read ``number``, from 0, never returns."""

    def __init__(self, number):
        self.rank, self.number = 0, number

    def arm(self, config):
        from harness.data.images import ImageTable

        read, reads = ImageTable.batch, []

        def batch(dataset, rows, epoch):
            reads.append(rows)
            if len(reads) > self.number:
                time.sleep(1000)
            return read(dataset, rows, epoch)

        ImageTable.batch = batch


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 4], ids=["first look", "step"])
def test_read_that_never_returns_ends_a_single_process(tmp_path, data, number):
    limits = {"timeout_s": 2.0, "work_timeout_s": 3.0}
    config = write_config(tmp_path, data, runtime={"device": "cpu", **limits})
    assert run(config, 1, kill=Blocks(number), timeout_s=START_S) == [EXIT_FAILURE]
    failure = failure_of(config)
    assert (failure["rank"], failure["cause"], failure["error"]) == (0, "hung", "Hung")
    what = "reading a batch of the dataset" if number else "building the model"
    assert re.search(rf"{what} has not ended within [23] s: it was in .*test_hangs.py", failure["message"])
    assert failure["message"] in (tmp_path / "terminal-0.txt").read_text()
    assert "time.sleep(1000)" in "".join(failure["traceback"])


class Slow:
    """Rank ``rank`` takes longer for its first ``what`` than it may be silent."""

    LIMIT_S, TAKES_S = 5.0, 8.0

    def __init__(self, rank, what):
        self.rank, self.what = rank, what

    def arm(self, config):
        from harness.data.table import convert
        from harness.runs import checkpoints
        from harness.training import loop
        from harness.training.evaluation import prediction_table

        places = {
            "conversion": (convert, "convert"),
            "write": (checkpoints.Checkpoints, "write"),
            "best": (checkpoints, "save_weights"),
            "verification": (checkpoints, "damage"),
            "restoring": (checkpoints, "read"),
            "predictions": (prediction_table.PredictionFile, "finish"),
            "compilation": (loop, "step"),
        }
        module, name = places[self.what]
        original, late = getattr(module, name), [self.TAKES_S]

        def work(*args, **options):
            time.sleep(late.pop() if late else 0.0)
            return original(*args, **options)

        setattr(module, name, work)


def slow_run(folder, data, *cases, **settings):
    """Start the run once for each of ``cases``, (rank, what), each time with more steps."""
    runtime = {"device": "cpu", "timeout_s": Slow.LIMIT_S, "work_timeout_s": 2 * START_S}
    settings = {"runtime": runtime, "data": {"cache_dir": str(folder / "cache")}, **settings}
    config = write_config(folder, data, **settings)
    for number, (rank, what) in enumerate(cases, 1):
        words = (f"train.epochs={number}", "schedule.name=constant")
        codes = run(config, 2, *words, kill=Slow(rank, what), timeout_s=4 * START_S)  # to compile
        assert codes == [EXIT_DONE] * 2, (what, (folder / "terminal-0.txt").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "settings"),
    [
        ([(0, "conversion"), (0, "write"), (0, "verification"), (1, "restoring")], {}),
        ([(0, "write")], {"parallel": {"strategy": "fsdp"}, "checkpoint": {"format": "sharded"}}),
        ([(0, "best"), (0, "predictions")], {}),
        ([(1, "compilation")], {"model": {"compile": True}}),
    ],
    ids=["checkpoints", "shards", "results", "compiled"],
)
def test_rank_that_is_slow_in_announced_work_is_waited_for(tmp_path, data, cases, settings):
    slow_run(tmp_path, data, *cases, **settings)


@pytest.mark.slow
def test_rank_that_hangs_in_announced_work_is_named(tmp_path, data):
    config = write_config(tmp_path, data, runtime={"device": "cpu", "timeout_s": 30, "work_timeout_s": 2.0})
    assert run(config, 2, kill=Slow(0, "write"), timeout_s=START_S) == [EXIT_FAILURE] * 2
    failure = failure_of(config)
    assert (failure["rank"], failure["cause"]) == (0, "error")
    assert "writing the checkpoint" in failure["message"]
    assert "work (test_hangs.py:" in failure["message"]
