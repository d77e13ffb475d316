"""Run the quick start and the fast tests on several versions of Python and torch, with the interpreters of this machine
(of pyenv, or on the path).

make test-versions        (downloads several GB for each torch)

The oldest Python gets the lowest version of every package that setup.cfg allows, all at once.
"""

from __future__ import annotations

import argparse
import configparser
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "digits,tensorboard,report,sweep"
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
EXPECTED = 0.95  # validation accuracy of the quick start
TESTS = ["pytest", "-q", "-n", "4", "--dist", "loadfile", "-m", "not slow"]


def floors() -> list[str]:
    """The lowest version of each package that setup.cfg allows, as requirements for pip."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].split()
    return [line.replace(">=", "==") for line in lines]


# {Python: packages whose versions are given}; pip finds the newest of the others
VERSIONS = {"3.10": floors(), "3.12": ["torch==2.11.0", "torchvision==0.26.0"], "3.13": []}


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


def fault(version: str, folder: Path, tests: Sequence[str]) -> str:
    """What goes wrong with Python ``version``; empty if nothing does."""
    python = interpreter(version)
    if python is None:
        return "there is no interpreter on this machine"
    own, scratch = environment(folder / version, python, VERSIONS[version]), folder / f"{version}-scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    (scratch / "configs").symlink_to(ROOT / "configs")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for words, place in (
        (["harness", "data", "digits", "data/digits"], scratch),
        (["harness", "launch", "-c", "configs/digits.yaml", "--nproc", "2"], scratch),
        ([*TESTS, *tests], ROOT),
    ):
        if code := subprocess.run([own, "-m", *words], cwd=place, env=environ).returncode:
            return f"exit code {code} of {' '.join(words)}"
    reached = json.loads((scratch / "runs" / "digits" / "summary.json").read_text())["best"]["top1"]
    return "" if reached >= EXPECTED else f"the quick start only reached {reached:.4f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="PYTHON", help="one version, such as 3.10")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions", help="for the environments")
    parser.add_argument("tests", nargs="*", help="paths of tests (default: all fast ones)")
    given = parser.parse_args()
    wanted = [name for name in VERSIONS if given.only in (None, name)]
    found = {name: fault(name, given.folder.resolve(), given.tests) for name in wanted}
    for name, text in found.items():
        print(f"Python {name}: {text or 'passed'}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
