"""The README and the pages of docs/: their links, settings, configurations, programs and commands.

The blocks of a page are tried in its order, in one folder that has ``configs`` and the digits: ``bash`` is typed,
``python`` executed, ``yaml`` validated. ``<!-- file: NAME -->`` before a block means that the reader writes it to that
file. ``ATTEMPTS`` has what a page takes for granted, how its training is shortened, and what must come out.
"""

from __future__ import annotations

import configparser
import csv
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from torchvision.io import encode_jpeg, write_jpeg

import harness.apex
from benchmarks.synthetic_runs import Fake, write_run, write_sweep
from harness import cli
from harness.apex import amp
from harness.apex.on_cpu import call_counter, redirect_cuda
from harness.config import json_schema, loader, recipe
from harness.config.base import Mark
from harness.config.launch import LaunchSection
from harness.tools.data import digits
from harness.tools.explain.causes import CAUSES
from harness.tools.port import uses
from harness.tools.report import curves
from harness.tools.sweep.slots import Machine
from tests import datasets
from tests.conftest import ROOT, SHARED_DATA
from tests.end_to_end.experiment import write_images
from tests.end_to_end.processes import shell
from tests.ranks import free_port, run_ranks, wait_for
from tests.tools.data.test_command import rows_of, write_table, write_tar
from tests.tools.explain.test_facts import write_record
from tests.tools.sweep.sweeping import start_command, table

FILES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path.stem: path.read_text() for path in FILES}
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
SECTIONS = "data|train|runtime|checkpoint|precision|parallel"

PIXELS = torch.arange(192, dtype=torch.uint8).view(3, 8, 8)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. ``mark`` is the comment before it, such as "file: train.py"."""

    page: str
    mark: str
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that the reader writes it to."""
        return self.mark.removeprefix("file: ") if self.mark.startswith("file: ") else None

    @property
    def commands(self) -> list[str]:
        """The commands of a block of bash, without comments; loops are unrolled."""
        lines = [re.split(r"\s+# ", line)[0].strip() for line in self.text.splitlines()]
        return [command for line in lines if line for command in unrolled(line)]


def blocks(page: str) -> list[Block]:
    found = re.findall(r"^(?:<!-- (.*?) -->\n)?```(\w*)\n(.*?)^```$", PAGES[page], re.M | re.S)
    return [Block(page, *block) for block in found]


def unrolled(line: str) -> list[str]:
    """The commands of ``for NAME in WORDS; do COMMAND; done``, or the line itself."""
    loop = re.fullmatch(r"for (\w+) in ([^;]+); do (.*); done", line)
    return [loop[3].replace(f"${loop[1]}", word) for word in loop[2].split()] if loop else [line]


def marked(mark: str) -> str:
    """The block with a mark that no other block has."""
    (text,) = [block.text for page in PAGES for block in blocks(page) if block.mark == mark]
    return text


COMMANDS = {
    page: [line for each in blocks(page) if each.language == "bash" for line in each.commands] for page in PAGES
}

# Commands that other tests run, and what these tests contain: {start of the command: (file, text)}.
ELSEWHERE = {
    "sbatch launch/slurm.sbatch": ("engines/test_slurm_script.py", "slurm.sbatch"),
    "sbatch launch/slurm_sweep.sbatch": ("engines/test_slurm_script.py", "slurm_sweep.sbatch"),
    "python launch/dask_cluster.py": ("engines/test_dask.py", "dask_cluster.py"),
    "pyflyte run launch/flyte_workflow.py": ("engines/test_flyte.py", "pyflyte"),
    "export AWS_ACCESS_KEY_ID": ("end_to_end/test_url.py", "AWS_ACCESS_KEY_ID"),
    "harness predict s3://": ("end_to_end/test_url.py", '"predict"'),
    "pip wheel": ("end_to_end/test_readme.py", "build_wheel"),
}
OTHER_TOOLS = ("uv ", "tensorboard ", "wandb ", "mlflow ", "trackio ")
# Blocks of Python with a test of their own, by mark; those of python_api.md are run by tests/test_api.py.
OWN_TESTS = {"recipe", "setup", "convert", "launcher", "tracker"}


def needs_gpu(line: str) -> bool:
    return "harness.apex" in line and "--device cpu" not in line


def is_typed(line: str) -> bool:
    return not needs_gpu(line) and not line.startswith((*ELSEWHERE, *OTHER_TOOLS))


# Links, settings, sizes


