"""``python -m harness.apex`` in real processes: alone, under launchers, and with spawned children.

Each process takes seconds to import torch, so there are few of them and each checks a lot.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch

from harness.apex.runner import main, parse
from tests.apex.forked import run_apex
from tests.conftest import ROOT

pytestmark = pytest.mark.contract("9")

TIMEOUT_S = 120


def run(*words, cwd, **environ):
    """Run this python with ``words``; harness is importable, launch variables are not set."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


# The script runs as under python


PLAIN = '''\
    """Prints how it is run."""
    import atexit, pickle, sys, threading, time
    import beside

    class Own:
        pass

    assert type(pickle.loads(pickle.dumps(Own()))) is Own
    assert sys.modules["__main__"].Own is Own
    atexit.register(lambda: print("at exit", Own.__name__))
    print(__name__, __doc__, __file__, __package__, getattr(__spec__, "name", None), sorted(globals()))
    print(sys.argv, sys.path[0], sys.argv[0], type(__builtins__))

    def fail():
        try:
            {}["first"]
        except KeyError:
            raise ValueError("second")

    how = sys.argv[1]
    if how == "raise":
        fail()
    if how == "hook":
        sys.excepthook = lambda kind, error, trace: print("hook", kind, trace.tb_frame.f_code.co_name, file=sys.stderr)
        fail()
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "thread":
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        sys.exit()
    sys.exit("some words")
'''


@pytest.mark.parametrize("how", ["raise", "hook", "interrupt", "thread", "text"])
def test_script_runs_as_under_python(tmp_path, how):
    write(tmp_path, "project/train.py", PLAIN)
    write(tmp_path, "project/beside.py", "")
    (tmp_path / "link.py").symlink_to(tmp_path / "project" / "train.py")
    for script in ("project/train.py", "link.py"):
        words = [script, how, "--device", "cuda", "-h"]
        theirs, ours = run(*words, cwd=tmp_path), run("-m", "harness.apex", *words, cwd=tmp_path)
        assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)
        assert "at exit Own" in ours.stdout
        if how != "raise":
            break


def test_module_runs_as_under_python(tmp_path):
    write(tmp_path, "project/train.py", PLAIN)
    write(tmp_path, "project/__init__.py", "")
    write(tmp_path, "project/__main__.py", "from project import train")
    write(tmp_path, "beside.py", "")
    for name in ("project.train", "project"):
        words = ["-m", name, "raise"]
        theirs, ours = run(*words, cwd=tmp_path), run("-m", "harness.apex", *words, cwd=tmp_path)
        assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
        # Python 3.10 shows runpy's source, later ones have it frozen.
        without_runpy = re.sub(r'  File "[^"]*runpy[^"]*", line .*\n(    .*\n)?', "", theirs.stderr)
        assert without_runpy == ours.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_safe_path_is_kept(tmp_path):
    """With it, python puts no folder first in sys.path, so the runner must not replace the first one."""
    write(tmp_path, "train.py", "import sys, harness\nprint(sys.path)")
    for words in (["train.py"], ["-m", "train"]):
        path = f"{ROOT}{os.pathsep}{tmp_path}" if words[0] == "-m" else str(ROOT)
        environ = {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}
        theirs = run(*words, cwd=tmp_path, **environ)
        ours = run("-m", "harness.apex", *words, cwd=tmp_path, **environ)
        assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout) == (0, theirs.stdout), ours.stderr


