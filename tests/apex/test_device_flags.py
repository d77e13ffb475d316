"""Overflow flags that stay on the device: the same steps, scales and bits as with a host that waits for each flag.

On the GPU of ``tests.syncs``, compared with the CPU, where every flag is read at once.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from harness.apex import amp
from harness.apex.amp import device_flags, scaler
from harness.apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from harness.apex.parallel.LARC import LARC
from tests.apex.shared import backward, same, tensors_in
from tests.syncs import CUDA, counted_syncs

pytestmark = pytest.mark.host

STAY = {
    "FusedAdam": lambda p: FusedAdam(p, lr=0.01, weight_decay=0.1),
    "FusedAdam, L2, uncorrected": lambda p: FusedAdam(p, lr=0.01, adam_w_mode=False, bias_correction=False),
    "FusedAdam, capturable": lambda p: FusedAdam(p, lr=0.01, capturable=True),
    "FusedSGD": lambda p: FusedSGD(p, lr=0.01),
    "FusedSGD, momentum": lambda p: FusedSGD(p, lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "FusedSGD, decay after": lambda p: FusedSGD(p, 0.01, 0.9, weight_decay=0.1, wd_after_momentum=True),
    "FusedLAMB": lambda p: FusedLAMB(p, lr=0.01),
    "FusedLAMB, sums": lambda p: FusedLAMB(p, lr=0.01, weight_decay=0.0, grad_averaging=False, max_grad_norm=None),
    "torch Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True, amsgrad=True),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, fused=True),
}
WAIT = {
    "FusedNovoGrad": lambda p: FusedNovoGrad(p, lr=0.01),
    "FusedAdam, clips": lambda p: FusedAdam(p, lr=0.01, max_grad_norm=1.0),
    "LARC": lambda p: LARC(FusedSGD(p, lr=0.01, momentum=0.9)),
    "torch Adam, not fused": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
}
FAST = ("FusedAdam", "FusedSGD, momentum", "FusedLAMB, sums", "torch SGD", "FusedNovoGrad")
OVERFLOWS = (0, 4, 5, 9)  # the first before any state exists
STEPS = 12


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    monkeypatch.setattr(scaler, "WINDOW", 3)
    monkeypatch.setattr(device_flags, "READ_EVERY", 6)  # so steps are taken before the host knows of a skip
    yield
    device_flags.flags.clear()


def slow(name):
    """The mark of an optimizer whose update with ``found_inf`` is like that of one in ``FAST``."""
    return () if name in FAST else pytest.mark.slow


class Run:
    """O1 on ``device``, with data and overflows that depend on the step alone."""

    def __init__(self, name, device, micro=1, level="O1"):
        amp.reset()
        torch.manual_seed(0)
        self.device, self.micro = device, micro
        self.model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(device)
        groups = [{"params": self.model[0].parameters()}, {"params": self.model[2].parameters(), "lr": 0.02}]
        self.optimizer = {**STAY, **WAIT}[name](groups)
        scale = {} if level == "O1" else {"loss_scale": "dynamic"}
        amp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0, max_loss_scale=768.0, **scale)
        amp._amp_state.loss_scalers[0]._loss_scale = 2.0**10
        self.losses = []

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
        for micro in range(self.micro):
            x = torch.randn(5, 4, generator=generator)
            if number in OVERFLOWS and micro == 0:
                x = x * 1e20
            with amp.disable_casts():
                loss = self.model(x.to(self.device)).pow(2).mean()
            backward(loss, self.optimizer, delay_unscale=micro < self.micro - 1)
            self.losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def results(self):
        """Everything that a script may see, as tensors on the host."""
        state = tensors_in(self.optimizer.state_dict())
        counts = [torch.tensor(float(g["step"])) for g in self.optimizer.param_groups if "step" in g]
        weights = [param.detach() for param in self.model.parameters()]
        return [tensor.cpu().clone() for tensor in (*weights, *state, *counts, *self.losses)], amp.state_dict()


@pytest.mark.parametrize(
    ("name", "micro"),
    [("FusedAdam", 2), ("FusedNovoGrad", 2), ("LARC", 1), *(pytest.param(name, 1, marks=slow(name)) for name in STAY)],
)
def test_results_are_those_of_a_host_that_waits(name, micro):
    after_each = []
    run = Run(name, "cpu", micro)
    for step in range(STEPS):
        run.step(step)
        after_each.append(run.results())
    scales = [state["loss_scaler0"]["loss_scale"] for _, state in after_each]
    assert scales == [512, 512, 512, 768, 384, 192, 192, 192, 384, 192, 192, 192]
    with counted_syncs():
        asked = Run(name, CUDA, micro)
        for step, (expected, state) in enumerate(after_each):
            asked.step(step)
            found, found_state = asked.results()
            assert found_state == state, step
            assert same(found, expected), step
        late = Run(name, CUDA, micro)
        for step in range(STEPS):
            late.step(step)
        found, found_state = late.results()
        assert found_state == after_each[-1][1]
        assert same(found, after_each[-1][0])


@pytest.mark.parametrize(
    ("name", "level"),
    [("FusedAdam", "O0"), *(pytest.param(name, "O1", marks=slow(name)) for name in [*STAY, *WAIT])],
)
def test_waits_of_a_step(name, level):
    """None, however often steps overflow, once the optimizer's state exists; else one."""
    with counted_syncs() as syncs:
        run = Run(name, CUDA, level=level)
        for step in range(3):
            run.step(step)
        for step in range(3, STEPS):
            syncs.clear()
            run.step(step)
            where = [sync.where for sync in syncs if "harness/" in sync.line]
            assert where == ([] if name in STAY else ["harness/apex/amp/scaler.py <genexpr>"]), step
        assert len(device_flags.flags._waiting) <= 3 * device_flags.READ_EVERY
        run.results()
        assert not device_flags.flags._waiting


