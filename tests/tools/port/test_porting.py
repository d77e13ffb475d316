"""Ports of whole scripts and of single idioms. docs/migrate.md has the common ones (test_docs.py)."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import harness.apex
from harness.apex import amp
from harness.apex.on_cpu import call_counter, redirect_cuda
from harness.errors import DataError
from harness.tools.port import porting
from harness.tools.port.context import AS_IS, BY_HAND, CHANGED, SAME
from tests.conftest import ROOT

SCRIPTS = ROOT / "tests" / "apex" / "scripts"


def ported(folder: Path, text: str, to: str = "torch") -> porting.Port:
    """The port of a script, which must parse."""
    path = folder / "script.py"
    path.write_bytes(text.encode())
    found = porting.port(path, to)
    ast.parse(found.text)
    return found


def imports(text: str) -> set[str]:
    """The top-level packages that a script imports, anywhere."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found |= {name.split(".")[0] for name in names}
    return found


# Whole scripts


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Runs a script alone, its CUDA calls on the CPU; returns the values in its last line."""

    def run(text: str, options: str, with_apex: bool) -> dict[str, float]:
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "train.py").write_text(text)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["train.py", *options.split()])
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        if with_apex:
            harness.apex.install()
        redirect_cuda()
        try:
            runpy.run_path("train.py", run_name="__main__")
        finally:
            amp.reset()
            harness.apex.uninstall()
            call_counter.reset()
        (line,) = re.findall(r"^rank 0 (.*)$", capfd.readouterr().out, re.M)
        return {name: float(value.split(",")[0]) for name, value in zip(*[iter(line.split())] * 2, strict=True)}

    return run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        # At O0 and O1, the same kernels run. At O2, Apex rounds weights to float16, too.
        ("imagenet_style", "--deterministic --opt-level O1", 1e-6),
        ("imagenet_style", "--deterministic --opt-level O2", 1e-3),
        ("imagenet_style", "--deterministic --opt-level O1 --loss-scale 128.0", 1e-6),
        ("gan_style", "--opt_level O0", 1e-6),
        # One loss scale instead of three skips other steps.
        ("gan_style", "--opt_level O1", 5e-2),
        # Autocast for the CPU leaves F.normalize in float16; for CUDA it casts to float32, as Apex did.
        ("selfsup_style", "", 3e-3),
    ],
)
def test_scripts_train_alike_on_torch(name, options, tolerance, run):
    original = (SCRIPTS / f"{name}.py").read_text()
    port = porting.port(SCRIPTS / f"{name}.py", "torch")
    assert port.is_complete
    assert not {"apex", "harness"} & imports(port.text)
    before, after = run(original, options, with_apex=True), run(port.text, options, with_apex=False)
    assert after["first"] == pytest.approx(before["first"], rel=1e-4)
    assert after["last"] == pytest.approx(before["last"], rel=tolerance)
    assert after["last"] < 0.9 * after["first"]


@pytest.mark.filterwarnings("ignore")
def test_script_trains_equally_on_harness(run):
    port = porting.port(SCRIPTS / "imagenet_style.py", "harness")
    assert port.is_complete
    assert imports(port.text) >= {"harness"}
    assert "apex" not in imports(port.text)
    options = "--deterministic --opt-level O2 --epochs 1"
    original = run((SCRIPTS / "imagenet_style.py").read_text(), options, with_apex=True)
    assert run(port.text, options, with_apex=False) == original


@pytest.mark.parametrize("name", ["imagenet_style", "gan_style", "selfsup_style"])
def test_everything_else_stays(name):
    """The patch only touches lines that have to do with Apex, and comments survive."""
    port = porting.port(SCRIPTS / f"{name}.py", "torch")
    before = (SCRIPTS / f"{name}.py").read_text()
    stripped = {line.strip() for line in port.text.splitlines()}
    lost = [line for line in before.splitlines() if line.strip() and line.strip() not in stripped]
    words = r"apex|amp|scaled|DDP|local_rank|step\(\)|to_python_float|no_grad|multi_tensor|except"
    words += "|opt_level|batchnorm_fp32|syncbn"
    call = r"try:|\)|model,|optimizer,|loss_scale=|\[netD, netG\]"
    assert [line for line in lost if not re.search(rf"{words}|^\s*({call})", line)] == []
    assert len(re.findall("# (?!noqa)", port.text)) >= len(re.findall("# (?!noqa)", before))


# Single idioms: (script, what its port has, what it has not)

LOOP = """\
from apex import amp
model, opt = amp.initialize(model, opt, opt_level="O1")
for x, y in data:
    loss = criterion(model(x), y)
    with amp.scale_loss(loss, opt) as scaled_loss:
        scaled_loss.backward()
    opt.step()
