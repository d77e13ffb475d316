"""The main program of a process that a script spawned: runs the script again, as ``__mp_main__``.

Only ``multiprocessing`` runs it, in the child; see ``runner``.
"""

from __future__ import annotations

import runpy

from harness.apex.runner import received

if __name__ == "__mp_main__":
    context = received()
    context.set_up()
    # multiprocessing then copies the names of this module into __main__
    run = runpy.run_module if context.is_module else runpy.run_path
    globals().update(run(context.name, run_name="__mp_main__"))
