"""The page in a browser: no error, no request, every chart drawn, switches and keyboard work."""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks.synthetic_runs import Fake, write_run, write_sweep
from harness.runs import reader
from harness.tools.report import page, run_set
from tests.end_to_end.processes import wait_until

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: apt install chromium"),
    pytest.mark.timeout(200),
]
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
READY_MS = 60_000
LINE = "lr 0.4 · batch 64 · seed 0 · 2 ranks"
LONGEST = f"Math.max(...document.getElementById('chart-%s').data.find((line) => line.name === '{LINE}').x)"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page with every kind of chart."""
    folder = tmp_path_factory.mktemp("browser")
    fakes = [
        Fake(lr=lr, batch=batch, world=world, skips=(9,) if lr > 0.1 else ())
        for lr in (0.05, 0.1, 0.2, 0.4) for batch in (64, 128) for world in (1, 2)
    ]  # fmt: skip
    sweep = write_sweep(folder / "sweep", [*fakes, Fake(lr=0.05, seed=1), Fake(lr=0.8, state="unfinished")])
    for trial in (sweep / "trials").iterdir():
        (trial / "confusion.csv").write_text("label,cat,<b>dog</b>\ncat,8,1\n<b>dog</b>,2,9\n")
    found = run_set.build(reader.find([sweep]))
    path = folder / "report.html"
    path.write_text(page.render(found), encoding="utf-8")
    return path


class Visit:
    """An open page, with its errors and its requests."""

    def __init__(self, browser, path, **context):
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | context))
        self.page = self.context.new_page()
        self.errors, self.requests = [], []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.errors.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri(), timeout=READY_MS)
        self.when_loaded = self.page.evaluate("document.documentElement.dataset.ready")

    def longest(self, chart):
        """The largest x of one line of a chart."""
        return self.page.evaluate(LONGEST % chart)

    def redrawn(self, what):
        # wait_for_function evaluates its text in the page, whose Content-Security-Policy can forbid that.
        wait_until(lambda: self.page.evaluate(what), READY_MS / 1000, what)

    def choose(self, name, value):
        self.page.locator(f'input[name="{name}"][value="{value}"]').check(force=True)


@pytest.fixture
def visit(browser, report):
    visits = []

    def open_page(path=report, **context):
        visits.append(Visit(browser, path, **context))
        return visits[-1]

    yield open_page
    for each in visits:
        each.context.close()


def test_every_chart_is_drawn_without_a_request(visit, report):
    here = visit()
    charts = here.page.evaluate("""[...document.querySelectorAll('[data-chart]')].map((div) => ({
        key: div.dataset.chart, marks: div.querySelectorAll('.points path, .js-line, .hm image').length,
        width: div.querySelector('.main-svg').getBoundingClientRect().width, room: div.clientWidth }))""")
    assert [chart["key"] for chart in charts] == ["validation", "training", "time", "confusion"]
    assert here.when_loaded == "4", "a screenshot waits only for the load event"
    for chart in charts:
        assert chart["marks"] > 0, chart
        assert chart["width"] == pytest.approx(chart["room"], abs=1), chart
    here.page.mouse.wheel(0, 4000)
    assert here.errors == []
    assert [url for url in here.requests if not url.startswith(("data:", "blob:"))] == [report.as_uri()]
    # The policy forbids requests and other scripts.
    answer = here.page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'answered', (error) => String(error))")
    assert "answered" not in answer
    assert any("Content Security Policy" in message for message in here.errors)
    here.errors.clear()
    ran = here.page.evaluate("""() => {
        const script = document.createElement('script');
        script.textContent = 'window.ran = true';
        document.body.append(script);
        return Boolean(window.ran); }""")
    assert not ran


def test_toolbars_cover_neither_legends_nor_titles(visit):
    here = visit(viewport={"width": 620, "height": 900})  # some legends take the whole width
    covered = here.page.evaluate("""[...document.querySelectorAll('[data-chart]')].filter((div) => {
        const title = document.createRange();
        title.selectNodeContents(div.closest('figure').querySelector('h3'));
        const [bar, ...others] = [div.querySelector('.modebar'), div.querySelector('.legend'), title]
            .map((part) => part?.getBoundingClientRect());
        const hit = (box) => box && box.left < bar.right && bar.left < box.right
            && box.top < bar.bottom && bar.top < box.bottom;
        return !bar.width || bar.top < div.parentElement.getBoundingClientRect().top || others.some(hit);
    }).map((div) => div.dataset.chart)""")
    assert covered == []
    buttons = here.page.evaluate("""[...document.querySelectorAll('[data-chart]')].map((div) =>
        [...div.querySelectorAll('.modebar-btn')].map((button) => button.dataset.title.split(' ')[0]).join(' '))""")
    assert set(buttons) == {"Download Zoom Pan Reset"}, "none that sends the figure anywhere"


def test_switches_between_axes_metrics_and_lines(visit):
    here = visit()
    for chart in ("validation", "training"):
        assert here.longest(chart) == pytest.approx(10)
    drawn = here.page.evaluate(
        f"document.getElementById('chart-training').data.filter(({{name}}) => name === '{LINE}').length"
    )
    assert drawn == 2, "the loss of training and of validation"
    # 6400 rows per epoch: 4 s on two ranks at 1600 rows/s, and 1 s of evaluation.
    for axis, length in (("samples", 64_000), ("seconds", 50.0), ("epoch", 10)):
        before = here.longest("validation")
        here.choose("axis", axis)
        here.redrawn(f"{LONGEST % 'validation'} !== {before}")
        assert here.longest("validation") == pytest.approx(length)
        here.redrawn(f"{LONGEST % 'training'} > {length * 0.9 - 1} && {LONGEST % 'training'} <= {length}")
        assert axis in here.page.locator("#chart-validation .xtitle").text_content()
    here.choose("metric", "loss")
    here.redrawn("document.querySelector('#chart-validation .ytitle')?.textContent === 'loss'")
    here.choose("quantity", "lr")
    here.redrawn("document.querySelector('#chart-training .ytitle')?.textContent === 'learning rate'")
    here.choose("quantity", "loss_scale")
    here.redrawn("document.getElementById('chart-training').layout.yaxis.type === 'log'")
    lines = "document.getElementById('chart-validation').data.length"
    here.page.get_by_role("button", name="None", exact=True).click()
    here.redrawn(f"{lines} === 0")
    here.page.get_by_role("checkbox").first.check()
    here.redrawn(f"{lines} > 0")
    here.page.get_by_role("button", name="All", exact=True).click()
    here.redrawn(f"{lines} >= 16")
    assert here.errors == []


def test_a_loss_with_a_peak_has_a_logarithmic_axis(visit, tmp_path):
    run = write_run(tmp_path / "run", Fake())
    lines = (run / "metrics.jsonl").read_text().splitlines()
    first = next(place for place, line in enumerate(lines) if '"eval"' in line)
    lines[first] = json.dumps(json.loads(lines[first]) | {"loss": 1000.0})
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    path = tmp_path / "report.html"
    path.write_text(page.render(run_set.build(reader.find([run]))), encoding="utf-8")
    here = visit(path)
    assert here.page.locator("#chart-training .ytitle").text_content() == "loss (log scale)"
    assert here.page.locator("#chart-validation .ytitle").text_content() == "accuracy (top-1)"


def test_keyboard(visit):
    here = visit()
    here.page.keyboard.press("Tab")
    assert here.page.evaluate("document.activeElement.textContent") == "Skip to the report"
    here.page.locator('input[name="axis"]').first.focus()
    here.page.keyboard.press("ArrowRight")
    here.redrawn("document.querySelector('#chart-validation .xtitle').textContent.includes('samples')")
    head = here.page.locator("#all-runs th", has_text="rows/s")
    head.get_by_role("button").focus()
    speeds = []
    for expected in ("ascending", "descending"):
        here.page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == expected
        place = here.page.evaluate("document.activeElement.closest('th').cellIndex")
        cells = here.page.locator(f"#all-runs tbody tr > :nth-child({place + 1})")
        speeds.append([float(cell.get_attribute("data-order")) for cell in cells.all()])
    assert speeds[0] == sorted(speeds[0])
    assert speeds[1] == sorted(speeds[0], reverse=True)
    here.page.locator("#filter").fill("0.8 unfinished")
    assert here.page.locator("#all-runs tbody tr:visible").count() == 1
    assert here.page.locator("#found").text_content() == "1 found"
    assert here.errors == []


CONTRASTS = """() => {
    const color = (name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
    const light = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
      .map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
      .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
    const contrast = (one, two) => {
      const [high, low] = [light(color(one)), light(color(two))].sort((a, b) => b - a);
      return (high + 0.05) / (low + 0.05); };
    const found = {};
    for (const text of ['ink', 'quiet', 'good', 'warn', 'bad'])
      for (const behind of ['paper', 'surface', 'wash']) found[text + ' on ' + behind] = contrast(text, behind) / 4.5;
    for (const behind of ['heat0', 'heat1']) found['ink on ' + behind] = contrast('ink', behind) / 4.5;
    for (let n = 0; n < 8; n++) found['line ' + n] = contrast('c' + n, 'surface') / 3;
    return found; }"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_in_either_color_scheme(visit, scheme):
    """Nothing overflows; contrast is at least WCAG's 4.5 for text and 3 for lines."""
    here = visit(viewport={"width": 390, "height": 844}, color_scheme=scheme, is_mobile=True, has_touch=True)
    assert here.page.evaluate("document.documentElement.scrollWidth") == 390
    cut = here.page.evaluate("""[...document.querySelectorAll('.scroll:not(details .scroll)')].map((box) =>
        [box.scrollWidth > box.clientWidth + 8, getComputedStyle(box.previousElementSibling).display !== 'none'])""")
    assert all(hidden == hinted for hidden, hinted in cut)
    assert [True, True] in cut
    here.page.evaluate("document.getElementById('all-runs').parentElement.scrollLeft = 10000")
    here.redrawn(
        "getComputedStyle(document.getElementById('all-runs').parentElement.previousElementSibling).display === 'none'"
    )
    outside = here.page.evaluate("""[...document.querySelectorAll('body *')].filter((each) =>
        each.getBoundingClientRect().right > innerWidth + 1 && !each.closest('.scroll, pre, nav, .entries'))
        .map((each) => each.outerHTML.slice(0, 80))""")
    assert outside == []
    for text in ("#chart-validation .xtick text", "#chart-confusion .heatmap-label text"):
        ink = here.page.evaluate(f"document.querySelector('{text}').style.fill")
        lightness = sum(int(part) for part in ink.removeprefix("rgb(").rstrip(")").split(",")) / 3
        assert (lightness > 128) == (scheme == "dark"), text
    assert {pair: share for pair, share in here.page.evaluate(CONTRASTS).items() if share < 1} == {}
    assert here.errors == []


def test_page_prints_in_light_colors(visit, tmp_path):
    here = visit(color_scheme="dark")
    paper = here.page.evaluate("""() => {
        dispatchEvent(new Event('beforeprint'));
        const paper = getComputedStyle(document.documentElement).getPropertyValue('--surface').trim();
        dispatchEvent(new Event('afterprint'));
        return [paper, getComputedStyle(document.documentElement).getPropertyValue('--surface').trim()]; }""")
    assert paper[0] == "#ffffff"
    assert paper[1] != "#ffffff"
    here.page.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 20_000
    assert here.errors == []


def test_scripts_in_names_do_not_run(visit, tmp_path):
    evil = "<img src=x onerror=alert(1)><a href='javascript:alert(2)'>x</a>"
    runs = [write_run(tmp_path / str(n), Fake(name=evil, settings={"model.name": f"{evil}{n}"})) for n in range(3)]
    found = run_set.build(reader.find(runs))
    path = tmp_path / "report.html"
    path.write_text(page.render(found), encoding="utf-8")
    here = visit(path)
    assert here.page.locator("main img, main a[href^=javascript]").count() == 0
    assert evil in here.page.locator("h3").first.text_content()
    assert here.errors == []
    assert here.requests == [path.as_uri()]
