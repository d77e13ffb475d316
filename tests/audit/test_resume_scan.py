"""Attributes that no state_dict holds are recorded, and sources of chance are named."""

from __future__ import annotations

import gc
import itertools
import json
import random
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from harness.audit import forgotten
from harness.audit.starts import HOOK
from harness.audit.verdict import Finding
from harness.data.arrays import Arrays
from harness.data.loader import Loader


@pytest.fixture(autouse=True)
def hook(monkeypatch):
    monkeypatch.syspath_prepend(str(HOOK))


class Everything(nn.Module):
    """One attribute of each kind that can change."""

    shared = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("dropped", torch.zeros(2), persistent=False)
        self.plain, self.nested, self.counter = torch.zeros(2), {"a": [1, {"b": 2}]}, itertools.count()
        self.chance, self.stream, self.torch_stream = random.Random(0), np.random.default_rng(0), torch.Generator()
        self.itself = self
        self.positions = (index for index in range(9))


CHANGES = {
    "kept": lambda model: model.kept.add_(1),
    "weights": lambda model: model.layer.weight.data.add_(1),
    "statistics": lambda model: model.norm(torch.ones(3, 2)),
    "dropped": lambda model: model.dropped.add_(1),
    "plain": lambda model: model.plain.add_(1),
    "nested": lambda model: model.nested["a"][1].update(b=3),
    "counter": lambda model: next(model.counter),
    "chance": lambda model: model.chance.random(),
    "stream": lambda model: model.stream.random(),
    "torch_stream": lambda model: torch.rand(1, generator=model.torch_stream),
    "shared": lambda model: setattr(Everything, "shared", Everything.shared + 1),
    "layer.extra": lambda model: setattr(model.layer, "extra", 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_no_state_dict_holds(name):
    import resume_scan

    gc.collect()
    model = Everything()
    before = resume_scan.attributes([model], [])
    CHANGES[name](model)
    after = resume_scan.attributes([model], [])
    found = {key.partition(" ")[0] for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    found = {key for key in found if key.startswith("Everything.")}
    saved = name in ("kept", "weights", "statistics")
    expected = {"nested": "Everything.nested['a'][1]['b']"}.get(name, f"Everything.{name}")
    assert found == (set() if saved else {expected})


class Trainer:
    def __init__(self) -> None:
        self.best = 0.5


def test_objects_of_the_script_are_found_and_those_of_torch_are_not():
    import resume_scan

    trainer, optimizer = Trainer(), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    found = resume_scan.attributes([], [optimizer])
    assert found[f"Trainer.best ({__name__}.Trainer)"] == "0.5"
    assert not [name for name in found if name.startswith(("SGD._", "SGD.state"))]
    assert trainer.best == 0.5
    found = resume_scan.attributes([nn.MultiheadAttention(2, 1)], [])
    assert found
    ours = [name for name in found if name.startswith("MultiheadAttention")]
    assert not [name for name in ours if "._" in name]  # such as those that DDP sets in its first step


def test_a_mapping_that_cannot_be_read_is_left_out():
    import resume_scan

    class Lazy(dict):
        def items(self):
            raise ImportError("what it needs is not installed")

    assert dict(resume_scan._walk("all", {"lazy": Lazy(), "number": 1}, {}, 0))["all['number']"] == "1"


def test_no_code_of_an_object_runs_to_find_its_class():
    import resume_scan

    class Deprecated:
        def __getattribute__(self, name):
            warnings.warn(f"{name} is deprecated", FutureWarning, stacklevel=2)
            return super().__getattribute__(name)

    old = Deprecated()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert any(each is old for each in resume_scan._objects())


def explained(finding: Finding, *starts) -> Finding:
    return forgotten.explained([finding], *starts)[0]


def test_the_number_of_variables_of_a_module_is_no_state():
    import resume_scan

    found = resume_scan.attributes([], [])
    assert f"{__name__}['CHANGES'] (length)" in found
    assert f"{__name__} (length)" not in found


def _start(*steps: tuple[str | None, dict[str, str]]):
    """Return a start whose steps have inputs of two rows and attributes."""
    calls = [SimpleNamespace(rows=2)]
    each = [SimpleNamespace(attributes=found, inputs=(rows,), calls=calls) for rows, found in steps]
    return SimpleNamespace(processes=[SimpleNamespace(rank=0, order=0, steps=each)], of_harness=False)


def test_what_was_restored_follows_from_what_differs():
    observed = _start(*(("x", {"Thaw.ema": value, "Thaw.lost": value}) for value in "023"))
    resumed = _start(("x", {"Thaw.ema": "2", "Thaw.lost": "0"}), ("x", {"Thaw.ema": "4", "Thaw.lost": "1"}))
    found = explained(Finding("random-streams", "", steps=(1,)), observed, observed, resumed).evidence
    assert found == (
        "Thaw.lost is 0 instead of 2: no checkpoint restores it",
        "also not as it was, perhaps only as a result: Thaw.ema",
    )


def test_the_next_batch_of_a_prefetcher_follows_from_other_rows():
    observed, resumed = (
        _start(*((row, {"Prefetcher.next (m.Prefetcher)": f"array of (2, 3) ({row})"}) for row in rows))
        for rows in ("ab", "c")
    )
    found = explained(Finding("row-order", "", steps=(1,)), observed, observed, resumed).evidence
    assert found == ("also not as it was, perhaps only as a result: Prefetcher.next (m.Prefetcher)",)


def test_what_a_step_computes_from_other_rows_is_not_called_forgotten():
    """Not a counter that is off, which comes before the generator that it seeds."""

    def start(*steps: tuple[str, ...]):
        names = ("m['epoch']", "m['mean']", "m['sum']", "DataLoader.generator")
        return _start(*((each[0], dict(zip(names, each[1:], strict=True))) for each in steps))

    observed = start(("a", "0", "0.1", "2", "g"), ("b", "2", "0.5", "20", "h"), ("c", "2", "0.6", "29", "h"))
    resumed = start(("d", "1", "0.4", "21", "k"), ("e", "1", "0.7", "33", "k"))
    for each in (*observed.processes[0].steps, *resumed.processes[0].steps):
        each.attributes["DataLoader.generator"] = f"torch.Generator at {each.attributes['DataLoader.generator']}"
    found = explained(Finding("row-order", "", steps=(2,)), observed, observed, resumed)
    assert found.evidence == (
        "m['epoch'] is 1 instead of 2: it is restored wrongly or not at all",
        "DataLoader.generator, a torch.Generator, is not as it was",
        "also not as it was, perhaps only as a result: m['mean'], m['sum']",
    )
    assert found.advice.startswith("let the resume set m.epoch to 2, not 1; if that does not suffice, let gen be the")
    found = explained(Finding("other", "equal rows", steps=(2,)), observed, observed, resumed)
    assert "m['mean'] is 0.4 instead of 0.5: it is restored wrongly or not at all" in found.evidence


def test_only_what_training_changes_and_equal_starts_share_is_forgotten():
    def start(*attributes: dict[str, str]):
        return _start(*((each.get("m['x']"), each) for each in attributes))

    constant, clock = {"path": "a"}, [{"time": str(number)} for number in range(5)]
    observed = start({**constant, **clock[0], "calls": "1"}, {}, {**constant, **clock[1], "calls": "7"})
    again = start({**constant, **clock[2], "calls": "1"}, {}, {**constant, **clock[3], "calls": "7"})
    resumed = start({"path": "b", **clock[4], "calls": "1"})
    unknown = Finding("other", "outputs differ", steps=(7,))

    def lines(finding: Finding, *starts) -> tuple[str, tuple[str, ...]]:
        added = explained(finding, *starts)
        return added.code, added.evidence

    found = ("calls is 1 instead of 7: no checkpoint restores it",)
    assert lines(unknown, observed, again, resumed) == ("unsaved-state", found)
    assert lines(replace(unknown, code="row-order"), observed, again, resumed) == ("row-order", found)
    assert lines(replace(unknown, steps=()), observed, again, resumed) == ("other", found), "it fails"
    assert lines(unknown, observed, again, start({})) == ("other", ())
    counter = replace(unknown, code="counter")
    assert lines(counter, observed, again, resumed) == ("counter", found)
    observed.of_harness = True
    assert lines(counter, observed, again, resumed) == ("unsaved-state", found), "the harness restores its counters"

    def batch(name: str, place: str) -> dict[str, str]:
        return {"m['x']": f"array of (2,) ({name})", "m['g']": f"torch.Generator at {place}"}

    observed, resumed = start(batch("a", "1"), batch("b", "2")), start(batch("c", "3"))
    generator = "m.g, a torch.Generator, is not as it was"
    rows = "also not as it was, perhaps only as a result: m['x']"
    assert lines(replace(unknown, code="row-order"), observed, observed, resumed)[1] == (generator, rows)
    order = "save m.g.get_state() as it is before the first batch of the epoch; after a resume, pass it to "
    order += "m.g.set_state() before that epoch's order is drawn, then skip the batches"
    stream = "save m.g.get_state() in each checkpoint; after a resume, pass it to m.g.set_state() before"
    for code, names, advice, has in (
        ("row-order", (), order, True), ("random-streams", ("m['g']", "a.b"), stream, True),
        ("random-streams", ("torch",), stream, False), ("rows", (), order, False),
    ):  # fmt: skip
        one = Finding(code, "rows differ", names=names)
        assert (explained(one, observed, observed, resumed).advice.startswith(advice)) is has
    rows = Finding("rows", "from step 1", steps=(1, 2))
    added = explained(rows, observed, observed, resumed)
    assert (added.code, added.evidence[0]) == ("rows", generator)
    assert added.advice.startswith(order)
    added = explained(replace(rows, steps=(2, 3)), observed, observed, resumed)
    assert added.advice == rows.advice, "the position is wrong, and what draws with it"
    mine, yours = (
        start(*({"DataLoader 2.generator": f"torch.Generator at {at}"} for at in ats)) for ats in ("12", "3")
    )
    advice = explained(replace(unknown, code="row-order"), mine, mine, yours).advice
    assert advice.startswith("let gen be the generator of your DataLoader 2: save gen.get_state() as")
    assert explained(Finding("rows", "from step 1", steps=(1,)), mine, mine, yours).remedy == ""

    stream = "torch.Generator at "
    mine, yours = (
        start(*({"total": at, "__main__['g']": stream + at, "DataLoader.generator": f"{stream}2{at}"} for at in ats))
        for ats in ("12", "3")
    )
    added = explained(replace(unknown, code="inputs"), mine, mine, yours)
    sums = "also not as it was, perhaps only as a result: total"
    assert (added.code, added.evidence) == ("inputs", ("g, a torch.Generator, is not as it was", sums))
    assert added.advice.startswith("save g.get_state() in each checkpoint; after a resume, pass it to g.set_state()")
    mine.of_harness = True
    advice = explained(replace(unknown, code="inputs"), mine, mine, yours).advice
    assert "row_seed(seed, epoch, row)" in advice
    assert "save g.get_state() in state_dict of a hook" in advice

    resumed.processes[0].steps[0].inputs = observed.processes[0].steps[1].inputs
    assert len(lines(unknown, observed, observed, resumed)[1]) == 2, "with equal rows, a tensor is state"


@pytest.mark.parametrize(
    ("labels", "order", "code"), [("bc", "23", "inputs"), ("xy", "23", "row-order"), ("bc", "22", "row-order")]
)
def test_other_inputs_of_the_right_rows(labels, order, code):
    """Labels show that the rows are right; a generator that is not drawn from at each step makes no noise."""

    def start(labels: str, places: str):
        steps = [
            SimpleNamespace(
                attributes={"y (train.py:9)": f"array of (4,) ({label})", "g (train.py:5)": f"torch.Generator at {at}"},
                inputs=(f"{label} with noise {at}",), calls=(SimpleNamespace(rows=4),),
            )
            for label, at in zip(labels, places, strict=True)
        ]  # fmt: skip
        return SimpleNamespace(processes=[SimpleNamespace(rank=0, order=0, steps=steps)], of_harness=False)

    observed, resumed = start("abc", f"1{order}"), start(labels, "45")
    optimizer, rows = (
        Finding("optimizer-state", "it differs", steps=(7,), names=("a.b",)),
        Finding("row-order", "unknown", steps=(7,)),
    )
    alone = explained(optimizer, observed, observed, resumed)
    assert alone.advice.startswith("save and load optimizer.state_dict(); save g.get_state()"), "both are lost"
    for finding in (replace(optimizer, code=code) for code in ("files", "hang", "length")):
        assert explained(finding, observed, observed, resumed).advice == finding.advice, "a generator cannot cause it"
    first, found = forgotten.explained([optimizer, rows], observed, observed, resumed)
    assert first == optimizer
    assert (found.code, found.place) == (code, "train.py:5")
    assert "g (train.py:5), a torch.Generator, is not as it was" in found.evidence
    assert found.text.startswith("at step 7, the rows are the right ones") == (code == "inputs")
    assert ("in each checkpoint" in found.advice) == (order == "23")


def test_generators_of_loaders_and_in_local_variables_are_found():
    import resume_scan

    def train() -> dict[str, str]:
        noise, chance = np.random.default_rng(0), random.Random(0)
        loader, other = (DataLoader([0, 1], shuffle=True, generator=torch.Generator()) for _ in range(2))
        ours = Loader(Arrays(np.zeros(1), np.zeros(1)), 0, torch.device("cpu"))._loader
        before = resume_scan.attributes([], [])
        [*loader], [*other], [*other], [*ours], noise.random(), chance.random()
        after = resume_scan.attributes([], [])
        return {name: text.partition(" at ")[0] for name, text in after.items() if text != before.get(name)}

    gc.collect()  # loaders of earlier tests have numbers, too
    found, first = train(), train.__code__.co_firstlineno
    noise, chance = (f"{name} (test_resume_scan.py:{first + 1})" for name in ("noise", "chance"))
    kinds = {"DataLoader.generator": "torch.Generator", "DataLoader 2.generator": "torch.Generator",
             noise: "numpy.random.Generator", chance: "random.Random"}  # fmt: skip
    assert {name: found.get(name) for name in kinds} == kinds
    assert not [name for name in found if "Watched" in name], "a loader of the harness"


def test_generators_of_the_script_are_found_and_the_global_ones_are_not():
    import resume_scan

    def states() -> set[str]:
        found = resume_scan.others(SimpleNamespace(roots=[]))
        return {f"{name.split()[0]} {each['digests']}" for name, each in found.items() if each["kind"] == "generator"}

    own = np.random.default_rng(7193), np.random.RandomState(7193), random.Random(7193)
    before = states()
    np.random.rand(), random.random()
    assert states() == before
    for each in own:
        each.random()
    kinds = {"numpy.random.Generator", "numpy.random.RandomState", "random.Random"}
    assert {state.split()[0] for state in states() - before} == kinds


def test_a_result_of_the_step_is_no_state():
    import resume_scan

    weight = torch.ones(2, requires_grad=True)
    assert resume_scan._value(weight.sum()) == resume_scan._value((2 * weight).sum())
    assert resume_scan._value(torch.ones(2)) != resume_scan._value(torch.zeros(2))


def test_operations_without_a_deterministic_implementation(tmp_path, monkeypatch):
    import resume_draws

    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: None)
    monkeypatch.setattr(torch, "set_warn_always", lambda _: None)
    shown: list[str] = []
    recorder = SimpleNamespace(plan={"records": str(tmp_path), "chance": True})
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *rest, **options: shown.append(str(message))
        resume_draws._warn_of_operations(resume_draws._Observer(recorder))
        warnings.warn("scatter_add_cuda_kernel does not have a deterministic implementation, but you set ...")
        warnings.warn("something else")
    (line,) = [json.loads(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert (line["stream"], line["function"], line["file"]) == ("operation", "scatter_add_cuda_kernel", __file__)
    assert shown == ["something else"]


def test_the_recorder_itself_is_not_searched_for_draws():
    """Its own calls would be passed to the profile function one by one, millions where a script has many objects."""
    from resume_recorder import guarded

    seen = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, called: seen.append(getattr(called, "__name__", "")))
    try:
        hash("the script's")
        guarded(lambda recorder: len("the recorder's"))(SimpleNamespace(failed=False))
        divmod(2, 1)
    finally:
        sys.setprofile(before)
    assert {"hash", "divmod"} <= {*seen}
    assert "len" not in seen
