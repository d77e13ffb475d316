"""``harness predict``: the predictions of a trained model for the rows of a CSV."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from harness.config import arguments as shared
from harness.errors import ConfigError
from harness.runs import layout

VERB = "predict"
HELP = "write a trained model's predictions for the rows of a CSV"

_OUT = Path(layout.PREDICTIONS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_run(parser)
    parser.add_argument(
        "--csv", required=True, metavar="CSV", help="CSV with rows like the training rows; labels are optional"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="a .csv or .parquet file; if it exists, it is replaced at the end "
        "(default: predictions.csv, which must not exist yet)",
    )
    parser.add_argument(
        "--world", type=shared.positive(int), metavar="N", help="processes on this machine (default: 1)"
    )


def run(arguments: argparse.Namespace) -> int:
    from harness.config.places import is_url
    from harness.data.table.source import locate
    from harness.distributed.launch_env import detect
    from harness.runs import fetched, trained_run

    launch = detect(os.environ)
    if launch.alone:  # errors come before the import of torch, unless other ranks must be told
        folder = fetched.local_copy(arguments.folder)
        trained_run.configuration(folder, arguments.overrides, arguments.trust)
        if not is_url(arguments.csv):
            locate(arguments.csv)
        _require_free(arguments.out)
    else:
        from harness.distributed.meeting import telling_peers

        with telling_peers(launch):
            folder = fetched.local_copy(arguments.folder)
            _require_free(arguments.out)
    from harness.inference import predict

    out = arguments.out or _OUT
    request = predict.PredictRequest(folder, arguments.csv, out, arguments.overrides, arguments.trust)
    return predict.main(request, arguments.world, os.environ, arguments.words)


def _require_free(out: Path | None) -> None:
    """Raise ConfigError if the output has the default name and exists: only a file that the user names is replaced."""
    if out is None and _OUT.exists():
        hint = f"--out {_OUT} replaces it; --out FILE writes another file"
        raise ConfigError("this file already exists", where=str(_OUT), hint=hint)
