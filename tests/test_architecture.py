"""The structure that docs/architecture.md describes, checked on the syntax trees of the code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT
from tests.syntax_trees import MODULES, calls, imported, package, trees

PAGE = (ROOT / "docs" / "architecture.md").read_text()
# What each package may import of the others, from the tables of the page. All but harness.apex may also import FREE.
MAY_IMPORT = {
    name: tuple(re.findall(r"`([\w.]+)`", last))
    for name, last in re.findall(r"^\| `([\w.]+)` \| \*\*.+?\*\*.*?\|([^|]*)\|$", PAGE, re.M)
} | {
    "__main__": ("cli",),
    "train": ("api", "__main__"),
}
FREE = {"errors", "version", ""}

# Class names with more than one meaning.
SHARED_CLASS_NAMES = {
    "Task": "the section of each task, found by this name",
    "Strategy": "the class of each parallel strategy, found by this name",
    "Tracker": "the class of each tracker, found by this name",
    "Model": "the class of each model, found by this name",
    "Settings": "the settings of each engine, found by this name",
    "Format": "the class of each checkpoint format, found by this name",
    "Finding": "one of harness doctor about the machine, and one of harness verify-resume about a script",
    "LossScaler": "Apex has one in amp and one in fp16_utils",
    "FP16_Optimizer": "Apex had one in optimizers and one in fp16_utils",
}


# What to read first


def test_the_files_to_read_first_are_short():
    """So that a new engineer reads all of them."""
    files = re.findall(r"^\| \d+ \| `(harness/[\w/]+\.py)`", PAGE, re.M)
    assert len(files) == 7
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= 1220


# Imports


def test_packages_import_what_the_table_allows():
    assert {package(name) for name in MODULES} - FREE == set(MAY_IMPORT)
    wrong = [
        f"{name} imports {other}"
        for name in MODULES
        for other in imported(name, for_types=False)
        if package(name) not in (FREE | {package(other)}) and package(other) not in MAY_IMPORT[package(name)]
        if package(other) not in FREE or package(name) == "apex"
    ]
    assert not wrong, "see the table of packages in docs/architecture.md"


def test_table_has_no_unused_entries():
    for name, allowed in MAY_IMPORT.items():
        used = {
            package(other) for module in MODULES if f"{module}.".startswith(f"{name}.") for other in imported(module)
        }
        assert not set(allowed) - used, f"docs/architecture.md allows {name} more than it imports"


def test_row_of_tools_sums_up_its_packages():
    inside = {other for name, allowed in MAY_IMPORT.items() if name.startswith("tools.") for other in allowed}
    assert set(MAY_IMPORT["tools"]) == {name for name in inside if not name.startswith("tools.")}


def test_table_lists_packages_after_their_imports():
    for name in (order := list(MAY_IMPORT)):
        assert all(order.index(other) < order.index(name) for other in MAY_IMPORT[name]), name


def test_no_import_cycles():
    """Not of types either, whose imports never run."""
    below = {name: {other for other in imported(name, for_types=True) if other != name} for name in MODULES}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        cycle = above[above.index(name) :] if name in above else ()
        assert not cycle, " -> ".join((*cycle, name))
        if name not in done:
            for other in below.get(name, ()):
                # Inside harness.apex, `from harness.apex import amp` names the package, which holds re-exports.
                if MODULES[other].name != "__init__.py":
                    visit(other, (*above, name))
            done.add(name)

    for name in below:
        visit(name, ())


def test_only_tests_import_from_tests():
    paths = [path for folder in ("benchmarks", "launch") for path in (ROOT / folder).rglob("*.py")]
    paths.remove(ROOT / "benchmarks" / "resume_audit.py")  # a table about the scripts that the tests have
    others = {str(path): ast.parse(path.read_text()) for path in [*paths, ROOT / "driver.py"]}
    for path, tree in {**trees(), **others}.items():
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == "tests" for name in names), path


def test_threads_of_a_rank_inherit_its_device():
    """Launchers and the other commands compute nothing; a pool only reads, writes and decodes on the CPU."""
    without_ranks = ("apex", "engines", "tools", "distributed.threads")
    started = [
        name
        for name, tree in trees().items()
        if not name.startswith(without_ranks) and "Thread" in [function for function, _ in calls(tree)]
    ]
    assert not started, "use harness.distributed.threads, which sets the device"


# Names, docstrings and places


def test_init_files_hold_only_a_docstring():
    for name, path in MODULES.items():
        if path.name == "__init__.py" and package(name) not in ("", "apex"):  # these two hold the public names
            assert {type(node) for node in trees()[name].body} == {ast.Expr}, f"{name}/__init__.py"


def test_every_package_says_where_to_start_reading():
    packages = [name for name in MAY_IMPORT if name not in ("apex", "api", "cli", "__main__", "train")]
    assert [name for name in packages if "Start at" not in (ast.get_docstring(trees()[name]) or "")] == []


def test_every_module_has_a_docstring():
    assert [name for name, tree in trees().items() if not ast.get_docstring(tree)] == []


def test_module_names_and_sizes():
    for name, path in MODULES.items():
        assert not {"utils", "util", "helpers", "common", "misc"} & set(name.split(".")), name
        assert len(path.read_text().splitlines()) <= 600, f"{name} is too long: split it by subject"


def test_class_names_have_one_meaning():
    places = defaultdict(set)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(name)
    twice = {name for name, found in places.items() if len(found) > 1}
    assert twice == set(SHARED_CLASS_NAMES)


# tests/apex follows the points of the Apex contract (tests/apex/contract.py).
OTHER_TESTS = {
    "audit/test_recorder.py": "harness/audit/hook",
    "audit/test_scripts.py": "tests/audit/scripts",
    "engines/test_nodes_elastic.py": "torchrun on several machines",
    "engines/test_trainjob.py": "launch/trainjob.yaml",
    "tools/report/test_browser.py": "the page in a browser",
    "test_architecture.py": "docs/architecture.md",
    "test_docs.py": "README.md and docs/*.md",
    "test_ranks.py": "tests/ranks.py",
    "test_syncs.py": "tests/syncs.py",
}


def test_every_test_file_mirrors_a_module():
    """tests/PACKAGE/test_MODULE.py, with an optional _suffix."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        place = path.relative_to(ROOT / "tests")
        if place.parts[0] in ("end_to_end", "apex") or place.as_posix() in OTHER_TESTS:
            continue
        folder = ROOT / "harness" / place.parent
        assert folder.is_dir(), f"tests/{place} mirrors no package"
        known = {file.stem for file in folder.rglob("*.py")} | {file.name for file in folder.rglob("*/")}
        stem = path.stem.removeprefix("test_")
        fits = any(stem == name or stem.startswith(f"{name}_") for name in known | {folder.name})
        assert fits, f"tests/{place} names no module of harness/{place.parent}"


