"""Hooks: examples for docs/hooks.md, and odd ones for tests."""

from __future__ import annotations

from typing import Any

import torch

from harness.training.run import Run


class Unfreeze:
    """Trains all layers after some epochs. Before, optimizer.groups gives some of them lr_scale 0.

    The factors are in the state of the optimizer, so this needs none.
    """

    def __init__(self, epochs: int = 1) -> None:
        self.epochs = epochs

    def after_evaluation(self, run: Run, report: dict[str, Any]) -> None:
        if run.state.epoch >= self.epochs:
            for group in run.optimizer.param_groups:
                group["lr_scale"] = 1.0


class Thaw:
    """Trains the parameters whose names begin with ``prefix`` from step ``step`` on. Until then they get no gradients,
    which also saves the time for them."""

    def __init__(self, prefix: str, step: int) -> None:
        self.prefix, self.step = prefix, step

    def before_training(self, run: Run) -> None:
        for name, param in run.module.named_parameters():
            if name.startswith(self.prefix):
                param.requires_grad_(run.state.step >= self.step)

    after_step = before_training


class Gradients:
    """Logs a histogram of the gradients of each layer, and their limits, as lines of metrics.jsonl."""

    def __init__(self, every: int = 100, bins: int = 10) -> None:
        self.every, self.bins = every, bins

    def after_step(self, run: Run) -> None:
        if run.state.step % self.every == 0 and not run.state.skipped_in_a_row:  # after an overflow they are infinite
            named = [(name, param.grad) for name, param in run.module.named_parameters() if param.grad is not None]
            found = {}
            for name, gradient in named:
                counts, edges = torch.histogram(gradient.float().cpu(), self.bins)
                found[name] = {"counts": counts.tolist(), "from": edges[0].item(), "to": edges[-1].item()}
            run.tracker.log("gradients", {"step": run.state.step, "epoch": run.state.epoch, **found})


class Drift:
    """Lowers the learning rate of later parameters a little at each step, and forgets after a kill how often."""

    def __init__(self) -> None:
        self.calls = 0

    def after_step(self, run: Run) -> None:
        self.calls += 1
        run.optimizer.param_groups[-1]["lr_scale"] = 0.9**self.calls


class SavedDrift(Drift):
    """Remembers it, and ends training at a step; asks for a stop and another checkpoint on the way."""

    def __init__(self, end: int = 0) -> None:
        super().__init__()
        self.end, self.checkpoints = end, 0

    def after_step(self, run: Run) -> str | None:
        super().after_step(run)
        return "enough" if self.calls == self.end else None

    def before_checkpoint(self, run: Run) -> None:
        self.checkpoints += 1

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class StartsOver:
    """Counts steps since the last one of every four; a resume starts the count over. It is equal again by the next
    checkpoint, and would decide something only after more steps than any test trains."""

    def __init__(self) -> None:
        self.waited = 0

    def before_training(self, run: Run) -> None:
        self.waited = 0

    def after_step(self, run: Run) -> str | None:
        self.waited = waited_after(run.state.step, self.waited)
        return "enough" if self.waited == 100 else None

    def state_dict(self) -> dict[str, int]:
        return {"waited": self.waited}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.waited = state["waited"]


class SchedulerStartsOver(torch.optim.lr_scheduler.LRScheduler):
    """The same as a schedule, whose state_dict and load_state_dict do not fit each other."""

    waited = 0

    def get_lr(self) -> list[float]:
        self.waited = waited_after(self.last_epoch + 1, self.waited)
        return [group["lr"] * (0.1 if self.waited == 100 else 1.0) for group in self.optimizer.param_groups]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state.items() if key != "waited"})


def waited_after(step: int, waited: int) -> int:
    return 0 if step % 4 == 2 else waited + 1


class OnOneRank:
    """Ends training at step 5, as rank 1 decides."""

    def after_step(self, run: Run) -> str | None:
        return "only here" if run.state.step == 5 and run.runtime.rank == 1 else None


class FailsOnOneRank:
    def after_step(self, run: Run) -> None:
        if run.state.step == 2 and run.runtime.rank == 1:
            raise ArithmeticError("a rule went wrong")
