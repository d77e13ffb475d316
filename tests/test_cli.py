"""The command line: its words, its exit codes, and driver.py. Verbs are tested with their packages."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from textwrap import indent
from types import SimpleNamespace

import pytest

from benchmarks.synthetic_runs import Fake, write_run
from harness import cli
from harness.distributed import streams
from harness.errors import EXIT_DONE, EXIT_USAGE
from harness.training import main
from tests.conftest import ROOT
from tests.fixtures import settings, write_rows, write_yaml

# A new word is added here too, so that it is a decision.
VERBS = {
    "check": "-c --config --json --world key=value",
    "compare": "--json --trust RUN_A RUN_B",
    "data": "WHAT",
    "doctor": "--json",
    "explain": "--json RUN",
    "export": "--format --out --trust RUN key=value",
    "generate": "-n --keep-existing --seed --start --temperature --trust RUN",
    "init": "--model -o --out --root CSV",
    "launch": "-c --config --detach --dry-run --engine --max-restarts --nnodes --nproc key=value",
    "port": "--patch SCRIPT",
    "predict": "--csv --images --out --trust --world RUN key=value",
    "report": "-o --json --out --trust RUN_OR_SWEEP",
    "schema": "--of",
    "settings": "--json --markdown WORD",
    "sweep": "-c --config --dry-run --retry-failed key=value",
    "train": "-c --config --local-rank --local_rank key=value",
    "verify-resume": "-c --checkpoints --config --engine --folder --full --json --kills --nproc --report "
    "--resume --seed --signal --steps --timeout key=value",
}

DATA = {
    "data folder": "--force folder out",
    "data mnist": "--from folder",
    "data split": "--by --eval --force --out --seed --stratify source",
}


def python(program: str, **options) -> subprocess.CompletedProcess:
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 250, **options}
    return subprocess.run([sys.executable, "-c", program], check=False, **options)


@pytest.fixture
def yaml_file(tmp_path):
    write_rows(tmp_path, "train", 8)
    write_rows(tmp_path, "eval", 4)
    return str(write_yaml(tmp_path / "x.yaml", settings(tmp_path)))


def words_of(capsys, call, *argv) -> set[str]:
    """The options and arguments in the help of a command."""
    with pytest.raises(SystemExit) as stop:
        call([*argv, "--help"])
    assert stop.value.code == 0
    arguments, _, options = capsys.readouterr().out.partition("\noptions:")
    _, _, arguments = arguments.partition("positional arguments:")
    found = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", options)) - {"-h", "--help"}
    return found | set(re.findall(r"^  (\S+)", arguments, re.M))


def test_the_words_are_these(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert re.findall(r"^    ([\w-]+)\s", text, re.M) == list(VERBS)
    assert "python -c 'import harness; help(harness)'" in " ".join(text.split())
    for verb, words in [*VERBS.items(), *DATA.items()]:
        assert words_of(capsys, cli.main, *verb.split()) == set(words.split()), verb


def test_what_needs_no_torch_does_not_import_it(tmp_path):
    """That import takes seconds, also on a login node: the help, a launcher, the doctor, a comparison, a report."""
    run = write_run(tmp_path / "run", Fake())
    program = f"""
import sys
from pathlib import Path
from harness import cli

def imported(*names):
    return sorted(set(names) & set(sys.modules))

try:
    cli.main(["--help"])
except SystemExit:
    assert not imported("torch", "numpy", "pyarrow", "pydantic", "omegaconf")
for engine in ("local", "torchrun", "slurm", "flyte"):
    words = ["--engine", engine, "--nproc", "2", "--dry-run"]
    assert cli.main(["launch", "-c", "configs/pet_names.yaml", *words]) == 0
