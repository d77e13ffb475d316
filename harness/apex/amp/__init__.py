"""Mixed precision by opt level, under the names of Apex's ``amp``.

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()

Levels: O0 float32; O1 casts around operations (float16), O4 the same in bfloat16; O2 float16 model with float32 batch
norm and master weights, O5 the same in bfloat16; O3 float16 throughout. ``reset``, which Apex lacks, undoes everything.

Start reading at ``initialize``, then ``scale_loss`` with ``gradients`` and ``scaler``. Casts are in ``model_casts``
(O0, O2, O3, O5) and ``cast_engine`` (O1, O4); changes to optimizers in ``optimizer_patches`` and ``stash``.
"""

from __future__ import annotations

from harness.apex.amp.cast_engine import disable_casts
from harness.apex.amp.checkpoint import load_state_dict, master_params, state_dict
from harness.apex.amp.function_casts import (
    bfloat16_function,
    float_function,
    half_function,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from harness.apex.amp.handle import init
from harness.apex.amp.initialize import initialize, reset
from harness.apex.amp.scale_loss import scale_loss
from harness.apex.amp.state import _amp_state

__all__ = [
    "_amp_state",
    "bfloat16_function",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "reset",
    "scale_loss",
    "state_dict",
]
