"""``harness predict``: the predictions of a trained model for the rows of a CSV."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from harness.config import arguments as shared

VERB = "predict"
HELP = "write a trained model's predictions for the rows of a CSV"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_run(parser)
    parser.add_argument(
        "--csv", required=True, metavar="CSV", help="CSV with rows like the training rows; labels are optional"
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="a .csv or .parquet file, written when complete"
    )
    parser.add_argument(
        "--world", type=shared.positive(int), metavar="N", help="processes on this machine (default: 1)"
    )


def run(arguments: argparse.Namespace) -> int:
    from harness.distributed.launch_env import detect
    from harness.distributed.meeting import telling_peers
    from harness.inference import predict
    from harness.runs import fetched

    with telling_peers(detect(os.environ)):
        folder = fetched.local_copy(arguments.folder)
    request = predict.PredictRequest(folder, arguments.csv, arguments.out, arguments.overrides, arguments.trust)
    return predict.main(request, arguments.world, os.environ, arguments.words)