from harness.tools.compare import command
from harness.tools.doctor import checks
assert not imported("torch", "pandas", "pyarrow"), imported("torch", "pandas", "pyarrow")
from harness.tools.report import page
page.write([Path({str(run)!r})])
sys.exit(bool(imported("torch")))
"""
    pytest.importorskip("plotly", reason="plotly is not installed: pip install 'apex-harness[report]'")
    done = python(program)
    assert (done.returncode, done.stderr) == (0, "")


def test_errors_of_settings_and_paths_come_before_the_import_of_torch(yaml_file, tmp_path):
    """That import takes seconds."""
    for name in ("good", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "typo.yaml").write_text(f"trian: {{epochs: 1}}\n{(tmp_path / 'x.yaml').read_text()}")
    (tmp_path / "runs" / "digits").mkdir()
    cases = {
        "launch -c typo.yaml --nproc 2": "trian: unknown key",
        "launch -c x.yaml --nproc 2 task.eval_csv=evla.csv": "did you mean eval.csv?",
        "train -c typo.yaml": "trian: unknown key; did you mean train?",
        "train -c tpyo.yaml": "did you mean typo.yaml?",
        "train -c x.yaml task.train_csv=trian.csv": "did you mean train.csv?",
        "train -c x.yaml task.label_column=kind": "set task.label_column=label",
        "train -c x.yaml task.root=goood": "did you mean good?",
        "check -c x.yaml parallel.strategy=fsdp optimizer.name=fused_lamb": "this optimizer needs complete parameters",
        "train -c x.yaml parallel.strategy=fsdp task.root=goood": "did you mean good?",
        "check -c typo.yaml": "trian: unknown key",
        "verify-resume -c typo.yaml": "trian: unknown key",
        "sweep -c typo.yaml": "this is the configuration of a run",
        "predict run/digits --csv train.csv --out a.csv": "did you mean runs/digits?",
        "export runs/digit --format onnx": "did you mean runs/digits?",
        "predict digits --csv train.csv --out a.csv": "digits: there is no such folder\n",
        "generate runs/digits": "this is not a run folder: it has no config.yaml",
        "compare runs/digit runs/digits": "did you mean runs/digits?",
        "report runs/digit": "did you mean runs/digits?",
        "init trian.csv": "did you mean train.csv?",
    }
    program = (
        "import sys; from harness import cli\n"
        f"for words in {list(cases)!r}:\n"
        "    code = cli.main(words.split())\n"
        "    print(code, 'torch' in sys.modules, file=sys.stderr)\n"
    )
    done = python(program, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    found = re.findall(r"(.*?)^(\d+) (True|False)\n", done.stderr, re.DOTALL | re.MULTILINE)
    assert len(found) == len(cases), done.stderr
    for (words, message), (text, code, torch) in zip(cases.items(), found, strict=True):
        assert message in text, words
        assert (code in ("2", "65"), torch) == (True, "False"), words


def test_train_passes_its_arguments_on(monkeypatch):
    seen = []
    monkeypatch.setattr(main, "main", lambda *arguments: seen.append(arguments) or 75)
    assert cli.main(["train", "-c", "x.yaml", "a=1", "--local_rank=2", "b=2"]) == 75
    assert cli.main(["train", "--local-rank", "1", "a=1", "--config", "y.yaml"]) == 75
    gc.unfreeze()  # train leaves this to the end of its process
    parent = os.getppid()
    expected = [
        ("x.yaml", ["a=1", "b=2"], os.environ, 2, parent, None),
        ("y.yaml", ["a=1"], os.environ, 1, parent, None),
    ]
    assert seen == expected


@pytest.mark.parametrize(("code", "limit"), [(75, "LEAVE_DONE_S"), (70, "LEAVE_S")])
def test_leave_names_and_ends_the_threads_of_the_user(code, limit):
    program = (
        "import threading, time; from harness.distributed import streams\n"
        f"streams.{limit} = 0.5\n"
        "threading.Thread(target=lambda: time.sleep(600), name='mine').start()\n"
        f"streams.leave({code})"
    )
    done = python(program)
    assert done.returncode == code
    assert done.stderr == "warning: thread mine is still running at <string>:3; exiting without it\n"


def test_leave_keeps_the_exit_code_and_loses_no_output():
    """Output is flushed, threads are joined, exit handlers run, and the interpreter's teardown cannot abort."""
    done = python("""
import atexit, os, threading, time
from concurrent.futures import ThreadPoolExecutor
from harness.distributed import streams

class Aborts:
    def __del__(self):
        os.abort()

aborts = Aborts()
atexit.register(print, "handler")
ThreadPoolExecutor(1).submit(int)  # its thread waits for more work
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("main")
streams.leave(75)
""")
    assert (done.returncode, done.stdout, done.stderr) == (75, "main\nthread\nhandler\n", "")


