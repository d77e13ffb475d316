"""docs/migrate.md: the port of each "before" is its "after", and both train to the same loss.

CUDA calls run on the CPU, as under ``python -m harness.apex --device cpu``. ``before`` runs with harness.apex as
``apex``; ``after`` runs without any ``apex``.
"""

from __future__ import annotations

import re
import sys

import pytest
import torch

import harness.apex
from harness import cli
from harness.apex import amp
from harness.apex.on_cpu import call_counter, redirect_cuda
from harness.tools.port import porting
from tests.conftest import ROOT
from tests.ranks import free_port

PAGE = (ROOT / "docs" / "migrate.md").read_text()
BLOCKS = {mark: text for mark, text in re.findall(r"<!-- (.*?) -->\n```\w+\n(.*?)```", PAGE, re.S)}
IDIOMS = [mark.removeprefix("before: ") for mark in BLOCKS if mark.startswith("before: ")]
# The difference of the last losses. Autocast is O1 here, operation by operation. At O2 the original rounds weights and
# the loss's inputs to float16; Adam and two losses under one scale amplify rounding.
TOLERANCE = {"levels": 3e-3, "fp16_optimizer": 3e-3, "fused": 1e-3, "losses": 1e-3}


@pytest.fixture
def redirected(tmp_path, monkeypatch):
    """A working folder with data.py, whose scripts have their CUDA calls run on the CPU."""
    (tmp_path / "data.py").write_text(BLOCKS["data.py"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "data", None)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    yield tmp_path
    amp.reset()
    harness.apex.uninstall()
    call_counter.reset()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def train(text: str, with_apex: bool) -> dict:
    """Run a script; return its names."""
    if with_apex:
        harness.apex.install()
    redirect_cuda()
    sys.modules.pop("data")
    names = {"__name__": "__main__"}
    torch.manual_seed(0)
    try:
        exec(compile(text, "script.py", "exec"), names)
    finally:
        amp.reset()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        harness.apex.uninstall()
    assert with_apex or not {name for name in sys.modules if name.split(".")[0] == "apex"}
    return names


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("idiom", IDIOMS)
def test_before_becomes_after_and_trains_alike(idiom, redirected):
    before, after = BLOCKS[f"before: {idiom}"], BLOCKS[f"after: {idiom}"]
    script = redirected / "script.py"
    script.write_text(before)
    ported = porting.port(script, "torch")
    assert ported.text == after
    assert ported.is_complete
    original, port = train(before, with_apex=True), train(after, with_apex=False)
    losses = [float(names["loss"]) for names in (original, port)]
    assert losses[0] < 1.36, "it starts at 1.4"
    assert losses[1] == pytest.approx(losses[0], abs=TOLERANCE.get(idiom, 1e-5))
    # Not a comparison of float32 with itself: the ported script scales and casts, unless it turns amp off.
    assert ("dtype=torch.float16" in after) == (idiom != "local_rank")
    assert port["scaler"].is_enabled() == (idiom != "local_rank")


def test_all_idioms_are_covered():
    assert len(IDIOMS) == len(re.findall(r"^### ", PAGE, re.M)) == 11
    assert len(re.findall(r"^```python$", PAGE, re.M)) == 2 * len(IDIOMS) + 2


def test_conversion_of_a_scale_from_apex(redirected):
    model = torch.nn.Linear(1, 1)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**12
    names: dict = {}
    exec(BLOCKS["convert"], names)
    state = amp.state_dict()
    amp.reset()  # before another replacement of the same methods of Tensor
    redirect_cuda()
    scaler = torch.amp.GradScaler("cuda")
    scaler.load_state_dict(names["from_apex"](state))
    assert scaler.get_scale() == 2.0**12


def test_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BLOCKS["before: imports"])
    commands = [line.split("#")[0].split() for line in PAGE.split("```bash\n")[1].split("```")[0].splitlines()]
    for words in commands:
        if words[0] == "harness":
            assert cli.main(words[1:]) == 0
    assert [words for words in commands if words[0] != "harness"] == [["patch", "train.py", "train.py.patch"]]
    assert "from harness.apex import amp" in capsys.readouterr().out


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