"""
CASES = {
    "levels": [
        (LOOP.replace("O1", "O5"), ["GradScaler(\"cuda\", enabled=False)", "dtype=torch.bfloat16):"], []),
        (LOOP.replace("O1", "O0"), ["GradScaler(\"cuda\", enabled=False)"], ["autocast"]),
        (LOOP.replace('"O1"', '"O2", loss_scale=128.0'), ["init_scale=128.0, growth_interval=10**9"], []),
        (LOOP.replace('opt_level="O1"', "**options"), ["enabled=options.get('opt_level', 'O1') != \"O0\""], []),
        (LOOP.replace('opt_level="O1"', "enabled=a.fp16"), ["enabled=a.fp16", "enabled=scaler.is_enabled()"], []),
        (LOOP.replace('"O1"', "level").replace("from", 'level = "O1"\nfrom'), ['GradScaler("cuda")\n'], ["!="]),
        (LOOP.replace("model, opt =", "net, opt =").replace("model(x)", "net(x)"), ["net = model\n"], []),
        (LOOP.replace("model, opt =", "model, opt = scaler, opt\n_ ="), ['grad_scaler = torch.amp.Grad'], []),
    ],
    "backward": [
        ("    with amp.scale_loss(loss, opt) as scaled_loss:\n        scaled_loss.backward()",
         "    with amp.scale_loss(loss, opt) as l: l.backward()",
         ["    scaler.scale(loss).backward()\n    scaler.step(opt)"]),
        ("        scaled_loss.backward()", "        # one\n        scaled_loss.backward()\n        log(scaled_loss)",
         ["    scaled_loss = scaler.scale(loss)\n    # one\n    scaled_loss.backward()\n    log(scaled_loss)\n"]),
        ("as scaled_loss:", "as scaled_loss:  # why", ["    # why\n    scaler.scale(loss).backward()"]),
        ("    loss = c", "    text = '''\nas it is'''\n    loss = model(f'''\n{x}\n''') + c", ["(f'''\n{x}\n''')"]),
    ],
    "steps": [
        ("    opt.step()", "    if i % 2: opt.step()", ["    if i % 2: scaler.step(opt); scaler.update()"]),
        ("    opt.step()", "    for o in [opt, other]:\n        o.step()",
         ["        scaler.step(o)\n    scaler.update()\n"]),
        ("    opt.step()", "    if a:\n        opt.step()\n    else:\n        opt.step()\n    end()",
         ["        scaler.step(opt)\n    scaler.update()\n    end()"]),
        ("    opt.step()", "    if a:\n        opt.step()\n    opt.zero_grad()",
         ["        scaler.step(opt)\n        scaler.update()\n    opt"]),
    ],
    "gradients": [
        ("    opt.step()", "    if i % 2:\n        clip_grad_norm_(model.parameters(), 1)\n        opt.step()",
         ["        scaler.unscale_(opt)\n        clip_grad_norm_(model.parameters(), 1)\n        scaler.step(opt)"]),
        ("    opt.step()", "    norm = sum(p.grad.norm() for p in model.parameters())\n    opt.step()",
         ["    scaler.unscale_(opt)\n    norm ="]),
        ("        scaled_loss.backward()",
         "        scaled_loss.backward()\n        clip_grad_norm_(amp.master_params(opt), 1)",
         ["    scaler.unscale_(opt)\n    clip_grad_norm_((p for group in opt"]),
    ],
    "forward": [
        ("    loss = criterion(model(x), y)\n",
         "    if a:\n        out = model(x)\n    else:\n        out = f(model, x)\n"
         "    y = y + 1\n    loss = c(out, y) / 2\n",
         ["    with torch.amp.autocast(\"cuda\", dtype=torch.float16):\n        if a:\n            out = model(x)\n",
          "        loss = c(out, y) / 2\n    scaler"]),
        ("for x, y in data:\n    loss = criterion(model(x), y)",
         "if a:\n    net = nn.DataParallel(model)\nelse:\n    net = model\nfor x, y in data:\n    out = net(x)\n"
         "    assert multi_tensor_applier.available\n    loss = criterion(out, y)",
         ["\nelse:\n    net = model\nfor", "16):\n        out = net(x)\n        loss = criterion(out, y)\n    scaler"]),
        ("for x, y", "with torch.no_grad():\n    model(1)\nfor x, y", ["no_grad(), torch.amp.autocast"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_idioms(kind, tmp_path):
    for case in CASES[kind]:
        if kind == "levels":
            text, expected, absent = case
        else:
            old, new, expected = case
            assert old in LOOP
            text, absent = LOOP.replace(old, new), []
            if "applier" in new:
                text = f"from apex.multi_tensor_apply import multi_tensor_applier\n{text}"
        port = ported(tmp_path, text)
        assert port.is_complete, port.report()
        assert "apex" not in imports(port.text)
        for part in expected:
            assert part in port.text, port.text
        for part in absent:
            assert part not in port.text, port.text


def left(port: porting.Port) -> list[tuple[int, str]]:
    return sorted((note.line, note.what) for note in port.notes if note.group == BY_HAND)


@pytest.mark.parametrize(
    ("text", "line", "what", "kept"),
    [
        # clipping once per micro-batch, outside the condition of the step: unscale_ would run twice
        (LOOP.replace("    opt.step()", "    clip(amp.master_params(opt))\n    if i:\n        opt.step()"), 7,
         "amp.master_params(opt) reads scaled gradients", "    clip(amp.master_params(opt))\n    if i:"),
        (LOOP.replace("opt.step()", "opt.step(closure)"), 7, "step with a closure", "    opt.step(closure)\n"),
        (LOOP.replace("for x", "amp._amp_state.loss_scalers[0]._loss_scale = 2\nfor x"), 3,
         "amp._amp_state.loss_scalers", "amp._amp_state.loss_scalers[0]._loss_scale = 2\n"),
        (LOOP.replace("with amp", "with a, amp"), 5, "scale_loss that is not the only item of a with statement",
         "    with a, amp.scale_loss(loss, opt) as scaled_loss:\n"),
        (LOOP.replace("for x", "run(amp)\nfor x"), 3, "amp", "run(amp)\n"),
        (LOOP.replace("    loss = criterion(model(x), y)\n", ""), 4, "no forward pass found before this loss", ""),
        (LOOP.partition("    with")[0], 2, "amp.initialize without a scale_loss in this file", ""),
        ("from apex import amp\ndef f(loss, opt):\n" + LOOP.partition("(model(x), y)\n")[2], 3, "amp.scale_loss",
         "    with amp.scale_loss(loss, opt) as scaled_loss:\n"),
        ("from apex.optimizers import FusedLAMB\nFusedLAMB(p)\n", 2, "FusedLAMB", "FusedLAMB(p)\n"),
        ("from apex.optimizers import FusedAdam\nFusedAdam(p, bias_correction=False)\n", 2,
         "FusedAdam(bias_correction=)",
         "FusedAdam(p, bias_correction=False)\n"),
        ("from apex.fp16_utils import FP16_Optimizer\nmodel.half()\nopt = FP16_Optimizer(opt)\n", 2, "model.half",
         "opt = FP16_Optimizer(opt)\n"),
        ("from apex.parallel import Reducer\nReducer(model)\n", 2, "Reducer", "Reducer(model)\n"),
    ],
)  # fmt: skip
def test_what_cannot_be_ported_is_left_with_a_comment(text, line, what, kept, tmp_path):
    """Nothing that would train wrong is written in its place."""
    port = ported(tmp_path, text)
    assert (line, what) in left(port)
    assert kept in port.text
    assert not port.is_complete
    if "without a scale_loss" not in what:
        assert port.text.count("# TODO(apex): ") >= 1


def test_parts_of_apex(tmp_path):
    port = ported(
        tmp_path,
        """\
