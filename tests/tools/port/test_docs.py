"""docs/migrate.md: each example trains to the same loss with harness.apex as ``apex`` and with PyTorch alone.

CUDA calls run on the CPU, as under ``python -m harness.apex --device cpu``.
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
from harness.tools.port import uses
from tests.conftest import ROOT
from tests.ranks import free_port

PAGE = (ROOT / "docs" / "migrate.md").read_text()
BLOCKS = {mark: text for mark, text in re.findall(r"<!-- (.*?) -->\n```\w+\n(.*?)```", PAGE, re.S)}
EXAMPLES = [mark.removeprefix("before: ") for mark in BLOCKS if mark.startswith("before: ")]
# The difference of the last losses. Autocast is O1 here, operation by operation. At O2 and under FP16_Optimizer,
# weights are rounded to float16; two losses under one scale, and Adam, amplify rounding.
TOLERANCE = {
    "opt levels": 3e-3, "fp16_optimizer and network_to_half": 3e-3, "several losses": 1e-3,
    "fused optimizers and layers": 1e-3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """The environment of the only rank. Restores what an example leaves behind."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    yield
    clean()
    call_counter.reset()


def clean() -> None:
    amp.reset()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    harness.apex.uninstall()


def train(text: str, with_apex: bool) -> float:
    """The last loss of an example."""
    if with_apex:
        harness.apex.install()
    redirect_cuda()
    names = {"__name__": "__main__"}
    try:
        exec(compile(BLOCKS["setup"] + text, "docs/migrate.md", "exec"), names)
        if not with_apex:
            assert not {name for name in sys.modules if name.split(".")[0] == "apex"}
    finally:
        clean()
    return float(names["loss"])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("example", EXAMPLES)
def test_both_train_alike(example):
    before, after = BLOCKS[f"before: {example}"], BLOCKS[f"after: {example}"]
    assert "apex" in before
    losses = [train(before, with_apex=True), train(after, with_apex=False)]
    assert losses[0] < 1.36, "it starts at 1.4"
    assert losses[1] == pytest.approx(losses[0], abs=TOLERANCE.get(example, 1e-5))


def test_all_code_is_run():
    assert PAGE.count("```python") == 2 * len(EXAMPLES) + len(["setup", "convert", "launcher"])
    assert set(BLOCKS) == {f"{when}: {each}" for each in EXAMPLES for when in ("before", "after")} | {
        "setup", "convert", "launcher",
    }  # fmt: skip


@pytest.mark.parametrize(("words", "environ"), [([], "3"), (["--local-rank=3"], "0"), (["--local_rank", "3"], "0")])
def test_launchers_option(words, environ, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", environ)
    exec(BLOCKS["launcher"], names := {})
    assert names["parser"].parse_args(words).local_rank == 3


def test_conversion_of_a_scale_from_apex():
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
    (tmp_path / "train.py").write_text(BLOCKS["setup"] + BLOCKS["before: one loss"])
    commands = [line.split("#")[0].split() for line in PAGE.split("```bash\n")[1].split("```")[0].splitlines()]
    for words in commands:
        if words[0] == "harness":
            assert cli.main(words[1:]) == 0
    assert [words for words in commands if words[0] != "harness"] == [["patch", "train.py", "train.py.patch"]]
    assert "from harness.apex import amp" in (tmp_path / "train.py.patch").read_text()
    assert "migrate.md#one-loss" in capsys.readouterr().out


def anchors() -> set[str]:
    """As GitHub names them."""
    headings = re.findall(r"^##+ (.*)$", PAGE, re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_sections_exist():
    assert set(uses.SECTIONS) <= anchors()


@pytest.mark.parametrize("package", ["amp", "fp16_utils", "normalization", "optimizers", "parallel"])
def test_every_public_name_has_a_section(package):
    known = {name for names in uses.SECTIONS.values() for name in names.split()}
    added = {"reset"}  # Apex had no such function
    assert set(getattr(harness.apex, package).__all__) - added <= known
