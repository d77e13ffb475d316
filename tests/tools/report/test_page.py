"""The page as text: complete for any run, no request, no text of a file read as markup."""

from __future__ import annotations

import html.parser
import json
import re

import pytest

from benchmarks.synthetic_runs import Fake, write_run, write_sweep
from harness.runs import reader
from harness.tools.report import curves, figures, mistakes, page, run_set

pytest.importorskip("plotly", reason="plotly is not installed: pip install 'apex-harness[report]'")

EVIL = 'ü"><script>alert(1)</script><img src=x onerror=alert(2)>&amp;'
VOID = {"meta", "link", "input", "img", "br", "line"}


class Elements(html.parser.HTMLParser):
    """All elements; checks that they are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.opened, self.found, self.text = [], [], []
        self.feed(text)
        assert self.opened == []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.opened.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.opened.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def build(*paths):
    return run_set.build(reader.find(paths))


def render(*paths):
    return page.render(build(*paths))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    fakes = [
        Fake(lr=lr, batch=batch, world=world, skips=(9,) if lr > 0.1 else ())
        for lr in (0.05, 0.1, 0.2) for batch in (64, 128) for world in (1, 2)
    ]  # fmt: skip
    return write_sweep(tmp_path_factory.mktemp("page") / "sweep", fakes)


@pytest.fixture(scope="module")
def text(sweep):
    return render(sweep)


def test_sweep_has_every_section(text):
    elements = Elements(text)
    keys = [attributes["id"] for attributes in elements.all("section")]
    assert keys == ["best", "curves", "speed", "time", "runs", "provenance"]
    charts = [attributes["data-chart"] for attributes in elements.all("div") if "data-chart" in attributes]
    assert charts == ["validation", "training", "time"]
    assert "git checkout 0123456789ab" in text
    assert "harness launch -c" in text


def test_accessibility(text):
    elements = Elements(text)
    assert elements.all("html")[0]["lang"] == "en"
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert len(elements.all(landmark)) == 1
    levels = [int(name[1]) for name, _ in elements.found if re.fullmatch(r"h\d", name)]
    assert all(after - before <= 1 for before, after in zip(levels, levels[1:], strict=False)), "headings skip no level"
    for chart in (attributes for attributes in elements.all("div") if "data-chart" in attributes):
        assert chart["role"] == "img"
        assert chart["aria-label"]
    targets = {attributes.get("id") for _, attributes in elements.found}
    assert {link["href"][1:] for link in elements.all("a")} <= targets
    assert all(image.get("alt") for image in elements.all("img"))
    identities = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(identities) == len(set(identities))


def test_page_makes_no_request(text):
    elements = Elements(text)
    (policy,) = [
        meta["content"] for meta in elements.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "script-src 'sha256-" in policy
    for _, attributes in elements.found:
        for name in ("src", "href", "action", "srcset", "poster"):
            assert re.match(r"$|#|data:", attributes.get(name) or ""), attributes
    assert not elements.all("iframe") + elements.all("object") + elements.all("embed")
    assert "@import" not in text.split("</style>")[0]


def test_text_of_files_is_escaped(tmp_path):
    runs = []
    for number in range(2):
        fake = Fake(name=EVIL, lr=0.1 + number, state=("finished", "failed")[number],
                    settings={"model.name": EVIL, f"task.{EVIL}": number})  # fmt: skip
        folder = write_run(tmp_path / f"<b>{number}", fake)
        provenance = json.loads((folder / "provenance.json").read_text())[0]
        provenance |= {"command": [EVIL, EVIL], "python": EVIL, "packages": {EVIL: EVIL}, "git": {"commit": EVIL}}
        (folder / "provenance.json").write_text(json.dumps([provenance | {"ranks": [EVIL], "launched_by": EVIL}]))
        (folder / "confusion.csv").write_text('label,a,"<img src=y>"\na,1,2\n"<img src=y>",3,4\n')
        (folder / "predictions.csv").write_text("id,prediction,label\n<img src=z>,</script><b>,<i>\n")
        runs.append(folder)
    (runs[1] / "failure.json").write_text(json.dumps({"error": EVIL, "message": EVIL, "rank": EVIL, "step": EVIL}))
    text = render(*runs)
    elements = Elements(text)
    assert len(elements.all("script")) == 3
    assert "\\xFC" not in text, "YAML's escape of a letter"
    assert not elements.all("img")
    assert not elements.all("b") + elements.all("i")
    assert not [attributes for _, attributes in elements.found if any(name.startswith("on") for name in attributes)]
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S).group(1)
    assert "<" not in data
    shown = json.dumps(json.loads(data)["charts"])
    assert "<img" not in shown
    assert "<script" not in shown


def test_figures_are_valid_plotly(sweep):
    import plotly.graph_objects as graph_objects

    matrix = mistakes.Confusion(["a", "b"], [[3, 1], [0, 2]])
    for chart in (figures.where_time_went(curves.choose(build(sweep))), figures.confusion(matrix, "run")):
        figure = json.loads(re.sub(r'"@\w+"', '"#123456"', json.dumps({"data": chart.data, "layout": chart.layout})))
        graph_objects.Figure(figure)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ("unfinished", "metrics.jsonl ends mid-line"),
        ("failed", "TrainingError (rank 0 at step 7): the loss became nan"),
    ],
)
def test_problems_of_a_run_are_on_its_page(tmp_path, state, problem):
    assert problem in render(write_run(tmp_path / "run", Fake(state=state)))


@pytest.mark.parametrize(("epochs", "axis"), [(1, "samples"), (3, "epoch")])
def test_run_within_its_first_epoch_is_shown_by_samples(tmp_path, epochs, axis):
    """Its epochs have no known length, and all its points would be at 0."""
    run = write_run(tmp_path / "run", Fake(epochs=epochs, state="unfinished"))
    found = Elements(page.render(run_set.build(reader.find([run])))).all("input")
    assert [each["value"] for each in found if each["name"] == "axis" and "checked" in each] == [axis]


def test_only_the_best_runs_are_drawn_and_all_are_in_the_table(tmp_path):
    fakes = [Fake(lr=0.001 * (1 + n), final=0.9 - 0.001 * n, epochs=2, log_every=1) for n in range(30)]
    text = render(write_sweep(tmp_path / "sweep", fakes))
    elements = Elements(text)
    data = json.loads(re.search(r'id="report-data">(.*?)</script>', text, re.S).group(1))
    assert len(data["lines"]) == curves.MAX_LINES
    assert data["lines"][0]["label"] == "lr 0.001"
    assert text.count('<tr><th scope="row">lr 0.0') >= 30
    assert "6 other runs are in the table of all runs" in text
    assert any(attributes.get("id") == "filter" for attributes in elements.all("input"))
    assert len(text) < 4_000_000