@pytest.mark.parametrize("text", ["x = (1\n", "  x = 1\n", "import apex.transformer\n"])
def test_errors_of_a_script_look_as_under_python(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    done = run("-m", "harness.apex", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "harness/apex/runner.py" not in done.stderr
    if "apex" not in text:
        assert done.stderr == run("train.py", cwd=tmp_path).stderr
    else:
        assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 1')


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_script_that_wants_a_device_that_is_not_there(tmp_path):
    (tmp_path / "train.py").write_text("import torch\ntorch.cuda.set_device(0)\n")
    done = run("-m", "harness.apex", "train.py", cwd=tmp_path)
    assert (done.returncode, "--device cpu" in done.stderr) == (1, True)


def test_encoding_is_respected(tmp_path):
    (tmp_path / "train.py").write_bytes("# coding: latin-1\nassert ascii('é') == ascii(chr(233))\n".encode("latin-1"))
    done = run("-m", "harness.apex", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


# The command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py"], "cannot open the script 'train.py': No such file"),
        (["."], "cannot open the script '.': Is a directory"),
        (["-m", "no.such"], "cannot run module 'no.such': No module named 'no'"),
        ([], "no script given"),
        (["--device", "cpu"], "no script given"),
        (["--device"], "--device needs a value"),
        (["--device=cuda", "t.py"], "--device accepts only cpu, not 'cuda'"),
        (["--local-rank=one", "t.py"], "--local-rank must be a number, not 'one'"),
        (["--lr", "1", "t.py"], "unknown option '--lr'; options of the script go after the script"),
        (["-m"], "-m needs the name of a module"),
    ],
)
def test_usage_errors(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "usage: python -m harness.apex" in err


def test_help(capsys):
    main(["--help"])
    assert capsys.readouterr().out.startswith("usage: ")


def test_options_after_the_script_are_the_scripts():
    context, args = parse(["--local-rank=1", "--device", "cpu", "train.py", "--device", "cuda", "--local_rank", "7"])
    assert (context.name, context.local_rank, context.on_cpu, context.is_module) == ("train.py", "1", True, False)
    assert args == ["--device", "cuda", "--local_rank", "7"]
    context, args = parse(["--trust-checkpoints", "--local_rank", "2", "-m", "package.train", "-m", "x"])
    assert (context.name, context.local_rank, context.is_module) == ("package.train", "2", True)
    assert context.trust_checkpoints
    assert not context.modernize
    assert args == ["-m", "x"]
    assert parse(["-h", "train.py"]) is None


# Launchers, redirection, spawned processes


DISTRIBUTED = """\
    import argparse, os, sys
    import torch
    from apex.parallel import Reducer

    assert sys.argv[1:] == ["--local_rank=" + os.environ["LOCAL_RANK"]], sys.argv
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", default=0, type=int)
    args = parser.parse_args()
    torch.cuda.set_device(args.local_rank)
    torch.distributed.init_process_group(backend="nccl", init_method="env://")
    assert torch.cuda.device_count() == 2
    x = torch.full((1,), args.local_rank + 1.0, device="cuda")
    Reducer([x]).reduce()
    os.write(1, b"rank %d averages %.1f\\n" % (args.local_rank, x.item()))
    torch.distributed.destroy_process_group()
"""


@pytest.mark.contract("6.5.simple", "7.2", "9")
def test_script_on_two_ranks(tmp_path):
    """``test_local_rank.py`` has the other spellings of the option, ``test_docs.py`` runs the launchers."""
    write(tmp_path, "train.py", DISTRIBUTED)
    done = run_apex("--device", "cpu", "train.py", cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert {f"rank {rank} averages 1.5" for rank in (0, 1)} <= set(done.stdout.splitlines())
    assert done.stderr.count("harness.apex --device cpu: calls that ran on the CPU") == 1, "only local rank 0 prints it"
    for name in ("init_process_group(nccl)", "torch.cuda.set_device", "torch.full(device=cuda)"):
        assert name in done.stderr


@pytest.mark.slow
def test_list_of_redirected_calls_is_printed_however_the_script_ends(tmp_path):
    write(
        tmp_path,
        "train.py",
        """\
        import os, sys, torch
        torch.ones(1).cuda()
        print("x" * 10)
        if sys.argv[1] == "raise":
            torch.ones(2) @ torch.ones(3).cuda()
        sys.exit(int(sys.argv[1])) if sys.argv[1] != "_exit" else os._exit(0)
        """,
    )
    for how, code, printed in (("raise", 1, True), ("5", 5, True), ("_exit", 0, False)):
        words = ["--device=cpu", "train.py", how]
        done = run("-m", "harness.apex", *words, cwd=tmp_path) if how == "raise" else run_apex(*words, cwd=tmp_path)
        assert done.returncode == code
        assert ("Tensor.cuda" in done.stderr) == printed
        if how == "raise":
            assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 5')
        if how != "_exit":
            assert done.stdout == "x" * 10 + "\n"
    done = run_apex("--device=cpu", "train.py", "0", cwd=tmp_path, LOCAL_RANK="1")
    assert (done.returncode, done.stderr) == (0, "")


SPAWNING = """\
    import argparse
    import sys
    from collections import Iterable  # --modernize restores it, in children too

    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from apex import amp
    from apex.parallel import DistributedDataParallel as DDP
    import beside

    parser = argparse.ArgumentParser()
    parser.add_argument("--init")
    parser.add_argument("--loaders", nargs="+")
    args = parser.parse_args()  # also in children, as many do
    steps = 0


    class Batches(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            import apex

            assert apex.amp.__name__ == "harness.apex.amp"
            return torch.ones(4).cuda() * index


    class Config:
        opt_level = "O2"


    def worker(gpu, num_gpus, config):
        global steps
        torch.cuda.set_device(gpu)
        dist.init_process_group("nccl", init_method=args.init, world_size=num_gpus, rank=gpu)
        torch.manual_seed(gpu)
        model = torch.nn.Linear(4, 2).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        model, optimizer = amp.initialize(model, optimizer, opt_level=config.opt_level, verbosity=0)
        model = DDP(model)
        loader = torch.utils.data.DataLoader(Batches(), 4, num_workers=1, multiprocessing_context=args.loaders[gpu])
        for x in loader:
            with amp.scale_loss(model(x).mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            steps += 1
        x = sum(p.float().sum() for p in model.parameters())
        other = x.clone()
        dist.broadcast(other, 0)
        assert x == other and type(config) is Config and config.opt_level == "O2"
        words = ["gpu", gpu, steps, __name__, sys.argv[0], sys.argv[-1], beside.here]
        sys.stdout.write(" ".join(map(str, words)) + "\\n")  # in one piece: two processes write
        sys.stdout.flush()
        dist.destroy_process_group()


    if __name__ == "__main__":
        mp.spawn(worker, nprocs=torch.cuda.device_count(), args=(torch.cuda.device_count(), Config()))
        print("spawned", steps)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "loaders"), [("script", ["spawn", "forkserver"]), ("module", ["fork"])])
def test_spawned_processes_are_set_up_like_their_parent(tmp_path, how, loaders):
    """Through torch.multiprocessing.spawn, and loader workers of its children; the script's folder has no harness."""
    write(tmp_path, "project/train.py", SPAWNING)
    write(tmp_path, "project/beside.py", "here = 1")
    words = ["project/train.py"] if how == "script" else ["-m", "train"]
    cwd = tmp_path if how == "script" else tmp_path / "project"
    init, ranks = f"file://{tmp_path}/init", len(loaders)
    done = run(
        *["-m", "harness.apex", "--device", "cpu", "--modernize", *words, "--init", init, "--loaders", *loaders],
        cwd=cwd,
        LOCAL_WORLD_SIZE=str(ranks),
    )
    assert done.returncode == 0, done.stderr
    main = "project/train.py" if how == "script" else f"{tmp_path}/project/train.py"
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"gpu {gpu} 2 __mp_main__ {main} {loaders[-1]} 1" for gpu in range(ranks)] + ["spawned 0"]
    first, second = (done.stderr.index(f"harness.apex {option}: ") for option in ("--device cpu", "--modernize"))
    assert first < second
    assert re.search(r"\b[1-9]\d* +collections.Iterable", done.stderr)
