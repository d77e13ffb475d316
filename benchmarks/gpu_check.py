"""Runs what the harness does on this machine's GPUs, a few steps each, and writes one table.

    python -m benchmarks.gpu_check                         # writes benchmarks/results/gpu.md; exits with 1 on a failure
    python -m benchmarks.gpu_check --only config resume     # checks whose names contain one of these words
    python -m benchmarks.gpu_check --dry-run                # what it would do, in which order, with which limits
    python -m benchmarks.gpu_check --device cpu --out FILE  # a rehearsal without a GPU

Every check is a command in a process of its own, with a time limit. The most telling come first, and all end after
``--limit-s`` (25 minutes) at the latest. The table is written after each check, and a later call continues it: checks
of the same commit that passed are not repeated. Without some packages it does what it can, and says what it leaves out.
"""

from __future__ import annotations

import argparse
import configparser
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 1500.0  # of a call
CHECK_S = 150.0  # limit of one command; longer ones have their own
COMPILED_S = 300.0  # of a command that compiles the model
BENCH_ROWS = 128  # per rank
_NO_TESTS = 5  # pytest's exit code where all tests of a file are slow
HARNESS = [sys.executable, "-m", "harness"]
LEVELS = ["O1", "O0", "O2", "O4", "O5", "O3"]
FIRST_VARIANTS = ["modern preset", "compile"]
VARIANTS = {
    "modern preset": ["precision.opt_level=O4", "parallel.delay_allreduce=false", "model.channels_last=true",
                      "precision.tf32=true", "train.deterministic=false"],
    "compile": ["model.compile=true"],
    "compile, reduce-overhead": ["model.compile=reduce-overhead"],
    "channels-last": ["model.channels_last=true"],
    "accumulation, clipping, average": ["batch.accumulate=2", "train.clip_norm=1", "train.ema_decay=0.9"],
    "LARC": ["optimizer.larc={}"],
    "skip on NaN": ["train.on_nan=skip"],
    "fused_adam": ["optimizer.name=fused_adam", "optimizer.momentum=null"],
    "fused_lamb": ["optimizer.name=fused_lamb", "optimizer.momentum=null"],
}  # fmt: skip
ON_SEVERAL = {
    "overlapped": ["parallel.delay_allreduce=false"],
    "fsdp": ["parallel.strategy=fsdp"],
    "synchronized batch norm": ["parallel.sync_batchnorm=true"],
}
_NO_GPU = """error: torch sees no CUDA device, so nothing was checked or written
  -> harness doctor shows why; python -m benchmarks.gpu_check --device cpu --out FILE rehearses on the CPU"""
