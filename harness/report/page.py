"""The report as a page: one HTML file that holds its scripts, figures and images, and lets nothing out or in."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import statistics
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from harness.errors import ConfigError
from harness.report import charts, lines, reproduce, scaling, sections, table, words
from harness.report.charts import Chart
from harness.report.lines import Line
from harness.report.scaling import Ladder, Target
from harness.report.study import Run, Study, short
from harness.version import __version__

MAX_TROUBLE = 30  # runs whose trouble is told above the table
MAX_CHIPS = 10
_DASHES = {"solid": "", "dash": "9 5", "dot": "2 4", "dashdot": "9 4 2 4"}


def render(study: Study, target: Target | None) -> str:
    """The page's text. Raises ConfigError where plotly is not installed."""
    ladders = scaling.ladders(study, target.value if target else None)
    drawn = lines.choose(study)
    curves, groups, left_out = sections.choose(study, target, ladders, drawn)
    shown = [*curves, *(chart for group in groups for chart in group.charts)]
    scripts = {"plotly": _plotly(), "script": _file("page.js")}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text: str = environment.from_string(_file("page.html")).render(
        _facts(study, target, ladders),
        policy=_policy(scripts.values()),
        style=Markup(_file("page.css")),
        curves=curves,
        lines=drawn,
        dashes=_DASHES,
        metrics=[(name, words.metric(name)) for name in sections.metrics(study, drawn)],
        undrawn=sections.undrawn(study, drawn),
        groups=groups,
        sections=_bar(study, drawn, groups),
        left_out=left_out,
        percent=words.percent,
        data=_json(_data(study, drawn, shown)),
        **{name: Markup(text) for name, text in scripts.items()},
    )
    return text


def _facts(study: Study, target: Target | None, ladders: Sequence[Ladder]) -> dict[str, Any]:
    """All that is not a figure."""
    best = study.best
    troubled = [(run, table.trouble(run)) for run in study.ranked if table.is_troubled(run)]
    swept = all(run.record.sweep for run in study.runs)
    kind = "Sweep" if swept else "Run" if len(study.runs) == 1 else "Comparison"
    return {
        "study": study,
        "kind": kind,
        "lead": _lead(study),
        "best": best,
        "cards": _cards(study, best, target, ladders) if best else [],
        "chips": _chips(study, best) if best else [],
        "commands": reproduce.commands(best) if best else [],
        "caveats": reproduce.caveats(best) if best else [],
        "config": _config(best) if best else "",
        "provenance": reproduce.provenance(best or study.runs[0]),
        "differences": reproduce.differences(study.runs),
        "trouble": [
            {"state": run.record.state, "shown": words.STATES[run.record.state], "label": run.label,
             "lines": [words.from_here(line) for line in told] + [f"in {run.path}"]}
            for run, told in troubled[:MAX_TROUBLE]
        ],
        "more_trouble": max(0, len(troubled) - MAX_TROUBLE),
        "table": table.of_runs(study, target),
        "made": time.strftime("%Y-%m-%d"),
        "version": __version__,
        "source": words.plural(len(study.runs), "run folder"),
    }  # fmt: skip


def _lead(study: Study) -> str:
    told = f"{words.plural(len(study.runs), 'run')}: {table.states(study.runs)}."
    if study.best is None:
        return told + " None of them was evaluated."
    better = "higher" if study.direction == "max" else "lower"
    return f"{told} Judged by {words.metric(study.metric)} on held-out rows; {better} is better."