@pytest.mark.parametrize(("level", "waits"), [("O0", 0), ("O1", 0), ("O2", 1), ("O3", 0), ("O4", 0), ("O5", 0)])
def test_waits_by_level(level, waits):
    """With a fused optimizer and the level's own scale, as docs/apex.md has it."""
    with counted_syncs() as syncs:
        amp.reset()
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(CUDA)
        optimizer = FusedAdam(model.parameters(), lr=1e-3)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        x = torch.ones(5, 4, device=CUDA)
        for step in range(8):
            syncs.clear()
            backward(model(x).float().pow(2).mean() * 1e-3, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            assert len(syncs) == waits or step == 0, [sync.line for sync in syncs]


def test_host_reads_a_window_late_without_waiting(caplog):
    with counted_syncs() as syncs:
        run = Run("FusedAdam", CUDA)
        amp._amp_state.verbosity = 1
        for step in range(8):
            run.step(step)
        assert "reduces the loss scale" in caplog.text
        syncs.clear()
        steps = [group["step"] for group in run.optimizer.param_groups]
        assert steps == [6, 6], "of steps 1 to 7, step 4 is known to be skipped, and step 5 not yet"
        assert not syncs


def test_copy_of_an_optimizer_has_the_right_count():
    """The host hears of the skipped step only after the copy, which nobody tells."""
    with counted_syncs():
        run = Run("FusedAdam", CUDA)
        for step in range(1, 5):
            run.step(step)
        assert run.optimizer.param_groups[0]["step"] == 4, "not known yet"
        twin = copy.deepcopy(run.optimizer)
        assert [group["step"] for group in (*twin.param_groups, *run.optimizer.param_groups)] == [3] * 4
        run.step(5)
        amp.reset()
        assert run.optimizer.param_groups[0]["step"] == 3, "the optimizer goes on without amp"


def test_skip_is_known_when_asked():
    with counted_syncs() as syncs:
        run = Run("FusedAdam", CUDA)
        for step in (1, 2):
            run.step(step)
        for overflows in (True, False):
            x = torch.full((5, 4), 1e20 if overflows else 1.0, device=CUDA)
            with amp.disable_casts():
                backward(run.model(x).pow(2).mean(), run.optimizer)
            syncs.clear()
            assert run.optimizer._amp_stash.already_patched == overflows
            assert len(syncs) == 1
            before = [param.detach().clone() for param in run.model.parameters()]
            run.optimizer.step()
            assert same(before, run.model.parameters()) == overflows
            run.optimizer.zero_grad()


def test_closure_after_an_overflow_is_refused():
    with counted_syncs():
        run = Run("torch SGD", CUDA)
        for step in (1, 2):
            run.step(step)
        with amp.disable_casts():
            backward(run.model(torch.full((5, 4), 1e20, device=CUDA)).pow(2).mean(), run.optimizer)
        with pytest.raises(RuntimeError, match="closure"):
            run.optimizer.step(lambda: None)


def test_written_scale_takes_effect():
    with counted_syncs():
        run = Run("FusedSGD", CUDA)
        for step in (1, 2):
            run.step(step)
        (own,) = amp._amp_state.loss_scalers
        own._loss_scale, own._unskipped = 64.0, 0
        run.step(3)
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 64.0, "unskipped": 1}
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 32.0, "unskipped": 2}})
        run.step(6)
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 64.0, "unskipped": 0}


def test_counter_above_the_window_grows_the_scale_on_the_device_too():
    """A checkpoint may have set it higher. The next loss is multiplied by the scale there."""
    with counted_syncs():
        run = Run("FusedSGD", CUDA)
        for step in (1, 2):
            run.step(step)
        (own,) = amp._amp_state.loss_scalers
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 32.0, "unskipped": scaler.WINDOW + 4}})
        for step in (3, 6):  # the second is counted from zero
            run.step(step)
            assert float(own.factor) == own.loss_scale() == 64.0


def test_hooks_of_a_step_see_applied_steps_only():
    with counted_syncs():
        run, calls = Run("FusedAdam", CUDA), []
        run.optimizer.register_step_post_hook(lambda *_: calls.append(1))
        for step in range(STEPS):
            run.step(step)
        assert len(calls) == STEPS - len(OVERFLOWS)
