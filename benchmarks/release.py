"""Builds the wheel and the source distribution, and trains from each in an empty environment. ``make dist``.

    python -m benchmarks.release [--offline]

The files of the repository are copied first, so that nothing else gets into either. A fresh virtual environment outside
the clone then installs the file with its dependencies (several GB), writes the digits, and trains on them.
``--offline`` takes all other packages from this environment. The results are in ``dist``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

from harness.version import __version__

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 3600.0  # of an installation over a slow network
TRAIN = ["train.max_steps=5", "precision.opt_level=O0", "data.num_workers=0"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--offline", action="store_true", help="take all other packages from this environment")
    arguments = parser.parse_args()
    require_changelog((ROOT / "CHANGELOG.md").read_text())
    with tempfile.TemporaryDirectory() as folder:
        built = build(files_of_repository(), Path(folder) / "clone", ROOT / "dist", arguments.offline)
        for file in built:
            missing = sorted(set(packaged()) - names(file))
            if missing:
                sys.exit(f"error: {file.name} lacks {', '.join(missing)}")
            train(file, Path(folder) / file.suffix, arguments.offline)
            print(f"{file.relative_to(ROOT)}: installed in an empty environment, and trained")
    return 0


def require_changelog(text: str) -> None:
    """Exit unless the newest heading of the changelog is that of this version."""
    found = re.search(r"^## \[(\S+)\]", text, re.M)
    if not found or found[1] != __version__:
        sys.exit(f"error: CHANGELOG.md begins with {found and found[1]}, but harness/version.py says {__version__}")


def files_of_repository() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


def packaged() -> list[str]:
    """What must be in either: all files of the package, among them presets, templates and ``py.typed``."""
    return [name for name in files_of_repository() if name.startswith("harness/")]


def build(files: Sequence[str], clone: Path, out: Path, offline: bool) -> list[Path]:
    """Copy ``files`` to ``clone`` and build there; return the wheel and the source distribution in ``out``."""
    for name in files:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    python = sys.executable
    if not offline:
        python = environment(clone.with_name("build"), offline)
        run([python, "-m", "pip", "install", "--quiet", "setuptools>=77"], clone)
    script = "from setuptools import build_meta as b; print(b.build_wheel('dist')); print(b.build_sdist('dist'))"
    shutil.rmtree(clone / "dist", ignore_errors=True)
    run([python, "-c", script], clone)
    out.mkdir(exist_ok=True)
    return [Path(shutil.copy(file, out)) for file in sorted((clone / "dist").iterdir(), reverse=True)]


def names(file: Path) -> set[str]:
    """The names of the files in a wheel or a source distribution, relative to its project."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            return set(wheel.namelist())
    with tarfile.open(file) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def environment(folder: Path, offline: bool) -> str:
    """Create a virtual environment; return its interpreter."""
    venv.create(folder, with_pip=True)
    if offline:
        here = f"python{sys.version_info.major}.{sys.version_info.minor}"
        own = folder / "lib" / here / "site-packages"
        (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        for bundled in own.glob("setuptools*"):  # of Python 3.11 and older, which cannot build a wheel by itself
            shutil.rmtree(bundled)
    return str(folder / "bin" / "python")


def train(file: Path, folder: Path, offline: bool) -> None:
    """Install ``file`` in a new environment under ``folder``, and train there. Exits if anything fails."""
    python = environment(folder / "venv", offline)
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"] if offline else []
    run([python, "-m", "pip", "install", "--quiet", *options, f"{file}[digits]"], folder)
    harness = str(folder / "venv" / "bin" / "harness")
    run([harness, "data", "digits", "data/digits"], folder)
    run([harness, "train", "data/digits/digits.yaml", *TRAIN], folder)
    (found,) = json.loads(run([harness, "report", "--json", "runs/digits"], folder))
    place = run([python, "-c", "import harness; print(harness.__file__)"], folder).strip()
    if found["state"] != "finished" or not place.startswith(str(folder.resolve())):
        sys.exit(f"error: the run of {file.name} is {found['state']}, of {place}")


def run(command: Sequence[str], folder: Path) -> str:
    """Run ``command`` in ``folder``; return what it prints. Exits with its output if it fails."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} exited with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
