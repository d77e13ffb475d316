"""``amp.state_dict`` and ``amp.load_state_dict``: the loss scalers, in Apex's form (contract 1.4).

Master weights travel in the optimizer's state dict, see ``saved_masters``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from harness.apex.amp.master_weights import all_params
from harness.apex.amp.messages import messages
from harness.apex.amp.state import _amp_state


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield what ``optimizer`` steps on, group by group; under O2 and O5 the float32 masters, once they exist."""
    return all_params(optimizer)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``; empty while amp is off.

    The entries are written into ``destination`` if given, which is returned.
    """
    result = OrderedDict() if destination is None else destination
    if _amp_state.opt_properties.enabled:
        for i, scaler in enumerate(_amp_state.loss_scalers):
            result[f"loss_scaler{i}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return result


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Restore the scalers from what ``state_dict`` returned, here or in Apex; entries are matched by order.

    A dynamic scale is not loaded into a static scaler, which would then train with it frozen; a warning is logged.
    Raises ValueError, before anything changes, for a scale with which nothing can train (0, inf, NaN) or a negative
    count, and RuntimeError for keys that are not a scaler's, after applying the others.
    """
    saved = [key for key in state_dict if "loss_scaler" in key]
    for key in saved:
        _check(key, state_dict[key]["loss_scale"], state_dict[key]["unskipped"])
    scalers = _amp_state.loss_scalers if _amp_state.opt_properties.enabled else []
    if saved and not scalers:
        _warn(
            f"loss scalers in the amp state: {len(saved)}, but amp is off here (not initialized, or initialized with "
            "enabled=False): nothing is restored. Call amp.initialize before amp.load_state_dict."
        )
    elif len(saved) != len(scalers):
        _warn(
            f"loss scalers in the amp state: {len(saved)}; in this run: {len(scalers)}; restored: "
            f"{min(len(saved), len(scalers))}. To restore all of them, initialize with the "
            "num_losses and opt_level of the checkpoint."
        )
    for key, scaler in zip(saved, scalers, strict=False):
        scale, unskipped = state_dict[key]["loss_scale"], state_dict[key]["unskipped"]
        if scaler.dynamic:
            scaler._loss_scale, scaler._unskipped = float(scale), int(unskipped)
        elif scale == scaler.loss_scale():
            scaler._unskipped = int(unskipped)
        else:
            _warn(
                f"{key} of the checkpoint has a loss scale of {scale:g}, but this run has a static loss scale of "
                f'{scaler.loss_scale():g}, which is kept. Pass loss_scale="dynamic" to amp.initialize '
                "to continue from the saved scale."
            )
    unexpected = [key for key in state_dict if "loss_scaler" not in key]
    if unexpected:
        raise RuntimeError(
            f"Unexpected key(s) in the amp state: {', '.join(map(repr, unexpected))}. It may contain only "
            "loss_scaler0, loss_scaler1, ...; pass what amp.state_dict() returned, not the whole checkpoint."
        )


def _check(key: str, scale: float, unskipped: int) -> None:
    if not (math.isfinite(scale) and scale > 0 and unskipped >= 0):
        raise ValueError(
            f"{key} of the amp state has loss_scale={scale} and unskipped={unskipped}; the first must be finite and "
            "above 0 (Apex's scale fell to 0 when every step overflowed), the second at least 0. Leave out "
            "amp.load_state_dict to start with a new loss scale."
        )


def _warn(text: str) -> None:
    messages.warn(f"Warning: {text}", always=True)  # Apex's warnings of this function ignore verbosity
