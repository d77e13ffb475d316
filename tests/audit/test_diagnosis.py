"""Each class of fault by one change to an exact pair of starts, and what must not be blamed."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.audit import diagnosis
from harness.audit.records import read
from harness.audit.verdict import FAULTS, Finding, conclude
from tests.audit.synthetic import ROWS, Event, Starts, Training, rounded

NAMES = ["net0.bias", "net0.weight"]


def found(starts: Starts, folder: Path) -> list[Finding]:
    return diagnosis.compare(*starts.read(folder))


def codes(starts: Starts, folder: Path) -> list[str]:
    return [finding.code for finding in found(starts, folder)]


def only(starts: Starts, folder: Path) -> Finding:
    (finding,) = found(starts, folder)
    assert finding.code in FAULTS
    return finding


def set_inputs(starts: Starts, number: int, source: int, rank: int = 0) -> None:
    """From step ``number`` on, the resumed start reads the rows of step ``source`` and those after it."""
    begun = starts.checkpoint

    def change(step: Event) -> None:
        other = starts.training.step(step["number"] + begun + source - number, rank)
        for mine, theirs in zip(step["calls"], other["calls"], strict=True):
            mine["in"] = theirs["in"]

    starts.from_step(number, change, rank=rank)


def faulty(training: Training | None = None, **options) -> Starts:
    """An exact pair that is to be changed at the first resumed step, 13, and differs from 14 on."""
    starts = Starts(training or Training(), **options)
    starts.apart(starts.checkpoint + 2)
    return starts


# State beside the model of the harness


def with_waited(starts: Starts, name: str = "undisturbed", by: int = 0, until: int = 99) -> None:
    """Give each step a count that starts over after step 12, and time."""
    for step in starts.steps(name):
        number = step["number"] + (starts.checkpoint if name == "resumed" else 0)
        count = number % 4 + (by if number < until else 0)
        step["beside"] = {"hooks[0].state.waited": count, "hooks[0].state.time": f"{name} {number}"}


def beside(by: int, starts: Starts | None = None) -> Starts:
    starts = starts or Starts(Training())
    for name in ("undisturbed", "again", "killed", "resumed"):
        with_waited(starts, name, by if name == "resumed" else 0, until=15)
    return starts


def test_state_that_is_equal_or_a_time_is_no_fault(tmp_path: Path):
    assert codes(beside(0), tmp_path) == []


def test_state_beside_the_model_is_found_before_it_decides_anything(tmp_path: Path):
    finding = only(beside(7), tmp_path)
    assert (finding.code, finding.steps, finding.names) == ("saved-state", (13,), ("hooks[0].state.waited",))
    assert finding.text.endswith("beside the model differs: hooks[0].state.waited is 8 instead of 1")


def test_state_that_is_not_restored_is_named_once(tmp_path: Path):
    starts = beside(7)
    for name, count in (("undisturbed", 18), ("again", 18), ("resumed", 11)):
        for event in getattr(starts, name)[0]:
            if event["event"] == "written" and event["after"] + (starts.checkpoint if name == "resumed" else 0) == 18:
                event["content"]["hooks[0].state.waited"] = count
    assert codes(starts, tmp_path) == ["saved-state"]


def test_state_beside_the_model_is_named_with_what_it_decides(tmp_path: Path):
    starts = beside(7, faulty())
    for step in starts.steps("resumed")[:1]:
        step["groups"] = [{**group, "lr": 0.5} for group in step["groups"]]
    assert codes(starts, tmp_path) == ["learning-rate", "saved-state"]


# Exact


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_exact_pairs_have_no_finding(data: st.DataObject):
    training = Training(
        steps=data.draw(st.integers(8, 30)),
        epoch=data.draw(st.integers(2, 9)),
        save=data.draw(st.integers(1, 6)),
        ranks=data.draw(st.integers(1, 2)),
        optimizers=data.draw(st.integers(1, 2)),
        micro_batches=data.draw(st.integers(1, 3)),
        skipped=tuple(data.draw(st.sets(st.integers(1, 30), max_size=3))),
        shuffled=data.draw(st.booleans()),
        save_name=data.draw(st.sampled_from(["out/last.pt", "out/step-N/model.pt"])),
    )
    checkpoint = training.save * data.draw(st.integers(0, (training.steps - 1) // training.save))
    # After a kill before the first checkpoint is complete, a start from scratch is right.
    kill = data.draw(st.integers(checkpoint + 1, training.steps if checkpoint else training.save))
    with TemporaryDirectory() as folder:
        starts = Starts(training, checkpoint, kill)
        assert codes(starts, Path(folder)) == []
        records = starts.read(Path(folder))
        assert [start.offset for start in diagnosis.summaries(records)] == [0, 0, 0, checkpoint]
        assert conclude(diagnosis.compare(*records)).exit_code == 0


@pytest.mark.parametrize("folder", ["", "out/step-N/"])
def test_a_checkpoint_is_complete_once_it_is_renamed(tmp_path: Path, folder: str):
    starts = Starts(Training(save_name=f"{folder}model.pt"), checkpoint=0, kill=7, place="checkpoint")
    assert [finding.code for finding in found(starts, tmp_path)] == ["from-scratch"]
    assert starts.killed[0].pop()["event"] == "renamed"
    assert codes(starts, tmp_path) == []


def test_an_older_checkpoint_is_as_exact(tmp_path: Path):
    assert codes(Starts(Training(), checkpoint=6, kill=16), tmp_path) == []


def test_torn_lines_are_left_out(tmp_path: Path):
    starts = Starts(Training())
    starts.written(tmp_path, "killed")
    with open(tmp_path / "killed" / "rank0-100.jsonl", "a") as file:
        file.write('{"event": "step", "number": 16, "wei')
    assert len(diagnosis.summaries([starts.written(tmp_path, "undisturbed")])) == 1
    assert len(read(tmp_path / "killed").steps) == 15


def test_processes_without_training_are_left_out(tmp_path: Path):
    starts = Starts(Training())
    records = starts.read(tmp_path)
    for name in ("undisturbed", "resumed"):
        (tmp_path / name / "rank0-7.jsonl").write_text('{"event": "process", "rank": 0, "time": 0.5}\n')
    again = [read(tmp_path / start.name) for start in records]
    assert [start.others for start in again] == [1, 0, 0, 1]
    assert diagnosis.compare(*again) == []


def test_summaries_of_further_kills(tmp_path: Path):
    undisturbed, _, killed, resumed = faulty().read(tmp_path)
    killed.name = "killed-2"
    for name in ("resumed-2", "resumed-again-2"):
        resumed.name = name
        summary = diagnosis.summaries([undisturbed, killed, resumed])[-1]
        assert (summary.name, summary.offset, summary.differs) == (name, 12, 14)


# Rows


def test_rows_trained_again(tmp_path: Path):
    starts = faulty()
    set_inputs(starts, 13, 11)
    finding = only(starts, tmp_path)
    assert (finding.code, finding.steps) == ("rows", (11, 12))
    assert f"the rows of steps 11 to 12 ({2 * ROWS} rows) are trained again" in finding.text
    assert finding.evidence == ("12 batches in a row show it",), "of 12 resumed steps"


def test_rows_never_trained_until_the_next_epoch(tmp_path: Path):
    starts = faulty()
    set_inputs(starts, 13, 21)
    finding = only(starts, tmp_path)
    assert finding.code == "rows"
    assert finding.steps == tuple(range(13, 21))
    assert "never trained" in finding.text


def test_rows_by_micro_batches(tmp_path: Path):
    starts = faulty(Training(micro_batches=3))
    for number, step in enumerate(starts.steps("resumed"), 12):
        step["calls"] = [
            {**call, "in": each["in"]}
            for call, each in zip(
                step["calls"],
                [
                    *starts.training.step(number + 1)["calls"][1:],
                    *starts.training.step(number + 2)["calls"][:1],
                ],
                strict=True,
            )
        ]
    finding = only(starts, tmp_path)
    assert (finding.code, finding.steps) == ("rows", (13,))
    assert "1 micro-batch of step 13" in finding.text


def test_the_length_follows_from_rows_that_are_trained_again(tmp_path: Path):
    starts = Starts(Training(shuffled=False))
    starts.apart(14)
    set_inputs(starts, 13, 11)
    last = starts.resumed[0].index(starts.steps("resumed")[-1])
    for number in (25, 26):
        step = {
            **starts.training.step(number),
            "number": number - 12,
            "weights": {"net0.weight": "x", "net0.bias": "y"},
        }
        step["calls"][0]["in"] = starts.training.step(number - 2)["calls"][0]["in"]
        starts.resumed[0].insert(last + number - 24, step)
    assert only(starts, tmp_path).code == "rows"


@pytest.mark.parametrize("ended", [True, False])
def test_order_of_another_epoch(ended: bool, tmp_path: Path):
    starts = faulty(Training(micro_batches=1 if ended else 4))
    set_inputs(starts, 13, 3)
    for number in range(21, 25):  # the next epoch has its own order
        for call, due in zip(
            starts.steps("resumed")[number - 13]["calls"], starts.training.step(number)["calls"], strict=True
        ):
            call["in"] = due["in"]
    if not ended:
        starts.resumed[0][-1] = {"event": "stopped"}
    finding = only(starts, tmp_path)
    assert finding.code == "row-order"
    assert "the order of epoch 1 in epoch 2" in finding.text


def test_batches_in_another_order(tmp_path: Path):
    starts = faulty()
    steps = starts.steps("resumed")
    inputs = [step["calls"][0]["in"] for step in steps[:8]]
    for step, other in zip(steps[:8], inputs[::-1], strict=True):
        step["calls"][0]["in"] = other
    assert only(starts, tmp_path).code == "row-order"


def test_unknown_rows_without_a_stream(tmp_path: Path):
    starts = faulty()
    starts.from_step(13, lambda step: step["calls"][0].update({"in": f"new {step['number']}"}))
    assert only(starts, tmp_path).code == "row-order"


@pytest.mark.parametrize(
    ("skipped", "read", "code"), [((), 13, "inputs"), ((11, 12), 13, "inputs"), ((), 14, "row-order")]
)
def test_rows_that_a_loader_gave_with_other_inputs(skipped, read, code, tmp_path: Path):
    """A resumed start may get batches first that it skips."""
    starts = faulty()
    starts.from_step(13, lambda step: step["calls"][0].update({"in": f"new {step['number']}"}))
    starts.steps("undisturbed")[12]["rows"] = ["rows 13"]
    starts.steps("resumed")[0]["rows"] = [f"rows {number}" for number in (*skipped, read)]
    assert only(starts, tmp_path).code == code


# Random streams


def test_unknown_rows_with_a_stream(tmp_path: Path):
    starts = faulty()
    starts.from_step(13, lambda step: step["calls"][0].update({"in": f"new {step['number']}"}))
    starts.from_step(13, lambda step: step["streams"].update(torch=f"new {step['number']}", random="new"))
    finding = only(starts, tmp_path)
    assert (finding.code, finding.names) == ("random-streams", ("torch",))  # nothing draws from "random"


def test_rows_of_a_stream_that_starts_from_its_seed(tmp_path: Path):
    starts = faulty()
    set_inputs(starts, 13, 1)
    starts.from_step(13, lambda step: step["streams"].update(torch=f"torch 0.{step['number']}"))
    assert only(starts, tmp_path).code == "random-streams"


def test_an_epoch_is_trained_again_whatever_draws_its_order(tmp_path: Path):
    """The sampler counts epochs, the unsaved stream starts from its seed: the longer run shows what is the cause."""
    starts = faulty()
    set_inputs(starts, 13, 1)
    starts.from_step(13, lambda step: step["streams"].update(torch=f"torch 0.{step['number']}"))
    last = starts.resumed[0].index(starts.steps("resumed")[-1])
    for number in range(13, 25):
        step = {**starts.training.step(number), "weights": {"net0.weight": "x", "net0.bias": "y"}}
        starts.resumed[0].insert(last + number - 12, step)
    finding = only(starts, tmp_path)
    assert (finding.code, finding.steps) == ("rows", tuple(range(1, 13)))
    assert "trained again" in finding.text
    assert finding.evidence[-1] == "random stream torch is at step 1 again as well"


def test_outputs_with_a_stream(tmp_path: Path):
    starts = faulty()
    starts.from_step(13, lambda step: step["calls"][0].update(out=f"dropped {step['number']}"))
    starts.from_step(13, lambda step: step["streams"].update(torch=f"torch 0.{step['number']}", numpy="new"))
    finding = only(starts, tmp_path)
    assert (finding.code, finding.names) == ("random-streams", ("torch",))  # numpy draws between epochs only
    assert "seed" in finding.evidence[0]
    assert finding.advice.startswith(
        "save on every rank torch.get_rng_state() and restore it with torch.set_rng_state()"
    )


@pytest.mark.parametrize(("part", "number"), [("gradients", 13), ("weights", 14)])
def test_a_stream_that_is_drawn_from_after_the_forward_pass(part, number, tmp_path: Path):
    starts = faulty()
    starts.from_step(13, lambda step: step["streams"].update(numpy="new"))
    starts.from_step(number, lambda step: step[part].update({"net0.bias": f"drawn {step['number']}"}))
    assert only(starts, tmp_path).code == "other", "numpy draws between epochs only"
    starts.from_step(13, lambda step: step["streams"].update(torch=f"torch 0.{step['number']}"))
    finding = only(starts, tmp_path)
    assert (finding.code, finding.names, finding.steps) == ("random-streams", ("torch",), (number,))


def test_a_stream_of_one_rank(tmp_path: Path):
    starts = faulty(Training(ranks=2))
    starts.from_step(13, lambda step: step["calls"][0].update(out=f"dropped {step['number']}"), rank=1)
    starts.from_step(13, lambda step: step["streams"].update(torch=f"new {step['number']}"), rank=1)
    for rank in range(2):
        starts.from_step(13, lambda step: step.update(gradients={"net0.weight": "summed"}), rank=rank)
    finding = only(starts, tmp_path)
    assert (finding.code, finding.ranks) == ("random-streams", (1,))
    assert finding.text.startswith("on rank 1 only")


def test_a_stream_without_effect_is_no_fault(tmp_path: Path):
    starts = Starts(Training())
    starts.from_step(13, lambda step: step["streams"].update(torch=f"new {step['number']}", random="new"))
    assert codes(starts, tmp_path) == []


# The optimizer


def test_state_is_missing(tmp_path: Path):
    starts = faulty()
    starts.steps("resumed")[0]["state"] = {}
    finding = only(starts, tmp_path)
    assert finding.code == "optimizer-state"
    assert "missing" in finding.text


def test_state_of_one_weight_differs(tmp_path: Path):
    starts = faulty()
    starts.steps("resumed")[0]["state"]["net0.bias.momentum"] = "half"
    assert only(starts, tmp_path).names == ("net0.bias.momentum",)


@pytest.mark.parametrize("optimizer", [0, 1])
def test_state_of_one_of_two_optimizers(optimizer, tmp_path: Path):
    starts = Starts(Training(optimizers=2))
    starts.apart(15)
    starts.steps("resumed")[optimizer]["state"] = {}
    finding = only(starts, tmp_path)
    assert finding.code == "optimizer-state"
    assert f"net{optimizer}.weight" in finding.text


@pytest.mark.parametrize(
    ("shift", "words"), [(-12, "starts over, as at step 1"), (-5, "5 steps behind"), (2, "2 steps ahead")]
)
def test_learning_rate(shift, words, tmp_path: Path):
    starts = faulty()
    starts.from_step(13, lambda step: step.update(groups=starts.training.step(step["number"] + 12 + shift)["groups"]))
    finding = only(starts, tmp_path)
    assert finding.code == "learning-rate"
    assert words in finding.text


def test_a_learning_rate_is_lost_with_the_optimizer(tmp_path: Path):
    starts = faulty()
    starts.from_step(13, lambda step: step.update(groups=starts.training.step(step["number"])["groups"]))
    starts.steps("resumed")[0]["state"] = {}
    finding = only(starts, tmp_path)
    assert finding.code == "optimizer-state"
    assert finding.evidence[-1].startswith("the learning rate of step 13 is 0.1 instead of ")
    assert finding.evidence[-1].endswith(": the optimizer has lost it")
    assert finding.advice.startswith("save and load optimizer.state_dict(), which holds the learning rate, too;")


def test_the_lines_that_save_and_load_are_named(tmp_path: Path):
    starts = faulty()
    starts.steps("resumed")[0]["state"] = {}
    for event in (*starts.killed[0], *starts.resumed[0]):
        if event["event"] in ("written", "loaded"):
            event["line"] = f"train.py:{len(event['event'])}"
    starts.resumed[0].insert(2, {"event": "loaded", "path": "/data/mnist.pt", "line": "data.py:99"})
    starts.killed[0].append({"event": "written", "path": "out/predicted.pt", "after": 15, "line": "predict.py:7"})
    finding = only(starts, tmp_path)
    assert (finding.place, finding.evidence[-1]) == ("train.py:6", "train.py:7 saves the checkpoint")


@pytest.mark.parametrize("momentum", [True, False])
def test_a_schedule_that_goes_on_from_a_lost_learning_rate_is_not_blamed(momentum, tmp_path: Path):
    starts = faulty()
    starts.from_step(13, lambda step: step["groups"][0].update(lr=3 * step["groups"][0]["lr"]))
    starts.steps("resumed")[0]["state"] = {}
    if not momentum:
        for name in ("undisturbed", "again", "killed", "resumed"):
            starts.from_step(1, lambda step: step.update(state={}), name)
    finding = only(starts, tmp_path)
    assert finding.code == "optimizer-state"
    assert "the optimizer has lost it" in (finding.evidence[-1] if momentum else finding.text)
    assert "schedule" not in finding.advice


@pytest.mark.parametrize(("before", "later", "lost"), [([], [0.1], True), ([None], [None], False)])
def test_rates_of_groups_that_are_added_later_or_have_none(before, later, lost, tmp_path: Path):
    """A resume without the optimizer, and with another constant rate, does not add the group that is due at step 16."""

    def groups(lr: float, more: list[float | None]) -> list[Event]:
        return [{"lr": rate} if rate else {} for rate in (lr, *more)]

    starts = faulty(kill=15)
    for name in ("undisturbed", "again", "killed"):
        for step in starts.steps(name):
            step["groups"] = groups(0.1, before if step["number"] < 16 else later)
    for step in starts.steps("resumed"):
        step["groups"] = groups(0.2, before)
    starts.steps("resumed")[0]["state"] = {}
    finding = only(starts, tmp_path)
    assert finding.code == "optimizer-state"
    assert finding.evidence[-1].startswith("the learning rate of step 13 is 0.2")
    assert finding.evidence[-1].endswith(": the optimizer has lost it") is lost


@pytest.mark.parametrize(("left", "code"), [(2, "learning-rate"), (12, "optimizer-state")])
def test_a_rate_is_lost_with_the_optimizer_only_if_later_steps_show_it(left, code, tmp_path: Path):
    starts = faulty(Training(steps=12 + left), kill=14)
    starts.from_step(13, lambda step: step["groups"][0].update(lr=3 * step["groups"][0]["lr"]))
    for name in ("undisturbed", "again", "killed", "resumed"):
        starts.from_step(1, lambda step: step.update(state={}), name)
    assert only(starts, tmp_path).code == code


def test_loss_scale(tmp_path: Path):
    starts = Starts(Training(skipped=(3,)))
    starts.from_step(13, lambda step: step.update(scale=[[65536.0, 13]]))
    finding = only(starts, tmp_path)
    assert finding.code == "loss-scale"
    assert "65536 instead of 32768" in finding.text


def test_steps_since_the_loss_scale_grew(tmp_path: Path):
    starts = Starts(Training())
    starts.from_step(13, lambda step: step.update(scale=[[65536.0, step["number"]]]))
    finding = only(starts, tmp_path)
    assert finding.code == "loss-scale"
    assert finding.text.startswith("the count of steps since the loss scale grew at step 13 ")


def test_a_loss_scale_that_grows_later(tmp_path: Path):
    starts = Starts(Training(skipped=(3,)))
    starts.apart(20)
    starts.from_step(18, lambda step: step.update(scale=[[16384.0, 0]], skipped=step["number"] == 7))
    finding = only(starts, tmp_path)
    assert (finding.code, finding.steps) == ("loss-scale", (18,))


# Weights


def test_weights_of_one_layer(tmp_path: Path):
    starts = Starts(Training())
    starts.apart(14)
    step = starts.steps("resumed")[0]
    step["weights"]["net0.weight"] = "net0.weight 0"
    step["calls"][0]["out"] = "worse"
    finding = only(starts, tmp_path)
    assert (finding.code, finding.names) == ("weights", ("net0.weight",))
    assert finding.evidence == ("they are those before step 1",)


def test_weights_of_a_second_network(tmp_path: Path):
    starts = Starts(Training(optimizers=2))
    starts.apart(15)
    starts.steps("resumed")[1]["weights"] = {name: f"{name} 0" for name in ("net1.weight", "net1.bias")}
    starts.steps("resumed")[1]["calls"][0]["in"] = "made by the network"
    finding = only(starts, tmp_path)
    assert (finding.code, finding.names) == ("weights", ("net1.bias", "net1.weight"))


@pytest.mark.parametrize(("kind", "type_"), [("e", "float16"), ("bfloat16", "bfloat16")])
def test_precision(kind, type_, tmp_path: Path):
    starts = Starts(Training())
    starts.apart(13)
    step = starts.steps("resumed")[0]
    for values in step["samples"].values():
        if kind == "e":
            values[:] = [rounded("e", value) for value in values]
        else:
            import torch

            values[:] = torch.tensor(values).bfloat16().tolist()
    finding = only(starts, tmp_path)
    assert finding.code == "precision"
    assert type_ in finding.text


@pytest.mark.parametrize("loads", [True, False])
def test_from_scratch(loads, tmp_path: Path):
    starts = Starts(Training())
    starts.resumed = [starts.training.events()]
    if loads:
        starts.resumed[0].insert(1, {"event": "loaded", "path": "out/other.pt", "how": "torch.load"})
    finding = only(starts, tmp_path)
    assert finding.code == "from-scratch"


def test_no_weights_fit_into_the_model(tmp_path: Path):
    """Names with another prefix and strict=False: the optimizer's state is that of the checkpoint."""
    starts = Starts(Training())
    starts.apart(14)
    starts.steps("resumed")[0]["weights"] = {name: f"{name} 0" for name in NAMES}
    finding = only(starts, tmp_path)
    assert (finding.code, sorted(finding.names)) == ("weights", NAMES)