def test_signal_at_the_end_does_not_change_the_exit_code():
    done = python("""
import atexit, os, signal, time
from harness.distributed import signals, streams

def late():
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        os.kill(os.getpid(), number)
        time.sleep(0.1)

atexit.register(late)
signals.install()
streams.leave(75)
""")
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "")


def own_verb(folder, run: str, errors: int = subprocess.PIPE, **modules: str) -> subprocess.CompletedProcess:
    """Run a verb of the user's package ``own``. ``run``: body of its function; ``modules``: its other modules."""
    (folder / "own").mkdir()
    words = "HELP = 'test'\n\ndef add_arguments(parser): ...\n"
    modules["verb"] = f"{words}\ndef run(arguments):\n{indent(run, '    ')}"
    for name, text in modules.items():
        (folder / "own" / f"{name}.py").write_text(text)
    command, environ = [sys.executable, "-m", "harness", "own.verb"], {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=250, check=False
    )


@pytest.mark.parametrize(
    ("then", "code", "error"),
    [
        ("raise ValueError('in a callback') from None", 130, "interrupted (SIGINT)\n"),
        ("pass", 0, "stopping (SIGINT): now\n"),  # the next part of the command gets the signal
    ],
)
def test_library_may_convert_or_ignore_the_interruption(tmp_path, then, code, error):
    done = own_verb(
        tmp_path,
        f"""
import os, signal, threading, time
from harness.distributed import monitor

class Run:
    stopped = threading.Event()

    def follow(self):
        assert self.stopped.wait(30)
        return monitor.EngineReport()

    def stop(self):
        self.stopped.set()

try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
except BaseException:
    {then}
assert monitor.follow_until_done(Run, "now").signal == signal.SIGINT
return 0
""",
    )
    assert (done.returncode, done.stderr) == (code, error)


def harness(output: str, *words: str) -> tuple[int, str]:
    """(exit code, standard error) of a command whose standard output is redirected to ``output``."""
    command = f'exec "{sys.executable}" -m harness {" ".join(words)} {output}'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=250, cwd=ROOT, check=False)
    return done.returncode, done.stderr


def test_lost_output_is_an_error_of_a_command_that_only_prints(tmp_path):
    code, error = harness("> /dev/full", "schema")
    assert code == 70
    assert error == "error: cannot write to standard output: [Errno 28] No space left on device\n"
    assert harness(">&-", "schema") == (0, "")
    assert harness("2> /dev/full", "check", "-c", str(tmp_path / "none.yaml"))[0] == 2
    assert harness("2>&-", "check", "-c", str(tmp_path / "none.yaml"))[0] == 2


def test_error_stands_after_the_output_before_it(tmp_path):
    """Where both go to one file, of which Python writes standard output in blocks."""
    body = "from harness.errors import DataError\nprint('first')\nraise DataError('last')"
    done = own_verb(tmp_path, body, errors=subprocess.STDOUT)
    assert (done.returncode, done.stdout) == (65, "first\nerror: last\n")


@pytest.mark.parametrize("limit", [60.0, 0.0])
def test_output_waits_for_its_reader_or_is_lost(monkeypatch, limit):
    """In a full pipe that another program has made non-blocking, also if ``select`` finds room where there is none."""
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    with open(source, "rb", buffering=0) as reader, streams.Raw(sink, "w") as raw:
        with suppress(BlockingIOError):
            while os.write(sink, b"." * 4096):
                pass
        turns = iter([lambda: None, lambda: reader.read(1 << 20)])
        monkeypatch.setattr(streams, "select", SimpleNamespace(select=lambda *_: next(turns)()))
        monkeypatch.setattr(streams, "WRITE_S", limit)
        if limit:
            assert raw.write(b"the end") == 7
            assert reader.read(1 << 20) == b"the end"
        else:
            with pytest.raises(TimeoutError) as caught:
                raw.write(b"the end")
            assert raw.lost is caught.value


