"""A port of a script: the passes in order, the report, and the patch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from harness.tools.port import (
    forward,
    fp16_optimizer,
    gradients,
    imports,
    losses,
    parts,
    precision,
    steps,
    surroundings,
    to_harness,
)
from harness.tools.port.context import AS_IS, BY_HAND, CHANGED, SAME, Context, Note
from harness.tools.port.names import ApexNames
from harness.tools.port.source import Edits, SourceFile


@dataclass(frozen=True)
class Port:
    """A ported script."""

    source: SourceFile
    text: str
    notes: list[Note]
    uses_apex: bool

    @property
    def is_complete(self) -> bool:
        """True if nothing is left to do by hand."""
        return not any(note.group == BY_HAND for note in self.notes)

    def patch(self) -> str:
        """A unified diff; empty if the script stays as it is."""
        name = self.source.path.as_posix()
        before, after = self.source.text.splitlines(keepends=True), self.text.splitlines(keepends=True)
        lines = difflib.unified_diff(before, after, name, name)
        return "".join(each if each.endswith("\n") else f"{each}\n\\ No newline at end of file\n" for each in lines)

    def report(self) -> str:
        """The notes, by group and line."""
        if not self.uses_apex:
            return f"{self.source.path} does not import Apex"
        found = [f"{self.source.path} runs as it is with: python -m harness.apex {self.source.path}"]
        for group in (AS_IS, SAME, CHANGED, BY_HAND):
            notes = sorted({note for note in self.notes if note.group == group})
            if notes:
                width = max(len(str(note.line)) for note in notes)
                found += ["", f"{group}:"]
                found += [f"  {note.line:>{width}}  {note.what}\n  {'':{width}}    {note.do}" for note in notes]
        return "\n".join(found)


def port(path: Path, to: str) -> Port:
    """Port the script at ``path`` to "torch" or "harness". Raises DataError if it cannot be read."""
    source = SourceFile(path)
    names = ApexNames(source)
    context = Context(source, names, Edits(source))
    if names.imports and to == "torch":
        precision.find_models(context)
        precision.rewrite(context)
        fp16_optimizer.rewrite(context)
        precision.find_wrapped_models(context)
        if context.has_scaler:
            found = losses.rewrite(context)
            steps.rewrite(context, found)
            gradients.rewrite(context, found)
            forward.rewrite(context, found)
        parts.rewrite(context)
    if names.imports:
        surroundings.rewrite(context)
        imports.rewrite(context) if to == "torch" else to_harness.rewrite(context)
        imports.insert(context)
    return Port(source, context.edits.result(), context.notes, bool(names.imports))
