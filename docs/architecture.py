"""Draws docs/architecture.svg from the table of packages in docs/architecture.md.

python -m docs.architecture
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

PAGE = Path(__file__).with_name("architecture.md")
PICTURE = PAGE.with_suffix(".svg")

WIDTH, BOX_HEIGHT, ROW_HEIGHT, MARGIN = 1080, 62, 118, 20
GAP_WIDTH = 16  # for an arrow that passes a row of boxes
STYLE = """
    text { font: 13px system-ui, sans-serif; fill: #1f2430; text-anchor: middle }
    .name { font-weight: 600; font-size: 15px }
    .arrow { fill: none; stroke: #8a93a6; stroke-width: 1.4; marker-end: url(#head) }
    .box { fill: #eef3fd; stroke: #2f6fde; rx: 8 }
    .base { fill: #eaf6f0; stroke: #2a9d6f }
    .page { fill: #ffffff }"""


@dataclass(frozen=True)
class Package:
    """A row of the table of packages."""

    name: str
    short: str
    """A few words for the picture: the bold words of the second column."""
    may_import: tuple[str, ...]


def packages(page: str) -> dict[str, Package]:
    """The tables of packages in the text of the page, in their order; "tools.NAME" is a package in harness/tools."""
    rows = re.findall(r"^\| `([\w.]+)` \| \*\*(.+?)\*\*.*?\|([^|]*)\|$", page, re.M)
    return {
        name: Package(name, short.rstrip("."), tuple(re.findall(r"`([\w.]+)`", last))) for name, short, last in rows
    }


def reachable(table: dict[str, Package], name: str) -> set[str]:
    """The packages that ``name`` may import directly or through others."""
    found = set(table[name].may_import)
    return found.union(*(reachable(table, other) for other in found))


def arrows(table: dict[str, Package]) -> list[tuple[str, str]]:
    """(importer, imported) without the arrows that follow from others."""
    return [
        (name, other)
        for name, package in table.items()
        for other in package.may_import
        if not any(other in reachable(table, between) for between in package.may_import)
    ]


def levels(table: dict[str, Package]) -> dict[str, int]:
    """{package: row in the picture, from the bottom}: one above the highest package that it imports."""
    found: dict[str, int] = {}
    for name in table:  # the table lists a package after all that it imports
        found[name] = max((found[other] + 1 for other in table[name].may_import), default=0)
    return found


def paths(table: dict[str, Package]) -> list[list[str]]:
    """Each arrow as the stops on its way down: the importer, a gap in each row that it passes, the imported package."""
    level = levels(table)
    return [
        [name, *(f"{name} to {other}, row {row}" for row in range(level[name] - 1, level[other], -1)), other]
        for name, other in arrows(table)
    ]


def box_width(package: Package) -> float:
    return max(8 * len(package.name), 6.6 * len(package.short)) + 26


def positions(table: dict[str, Package]) -> dict[str, tuple[float, float]]:
    """{package or gap: its center}. Each row is ordered by the mean position of what its arrows lead to."""
    level = levels(table)
    rows: list[list[str]] = [[] for _ in range(max(level.values()) + 1)]
    for name in table:
        rows[level[name]].append(name)
    below: dict[str, list[str]] = {}
    for path in paths(table):
        for place, (stop, following) in enumerate(zip(path, path[1:], strict=False)):
            below.setdefault(stop, []).append(following)
            if stop not in table:
                rows[level[path[0]] - place].append(stop)
    x: dict[str, float] = {}
    for row in rows:
        ends = {stop: [x[other] for other in below.get(stop, ())] for stop in row}
        row.sort(key=lambda stop: sum(ends[stop]) / len(ends[stop]) if ends[stop] else WIDTH / 2)
        widths = [box_width(table[stop]) if stop in table else GAP_WIDTH for stop in row]
        space = (WIDTH - 2 * MARGIN - sum(widths)) / (len(row) + 1)
        left = MARGIN + space
        for stop, width in zip(row, widths, strict=True):
            x[stop] = left + width / 2
            left += width + space
    bottom = MARGIN + BOX_HEIGHT / 2 + ROW_HEIGHT * (len(rows) - 1)
    return {stop: (x[stop], bottom - ROW_HEIGHT * number) for number, row in enumerate(rows) for stop in row}


def draw(page: str) -> str:
    """The picture, as SVG text, of the table in the text of the page."""
    table = {name: package for name, package in packages(page).items() if "." not in name}
    at, parts = positions(table), []
    for path in paths(table):
        x, y = at[path[0]][0], at[path[0]][1] + BOX_HEIGHT / 2
        curve = f"M {x:.0f} {y:.0f}"
        for stop in path[1:]:
            (x2, y2), end = at[stop], 3 if stop == path[-1] else 0  # the head touches its box
            y2 -= BOX_HEIGHT / 2 + end
            bend = (y2 - y) / 2
            curve += f" C {x:.0f} {y + bend:.0f}, {x2:.0f} {y2 - bend:.0f}, {x2:.0f} {y2:.0f}"
            x, y = x2, y2 + BOX_HEIGHT
            curve += f" L {x:.0f} {y:.0f}" if stop != path[-1] else ""
        parts.append(f'<path class="arrow" d="{curve}"/>')
    for name in table:
        (x, y), width = at[name], box_width(table[name])
        kind = "box" if table[name].may_import else "box base"
        parts += [
            f'<rect class="{kind}" x="{x - width / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" '
            f'width="{width:.0f}" height="{BOX_HEIGHT}"/>',
            f'<text class="name" x="{x:.0f}" y="{y - 5:.0f}">{escape(name)}</text>',
            f'<text x="{x:.0f}" y="{y + 17:.0f}">{escape(table[name].short)}</text>',
        ]
    height = round(max(y for _, y in at.values()) + BOX_HEIGHT / 2 + MARGIN)
    head = (
        '<marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M 0 1 L 9 5 L 0 9 z" fill="#8a93a6"/></marker>'
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>The packages of harness: an arrow leads from a package to one that it imports</title>\n"
        f"<style>{STYLE}\n</style>\n<defs>{head}</defs>\n"
        f'<rect class="page" width="{WIDTH}" height="{height}"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(PAGE.read_text()))