_NCCL = """
import torch, torch.distributed as dist
dist.init_process_group({backend!r}, rank=0, world_size=1, store=dist.HashStore())
x = torch.ones(1 << 20, device={device!r})
dist.all_reduce(x)
assert x.sum().item() == 1 << 20
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Check:
    """Commands that must all exit with an accepted code. ``result``: what they measured, for the table."""

    name: str
    commands: list[list[str]]
    result: Callable[[], str] = lambda: ""
    skipped: str = ""  # the reason
    limit_s: float = CHECK_S  # of each command
    accepted: tuple[int, ...] = (0,)  # exit codes
    after: str = ""  # the check whose run it uses


@dataclass
class Row:
    name: str
    outcome: str  # passed, failed, skipped or late
    seconds: float = 0.0
    result: str = ""


@dataclass
class Plan:
    """The checks for a machine with ``world`` devices of the kind ``device``."""

    device: str
    world: int
    steps: int
    folder: Path
    missing: Sequence[str] = ()  # packages that harness requires
    data: dict[str, list[str] | None] = field(default_factory=dict)

    def checks(self) -> Iterator[Check]:
        """The most telling first."""
        reason = f"{', '.join(self.missing)} not installed" if self.missing else ""
        for check in self._checks():
            needs_harness = any(command[:3] == HARNESS or "benchmarks.steps" in command for command in check.commands)
            yield replace(check, skipped=check.skipped or reason) if needs_harness else check

    def _checks(self) -> Iterator[Check]:
        digits = ROOT / "configs" / "digits.yaml"
        yield Check("all-reduce", [[sys.executable, "-c", _NCCL.format(
            backend="nccl" if self.device == "cuda" else "gloo", device=self.device)]])  # fmt: skip
        levels = [self.training(f"level {level}", digits, 1, f"precision.opt_level={level}") for level in LEVELS]
        yield from levels[:4]
        yield from self.resumes(digits)
        tests = self.tests()
        yield next(tests)
        for name in FIRST_VARIANTS:
            yield self.training(name, digits, 1, *VARIANTS[name])
        for name, settings in ON_SEVERAL.items():
            skipped = "" if self.world > 1 else "needs two GPUs"
            yield self.training(f"{name}, {_ranks(max(2, self.world))}", digits, self.world, *settings, skipped=skipped)
        speeds = list(self.speeds(digits))
        yield from speeds[:2]
        yield self.overhead()
        engines = self.engines(digits)
        yield next(engines)
        yield from self.uses(digits)
        yield from tests
        for name in [name for name in VARIANTS if name not in FIRST_VARIANTS]:
            yield self.training(name, digits, 1, *VARIANTS[name])
        yield self.training("dp", digits, 1, "parallel.strategy=dp")
        yield from levels[4:]
        for path in sorted((ROOT / "configs").glob("*.yaml")):
            for world in sorted({1, self.world}):
                yield self.training(f"config {path.stem}, {_ranks(world)}", path, world)
        yield from engines
        yield from speeds[2:]

    def words(self, path: Path, world: int) -> list[str] | None:
        """The overrides with which the configuration ``path`` runs here on made-up data; None without data for it."""
        if self.missing:
            return []
        from benchmarks import made_up_data

        task = _task(path)
        if task not in self.data:
            rows = max(made_up_data.ROWS["train"], BENCH_ROWS * self.world)  # each rank needs a batch of its own
            self.data[task] = made_up_data.write(self.folder / "data", task, rows)
        found = self.data[task]
        own = [f"output={self.folder / 'runs'}", f"runtime.device={self.device}", f"batch.global={16 * world}"]
        own += ["batch.per_rank=null", "batch.eval_per_rank=null", "data.num_workers=0", "train.log_every=1"]
        own += ["model.weights=null"]
        return None if found is None else [*found, *own]

    def training(self, name: str, path: Path, world: int, *settings: str, launch: Sequence[str] = (), skipped: str = "",
                 run: str = "") -> Check:  # fmt: skip
        words = self.words(path, world)
        run = run or "".join(letter if letter.isalnum() else "_" for letter in name)
        if words is None:
            missing = f"benchmarks/made_up_data.py has no data for the task {_task(path)}"
            return Check(name, [[sys.executable, "-c", f"raise SystemExit({missing!r})"]])
        command = [*HARNESS, "launch", "-c", str(path), *(launch or ["--nproc", str(world)]), *words, f"name={run}"]
        command += [f"train.max_steps={self.steps}", *settings]
        return Check(name, [command], lambda: self.trained(self.folder / "runs" / run, world), skipped)

    def trained(self, run: Path, world: int) -> str:
        """Loss and rows per second of the run, which must have used the device and finite numbers."""
        start = json.loads((run / "provenance.json").read_text())[-1]
        assert len(start["ranks"]) == world, start["ranks"]
        assert all(rank["device"].partition(":")[0] == self.device for rank in start["ranks"]), start["ranks"]
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if line["split"] == "train"]
        assert steps[-1]["step"] == self.steps, steps[-1]
        losses = [line["loss"] for line in steps if line["loss"] is not None]
        return f"loss {losses[-1]:.3f}" if losses else "all steps skipped, while the loss scale falls"

    def engines(self, path: Path) -> Iterator[Check]:
        """Each engine that works on one machine, and that it gives the weights of the first, bit for bit."""
        for engine, needs in (("local", ""), ("torchrun", ""), ("dask", "distributed"), ("flyte", "flytekit")):
            missing = "" if not needs or importlib.util.find_spec(needs) else f"{needs} is not installed"
            launch = ["--engine", engine, "--nproc", str(self.world)]
            check = self.training(f"engine {engine}", path, self.world, launch=launch, skipped=missing, run=engine)
            if engine == "local":
                yield check
            else:
                runs = [str(self.folder / "runs" / run) for run in ("local", engine)]
                commands = [*check.commands, [*HARNESS, "compare", *runs]]
                yield replace(check, commands=commands, after="engine local")

    def resumes(self, path: Path) -> Iterator[Check]:
        for world in sorted({1, self.world}):
            command = [*HARNESS, "verify-resume", "-c", str(path), "--nproc", str(world), "--kills", "2", "--steps",
                       str(max(6, self.steps)), *(self.words(path, world) or [])]  # fmt: skip
            yield Check(f"resume after kills, {_ranks(world)}", [command], lambda: "equal bit for bit", limit_s=240)

    def uses(self, path: Path) -> Iterator[Check]:
        run = str(self.folder / "runs" / "local")
        for kind in ("safetensors", "torch_export", "onnx"):
            missing = "" if kind != "onnx" or importlib.util.find_spec("onnxscript") else "onnxscript is not installed"
            command = [*HARNESS, "export", run, "--format", kind, "--out", str(self.folder / f"model.{kind}")]
            yield Check(f"export {kind}", [command], skipped=missing, after="engine local")
        out = self.folder / "predictions.csv"
        command = [*HARNESS, "predict", run, "--csv", str(self.folder / "data" / "image_csv" / "eval.csv"), "--out"]
        yield Check("predict", [[*command, str(out)]], lambda: f"{len(out.read_text().splitlines()) - 1} rows",
                    after="engine local")  # fmt: skip

    def speeds(self, path: Path) -> Iterator[Check]:
        """Rows per second of a training step on one batch, without a loader, on one rank and on all."""
        small = self.device == "cpu"
        size, rows, model = (8, 16, "small_cnn") if small else (224, BENCH_ROWS, "resnet50")
        data = [*(self.words(path, 1) or []), "task.color=rgb", f"task.image_size=[{size},{size}]"]
        data += ["task.transforms={train: [], eval: []}", f"model.name={model}", "model.args=null"]
        data += ["batch.global=null", f"batch.per_rank={rows}"]
        presets = {"modern preset": VARIANTS["modern preset"], "apex-2019 preset": [],
                   "modern preset, compiled": [*VARIANTS["modern preset"], "model.compile=true"],
                   "modern preset, reduce-overhead": [*VARIANTS["modern preset"], "model.compile=reduce-overhead"],
                   }  # fmt: skip
        for name, settings in presets.items():
            out = self.folder / f"speed of {name}.txt"
            measure = ["-m", "benchmarks.steps", "-c", str(path), "--steps", str(2 if small else 30), "--out", str(out)]
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.world}", *measure]
            starts = [measure] if small or self.world == 1 else [measure, torchrun]
            commands = [[sys.executable, *start, *data, *settings] for start in starts]
            limit_s = COMPILED_S if any("compile" in word for word in settings) else CHECK_S
            yield Check(f"speed of {model}, {size} x {size}, {name}", commands, lambda out=out: _listed(out),
                        limit_s=limit_s)  # fmt: skip

    def overhead(self) -> Check:
        """The host's time for a step of a small network, relative to a loop by hand."""
        command = [sys.executable, "-m", "benchmarks.peers", "--device", self.device, "--only", "mlp", "--contenders",
                   "harness", "--starts", "1", "--rounds", "9"]  # fmt: skip

        def result() -> str:
            text = (self.folder / "output.txt").read_text()
            found = re.findall(r'"mlp, (\w+)", "harness", "(\d+)", "[+-]\d+", "([\d.]+)"', text)
            assert len(found) == 2, text
            return "; ".join(f"{dtype}: {us} us, {ratio} of a loop by hand" for dtype, us, ratio in found)

        return Check("time of a step", [command], result)

    def tests(self) -> Iterator[Check]:
        """Those that need a GPU, then those of harness.apex in parts of their own."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", self.device]
        missing = "" if importlib.util.find_spec("pytest") else "pytest is not installed"
        where = "tests/apex" if self.missing else "tests"  # which needs torch and pytest only
        yield Check("tests marked gpu", [[*command, "-m", "gpu", where]], skipped=missing, limit_s=300)
        for path in sorted((ROOT / "tests" / "apex").glob("test_*.py")):
            name = f"tests of harness.apex: {path.stem.removeprefix('test_')}"
            test = [*command, "-m", "not slow", str(path.relative_to(ROOT))]
            yield Check(name, [test], skipped=missing, limit_s=90, accepted=(0, _NO_TESTS))


def _ranks(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"


def _task(path: Path) -> str:
    """The task that a configuration names, itself or in the file that it extends."""
    import yaml  # which comes with omegaconf

    tree: dict[str, Any] = yaml.safe_load(path.read_text())
    if name := (tree.get("task") or {}).get("name"):
        return str(name)
    bases = tree.get("extends") or []
    files = [base for base in ([bases] if isinstance(bases, str) else bases) if not base.startswith("preset:")]
    return _task(path.parent / files[-1]) if files else ""


def _listed(out: Path) -> str:
    """What ``benchmarks.steps`` found on one rank and on several."""
    return "; ".join(out.read_text().splitlines())


def missing_packages() -> list[str]:
    """The packages that harness requires and that are not installed."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].split("\n")
    names = [re.split(r"[<>=!~ ;]", line)[0] for line in lines if line and not line.startswith("#")]
    return [name for name in names if importlib.util.find_spec(name) is None]


