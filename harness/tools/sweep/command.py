"""``harness sweep``: train over a space of settings."""

from __future__ import annotations

import argparse

from harness.config import arguments as shared

KEEPS_RUNNING = True
HELP = "train an experiment over a space of settings; the same command resumes the sweep"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_config(parser, "a sweep file (YAML)")
    parser.add_argument("--dry-run", action="store_true", help="print the command of each trial, without running any")
    parser.add_argument("--retry-failed", action="store_true", help="also retry failed trials, from their checkpoints")


def run(arguments: argparse.Namespace) -> int:
    from harness.tools.sweep import spec

    spec.load(arguments.config, arguments.overrides)  # errors come before the import of torch
    from harness.tools.sweep import main

    return main.main(arguments.config, arguments.overrides, arguments.dry_run, arguments.retry_failed)
