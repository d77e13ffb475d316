"""The commands that reproduce a run, and its provenance."""

from __future__ import annotations

import json

import pytest

from benchmarks.synthetic_runs import Fake, write_run, write_sweep
from harness.runs import reader
from harness.tools.report import reproduce, run_set

H200 = {"host": "there", "device": "cuda:0", "name": "NVIDIA H200"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder, **start):
    told = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps([told[0] | start]))
    return run_set.build([reader.read(folder)]).runs[0]


def test_command_for_one_process(place):
    found = run(write_run(place / "runs" / "fake", Fake()))
    assert reproduce.commands(found) == [
        "git checkout 0123456789ab",
        "harness train -c runs/fake/config.yaml name=fake_again",
    ]
    assert reproduce.caveats(found) == []
    assert reproduce.resume_command(found) == "harness train -c runs/fake/config.yaml"


def test_a_moved_run_is_resumed_in_its_folder(place):
    fake = Fake(settings={"checkpoint": {"resume": "never"}})
    found = run(write_run(place / "runs" / "fake.1", fake))
    command = "harness train -c runs/fake.1/config.yaml name=fake.1 checkpoint.resume=auto"
    assert reproduce.resume_command(found) == command
    found = run(write_run(place / "my runs" / "fake", Fake()))
    assert reproduce.resume_command(found) == "harness train -c 'my runs/fake/config.yaml' 'output=my runs'"


def test_command_for_several_ranks_on_one_machine(place):
    found = run(write_run(place / "runs" / "fake", Fake(world=4)))
    assert reproduce.commands(found)[1] == "harness launch -c runs/fake/config.yaml --nproc 4 name=fake_again"


@pytest.mark.parametrize(
    ("cards", "nproc", "own"), [((2, 2), "2", "0 to 1"), ((3, 1), "NPROC", "0 to 1, and NPROC: 3, 1")]
)
def test_command_for_several_machines(place, cards, nproc, own):
    ranks = [
        {"host": host, "device": f"cuda:{card}", "name": "A (H100)"}
        for host, count in zip(("one: a (", "one: b ("), cards, strict=True)
        for card in range(count)
    ]
    found = run(write_run(place / "runs" / "fake", Fake(world=4)), ranks=ranks)
    assert reproduce.commands(found)[1] == (
        f"torchrun --nnodes=2 --node-rank=NODE_RANK --master-addr=NODE0 --master-port=PORT --nproc-per-node={nproc} "
        f"-m harness.train -c runs/fake/config.yaml name=fake_again   # on each node, with its NODE_RANK, {own}"
    )
    machines = f"{cards[0]} × one: a (: cuda (A (H100)), {cards[1]} × one: b (: cuda (A (H100))"
    assert dict(reproduce.provenance(found))["machine"] == machines
    assert run_set.devices(found.record) == ["A (H100)"] * 4


def test_start_without_records_of_its_ranks(place):
    folder = write_run(place / "runs" / "fake", Fake(world=2))
    for ranks in (["here: cuda:0 (NVIDIA H200)"] * 2, 3, None):
        found = run(folder, ranks=ranks)
        assert dict(reproduce.provenance(found))["machine"] == "–"
        assert run_set.devices(found.record) == []
        assert "--nproc 2" in reproduce.commands(found)[1]
    assert dict(reproduce.provenance(run(found.record.path, ranks=[{"host": "a"}])))["machine"] == "1 × a: unknown"


def test_the_trained_model_is_named(place):
    found = run(write_run(place / "runs" / "fake", Fake()), model={"name": "BertForMaskedLM"})
    assert dict(reproduce.provenance(found))["model"] == "BertForMaskedLM"


def test_trial_is_reproduced_outside_its_sweep(place):
    sweep = write_sweep(place / "runs" / "lr", [Fake(name="0000")])
    found = run_set.build(reader.find([sweep])).runs[0]
    assert reproduce.commands(found)[1] == (
        "harness launch -c runs/lr/trials/0000/config.yaml output=runs name=lr-0000"
    )


def test_caveats(place):
    folder = write_run(place / "runs" / "fake", Fake(settings={"train.deterministic": False}))
    git = {"commit": "abc", "changed": True}
    assert "not deterministic" not in " ".join(reproduce.caveats(run(folder, git=git))), "a CPU is exact"
    text = " ".join(reproduce.caveats(run(folder, git=git, ranks=[H200])))
    assert "uncommitted changes" in text
    assert "not deterministic" in text
    unknown = "The commit is unknown."
    assert unknown not in reproduce.caveats(run(folder, git=None)), "outside a repository there is none"
    (place / ".git").mkdir()
    assert unknown in reproduce.caveats(run(folder, git=None))
    assert reproduce.commands(run(folder, git=None)) == ["harness train -c runs/fake/config.yaml name=fake_again"]


def test_names_are_quoted_for_the_shell(place):
    found = run(write_run(place / "runs" / "a b;rm", Fake(name="x;y")), git={"commit": "$(reboot)"})
    assert reproduce.commands(found) == [
        "git checkout '$(reboot)'",
        "harness train -c 'runs/a b;rm/config.yaml' 'name=x;y_again'",
    ]


def test_command_is_shown_without_machine_folders(place):
    words = ["/opt/venv/bin/python", str(place / "driver.py"), "-c", "configs/a b.yaml"]
    found = run(write_run(place / "runs" / "fake", Fake()), command=words)
    assert dict(reproduce.provenance(found))["command"] == "python driver.py -c 'configs/a b.yaml'"


def test_run_that_resumed_elsewhere_shows_every_start(place):
    found = run(write_run(place / "runs" / "fake", Fake()))
    path = found.record.path / "provenance.json"
    first = json.loads(path.read_text())[0]
    later = {"git": {"commit": "f" * 40}, "packages": {"torch": "2.7.0"}, "ranks": [H200] * 2,
             "world_size": 2}  # fmt: skip
    path.write_text(json.dumps([first, first, first | later]))
    again = run_set.build([reader.read(found.record.path)]).runs[0]
    facts = dict(reproduce.provenance(again))
    assert facts["git commit"] == "0123456789ab, then ffffffffffff" == reproduce.commit(again)
    assert facts["machine"] == "1 × here: cpu, then 2 × there: cuda (NVIDIA H200)"
    assert facts["ranks"] == "1, then 2"
    assert facts["packages"] == "torch 2.6.0, then 2.7.0; numpy 2.0.0, then –"
    assert facts["Python"] == "3.11.7"
    assert "The code changed when the run was resumed (0123456789ab, then ffffffffffff)" in " ".join(
        reproduce.caveats(again)
    )
    assert again.recipe != found.recipe, "another kind of device"


def test_caveat_of_a_length_that_changed_at_a_resume(place):
    folder = write_run(place / "run", Fake(settings={"train.epochs": 12}))
    (first,) = json.loads((folder / "provenance.json").read_text())
    lengths = [{"step": step, "train.epochs": epochs, "train.max_steps": None} for step, epochs in [(0, 8), (9, 12)]]
    (folder / "provenance.json").write_text(json.dumps([first | {"length": length} for length in lengths]))
    found = run_set.build([reader.read(folder)]).runs[0]
    assert found.recipe != run(write_run(place / "whole", Fake(settings={"train.epochs": 12}))).recipe
    assert "train.epochs changed when the run was resumed" in " ".join(reproduce.caveats(found))
