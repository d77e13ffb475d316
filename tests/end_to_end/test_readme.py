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
import torch
import yaml

from harness import cli
from tests.conftest import ROOT
from tests.end_to_end.experiment import write_images
from tests.end_to_end.processes import shell
from tests.ranks import run_ranks

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


def run_line(words: list[str], folder: Path, **environ: str) -> None:
    """Run a command of the README in ``folder``."""
    terminal = folder / "terminal.txt"
    code = shell(words, terminal, folder, APEX_HARNESS_CACHE=str(folder / "cache"), **environ)
    assert code == 0, (words, terminal.read_text())


def _recipe(text: str) -> list[float]:
    model = torch.nn.Linear(8, 2)
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "inputs": torch.randn(4, 8)}
    exec(text, {**names, "criterion": torch.nn.functional.cross_entropy, "targets": torch.tensor([0, 1, 0, 1])})
    return model.weight.flatten().tolist()


def test_recipe_runs():
    """Its ranks, which draw different weights, end with equal ones."""
    first, second = run_ranks(2, _recipe, block("python", "amp.initialize"))
    assert first == second


def test_every_command_is_tested():
    """A command that is added to the README must be added to a test."""
    programs = {shlex.split(re.sub(r"^(\w+=\S+ )+", "", line))[0] for line in commands()}
    assert programs == {"make", "harness", "python", "launch/single_node.sh", "launch/multi_node.sh"}
    assert len(commands()) == 21


def test_launch_commands_are_those_of_the_engines_page():
    """tests/engines/test_page.py renders every command there, and the engines' tests run them."""
    page = (ROOT / "docs" / "engines.md").read_text()
    launches = [line for line in commands() if line.startswith("harness launch")]
    assert len(launches) == 2
    for line in launches:
        engine = re.search(r"--engine (\w+)", line)
        assert f"\n## {engine[1] if engine else 'local'}".lower() in page.lower(), line
        assert cli.main([*shlex.split(line)[1:], "--dry-run"]) == 0, line


def test_make_targets_exist():
    targets = {line.split()[1] for line in commands() if line.startswith("make ")}
    targets |= set(re.findall(r"`make ([\w-]+)", INSTALL))
    assert len(targets) > 8
    for target in targets:
        words = ["make", "-n", target, "APEX_CHECKOUT=."]
        subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=250)


def test_commands_for_apex_scripts_are_those_of_the_guide():
    """tests/apex/test_docs.py runs those of the guide."""
    guide = (ROOT / "docs" / "apex.md").read_text()
    for line in commands():
        if "harness.apex" in line:
            start = line.removesuffix(" --opt-level O2")
            assert start in guide, line


@pytest.mark.slow
def test_from_photos_to_predictions(tmp_path):
    """In a folder that is no clone; only training is shortened."""
    source = write_images(tmp_path / "source")
    for line in (source / "train.csv").read_text().splitlines()[1:]:
        path, _, label = line.partition(",")
        (tmp_path / "photos" / label).mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, tmp_path / "photos" / label)
    shutil.copytree(source / "images", tmp_path / "new_photos", ignore=shutil.ignore_patterns("train*"))
    section = README.partition("**From photos**")[2].partition("\n**")[0]
    lines = [line.split("  #")[0] for line in re.findall(r"^harness .*$", section, re.M)]
    assert [line.split()[1] for line in lines] == [
        "data", "data", "init", "check", "train", "data", "predict", "report"
    ]  # fmt: skip
    for line in lines:
        words = shlex.split(line)
        quick = ["train.max_steps=2", "precision.opt_level=O0"] if words[1] == "train" else []
        run_line([*words, *quick], tmp_path)
    predicted = (tmp_path / "predictions.csv").read_text().splitlines()
    assert len(predicted) - 1 == len(list((tmp_path / "new_photos").iterdir()))
    assert {row.split(",")[1] for row in predicted[1:]} <= {"column", "row", "slope"}
    assert (tmp_path / "runs" / "photos" / "report.html").stat().st_size > 1e6


@pytest.mark.slow
def test_own_csv(tmp_path):
    """The YAML on another CSV, with the commands below it."""
    write_images(tmp_path / "pets")
    (tmp_path / "pets.yaml").write_text(block("yaml", "name: pets"))
    quick = ["train.max_steps=2", "batch.global=16", "data.num_workers=0"]
    for line in commands():
        if "pets.yaml" in line:
            run_line([*shlex.split(line), *quick], tmp_path)
    assert (tmp_path / "runs" / "pets" / "weights.safetensors").exists()
    assert yaml.safe_load((tmp_path / "runs" / "pets" / "config.yaml").read_text())["optimizer"]["lr"] == 0.05


@pytest.mark.slow
def test_launch_scripts(tmp_path):
    """Every command that trains the digits on one machine, two steps each; test_nodes.py has several nodes."""
    from harness.tools.data import digits
    from tests.ranks import free_port

    digits.write(tmp_path / "data" / "digits")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    found = [line for line in commands() if "configs/digits.yaml" in line and not line.startswith("harness launch")]
    assert len(found) == 4
    quick = ["train.max_steps=2", "data.num_workers=0", "precision.opt_level=O0"]
    for number, line in enumerate(found):
        environ = dict(re.findall(r"(\w+)=(\S+) (?=.*launch/)", line))
        environ |= {"NNODES": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if environ else {}
        words = shlex.split(re.sub(r"^(\w+=\S+ )+", "", line))
        words = ["2" if word == "4" else word.replace("per_node=4", "per_node=2") for word in words]
        run_line([*words, f"name=r{number}", *quick], tmp_path, **environ)
        assert (tmp_path / "runs" / f"r{number}" / "summary.json").exists()


def test_extras_exist():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    section = INSTALL.partition("| extra |")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", section, re.M))))
    assert named | {"trackers", "peers", "test", "dev"} == set(setup["options.extras_require"])


def test_measured_figures_are_those_of_the_results():
    results = "\n".join(path.read_text() for path in (ROOT / "benchmarks" / "results").glob("*.md"))
    section = README.partition("## Measured")[2].partition("\n## ")[0]
    figures = re.findall(r"\d+\.\d+", "\n".join(line for line in section.splitlines() if line.startswith("|")))
    assert len(figures) >= 8
    assert [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", results)] == []


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
    words = [word.replace("dist/", f"{clone}/") for word in install]  # the name and the extras, without a network
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
    table, _, sources = page.partition("## Sources")
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
