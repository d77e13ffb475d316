"""``torchrun -m harness.train -c CONFIG``: the command ``harness train`` for launchers that start a module."""

import sys

if __name__ == "__main__":
    from harness.cli import command

    command(["train", *sys.argv[1:]])