def test_weights_of_no_step(tmp_path: Path):
    starts = Starts(Training())
    starts.apart(13)
    assert only(starts, tmp_path).code == "other"


# The end


def remove_last(starts: Starts, count: int) -> None:
    for step in starts.steps("resumed")[-count:]:
        starts.resumed[0].remove(step)
    starts.resumed[0][:] = [event for event in starts.resumed[0] if event.get("after") != 12]


def test_too_few_steps(tmp_path: Path):
    starts = Starts(Training())
    remove_last(starts, 3)
    finding = only(starts, tmp_path)
    assert (finding.code, finding.steps) == ("length", (21, 24))


def test_too_many_steps(tmp_path: Path):
    starts = Starts(Training())
    starts.resumed = [Training(steps=30).events(begun=12)]
    assert only(starts, tmp_path).code == "length"


@pytest.mark.parametrize("name", ["undisturbed", "resumed"])
def test_a_start_that_the_recorder_stopped_is_compared_up_to_there(name, tmp_path: Path):
    starts = Starts(Training())
    events = getattr(starts, name)[0]
    events[:] = [
        event for event in events if not (event["event"] == "step" and event["number"] > 9 + 12 * (name != "resumed"))
    ]
    events[-1] = {"event": "stopped", "number": 9}
    assert codes(starts, tmp_path) == []


