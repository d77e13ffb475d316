"""Putting the redirections in place. Not here: what they are, see ``devices``, ``cuda`` and ``training``."""

from __future__ import annotations

from torch.jit import _builtins

from harness.apex.on_cpu import count, cuda, devices, training
from harness.apex.patches import patches


def redirect_cuda() -> None:
    """From now on what this process asks of CUDA is done on the CPU, until ``harness.apex.uninstall``.

    Names taken from torch before (``from torch import zeros``) keep their old meaning: call it before the script runs.
    """
    count.forget()
    rows = [row for module in (devices, cuda, training) for row in module.rows()]
    for owner, name, replacement in rows:
        operation = _builtins._find_builtin(vars(owner).get(name))
        if operation is not None:  # torch.jit.script knows its functions by identity
            patches.set_item(_builtins._get_builtin_table(), id(replacement), operation)
        patches.set(owner, name, replacement)
