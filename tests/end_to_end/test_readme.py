"""The README: its commands run, its settings exist, its links work."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks import machine, release
from benchmarks.side_by_side.__main__ import TRAINERS, saving_often
from harness.config import loader
from harness.version import __version__
from tests.conftest import ROOT
from tests.end_to_end.experiment import write_images

README = (ROOT / "README.md").read_text()
INSTALL = (ROOT / "docs" / "install.md").read_text()


def block(language: str, contains: str) -> str:
    """The one fenced block of ``language`` that has ``contains``."""
    (found,) = [b for b in re.findall(rf"```{language}\n(.*?)```", README, re.S) if contains in b]
    return found


def commands(text: str = README) -> list[str]:
    """Every line of every shell block without comments."""
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S)).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


def test_measured_figures_are_those_of_the_results():
    results = "\n".join(path.read_text() for path in (ROOT / "benchmarks" / "results").glob("*.md"))
    section = README.partition("## Measured")[2].partition("\n## ")[0]
    figures = re.findall(r"\b\d+\.\d+\b", section)
    assert figures
    assert [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", results)] == []


def test_version_and_changelog_agree():
    text = (ROOT / "CHANGELOG.md").read_text()
    release.require_changelog(text)
    for other in (text.replace(f"## [{__version__}]", "## [9.9.9]"), "# Changelog\n"):
        with pytest.raises(SystemExit, match="error: CHANGELOG.md begins with "):
            release.require_changelog(other)


def test_package_data_names_every_file_outside_packages():
    """A wheel leaves out the others: presets, templates, ``py.typed``, the configuration of the demo."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = [
        f"{package.replace('.', '/')}/{pattern.strip()}"
        for package, listed in setup["options.package_data"].items()
        for pattern in listed.split(",")
    ]
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "harness").rglob("*") if path.is_file()]
    others = [
        name
        for name in files
        if "__pycache__" not in name and not (name.endswith(".py") and (ROOT / name).with_name("__init__.py").exists())
    ]
    assert {
        "harness/py.typed",
        "harness/config/preset_files/modern.yaml",
        "harness/tools/data/digits.yaml",
        "harness/audit/hook/sitecustomize.py",
    } <= {*others}
    assert [name for name in others if not any(Path(name).match(pattern) for pattern in patterns)] == []


@pytest.mark.slow
def test_release_trains_in_an_empty_environment(tmp_path):
    """As ``make dist OFFLINE=1`` does, from the wheel."""
    pytest.importorskip("setuptools", minversion="77")
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    try:
        files = release.files_of_repository()
    except subprocess.CalledProcessError:
        pytest.skip("git does not list the files of the repository here")
    for file in release.build(files, tmp_path / "clone", tmp_path / "dist", offline=True):
        assert set(release.packaged()) <= release.names(file)
    release.train(next((tmp_path / "dist").glob("*.whl")), tmp_path / "wheel", offline=True)


@pytest.mark.slow
def test_source_distribution_has_every_file_of_the_repository(tmp_path):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("git does not list the files of the repository here")
    files = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True, timeout=250)
    with tarfile.open(next((tmp_path / "dist").iterdir())) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in files if not name.startswith(".")} <= packed