def anchors(page: Path) -> set[str]:
    """The targets of links into ``page``, as GitHub makes them of its headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in words}


@pytest.mark.parametrize("page", [*FILES, *RESULTS], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())):
        if link.startswith("http"):
            continue
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def test_sizes():
    """Limits in bytes: what has no reader goes before something new comes."""
    pages = {path.name: path.stat().st_size for path in (ROOT / "docs").glob("*.md")}
    del pages["settings.md"]  # written from the docstrings, and searched, not read
    assert sum(pages.values()) <= 130_000
    assert {name: size for name, size in pages.items() if size > 15_000} == {}
    assert pages["architecture.md"] <= 10_000
    assert (ROOT / "README.md").stat().st_size <= 9_000
    assert len(PAGES["AGENTS"].splitlines()) <= 60
    assert (ROOT / "CHANGELOG.md").stat().st_size <= 6_000


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"peers"}))  # which names files of other projects
def test_files_and_names_that_are_named_exist(page):
    """Words in capitals, such as NAME, stand for others."""
    of_apex = {"tests/L0"}
    paths = set(re.findall(r"`((?:harness|tests|configs|launch|docs|benchmarks)/[\w/.]+)`", PAGES[page]))
    named = {path for path in paths - of_apex if not re.search("[A-Z]{4}", path)}
    assert {path for path in named if not (ROOT / path).exists()} == set()
    for name, path in re.findall(r"`(\w+)(?:\(\))?`(?: or `\w+\(\)`)? (?:in|of) `(harness/[\w/]+\.py)`", PAGES[page]):
        code = (ROOT / path).read_text()
        assert re.search(rf"^ *(?:(?:def|class) {name}\b|{name} = )", code, re.M), f"{name}: {path}"


@pytest.mark.parametrize("page", [page for page in PAGES if "apex" not in page])  # apex.parallel is no section
def test_settings_that_are_named_exist(page):
    schema = json_schema.text()
    for section, key in re.findall(rf"`({SECTIONS})\.([a-z_]+)(?=[`=:])", PAGES[page]):
        assert key == "py" or f'"{key}"' in schema, f"{section}.{key}"


def test_inline_commands_are_understood():
    """Their verbs and options exist."""
    parser = cli._parser([], cli._commands([]))
    verbs = next(action.choices for action in parser._actions if isinstance(action.choices, dict))
    for page, text in PAGES.items():
        prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
        for verb, rest in re.findall(r"`harness ([a-z][\w-]*)([^`]*)`", prose):
            assert verb in verbs, f"{page}: harness {verb}"
            options = set(re.findall(r"(?<!\S)--[a-z][\w-]*", rest))
            assert options <= set(verbs[verb]._option_string_actions), f"{page}: harness {verb}{rest}"
        for target in re.findall(r"`make ([\w-]+)", prose):
            subprocess.run(["make", "-n", target, "APEX_CHECKOUT=."], cwd=ROOT, check=True, capture_output=True)


# Configurations


def is_configuration(block: Block) -> bool:
    return block.language == "yaml" and not block.file


@pytest.mark.parametrize(
    "block", [each for page in PAGES for each in blocks(page) if is_configuration(each)], ids=lambda block: block.page
)
def test_configuration_is_valid(tmp_path, block):
    """With the sections that the page leaves out. A sweep file is one of the repository."""
    shown = yaml.safe_load(block.text)
    if "space" in shown:
        path = ROOT / "configs" / "sweeps" / f"{shown['name'].removeprefix('sweep_')}.yaml"
        assert yaml.safe_load(path.read_text()) == shown
        return
    tree = {"name": "page", "batch": {"global": 8}, **shown}
    tree["task"] = {"name": "image_csv", "train_csv": "train.csv", "eval_csv": "eval.csv", **tree.get("task", {})}
    path = tmp_path / "page.yaml"
    path.write_text(yaml.safe_dump(tree))
    config = loader.load(path)
    assert list(config.task.conflicts()) == []
    for section, values in shown.items():
        if section == "precision":
            assert values.items() <= config.precision.model_dump().items()


# Commands and programs


@dataclass(frozen=True)
class Attempt:
    """How the commands and programs of a page are tried."""

    prepare: Callable[[Path], None] = lambda folder: None
    """Writes what the page takes for granted."""
    more: Callable[[list[str]], Sequence[str]] = lambda words: ()
    """The words to add to a command, so that it trains less."""
    codes: dict[str, int] = field(default_factory=dict)
    """Exit codes that are not 0, by verb."""
    check: Callable[[Path, dict[str, str], dict[str, Any]], None] = lambda folder, output, names: None
    """Asserts what must be there in the end; gets the output of each command and the names of the programs."""
    marks: Sequence[pytest.MarkDecorator] = (pytest.mark.slow,)


def typed(line: str, folder: Path, more: Sequence[str]) -> tuple[int, str]:
    """Type ``line`` in ``folder``; return its exit code and output."""
    variables, line = re.fullmatch(r"((?:[A-Z_]+=\S+ )*)(.*)", line).groups()
    environ = dict(word.split("=", 1) for word in variables.split())
    if environ:  # of several machines: this is the only one
        environ |= {"NNODES": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [*shlex.split(line.partition(" > ")[0]), *more]
    terminal = folder / "terminal.txt"
    terminal.touch()
    before = terminal.stat().st_size
    if words[0] in ("make", "head") or "|" in words:
        dry = ["-n"] if words[0] == "make" else []
        line = re.sub("^harness ", f"{sys.executable} -m harness ", line)
        done = subprocess.run(
            [words[0], *dry, *words[1:]] if dry else line, shell=not dry, cwd=ROOT if dry else folder,
            capture_output=True, text=True, timeout=250,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr
    if words[0] == "pip":
        extras = {extra for found in re.findall(r"\[([\w,]+)\]", line) for extra in found.split(",")}
        return int(not extras <= set(extras_of_the_project())), line
    if words[:2] == ["harness", "sweep"]:  # with quick trials; tests/end_to_end/test_sweep.py trains
        code = wait_for([start_command(folder, words[1:], Machine(2))], 120)[0]
        return code, terminal.read_text()[before:]
    if words[:2] == ["harness", "launch"] and not more:  # what it starts; the engines' tests start it
        words = ["configs/digits.yaml" if word == "config.yaml" else word for word in words]
        words += [] if "--dry-run" in words else ["--dry-run"]
    words = [re.sub(r"(?<=nproc_per_node=)\d+", "2", word) for word in words]
    if words[0].startswith("launch/"):
        words[1] = "2"
    if any("nproc_per_node=2" in word for word in words) and not words[0].startswith("launch/"):
        words.insert(words.index("--nproc_per_node=2"), f"--master_port={free_port()}")
        environ["PYTHONWARNINGS"] = "ignore"
    if words[0] == "torchrun":
        words[:1] = ["python", "-m", "torch.distributed.run"]
    if "--" in words:  # a command of an activated environment
        environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    code = shell(words, terminal, folder, APEX_HARNESS_CACHE=str(folder / "cache"), **environ)
    return code, terminal.read_text(errors="replace")[before:]


def extras_of_the_project() -> list[str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return list(setup["options.extras_require"])


def try_page(page: str, folder: Path, attempt: Attempt, wanted: Callable[[str], bool] = is_typed) -> None:
    attempt.prepare(folder)
    output: dict[str, str] = {}
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)
        elif block.language == "bash":
            for line in filter(wanted, block.commands):
                words = shlex.split(line)
                code, output[line] = typed(line, folder, attempt.more(words))
                verb = words[1] if words[0] == "harness" else words[0]
                assert code == attempt.codes.get(verb, 0) or verb == "doctor", output[
                    line
                ]  # its code judges the machine
        elif block.language == "python" and block.mark not in OWN_TESTS and page != "python_api":
            exec(compile(block.text, f"docs/{page}.md", "exec"), names)
    attempt.check(folder, output, names)


@pytest.fixture(scope="session")
def written_digits(tmp_path_factory) -> Path:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    folder = tmp_path_factory.mktemp("pages") / "digits"
    digits.write(folder)
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch, written_digits):
    """A folder like the repository, with the digits."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(written_digits)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "cache"))
    yield tmp_path
    harness.apex.uninstall()


