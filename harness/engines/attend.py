"""Following what was started, while signals to this process ask it to stop."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from harness import signals
from harness.engines.job import Outcome, Started

_STOPPING = "stopping: every rank writes a checkpoint; once more ends them at once"
_POLL_S = 0.1


def attend(started: Started, stopping: str = _STOPPING) -> Outcome:
    """Follow ``started`` to its end; a signal stops it, a second one ends it at once. ``stopping`` is what to say."""
    with signals.counted() as asked, ThreadPoolExecutor(1, "harness-follow") as pool:
        following, heard = pool.submit(started.follow), 0
        while not following.done():
            if (count := asked()) > heard:
                heard = count
                print(stopping, file=sys.stderr)
                started.stop()
            time.sleep(_POLL_S)
        return following.result()
