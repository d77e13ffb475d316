"""``python -m harness VERB``: the command ``harness`` where it is not on the path."""

from harness.cli import command

if __name__ == "__main__":
    command()
