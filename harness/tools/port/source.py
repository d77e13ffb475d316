"""The text and the syntax tree of a script, and edits of the text by positions of the tree.

Edits leave everything else as it is: comments, quotes, line ends, line breaks inside an expression.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import DataError, did_you_mean, reason, remedy

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


class SourceFile:
    """A script: its ``text``, its ``tree``, and where each node is. Raises DataError if it cannot be parsed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = path.read_bytes()
            self.encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
            self.text = data.decode(self.encoding)
            self.tree = ast.parse(self.text)
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
        # Unlike str.splitlines, Python does not end a line at a form feed.
        self.lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", self.text)
        self.newline = "\r\n" if self.text.count("\r\n") > self.text.count("\n") / 2 else "\n"
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.names = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        self.comments: dict[int, str] = {}
        self._inside_strings: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                self.comments[token.start[0]] = token.string
            elif token.end[0] > token.start[0] and (token.type == tokenize.STRING or "FSTRING" in _name(token)):
                self._inside_strings |= set(range(token.start[0] + 1, token.end[0] + 1))
        self.unit = next((first for first in map(self._first_indent, self.tree.body) if first), "    ")

    def start_of_line(self, number: int) -> int:
        """The offset of line ``number``, from 1; the end of the text for the line after the last."""
        return self._starts[number - 1]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The offsets of a node's first character, and after its last."""
        first = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
        last = getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0)
        return self._offset(*first), self._offset(*last)

    def _offset(self, line: int, column: int) -> int:
        # The tree counts bytes of UTF-8.
        return self._starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def source(self, node: ast.AST) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def indent(self, node: ast.AST) -> str:
        """The white space before the line on which a node starts."""
        line = self.lines[node.lineno - 1]  # type: ignore[attr-defined]
        return line[: len(line) - len(line.lstrip())]

    def unit_at(self, line: int) -> str:
        """One level of indentation around ``line``: a script may mix blocks with tabs and blocks with spaces."""
        text = self.lines[line - 1]
        indent = text[: len(text) - len(text.lstrip())]
        if not indent:
            return self.unit
        return "\t" if "\t" in indent else self.unit.replace("\t", "    ")

    def is_alone(self, node: ast.AST) -> bool:
        """Return True if no other statement shares a statement's lines."""
        start, end = self.span(node)
        before = self.text[self.start_of_line(node.lineno) : start]  # type: ignore[attr-defined]
        after = self.text[end : self.start_of_line(node.end_lineno + 1)].strip()  # type: ignore[attr-defined]
        return not before.strip() and (not after or after.startswith("#"))

    def is_in_string(self, line: int) -> bool:
        """Return True if a line begins inside a string of several lines."""
        return line in self._inside_strings

    def _first_indent(self, node: ast.AST) -> str:
        body = getattr(node, "body", None)
        if not isinstance(body, list) or body[0].lineno == node.lineno:  # type: ignore[attr-defined]
            return ""
        return self.indent(body[0])

    # The tree

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around ``node``, from the inside to the module."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement around ``node``, or ``node`` itself."""
        return next(each for each in (node, *self.above(node)) if isinstance(each, ast.stmt))

    def function(self, node: ast.AST) -> Function:
        """The innermost function around ``node``, or the module."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)
        return next(each for each in self.above(node) if isinstance(each, kinds))

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The list of statements that holds ``statement``."""
        return next(block for block in blocks(self.parents[statement]) if statement in block)

    def inside(self, function: ast.AST) -> Iterator[ast.AST]:
        """The nodes of a function or block in the order of the text, without those of functions defined in it."""
        for child in ast.iter_child_nodes(function):
            yield child
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
                yield from self.inside(child)


