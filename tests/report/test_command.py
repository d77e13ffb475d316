"""``harness report``: what it writes, and what it says when it cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.synthetic_runs import Fake, write_run, write_sweep
from harness.errors import ConfigError
from harness.report import main
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("form", "begins"), [("html", "<!doctype html>"), ("md", "## sweep"), ("csv", "run,name,state")]
)
def test_it_writes_and_says_what(tmp_path, capsys, form, begins):
    sweep = write_sweep(tmp_path / "sweep", [Fake(), Fake(world=2)])
    assert main.main([sweep], None, form, None) == 0
    assert capsys.readouterr().out == f"{sweep / f'report.{form}'}\n"
    assert (sweep / f"report.{form}").read_text().startswith(begins)
    assert main.main([sweep], tmp_path / "mine", form, 0.5) == 0
    assert (tmp_path / "mine").is_file()


def test_figures_for_a_paper(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install -e '.[plot]'")
    fakes = [Fake(lr=lr, batch=batch, world=world) for lr in (0.1, 0.2) for batch in (64, 128) for world in (1, 2)]
    sweep = write_sweep(tmp_path / "sweep", [*fakes, Fake(seed=1)])
    classes = "label,a,b\na,1,2\nb,3,4\n"
    (sweep / "trials" / "0000" / "confusion.csv").write_text(classes)
    assert main.main([sweep], tmp_path / "f.png", "png", None) == 0
    written = capsys.readouterr().out.splitlines()
    assert [name.rpartition("/f-")[2] for name in written] == [
        "loss.png", "held-out.png", "speed-up.png", "time-to-target.png", "heat-1.png", "heat-2.png", "time.png",
        "confusion.png",
    ]  # fmt: skip
    for name in written:
        with open(name, "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("out", "form", "told"),
    [
        (None, "pdf", "use one of html, md, csv, png"),
        ("nowhere/report.html", "html", "there is no folder"),
        (".", "md", "this is a folder"),
    ],
)
def test_what_cannot_be_written_is_told_before_anything_is_read(tmp_path, out, form, told):
    run = write_run(tmp_path / "run", Fake())
    with pytest.raises(ConfigError, match=told):
        main.main([run], tmp_path / out if out else None, form, None)


def test_a_path_without_runs_is_told(tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        main.main([tmp_path / "none"], None, "md", None)


@pytest.mark.parametrize(
    ("library", "form", "hint"),
    [("plotly", "html", "apex-harness\\[report\\]"), ("matplotlib", "png", "apex-harness\\[plot\\]")],
)
def test_a_library_that_is_not_installed_is_named(tmp_path, monkeypatch, library, form, hint):
    for name in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=hint):
        main.main([write_run(tmp_path / "run", Fake())], None, form, None)


def test_it_needs_no_torch(tmp_path):
    run = write_run(tmp_path / "run", Fake())
    code = (
        "import sys; from pathlib import Path; from harness.report import main\n"
        f"for form in ('html', 'md', 'csv'): main.main([Path({str(run)!r})], None, form, None)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=100, capture_output=True).returncode == 0
