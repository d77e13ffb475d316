"""Fixtures for every test, and paths that tests share."""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

gc.disable()  # until the tests are collected: it would take half of that time, in every worker

# A process's first optimizer sets an environment variable. Make it here, or some test is blamed for the leak.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

with suppress(ImportError):  # the tests for a GPU do without it
    from hypothesis import HealthCheck, settings

    # A busy machine is no fault of a test.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")

SLOW_IMPORTS = (
    "hypothesis", "pandas", "torch._dynamo", "torchvision.transforms.v2", "harness.training.build",
    "harness.tools.sweep.study", "torch.distributed.fsdp", "distributed", "playwright.sync_api", "mlflow",
)  # fmt: skip
ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"


def pytest_addoption(parser):
    parser.addoption(
        "--device", default="cpu", help="cuda: run the tests marked gpu, and create the tensors of tests/apex there"
    )


def pytest_configure(config):
    """Hide GPUs from the tests and all processes that they start, so that they do the same on every machine: two ranks
    on one GPU are refused, and numbers of a GPU differ."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or each process that compiles starts others
    if config.getoption("--device") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from tests import ranks

    ranks.ENVIRON.update(os.environ)  # a conftest of a folder may have imported it before
    if hasattr(config, "workerinput"):
        from tests import forked

        forked.start_commands()
        ranks.share_server()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes():
    """Import once what the workers need, and fork them from this process; they share the server of the ranks."""
    from tests import forked, ranks

    ranks.start_server()
    for name in SLOW_IMPORTS:
        with suppress(ImportError):
            importlib.import_module(name)
    forked.fork_commands(code=True)


@pytest.hookimpl(trylast=True)  # what "-m" leaves out does not count
def pytest_collection_modifyitems(items):
    """Put the longest files first: with ``--dist loadfile``, pytest-xdist hands out whole files in this order, and
    short ones fill the gaps at the end. Slow tests count most, then end-to-end tests, which train on several ranks."""
    seconds = Counter()
    for item in items:
        is_long = item.path.parent.name == "end_to_end"
        seconds[item.path] += 15 if item.get_closest_marker("slow") else 2 if is_long else 0.05
    items.sort(key=lambda item: -seconds[item.path])


def pytest_collection_finish():
    gc.freeze()  # modules and tests stay until the end
    gc.enable()
    atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def same_logging():
    """Undo what a command that was called in this process did to logging: its log file is gone after the test."""
    loggers = [logging.getLogger(name) for name in ("harness", "py.warnings")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        for handler in {*logger.handlers} - {*handlers}:
            handler.close()
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture(autouse=True)
def no_leaks():
    """Fail a test that leaks environment variables, a process group, a default dtype or a thread count."""
    environ, dtype, threads = dict(os.environ), torch.get_default_dtype(), torch.get_num_threads()
    yield
    own = (
        "PYTEST_",
        "COVERAGE",
        "KMP_",
        "__KMP_",
        "_TORCHINDUCTOR_",
        "TORCHINDUCTOR_",
    )  # of pytest, OpenMP and torch.compile
    leaked = {name for name in set(environ) ^ set(os.environ) if not name.startswith(own)}
    assert not leaked, f"environment variables leaked: {sorted(leaked)}"
    assert not torch.distributed.is_initialized(), "a process group was left open"
    assert torch.get_default_dtype() is dtype, "the default dtype was left changed"
    if torch.is_autocast_enabled("cpu"):  # by a command that was called in this process
        from harness.apex import amp

        amp.reset()
    assert torch.get_num_threads() == threads, "the thread count was left changed"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real datasets next to the project; skips the test if it does not exist."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the real datasets are not next to the project ({SHARED_DATA.name}/ does not exist)")
    return SHARED_DATA
