"""driver.py with a trigger: the script of ranks that a launcher starts. A first argument that ends in .py is ignored,
so that it can stand in for the python of ``launch.python``, too."""

import json
import os
import sys

from harness.cli import command

if __name__ == "__main__":
    words = sys.argv[1:]
    if words and words[0].endswith(".py"):
        words = words[1:]
    from benchmarks.campaign import trigger

    trigger.arm(rank=int(os.environ.get("RANK", "0")), **json.loads(os.environ[trigger.VARIABLE]))
    command(["train", *words])