def reachable(name: str) -> set[str]:
    """The packages that ``name`` may import directly or through others."""
    return set(MAY_IMPORT[name]).union(*map(reachable, MAY_IMPORT[name]))


def test_picture_of_the_page_is_current():
    """It leaves out the arrows that follow from others."""
    needed = {
        (name, other)
        for name, allowed in MAY_IMPORT.items()
        for other in allowed
        if "." not in name and name not in ("train", "__main__") and not any(other in reachable(by) for by in allowed)
    }
    lines = re.findall(r"^  ([\w &]+) --> ([\w &]+)$", PAGE, re.M)
    assert {
        (one, other) for left, right in lines for one in left.split(" & ") for other in right.split(" & ")
    } == needed


# Done in one place

LAUNCH_VARIABLE = re.compile(
    r"^(RANK|LOCAL_RANK|(LOCAL_|GROUP_)?WORLD_SIZE|MASTER_(ADDR|PORT)|(SLURM|TORCHELASTIC)_\w+)$"
)


def test_launch_environment_is_read_in_one_place():
    reads = {
        (name, node.value)
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and LAUNCH_VARIABLE.match(node.value)
    }
    # An invalid environment must be reported by one rank, before it is understood. harness.apex imports nothing of the
    # project and passes a script its local rank. The error file belongs to torch's launcher, not to a rank.
    allowed = {("training.main", "RANK"), ("training.main", "LOCAL_RANK")}
    allowed |= {("apex.local_rank", "LOCAL_RANK"), ("apex.local_rank", "LOCAL_WORLD_SIZE")}
    allowed |= {("engines.torchrun.engine", "TORCHELASTIC_ERROR_FILE")}
    # The recorder works in somebody's script and imports nothing of the project.
    allowed |= {("audit.hook.resume_recorder", name) for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID")}
    allowed |= {("__main__", "LOCAL_RANK")}  # of a process that is interrupted before it can import anything
    assert {(name, variable) for name, variable in reads if name != "distributed.launch_env"} <= allowed
    found = {variable for name, variable in reads if name == "distributed.launch_env"}
    assert found >= {"RANK", "WORLD_SIZE", "SLURM_PROCID"}


def test_few_modules_touch_the_environment():
    touching = {
        name
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
        if getattr(node.value, "id", "") == "os"
    }
    assert touching <= {
        # pass it on to what they start or call
        "__main__", "api", "cli", "audit.audit",
        # in the process of a script, which has its plan from there
        "audit.hook.sitecustomize", "audit.hook.resume_recorder",
        "inference.predict_command", "tools.doctor.command", "tools.sweep.main",
        "training.train_command",
        "engines.local.engine", "engines.torchrun.engine", "engines.dask.worker", "engines.flyte.engine",
        "engines.flyte.task",
        "engines.slurm.engine",
        # variables of other software
        "distributed.process_group", "distributed.devices", "training.reproducibility.determinism", "apex.local_rank",
        "trackers.wandb",
        "trackers.mlflow", "trackers.trackio", "training.reproducibility.logical_ranks", "training.measuring.memory",
        "runs.files",  # the user's cache folder
        "runs.exit_files",  # set by a sweep, for all processes of a trial
        "",  # how torch's threads wait, before anything imports torch
    }  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name"), [("training.loop", "step"), ("training.loop", "update"), ("training.counting", "record_step")]
)
def test_a_step_does_not_wait_for_the_device(module, name):
    nodes = ast.walk(trees()[module])
    body = next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)
    called = [function for function, _ in calls(body)]
    waiting = {"item", "cpu", "tolist", "numpy", "synchronize", "float", "print", "sum", "gather", "barrier",
               "isfinite"}  # fmt: skip
    assert not waiting & set(called)
    # The documented exception: train.on_nan=skip needs its decision on the host.
    assert called.count("finite_everywhere") == (1 if name == "update" else 0)


