"""Run the quick start and the fast tests on several versions of Python and torch, as far as this machine has the
interpreters (of pyenv, or on the path), and write a table.

make test-versions        (downloads several GB for each torch)

The row of the oldest Python has the lowest version of every package that setup.cfg allows, all at once.
"""

from __future__ import annotations

import argparse
import configparser
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "versions.md"
EXTRAS = "digits,tensorboard,report,sweep"
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")


def floors() -> list[str]:
    """The lowest version of each package that setup.cfg allows, as requirements for pip."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].split()
    return [line.replace(">=", "==") for line in lines]


# {Python: packages whose versions are given}; pip finds the newest of the others
VERSIONS = {"3.10": floors(), "3.12": ["torch==2.11.0", "torchvision==0.26.0"], "3.13": []}
EXPECTED = 0.95  # validation accuracy of the quick start


@dataclass
class Result:
    """What one pair of versions did. ``tests``: as in "1200 passed, 3 skipped"."""

    python: str
    torch: str
    quick_start: str = ""
    tests: str = ""
    failed: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failed and "passed" in self.tests and self.quick_start.startswith("accuracy")


def interpreter(version: str) -> str | None:
    """A Python ``version``, such as 3.12, of pyenv or on the path; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(
        pyenv.glob(f"versions/{version}.*/bin/python"), key=lambda path: [*map(int, path.parts[-3].split("."))]
    )
    return str(found[-1]) if found else shutil.which(f"python{version}")


def environment(folder: Path, python: str, packages: list[str]) -> Path:
    """The python of a virtual environment in ``folder`` with ``packages``, which is made if it is not there."""
    own = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages, "-e", f"{ROOT}[{EXTRAS}]", *TOOLS], check=True)
        (folder / "complete").touch()
    return own


def quick_start(python: Path, folder: Path) -> str:
    """What ``make train`` does, in ``folder``: "accuracy 0.99", or the end of the error."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    (folder / "configs").symlink_to(ROOT / "configs")
    data = [python, "-m", "harness", "data", "digits", "data/digits"]
    launch = [python, "-m", "harness", "launch", "-c", "configs/digits.yaml", "--nproc", "2"]
    for command in (data, launch):
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            return f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"
    reached = float(done.stderr.rpartition("best top1 ")[2].split()[0])
    return f"accuracy {reached:.4f}" if reached >= EXPECTED else f"only reached {reached:.4f}"


def tests(python: Path, folder: Path, words: list[str]) -> tuple[str, tuple[str, ...]]:
    """(counts, names of failed tests) of the fast tests."""
    report = folder / "tests.xml"
    command = [python, "-m", "pytest", "-q", "-n", "4", "--dist", "loadfile", "-m", "not slow", f"--junitxml={report}"]
    subprocess.run([*command, *words], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    suite = ElementTree.parse(report).getroot()[0]
    cases = list(suite.iter("testcase"))
    failed = tuple(
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases if case.find("failure") is not None or case.find("error") is not None
    )  # fmt: skip
    skipped = sum(case.find("skipped") is not None for case in cases)
    counts = {"passed": len(cases) - skipped - len(failed), "failed": len(failed), "skipped": skipped}
    return ", ".join(f"{number} {name}" for name, number in counts.items() if number), failed


def measured(name: str, folder: Path, words: list[str]) -> Result:
    """What Python ``name`` does with its packages."""
    python = interpreter(name)
    if python is None:
        return Result(name, "–", "no interpreter on this machine")
    own = environment(folder / name, python, VERSIONS[name])
    shown = "import platform, torch; print(platform.python_version(), torch.__version__)"
    seen = subprocess.run([own, "-c", shown], check=True, capture_output=True, text=True).stdout.split()
    scratch = folder / f"{name}-scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    result = Result(*seen, quick_start(own, scratch))
    result.tests, result.failed = tests(own, scratch, words)
    return result


def commit() -> str:
    """The short name of the commit of this folder, with a mark if files have changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def table(results: list[Result]) -> str:
    """The Markdown of the results."""
    lines = ["# Versions", "", f"`make test-versions` on {time.strftime('%d %B %Y')}, commit {commit()}, on CPUs.", "",
             "| Python | torch | quick start | fast tests |", "| --- | --- | --- | --- |"]  # fmt: skip
    lines += [f"| {each.python} | {each.torch} | {each.quick_start} | {each.tests or '–'} |" for each in results]
    failed = [f"- Python {each.python}, torch {each.torch}: `{name}`" for each in results for name in each.failed]
    return "\n".join([*lines, *(["", "Failed:", "", *failed] if failed else [])]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="PYTHON", help="one version, such as 3.10")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions", help="for the environments")
    parser.add_argument("tests", nargs="*", help="paths of tests (default: all fast ones)")
    given = parser.parse_args()
    wanted = [name for name in VERSIONS if given.only in (None, name)]
    results = [measured(name, given.folder.resolve(), given.tests) for name in wanted]
    print(table(results))
    if not given.tests and given.only is None:
        OUT.write_text(table(results), encoding="utf-8")
    return int(not all(each.passed for each in results))


if __name__ == "__main__":
    sys.exit(main())
