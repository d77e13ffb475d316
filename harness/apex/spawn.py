"""Processes that a running script spawns (``torch.multiprocessing.spawn``, loader workers): same world as the script's.

Python starts such a process by importing the parent's main program again. Here it is told to import
``harness.apex.spawn_main`` in its stead, which sets the world up and then imports the program. Forked processes inherit
everything as it is.
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import asdict, dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from harness.apex.import_hook import install
from harness.apex.local_rank import teach_argparse
from harness.apex.patches import patches

_ROOT = str(Path(__file__).parents[2])  # where `harness` is imported from, which the script's sys.path may not have


@dataclass(frozen=True)
class World:
    """What holds around a script: its ``name`` (absolute path, or of a module), and how it is run."""

    name: str
    is_module: bool
    on_cpu: bool
    local_rank: str | None
    counts: str | None = None

    def enter(self) -> None:
        """Set this process up for the script. Undone by ``harness.apex.uninstall``."""
        install()
        teach_argparse(self.local_rank)
        if self.on_cpu:
            from harness.apex.on_cpu import redirect_cuda

            redirect_cuda()
        patches.set(spawn, "get_preparation_data", _preparation(self, spawn.get_preparation_data))


def _preparation(world: World, original: Any) -> Any:
    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = original(name)
        data.pop("init_main_from_path", None)
        data["init_main_from_name"] = "harness.apex.spawn_main"
        # taken off again by `received`, before the program sees them
        data["sys_path"] = [_ROOT, *data["sys_path"]]
        sent = json.dumps(asdict(world) | {"counts": _counts_folder(world)})
        data["sys_argv"] = [*data["sys_argv"][:1], sent, *data["sys_argv"][1:]]
        return data

    return get_preparation_data


def received() -> World:
    """The world that the parent sent to this process, which is being prepared."""
    sys.path.remove(_ROOT)
    return World(**json.loads(sys.argv.pop(1)))


def _counts_folder(world: World) -> str | None:
    if not world.on_cpu:
        return None
    from harness.apex.on_cpu.count import shared_folder

    return shared_folder()