def training(*more: str) -> Callable[[list[str]], Sequence[str]]:
    """Adds ``more`` to commands that train."""
    programs = {"driver.py", "launch/single_node.sh", "launch/multi_node.sh"}
    verbs = (["harness", "train"], ["harness", "launch"])
    return lambda words: more if words[:2] in verbs or programs & set(words) else ()


def script_of_apex_page(folder: Path) -> None:
    (folder / "train.py").write_text(marked("file: train.py"))


def for_readme(folder: Path) -> None:
    """Photos in a folder per class, a CSV, and a script for Apex."""
    source = write_images(folder / "source")
    for line in (source / "train.csv").read_text().splitlines()[1:]:
        path, _, label = line.partition(",")
        (folder / "photos" / label).mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, folder / "photos" / label)
    shutil.copytree(source / "images", folder / "new_photos", ignore=shutil.ignore_patterns("train*"))
    write_images(folder / "pets")
    script_of_apex_page(folder)


def more_for_readme(words: list[str]) -> Sequence[str]:
    quick = ["train.max_steps=2", "precision.opt_level=O0", "data.num_workers=0"]
    if "pets.yaml" in words:
        return [*quick, "batch.global=16"]
    program = [word for word in words if not re.match("[A-Z_]+=", word)][:2]
    name = "-".join(re.sub(r"\W+", "", word) for word in program)
    on_digits = "configs/digits.yaml" in words and words[:2] != ["harness", "launch"]
    return [*quick, f"name={name}"] if on_digits else quick if words[:2] == ["harness", "train"] else []


