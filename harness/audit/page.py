"""A verdict about a resume: as text for the terminal, and as a page of one file that needs no network."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from html import escape

from harness.audit.verdict import COULD_NOT_TELL, EXACT, Finding, StartSummary, Verdict
from harness.errors import plural
from harness.version import __version__

# Text


def lines(verdict: Verdict) -> Iterator[str]:
    """Yield the starts, the findings with their evidence, the verdict in one line, and where the starts are kept."""
    for start in verdict.starts:
        yield f"{start.name}: {'; '.join(_facts(start))}"
    for note in verdict.notes:
        yield f"note: {note}"
    for finding in verdict.findings:
        place = f" ({finding.place})" if finding.place else ""
        yield ""
        yield f"{finding.code}: {finding.title}{place}"
        yield f"  {finding.text}"
        yield from (f"    {line}" for line in finding.evidence)
        if finding.advice:
            yield f"  -> {finding.advice}"
    if verdict.findings:
        yield ""
    yield summary(verdict)
    if verdict.kept:
        yield verdict.kept


def summary(verdict: Verdict) -> str:
    """Return the verdict in one line."""
    if verdict.kind != EXACT:
        return f"{verdict.kind}: {'; '.join(finding.title for finding in verdict.findings)}"
    places = [_kill(start) for start in verdict.starts if start.killed is not None]
    steps = verdict.starts[0].steps if verdict.starts else 0
    return (
        f"exact: killed {plural(len(places), 'time')} and resumed, the training equals the undisturbed one bit for bit "
        f"({plural(steps, 'step')}), killed {'; '.join(places)}{' (--kills tries other places)' * (len(places) == 1)}"
    )


def _facts(start: StartSummary) -> Iterator[str]:
    """Yield what is known of a start, in steps of the undisturbed start."""
    offset = start.offset or 0
    done = plural(start.steps, "step")
    if start.steps and offset:
        done = f"steps {offset + 1} to {offset + start.steps}"
    yield done + (f" on {start.ranks} ranks" if start.ranks > 1 else "") + f" in {start.wall_s:.1f} s"
    if saved := [offset + after for after in start.checkpoints]:
        shown = ", ".join(map(str, saved[:6])) + (f" and {len(saved) - 6} more" if len(saved) > 6 else "")
        yield f"checkpoint{'s' * (len(saved) > 1)} after {'step' if saved[-1] else 'the start,'} {shown}"
    if start.killed:
        yield f"killed {_kill(start)}"
    elif start.code:
        yield f"exit code {start.code}"
    if start.differs:
        yield f"differs from step {start.differs} on"


def _kill(start: StartSummary) -> str:
    killed = start.killed or {}
    path = str(killed.get("path") or "").rpartition("/")[2]
    places = {
        "checkpoint": f"right after {path} was written", "write": f"while {path} was being written",
        "operation": f"before an operation on {path}", "evaluation": "in an evaluation",
    }  # fmt: skip
    place = places.get(str(killed.get("place")))
    done = int(killed.get("step", start.steps))
    place = f"{place} after step {done}" if place else f"before step {done + 1}"
    return place + (f", rank {killed['rank']} alone" if killed.get("target") == "rank" else "")


# The page

_STYLE = """
:root { color-scheme: light dark; --paper: #f6f7f9; --surface: #fff; --ink: #1b2130; --quiet: #5b6477; --edge: #dfe3ea;
  --line: #2166ac; --good: #1c7046; --warn: #8a5a00; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #10141b; --surface: #181d26; --ink: #e7eaf0; --quiet: #a0a9ba;
  --edge: #2b3240; --line: #6ea8f0; --good: #6fd19b; --warn: #f0bf5c; --bad: #ff8f85; } }
body { margin: 0 auto; max-width: 980px; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", Roboto, Arial, sans-serif; }
h1 { line-height: 1.2; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .6rem; } h3 { margin: 0 0 .3rem; }
.exact { color: var(--good); } .not-exact { color: var(--bad); } .could-not-tell { color: var(--warn); }
.quiet { color: var(--quiet); } .panel { background: var(--surface); border: 1px solid var(--edge); border-radius: 10px;
  padding: 1rem 1.1rem; margin: 0 0 1rem; overflow-x: auto; } .panel p, .panel ul { margin: .3rem 0; }
code { font: .86rem ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .25rem 1.2rem .25rem 0; vertical-align: top; }
svg text { font: 12px system-ui, Arial, sans-serif; fill: var(--ink); } svg .quiet { fill: var(--quiet); }
svg .bar { stroke: var(--line); stroke-width: 3; } svg .tick { stroke: var(--quiet); } svg .saved { fill: var(--line); }
svg .kill, svg .differs { stroke: var(--bad); stroke-width: 2.5; fill: none; } svg .differs { stroke-dasharray: 4 3; }
"""
_LEFT, _WIDTH, _ROW, _TOP = 120, 780, 44, 16  # of the drawing


def html(verdict: Verdict) -> str:
    """Return a page about ``verdict``."""
    kind = verdict.kind.replace(" ", "-")
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Resume: {escape(verdict.kind)}</title><style>{_STYLE}</style></head><body><main>",
        f'<h1 class="{kind}">{escape(verdict.kind.capitalize())}</h1><p>{escape(summary(verdict))}</p>',
        f"<h2>Timeline</h2><div class='panel'>{_timeline(verdict.starts)}{_legend(verdict.starts)}</div>",
    ]
    if verdict.findings:
        title = "Why no verdict is possible" if verdict.kind == COULD_NOT_TELL else "What is wrong"
        parts += [f"<h2>{title}</h2>", *map(_finding, verdict.findings)]
    parts.append(f"<h2>Starts</h2><div class='panel'><table>{_table(verdict.starts)}</table></div>")
    if verdict.notes:
        parts.append(f"<h2>Notes</h2><div class='panel'>{_list(verdict.notes)}</div>")
    versions = {**(verdict.starts[0].versions if verdict.starts else {}), "apex-harness": __version__}
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts.append(f"<p class='quiet'>{escape(shown)}. This file makes no network requests.</p></main></body></html>\n")
    return "\n".join(parts)


def _finding(finding: Finding) -> str:
    place = f" <code>{escape(finding.place)}</code>" if finding.place else ""
    advice = f"<p class='quiet'>What usually helps: {escape(finding.advice)}.</p>" if finding.advice else ""
    names = f"<p class='quiet'>{_codes(finding.names)}</p>" if len(finding.names) > 1 else ""
    return (
        f"<div class='panel'><h3><code>{escape(finding.code)}</code> {escape(finding.title)}{place}</h3>"
        f"<p>{escape(finding.text)}</p>{_list(finding.evidence)}{names}{advice}</div>"
    )


def _codes(names: Sequence[str]) -> str:
    more = f" and {len(names) - 40} more" if len(names) > 40 else ""
    return ", ".join(f"<code>{escape(name)}</code>" for name in names[:40]) + more


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else ""


def _table(starts: Sequence[StartSummary]) -> str:
    return "".join(
        f"<tr><th scope='row'>{escape(start.name)}</th><td>{escape('; '.join(_facts(start)))}<br>"
        f"<code>{escape(shlex.join(start.command))}</code></td></tr>"
        for start in starts
    )


def _legend(starts: Sequence[StartSummary]) -> str:
    marks = ["● checkpoint"]
    marks += ["✕ kill"] * any(start.killed for start in starts)
    marks += ["dashed: first difference"] * any(start.differs for start in starts)
    return f"<p class='quiet'>Steps of the undisturbed start. {', '.join(marks)}.</p>"


def _timeline(starts: Sequence[StartSummary]) -> str:
    """Draw a line per start, from the step that it goes on from to its last one."""
    last = max(((start.offset or 0) + start.steps for start in starts), default=0) or 1
    height = _TOP + _ROW * len(starts) + 30

    def x(step: float) -> float:
        return round(_LEFT + _WIDTH * step / last, 1)

    box = f"0 0 {_LEFT + _WIDTH + 40} {height}"
    drawn = [f"<svg viewBox='{box}' width='100%' role='img' aria-label='The steps of each start'>"]
    for step in sorted({round(last * part / 5) for part in range(6)}):
        drawn.append(f"<line class='tick' x1='{x(step)}' x2='{x(step)}' y1='{height - 30}' y2='{height - 24}'/>")
        drawn.append(f"<text class='quiet' x='{x(step)}' y='{height - 10}' text-anchor='middle'>{step}</text>")
    for row, start in enumerate(starts):
        drawn += _row(start, _TOP + _ROW * row + _ROW // 2, x)
    return "".join([*drawn, "</svg>"])


def _row(start: StartSummary, y: int, x: Callable[[float], float]) -> Iterator[str]:
    offset = start.offset or 0
    begin, end = x(offset), x(offset + start.steps)
    yield f"<text x='0' y='{y + 4}'>{escape(start.name)}</text>"
    yield f"<line class='bar' x1='{begin}' x2='{end}' y1='{y}' y2='{y}'/>"
    if start.offset and start.steps:
        yield f"<text class='quiet' x='{begin}' y='{y + 18}'>matches step {offset + 1}</text>"
    for after in start.checkpoints:
        title = f"checkpoint after step {offset + after}"
        yield f"<circle class='saved' cx='{x(offset + after)}' cy='{y}' r='5'><title>{title}</title></circle>"
    if start.killed:
        title = escape(f"killed {_kill(start)}")
        yield f"<path class='kill' d='M{end - 6},{y - 6}l12,12m0,-12l-12,12'><title>{title}</title></path>"
    if start.differs:
        place = x(start.differs - 1)
        yield f"<line class='differs' x1='{place}' x2='{place}' y1='{y - 14}' y2='{y + 14}'/>"
        yield f"<text class='quiet' x='{place + 4}' y='{y - 8}'>differs from step {start.differs} on</text>"