def test_exit_code_0_after_an_exception(tmp_path: Path):
    starts = Starts(Training())
    remove_last(starts, 3)
    starts.resumed[0][-1]["exception"] = "RuntimeError: boom"
    finding = only(starts, tmp_path)
    assert finding.code == "exit-code"
    assert "boom" in finding.text


def test_exit_code_0_after_a_printed_traceback(tmp_path: Path):
    starts = Starts(Training())
    starts.resumed = [starts.resumed[0][:2]]
    starts.output["resumed"] = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in main\n    load()\n'
        "  File \"/usr/lib/python3.11/site-packages/torch/x.py\", line 9, in load\n    fail()\nKeyError: 'optimizer'\n"
    )
    finding = only(starts, tmp_path)
    assert (finding.code, finding.place) == ("exit-code", "train.py:7")
    assert "KeyError" in finding.text


def test_long_and_colored_output_is_shortened(tmp_path: Path):
    starts = Starts(Training())
    starts.resumed, starts.codes["resumed"] = [starts.resumed[0][:2]], 1
    starts.output["resumed"] = f"\x1b[1mKeyError{'!' * 999}\x1b[0m\n"
    (line,) = only(starts, tmp_path).evidence
    assert line.startswith("KeyError!")
    assert len(line) < 300


def test_no_steps_without_a_reason(tmp_path: Path):
    starts = Starts(Training())
    starts.resumed = [starts.resumed[0][:2]]
    assert only(starts, tmp_path).code == "length"


