"""The command line: what ``driver.py`` does, and ``harness VERB``. Words in, an exit code out."""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from harness.errors import EXIT_DONE, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USAGE, HarnessError

log = logging.getLogger("harness")

_ENGINES = ("local", "torchrun", "slurm", "dask", "flyte", "kubernetes")


def drive(argv: Sequence[str]) -> int:
    """``driver.py -c CONFIG [key=value …]``: train, on as many ranks as the launch environment says."""
    parent = os.getppid()  # before the imports, which take seconds
    # A scheduler's word ahead of its limit comes once, and by default a process dies of it; harness.distributed.stop lets it in.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    parser = argparse.ArgumentParser(prog="driver.py", description="Train the experiment of a YAML file.")
    _config_arguments(parser)
    parser.add_argument("--local_rank", "--local-rank", type=int, help="set by torch.distributed.launch")
    arguments = parser.parse_intermixed_args(argv)
    _import_from_here()
    # The imports leave half a million objects that stay: looking for garbage among them takes a quarter of their time,
    # and later a quarter of a second each time in the middle of training.
    gc.disable()
    from harness.training import main as train  # late, so that --help answers at once

    gc.freeze()
    gc.enable()
    return train.main(arguments.config, arguments.overrides, os.environ, arguments.local_rank, parent)


def command() -> NoReturn:
    """The program ``harness``."""
    leave(main())