def _cards(study: Study, best: Run, target: Target | None, ladders: Sequence[Ladder]) -> list[dict[str, str]]:
    repeats = next(repeats for repeats in study.repeats if best in repeats.runs)
    over = ""
    if repeats.spread is not None:
        mean, spread = words.number(repeats.mean, 5), words.number(repeats.spread, 2)
        over = f"; over {len(repeats.values)} seeds {mean} ± {spread}"
    epoch = words.number(best.at_best("epoch"))
    cards = [
        {
            "what": f"best {words.metric(study.metric)}",
            "figure": words.number(best.best, 5),
            "how": f"after epoch {epoch}{over}",
        }
    ]
    if target and (at := scaling.reached(best, target.value, study.direction)):
        sign = "≥" if study.direction == "max" else "≤"
        cards.append(
            {"what": f"time to {sign} {words.number(target.value)}", "figure": words.duration(at.seconds),
             "how": f"{words.count(at.samples)} rows; {target.why}"}
        )  # fmt: skip
    most = max((ladder.points[-1].world for ladder in ladders), default=0)
    tops = [point.speed_up for ladder in ladders if (point := ladder.points[-1]).world == most and point.speed_up]
    if tops:
        several = f"median of {len(tops)} recipes, from {words.times(min(tops))} to {words.times(max(tops))}"
        cards.append(
            {"what": f"speed-up on {words.plural(most, 'rank')}", "figure": words.times(statistics.median(tops)),
             "how": several if len(tops) > 1 else "rows a second, over the smallest number of ranks"}
        )  # fmt: skip
    cards.append(
        {"what": "training speed", "figure": f"{words.count(best.history.rows_per_s)} rows/s",
         "how": f"on {words.plural(best.world, 'rank') if best.world else 'ranks unknown'}; "
         f"{words.duration(best.history.wall_s)} in all"}
    )  # fmt: skip
    return cards


def _chips(study: Study, best: Run) -> list[tuple[str, str]]:
    keys = [key for key in study.apart if key in best.settings][:MAX_CHIPS]
    common = ["model.name", "batch.global", "batch.per_rank", "optimizer.name", "optimizer.lr", "precision.opt_level"]
    keys += [key for key in common if key not in keys and best.settings.get(key) is not None]
    chips = [(short(key), words.setting(best.settings[key])) for key in keys]
    return [*chips, ("ranks", str(best.world))] if best.world else chips


def _config(best: Run) -> str:
    return words.from_here(yaml.safe_dump(best.record.config, sort_keys=False)) if best.record.config else ""


def _bar(study: Study, drawn: Sequence[Line], groups: Sequence[sections.Group]) -> list[tuple[str, str]]:
    found = [("best", "Best run" if len(study.runs) > 1 else "The run")] if study.best else []
    if any(table.is_troubled(run) for run in study.runs):
        found.append(("trouble", "Not finished"))
    found += [("curves", "Curves")] if drawn else []
    found += [(group.key, group.title) for group in groups]
    return [*found, ("runs", "All runs"), ("provenance", "Provenance")]


# The file


def _data(study: Study, drawn: Sequence[Line], shown: Sequence[Chart]) -> dict[str, Any]:
    """What the page's script draws."""
    parts: dict[str, dict[str, Any]] = {
        "held-out": {"part": "held_out", "choice": "metric", "value": study.metric},
        "training": {"part": "train", "choice": "quantity", "value": "loss"},
        "scale": {"part": "train", "value": "loss_scale", "powers": _powers(drawn), "shape": "hv"},
    }
    metrics = sections.metrics(study, drawn)
    if study.metric not in metrics and metrics:
        parts["held-out"]["value"] = metrics[0]
    return {
        "lines": [lines.points(line) | {"shown": charts.plain(line.label)} for line in drawn],
        "charts": {chart.key: parts.get(chart.key) or {"data": chart.data, "layout": chart.layout} for chart in shown},
        "names": {name: charts.plain(words.metric(name)) for name in metrics}
        | {"lr": "learning rate", "loss_scale": "loss scale", "loss": "loss"},
    }


def _powers(drawn: Sequence[Line]) -> list[int]:
    """Powers of two around the loss scales there were, some ten of them: the axis's ticks."""
    scales = [scale for line in drawn for scale in line.first.history.loss_scales or () if scale >= 1]
    if not scales:
        return []
    low, high = math.floor(math.log2(min(scales))), math.ceil(math.log2(max(scales)))
    return [2**power for power in range(low, high + 1, max(1, (high - low) // 8))]


def _json(content: Any) -> Markup:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _file(name: str) -> str:
    return resources.files("harness.report").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError(
            "the page's charts need plotly, which is not installed",
            where="--format html",
            hint="pip install 'apex-harness[report]', or --format md",
        ) from None
    text: str = get_plotlyjs()
    return text


def _policy(scripts: Any) -> str:
    """A Content-Security-Policy under which the page's own scripts run, and nothing is fetched or sent."""
    allowed = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