def test_a_failing_resume(tmp_path: Path):
    starts = Starts(Training())
    starts.resumed, starts.codes["resumed"] = [starts.resumed[0][:2]], 1
    starts.output["resumed"] = "KeyError: 'optimizer'\n"
    finding = only(starts, tmp_path)
    assert (finding.code, finding.evidence) == ("other", ("KeyError: 'optimizer'",))


# Torn checkpoints


def tear(starts: Starts, path: str) -> None:
    """The killed start began the checkpoint of step 18."""
    starts.place = "write"
    starts.killed = [starts.training.events(until=19)]
    while starts.killed[0][-1]["event"] != "step":
        starts.killed[0].pop()
    starts.killed[0].append({"event": "write", "path": path, "how": "torch.save"})


def test_a_torn_file_makes_the_resume_fail(tmp_path: Path):
    starts = Starts(Training(save_name="out/step-N.pt"), kill=19)
    tear(starts, "out/step-18.pt")
    starts.resumed = [[*starts.resumed[0][:1], {"event": "loaded", "path": "out/step-18.pt", "how": "torch.load"}]]
    starts.codes["resumed"] = 1
    finding = only(starts, tmp_path)
    assert (finding.code, finding.names) == ("torn-checkpoint", ("out/step-18.pt",))
    assert "the checkpoint of step 12 was complete" in finding.evidence


