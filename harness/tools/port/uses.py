"""What a script uses of Apex: the names that its imports bind, the lines that use them, and where docs/migrate.md shows
their replacements."""

from __future__ import annotations

import ast
import importlib
import io
import symtable
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from harness.apex.import_hook import EXTENSIONS
from harness.errors import DataError, did_you_mean, reason, remedy

PAGE = "docs/migrate.md"
NOTHING = "what-torch-does-not-have"
# {section of docs/migrate.md: the names whose replacement it shows}. The last part of a path that is here counts.
SECTIONS = {
    "one-loss": "amp initialize scale_loss",
    "opt-levels": "O0 O1 O2 O3 O4 O5 opt_levels Properties disable_casts",
    "clipping-gradients": "master_params clip_grad_norm clip_grad_norm_",
    "checkpoints": "state_dict load_state_dict _amp_state AmpState",
    "distributed-training": "DistributedDataParallel SyncBatchNorm convert_syncbn_model create_syncbn_process_group "
    "ReduceOp parallel",
    "fused-optimizers-and-layers": "FusedAdam FusedSGD FusedAdagrad FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm "
    "MixedFusedRMSNorm normalization",
    "fp16_optimizer-and-network_to_half": "FP16_Optimizer network_to_half BN_convert_float FP16Model convert_module "
    "convert_network master_params_to_model_params model_grads_to_master_grads prep_param_lists to_python_float tofp16 "
    "LossScaler DynamicLossScaler fp16_utils",
    "functions-in-a-fixed-precision": "half_function float_function bfloat16_function promote_function "
    "register_half_function register_float_function register_bfloat16_function register_promote_function",
    "the-launchers-option": "--local_rank",
    NOTHING: "FusedLAMB FusedMixedPrecisionLamb FusedNovoGrad LARC Reducer init",
}
_SECTION_OF = {name: section for section, names in SECTIONS.items() for name in names.split()}
Import = ast.Import | ast.ImportFrom


@dataclass(frozen=True, order=True)
class Use:
    """A line of a script and a part of Apex that it uses; ``section`` is empty if harness.apex does not have it."""

    line: int
    name: str
    section: str


@dataclass(frozen=True)
class Imported:
    """A name that an import of Apex binds. ``alias`` is the part of ``statement`` that binds it."""

    statement: Import
    alias: ast.alias
    path: str
    """The path of what is imported, such as apex.amp.initialize or apex.amp_C; for *, of the module."""
    is_known: bool
    """``harness.apex`` has it."""


