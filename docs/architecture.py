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
    """The table of packages in the text of the page, in its order."""
    rows = re.findall(r"^\| `(\w+)` \| \*\*(.+?)\*\*.*?\|([^|]*)\|$", page, re.M)
    return {name: Package(name, short.rstrip("."), tuple(re.findall(r"`(\w+)`", last))) for name, short, last in rows}


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


def rows(table: dict[str, Package]) -> list[list[str]]:
    """The packages by height: the first row imports nothing, and each other one imports from the row below it."""
    height: dict[str, int] = {}
    for name in table:  # the table lists a package after all that it imports
        height[name] = max((height[other] + 1 for other in table[name].may_import), default=0)
    height["cli"] = max(height.values())  # it finds the commands of the packages below at run time
    return [[name for name in table if height[name] == level] for level in range(max(height.values()) + 1)]


def positions(table: dict[str, Package]) -> dict[str, tuple[float, float]]:
    """{package: center of its box}. Each row is ordered by the mean position of what its packages import."""
    levels, edges = rows(table), arrows(table)
    x: dict[str, float] = {}
    for level in levels:
        below = {name: [x[other] for importer, other in edges if importer == name and other in x] for name in level}
        level.sort(key=lambda name: sum(below[name]) / len(below[name]) if below[name] else WIDTH / 2)
        step = (WIDTH - 2 * MARGIN) / len(level)
        x |= {name: MARGIN + step * (place + 0.5) for place, name in enumerate(level)}
    bottom = MARGIN + BOX_HEIGHT / 2 + ROW_HEIGHT * (len(levels) - 1)
    return {name: (x[name], bottom - ROW_HEIGHT * level) for level, names in enumerate(levels) for name in names}


def draw(page: str) -> str:
    """The picture, as SVG text, of the table in the text of the page."""
    table = packages(page)
    at, parts = positions(table), []
    for importer, other in arrows(table):
        (x1, y1), (x2, y2) = at[importer], at[other]
        y1, y2 = y1 + BOX_HEIGHT / 2, y2 - BOX_HEIGHT / 2 - 3
        bend = (y2 - y1) / 2
        curve = f"M {x1:.0f} {y1:.0f} C {x1:.0f} {y1 + bend:.0f}, {x2:.0f} {y2 - bend:.0f}, {x2:.0f} {y2:.0f}"
        parts.append(f'<path class="arrow" d="{curve}"/>')
    for name, (x, y) in at.items():
        kind = "box" if table[name].may_import else "box base"
        width = max(8 * len(name), 6.6 * len(table[name].short)) + 26
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