def test_a_file_that_is_overwritten_in_place(tmp_path: Path):
    starts = Starts(Training(), kill=19)
    tear(starts, "out/last.pt")
    starts.resumed = [starts.training.events()]
    starts.resumed[0].insert(1, {"event": "loaded", "path": "out/last.pt", "how": "torch.load"})
    finding = only(starts, tmp_path)
    assert finding.code == "torn-checkpoint"
    assert "overwritten in place" in finding.evidence[0]


def test_state_of_the_harness_is_not_blamed_on_a_torn_checkpoint(tmp_path: Path):
    starts = Starts(Training(save_name="out/step-N.pt"), kill=19)
    tear(starts, "out/step-18.pt")
    starts.output["resumed"] = "step-18.pt is not complete\n"
    assert only(beside(7, starts), tmp_path).code == "saved-state"


def test_a_torn_temporary_file_does_no_harm(tmp_path: Path):
    starts = Starts(Training(), kill=19)
    tear(starts, "out/last.pt.tmp")
    assert codes(starts, tmp_path) == []
    starts.resumed = [starts.training.events()]
    assert codes(starts, tmp_path / "scratch") == ["from-scratch"]


# No verdict


def test_deterministic_starts(tmp_path: Path):
    undisturbed, again, *_ = Starts(Training()).read(tmp_path)
    assert diagnosis.deterministic(undisturbed, again) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"calls": [{"module": "Net", "in": "x", "rows": ROWS, "out": "y"}]}, "the inputs of the model"),
        ({"calls": [{"module": "Net", "in": "in 0.0.4.0", "rows": ROWS, "out": "y"}]}, "the outputs of the model"),
        ({"gradients": {"net0.weight": "x"}}, "the gradients"),
        ({"groups": [{"lr": 0.3}]}, "the learning rate"),
        ({}, "the weights"),
    ],
)
def test_starts_that_differ_by_themselves(change, words, tmp_path: Path):
    starts = Starts(Training())
    starts.apart(6, "again")
    starts.steps("again")[4].update(change)
    undisturbed, again, *_ = starts.read(tmp_path)
    (finding,) = diagnosis.deterministic(undisturbed, again)
    assert finding.code == "not-deterministic"
    assert words in finding.text
    assert ("after step 5" if not change else "at step 5") in finding.text
    assert conclude([finding]).exit_code == 3


def test_a_kill_that_comes_after_a_difference(tmp_path: Path):
    starts = Starts(Training())
    starts.apart(6, "killed")
    (finding,) = found(starts, tmp_path)
    assert finding.code == "not-deterministic"
    assert "killed start" in finding.text


@pytest.mark.parametrize("name", ["undisturbed", "again", "killed", "resumed"])
def test_a_fault_of_the_recorder_is_no_fault_of_the_script(name, tmp_path: Path):
    starts = Starts(Training())
    events = getattr(starts, name)[0]
    events[9:] = [{"event": "fault", "text": "Traceback\nValueError: what\n"}]
    (finding,) = found(starts, tmp_path)
    assert (finding.code, conclude([finding]).exit_code) == ("recorder", 3)
    assert "ValueError: what" in finding.text


def test_no_steps_at_all(tmp_path: Path):
    starts = Starts(Training())
    starts.undisturbed = [starts.undisturbed[0][:1]]
    assert codes(starts, tmp_path) == ["no-steps"]


def test_a_rank_that_does_not_train(tmp_path: Path):
    starts = Starts(Training(ranks=2))
    starts.resumed = starts.resumed[:1]
    finding = only(starts, tmp_path)
    assert (finding.code, finding.ranks) == ("other", (1,))