def check_readme(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    predicted = (folder / "predictions.csv").read_text().splitlines()
    assert len(predicted) - 1 == len(list((folder / "new_photos").iterdir()))
    assert {row.split(",")[1] for row in predicted[1:]} <= {"column", "row", "slope"}
    assert (folder / "runs" / "photos" / "report.html").stat().st_size > 1e6
    assert (folder / "runs" / "pets" / "weights.safetensors").exists()
    assert yaml.safe_load((folder / "runs" / "pets" / "config.yaml").read_text())["optimizer"]["lr"] == 0.05
    trained = {path.parent.name for path in folder.glob("runs/*/summary.json")}
    assert trained >= {"python-driverpy", "python-m", "launchsingle_nodesh-4", "launchmulti_nodesh-4"}


def check_agents(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    """The JSON of each command has the keys that the page lists."""
    rows = re.findall(r"^\| `(harness \w+)` \| (.*) \|$", PAGES["AGENTS"], re.M)
    outputs = {line: text for line, text in output.items() if "--json" in line}
    assert len(rows) == len(outputs) + 1  # harness settings, whose records tests/config/test_reference.py checks
    for command, keys in rows:
        for line, text in outputs.items():
            if line.startswith(f"{command} "):
                start = re.search(r"^[\[{]", text, re.M).start()
                found = json.loads(text[start:])
                record = found[0] if isinstance(found, list) else found
                assert list(record) == re.findall(r"`(\w+)`", keys.partition("(each")[0]), command
    assert len((folder / "predictions.csv").read_text().splitlines()) == 361


def test_paths_of_the_task_may_differ_between_machines():
    names: dict[str, Any] = {}
    exec(compile(marked("file: my_tasks/prices.py"), "prices.py", "exec", dont_inherit=True), names)
    assert recipe._marked(Mark.OF_MACHINE, names["Task"]) >= {"task.train_csv", "task.eval_csv"}


def check_task(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    (checked,) = [text for line, text in output.items() if line.startswith("harness check")]
    assert "train rows: 2000\n" in checked
    one, two = (
        json.loads((folder / "runs" / name / "summary.json").read_text()) for name in ("prices", "prices_on_two")
    )
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert 7_000 < one["evaluation"]["mae"] < 10_500
    assert two["evaluation"]["mae"] == pytest.approx(one["evaluation"]["mae"], rel=1e-2)
    assert one["evaluation"]["rows_used"] == two["evaluation"]["rows_used"] == 500
    predictions = pd.read_csv(folder / "runs" / "prices" / "predictions.csv")
    assert list(predictions) == ["id", "prediction", "label"]
    assert predictions["id"].tolist() == list(range(500))
    error = (predictions["prediction"] - predictions["label"]).abs().mean()
    assert error == pytest.approx(one["best"]["mae"], rel=1e-3)
    ink = folder / "runs" / "ink"
    assert json.loads((ink / "summary.json").read_text())["best"]["dice"] > 0.8
    masks = pd.read_csv(ink / "predictions.csv")["mask"]
    images = pd.read_csv(folder / "data" / "digits" / "eval.csv")["path"]
    assert masks.tolist() == [f"predictions_files/mask/{Path(path).name}" for path in images]
    assert (ink / masks[0]).exists()
    exec(compile(marked("file: ink.py"), "ink.py", "exec"), names)
    dataset, rows = names["Digits"]("train", seed=3), np.array([7, 2, 30])
    epochs = [dataset.batch(rows, epoch) for epoch in (None, *range(8))]
    assert all(each.targets.equal(each.inputs > 100.5 / 255) for each in epochs), "masks are flipped with their images"
    assert epochs[1].inputs[1:].equal(dataset.batch(rows[1:], 0).inputs), "the same in another batch"
    assert not all(each.inputs.equal(epochs[0].inputs) for each in epochs)
    first, again = torch.ones(1000), torch.ones(1000)
    for gradient in (first, again):
        names["gaussian"]([("weight", gradient)], torch.Generator().manual_seed(0), 0)
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.ones(1000))


def check_apex(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    assert output
    for line, text in output.items():
        losses = [float(value) for value in re.findall(r"loss (\d\.\d{3})", text)]  # lines of two ranks may mix
        assert len(losses) == (2 if "nproc_per_node" in line else 1)
        assert all(loss < 0.9 for loss in losses), "it starts at 1.1"
        printed = text.count("harness.apex --device cpu: calls that ran on the CPU")
        assert printed == ("--device cpu" in line), "only local rank 0 prints it"


def check_compare(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    plain, as_json, seeds = [text for line, text in output.items() if line.startswith("harness compare")]
    assert re.search(r"optimizer\.lr +0\.1 +0\.05", plain)
    assert json.loads(as_json)["same"] is False
    assert re.search(r"optimizer\.lr +0\.1 +0\.05", seeds)
    assert "over seeds (A: 3, B: 3)" in seeds
    assert re.search(r"top1 +[\d.]+ ± [\d.]+ +[\d.]+ ± [\d.]+", seeds)


def for_data(folder: Path) -> None:
    for label in ("cat", "dog"):
        (folder / "photos" / label).mkdir(parents=True)
        for number in range(5):
            write_jpeg(PIXELS, str(folder / "photos" / label / f"{number}.jpg"))
    write_table(folder / "scans.csv", [(f"{i}.jpg", i % 2, i // 2) for i in range(20)], ("path", "label", "patient"))
    (folder / "shards").mkdir()
    jpeg = bytes(encode_jpeg(PIXELS).numpy())
    write_tar(folder / "shards" / "train-000000.tar", {"a.jpg": jpeg, "a.cls": b"cat\n"})


def check_data(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    assert len(rows_of(folder / "photos.train.csv")) == 8
    assert rows_of(folder / "shards.csv") == [{"path": "train-000000.tar/a.jpg", "label": "cat"}]


def check_engines(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    launches = {line: text for line, text in output.items() if line.startswith("harness launch")}
    assert len(launches) > 8
    for line, text in launches.items():
        assert re.search(r"driver\.py|@workflow", text), line


def for_explain(folder: Path) -> None:
    (folder / "runs").mkdir()
    write_record(folder / "runs" / "digits", [(1, 9.0)] * 5)


def check_explain(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    (plain,) = output.values()
    assert plain.startswith("runs/digits waits for rank 1")


def check_hooks(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    assert "hooks: mine.GiveUp (after_evaluation, state_dict)\n" in "".join(output.values())


def check_install(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    assert re.search(r"^ok +torch ", output["harness doctor"], re.M)


def more_for_fine_tuning(words: list[str]) -> Sequence[str]:
    if words[:3] == ["harness", "data", "mnist"]:
        return ["--from", str(SHARED_DATA / "mnist")]
    if "head.yaml" in words:  # small, and without a download
        own = any(word.startswith("model.weights=") for word in words)
        tiny = [
            "task.image_size=[8,8]",
            "task.color=rgb",
            "task.transforms.train=[{RandomResizedCrop: {size: 8}}, RandomHorizontalFlip]",
        ]
        return [*tiny, *([] if own else ["model.weights=null"]), "train.max_steps=2", "precision.opt_level=O0"]
    if words[:2] == ["harness", "train"]:
        mnist = ["task.train_rows=4000", "task.eval_rows=500"]
        short = mnist if "mnist" in words[3] else ["train.epochs=8", "train.evaluate_every=4"]
        return [*short, "precision.opt_level=O0"]  # O1 is slow on a CPU
    return ()


def for_fine_tuning(folder: Path) -> None:
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the real datasets are not next to the project ({SHARED_DATA.name}/ does not exist)")
    (folder / "data" / "digits").unlink()  # the page writes them itself
    for library in ("transformers", "peft"):
        pytest.importorskip(library)
    from tests.training.test_hf import WORDS, write_bert  # late: it is skipped without transformers

    write_bert(folder / "bert")
    for_readme(folder)
    for line in (line for line in COMMANDS["README"] if "photos.csv" in line):  # which write photos.yaml
        assert typed(line, folder, [])[0] == 0
    rows = [(f"is {one} {two}", f"it is {two}", ["no", "yes"][one < two]) for one in WORDS[:6] for two in WORDS]
    columns = ("question", "answer", "label")
    write_table(folder / "pairs.csv", rows, columns)
    write_table(folder / "new_pairs.csv", [row[:2] for row in rows[:7]], columns[:2])


def check_fine_tuning(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    """Fine-tuning is better than training from scratch. transformers loads the model that was trained on pairs."""
    head, every, *summaries = (
        json.loads((folder / "runs" / name / "summary.json").read_text())
        for name in ("photos_head", "photos_all", "finetune", "scratch")
    )
    assert head["step"] == every["step"] == 2
    assert summaries[0]["best"]["top1"] > summaries[1]["best"]["top1"]
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    (shown,) = [
        yaml.safe_load(each.text) for each in blocks("fine_tuning") if "hf:bert" in each.text and is_configuration(each)
    ]
    written = yaml.safe_load((folder / "pairs.yaml").read_text())
    written["task"]["tokenizer"]["max_length"] = shown["task"]["tokenizer"]["max_length"]  # by the length of the texts
    assert written["model"] == shown["model"]
    assert shown["task"].items() <= written["task"].items()
    predicted = pd.read_csv(folder / "predictions.csv")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "my_bert")
    pairs = [predicted[column].tolist() for column in ("question", "answer")]
    inputs = AutoTokenizer.from_pretrained(folder / "my_bert")(*pairs, padding=True, return_tensors="pt")
    found = [model.config.id2label[index] for index in model(**inputs).logits.argmax(1).tolist()]
    assert found == predicted["prediction"].tolist()


def for_migrate(folder: Path) -> None:
    (folder / "train.py").write_text(marked("setup") + EXAMPLES["one loss"][0])


def check_migrate(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    assert "from harness.apex import amp" in (folder / "train.py").read_text()
    assert "migrate.md#one-loss" in "".join(output.values())


def for_predict(folder: Path) -> None:
    code, text = typed("harness train -c configs/digits.yaml train.max_steps=2 data.num_workers=0", folder, [])
    assert code == 0, text
    rows = (folder / "data" / "digits" / "eval.csv").read_text().splitlines()
    (folder / "new.csv").write_text("\n".join(rows[:6]) + "\n")
    (folder / "photos").mkdir()
    for row, place in enumerate(("photos/b.png", "a.png"), 1):
        shutil.copy(folder / "data" / "digits" / rows[row].partition(",")[0], folder / place)


def check_predict(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    with open(folder / "data" / "digits" / "eval.csv") as file:
        first = [row["path"] for row in csv.DictReader(file)][:5]
    assert pd.read_parquet(folder / "predictions.parquet")["id"].tolist() == first
    assert pd.read_csv(folder / "predictions.csv")["id"].tolist() == ["photos/b.png", "a.png"]
    assert (folder / "runs" / "digits" / "model.onnx").exists()


def for_python_api(folder: Path) -> None:
    text = 'from harness import load_config, train\ntrain(load_config("configs/digits.yaml", ["train.max_steps=2"]))\n'
    (folder / "my_script.py").write_text(text)


def for_reports(folder: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed: pip install 'apex-harness[report]'")
    for name in ("digits", "mnist"):
        write_run(folder / "runs" / name, Fake(name=name, epochs=2))
    write_sweep(folder / "runs" / "sweep_pet_names", [Fake(epochs=2), Fake(epochs=2, world=2)])


def check_reports(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    for text in output.values():
        assert text.split()
        assert all((folder / name).stat().st_size > 100 for name in text.split())


def check_schedules(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    built_in, own = output.values()
    assert re.search(r"schedule: wsd, 0\.\d+ at the start, 0\.1 at the peak .update \d+., ", built_in)
    assert re.search(r"schedule: mine.inverse_sqrt, 0\.\d+ at the start, 0\.1 at the peak .*, 0\.0\d+ at the end", own)


def check_strategies(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    for line, text in output.items():
        trained = "driver.py" in line or line.startswith("harness launch")
        assert ("parallel: fsdp" in text) == (trained and "parallel.strategy=fsdp" in line)


def shortened_same_bits(words: list[str]) -> Sequence[str]:
    few = ["--kills", "1", "--steps", "4"] if "verify-resume" in words else []
    return [*few, *training("train.epochs=1", "data.num_workers=0")(words)]


def check_same_bits(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    texts = {line.split()[1]: text for line, text in output.items() if line.startswith("harness ")}
    assert "Bitwise equal: checkpoints, weights, log" in texts["compare"]
    assert "on 1 to 4 processes; on 2: 2 passes per step in each" in texts["check"]
    assert "exact: killed 1 time and resumed" in texts["verify-resume"]
    assert "on 4 ranks" in texts["verify-resume"]


def for_sweeps(folder: Path) -> None:
    datasets.write_names(folder / "data" / "pet_names" / "names.txt")


def check_sweeps(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    for name, count in (("sweep_pet_names", 12), ("try_out", 12), ("digits_search", 20)):
        states = [trial["state"] for trial in table(folder / "runs", name)]
        assert len(states) == count
        assert set(states) <= {"finished", "pruned"}
    assert any("best: trial 0002, char_loss 2.109" in text for text in output.values())


def for_targets(folder: Path) -> None:
    datasets.own_table(folder / "made", "multi_label")
    for split in ("train", "eval"):
        shutil.copy(folder / "made" / "image_csv" / f"{split}.csv", folder)
        shutil.copytree(folder / "made" / "image_csv" / split, folder / split)


def check_targets(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    """Each configuration that the page links accepts such a table."""
    linked = re.findall(r"configs/(\w+)\.yaml\)", PAGES["targets"])
    assert sorted(linked) == sorted(datasets.OWN_TABLES)
    for name in linked[1:]:
        made = datasets.own_table(folder / name, name)
        assert cli.main(["check", "-c", f"configs/{name}.yaml", *made]) == 0


def for_verify_resume(folder: Path) -> None:
    """A script that resumes exactly, on one rank or several, by itself or from --resume."""
    text = (ROOT / "tests" / "audit" / "scripts" / "exact_ddp.py").read_text()
    for old, new in [
        ('init_process_group("gloo")', 'init_process_group(**({} if "RANK" in os.environ else ALONE))'),
        ("def main():", 'ALONE = dict(backend="gloo", store=dist.HashStore(), rank=0, world_size=1)\n\n\ndef main():'),
        ('    parser.add_argument("--save', '    parser.add_argument("--resume")\n    parser.add_argument("--save'),
    ]:
        assert old in text
        text = text.replace(old, new)
    (folder / "train.py").write_text(text)


def check_verify_resume(folder: Path, output: dict[str, str], names: dict[str, Any]) -> None:
    assert all(re.search(r"^exact: killed \d times?", text, re.M) for text in output.values())
    assert (folder / "page.html").stat().st_size > 1000


FAST: Sequence[pytest.MarkDecorator] = ()
ATTEMPTS = {
    "README": Attempt(for_readme, more_for_readme, check=check_readme),
    "AGENTS": Attempt(
        more=training("train.max_steps=2", "data.num_workers=0", "precision.opt_level=O0"), check=check_agents
    ),
    "add_a_task": Attempt(more=training("train.epochs=8", "precision.opt_level=O0"), check=check_task),
    "apex": Attempt(check=check_apex, marks=[pytest.mark.contract("1.1", "6.5.simple", "9")]),
    "compare": Attempt(
        more=training("train.max_steps=3", "train.log_every=1", "data.num_workers=0"), codes={"compare": 1},
        check=check_compare,
    ),
    "data": Attempt(for_data, check=check_data, marks=FAST),
    "engines": Attempt(check=check_engines, marks=FAST),
    "explain": Attempt(for_explain, check=check_explain, marks=FAST),
    "fine_tuning": Attempt(
        for_fine_tuning, more_for_fine_tuning, {"compare": 1}, check_fine_tuning,
        [pytest.mark.slow, pytest.mark.timeout(600)],
    ),
    "hooks": Attempt(check=check_hooks),
    "install": Attempt(check=check_install, marks=FAST),
    "migrate": Attempt(for_migrate, check=check_migrate, marks=FAST),
    "predict": Attempt(for_predict, check=check_predict),
    "python_api": Attempt(for_python_api),
    "reports": Attempt(for_reports, check=check_reports, marks=FAST),
    "same_bits": Attempt(
        more=shortened_same_bits, check=check_same_bits, marks=[pytest.mark.slow, pytest.mark.timeout(280)],
    ),
    "schedules": Attempt(check=check_schedules),
    "strategies": Attempt(
        more=training("train.max_steps=2", "runtime.device=cpu", "data.num_workers=0"), check=check_strategies
    ),
    "sweeps": Attempt(for_sweeps, check=check_sweeps),
    "targets": Attempt(for_targets, training("train.max_steps=1"), check=check_targets),
    "verify_resume": Attempt(
        for_verify_resume, lambda words: ["--kills", "1", "--steps", "4"] if "-c" in words else [],
        check=check_verify_resume, marks=[pytest.mark.slow, pytest.mark.timeout(1200)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("page", [pytest.param(page, marks=each.marks) for page, each in ATTEMPTS.items()])
def test_commands_and_programs(page, place):
    try_page(page, place, ATTEMPTS[page])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_commands_for_a_machine_with_gpus(place):
    one = torch.cuda.device_count() == 1
    try_page("apex", place, ATTEMPTS["apex"], lambda line: needs_gpu(line) and not (one and "nproc_per_node" in line))


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [line for lines in COMMANDS.values() for line in lines if line.startswith(OTHER_TOOLS)]
)
def test_options_of_other_tools_exist(line):
    tool, *words = line.split()
    pytest.importorskip(tool)
    command = [Path(sys.executable).with_name(tool), *takewhile(str.isalpha, words), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=250).stdout
    assert all(word in text for word in words if word.startswith("--"))


def test_every_block_is_tried():
    with_programs = {page for page in PAGES for each in blocks(page) if each.language in ("bash", "python")}
    assert with_programs - {"trackers"} == set(ATTEMPTS), "trackers.md has other tools only"
    assert {each.language for page in PAGES for each in blocks(page)} <= {
        "bash",
        "python",
        "yaml",
        "diff",
        "text",
        "mermaid",
        "",
    }
    tests = ROOT / "tests"
    for start, (file, text) in ELSEWHERE.items():
        assert [line for lines in COMMANDS.values() for line in lines if line.startswith(start)], f"no page has {start}"
        assert text in (tests / file).read_text(), f"{file} no longer runs {start}"


def _recipe(text: str) -> list[float]:
    model = torch.nn.Linear(8, 2)
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "inputs": torch.randn(4, 8)}
    exec(text, {**names, "criterion": torch.nn.functional.cross_entropy, "targets": torch.tensor([0, 1, 0, 1])})
    return model.weight.flatten().tolist()


def test_recipe_runs():
    """Its ranks, which draw different weights, end with equal ones."""
    first, second = run_ranks(2, _recipe, marked("recipe"))
    assert first == second


# migrate.md


def both_programs(text: str, around: Sequence[str] = ("", "")) -> tuple[str, str]:
    """The program before and after of a diff. Lines without a loop are added to the two programs ``around``: before all
    lines if they make an optimizer, before the step if they are indented, else before the loop."""
    lines = text.splitlines()
    before, after = ("".join(f"{line[1:]}\n" for line in lines if line[:1] in (sign, " ")) for sign in "-+")
    if "for " in text:
        return before, after
    if "optimizer = " in text:
        return before + around[0], after + around[1]
    if before.startswith("    "):
        places = ("    optimizer.step()", "    scaler.step(optimizer)")
    else:
        places = ("for inputs", "for inputs")
    return around[0].replace(places[0], before + places[0]), around[1].replace(places[1], after + places[1])


def examples() -> dict[str, tuple[str, str]]:
    """{section of migrate.md: (program with Apex, program without)}; the table of opt levels has one per row."""
    found: dict[str, tuple[str, str]] = {}
    for heading, section in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGES["migrate"], re.M | re.S):
        for text in re.findall(r"^```diff\n(.*?)^```", section, re.M | re.S):
            around = found.get(heading.lower()) or found.get("one loss", ("", ""))
            found[heading.lower()] = both_programs(text, around)
    before, after = found["one loss"]
    for level, scaler, cast in re.findall(
        r"^\| `(opt_level=.*?)`.*? \| `?(.*?)`? \| `(.*?)` \|$", PAGES["migrate"], re.M
    ):
        new = after.replace('GradScaler("cuda")', f'GradScaler("cuda", {scaler})').replace("dtype=torch.float16", cast)
        found[level] = before.replace('opt_level="O1"', level), new
    return found


EXAMPLES = examples()
# The difference of the last losses. Autocast is O1 here, operation by operation. At O2 and under FP16_Optimizer,
# weights are rounded to float16; two losses under one scale, and Adam, amplify rounding.
TOLERANCE = {
    'opt_level="O2"': 3e-3, 'opt_level="O4"': 3e-3, "fp16_optimizer and network_to_half": 3e-3, "several losses": 1e-3,
    "fused optimizers and layers": 1e-3,
}  # fmt: skip


@pytest.fixture
def one_process(monkeypatch):
    """The environment of the only rank. Restores what an example leaves behind."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    yield
    clean()
    call_counter.reset()


def clean() -> None:
    amp.reset()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    harness.apex.uninstall()


def last_loss(text: str, with_apex: bool) -> float:
    """The last loss of an example, whose CUDA calls run on the CPU as under ``python -m harness.apex --device cpu``."""
    if with_apex:
        harness.apex.install()
    redirect_cuda()
    names = {"__name__": "__main__"}
    try:
        exec(compile(marked("setup") + text, "docs/migrate.md", "exec"), names)
        if not with_apex:
            assert not {name for name in sys.modules if name.split(".")[0] == "apex"}
    finally:
        clean()
    return float(names["loss"])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "error:.broadcast_buffers:FutureWarning")
@pytest.mark.parametrize("example", EXAMPLES)
def test_both_programs_train_alike(example, one_process):
    before, after = EXAMPLES[example]
    assert "apex" in before
    losses = [last_loss(before, with_apex=True), last_loss(after, with_apex=False)]
    assert losses[0] < 1.36, "it starts at 1.4"
    assert losses[1] == pytest.approx(losses[0], abs=TOLERANCE.get(example, 1e-5))


@pytest.mark.parametrize(("words", "environ"), [([], "3"), (["--local-rank=3"], "0"), (["--local_rank", "3"], "0")])
def test_launchers_option(words, environ, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", environ)
    exec(marked("launcher"), names := {})
    assert names["parser"].parse_args(words).local_rank == 3


def test_conversion_of_a_scale_from_apex(one_process):
    model = torch.nn.Linear(1, 1)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**12
    exec(marked("convert"), names := {})
    state = amp.state_dict()
    amp.reset()  # before another replacement of the same methods of Tensor
    redirect_cuda()
    scaler = torch.amp.GradScaler("cuda")
    scaler.load_state_dict(names["from_apex"](state))
    assert scaler.get_scale() == 2.0**12


def test_sections_that_port_names_exist():
    assert set(uses.SECTIONS) <= anchors(ROOT / "docs" / "migrate.md")


@pytest.mark.parametrize("package", ["amp", "fp16_utils", "normalization", "optimizers", "parallel"])
def test_every_public_name_has_a_section(package):
    known = {name for names in uses.SECTIONS.values() for name in names.split()}
    added = {"reset"}  # Apex had no such function
    assert set(getattr(harness.apex, package).__all__) - added <= known


# Tables that list what the code has

APEX = ("amp", "parallel", "optimizers", "normalization", "mlp", "fused_dense", "multi_tensor_apply", "fp16_utils")


@pytest.mark.contract("1.1")
@pytest.mark.parametrize("package", APEX)
def test_every_public_name_of_apex_exists(package):
    module = importlib.import_module(f"harness.apex.{package}")
    assert module.__all__
    assert all(hasattr(module, name) for name in module.__all__)


def test_table_of_apex_only_names_what_exists():
    known = {name for package in APEX for name in importlib.import_module(f"harness.apex.{package}").__all__}
    known |= {"install", "uninstall", "DeprecatedFeatureWarning", "amp_C"}
    table = PAGES["apex_differences"].partition("## The API")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    names = {name.rpartition(".")[2] for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}
    assert len(names) > 20
    assert names <= known


def test_every_fix_that_is_referred_to_is_explained():
    referred = re.findall(r"\| fixed ([\d, ]+)\|", PAGES["apex_differences"])
    explained = {int(n) for n in re.findall(r"^(\d+)\. ", PAGES["apex_differences"], re.M)}
    assert explained == set(range(1, 19)), "the numbers of the traps in the contract (10.1 to 10.18)"
    assert {int(n) for found in referred for n in found.split(",") if n.strip()} <= explained


def test_compatibility_page_shows_the_record():
    page = (ROOT / "benchmarks" / "results" / "compatibility.md").read_text()
    record = json.loads((ROOT / "benchmarks" / "compatibility.json").read_text())
    outcomes = Counter(run["outcome"] for run in record["projects"])
    assert f"| chosen | {outcomes.total()} |" in page
    assert f"has nothing to do with Apex | {outcomes['other']} |" in page
    assert all(run["name"] in page for part in ("projects", "libraries") for run in record[part])
    share = re.search(r"resume if the script can\*\* \| \*\*(\d+) of (\d+)", page)
    assert share
    assert f"Of the other {share[2]} projects, {share[1]} train with a falling loss and" in " ".join(
        PAGES["apex"].split()
    )


def test_limits_of_the_causes_of_slow_runs():
    limits = sorted(round(100 * cause.limit) for cause in CAUSES)
    assert f"{limits[0]} to {limits[-1]}% of the run's time" in " ".join(PAGES["explain"].split())


def test_limit_of_a_report():
    assert f"the {curves.MAX_LINES} best runs" in " ".join(PAGES["reports"].split())


def test_every_engine_has_a_section():
    kinds = LaunchSection.model_json_schema()["properties"]["engine"]["anyOf"][0]["enum"]
    assert {heading.lower() for heading in re.findall(r"^## (\w+)$", PAGES["engines"], re.M)} == set(kinds)


def test_settings_and_files_of_the_engines_exist():
    schema = json_schema.text()
    for key in re.findall(r"`(?:launch|data|runtime|checkpoint|train)\.(?:\w+\.)?(\w+)", PAGES["engines"]):
        assert f'"{key}"' in schema, key
    for name in re.findall(r"\blaunch/\w+\.\w+", PAGES["engines"]):
        assert (ROOT / name).exists(), name


def test_extras_exist():
    section = PAGES["install"].partition("| extra |")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", section, re.M))))
    assert named | {"trackers", "peers", "test", "dev"} == set(extras_of_the_project())
