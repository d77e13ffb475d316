"""Groups of parameters, and parameters that are not trained."""

from __future__ import annotations

import pytest
from torch import nn

from harness.config.schema import GroupSection, OptimizerSection
from harness.errors import ConfigError
from harness.training.optimizer import trained_parameters
from harness.training.optimizer.optimizer_builder import build
from tests.training.test_schedule import schedule


def test_groups_and_frozen_parameters():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)))
    trained_parameters.freeze(model, ["0"])
    section = OptimizerSection(
        name="adamw", weight_decay=0.1,
        groups=(GroupSection(match="1d", weight_decay=0.0), GroupSection(match="2.0", lr_scale=0.5)),
    )  # fmt: skip
    optimizer = build(section, trained_parameters.groups(section, model, 0.4), 0.4)
    names = {param: name for name, param in model.named_parameters()}
    found = [
        ([names[param] for param in group["params"]], group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]
    assert found == [
        (["2.1.weight"], 0.4, 0.1),
        (["1.weight", "1.bias", "2.0.bias", "2.1.bias"], 0.4, 0.0),
        (["2.0.weight"], 0.2, 0.1),
    ]
    assert schedule(warmup=1).set_lr(optimizer, 4) == 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5, 0.25]
    assert trained_parameters.describe(optimizer, model) == {
        "frozen": "20 of 39 parameters in 2 tensors",
        "group 0": "lr 0.5, weight_decay 0.1: the others (6 parameters in 1 tensor)",
        "group 1": "lr 0.5, weight_decay 0: 1d (9 parameters in 4 tensors)",
        "group 2": "lr 0.25, weight_decay 0.1: 2.0 (4 parameters in 1 tensor)",
    }


def test_patterns_that_match_nothing():
    model = nn.Sequential(nn.Linear(2, 2))
    for pattern, message in [("0.weigth", "did you mean 0.weight"), ("zzz", r"the model has \*.weight, \*.bias")]:
        section = OptimizerSection(groups=(GroupSection(match=pattern),))
        with pytest.raises(ConfigError, match=rf"optimizer\.groups\.0\.match: no trainable.*[\s\S]*{message}"):
            trained_parameters.groups(section, model, 0.1)
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        trained_parameters.freeze(model, ["*"])
    section = OptimizerSection(name="rprop", groups=(GroupSection(match="1d", weight_decay=0.0),))
    with pytest.raises(ConfigError, match="rprop has no argument weight_decay"):
        build(section, trained_parameters.groups(section, nn.Linear(2, 2), 0.1), 0.1)
