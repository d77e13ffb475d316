"""The README and the pages for users: links and named settings. Tests of each subject run their commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.config import loader
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
SECTIONS = "data|train|runtime|checkpoint|precision|parallel"


def anchors(page: Path) -> set[str]:
    """The targets of links into ``page``, as GitHub makes them of its headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in words}


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())):
        if link.startswith("http"):
            continue
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


@pytest.mark.parametrize("page", [page for page in PAGES if "apex" not in page.stem], ids=lambda page: page.name)
def test_settings_that_are_named_exist(page):  # apex.parallel is no section
    schema = loader.json_schema()
    for section, key in re.findall(rf"`({SECTIONS})\.([a-z_]+)(?=[`=:])", page.read_text()):
        assert key == "py" or f'"{key}"' in schema, f"{section}.{key}"
