"""What was found, as text: who is compared, whether they are the same, what they were told and what they came to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.compare import results_page, sameness_page
from harness.compare.columns import aligned, short
from harness.compare.found import Found
from harness.compare.settings import Code, Differences, Settings
from harness.runs.reader import Record


def text(found: Found) -> str:
    """The whole page."""
    parts = [_sides(found), sameness_page.lines(found), _settings(found.settings), results_page.lines(found)]
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part) + "\n"


def _sides(found: Found) -> Iterator[str]:
    for label, side in (("A", found.one), ("B", found.other)):
        if len(side.runs) == 1:
            yield f"{label}  {side.runs[0].path}  ({_about(side.runs[0])})"
        else:
            yield f"{label}  {side.path}  ({len(side.runs)} runs, seeds {', '.join(map(str, side.seeds))})"
        yield from (f"     {problem}" for problem in side.problems)


def _about(record: Record) -> str:
    world = record.world_size
    return record.state + (f", {world} rank{'s' if world != 1 else ''}" if world else "")


def _settings(settings: Settings) -> Iterator[str]:
    yield "What they were told"
    yield from (f"  {reason}" for reason in settings.unsaid)
    code = settings.code
    rows: list[Sequence[str]] = []
    for title, differences in (
        ("recipe", settings.recipe),
        ("other settings", settings.other),
        ("packages", settings.packages),
        ("topology", settings.topology),
    ):
        rows += _differences(title, differences)
    yield from (f"  {line}" for line in aligned([("", "", "A", "B"), *rows]))
    if code:
        yield f"  code: {_code(code)}"


def _differences(title: str, differences: Differences | None) -> Iterator[Sequence[str]]:
    if differences is None:
        yield title, "cannot be compared", "", ""
    elif not differences:
        yield title, "the same", "", ""
    for number, (key, pair) in enumerate((differences or {}).items()):
        yield title if not number else "", key, *map(short, pair)


def _code(code: Code) -> str:
    names = [", then ".join(commit[:12] if commit else "no repository" for commit in side) for side in code.commits]
    if code.same:
        return f"the same commit, {names[0]}"
    if code.same is False:
        dirty = [" with changes that are not committed" if changed else "" for changed in code.changed]
        return f"A {names[0]}{dirty[0]}; B {names[1]}{dirty[1]}"
    if not any(code.changed):
        return "nobody can say: it was started outside a repository"
    whose = "both" if all(code.changed) else "A" if code.changed[0] else "B"
    return f"the same commit, {names[0]}, but {whose} with changes that are not committed: the code may differ"
