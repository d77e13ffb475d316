"""The kill campaign of benchmarks/campaign: it finds planted defects and no others, and can be interrupted."""

from __future__ import annotations

import json

import pytest

from tests.conftest import ROOT
from tests.end_to_end.processes import python

# Runs chains of the campaign, each in a process of its own, with a defect planted into the harness. Forked ranks
# inherit it.
PROGRAM = """
import dataclasses, json, os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from benchmarks.campaign import __main__ as campaign, chain, plan, start
campaign.preload()
from harness.distributed.stop import Stop
from harness.runs.run_dir import RunFolder
from harness.training.reproducibility import rng

def lost_random_stream():
    rng.set_state = lambda *arguments: None

def file_left_behind():
    claim = RunFolder.claim
    def claim_and_leave(self, *arguments, **options):
        resumes = self.metrics.exists()
        note = claim(self, *arguments, **options)
        if resumes:
            (self.path / "half.tmp").touch()
        return note
    RunFolder.claim = claim_and_leave

def rank_that_never_ends():
    start.END_S = 3.0
    def request(self, reason):
        time.sleep(1000)
    Stop.request = request

def wrong_exit_code():
    from harness.training import exit_report
    exit_report.EXIT_STOPPED = 1

def nothing():
    pass

def first(signal, place, **traits):
    "The first chain with these traits, to be hit by the signal in the place."
    number = next(n for n in range(1000) if traits.items() <= plan.chain(1, n).traits.items()
                  and "dropout" in (option := plan.chain(1, n).traits["option"])
                  and "compiled" not in option
                  and "asynchronous" not in option)  # a kill in the first evaluation could leave no checkpoint
    kill = plan.PlannedKill(place, 2, target="rank", after=0 if place == "step" else 2)
    plan.places = lambda _: [place] * (2 if traits["ranks"] == "2" else 1)
    plan.kill = lambda *_: (kill, signal)
    return plan.chain(1, number)

folder = Path(sys.argv[1])
local = {"engine": "bare", "run folder": "local", "level": "O0"}
data = campaign._data(folder)
CASES = [(nothing, "KILL", "step", local | {"ranks": "2"}),
         (nothing, "TERM", "step", local | {"ranks": "1", "engine": "harness launch", "level": "O1"}),
         (lost_random_stream, "KILL", "evaluation", local | {"ranks": "1"}),
         (file_left_behind, "KILL", "operation", local | {"ranks": "1"}),
         (rank_that_never_ends, "TERM", "step", local | {"ranks": "1"}),
         (wrong_exit_code, "TERM", "step", local | {"ranks": "1"})]
for index, (plant, signal, place, traits) in enumerate(CASES):
    def work():
        plant()
        chosen = first(signal, place, **traits)
        result = chain.run(chosen, folder / str(index), data)
        print(json.dumps({"plant": plant.__name__, **result}), flush=True)
    os.waitpid(campaign._forked(work), 0)
"""


@pytest.mark.slow
def test_campaign_finds_planted_defects(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    assert python([tmp_path / "program.py", tmp_path, ROOT], terminal := tmp_path / "terminal.txt") == 0
    results = [json.loads(line) for line in terminal.read_text().splitlines() if line.startswith("{")]
    found = [(result["plant"], sorted({problem["kind"] for problem in result["problems"]})) for result in results]
    assert found == [
        ("nothing", []),
        ("nothing", []),
        ("lost_random_stream", ["wrong bits"]),
        ("file_left_behind", ["stray file"]),
        ("rank_that_never_ends", ["hang"]),
        ("wrong_exit_code", ["exit code"]),
    ], terminal.read_text()
    exact = results[0]
    assert [kill["codes"][0] for kill in exact["kills"]] == [-9, -9]
    assert all(kill["codes"][1] == 70 and kill["end_s"] < 30 for kill in exact["kills"])
    assert [kill["codes"] for kill in results[1]["kills"]] == [[75]]
    assert "checkpoint: model" in results[2]["problems"][0]["text"]
    assert "half.tmp" in results[3]["problems"][0]["text"]
    # What hangs says where: the stack of the rank is in its terminal file.
    assert " in request\n" in (tmp_path / "4/broken/terminal.txt").read_text()


@pytest.mark.slow
def test_campaign_goes_on_where_it_was_stopped(tmp_path):
    def campaign(kills: int) -> str:
        words = ["--seed", "5", "--kills", str(kills), "--jobs", "2", "--no-page", "--folder", str(tmp_path)]
        (terminal := tmp_path / "terminal.txt").unlink(missing_ok=True)
        assert python(["-m", "benchmarks.campaign", *words], terminal) in (0, 1), terminal.read_text()
        return terminal.read_text()

    assert "| chains | kills |" in campaign(1)
    results = {path: path.read_text() for path in tmp_path.glob("seed-5-*/results/*.json")}
    first = min(results)
    first.unlink()  # as if it had been interrupted in this chain
    assert f"5-{int(first.stem)} " in campaign(1)
    assert first.exists()
    assert all(path.read_text() == text for path, text in results.items() if path != first)
