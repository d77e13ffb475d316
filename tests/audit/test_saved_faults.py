"""Faults beside the weights: buffers, averages, and what later checkpoints contain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.audit import saved_faults
from tests.audit.synthetic import Event, Starts, Training, other
from tests.audit.test_diagnosis import codes, faulty, only


def test_buffers_of_the_model(tmp_path: Path):
    starts = Starts(Training())
    starts.from_step(13, lambda step: step.update(buffers={"running_mean": f"new {step['number']}"}))
    finding = only(starts, tmp_path)
    assert (finding.code, finding.names) == ("buffers", ("running_mean",))


def test_outputs_with_buffers(tmp_path: Path):
    starts = faulty()
    starts.from_step(13, lambda step: step["calls"][0].update(out="new"))
    starts.from_step(13, lambda step: step.update(buffers={"running_mean": "new"}))
    assert only(starts, tmp_path).code == "buffers"


def test_average_of_the_weights(tmp_path: Path):
    starts = Starts(Training())

    def change(step: Event) -> None:
        step["others"] = step["others"] and {**step["others"], "EMA.weight": other("from the model")}

    starts.from_step(13, change)
    starts.resumed[0][-1]["others"] = {"EMA.weight": other("from the model, too")}
    assert only(starts, tmp_path).code == "buffers"


def test_a_module_named_random_is_no_generator(tmp_path: Path):
    starts = Starts(Training())
    for name, digests in (("undisturbed", "as before"), ("again", "as before"), ("resumed", "made again")):
        for step in starts.steps(name):
            if step["others"]:
                step["others"] = {**step["others"], "RandomFeatures.weight": other(digests)}
    finding = only(starts, tmp_path)
    assert (finding.code, finding.names) == ("buffers", ("RandomFeatures.weight",))


def test_a_generator_without_effect_is_not_blamed(tmp_path: Path):
    starts = Starts(Training())
    for name, digests in (("undisturbed", "as before"), ("again", "as before"), ("resumed", "made again")):
        for step in starts.steps(name):
            if step["others"]:
                step["others"] = {**step["others"], "random.Random 0": other(digests, "generator")}
    assert codes(starts, tmp_path) == []


@pytest.mark.parametrize(("label", "kind"), [("a tensor [2]", "unnamed"), ("Teacher.weight", "module")])
def test_copies_of_a_moment_are_not_blamed(label, kind, tmp_path: Path):
    starts = Starts(Training())
    held = other("held by the loaded checkpoint", kind)
    starts.steps("resumed")[0]["others"] = {"EMA.weight": other("ema 13"), label: held}
    starts.steps("undisturbed")[12]["others"]["Metric.total"] = other("a sum")
    starts.steps("resumed")[0]["others"]["Metric.total"] = other("zero")
    starts.steps("undisturbed")[18]["others"]["Metric.total"] = other("begun again")
    starts.steps("resumed")[6]["others"]["Metric.total"] = other("begun again")
    assert codes(starts, tmp_path) == []


def dictionary(starts: Starts, name: str, values: Callable[[int], str]) -> None:
    """Let the start hold another tensor, of the script's own dictionary."""
    begun = starts.checkpoint if name == "resumed" else 0
    for step in starts.steps(name):
        if step["others"]:
            step["others"] = {**step["others"], "a tensor [2]": other(values(step["number"] + begun), "unnamed")}


def test_average_in_a_dictionary(tmp_path: Path):
    """It starts again from the weights, and never catches up."""
    starts = Starts(Training())
    dictionary(starts, "resumed", lambda number: f"from the model {number}")
    finding = only(starts, tmp_path)
    assert (finding.code, finding.names) == ("buffers", ("a tensor [2]",))


def test_a_copy_of_the_first_weights_is_no_average(tmp_path: Path):
    starts = Starts(Training())
    for name in ("undisturbed", "again", "killed"):
        dictionary(starts, name, lambda number: "the first weights")
    dictionary(starts, "resumed", lambda number: "the loaded weights")
    assert codes(starts, tmp_path) == []


def test_one_look_at_tensors_without_a_name_is_not_enough(tmp_path: Path):
    starts = Starts(Training(steps=18))
    dictionary(starts, "resumed", lambda number: f"of the moment {number}")
    assert codes(starts, tmp_path) == []


