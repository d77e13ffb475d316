"""Which lines of a script use which parts of Apex."""

from __future__ import annotations

import pytest

from harness.errors import DataError
from harness.tools.port.uses import NOTHING, ApexScript, Use


def uses(folder, text: str) -> list[tuple[int, str, str]]:
    path = folder / "script.py"
    path.write_text(text)
    return [(use.line, use.name, use.section) for use in ApexScript(path).uses()]


def test_uses_by_line(tmp_path):
    text = """\
import apex, amp_C
from apex import amp as mixed
from apex.amp.frontend import initialize
from apex.fp16_utils import *
from apex.parallel import DistributedDataParallel as DDP, ReduceOp
import torch, amp
model = DDP(initialize(model, opt)[0])
with mixed.scale_loss(loss, opt) as scaled: scaled.backward()
print(to_python_float(loss), ReduceOp.SUM, apex.optimizers.FusedLAMB(p))
amp_C.multi_tensor_scale(65536, flag, lists, 1.0)
def f(mixed, apex):
    return mixed.anything + apex.anything
parser.add_argument("--local_rank", type=int)
amp.unrelated()
"""
    assert uses(tmp_path, text) == [
        (7, "apex.amp.initialize", "one-loss"),
        (7, "apex.parallel.DistributedDataParallel", "distributed-training"),
        (8, "apex.amp.scale_loss", "one-loss"),
        (9, "apex.fp16_utils.to_python_float", "fp16_optimizer-and-network_to_half"),
        (9, "apex.optimizers.FusedLAMB", NOTHING),
        (9, "apex.parallel.ReduceOp.SUM", "distributed-training"),
        (10, "apex.amp_C.multi_tensor_scale", NOTHING),
        (13, "--local_rank", "the-launchers-option"),
    ]


def test_the_usual_guard_is_no_use(tmp_path):
    assert uses(tmp_path, "try:\n    from apex import amp\nexcept ImportError:\n    amp = None\n") == []


@pytest.mark.parametrize(
    ("text", "line", "name"),
    [
        ("from apex.transformer import parallel_state\n", 1, "apex.transformer.parallel_state"),
        ("from apex.amp import initialize, autocast\n", 1, "apex.amp.autocast"),
        ("from apex.parallel.distributed import no_such\n", 1, "apex.parallel.distributed.no_such"),
        ("import apex.RNN.models\n", 1, "apex.RNN.models"),
        ("from apex.reparameterization import *\n", 1, "apex.reparameterization"),
        ("import apex\napex.amp.frontend.initialize(model)\n", 2, "apex.amp.frontend.initialize"),
        ("import apex\napex.contrib.sparsity.ASP.prune(model)\n", 2, "apex.contrib.sparsity.ASP.prune"),
    ],
)
def test_what_harness_apex_does_not_have(tmp_path, text, line, name):
    assert Use(line, name, "") in ApexScript(_write(tmp_path, text)).uses()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("from apex import amp\ndef train(model, amp=amp): pass\n", [2]),
        ("from apex import amp\n@amp.half_function\ndef f(amp): return amp.x\n", [2]),
        ("import apex\ndef f():\n    apex = 3\n    return apex.x\n", []),
        ("import apex\ndef f():\n    apex = 3\n    def g(): return apex.x\n    return lambda: apex.y\n", []),
        ("from apex import amp\nf = lambda amp=amp.init(): amp.initialize(x)\n", [2]),
        ("def f():\n    try: from apex import amp\n    except ImportError: amp = None\n    amp.init()\n", [4]),
        ("import apex\ndef f():\n    global apex\n    apex.amp.init()\n    apex = None\n", [4]),
        ("import apex\nclass A:\n    def f(self, x: apex.amp): return [apex.amp for _ in x]\n", [3]),
    ],
)
def test_names_of_functions(tmp_path, text, lines):
    """Each function has its own names; its defaults, decorators and annotations have those around it."""
    assert [line for line, *_ in uses(tmp_path, text)] == lines


def _write(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_script_without_apex(tmp_path):
    assert uses(tmp_path, "import torch\nparser.add_argument('--local_rank')\nfrom .apex import amp\namp.x()\n") == []


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
        ApexScript(path)


def test_uses_is_the_order_of_lines(tmp_path):
    assert [line for line, *_ in uses(tmp_path, "from apex import amp\n\namp.init()\namp.initialize()\n")] == [3, 4]
