"""The meaning of a script's names: which expressions are parts of Apex."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from harness.tools.port.source import SourceFile

# Modules inside Apex's packages, whose names the package has as well.
_INNER = {
    *("frontend", "handle", "amp", "distributed", "sync_batchnorm", "optimized_sync_batchnorm", "fused_layer_norm"),
    *("fused_adam", "fused_lamb", "fused_sgd", "fused_novograd", "fused_adagrad", "fused_mixed_precision_lamb"),
    *("fp16util", "fp16_optimizer", "loss_scaler", "LARC", "multi_tensor_apply", "mlp", "fused_dense"),
}
_STAR = {
    "apex.fp16_utils": "BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads tofp16 "
    "master_params_to_model_params to_python_float clip_grad_norm convert_module convert_network FP16Model "
    "FP16_Optimizer LossScaler DynamicLossScaler",
    "apex.amp": "initialize scale_loss master_params state_dict load_state_dict half_function float_function "
    "promote_function register_half_function register_float_function register_promote_function init",
    "apex.parallel": "DistributedDataParallel Reducer SyncBatchNorm convert_syncbn_model create_syncbn_process_group",
    "apex.optimizers": "FusedAdam FusedLAMB FusedSGD FusedNovoGrad FusedAdagrad FP16_Optimizer",
    "apex.normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
}
_EXTENSIONS = ("amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda", "syncbn", "mlp_cuda")


def is_apex(module: str | None) -> bool:
    return (module or "").split(".")[0] in ("apex", *_EXTENSIONS)


def canonical(path: str) -> str:
    """The shortest path of a name: ``apex.amp.frontend.initialize`` is ``apex.amp.initialize``."""
    parts = path.split(".")
    if len(parts) > 3 and parts[0] == "apex" and parts[2] in _INNER and parts[1] != "contrib":
        del parts[2]
    return ".".join(parts)


@dataclass
class Imported:
    """A name that an import of Apex binds. ``alias`` is the part of ``statement`` that binds it."""

    statement: ast.Import | ast.ImportFrom
    alias: ast.alias
    local: str
    path: str


class ApexNames:
    """The names that a script's imports of Apex bind, anywhere in the script."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self.imports: list[Imported] = []
        self.others: dict[str, int] = {}  # names that other imports bind: {name: line}
        self.modules: set[str] = set()  # those that the module itself imports by their own name, such as torch
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._add(node)
        self.bound = {each.local: each.path for each in self.imports}
        for each in self.imports:
            if each.local == "*":
                path = canonical(f"{each.path}.x").removesuffix(".x")
                self.bound |= {name: f"{path}.{name}" for name in _STAR.get(path, "").split()}

    def _add(self, node: ast.Import | ast.ImportFrom) -> None:
        module = str(getattr(node, "module", ""))
        top = isinstance(self.source.parents[node], ast.Module)
        for alias in node.names:
            name = alias.asname or alias.name
            if isinstance(node, ast.ImportFrom):
                path: str = module if name == "*" else f"{module}.{alias.name}"
                ours = is_apex(module) and not node.level
            else:
                path, ours = alias.name, is_apex(alias.name)
                if alias.asname is None:
                    name = path = name.split(".")[0]
                if top and name == path:
                    self.modules.add(name)
            if ours:
                self.imports.append(Imported(node, alias, name, path if name == "*" else canonical(path)))
            else:
                self.others[name] = node.lineno

    def path(self, node: ast.AST) -> str | None:
        """The path in Apex of a name or a chain of attributes; None if it is something else."""
        parts: list[str] = []
        each = node
        while isinstance(each, ast.Attribute):
            parts.append(each.attr)
            each = each.value
        if not isinstance(each, ast.Name) or each.id not in self.bound or self._is_local(each):
            return None
        return canonical(".".join([self.bound[each.id], *reversed(parts)]))

    def _is_local(self, name: ast.Name) -> bool:
        """Return True if a parameter of a function around ``name`` has that name."""
        for function in self.source.above(name):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                given = function.args
                names = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
                if name.id in {each.arg for each in names if each}:
                    return True
        return False

    def references(self) -> Iterator[tuple[ast.expr, str]]:
        """The longest chains that lead into Apex, outside imports, with their paths, in the order of the text."""
        found = []
        for node in ast.walk(self.source.tree):
            if isinstance(node, (ast.Name, ast.Attribute)) and (path := self.path(node)):
                above = self.source.parents[node]
                if not (isinstance(above, ast.Attribute) and self.path(above)):
                    found.append((node, path))
        yield from sorted(found, key=lambda pair: (pair[0].lineno, pair[0].col_offset))

    def calls(self, path: str) -> Iterator[ast.Call]:
        """The calls of the function ``path``."""
        for node, found in self.references():
            call = self.source.parents[node]
            if found == path and isinstance(call, ast.Call) and call.func is node:
                yield call
