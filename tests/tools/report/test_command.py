"""``harness report``: the files it writes, and its errors."""

from __future__ import annotations

import json
import sys

import pytest
from PIL import Image

from benchmarks.synthetic_runs import Fake, write_run, write_sweep
from harness import cli
from harness.errors import ConfigError
from harness.runs import ownership
from harness.tools.report import page

pytest.importorskip("plotly", reason="plotly is not installed: pip install 'apex-harness[report]'")


def test_the_page_is_written_and_its_path_printed(tmp_path, capsys):
    sweep = write_sweep(tmp_path / "sweep", [Fake(), Fake(world=2)])
    assert cli.main(["report", str(sweep)]) == 0
    assert capsys.readouterr().out == f"{sweep / 'report.html'}\n"
    written = (sweep / "report.html").read_text()
    assert written.startswith("<!doctype html>")
    assert len(written) <= 2_000_000  # opens on a phone
    assert page.write([sweep], tmp_path / "mine").is_file()


def test_records_of_runs_and_trials_for_programs(tmp_path, capsys):
    run = write_run(tmp_path / "run", Fake())
    sweep = write_sweep(tmp_path / "sweep", [Fake(), Fake(world=2)])
    assert cli.main(["report", "--json", str(run), str(sweep)]) == 0
    one, *trials = json.loads(capsys.readouterr().out)
    assert (one["path"], one["state"], one["failure"], one["trial"]) == (str(run), "finished", None, None)
    assert one["best"].keys() == {"top1", "step"}
    assert [trial["trial"]["number"] for trial in trials] == [0, 1]
    assert trials[1]["world_sizes"] == [2]
    assert not (run / "report.html").exists()
    with pytest.raises(SystemExit):
        cli.main(["report", "--json", "-o", "x.html", str(run)])
    assert cli.main(["report", "--json", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    ("run", "out", "message"),
    [
        ("run", "nowhere/report.html", "there is no folder"),
        ("run", ".", "it is a folder"),
        ("none", None, "there is no such folder"),
    ],
)
def test_wrong_paths_are_errors(tmp_path, run, out, message):
    write_run(tmp_path / "run", Fake())
    with pytest.raises(ConfigError, match=message):
        page.write([tmp_path / run], tmp_path / out if out else None)


def test_images_of_the_runs_of_others_need_trust(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "cache"))
    run = write_run(tmp_path / "run", Fake())
    (run / "confusion.csv").write_text("label,cat,dog\ncat,5,2\ndog,3,7\n")
    (run / "predictions.csv").write_text("id,prediction,label\na.png,cat,dog\n")
    (tmp_path / "data").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "data" / "a.png")

    def page_of(*words: str) -> str:
        assert cli.main(["report", "run", *words]) == 0
        return (run / "report.html").read_text()

    text = page_of()
    assert "data:image/png" not in text
    assert "To show the images, add --trust." in text
    assert "data:image/png" in page_of("--trust")
    ownership.remember((run / "config.yaml").read_text())
    assert "data:image/png" in page_of()


def test_missing_plotly_is_an_error(tmp_path, monkeypatch):
    page.plotly_source.cache_clear()
    for name in ["plotly", *(name for name in sys.modules if name.startswith("plotly."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"apex-harness\[report\]"):
        page.write([write_run(tmp_path / "run", Fake())])
