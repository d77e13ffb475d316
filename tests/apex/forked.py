"""``python -m harness.apex`` in processes that are forked from one that has already imported torch (``tests.ranks``).

Each run and rank has its own process, environment, working folder, output and exit code.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

from tests.ranks import free_port, launch_environment, start, wait_for

TIMEOUT_S = 120


def run_apex(*words: object, cwd: Path, ranks: int = 1, **environ: str) -> CompletedProcess[str]:
    """Run ``python -m harness.apex WORDS``; with several ``ranks``, as torch.distributed.launch starts them.

    The result has the output of all ranks and the first exit code that is not 0.
    """
    port, processes = free_port(), []
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        for rank in range(ranks):
            given = [f"--local-rank={rank}"] if ranks > 1 else []
            launched = launch_environment(rank, ranks, port) if ranks > 1 else {}
            arguments = ([*given, *map(str, words)], cwd, outputs)
            processes.append(start(_run, arguments, {**launched, **environ}))
        codes = wait_for(processes, TIMEOUT_S)
        return CompletedProcess(words, next(filter(None, codes), 0), *[path.read_text() for path in outputs])


def _run(words: list[str], cwd: Path, outputs: list[Path]) -> None:
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    from harness.apex.runner import main

    try:
        main(words)
    except Exception:  # as python ends a program
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not call them
