"""``torchrun -m harness.train -c CONFIG``: the command ``harness train`` for launchers that start a module."""

import sys
from typing import Any

if __name__ == "__main__":
    from harness.__main__ import command

    command(["train", *sys.argv[1:]])
elif __name__ == "harness.train":  # imported, which must not hide the function of this name
    from harness import api

    modules: dict[str, Any] = sys.modules
    modules[__name__] = api.train