def test_reader_that_has_seen_enough_ends_a_command_quietly():
    """As ``| head`` does."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "harness", "schema"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=250, cwd=ROOT, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("words", ["", "a=1", "-c", "x.yaml y.yaml"])
def test_wrong_words_are_usage_errors(capsys, words):
    for line in (f"train {words}", f"check {words}", "schema a=1"):
        with pytest.raises(SystemExit) as stop:
            cli.main(line.split())
        assert stop.value.code == 2
        assert "usage:" in capsys.readouterr().err


def test_a_configuration_may_stand_without_its_option(monkeypatch, capsys, yaml_file):
    seen = []
    monkeypatch.setattr(main, "main", lambda *arguments: seen.append(arguments[:2]) or 0)
    for words in (["x.yaml", "a=1"], ["a=1", "x.yaml"], ["a=1", "-c", "x.yaml"]):
        assert cli.main(["train", "--local_rank=1", *words]) == 0  # as a rank, which reads it later
    gc.unfreeze()
    assert seen == [("x.yaml", ["a=1"])] * 3
    assert cli.main(["launch", yaml_file, "--nproc", "2", "--dry-run"]) == 0
    assert f"-c {yaml_file}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["check", "a=1"])
    assert "give one YAML file: harness check CONFIG (found: none)" in capsys.readouterr().err


@pytest.mark.parametrize(("rows", "hint"), [("a.csv", "--csv a.csv"), ("", "--csv CSV")])
def test_rows_to_predict_without_their_option(capsys, rows, hint):
    assert cli.main(["predict", "runs/x", *rows.split()]) == 2
    assert capsys.readouterr().err.endswith(f"\n  -> type: harness predict runs/x {hint}\n")


def test_only_what_is_required_is_called_so(capsys):
    with pytest.raises(SystemExit):
        cli.main(["predict", "--csv", "x.csv"])
    assert capsys.readouterr().err.endswith("required: RUN\n")


@pytest.mark.parametrize("words", ["train.epochs = 3", "train.epochs= 3", "train.epochs =3", "epochs 3"])
def test_a_setting_with_spaces_is_answered_with_one_without(capsys, words):
    with pytest.raises(SystemExit):
        cli.main(["check", "x.yaml", *words.split()])
    hint = "settings are written without spaces: train.epochs=3"
    assert f"give one YAML file: harness check CONFIG; {hint} (found: x.yaml {words})" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "hint"), [
    ("train -c x.yaml --nproc 2", "type: harness launch -c x.yaml --nproc 2"),
    ("train --nproc 2", "type: harness launch -c CONFIG --nproc 2"),
    ("train --nproc 2 x.yaml", "type: harness launch -c x.yaml --nproc 2"),
    ("train x.yaml --gpus=4", "type: harness launch -c x.yaml --nproc 4"),
    ("train x.yaml --epochs 3", "settings are written as key=value: train.epochs=3"),
    ("launch x.yaml --lr=0.1 --nproc 2", "settings are written as key=value: optimizer.lr=0.1"),
    ("train x.yaml --batch-size 32", "settings are written as key=value: batch.global=32"),
    ("train x.yaml --warmup-ratio 0.1", "settings are written as key=value; did you mean schedule.warmup? "
     "a number counts epochs; a share of the run is schedule.warmup=10%"),
    ("train x.yaml --world 2 seed=3", "type: harness launch -c x.yaml --nproc 2 seed=3"),
    ("train x.yaml --num_workers", "settings are written as key=value: data.num_workers=VALUE"),
    ("init x.csv --label a", "harness init CSV finds the columns by their contents; correct label_column and others in "
     "its YAML file"),
    ("init x.csv --force", "it overwrites nothing: remove the file first, or write another one with --out FILE"),
    ("check x.yaml --jsn", "did you mean --json?"),
    ("compare a b --everything", "harness compare --help lists its options"),
])  # fmt: skip
def test_an_unknown_option_is_answered_with_what_was_meant(capsys, line, hint):
    option = next(word for word in line.split() if word.startswith("--")).partition("=")[0]
    assert cli.main(line.split()) == 2
    what = f"error: command line: harness {line.split()[0]} has no option {option}"
    assert capsys.readouterr().err == f"{what}\n  -> {hint}\n"


def test_an_unknown_choice_is_answered_with_the_nearest_or_all(capsys):
    for choice, hint in (
        ("sweeps", "did you mean sweep?"),
        ("zip", "use one of experiment, sweep"),
    ):
        assert cli.main(["schema", "--of", choice]) == 2
        assert capsys.readouterr().err == f"error: command line: --of cannot be '{choice}'\n  -> {hint}\n"
    assert cli.main(["export", "runs/x", "--format", "hugingface"]) == 2
    shown = "error: --format: unknown export format 'hugingface'\n  -> did you mean huggingface?\n"
    assert capsys.readouterr().err == shown


def test_no_word_lists_the_verbs(capsys):
    assert cli.main([]) == 2
    listed = dict(re.findall(r"^    ([\w-]+)\s+(.*)", capsys.readouterr().err, re.M))
    assert list(listed) == list(VERBS)
    assert all(listed.values())


def test_a_misspelled_verb_and_words_that_are_not_utf8(capsys):
    assert cli.main(["trian", "-c", "x.yaml"]) == 2
    assert capsys.readouterr().err == "error: there is no command 'trian'\n  -> did you mean harness train?\n"
    for words in (["train", "-c", "/data/\udcff.yaml"], ["check", "-c", "x.yaml", "task.root=/data/\udcff"]):
        assert cli.main(words) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: command line: '")
        assert "\\udcff' is not UTF-8 text" in message or "\\udcff.yaml' is not UTF-8 text" in message
        message.encode()


@pytest.mark.parametrize("name", ["harness/__init__.py", "harness.py"])
def test_another_package_of_this_name_in_the_working_folder_is_refused(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert cli.main(["schema"]) == 2
    assert str(tmp_path / name) in capsys.readouterr().err
    (tmp_path / name).unlink()  # a folder without __init__.py hides nothing
    assert cli.main(["schema"]) == 0
    monkeypatch.chdir(ROOT)
    assert cli.main(["schema"]) == 0


def test_overrides_and_options_in_any_order(capsys, yaml_file):
    for words in (
        ["train.epochs=3", "-c", yaml_file, "--world", "2", "seed=1"],
        ["-c", yaml_file, "--world", "2", "train.epochs=3"],
        ["--world=2", "train.epochs=3", "seed=2", "-c", yaml_file],
    ):
        assert cli.main(["check", *words]) == 0
        out = capsys.readouterr().out
        assert "ranks: 2" in out
        assert "steps per epoch: 2\n          steps: 6\n" in out
        assert out.splitlines()[-2].startswith("not tried: ")
        assert "2 ranks (the trial is of one)" in out.splitlines()[-2]
        assert out.splitlines()[-1].startswith("no errors; to start the run: harness launch --nproc 2 -c ")


def test_check_as_json(capsys, yaml_file, tmp_path):
    def check(*words: str) -> tuple[int, dict]:
        code = cli.main(["check", "--json", "-c", yaml_file, *words])
        return code, json.loads(capsys.readouterr().out)

    code, found = check("train.epochs=3", "--world", "2")
    assert (code, found["errors"]) == (0, [])
    assert (found["facts"]["steps per epoch"], found["facts"]["steps"]) == (2, 6)
    code, found = check("model.name=cnn", "optimizer.name=adamm")
    assert (code, [error["where"] for error in found["errors"]]) == (
        2,
        [f"command line: {key}.name" for key in ("optimizer", "model")],
    )
    code, found = check("train.epoch=3")  # an error of the file itself
    assert (code, found["facts"], found["errors"][0]["exit_code"]) == (2, {}, 2)


def test_check_prints_facts_or_all_errors_and_the_highest_code(capsys, yaml_file, tmp_path):
    assert cli.main(["check", "-c", yaml_file]) == 0
    out, err = capsys.readouterr()
    assert "    train rows: 8\n" in out
    assert err == ""
    assert cli.main(["check", "-c", yaml_file, "model.name=cnn", "optimizer.name=adamm"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2
    (tmp_path / "train.csv").unlink()
    assert cli.main(["check", "-c", yaml_file, "optimizer.name=adamm"]) == 65
    assert cli.main(["check", "-c", str(tmp_path / "nope.yaml")]) == 2


def test_check_prints_the_traceback_of_own_code(capsys, yaml_file, monkeypatch):
    def loss(*_):
        raise LookupError("planned")

    monkeypatch.setattr("harness.tasks.image_csv.task.ImageCsv.loss", loss)
    assert cli.main(["check", "-c", yaml_file]) == 1
    message, _, trace = capsys.readouterr().err.partition("\n")
    assert message.endswith("loss() of the task fails on the training data: LookupError: planned")
    assert trace.splitlines()[:1] == ["Traceback (most recent call last):"]
    assert 'in loss\n    raise LookupError("planned")\n' in trace
    assert "trial.py" not in trace


@pytest.mark.parametrize("kind", ["experiment", "sweep"])
def test_schema(capsys, kind):
    assert cli.main(["schema", "--of", kind]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == f"apex-harness {kind}"


def test_local_rank_before_the_verb(monkeypatch):
    """torch.distributed.launch puts its option right after the program: ``-m harness --local-rank=1 train ...``."""
    seen = []
    monkeypatch.setattr(main, "main", lambda *arguments: seen.append(arguments[3]) or 0)
    assert cli.main(["--local-rank=1", "train", "-c", "x.yaml"]) == 0
    gc.unfreeze()
    assert seen == [1]


@pytest.mark.parametrize(("system", "lacks", "code"), [
    ("win32", ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGPIPE", "pthread_sigmask", "sigtimedwait"), EXIT_USAGE),
    ("darwin", ("sigtimedwait",), EXIT_DONE),
])  # fmt: skip
def test_another_operating_system(system, lacks, code):
    """As far as Linux can simulate it: without the signals and modules that Python lacks there."""
    absent = ["fcntl", "resource", "termios", "pwd"] if system == "win32" else []
    script = f"""