class ApexScript:
    """A script: its text without the byte order ``mark`` before it, its syntax tree, and its imports of Apex. Raises
    DataError if it cannot be parsed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = path.read_bytes()
            encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
            self.text = data.decode(encoding)
            self.encoding, self.mark = ("utf-8", "\ufeff") if encoding == "utf-8-sig" else (encoding, "")
            self.tree = ast.parse(self.text)
            self._functions = _functions(symtable.symtable(self.text, str(path), "exec"))
        except OSError as error:
            hint = did_you_mean(path) or remedy(error)
            raise DataError(f"cannot read the script: {reason(error)}", where=str(path), hint=hint) from None
        except (SyntaxError, ValueError) as error:
            line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            raise DataError(
                f"this is not Python 3: {getattr(error, 'msg', error)}",
                where=f"{path}{line}",
                hint="for a Python 2 script, run a converter such as 2to3 first",
            ) from None
        self._above = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.imports = list(self._imports())
        self._bound = dict(self._names())

    def uses(self) -> list[Use]:
        """Return what the script uses of Apex, by line."""
        found = {Use(each.statement.lineno, each.path, "") for each in self.imports if not each.is_known}
        for node in ast.walk(self.tree):
            if (path := self._path(node)) and not self._path(self._above[node]):
                known = _resolved(path, is_import=False)
                found.add(Use(node.lineno, path, _section(path) if known == path else ""))  # type: ignore[attr-defined]
            elif self.imports and isinstance(node, ast.Call) and _adds_local_rank(node):
                found.add(Use(node.lineno, "--local_rank", _section("--local_rank")))
        return sorted(found)

    def _imports(self) -> Iterator[Imported]:
        """Yield the names that the script imports from Apex."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (module := _inside_apex(node.module or "")):
                for alias in node.names:
                    path = module if alias.name == "*" else f"{module}.{alias.name}"
                    known = _resolved(path)
                    yield Imported(node, alias, known or path, bool(known))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if path := _inside_apex(alias.name):
                        yield Imported(node, alias, path, _resolved(path) == path)

    def _names(self) -> Iterator[tuple[str, str]]:
        """Yield (name in the script, its path in Apex) of what the imports bind."""
        for each in self.imports:
            if each.alias.name == "*":
                if each.is_known:
                    module = importlib.import_module(f"harness.{each.path}")
                    public = getattr(module, "__all__", [name for name in dir(module) if not name.startswith("_")])
                    yield from ((name, f"{each.path}.{name}") for name in public)
            elif isinstance(each.statement, ast.Import) and not each.alias.asname:
                name = each.alias.name.partition(".")[0]
                yield name, _inside_apex(name)
            else:
                yield each.alias.asname or each.alias.name, each.path

    def _path(self, node: ast.AST) -> str:
        """Return the path in Apex of a name or a chain of attributes; empty if it is something else."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._bound or self._is_local(node):
            return ""
        if not isinstance(node.ctx, ast.Load):  # such as amp = None, after an ImportError
            return ""
        return ".".join([self._bound[node.id], *reversed(parts)])

    def _is_local(self, name: ast.Name) -> bool:
        """Return True if a function around ``name`` binds it, as a parameter or a variable, and does not import it."""
        inner: ast.AST = name
        while inner in self._above:
            node = self._above[inner]
            if inner in _body(node):
                symbols = self._functions[node.lineno, getattr(node, "name", "lambda")]  # type: ignore[attr-defined]
                if name.id in symbols.get_locals():
                    return not symbols.lookup(name.id).is_imported()
            inner = node
        return False


def _functions(table: symtable.SymbolTable) -> dict[tuple[int, str], symtable.Function]:
    """Return {(line, name): symbols} of the functions in ``table``, of several lambdas in a line those of the last."""
    found = {}
    if isinstance(table, symtable.Function):
        found[table.get_lineno(), table.get_name().strip("<>")] = table
    for inner in table.get_children():
        found |= _functions(inner)
    return found


def _body(node: ast.AST) -> list[ast.AST]:
    """Return what is evaluated inside the function ``node``: neither its defaults nor its decorators."""
    if isinstance(node, ast.Lambda):
        return [node.body]
    return [*node.body] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []


def _resolved(path: str, is_import: bool = True) -> str:
    """Return the path in harness.apex of what Apex had at ``path``; empty if there is nothing.

    ``apex.amp.frontend.initialize`` is ``apex.amp.initialize``: a package has the names of the modules that Apex had
    inside it. What follows a function or an object is not looked up, unless ``is_import``: only modules are imported
    from.
    """
    place: object = importlib.import_module("harness.apex")
    found, *parts = path.split(".")
    for number, part in enumerate(parts):
        is_inner = 0 < number < len(parts) - 1
        if isinstance(place, ModuleType):
            inside = _part(place, found, part)
            if is_inner and (inside is None or (is_import and not isinstance(inside, ModuleType))):
                continue
            if inside is None:
                return ""
            place = inside
        found += f".{part}"
    return found


def _part(module: ModuleType, path: str, name: str) -> object | None:
    """Return what ``module``, harness.apex's at ``path``, has under ``name``, also a module that is not imported
    yet."""
    if not hasattr(module, name):
        try:
            importlib.import_module(f"harness.{path}.{name}")
        except ImportError:
            return None
    found: object = getattr(module, name)
    return found


def _inside_apex(module: str) -> str:
    """Return the path of a module of Apex, such as apex.amp, or apex.amp_C for the extension amp_C; empty for
    others."""
    top = module.partition(".")[0]
    return module if top == "apex" else f"apex.{module}" if top in EXTENSIONS else ""


def _section(path: str) -> str:
    return next((_SECTION_OF[part] for part in reversed(path.split(".")) if part in _SECTION_OF), NOTHING)


def _adds_local_rank(call: ast.Call) -> bool:
    options = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    return isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument" and "--local_rank" in options
