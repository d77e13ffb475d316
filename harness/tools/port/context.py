"""What the passes of a port share: the script, its edits, and the notes for the reader."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.tools.port.names import ApexNames
from harness.tools.port.source import Edits, SourceFile

AS_IS, SAME, CHANGED, BY_HAND = "Runs as it is", "Rewritten, same meaning", "Changed meaning", "By hand"


@dataclass(frozen=True, order=True)
class Note:
    """A line of the report: what is in a line of the script, and what to do or what happened to it."""

    line: int
    group: str
    what: str
    do: str


@dataclass
class Context:
    """A script being ported to torch. Expressions of the script are compared by their text, such as ``self.model``."""

    source: SourceFile
    names: ApexNames
    edits: Edits
    notes: list[Note] = field(default_factory=list)
    done: set[ast.AST] = field(default_factory=set)  # references to Apex that need no more attention
    models: set[str] = field(default_factory=set)
    optimizers: set[str] = field(default_factory=set)
    fp16_optimizers: set[str] = field(default_factory=set)
    has_scaler: bool = False
    autocast: str = ""  # the expression that turns autocast on, when some model is initialized
    imports: set[str] = field(default_factory=set)  # modules that the edited script needs
    snippets: set[str] = field(default_factory=set)  # of snippets.py
    scaler: str = "scaler"

    def __post_init__(self) -> None:
        free = (name for name in ("scaler", "grad_scaler", "amp_scaler") if name not in self.source.names)
        self.scaler = next(free, "apex_grad_scaler")

    def note(self, node: ast.AST, group: str, what: str, do: str) -> None:
        self.notes.append(Note(node.lineno, group, what, do))  # type: ignore[attr-defined]

    def by_hand(self, node: ast.AST, what: str, do: str) -> None:
        """Leave ``node`` as it is, with a comment above its statement."""
        if any(note.group == BY_HAND and note.line == node.lineno for note in self.notes):  # type: ignore[attr-defined]
            return
        self.note(node, BY_HAND, what, do)
        statement = self.source.statement(node)
        if self.source.is_alone(statement):
            self.edits.insert_before(statement, [f"# TODO(apex): {what}: {do}"])

    def finish(self, call: ast.Call) -> None:
        """Mark the function of a call as ported."""
        self.done.add(call.func)


def arguments(call: ast.Call, names: Sequence[str]) -> dict[str, ast.expr]:
    """The arguments of ``call`` by the names of the function's parameters; ``**`` for an unpacked dictionary."""
    found = {name: value for name, value in zip(names, call.args, strict=False)}
    return found | {keyword.arg or "**": keyword.value for keyword in call.keywords}


def is_unpacked(call: ast.Call) -> bool:
    """Return True if a call has ``*args``, so that its arguments are unknown."""
    return any(isinstance(argument, ast.Starred) for argument in call.args)


def constant(node: ast.AST | None) -> object:
    """The value of a literal; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        return -value if isinstance(value, (int, float)) else None
    return node.value if isinstance(node, ast.Constant) else None


def elements(node: ast.expr | None) -> list[ast.expr]:
    """The elements of a list or tuple; other expressions are their only element."""
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return []
    return list(node.elts) if isinstance(node, (ast.List, ast.Tuple)) else [node]
