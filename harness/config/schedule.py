"""The learning-rate schedules and their settings, with the names that other libraries give them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from harness.config.base import Positive, Section

_MEANT = {  # by their names in torch, timm and transformers, without case and punctuation
    "one_cycle": ["onecycle", "onecyclelr", "1cycle"],
    "plateau": ["plateaulr", "reduceonplateau", "reducelronplateau"],
    "cosine_restarts": [
        "cosinewithrestarts", "cosinerestart", "cosinewarmrestarts", "cosineannealingwarmrestarts", "sgdr",
        "cosinewithhardrestarts",
    ],
    "wsd": ["warmupstabledecay", "trapezoidal", "trapezoid"],
    "cosine": ["cosineannealing", "cosineannealinglr", "cosinewithwarmup", "cosinelr", "cosinewithminlr"],
    "step": ["steplr", "multistep", "multisteplr"],
    "polynomial": ["poly", "polylr", "polynomiallr", "linear", "linearlr", "linearwithwarmup"],
    "constant": ["none", "constantlr", "constantwithwarmup", "fixed"],
}  # fmt: skip

SPAN_THE_RUN = ("cosine", "one_cycle", "polynomial", "wsd")  # the others do not depend on the length of the run


def _name(value: Any) -> Any:
    """Refuse the names of other libraries with the one to use."""
    word = re.sub("[^a-z0-9]", "", str(value).lower())
    meant = next((name for name, others in _MEANT.items() if word in (*others, name.replace("_", ""))), value)
    if meant == value:
        return value
    line = " (a straight line with schedule.power=1, the default)" if word.startswith("linear") else ""
    raise ValueError(f"{value!r} is not allowed; did you mean schedule.name={meant}{line}?")


class ScheduleSection(Section):
    name: Annotated[
        Literal["constant", "cosine", "cosine_restarts", "one_cycle", "plateau", "polynomial", "step", "wsd"],
        BeforeValidator(_name),
    ] = "constant"
    """Shape of the learning rate after the warm-up. The schedule counts applied updates: a step that the
    loss scaler skips does not advance it. `plateau` lowers the rate after evaluations without a better
    checkpoint.best_metric; `wsd` is warm-up, stable, decay.
    """
    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    """Epochs of linear warm-up from almost zero; may be a fraction. Cannot be combined with warmup_steps."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Updates of linear warm-up."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Lowest learning rate of cosine, cosine_restarts, plateau, polynomial and wsd, scaled as optimizer.lr is."""
    milestones: tuple[Annotated[float, Field(gt=0)], ...] = Field(default=(), strict=False)
    """Epochs at which `step` multiplies the learning rate by gamma."""
    gamma: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Factor by which `step` multiplies the learning rate."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of `polynomial`; 1 is a straight line."""
    cycle_epochs: Annotated[float, Field(gt=0)] | None = None
    """Length of the first period of `cosine_restarts` (T_0 in torch), in epochs; may be a fraction."""
    cycle_mult: Positive = 1
    """For `cosine_restarts`: each period is this many times as long as the one before (T_mult in torch)."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of all updates, at the end, in which `wsd` lowers the learning rate."""
    decay_type: Literal["linear", "cosine", "sqrt"] = "linear"
    """Shape of the decay of `wsd`; sqrt: 1 - sqrt(progress)."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Factor by which `plateau` multiplies the learning rate."""
    patience: Annotated[int, Field(ge=0)] = 10
    """`plateau` lowers the learning rate after more than this many evaluations in a row without a better metric."""
    threshold: Annotated[float, Field(ge=0, lt=1)] = 1e-4
    """For `plateau`: a metric is better if it improves by this share of the best one."""
    cooldown: Annotated[int, Field(ge=0)] = 0
    """For `plateau`: evaluations to ignore after each reduction."""
    pct_start: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of all updates in which `one_cycle` raises the learning rate."""
    div_factor: Annotated[float, Field(ge=1)] = 25.0
    """`one_cycle` starts at optimizer.lr / div_factor."""
    final_div_factor: Annotated[float, Field(ge=1)] = 1e4
    """`one_cycle` ends at its first learning rate / final_div_factor."""
    cycle_momentum: bool = True
    """`one_cycle` lowers the momentum (beta1 for Adam) from max_momentum to base_momentum while the learning rate
    rises, and raises it again; false: only the learning rate changes.
    """
    base_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.85
    """Momentum of `one_cycle` at the highest learning rate."""
    max_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Momentum of `one_cycle` at the lowest learning rates."""


# The settings of some schedules only. All others have warmup_epochs and warmup_steps, except one_cycle.
USED_BY: dict[str, tuple[str, ...]] = {
    "min_lr": ("cosine", "cosine_restarts", "plateau", "polynomial", "wsd"),
    **dict.fromkeys(("milestones", "gamma"), ("step",)),
    "power": ("polynomial",),
    **dict.fromkeys(("cycle_epochs", "cycle_mult"), ("cosine_restarts",)),
    **dict.fromkeys(("decay_ratio", "decay_type"), ("wsd",)),
    **dict.fromkeys(("factor", "patience", "threshold", "cooldown"), ("plateau",)),
    **dict.fromkeys(
        ("pct_start", "div_factor", "final_div_factor", "cycle_momentum", "base_momentum", "max_momentum"),
        ("one_cycle",),
    ),
}
