"""``harness predict``: the predictions of a trained model for the rows of a CSV, or for images."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

from harness.config import arguments as shared
from harness.errors import ConfigError, HarnessError, plural
from harness.runs import layout

HELP = "write a trained model's predictions for the rows of a CSV, or for images"

log = logging.getLogger("harness")

_OUT = Path(layout.PREDICTIONS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_run(parser)
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--csv", metavar="CSV", help="CSV with rows like the training rows; labels are optional")
    rows.add_argument(
        "--images",
        nargs="+",
        metavar="PATH",
        help="instead of a CSV: images, their URLs, or folders, of which all images below are predicted",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="a .csv or .parquet file; former predictions in it are replaced at the end "
        "(default: predictions.csv, which must not exist yet)",
    )
    parser.add_argument(
        "--world", type=shared.positive(int), metavar="N", help="processes on this machine (default: 1)"
    )


def run(arguments: argparse.Namespace) -> int:
    from harness.distributed.launch_env import detect

    launch = detect(os.environ)
    with ExitStack() as stack:
        if launch.alone:  # errors come before the import of torch, unless other ranks must be told
            request = _request(arguments, launch.alone, stack)
        else:
            from harness.distributed.meeting import telling_peers

            with telling_peers(launch):
                request = _request(arguments, launch.alone, stack)
        from harness.inference import predict

        return predict.main(predict.PredictRequest(*request), arguments.world, os.environ, arguments.words)


def _request(arguments: argparse.Namespace, alone: bool, stack: ExitStack) -> tuple[Path, str, Path, list[str], bool]:
    """Return what a ``PredictRequest`` holds; ``stack`` removes temporary files. ``alone``: see ``Launch``. Raises
    HarnessError."""
    from harness.config.merge import typed
    from harness.config.places import is_url
    from harness.data.image_folders import skips
    from harness.data.table.source import locate
    from harness.inference.rows import images_as_file, images_of
    from harness.runs import console, fetched, trained_run

    if not (arguments.csv or arguments.images):
        words = [word for word in arguments.overrides if "=" not in word]
        option = "--images" if words and all(map(_is_of_images, words)) else "--csv"
        hint = f"type: harness predict {arguments.folder} {option} {shlex.join(words) or 'CSV'}"
        raise ConfigError("there are no rows to predict: --csv CSV or --images PATH", where="command line", hint=hint)
    images = arguments.images or []  # argparse takes settings after them for more
    settings = [word for word in images if re.match("[^/=]+=", word) and not os.path.exists(word)]
    overrides = [*arguments.overrides, *settings]
    folder, source = fetched.local_copy(arguments.folder), arguments.csv
    config = trained_run.configuration(folder, overrides, arguments.trust)
    if images:
        skipped = Counter[str]()
        places = [word for word in images if word not in settings]
        column, names = images_of(config.task, places, "--images", skipped)
        source, cache = stack.enter_context(images_as_file(names, column))
        overrides += typed({"data.cache_dir": cache, "task.root": ""})
        if alone and skipped:
            console.to_terminal(0)
            log.info("%s%s", plural(len(names), "image"), skips(skipped))
    elif alone and not is_url(source):
        locate(source)
    _require_free(arguments.out)
    return folder, source, arguments.out or _OUT, overrides, arguments.trust


def _is_of_images(word: str) -> bool:
    from harness.config.places import IMAGE_SUFFIXES

    return os.path.isdir(word) or word.lower().endswith(IMAGE_SUFFIXES)


def _require_free(out: Path | None) -> None:
    """Raise ConfigError if the output exists, unless the user names it and it is empty or a table of predictions."""
    from harness.data.table.header import require_header

    if out is None and _OUT.exists():
        hint = f"--out {_OUT} replaces it; --out FILE writes another file"
        raise ConfigError("this file already exists", where=str(_OUT), hint=hint)
    if out is None or not out.is_file() or not out.stat().st_size:
        return
    columns = list[str]()
    with suppress(HarnessError):
        columns = require_header(out, str(out), {})
    if columns[:1] != ["id"] or not any(column.startswith("prediction") for column in columns):
        what = "cannot write the output: it would replace a file that is no table of predictions"
        raise ConfigError(what, where=str(out), hint="choose another file with --out FILE, or remove this one")