@pytest.mark.slow
def test_wheel_trains_without_a_clone(tmp_path):
    """Build a wheel, unpack it elsewhere, and train two ranks, and a trial of a sweep, from there."""
    pytest.importorskip("setuptools")
    clone, site = tmp_path / "clone", tmp_path / "site"
    clone.mkdir()
    for name in ("harness", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, clone / name, ignore=ignore) if source.is_dir() else shutil.copy(source, clone / name)
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True, timeout=250)
    (wheel,) = clone.glob("*.whl")
    (install,) = [shlex.split(line) for line in commands(INSTALL) if ".whl[" in line]
    words = [word.replace("apex_harness", f"{clone}/apex_harness") for word in install]  # without a network
    offline = [sys.executable, "-m", *words, "--no-deps", "--no-index", "--dry-run", "--target", str(tmp_path / "none")]
    assert "would install apex-harness-" in subprocess.run(offline, capture_output=True, text=True).stdout.lower()
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    write_images(tmp_path / "pets")
    (tmp_path / "pets.yaml").write_text(block("yaml", "name: pets"))
    (tmp_path / "sweep.yaml").write_text("name: sweep\nbase: pets.yaml\nspace: {optimizer.lr: [0.01]}\n")
    (tmp_path / "driver.py").write_text("raise SystemExit('a script of the user')\n")
    environ = {**os.environ, "PYTHONPATH": str(site), "APEX_HARNESS_CACHE": str(tmp_path)}
    quick = ["-c", "pets.yaml", "train.max_steps=1", "batch.global=16", "data.num_workers=0", "precision.opt_level=O0"]
    for words in (
        ["launch", "--engine", "dask", *quick],
        ["sweep", "-c", "sweep.yaml", "launch.nproc=2", *quick[2:]],
        ["--version"],
    ):
        command = [sys.executable, "-m", "harness", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"harness \S+ \(torch \S+, Python \S+\)\n", done.stdout)
    started = {path.parent.name: json.loads(path.read_text())[-1] for path in tmp_path.rglob("provenance.json")}
    assert started.keys() == {path.parent.name for path in tmp_path.rglob("summary.json")} == {"pets", "0000"}
    assert (started["pets"]["world_size"], started["0000"]["world_size"]) == (1, 2)
    for start in started.values():
        assert start["command"][1].startswith(str(site / "harness")), start


def test_every_cell_of_the_peers_page_has_a_source_with_a_date():
    page = (ROOT / "docs" / "peers.md").read_text()
    table, sources = page.partition("\n## ")[0], page.partition("## Sources")[2]
    header, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")
    )
    assert len(rows) <= 20
    used = set()
    for row in rows:
        assert len(row) == len(header), row[0]
        for tool, cell in zip(header[1:-1], row[1:-1], strict=True):
            assert (found := re.search(r"\[(\w\d+)\]$", cell)), (row[0], tool)
            used.add(found[1])
        link = re.search(r"\]\(([^)#]+)[^)]*\)\)$", row[-1])
        assert link, row[0]
        assert (ROOT / "docs" / link[1]).exists(), link[1]
    assert used == set(re.findall(r"\[(\w\d+)\]", sources))
    assert re.search(r"^Read on \d+ \w+ 20\d\d", sources, re.M)
    assert (
        len(re.findall(r"^\*\*[\w ]+\*\*, (?:\w{7} \(\d+ \w+ 20\d\d\)|[\w ]*[\d.]+\d):", sources, re.M))
        == len(header) - 2
    )


def test_the_same_job_is_as_measured_and_as_long_as_its_files():
    page = (ROOT / "docs" / "peers.md").read_text().partition("## The same job")[2].partition("\n## ")[0]
    header, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")
    )
    lines, first, step, each_epoch, each_8 = (dict(zip(header[1:], row[1:], strict=True)) for row in rows[:5])
    measured = {row["trainer"]: row for row in machine.rows("side_by_side")}
    assert lines.keys() | {TRAINERS[0].name} == measured.keys() == {trainer.name for trainer in TRAINERS}
    for trainer in TRAINERS[1:]:
        row, name = measured[trainer.name], trainer.name
        assert lines[name] == row["lines"] == str(trainer.lines), "run python -m benchmarks.side_by_side again"
        assert [first[name], step[name], each_epoch[name], each_8[name]] == list(row.values())[3:5] + list(
            row.values()
        )[7:9]


def test_changes_of_the_same_job_fit_its_files(tmp_path):
    for trainer in TRAINERS[1:]:
        shutil.copy(ROOT / "benchmarks" / "side_by_side" / trainer.files[0], tmp_path)
        text = (saving_often(trainer, tmp_path) / trainer.files[0]).read_text()
        if trainer.package == "harness":
            assert loader.load(tmp_path / trainer.files[0]).checkpoint.every.written == 8
        else:
            compile(text, trainer.files[0], "exec")
