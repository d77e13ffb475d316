"""``--device cpu``: run CUDA calls of a script on the CPU, so that a GPU script can be tried without a GPU.

Each module has a function ``replacements`` that lists the attributes of torch it replaces; ``redirect_cuda`` sets them
all, and ``harness.apex.uninstall`` restores them. A ``TorchFunctionMode`` would not work: it applies to one thread,
misses ``torch.cuda`` and class constructors, and adds a Python call to every operation. Replaced attributes only slow
down the calls that can name a device.

Scripts see CUDA as available and their tensors on it, as ``placement`` describes; torch's own code does not.
``torch.device("cuda")`` keeps its name: the CPU is chosen where a device is used. Code compiled by ``torch.jit.script``
is not redirected.
"""

from __future__ import annotations

from harness.apex import call_counter
from harness.apex.on_cpu import device_arguments, distributed, half_kernels, placement, torch_cuda
from harness.apex.patches import patches

__all__ = ["redirect_cuda"]


def redirect_cuda() -> None:
    """Redirect this process's CUDA calls to the CPU until ``harness.apex.uninstall``.

    Call it before the script runs: names imported earlier (``from torch import zeros``) keep the original function.
    """
    call_counter.reset()
    placement.cuda_use.reset()
    # list all replacements before setting any: each wraps the original function
    modules = (placement, device_arguments, torch_cuda, distributed)
    for owner, name, replacement in [row for module in modules for row in module.replacements()]:
        patches.replace(owner, name, replacement)
    patches.callback(half_kernels.register(half_kernels.slow_dtypes())._destroy)
