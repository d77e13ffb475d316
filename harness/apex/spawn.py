"""Sets up a process for an Apex script, and processes that the script starts with ``multiprocessing`` in the same way.

A spawned process normally imports the parent's main program first. ``ScriptContext`` makes it import
``harness.apex.spawn_main`` instead, which restores the context and then imports the program. Forked processes inherit
everything.
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import asdict, dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from harness.apex import call_counter
from harness.apex.import_hook import install
from harness.apex.local_rank import patch_argparse
from harness.apex.patches import patches

_ROOT = str(Path(__file__).parents[2])  # where `harness` is imported from; the script's sys.path may not have it


@dataclass(frozen=True)
class ScriptContext:
    """The way a script is run. ``name`` is its absolute path, or the name of a module."""

    name: str
    is_module: bool
    on_cpu: bool = False
    local_rank: str | None = None
    trust_checkpoints: bool = False
    modernize: bool = False
    counts_directory: str | None = None  # only in spawned processes

    def set_up(self) -> None:
        """Prepare this process for the script. Undone by ``harness.apex.uninstall``."""
        install(self.trust_checkpoints)
        patch_argparse(self.local_rank)
        if self.modernize:
            from harness.apex.modernize import modernize

            modernize()
        if self.on_cpu:
            from harness.apex.on_cpu import redirect_cuda

            redirect_cuda()
        patches.set(spawn, "get_preparation_data", self._sent_with(spawn.get_preparation_data))

    def _sent_with(self, original: Any) -> Any:
        """``multiprocessing.spawn.get_preparation_data``, extended to send this context to the child."""

        @functools.wraps(original)
        def get_preparation_data(name: str) -> dict[str, Any]:
            data: dict[str, Any] = original(name)
            data.pop("init_main_from_path", None)
            data["init_main_from_name"] = "harness.apex.spawn_main"
            # `received` removes both before the program sees them
            data["sys_path"] = [_ROOT, *data["sys_path"]]
            sent = json.dumps({**asdict(self), "counts_directory": call_counter.shared_directory()})
            data["sys_argv"] = [*data["sys_argv"][:1], sent, *data["sys_argv"][1:]]
            return data

        return get_preparation_data


def received() -> ScriptContext:
    """The context that the parent sent to this process."""
    sys.path.remove(_ROOT)
    return ScriptContext(**json.loads(sys.argv.pop(1)))
