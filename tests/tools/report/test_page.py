"""The page as text: complete for any run, no request, no text of a file read as markup."""

from __future__ import annotations

import html.parser
import json
import re

import pytest
import yaml

from benchmarks.synthetic_runs import Fake, write_run, write_sweep
from harness.runs import reader
from harness.tools.report import charts, curves, page, run_set, scaling

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


def render(*paths, target=None):
    found = build(*paths)
    return page.render(found, scaling.choose_target(found, target))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    fakes = [
        Fake(lr=lr, batch=batch, world=world, skips=(9,) if lr > 0.1 else ())
        for lr in (0.05, 0.1, 0.2) for batch in (64, 128) for world in (1, 2)
    ]  # fmt: skip
    return write_sweep(tmp_path_factory.mktemp("page") / "sweep", fakes)


def test_sweep_has_every_section(sweep):
    text = render(sweep)
    elements = Elements(text)
    keys = [attributes["id"] for attributes in elements.all("section")]
    assert keys == ["best", "curves", "target", "speed", "time", "runs", "provenance"]
    charts = [attributes["data-chart"] for attributes in elements.all("div") if "data-chart" in attributes]
    assert charts == ["validation", "training", "scale", "time-to-target", "speed-up", "efficiency", "time"]
    assert "git checkout 0123456789ab" in text
    assert "harness launch -c" in text


def test_accessibility(sweep):
    elements = Elements(render(sweep))
    assert elements.all("html")[0]["lang"] == "en"
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert len(elements.all(landmark)) == 1
    levels = [int(name[1]) for name, _ in elements.found if re.fullmatch(r"h\d", name)]
    assert all(after - before <= 1 for before, after in zip(levels, levels[1:], strict=False)), "headings skip no level"
    for chart in (attributes for attributes in elements.all("div") if "data-chart" in attributes):
        assert chart["role"] == "img"
        assert chart["aria-label"]
    assert len(elements.all("details")) >= sum("data-chart" in attributes for attributes in elements.all("div"))
    targets = {attributes.get("id") for _, attributes in elements.found}
    assert {link["href"][1:] for link in elements.all("a")} <= targets
    assert all(image.get("alt") for image in elements.all("img"))
    identities = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(identities) == len(set(identities))


def test_page_makes_no_request(sweep):
    elements = Elements(render(sweep))
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
    assert "@import" not in render(sweep).split("</style>")[0]


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


def test_figures_are_valid_plotly(sweep, tmp_path):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    found = build(sweep)
    target = scaling.choose_target(found, None)
    scaled = scaling.series(found, target.value)
    lines = curves.choose(found)
    figures = [charts.time_to_target(found, target, scaled), *charts.speed_up(scaled), charts.where_time_went(lines)]
    many = build(write_sweep(tmp_path / "many", [Fake(lr=0.1 * 2**n, seed=n) for n in range(8)]))
    figures.append(charts.time_to_target(many, target, []))
    assert len(figures) == 5
    for chart in figures:
        figure = json.loads(re.sub(r'"@\w+"', '"#123456"', json.dumps({"data": chart.data, "layout": chart.layout})))
        graph_objects.Figure(figure)
        assert all(len(row) == len(chart.header) for row in chart.rows)
        assert chart.rows


@pytest.mark.parametrize("state", ["finished", "stopped", "failed", "unfinished"])
def test_run_in_any_state_has_a_page(tmp_path, state):
    text = render(write_run(tmp_path / "run", Fake(state=state)))
    Elements(text)
    if state == "unfinished":
        assert "metrics.jsonl ends mid-line" in text
    if state == "failed":
        assert "TrainingError (rank 0 at step 7): the loss became nan" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        "config.yaml",
        "summary.json",
        "provenance.json",
        "metrics.jsonl",
        "confusion.csv",
        "predictions.csv",
        "failure.json",
    ],
)
@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[]", b"{}", b"3", b"\xff\0", b"null", b'[{"ranks": 3}]', b"a: [1"]
)
def test_any_file_may_be_damaged(tmp_path, damage, content):
    run = write_run(tmp_path / "run", Fake(epochs=2))
    if content is None:
        (run / damage).unlink(missing_ok=True)
    else:
        (run / damage).write_bytes(content)
    other = write_run(tmp_path / "other", Fake(epochs=2, lr=0.2))
    Elements(render(run, other))


def test_numbers_that_are_not_finite_have_a_page(tmp_path):
    runs = []
    for number, odd in enumerate(("Infinity", "-Infinity", "NaN", "1e999", "null")):
        run = write_run(tmp_path / str(number), Fake(epochs=1, lr=0.1 + number))
        text = (run / "metrics.jsonl").read_text().replace("65536.0", odd).replace('"skipped": 0', f'"skipped": {odd}')
        (run / "metrics.jsonl").write_text(text + f'{{"split": "eval", "step": 1, "epoch": {odd}, "top1": {odd}}}\n')
        runs.append(run)
    Elements(render(*runs))


@pytest.mark.parametrize("state", ["waiting", "running", "failed"])
def test_sweep_without_runs_has_a_page(tmp_path, monkeypatch, state):
    trials = [{"number": n, "run": f"trials/{n}", "params": {"optimizer.lr": n}, "state": state} for n in range(3)]
    (tmp_path / "sweep.json").write_text(json.dumps({"name": "s", "metric": "top1", "trials": trials}))
    text = render(tmp_path)
    Elements(text)
    assert ("○ waiting" in text) == (state != "failed")


def test_settings_of_wrong_types_have_a_page(tmp_path):
    odd = {"optimizer.lr": "fast", "batch.global": "many", "seed": [1, 2], "data": 3, "train.epochs": {"a": None}}
    runs = [write_run(tmp_path / str(n), Fake(epochs=1, seed=n)) for n in range(2)]
    tree = yaml.safe_load((runs[0] / "config.yaml").read_text())
    for key, value in odd.items():
        section, _, leaf = key.partition(".")
        tree[section] = {leaf: value} if leaf else value
    (runs[0] / "config.yaml").write_text(yaml.safe_dump(tree))
    Elements(render(*runs))


def test_only_the_best_runs_are_drawn_and_all_are_in_the_table(tmp_path):
    fakes = [Fake(lr=0.001 * (1 + n), final=0.9 - 0.001 * n, epochs=2, log_every=1) for n in range(60)]
    text = render(write_sweep(tmp_path / "sweep", fakes))
    elements = Elements(text)
    data = json.loads(re.search(r'id="report-data">(.*?)</script>', text, re.S).group(1))
    assert len(data["lines"]) == curves.MAX_LINES
    assert data["lines"][0]["label"] == "lr 0.001"
    assert text.count('<tr><th scope="row">lr 0.0') >= 60
    assert "36 other runs are in the table of all runs" in text
    assert any(attributes.get("id") == "filter" for attributes in elements.all("input"))
    assert len(text) < 4_000_000
