"""Fixtures for every test, and paths that tests share."""

from __future__ import annotations

import atexit
import gc
import itertools
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


CHEAP = {"data", "stripes"}  # module fixtures that several workers may as well build


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Put the longest tests first: pytest-xdist hands them out in this order, and short ones fill the gaps at the end.

    With ``--dist loadgroup``, a file is handed out as a whole, for its fixtures' sake, except slow tests that need no
    expensive one. The estimate of a file counts slow tests, then end-to-end tests, which train on several ranks.
    """
    numbers = itertools.count()
    apart = {item for item in items if item.get_closest_marker("slow") and not _expensive(item)}
    slow = Counter(item.path for item in items if item.get_closest_marker("slow") and item not in apart)
    end_to_end = Counter(item.path for item in items if item.path.parent.name == "end_to_end")

    def order(item):
        if item in apart:
            item.add_marker(pytest.mark.xdist_group(f"alone-{next(numbers)}"))
            return 0 if item.get_closest_marker("timeout") else 2, 0, 0  # only the longest have a limit of their own
        item.add_marker(pytest.mark.xdist_group(str(item.path)))
        return 1 if slow[item.path] else 3, -slow[item.path], -end_to_end[item.path]

    items.sort(key=order)


def _expensive(item) -> bool:
    """Whether ``item`` needs a fixture that its file shares, such as a cluster or a finished training."""
    found = item._fixtureinfo.name2fixturedefs
    return any(defs[-1].scope == "module" and name not in CHEAP for name, defs in found.items())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node, ids):
    """Refuse versions that hand out the tests of a file to all workers, each of which then trains for its fixtures."""
    if node.config.getoption("dist") == "loadgroup" and any("@" not in name.rpartition("]")[2] for name in ids):
        raise pytest.UsageError(
            f"pytest {pytest.__version__} and this pytest-xdist do not group tests: type pip install 'pytest<9.2'"
        )


def pytest_collection_finish():
    gc.freeze()  # modules and tests stay until the end
    gc.enable()
    atexit.register(gc.unfreeze)


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


def pytest_terminal_summary(terminalreporter):
    """Print one line per engine: how many of its tests ran, and which were skipped, and why."""
    counts: dict[str, Counter[str]] = {}
    reasons: dict[str, set[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            file = Path(report.nodeid.partition("::")[0])
            if file.parent.name != "engines" or (outcome == "passed" and report.when != "call"):
                continue
            engine = file.stem.removeprefix("test_")
            counts.setdefault(engine, Counter())[outcome] += 1
            if outcome == "skipped":
                reasons.setdefault(engine, set()).add(str(report.longrepr[2]).removeprefix("Skipped: "))
    if counts:
        terminalreporter.section("engines")
    for engine, found in sorted(counts.items()):
        line = f"{engine}: " + ", ".join(f"{number} {outcome}" for outcome, number in found.items())
        terminalreporter.write_line(line, red="skipped" in found or "failed" in found)
        for reason in sorted(reasons.get(engine, ())):
            terminalreporter.write_line(f"    skipped: {reason}")