def perform(check: Check, folder: Path, left_s: float = math.inf) -> Row:
    """Run the commands of ``check`` in a process group, which is ended with it, ``left_s`` seconds from now at the
    latest: the outcome is "late" then."""
    if check.skipped:
        return Row(check.name, "skipped", result=check.skipped)
    began = time.monotonic()
    log = folder / "output.txt"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environ = {**os.environ, "PYTHONPATH": path, "APEX_HARNESS_CACHE": str(folder / "cache")}
    for command in check.commands:
        with open(log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                allowed = began + left_s - time.monotonic()
                code: int | str = process.wait(max(0.0, min(check.limit_s, allowed)))
            except subprocess.TimeoutExpired:
                if allowed < check.limit_s:
                    return Row(check.name, "late", time.monotonic() - began, "the time of this call was up")
                code = f"no end after {check.limit_s:g} s"
            finally:
                _end(process)
        if code not in check.accepted:
            text = log.read_text(encoding="utf-8", errors="replace")
            print(text, file=sys.stderr)
            lines = [line for line in text.splitlines() if "rror" in line] or text.splitlines() or [""]
            return Row(check.name, "failed", time.monotonic() - began, f"{code}: {lines[-1].strip():.300}")
    try:
        return Row(check.name, "passed", time.monotonic() - began, check.result())
    except Exception as error:  # a run that ended well but is not what was asked for
        return Row(check.name, "failed", time.monotonic() - began, f"{type(error).__name__}: {error!s:.300}")


def _end(process: subprocess.Popen) -> None:
    """End ``process`` and what it started."""
    if process.poll() is None:
        process.terminate()  # harness launch passes it on
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def page(rows: Sequence[Row], device: str, commit: str) -> str:
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device == "cuda" else []
    what = f"{len(cards)} x {cards[0]}" if cards else "no GPU: a rehearsal on the CPU, which shows nothing about GPUs"
    count = {
        outcome: sum(row.outcome == outcome for row in rows) for outcome in ("passed", "failed", "skipped", "late")
    }
    lines = [[row.name, row.outcome, f"{row.seconds:.0f}", row.result.replace("|", "/")] for row in rows]
    facts = f"{machine.describe()}; CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    when = f"Date: {time.strftime('%Y-%m-%d')}, commit {commit}"
    counts = ", ".join(f"{number} {outcome}" for outcome, number in count.items())
    return (
        f"# Checks on GPUs\n\nDevices: {what}. Machine: {facts}. {when}.\n\n{counts}. Each training check runs a few "
        "steps on made-up data, so its loss only shows that it ran.\n\n"
        f"{machine.table(['check', 'outcome', 's', 'result'], lines)}\n"
    )


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # a copy without its repository


def announced(plan: Plan, todo: Sequence[Check], limit_s: float, out: Path) -> str:
    """What a call will do, how long it takes at most, and what it leaves out."""
    runs = [check for check in todo if not check.skipped]
    lines = [
        f"{len(runs)} checks on {plan.world} x {plan.device}, at most {limit_s / 60:.0f} minutes, most telling first; "
        f"each is written to {out} when it ends, and the same command continues",
        *(f"  {check.name} (at most {check.limit_s * len(check.commands):.0f} s)" for check in runs),
    ]
    if plan.missing:
        lines.append(f"not installed: {', '.join(plan.missing)}; put their wheels into a folder, then "
                     "pip install --no-index --find-links FOLDER, for the checks that need them")  # fmt: skip
    lines += [f"  left out: {check.name} ({check.skipped})" for check in todo if check.skipped]
    return "\n".join(lines)


def run_all(arguments: argparse.Namespace, out: Path) -> int:
    """Perform the checks, write the table after each, and return the exit code."""
    count = arguments.world if arguments.device == "cpu" else max(1, torch.cuda.device_count())
    kept, commit, began = out.with_suffix(".json"), _commit(), time.monotonic()
    earlier = json.loads(kept.read_text()) if kept.exists() else {}
    same = earlier.get("commit") == commit and earlier.get("device") == arguments.device
    rows = {row["name"]: Row(**row) for row in earlier["rows"]} if same else {}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        plan = Plan(arguments.device, count, arguments.steps, Path(folder), missing_packages())
        checks, done = {check.name: check for check in plan.checks()}, set[str]()
        todo = [
            check for name, check in checks.items()
            if (not arguments.only or any(word in name for word in arguments.only))
            and not (name in rows and rows[name].outcome == "passed")
        ]  # fmt: skip
        print(announced(plan, todo, arguments.limit_s, out), flush=True)
        if arguments.dry_run:
            return 0
        out.parent.mkdir(parents=True, exist_ok=True)
        for check in todo:
            if check.name in done:
                continue
            first = [checks[check.after]] if check.after and check.after not in done else []
            for each in [*first, check]:
                left_s = arguments.limit_s - (time.monotonic() - began)
                row = rows[each.name] = perform(each, Path(folder), left_s) if left_s > 0 else Row(each.name, "late")
                done.add(each.name)
                print(f"{row.outcome:8} {row.seconds:5.0f} s  {row.name}  {row.result}", flush=True)
            content = {"commit": commit, "device": arguments.device, "rows": [asdict(row) for row in rows.values()]}
            kept.write_text(json.dumps(content, indent=1) + "\n")
            out.write_text(page(list(rows.values()), arguments.device, commit))
    print(out)
    return 1 if any(row.outcome == "failed" for row in rows.values()) else 0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--world", type=int, default=2, help="ranks of a rehearsal on the CPU (default: 2)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each training check (default: 6)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="checks whose names contain one of these words")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, metavar="S", help="end after this many seconds")
    parser.add_argument("--dry-run", action="store_true", help="print the checks in their order, and do nothing")
    parser.add_argument("--out", type=Path, help="file to write (default: benchmarks/results/gpu.md)")
    arguments = parser.parse_args(words)
    if arguments.device == "cpu" and arguments.out is None:
        parser.error("--device cpu needs --out FILE: benchmarks/results/gpu.md is for figures of GPUs")
    if arguments.device == "cuda" and not torch.cuda.is_available() and not arguments.dry_run:
        print(_NO_GPU, file=sys.stderr)
        return 2
    return run_all(arguments, arguments.out or machine.RESULTS / "gpu.md")


if __name__ == "__main__":
    raise SystemExit(main())