def leave(code: int) -> NoReturn:
    """End this process as ``sys.exit(code)`` does, but for taking Python apart, which with torch loaded lasts a second
    or more. A late signal or a library that aborts would change ``code`` in it, and the launcher believe that."""
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends its processes
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """``harness VERB``."""
    parser = argparse.ArgumentParser(
        prog="harness", description="Everything around a training run. To train: python driver.py -c CONFIG"
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    bench = verbs.add_parser("bench", help="measure the strategies of parallel training on this machine")
    bench.add_argument("what", choices=["strategies"])
    _config_arguments(bench)
    bench.add_argument("--world", type=_positive(int), nargs="+", default=[1, 2], metavar="N", help="default: 1 2")
    bench.add_argument("--steps", type=_positive(int), default=40, metavar="N", help="steps a case and round (40)")
    bench.add_argument("--rounds", type=_positive(int), default=3, metavar="N", help="over all cases in turn (3)")
    bench.add_argument("--threads", type=_positive(int), default=1, metavar="N", help="of each process (1)")
    bench.add_argument("--out", type=Path, default=Path("bench"), metavar="DIR", help="default: bench")
    bench.set_defaults(run=_bench)

    check = verbs.add_parser("check", help="say what a configuration would do, or all that is wrong with it")
    _config_arguments(check)
    check.add_argument("--world", type=int, default=1, metavar="N", help="number of ranks to plan for (default 1)")
    check.set_defaults(run=_check)

    compare = verbs.add_parser(
        "compare", help="say what differs between two runs, and whether they are bitwise the same"
    )
    compare.add_argument("one", metavar="RUN_A", help="a run folder, or one of runs that differ by seed")
    compare.add_argument("other", metavar="RUN_B", help="another")
    compare.add_argument("--json", action="store_true", help="for machines")
    compare.set_defaults(run=_compare)

    data = verbs.add_parser("data", help="bring a data set into a folder")
    data.add_argument("dataset", choices=["digits", "mnist", "fashion_mnist", "pet_names"])
    data.add_argument("folder", type=Path)
    data.add_argument(
        "--from", dest="source", metavar="PATH_OR_URL", help="where its files are; default: where they are published"
    )
    data.set_defaults(run=_data)

    doctor = verbs.add_parser("doctor", help="say what this machine has for training, and what is wrong with it")
    doctor.add_argument("--json", action="store_true", help="for machines")
    doctor.set_defaults(run=_doctor)

    export = verbs.add_parser("export", help="write a trained model as a file that other programs load")
    _run_arguments(export)
    export.add_argument("--format", required=True, choices=["safetensors", "torch_export", "onnx"])
    export.add_argument("--out", type=Path, metavar="FILE", help="default: model.… in the run folder")
    export.set_defaults(run=_export)

    generate = verbs.add_parser("generate", help="print names that a model of the task pet_names makes up")
    generate.add_argument("folder", metavar="RUN", help="a run folder, such as runs/pet_names")
    generate.add_argument("-n", dest="num", type=_positive(int), default=20, metavar="N", help="how many (default 20)")
    generate.add_argument(
        "--temperature", type=_positive(float), default=0.8, metavar="T",
        help="below 1: likelier names; above: stranger ones (default 0.8)",
    )  # fmt: skip
    generate.add_argument(
        "--seed", type=int, default=0, metavar="S", help="the same names for the same seed (default 0)"
    )
    generate.add_argument("--start", default="", metavar="TEXT", help="what every name begins with")
    generate.add_argument("--keep-existing", action="store_true", help="print names that the data have, too")
    generate.set_defaults(run=_generate)

    launch = verbs.add_parser("launch", help="train on an engine: local, torchrun, slurm, dask, …")
    _config_arguments(launch)
    launch.add_argument("--engine", choices=_ENGINES, help="default: launch.engine of the file, or local")
    launch.add_argument("--nnodes", metavar="N|MIN:MAX", help="machines; MIN:MAX lets them come and go (torchrun)")
    launch.add_argument("--nproc", type=_positive(int), metavar="N", help="ranks a machine")
    launch.add_argument("--max-restarts", type=int, metavar="N", help="how often a failed run is started again")
    launch.add_argument("--rendezvous", metavar="HOST:PORT", help="of the first machine, where all meet (torchrun)")
    launch.add_argument("--node-rank", type=int, metavar="R", help="number of this machine; default: as they come")
    launch.add_argument("--scheduler", metavar="ADDRESS", help="of Dask, such as tcp://10.0.0.1:8786")
    launch.add_argument("--dry-run", action="store_true", help="print what would be started, and do nothing")
    launch.add_argument("--detach", action="store_true", help="hand it to the engine (slurm, …) and do not follow it")
    launch.add_argument(
        "--stopped-code", type=int, default=EXIT_STOPPED, metavar="N",
        help="exit code of a run that was stopped with a checkpoint (default 75; Kubernetes restarts 128 and above)",
    )  # fmt: skip
    launch.set_defaults(run=_launch)

    predict = verbs.add_parser("predict", help="write what a trained model guesses for the rows of a CSV")
    _run_arguments(predict)
    predict.add_argument("--csv", required=True, metavar="CSV", help="rows like the trained ones; labels may be absent")
    predict.add_argument("--out", required=True, type=Path, metavar="FILE", help="a .csv or .parquet, there when done")
    predict.add_argument("--world", type=_positive(int), metavar="N", help="processes on this machine (default 1)")
    predict.set_defaults(run=_predict, again=argv)

    report = verbs.add_parser("report", help="one page on runs or a sweep: curves, speed-up, where the time went")
    report.add_argument("paths", nargs="+", metavar="RUN_OR_SWEEP", help="run folders, or a sweep's")
    report.add_argument("--format", choices=["html", "md", "csv", "png"], default="html", help="default: html")
    report.add_argument("-o", "--out", type=Path, metavar="FILE", help="default: report.… in the first folder")
    report.add_argument("--target", type=float, metavar="VALUE", help="time to reach this value of the metric")
    report.set_defaults(run=_report)

    schema = verbs.add_parser("schema", help="write the JSON Schema that the YAML files name, for editors")
    schema.add_argument("--of", choices=["experiment", "sweep"], default="experiment", help="kind of file (experiment)")
    schema.add_argument("--out", type=Path, metavar="FILE", help="default: print it")
    schema.set_defaults(run=_schema)

    sweep = verbs.add_parser("sweep", help="train over a space of settings, and go on where it was")
    _config_arguments(sweep)
    sweep.add_argument("--engine", choices=_ENGINES, help="of the trials; default: the experiment's")
    sweep.add_argument("--parallel", type=_positive(int), metavar="K", help="trials at once, as far as there is room")
    sweep.add_argument("--dry-run", action="store_true", help="print the trials, and do nothing")
    sweep.add_argument("--retry-failed", action="store_true", help="also those that failed, from their checkpoints")
    sweep.set_defaults(run=_sweep)

    arguments, more = parser.parse_known_args(argv)
    # Overrides may stand anywhere among the options, which argparse's sub-commands do not see by themselves.
    strange = [word for word in more if word.startswith("-") or not hasattr(arguments, "overrides")]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    if more:
        arguments.overrides += more
    _import_from_here()
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return code


def _import_from_here() -> None:
    """A user's own models and tasks are found from the working folder, after all that is installed."""
    if "" not in sys.path:
        sys.path.append("")


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--config", required=True, metavar="CONFIG", help="a YAML file, such as configs/digits.yaml"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings on top of the file, such as train.epochs=3"
    )


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="a run folder, such as runs/digits, or the URL of one")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings on top of the run's, such as task.root=photos"
    )


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Reads a finite number above zero, for argparse."""

    def number(word: str) -> float:
        value = kind(word)
        if not 0 < value < math.inf:
            raise ValueError
        return value

    number.__name__ = f"positive {kind.__name__}"  # which argparse's message has
    return number


def _bench(arguments: argparse.Namespace) -> int:
    from harness.benchmark import strategies as bench
    from harness.training import console

    console.to_terminal(0)
    written = bench.strategies(
        arguments.config, arguments.overrides, arguments.world, arguments.steps, arguments.rounds, arguments.threads,
        arguments.out,
    )  # fmt: skip
    print(*written, sep="\n")
    return EXIT_DONE


def _check(arguments: argparse.Namespace) -> int:
    from harness.training import preflight as check

    if arguments.world < 1:
        print("error: --world must be 1 or more", file=sys.stderr)
        return EXIT_USAGE
    facts, problems = check.examine(arguments.config, arguments.overrides, arguments.world)
    for name, value in facts.items():
        print(f"{name:>14}: {value}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return max((problem.exit_code for problem in problems), default=EXIT_DONE) if problems else EXIT_DONE


def _compare(arguments: argparse.Namespace) -> int:
    from harness.compare import command as compare
    from harness.runs import fetched

    one, other = (fetched.at_hand(place, checkpoint=True) for place in (arguments.one, arguments.other))
    return compare.main(one, other, arguments.json)


def _data(arguments: argparse.Namespace) -> int:
    from harness.data import digits, published
    from harness.errors import ConfigError

    if arguments.dataset == "digits":
        if arguments.source is not None:
            raise ConfigError("the digits come with scikit-learn, from nowhere else", where="--from", hint="remove it")
        print(digits.write(arguments.folder))
    else:
        bring = getattr(published, arguments.dataset)
        print(bring(arguments.folder, arguments.source))
    return EXIT_DONE


def _doctor(arguments: argparse.Namespace) -> int:
    from harness.doctor import examine

    return examine.main(os.environ, arguments.json)


def _generate(arguments: argparse.Namespace) -> int:
    from harness.inference import generate
    from harness.runs import fetched

    wish = generate.Wish(arguments.num, arguments.temperature, arguments.seed, arguments.start, arguments.keep_existing)
    for name in generate.names(fetched.at_hand(arguments.folder), wish):
        print(name, flush=True)
    return EXIT_DONE


def _export(arguments: argparse.Namespace) -> int:
    from harness.inference import export
    from harness.runs import fetched
    from harness.training import console

    console.to_terminal(0)
    fetched.check_out(arguments.folder, arguments.out, "model.onnx")
    print(export.export(fetched.at_hand(arguments.folder), arguments.format, arguments.out, arguments.overrides))
    return EXIT_DONE


def _launch(arguments: argparse.Namespace) -> int:
    from harness.engines import command as launch

    words = {"engine": arguments.engine, "nproc": arguments.nproc, "max_restarts": arguments.max_restarts,
             "rendezvous": arguments.rendezvous, "node_rank": arguments.node_rank,
             "dask.scheduler": arguments.scheduler}  # fmt: skip
    if arguments.nnodes is not None:
        least, _, most = arguments.nnodes.rpartition(":")
        words |= {"nnodes": most, "min_nodes": least or None}
    options = [f"launch.{key}={value}" for key, value in words.items() if value is not None]
    code = launch.main(arguments.config, [*arguments.overrides, *options], arguments.dry_run, arguments.detach)
    return arguments.stopped_code if code == EXIT_STOPPED else code


def _predict(arguments: argparse.Namespace) -> int:
    from harness.inference import predict
    from harness.runs import fetched

    wish = predict.Request(fetched.at_hand(arguments.folder), arguments.csv, arguments.out, arguments.overrides)
    words = sys.argv[1:] if arguments.again is None else arguments.again
    return predict.main(wish, arguments.world, os.environ, words)


def _report(arguments: argparse.Namespace) -> int:
    from harness.report import command
    from harness.runs import fetched

    fetched.check_out(arguments.paths[0], arguments.out, f"report.{arguments.format}")
    paths = [fetched.at_hand(place) for place in arguments.paths]
    return command.main(paths, arguments.out, arguments.format, arguments.target)


def _sweep(arguments: argparse.Namespace) -> int:
    from harness.sweep import command

    return command.main(
        arguments.config, arguments.overrides, arguments.engine, arguments.parallel, arguments.dry_run,
        arguments.retry_failed,
    )  # fmt: skip


def _schema(arguments: argparse.Namespace) -> int:
    from harness.config import loader
    from harness.sweep import spec

    text = spec.json_schema() if arguments.of == "sweep" else loader.json_schema()
    if arguments.out is None:
        print(text, end="")
        return EXIT_DONE
    try:
        arguments.out.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"error: {arguments.out}: {error.strerror}", file=sys.stderr)
        return EXIT_FAILURE
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
