"""``harness settings``: every setting of an experiment, or those that some words describe."""

from __future__ import annotations

import argparse

from harness.errors import EXIT_DONE

HELP = "list or search the settings, such as: harness settings early stopping"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("search", nargs="*", metavar="WORD", help="a key, a section, or words of a description")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a list of records")
    form.add_argument("--markdown", action="store_true", help="print docs/settings.md")


def run(arguments: argparse.Namespace) -> int:
    import json

    from harness.config import reference

    if arguments.markdown:
        print(reference.markdown(), end="")
        return EXIT_DONE
    settings = reference.search(arguments.search)
    if arguments.json:
        print(json.dumps([each.as_record() for each in settings], indent=2))
    else:
        print(reference.as_text(settings))
    return EXIT_DONE