import argparse, asyncio, importlib.metadata, multiprocessing, signal, subprocess, sys, tempfile
import harness.config.plugins, harness.errors
sys.platform = {system!r}
for name in {lacks!r}:
    delattr(signal, name)
sys.modules.update(dict.fromkeys({absent!r}))
sys.argv = ["harness", "--help"]
from harness.cli import command
command()
"""
    done = python(script)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("WSL2" in done.stderr) == (system == "win32")


@pytest.mark.parametrize("words", [["--version"], ["train", "-c", "x.yaml"]])
def test_deleted_working_folder_is_an_error(tmp_path, words):
    program = f"import os, shutil, sys; os.chdir({str(tmp_path)!r}); shutil.rmtree({str(tmp_path)!r}); "
    program += f"from harness.__main__ import command; command({words})"
    ended = python(program)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: the working folder cannot be used: ")
    assert ended.stderr.count("\n") == 2  # with a hint


@pytest.mark.parametrize(("rank", "said"), [("0", "interrupted (SIGINT)\n"), ("1", "")])
def test_interruption_of_the_first_imports(rank, said):
    program = """
import os, signal, sys

class Interrupts:
    def find_spec(name, path, target=None):
        if name == "harness.config":  # which harness.cli imports
            os.kill(os.getpid(), signal.SIGINT)

from harness.__main__ import command
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background job of a shell, and so here
sys.meta_path.insert(0, Interrupts)
command(["--help"])
"""
    ended = python(program, env={**os.environ, "LOCAL_RANK": rank})
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", said)


@pytest.mark.parametrize(
    ("variables", "spins"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["default", "number", "policy"],
)
def test_idle_threads_of_torch_sleep_soon_unless_the_user_says_otherwise(variables, spins):
    program = """
import atexit, os, sys

@atexit.register
def _():
    print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)

import harness
"""
    environ = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    ended = python(program, env=environ | variables)
    assert ended.stdout.splitlines()[-1] == f"{spins} False", ended.stderr