import apex, torch
from apex.parallel import DistributedDataParallel as DDP, ReduceOp
from apex.fp16_utils import *
from apex.multi_tensor_apply import multi_tensor_applier
from apex.normalization import FusedRMSNorm
assert multi_tensor_applier.available
dist.all_reduce(x, op=ReduceOp.SUM)
model = DDP(module=model, message_size=1000)
group = apex.parallel.create_syncbn_process_group(4)
a = apex.optimizers.FusedAdam(p, 0.1, adam_w_mode=False, set_grad_none=True)
b = apex.optimizers.FusedSGD(p, 0.1, 0.9, nesterov=True)
c = apex.normalization.FusedLayerNorm(8)
d = FusedRMSNorm(8)
e = to_python_float(x + y) + to_python_float(f(x))
apex.amp.register_half_function(module, "g")
with apex.amp.disable_casts():
    h()
""",
    )
    assert port.is_complete, port.report()
    lines = port.text.splitlines()
    for line in [
        "import functools",
        "from torch.distributed import ReduceOp",
        "from torch.nn import RMSNorm as FusedRMSNorm",
        "dist.all_reduce(x, op=ReduceOp.SUM)",
        "model = DDP(module=model, broadcast_buffers=False)",
        "group = torch.distributed.new_subgroups(4)[0]",
        "a = torch.optim.Adam(p, 0.1)",
        "b = torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)",
        "c = torch.nn.LayerNorm(8)",
        "d = FusedRMSNorm(8, eps=1e-5)",
        "e = (x + y).item() + f(x).item()",
        "module.g = cast_inputs(torch.float16)(module.g)",
        'with torch.amp.autocast("cuda", enabled=False):',
    ]:
        assert line in lines, port.text
    assert imports(port.text) == {"functools", "torch"}
    assert {note.group for note in port.notes} == {SAME, CHANGED}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("type=int)", 'type=int, default=os.environ.get("LOCAL_RANK"))'),
        ("default=-1,)", 'default=int(os.environ.get("LOCAL_RANK", -1)),)'),
        ("default=env())", "default=env())"),
        ("**options)", "**options)"),
        ("required=True)", 'required="LOCAL_RANK" not in os.environ, default=os.environ.get("LOCAL_RANK"))'),
    ],
)
@pytest.mark.parametrize("to", ["torch", "harness"])
def test_local_rank(before, after, to, tmp_path):
    port = ported(tmp_path, f'from apex import amp\nparser.add_argument("--local_rank", {before}\n', to)
    assert f'parser.add_argument("--local_rank", "--local-rank", {after}\n' in port.text
    assert ("import os\n" in port.text) == ("os." in after)


def test_optional_imports(tmp_path):
    port = ported(
        tmp_path,
        """\
