"""The report as a page: one HTML file that contains its scripts, figures and images, and makes no request."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from harness.errors import ConfigError, plural
from harness.runs import layout
from harness.runs.files import output_error, require_output, write_atomically
from harness.runs.reader import find
from harness.tools.report import curves, figures, formatting, reproduce, run_set, sections, tables
from harness.tools.report.curves import CurveLine
from harness.tools.report.figures import Chart
from harness.tools.report.run_set import ReportedRun, RunSet
from harness.version import __version__

_EVALUATED = ("task.name", "task.eval_csv", "task.eval_rows")  # which rows a run is evaluated on
_DASHES = {"solid": "", "dash": "9 5", "dot": "2 4", "dashdot": "9 4 2 4"}


@dataclass(frozen=True)
class Card:
    """A number at the top of the page."""

    title: str
    figure: str
    note: str


def write(paths: Sequence[Path], out: Path | None = None, trust: bool = False) -> Path:
    """Write a report of the runs at ``paths`` to ``out`` (None: report.html in the first of them); return its path.

    ``trust``: show images also of runs that are not this user's own. Raises ConfigError for a path without runs, or if
    plotly is not installed.
    """
    records = find(paths)
    out = out or paths[0] / layout.REPORT
    require_output(out, paths)
    text = render(run_set.build(records, trust=trust))
    try:
        write_atomically(out, text)
    except OSError as error:
        raise output_error(out, error) from None
    return out


def render(runs: RunSet) -> str:
    """Return the text of the page. Raises ConfigError without plotly."""
    lines = curves.choose(runs)
    curve_charts, groups, left_out = sections.choose(runs, lines)
    plotly, packed, num_bytes = plotly_source()
    script = _file("page.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page: str = environment.from_string(_file("page.html")).render(
        _facts(runs),
        policy=_policy([plotly, script]),
        style=Markup(_file("page.css")),
        curves=curve_charts,
        lines=lines,
        dashes=_DASHES,
        axes=curves.axes(lines),
        quantities=curves.quantities(lines),
        metrics=[(name, formatting.metric(name)) for name in curves.metrics(runs, lines)],
        undrawn=curves.undrawn(runs, lines),
        groups=groups,
        links=_links(runs, lines, groups),
        left_out=left_out,
        data=_json(_data(runs, lines, [*curve_charts, *(group.chart for group in groups if group.chart)])),
        plotly=Markup(packed),
        plotly_bytes=num_bytes,
        script=Markup(script),
    )
    return page


def _facts(runs: RunSet) -> dict[str, Any]:
    """Return what the template shows besides figures, by its name there."""
    best = runs.best
    swept = all(run.record.sweep for run in runs.runs)
    return {
        "runs": runs,
        "kind": "Sweep" if swept else "Run" if len(runs.runs) == 1 else "Comparison",
        "lead": _headline(runs),
        "best": best,
        "cards": _cards(runs, best) if best else [],
        "commands": reproduce.commands(best) if best else [],
        "caveats": reproduce.caveats(best) if best else [],
        "config": _config(best) if best else "",
        "provenance": reproduce.provenance(best or runs.runs[0]),
        "states": formatting.STATES,
        "problems": [
            (run, [formatting.without_working_folder(line) for line in tables.problems(run)])
            for run in runs.ranked if tables.has_problem(run)
        ],
        "failed_starts": tables.failed_starts(runs),
        "table": tables.all_runs(runs),
        "made": time.strftime("%Y-%m-%d"),
        "version": __version__,
        "source": plural(len(runs.runs) + len(runs.failed_starts), "run folder"),
    }  # fmt: skip


def _headline(runs: RunSet) -> str:
    text = f"{plural(len(runs.runs), 'run')}: {tables.states(runs.runs)}."
    if runs.best is None:
        return text + (" It has no" if len(runs.runs) == 1 else " None of them has an") + " evaluation yet."
    better = "higher" if runs.direction == "max" else "lower"
    data = [{key: run.settings.get(key) for key in _EVALUATED} for run in runs.runs if run.best is not None]
    unlike = [key for key in _EVALUATED if any(each[key] != data[0][key] for each in data)]
    ranked = f"Ranked by validation {formatting.metric(runs.metric)}; {better} is better."
    differ = f" But the runs differ in {' and '.join(unlike)}: values from other rows do not compare." if unlike else ""
    return f"{text} {ranked}{differ}"


def _cards(runs: RunSet, best: ReportedRun) -> list[Card]:
    group = runs.seed_groups[0]  # the best run's
    over = ""
    if group.spread is not None:
        mean, spread = formatting.best(group.mean), formatting.number(group.spread, 2)
        over = f"; {mean} ± {spread} over {group.size}"
    ranks = best.ranks or "an unknown number of ranks"
    epoch, total = formatting.number(best.at_best("epoch")), formatting.duration(best.history.wall_s)
    speed = f"{formatting.count(best.history.rows_per_s)} rows/s"
    return [
        Card(f"best {formatting.metric(runs.metric)}", formatting.best(best.best), f"after epoch {epoch}{over}"),
        Card("training speed", speed, f"on {ranks}; total time {total}"),
    ]


def _config(best: ReportedRun) -> str:
    if not best.record.config:
        return ""
    text = yaml.safe_dump(best.record.config, sort_keys=False, allow_unicode=True)
    return formatting.without_working_folder(text)


def _links(runs: RunSet, lines: Sequence[CurveLine], groups: Sequence[sections.ReportSection]) -> list[tuple[str, str]]:
    """Return (key, title) of the sections, for the navigation bar."""
    links = [("best", "Best run" if len(runs.runs) > 1 else "Run")] if runs.best else []
    if runs.failed_starts or any(tables.has_problem(run) for run in runs.runs):
        links.append(("problems", "Problems"))
    links += [("curves", "Curves")] if lines else []
    links += [(group.key, group.title) for group in groups]
    return [*links, ("runs", "All runs"), ("provenance", "Provenance")]


# The file


def _data(runs: RunSet, lines: Sequence[CurveLine], drawn: Sequence[Chart]) -> dict[str, Any]:
    """Return the data that the page's script draws."""
    parts: dict[str, dict[str, Any]] = {
        "validation": {"part": "validation", "choice": "metric", "value": runs.metric},
        "training": {"part": "train", "choice": "quantity", "value": "loss"},
    }
    metrics = curves.metrics(runs, lines)
    if runs.metric not in metrics and metrics:
        parts["validation"]["value"] = metrics[0]
    return {
        "lines": [curves.points(line) | {"shown": figures.plain(line.label)} for line in lines],
        "charts": {chart.key: parts.get(chart.key) or {"data": chart.data, "layout": chart.layout} for chart in drawn},
        "names": {name: figures.plain(formatting.metric(name)) for name in metrics}
        | {"lr": "learning rate", "loss_scale": "loss scale", "loss": "loss"},
    }


def _json(content: Any) -> Markup:
    """JSON that cannot close the element that contains it."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _file(name: str) -> str:
    return resources.files("harness.tools.report").joinpath(name).read_text(encoding="utf-8")


@cache
def plotly_source() -> tuple[str, str, int]:
    """plotly.js; the same as base85 of gzip, which is 1.8 MB instead of 4.8; the size of the gzip data."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError(
            "the page's figures need plotly, which is not installed",
            hint="pip install 'apex-harness[report]'",
        ) from None
    source: str = get_plotlyjs()
    packed = gzip.compress(source.encode(), mtime=0)
    return source, base64.b85encode(packed, pad=True).decode(), len(packed)


def _policy(scripts: Sequence[str]) -> str:
    """Return a Content-Security-Policy that allows the page's own scripts and no request."""
    allowed = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