def _name(token: tokenize.TokenInfo) -> str:
    return tokenize.tok_name[token.type]


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements directly in ``node``."""
    for field_name in ("body", "orelse", "finalbody"):
        found = getattr(node, field_name, None)
        if isinstance(found, list):
            yield found


@dataclass
class _Insertion:
    """Lines inserted before line ``before``, indented like line ``like``."""

    before: int
    like: int
    lines: list[str]
    is_first: bool = False  # of those before the same line


@dataclass
class Edits:
    """Changes of a script's text. All positions are those of the original."""

    source: SourceFile
    _edits: list[tuple[int, int, int, str]] = field(default_factory=list)  # start, order, end, text
    _insertions: list[_Insertion] = field(default_factory=list)
    _removed: list[ast.stmt] = field(default_factory=list)
    _replaced: list[ast.stmt] = field(default_factory=list)
    _gone: set[int] = field(default_factory=set)
    _shifts: list[tuple[int, int, int]] = field(default_factory=list)  # first and last line; 1 level, or -characters

    def replace(self, node: ast.AST, text: str) -> None:
        self.replace_span(*self.source.span(node), text)

    def replace_span(self, start: int, end: int, text: str) -> None:
        self._edits.append((start, 2, end, text))

    def insert_before(self, statement: ast.stmt, lines: list[str]) -> None:
        self._insertions.append(_Insertion(statement.lineno, statement.lineno, lines))

    def insert_after(self, statement: ast.stmt, lines: list[str], is_first: bool = False) -> None:
        """Insert lines; with ``is_first``, above those that are inserted before the next statement."""
        self._insertions.append(_Insertion((statement.end_lineno or 0) + 1, statement.lineno, lines, is_first))

    def shift_right(self, first: int, last: int) -> None:
        """Indent lines ``first`` to ``last`` by one level."""
        self._shifts.append((first, last, 1))
        for line in self._shiftable(first, last):
            start = self.source.start_of_line(line)
            self._edits.append((start, 1, start, self.source.unit_at(first)))

    def shift_left(self, first: int, last: int, indent: str, to: str) -> None:
        """Indent lines ``first`` to ``last`` by ``to`` instead of ``indent``, which begins with it."""
        self._shifts.append((first, last, len(to) - len(indent)))
        for line in self._shiftable(first, last):
            text = self.source.lines[line - 1]
            blank = len(text) - len(text.lstrip())
            start = self.source.start_of_line(line)
            if blank > len(to):
                self._edits.append((start + len(to), 1, start + min(blank, len(indent)), ""))

    def _shiftable(self, first: int, last: int) -> Iterator[int]:
        for line in range(first, last + 1):
            if self.source.lines[line - 1].strip() and not self.source.is_in_string(line):
                yield line

    def replace_statement(self, statement: ast.stmt, lines: list[str]) -> None:
        """Put ``lines`` in the place of a statement. A block that loses all its statements gets ``pass``."""
        self._removed.append(statement)
        if lines:
            self._replaced.append(statement)
            self.insert_before(statement, lines)

    def remove_lines(self, first: int, last: int) -> None:
        self._gone |= set(range(first, last + 1))
        self._edits.append((self.source.start_of_line(first), 2, self.source.start_of_line(last + 1), ""))

    def unwrap(self, statements: list[ast.stmt], first: int, last: int, indent: str) -> None:
        """Indent statements and the comments around, in lines ``first`` to ``last``, by ``indent``."""
        self._replaced += statements  # needs no ``pass``
        self.shift_left(first, last, self.source.indent(statements[0]), indent)

    def result(self) -> str:
        """The edited text."""
        self._resolve_removed()
        gone = {self.source.start_of_line(line) for line in self._gone}
        edits = [self._resolved(each) for each in self._insertions]
        edits += [each for each in self._edits if each[1] != 1 or each[0] not in gone]  # no indent for removed lines
        text, parts, position = self.source.text, [], 0
        for start, _, end, new in sorted(edits, key=lambda edit: edit[:2]):
            if start >= position:
                parts += [text[position:start], new]
                position = end
            elif not new:  # a removal around or next to a change of the indent
                position = max(position, end)
        return "".join([*parts, text[position:]])

    def _resolve_removed(self) -> None:
        gone: set[int] = set()
        for statement in self._removed:
            block = self.source.block(statement)
            of_module = isinstance(self.source.parents[statement], ast.Module)
            lost = not of_module and all(each in self._removed and each not in self._replaced for each in block)
            if (lost and statement is block[-1]) or not self.source.is_alone(statement):
                self.replace(statement, "pass")
            else:
                self.remove_lines(statement.lineno, statement.end_lineno or 0)
                gone |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
        inserted = {each.before for each in self._insertions}
        for last in [line for line in gone if line + 1 not in gone]:
            first = last
            while first - 1 in gone:
                first -= 1
            around = self.source.lines[max(first - 2, 0) : first - 1] + self.source.lines[last : last + 1]
            if len(around) == 2 and not "".join(around).strip() and not inserted & set(range(first, last + 2)):
                self.remove_lines(last + 1, last + 1)  # one of the two blank lines around

    def _resolved(self, insertion: _Insertion) -> tuple[int, int, int, str]:
        """An insertion as an edit, indented as the lines around it end up."""
        source, newline = self.source, self.source.newline
        line = source.lines[insertion.like - 1]
        indent = line[: len(line) - len(line.lstrip())]
        right = sum(by for first, last, by in self._shifts if by > 0 and first < insertion.before <= last)
        left = sum(-by for first, last, by in self._shifts if by < 0 and first <= insertion.like <= last)
        indent = source.unit_at(insertion.like) * right + indent[: len(indent) - left]
        start = source.start_of_line(insertion.before)
        lead = newline if start and not source.text[:start].endswith(("\n", "\r")) else ""
        text = lead + "".join((indent + each if each else "") + newline for each in insertion.lines)
        return start, -1 if insertion.is_first else 0, start, text
