"""``--device cpu``: what a script asks of CUDA is done on the CPU, so that a GPU script can be tried without a GPU.

Every redirection is a plain attribute replaced in torch's modules and classes (``install_redirections`` holds the list
of lists), and undone by ``harness.apex.uninstall``. Not a ``TorchFunctionMode``: a mode holds for one thread, sees
neither ``torch.cuda`` nor constructors of classes, and would cost every operation a call into Python, where these
cost only the calls that can name a device.

Tensors tell the truth (``tensor.is_cuda`` is False), and ``torch.device("cuda")`` stays the name it is; it is where
such a name is used that the CPU is taken. Torch's own code is told that there is no CUDA, the script that there is.
``.cuda()`` and ``.cpu()`` return the tensor itself, as ``.cpu()`` does on a CPU. Code compiled by ``torch.jit.script``
is not reached.
"""

from __future__ import annotations

from harness.apex.on_cpu.redirection import redirect_cuda

__all__ = ["redirect_cuda"]
