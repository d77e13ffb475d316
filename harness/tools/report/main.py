"""Writing of a report in one of its formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.errors import EXIT_DONE
from harness.runs.files import output_error, require_output, write_atomically
from harness.runs.reader import find
from harness.tools.report import run_set, scaling, tables


def main(paths: Sequence[Path], out: Path | None, form: str, target: float | None, trust: bool = False) -> int:
    """Write a report of the runs at ``paths`` to ``out`` (None: report.FORMAT in the first of them) and print its path.

    ``form``: html, md or csv. ``target``: the value of the deciding metric for the time to target; None: chosen by
    ``scaling.choose_target``. ``trust``: show images also of runs that are not this user's own. Raises ConfigError for
    a path without runs, or if plotly is not installed.
    """
    records = find(paths)
    out = out or paths[0] / f"report.{form}"
    require_output(out, paths)
    runs = run_set.build(records, trust=trust)
    chosen = scaling.choose_target(runs, target)
    if form == "html":
        from harness.tools.report import page  # jinja2 and yaml take time to import

        text = page.render(runs, chosen)
    elif form == "csv":
        text = tables.csv_text(runs, chosen)
    else:
        text = tables.markdown(runs, chosen, scaling.series(runs, chosen.value if chosen else None))
    try:
        write_atomically(out, text)
    except OSError as error:
        raise output_error(out, error) from None
    print(out)
    return EXIT_DONE