def written(starts: Starts, name: str = "resumed") -> list[dict]:
    return [event["content"] for event in getattr(starts, name)[0] if event["event"] == "written"]


def test_average_in_the_next_checkpoint(tmp_path: Path):
    starts = Starts(Training())
    written(starts)[0]["ema.weight"] = "0" * 16
    finding = only(starts, tmp_path)
    assert (finding.code, finding.names, finding.steps) == ("buffers", ("ema.weight",), (18,))


def test_counter_in_the_next_checkpoint(tmp_path: Path):
    starts = Starts(Training())
    for content in written(starts):
        content["step"] -= 12
    finding = only(starts, tmp_path)
    assert (finding.code, finding.names) == ("counter", ("step",))
    assert finding.evidence == ("step: 6 instead of 18",)


def test_a_scheduler_in_the_next_checkpoint(tmp_path: Path):
    """Its learning rate may be equal up to the end of the audited run."""
    starts = Starts(Training())
    for name in ("undisturbed", "again", "resumed"):
        for content in written(starts, name):
            count = content["step"] - 12 * (name == "resumed")
            content.update({"sched._step_count": count + 1, "sched.last_epoch": count, "sched.gamma": 0.5})
    finding = only(starts, tmp_path)
    assert (finding.code, set(finding.names)) == ("learning-rate", {"sched._step_count", "sched.last_epoch"})
    assert finding.evidence == ("sched._step_count: 7 instead of 19", "sched.last_epoch: 6 instead of 18")


def test_a_list_that_starts_empty(tmp_path: Path):
    starts = Starts(Training())
    for name in ("undisturbed", "again", "resumed"):
        for content in written(starts, name)[-1:]:
            content.update({f"losses[{place}]": place / 7 for place in range(24 if name != "resumed" else 12)})
    finding = only(starts, tmp_path)
    assert finding.code == "counter"
    assert finding.text.endswith("after step 24, losses[...]")
    assert finding.evidence == ("losses[12]: none instead of 1.71429",)


def test_counter_in_the_name_of_a_file(tmp_path: Path):
    starts = Starts(Training(save_name="out/step-N.pt"))
    for event in starts.resumed[0]:
        if event["event"] == "renamed":
            event["target"] = event["target"].replace("18", "6").replace("24", "12")
    finding = only(starts, tmp_path)
    assert finding.code == "counter"
    assert "step-6.pt instead of step-18.pt" in finding.evidence[0]


def test_times_paths_and_streams_in_checkpoints_are_not_blamed(tmp_path: Path):
    starts = Starts(Training())
    changes = {"saved_time": 99.0, "rng": "f" * 16, "args.out": "elsewhere", "args.start_epoch": 1, "at": 1.7e9}
    for content in written(starts):
        content.update(changes)
    assert codes(starts, tmp_path) == []


def test_what_differs_by_chance_is_no_evidence(tmp_path: Path):
    starts = Starts(Training())
    for name in ("again", "resumed"):
        for content in written(starts, name):
            content.update({"ema.weight": f"{len(name):016x}", "speedup": len(name)})
        starts.from_step(
            1, lambda step: step["calls"][0].update({"in": f"{step['calls'][0]['in']} {step['number']}"}), name
        )
    for content in written(starts, "undisturbed"):
        content["speedup"] = 1
    assert codes(starts, tmp_path) == []


def test_calls_before_the_checkpoint_are_no_evidence(tmp_path: Path):
    """A closure is called again at the end of a step, which is before the next step and before the checkpoint."""
    starts = Starts(Training(micro_batches=3))
    starts.steps("resumed")[0]["calls"][:2] = []
    assert codes(starts, tmp_path) == []
    starts.steps("resumed")[0]["gradients"] = {"net0.weight": "of the last micro-batch"}
    assert codes(starts, tmp_path / "lost") == ["rows"]


def test_files_that_one_start_writes_are_no_evidence(tmp_path: Path):
    starts = Starts(Training(save_name="out/step-N.pt"))
    starts.resumed[0] += [
        {**event, "path": "out/best.pt"} for event in starts.resumed[0] if event["event"] == "written"
    ]
    assert codes(starts, tmp_path) == []


def test_the_length_of_a_log_is_no_counter():
    """It varies with the digits of the times in it."""
    assert saved_faults._kind("state.pt", "log_offset", 2354, 2310) is None
    assert saved_faults._kind("state.pt", "offset", 2354, 2310) == "counter"
