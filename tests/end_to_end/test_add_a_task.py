"""docs/add_a_task.md: its files are written and its commands run, exactly as printed."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pandas as pd
import pytest
import torch

from tests.conftest import ROOT
from tests.end_to_end.processes import shell

QUICK = ["train.epochs=8", "precision.opt_level=O0"]
PAGE = (ROOT / "docs" / "add_a_task.md").read_text()


def test_function_on_gradients_changes_them_in_place():
    (text,) = re.findall(r"<!-- function -->\n```python\n(.*?)```", PAGE, re.S)
    names: dict[str, Any] = {}
    exec(text, names)
    first, again = torch.ones(1000), torch.ones(1000)
    for gradient in (first, again):
        names["gaussian"]([("weight", gradient)], torch.Generator().manual_seed(0), 0)
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.ones(1000))


@pytest.mark.slow
def test_files_and_commands_of_the_page(tmp_path):
    blocks = re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAGE, re.S)
    assert [name for name, _ in blocks] == ["make_houses.py", "my_tasks/prices.py", "prices.yaml"]
    assert len(re.findall(r"^```\w", PAGE, re.M)) == len(blocks) + 2  # the commands, and the function below
    for name, text in blocks:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (commands,) = re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    for number, line in enumerate(commands.splitlines()):
        words = shlex.split(line.split("  #")[0])
        terminal = tmp_path / f"{number}.txt"
        quick = [] if words[0] in ("python", "harness") and words[1] != "driver.py" else QUICK
        assert shell([*words, *quick], terminal, tmp_path) == 0, terminal.read_text()
        assert words[0] != "harness" or "columns: 3\n" in terminal.read_text()
    one, two = (
        json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("prices", "prices_on_two")
    )
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert 9_000 < one["evaluation"]["rmse"] < 13_000
    assert two["evaluation"]["rmse"] == pytest.approx(one["evaluation"]["rmse"], rel=1e-2)
    assert one["evaluation"]["rows_used"] == two["evaluation"]["rows_used"] == 500
    predictions = pd.read_csv(tmp_path / "runs" / "prices" / "predictions.csv")
    assert list(predictions) == ["id", "prediction", "label"]
    assert predictions["id"].tolist() == list(range(500))
    error = (predictions["prediction"] - predictions["label"]).abs().mean()
    assert error == pytest.approx(one["best"]["rmse"] * 0.8, rel=0.1)  # of a normal distribution
