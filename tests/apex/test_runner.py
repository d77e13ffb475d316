"""``python -m harness.apex`` as real processes: the script is run as python runs it, alone, launched and spawning.

A process takes seconds to import torch, so there are few, and each checks much.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest

from harness.apex.runner import UsageError, parse
from tests.conftest import ROOT

pytestmark = pytest.mark.contract("9")

TIMEOUT_S = 120


def run(*words, cwd, **environ):
    """A finished process of this python with ``words``, which finds harness by its installation alone."""
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


# As python runs it


PLAIN = '''\
    """What a script can see of how it is run."""
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
    sys.exit({"code": 3, "text": "some words", "bool": True, "none": None}[how])
'''


@pytest.mark.parametrize("how", ["raise", "hook", "interrupt", "thread", "code", "text", "bool", "none"])
def test_a_script_is_run_as_python_runs_it(tmp_path, how):
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


def test_a_module_is_run_as_python_runs_it(tmp_path):
    write(tmp_path, "project/train.py", PLAIN)
    write(tmp_path, "project/__init__.py", "")
    write(tmp_path, "project/__main__.py", "from project import train")
    write(tmp_path, "beside.py", "")
    for name in ("project.train", "project"):
        words = ["-m", name, "raise"]
        theirs, ours = run(*words, cwd=tmp_path), run("-m", "harness.apex", *words, cwd=tmp_path)
        assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
        assert [line for line in theirs.stderr.splitlines() if "runpy" not in line] == ours.stderr.splitlines()


@pytest.mark.parametrize("text", ["x = (1\n", "  x = 1\n", "import apex.contrib\n"])
def test_a_script_that_is_wrong(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    done = run("-m", "harness.apex", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "harness/apex/runner.py" not in done.stderr
    if "apex" not in text:
        assert done.stderr == run("train.py", cwd=tmp_path).stderr
    else:
        assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 1')


def test_an_encoding_is_respected(tmp_path):
    (tmp_path / "train.py").write_bytes("# coding: latin-1\nassert ascii('é') == ascii(chr(233))\n".encode("latin-1"))
    done = run("-m", "harness.apex", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


# The command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script given"),
        (["--device", "cpu"], "no script given"),
        (["--device"], "--device needs a value"),
        (["--device=cuda", "t.py"], "--device accepts only cpu, not 'cuda'"),
        (["--local-rank=one", "t.py"], "--local-rank must be a number, not 'one'"),
        (["--lr", "1", "t.py"], "unknown option '--lr'; options of the script go after the script"),
        (["-m"], "-m needs the name of a module"),
    ],
)
def test_usage_errors(words, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(words)


def test_usage_on_the_terminal(tmp_path):
    for words, message in (
        (["train.py"], "cannot open the script 'train.py': No such file"),
        (["."], "cannot open the script '.': Is a directory"),
        (["-m", "no.such"], "cannot run module 'no.such': No module named 'no'"),
        (["--device", "tpu", "x.py"], "--device accepts only cpu"),
    ):
        done = run("-m", "harness.apex", *words, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stdout == ""
        assert message in done.stderr
        assert "usage: python -m harness.apex" in done.stderr
    done = run("-m", "harness.apex", "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


def test_what_is_before_the_script_is_ours_and_after_it_the_scripts():
    command = parse(["--local-rank=1", "--device", "cpu", "train.py", "--device", "cuda", "--local_rank", "7"])
    assert (command.name, command.local_rank, command.on_cpu, command.is_module) == ("train.py", "1", True, False)
    assert command.args == ["--device", "cuda", "--local_rank", "7"]
    command = parse(["--local_rank", "2", "-m", "package.train", "-m", "x"])
    assert (command.name, command.local_rank, command.is_module) == ("package.train", "2", True)
    assert command.args == ["-m", "x"]
    assert parse(["-h", "train.py"]) is None


# Launched, redirected, spawning


SIMPLE = """\
    import argparse
    import os
    import sys

    import torch
    from apex import amp
    from apex.parallel import DistributedDataParallel

    assert sys.argv[1].startswith("OPTION=") == LAUNCHED, sys.argv
    parser = argparse.ArgumentParser()
    parser.add_argument("OPTION", default=0, type=int)
    args = parser.parse_args()
    args.distributed = "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1
    torch.cuda.set_device(args.local_rank)
    torch.distributed.init_process_group(backend="nccl", init_method="env://")
    assert torch.cuda.device_count() == 2
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.local_rank)

    x = torch.randn(64, 1024 // 16, device="cuda")
    y = torch.randn(64, 16, device="cuda")
    model = torch.nn.Linear(1024 // 16, 16).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0)
    model = DistributedDataParallel(model)
    loss_fn = torch.nn.MSELoss().cuda()
    first = None
    for t in range(50):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        first = loss.item() if first is None else first
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    total = sum(p.double().sum() for p in model.parameters())
    both = [torch.zeros_like(total) for _ in range(2)]
    torch.distributed.all_gather(both, total)
    assert both[0] == both[1] and loss.item() < 0.7 * first, (both, first, loss.item())
    os.write(1, ("rank %d of %s done\\n" % (args.local_rank, os.environ["LOCAL_RANK"])).encode())
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.contract("6.5.simple", "7.2", "9")
@pytest.mark.parametrize(
    ("launcher", "option"),
    [
        (["torch.distributed.launch", "--nproc_per_node=2"], "--local_rank"),
        (["torch.distributed.launch", "--nproc_per_node=2"], "--local-rank"),
        (["torch.distributed.run", "--nproc_per_node=2"], "--local_rank"),
    ],
    ids=["launch-underscore", "launch-dash", "torchrun"],
)
def test_a_minimal_distributed_script(tmp_path, launcher, option):
    launched = launcher[0].endswith("launch")
    text = SIMPLE.replace("OPTION", option)
    if launched:
        text = text.replace("LAUNCHED", "True")
    else:
        text = "\n".join(line for line in textwrap.dedent(text).splitlines() if "LAUNCHED" not in line)
    write(tmp_path, "train.py", text)
    done = run("-m", *launcher, "-m", "harness.apex", "--device", "cpu", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {f"rank {rank} of {rank} done" for rank in (0, 1)} <= set(done.stdout.splitlines())
    assert done.stderr.count("harness.apex --device cpu: calls that ran on the CPU") == 1, "only local rank 0 prints it"
    for name in ("init_process_group(nccl)", "torch.cuda.set_device", "torch.randn(device=cuda)", "Module.cuda"):
        assert name in done.stderr


def test_the_list_comes_whatever_ends_the_script(tmp_path):
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
    for how, code, told in (("raise", 1, True), ("5", 5, True), ("_exit", 0, False)):
        done = run("-m", "harness.apex", "--device=cpu", "train.py", how, cwd=tmp_path)
        assert done.returncode == code
        assert ("Tensor.cuda" in done.stderr) == told
        if how == "raise":
            assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 5')
        if how != "_exit":
            assert done.stdout == "x" * 10 + "\n"
    done = run("-m", "harness.apex", "--device=cpu", "train.py", "0", cwd=tmp_path, LOCAL_RANK="1")
    assert (done.returncode, done.stderr) == (0, "")


SPAWNING = """\
    import argparse
    import sys

    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from apex import amp
    from apex.parallel import DistributedDataParallel as DDP
    import beside

    parser = argparse.ArgumentParser()
    parser.add_argument("--init")
    parser.add_argument("--loader")
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
        loader = torch.utils.data.DataLoader(Batches(), 4, num_workers=1, multiprocessing_context=args.loader)
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
@pytest.mark.parametrize(("how", "loader"), [("script", "spawn"), ("module", "forkserver")])
def test_children_live_in_the_same_world(tmp_path, how, loader):
    """torch.multiprocessing.spawn, and loader workers of the spawned; the script's folder is no place of harness."""
    write(tmp_path, "project/train.py", SPAWNING)
    write(tmp_path, "project/beside.py", "here = 1")
    words = ["project/train.py"] if how == "script" else ["-m", "train"]
    cwd = tmp_path if how == "script" else tmp_path / "project"
    init = f"file://{tmp_path}/init"
    done = run(
        *["-m", "harness.apex", "--device", "cpu", *words, "--init", init, "--loader", loader],
        cwd=cwd,
        LOCAL_WORLD_SIZE="2",
    )
    assert done.returncode == 0, done.stderr
    main = "project/train.py" if how == "script" else f"{tmp_path}/project/train.py"
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"gpu {gpu} 2 __mp_main__ {main} {loader} 1" for gpu in (0, 1)] + ["spawned 0"]
    assert "(this process and 4 that it started)" in done.stderr
    assert re.search(r"\b18 +Tensor.cuda\n|\b16 +Tensor.cuda\n", done.stderr)
    assert re.search(r"\b2 +init_process_group\(nccl\)", done.stderr)
