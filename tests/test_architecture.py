"""The structure of ``harness``, from its syntax trees: which package imports which, and what is done in one place."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.runs import layout
from tests.conftest import ROOT

# What each package may import of the others; docs/architecture.md shows the same table. ``errors`` and ``version`` are
# free to all but harness.apex, which imports nothing of the project.
MAY_IMPORT = {
    "apex": "",
    "config": "",
    "distributed": "",
    "runs": "config distributed",
    "data": "runs",
    "trackers": "config runs",
    "training": "apex config distributed runs data trackers",
    "tasks": "config data training",
    "inference": "config distributed runs data training tasks",
    "engines": "config distributed runs",
    "report": "config runs",
    "compare": "config runs trackers report",
    "doctor": "config distributed training",
    "benchmark": "config distributed runs data training",
    "sweep": "config distributed runs training report doctor",
    "cli": "config training",
    "__main__": "cli",
}

LAUNCH_VARIABLE = re.compile(
    r"^(RANK|LOCAL_RANK|(LOCAL_|GROUP_)?WORLD_SIZE|MASTER_(ADDR|PORT)|(SLURM|TORCHELASTIC)_\w+)$"
)


def modules() -> dict[str, Path]:
    """{"data.loader": path, ...}; packages under the name of their folder."""
    found = {}
    for path in sorted((ROOT / "harness").rglob("*.py")):
        parts = path.relative_to(ROOT / "harness").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in MODULES.items()}


def imported(name: str, for_types: bool = True) -> Iterator[str]:
    """The harness modules that ``name`` imports anywhere in its text, late or by a string; or only for types."""

    def known(dotted: str) -> str:
        while dotted not in MODULES:
            dotted = dotted.rpartition(".")[0]
        return dotted

    skipped = {
        id(inner)
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types
        for inner in ast.walk(node)
    }
    for node in (node for node in ast.walk(TREES[name]) if id(node) not in skipped):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import in line {node.lineno}"
            if (node.module or "").split(".")[0] == "harness":
                yield from (known(f"{node.module}.{alias.name}".partition(".")[2]) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (known(a.name.partition(".")[2]) for a in node.names if a.name.split(".")[0] == "harness")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module" and node.args:
            text = "".join(part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))
            if text.startswith("harness."):
                yield known(text.partition(".")[2].rstrip("."))


def package(name: str) -> str:
    return name.partition(".")[0]


def test_packages_import_what_the_table_allows():
    free = {"errors", "version", ""}
    assert {package(name) for name in MODULES} - free == set(MAY_IMPORT)
    wrong = [
        f"{name} imports {other}"
        for name in MODULES
        for other in imported(name, for_types=False)
        if package(name) not in (free | {package(other)}) and package(other) not in MAY_IMPORT[package(name)].split()
        if package(other) not in free or package(name) == "apex"
    ]
    assert not wrong


def test_the_table_has_no_circle():
    for name in (order := list(MAY_IMPORT)):
        assert all(order.index(other) < order.index(name) for other in MAY_IMPORT[name].split()), name


def test_no_circles_anywhere():
    below = {name: {other for other in imported(name, for_types=False) if other != name} for name in MODULES}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for other in below.get(name, ()):
                # `from harness.apex import amp` inside harness.apex.x names the package, which holds re-exports.
                if MODULES[other].name != "__init__.py":
                    visit(other, (*above, name))
            done.add(name)

    for name in below:
        visit(name, ())


def test_a_launcher_needs_no_torch():
    """It starts in a fraction of a second, on a login node too. (Once it starts, local keeps the ranks' store, which is
    torch's; dask knows checkpoints, to bring them home.)"""
    program = (
        "import sys; from harness import cli\n"
        "for engine in ('local', 'torchrun', 'slurm', 'kubernetes', 'flyte'):\n"
        "    words = ['--nproc', '2', '--dry-run', 'launch.kubernetes.image=I']\n"
        "    assert cli.main(['launch', '-c', 'configs/pet_names.yaml', '--engine', engine, *words]) == 0\n"
        "sys.exit(', '.join({'torch', 'pandas', 'pyarrow'} & {*sys.modules}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_packages_hold_no_imports():
    for name, path in MODULES.items():
        if path.name == "__init__.py" and package(name) != "apex":
            kinds = {type(node) for node in TREES[name].body}
            assert kinds <= {ast.Expr}, f"{name}/__init__.py holds more than its docstring"
            assert ast.get_docstring(TREES[name]) or not TREES[name].body


def test_every_module_says_what_lives_in_it():
    assert [name for name, tree in TREES.items() if not ast.get_docstring(tree)] == []


def test_names_and_sizes():
    for name, path in MODULES.items():
        assert not {"utils", "util", "helpers", "common", "misc"} & set(name.split(".")), name
        assert len(path.read_text().splitlines()) <= 400, f"{name} is too long: give a part of it a room of its own"


# Done in one place


def test_the_launch_environment_is_read_in_one_place():
    reads = {
        (name, node.value)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and LAUNCH_VARIABLE.match(node.value)
    }
    # Before the environment is understood, somebody must say that it is not: the first rank, as far as can be seen.
    # And harness.apex, which knows nothing of the rest, tells a script its local rank in the script's own spelling.
    allowed = {("training.main", "RANK"), ("training.main", "LOCAL_RANK")}
    allowed |= {("apex.local_rank", "LOCAL_RANK"), ("apex.local_rank", "LOCAL_WORLD_SIZE")}
    allowed |= {("engines.torchrun.engine", "TORCHELASTIC_ERROR_FILE")}  # of torch's launcher, not of a rank
    assert {(name, variable) for name, variable in reads if name != "distributed.launch_env"} <= allowed
    assert {variable for name, variable in reads if name == "distributed.launch_env"} >= {
        "RANK",
        "WORLD_SIZE",
        "SLURM_PROCID",
    }


def test_who_touches_the_environment():
    touching = {
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
        if getattr(node.value, "id", "") == "os"
    }
    assert touching <= {
        "cli",  # passes it to train
        "doctor.command",  # passes it to doctor
        "inference.predict_command",  # passes it to predict
        "sweep.main",  # hands it to trials
        "distributed.runtime",  # GLOO_SOCKET_IFNAME
        "apex.local_rank",  # what a launcher tells the script that harness.apex runs
        "training.rng",  # CUBLAS_WORKSPACE_CONFIG
        "runs.files",  # where the user's cache is
        "distributed.devices",  # slices of a GPU have no other name
        "engines.local",  # which the ranks inherit
        "engines.torchrun.engine",  # which torch's launcher and its ranks inherit
        "engines.dask.worker",  # likewise, from a Dask worker
        "engines.flyte.engine",  # which the runner and its ranks inherit
        "engines.flyte.task",  # which the ranks inherit
        "engines.slurm.engine",  # to leave out what an outer job put there
        "trackers.wandb",  # the tool's own settings
        "trackers.mlflow",  # the tool's own settings
    }


def function(module: str, name: str) -> ast.FunctionDef:
    return next(node for node in TREES[module].body if isinstance(node, ast.FunctionDef) and node.name == name)


@pytest.mark.parametrize("name", ["step", "count"])
def test_a_step_does_not_wait_for_the_device(name):
    calls = [node for node in ast.walk(function("training.loop", name)) if isinstance(node, ast.Call)]
    waiting = {getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls} & {
        "item", "cpu", "tolist", "numpy", "synchronize", "float", "print", "sum", "gather", "barrier",
    }  # fmt: skip
    assert not waiting
    # The one place where it may, which the YAML's documentation says: the verdict of train.on_nan=skip.
    assert sum(getattr(call.func, "attr", "") == "isfinite" for call in calls) == (1 if name == "step" else 0)


# File names of a run folder. Those with a dot are recognised anywhere, the plain words only as a part of a path.
NAMES = {value for name, value in vars(layout).items() if re.fullmatch("[A-Z]+", name) and "*" not in value}
FILE_NAMES = {name for name in NAMES if "." in name}
FOLDER_NAMES = NAMES - FILE_NAMES


def run_folder_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each name of the run folder in a string of ``tree``. Docstrings and messages (strings of one line
    with a space) may mention them."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if node.body and isinstance(node.body[0], ast.Expr)
    }
    docs |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # below a field
    joined = {
        id(side)
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        for side in (node.left, node.right)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docs:
            continue
        text = node.value
        if " " in text.strip() and "\n" not in text.strip():
            continue
        parts = set(re.split(r"[\s/\"'$]+", text))
        found = {part for part in parts if re.fullmatch(r"(step|rank)-(\*.*)?|.*\.end\.json", part)}
        found |= parts & FILE_NAMES
        found |= parts & FOLDER_NAMES if id(node) in joined or "/" in text else set()
        yield from ((node.lineno, name) for name in found)


UNFINISHED = ("runs.remote", "runs.fetched", "engines.dask.file_sync")


def test_run_folder_names_are_spelled_in_one_module():
    wrong = [
        f"harness/{name}:{line}: {spelled!r} belongs to harness/runs/layout.py"
        for name, tree in TREES.items()
        if name not in (*UNFINISHED, "runs.layout") and package(name) != "apex"
        for line, spelled in run_folder_names(tree)
    ]
    assert wrong == []


def test_files_are_replaced_in_one_module():
    """Everything that must be whole or absent goes through ``harness.runs.files``."""
    allowed = {
        "runs.files",
        "runs.run_dir",  # moves an earlier run aside
    }
    renaming = {
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if (node.func.attr in ("rename", "replace", "renames") and getattr(node.func.value, "id", "") == "os")
        or (node.func.attr in ("rename", "replace") and len(node.args) == 1)
        or (node.func.attr == "move" and getattr(node.func.value, "id", "") == "shutil")
        if not isinstance(node.func.value, ast.Constant)
    }
    assert renaming <= {*allowed, *UNFINISHED}


def test_urls_are_recognised_in_one_module():
    asking = {
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and node.left.value == "://"
    }
    assert asking == {"runs.files"}


# Where a rank may ask whether it is the first. All others call, and these decide.
ASKS_WHETHER_FIRST = {
    "training.build.restore": "looks for a checkpoint, which all then go on from",
    "benchmark.case.__init__": "keeps the store that all meet in",
    "engines.flyte.task.train_rank": "returns the files of the run folder",
    "training.console.to_terminal": "other ranks speak of errors alone",
    "engines.dask.cluster_run._submit": "keeps the record, which is told live",
    "training.console.start": "one progress bar",
    "training.console.show": "one progress bar",
    "training.run.save": "writes what all have gathered",
    "training.run._restore_ranks": "takes over what sums over ranks had gathered",
    "training.run.keep_best": "writes",
    "training.run._whole": "keeps what all have put together",
    "training.run.report": "writes",
    "training.prediction_writer.write": "writes what all have gathered",
    "training.prediction_writer.best_weights": "reads",
    "distributed.runtime.gather_to_first": "receives",
    "distributed.stop._next_pause": "its clock counts",
    "trackers.metrics_log.open_log": "writes",
    "training.main.main": "tells what is wrong before the ranks meet",
    "training.main.prepare_folder": "writes",
    "training.main.deliver": "has written",
    "training.main.announce": "writes",
}


def test_who_asks_whether_it_is_the_first():
    asking = set()

    def is_rank(node: ast.AST) -> bool:
        return getattr(node, "attr", getattr(node, "id", "")) in ("rank", "_rank", "local_rank")

    for name, tree in TREES.items():
        if package(name) == "apex" or name.startswith("data.table."):
            continue
        for outer in ast.walk(tree):
            if not isinstance(outer, ast.FunctionDef):
                continue
            for node in ast.walk(outer):
                if isinstance(node, ast.Compare) and any(is_rank(side) for side in (node.left, *node.comparators)):
                    others = [side for side in (node.left, *node.comparators) if isinstance(side, ast.Constant)]
                    if any(other.value == 0 and type(other.value) is int for other in others):
                        asking.add(f"{name}.{outer.name}")
    assert asking == set(ASKS_WHETHER_FIRST)


def test_no_collective_is_left_to_one_rank():
    """Nothing that all ranks must reach stands under ``if rank == 0``."""
    collectives = {
        "sum",
        "union",
        "gather",
        "gather_to_first",
        "from_first",
        "barrier",
        "max_async",
        "together",
        "all_equal",
    }
    for name, tree in TREES.items():
        if package(name) == "apex" or name.startswith("data.table.") or name == "distributed.runtime":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and re.search(r"\brank [=!]=", ast.unparse(node.test)):
                for call in (c for part in (node.body, node.orelse) for n in part for c in ast.walk(n)):
                    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                        owner = ast.unparse(call.func.value)
                        assert not (call.func.attr in collectives and owner.endswith("distributed.runtime")), (
                            f"{name}:{call.lineno}"
                        )
