"""The main program of a process that a running script spawned: the script again, as ``__mp_main__``.

Run by ``multiprocessing`` in the child, never by hand; see ``spawn``.
"""

from __future__ import annotations

import runpy

from harness.apex.spawn import received

if __name__ == "__mp_main__":
    world = received()
    world.enter()
    if world.counts is not None:
        from harness.apex.on_cpu.count import leave_at_exit

        leave_at_exit(world.counts)
    # multiprocessing makes the names of this module those of __main__
    run = runpy.run_module if world.is_module else runpy.run_path
    globals().update(run(world.name, run_name="__mp_main__"))