# Collectives

RUNTIME = {
    "sum",
    "sum_on_host",
    "union_on_host",
    "gather",
    "gather_to_first",
    "from_first",
    "barrier",
    "max_async",
    "together",
    "all_equal",
    "all_agree",
    "announced",
    "await_work",
}
RANK_TEST = re.compile(r"\b_?(local_)?rank (==|!=|>|<) |[=<>] \w*\.?_?rank\b")


def collective_functions() -> set[str]:
    """The functions of modules whose docstring says "Collective", as module.name, and the names that belong to such
    functions and methods only."""
    found, of_modules = defaultdict(set), set()
    for module, tree in trees().items():
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            collective = bool(re.search(r"\bCollective\b", ast.get_docstring(node) or ""))
            found[node.name].add(collective)
            if collective and node in tree.body:
                of_modules.add(f"{module}.{node.name}")
    return of_modules | {name for name, collective in found.items() if collective == {True}}


def meanings(module: str) -> dict[str, str]:
    """{name in ``module``: the module or function of the harness that it means}"""
    tree = trees()[module]
    own = {node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return own | {
        each.asname or each.name: f"{node.module}.{each.name}".removeprefix("harness.")
        for node in imports
        for each in node.names
    }


def of_one_rank(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements that only some ranks reach: branches of a test of the rank, and what follows one that returns."""
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(body, list):
                continue
            for place, statement in enumerate(body):
                if isinstance(statement, ast.If) and RANK_TEST.search(ast.unparse(statement.test)):
                    yield from (*statement.body, *statement.orelse)
                    if isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break):
                        yield from body[place + 1 :]


def test_no_collective_is_left_to_one_rank():
    names, checked = collective_functions(), 0
    assert {"training.checkpoints.checkpointing.save", "training.evaluation.evaluate.evaluate", "patiently"} <= names
    for name, tree in trees().items():
        if package(name) == "apex" or name == "distributed.runtime":
            continue
        known = meanings(name)
        for statement in of_one_rank(tree):
            checked += 1
            for function, owner in calls(statement):
                on_runtime = function in RUNTIME and owner.split(".")[-1].lstrip("_") in ("runtime", "ranks")
                meant = f"{known[owner]}.{function}" if owner in known else known.get(function if not owner else "", "")
                assert not on_runtime, f"{name}:{statement.lineno}: {function}"
                assert not {function, meant} & names, f"{name}:{statement.lineno}: {function}"
    assert min(checked, len(names)) > 8  # the patterns above still find something
