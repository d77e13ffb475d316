"""The Apex recipe on torch alone: ``from harness.apex import amp, parallel``.

Mixed precision by opt level (``amp``) and gradient averaging over ranks (``parallel``), on CPU and accelerators
alike, in float16 or bfloat16. Written from the Apex contract, a point-by-point description of what Apex did; nothing
here knows the rest of the harness. Where this code differs from Apex on purpose the docstring says so.
"""

from __future__ import annotations

from harness.apex import amp, parallel

__all__ = ["amp", "parallel"]
