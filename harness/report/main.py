"""``harness report``: run folders and sweep folders in, one file out (of figures for a paper, several)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.errors import EXIT_DONE, ConfigError
from harness.report import scaling, study, table
from harness.runs.files import write_atomically
from harness.runs.reader import find

FORMS = ("html", "md", "csv", "png")


def main(paths: Sequence[Path], out: Path | None, form: str, target: float | None) -> int:
    """Report the runs at ``paths`` into ``out`` (None: report.FORM in the first of them), and print what was written.

    ``target``: the value of the deciding metric that the time to is told of; None: one that most runs reached. Raises
    ConfigError for a path without runs, a form there is not, or a library that is not installed.
    """
    if form not in FORMS:
        raise ConfigError(f"{form!r} is no form of a report", where="--format", hint=f"use one of {', '.join(FORMS)}")
    records = find(paths)
    out = out or paths[0] / f"report.{form}"
    if out.is_dir() or not out.parent.is_dir():
        reason = "this is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise ConfigError(
            reason, where=str(out), hint=f"name a file in a folder that is there, such as -o report.{form}"
        )
    found = study.build(records)
    wanted = scaling.choose_target(found, target)
    if form == "png":
        from harness.report import pictures  # matplotlib takes a second to import

        written = pictures.write(found, wanted, out)
    else:
        written = [out]
        _write(out, _text(found, wanted, form))
    print(*written, sep="\n")
    return EXIT_DONE


def _text(found: study.Study, wanted: scaling.Target | None, form: str) -> str:
    if form == "html":
        from harness.report import page

        return page.render(found, wanted)
    if form == "csv":
        return table.comma_separated(found, wanted)
    return table.markdown(found, wanted, scaling.ladders(found, wanted.value if wanted else None))


def _write(out: Path, text: str) -> None:
    try:
        write_atomically(out, text)
    except OSError as error:
        raise ConfigError(f"it cannot be written: {error.strerror}", where=str(out), hint="name another -o") from None