try:
    # mixed precision
    from apex import amp
    HAS_APEX = True
except ImportError:
    amp = None
    HAS_APEX = False
if fp16:
    try:
        from apex.parallel import DistributedDataParallel as DDP
    except ImportError:
        raise ImportError("no apex")
    assert amp is not None
else:
    from torch.nn.parallel import DistributedDataParallel as DDP
def f(amp):
    amp.anything()
""",
    )
    assert port.is_complete, port.report()
    assert (
        port.text
        == """\
# mixed precision
HAS_APEX = True
if fp16:
    from torch.nn.parallel import DistributedDataParallel as DDP
    assert True
else:
    from torch.nn.parallel import DistributedDataParallel as DDP
def f(amp):
    amp.anything()
"""
    )


def test_other_optional_imports_stay_optional(tmp_path):
    text = "try:\n    import finder\n    from apex import amp\nexcept ImportError:\n    print('no finder')\nf()\n"
    assert ported(tmp_path, text).text == text.replace("    from apex import amp\n", "")


def test_to_harness(tmp_path):
    text = """\
import apex.amp as amp, apex  # all
import apex.parallel
from apex import amp as a, optimizers
from apex.parallel.LARC import LARC
from apex.fp16_utils.fp16util import network_to_half
from apex.optimizers.fused_adam import FusedAdam
from apex.fp16_utils import *
import amp_C
from amp_C import multi_tensor_scale
"""
    port = ported(tmp_path, text, "harness")
    assert port.is_complete, port.report()
    assert "# all" in port.text
    exec(port.text, names := {})
    assert names["amp"] is names["a"] is harness.apex.amp
    assert names["apex"].parallel is harness.apex.parallel
    assert names["network_to_half"].__module__.startswith("harness.apex")
    absent = ported(tmp_path, "from apex.transformer import parallel_state\n", "harness")
    assert left(absent) == [(1, "apex.transformer.parallel_state does not exist in harness.apex")]
    assert "\nfrom apex.transformer import parallel_state\n" in absent.text


def test_what_surrounds_apex_is_reported(tmp_path):
    text = LOOP + "torch.load(f)\ntorch.load(f, weights_only=True)\ntorch.cuda.amp.GradScaler()\n"
    report = ported(tmp_path, text).report()
    assert re.search(r"Changed meaning:(.*\n)*? +8  torch.load\n +since torch 2.6, reads only plain data", report)
    assert " 9  torch.load" not in report
    assert re.search(
        r"Runs as it is:\n +10  torch.cuda.amp.GradScaler\n +the script also has a code path for torch's amp", report
    )
    assert report.startswith(f"{tmp_path}/script.py runs as it is with: python -m harness.apex")
    assert AS_IS in report


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("unit", ["  ", "\t"])
def test_format_survives(newline, unit, tmp_path):
    text = ("x = 'é'  # naïve; ünïcode columns\n" + LOOP).replace("    ", unit).replace("\n", newline)
    text = text.replace("criterion(model(x), y)", "criterion(  'ß', model(x), y)  # as it was")
    port = ported(tmp_path, text)
    assert f"{unit}{unit}loss = criterion(  'ß', model(x), y)  # as it was{newline}" in port.text
    assert port.text.count(newline) == port.text.count("\n")
    assert ported(tmp_path, port.text).text == port.text
    assert not ported(tmp_path, port.text).uses_apex


def test_scaler_exists_before_it_is_used(tmp_path):
    text = "import torch\nif tabs:\n\tpass\nmodel(x)\nif fp16:\n    from apex import amp\n    "
    text += "model, opt = amp.initialize(model, opt)\n" + LOOP.partition('"O1")\n')[2]
    text = text.replace("    loss = criterion(model(x), y)\n", "    if x:\n        loss = criterion(model(x), y)\n")
    lines = ported(tmp_path, text).text.splitlines()
    assert lines[1:3] == [
        "",
        'scaler = torch.amp.GradScaler("cuda", enabled=False)  # replaced where amp was initialized',
    ]
    assert lines.index('    scaler = torch.amp.GradScaler("cuda")') > 3
    assert "            loss = criterion(model(x), y)" in lines, "spaces in a block that has spaces"


def test_patch_applies_to_a_script_without_a_final_newline(tmp_path):
    port = ported(tmp_path, LOOP.rstrip())
    assert port.patch().count("\\ No newline at end of file") == 1
    assert port.text.endswith("scaler.update()\n")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"import apex\nprint 1\n", r"script.py:2: this is not Python 3"),
        (b"x = '\xff'\n", "not Python 3"),
        (None, "cannot read"),
    ],
)
def test_unusable_scripts(data, message, tmp_path):
    path = tmp_path / "script.py"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(DataError, match=message):
        porting.port(path, "torch")
