"""``harness data``: make annotation tables of your own data, split them, or download a published dataset."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.errors import EXIT_DONE, ConfigError

HELP = "make an annotation table from a folder, split one, or download a dataset"
_PUBLISHED = ("digits", "mnist", "fashion_mnist", "pet_names")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="dataset", required=True, metavar="WHAT")
    folder = verbs.add_parser("folder", help="write a table of images sorted into one folder per class")
    folder.add_argument("folder", type=Path, help="folder that contains one folder of images per class")
    folder.add_argument("out", type=Path, help="table to write: .csv, .csv.gz or .parquet")
    split = verbs.add_parser("split", help="split a table into NAME.train.csv and NAME.eval.csv")
    split.add_argument("source", type=Path, help="table to split: .csv, .csv.gz or .parquet")
    split.add_argument(
        "--eval", type=_share, required=True, metavar="SHARE", help="share of evaluation rows, such as 0.1"
    )
    split.add_argument(
        "--by", metavar="COLUMN", help="column, such as patient; rows with the same value in it stay in the same file"
    )
    split.add_argument(
        "--stratify",
        metavar="COLUMN",
        help="column, such as label, whose values should have about the same shares in both files",
    )
    split.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the split (default: 0)")
    split.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: that of the table)")
    for verb in (folder, split):
        verb.add_argument("--force", action="store_true", help="replace existing files")
    for name in _PUBLISHED:
        published = verbs.add_parser(name, help=f"download {name}")
        published.add_argument("folder", type=Path, help="folder to write it to")
        published.add_argument(
            "--from", dest="source", metavar="PATH_OR_URL",
            help="folder or URL with the original files (default: their published location)",
        )  # fmt: skip


def _share(text: str) -> float:
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1; use 0.1 or 10% for a tenth")
    return value


_share.__name__ = "share"  # shown by argparse if the text is not a number


def run(arguments: argparse.Namespace) -> int:
    from harness.runs import console

    console.show_work()
    print(_run(arguments))
    return EXIT_DONE


def _run(args: argparse.Namespace) -> str:
    if args.dataset in _PUBLISHED:
        return _download(args.dataset, args.folder, args.source)
    if args.dataset == "split":
        from harness.tools.data import split

        return split.split(args.source, args.eval, args.by, args.stratify, args.seed, args.out, args.force)
    from harness.tools.data import from_folder, table_file

    table_file.suffix_of(args.out)
    return from_folder.write(args.folder, args.out, args.force)


def _download(dataset: str, folder: Path, source: str | None) -> str:
    if dataset == "digits":
        from harness.tools.data import digits

        if source is not None:
            raise ConfigError(
                "the digits come with scikit-learn and have no other source", where="--from", hint="remove --from"
            )
        return f"{digits.write(folder)}\nto train on them: harness train {digits.write_config(folder)}"
    from harness.tools.data import published

    written: str = getattr(published, dataset)(folder, source)
    return written
