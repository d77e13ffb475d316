"""``amp.initialize``: levels, overrides, return shapes, refusals (contract 1.2, 8)."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict

import pytest
import torch
from torch import nn

from harness.apex import amp
from harness.apex.parallel.LARC import LARC
from tests.apex.shared import backward

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32

PROPERTIES = {
    # cast_model_type, patch_torch_functions, type, keep_batchnorm_fp32, master_weights, loss_scale
    "O0": (FLOAT, False, None, None, False, 1.0),
    "O1": (None, True, HALF, None, None, "dynamic"),
    "O2": (HALF, False, None, True, True, "dynamic"),
    "O3": (HALF, False, None, False, False, 1.0),
    "O4": (None, True, BFLOAT, None, None, 1.0),
    "O5": (BFLOAT, False, None, True, True, 1.0),
}


LINEAR = nn.Linear(1, 1)
SGD = torch.optim.SGD(LINEAR.parameters(), lr=0.1)


def pair():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def start(level, **overrides):
    return amp.initialize(*pair(), opt_level=level, verbosity=0, **overrides)


@pytest.mark.contract("1.2.properties", "8")
@pytest.mark.parametrize("level", PROPERTIES)
def test_each_level_has_its_properties(level):
    start(level)
    p = amp._amp_state.opt_properties
    found = (p.cast_model_type, p.patch_torch_functions, p.patch_torch_functions_type)
    assert (*found, p.keep_batchnorm_fp32, p.master_weights, p.loss_scale) == PROPERTIES[level]
    assert p.enabled
    assert p.opt_level == level
    amp.initialize(*pair(), verbosity=0)
    assert amp._amp_state.opt_properties.opt_level == "O1", "the default"


# (error, a part of its message, arguments of initialize)
REFUSED = [
    *[(RuntimeError, "Unexpected optimization level", {"opt_level": level}) for level in (None, "o1", "O6", 1, "")],
    (RuntimeError, "cast_model_type", {"opt_level": "O1", "cast_model_type": HALF}),
    (RuntimeError, "cast_model_type", {"opt_level": "O4", "cast_model_type": BFLOAT}),
    (RuntimeError, "keep_batchnorm", {"opt_level": "O1", "keep_batchnorm_fp32": True}),
    (RuntimeError, "keep_batchnorm", {"opt_level": "O1", "keep_batchnorm_fp32": "None"}),
    (RuntimeError, "master_weights", {"opt_level": "O1", "master_weights": True}),
    (RuntimeError, "master_weights", {"opt_level": "O1", "master_weights": False}),
    (RuntimeError, "patch_torch_functions", {"opt_level": "O0", "patch_torch_functions": True}),
    (RuntimeError, "patch_torch_functions", {"opt_level": "O2", "patch_torch_functions": True}),
    (RuntimeError, "functions_type", {"opt_level": "O1", "patch_torch_functions_type": BFLOAT}),
    (AssertionError, "keep_batchnorm", {"opt_level": "O2", "keep_batchnorm_fp32": "yes"}),
    (AssertionError, "keep_batchnorm", {"opt_level": "O3", "keep_batchnorm_fp32": 2}),
    (ValueError, "loss_scale", {"opt_level": "O2", "loss_scale": "fast"}),
    (AssertionError, "keep_batchnorm", {"opt_level": "O3", "keep_batchnorm_fp32": 1}),
    (ValueError, "master_weights", {"opt_level": "O2", "master_weights": "no"}),
    (ValueError, "patch_torch_functions", {"opt_level": "O1", "patch_torch_functions": "yes"}),
    (ValueError, "patch_torch_functions", {"opt_level": "O2", "patch_torch_functions": [False]}),
    (ValueError, "loss_scale", {"opt_level": "O2", "loss_scale": True}),
    (ValueError, "loss_scale", {"opt_level": "O2", "loss_scale": 0}),
    (ValueError, "loss_scale", {"opt_level": "O2", "loss_scale": float("inf")}),
    (TypeError, "cast_model_type", {"opt_level": "O2", "cast_model_type": torch.int8}),
    (ValueError, "loss_scale", {"opt_level": "O2", "min_loss_scale": 8.0, "max_loss_scale": 4.0}),
    (ValueError, "num_losses", {"opt_level": "O2", "num_losses": 0}),
    (TypeError, "Pass opt_level='O2'", {"enabled": "O2"}),
    *[(TypeError, "models must be either", {"models": wrong}) for wrong in ((LINEAR,), "model", [1], None)],
    *[(TypeError, "optimizers must be either", {"optimizers": wrong}) for wrong in ("sgd", (1,), [1], 3)],
    (RuntimeError, "once", {"optimizers": [SGD, SGD], "opt_level": "O2"}),
    (RuntimeError, "AFTER", {"models": nn.DataParallel(LINEAR), "opt_level": "O2"}),
    (RuntimeError, "Found param weight", {"models": nn.Linear(1, 1).half(), "opt_level": "O2"}),
]


@pytest.mark.contract("1.2.types", "1.2.order", "1.2.overrides", "1.2.fp32")
@pytest.mark.parametrize(("error", "match", "arguments"), [*REFUSED, (ValueError, "convert", None)])
def test_refused_call_leaves_an_active_o1_as_it_is(error, match, arguments, capsys):
    model, optimizer = start("O1")
    amp.register_half_function(torch, "sinh")
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    before = dict(vars(amp._amp_state))
    with pytest.raises(error, match=match):
        amp.initialize(**{"models": LINEAR, "optimizers": SGD, **arguments}) if arguments else amp.init(loss_scale="x")
    assert LINEAR.weight.dtype is FLOAT
    assert dict(vars(amp._amp_state)) == before
    assert amp._amp_state.verbosity == 0
    assert amp._amp_state.handle.is_active()
    assert capsys.readouterr().out == ""
    loss = model(torch.randn(8, 4))
    assert loss.dtype is HALF
    backward(loss.float().sum(), optimizer)
    optimizer.step()


@pytest.mark.contract("1.2.overrides")
@pytest.mark.parametrize(
    ("level", "overrides", "name", "value"),
    [
        ("O1", {"cast_model_type": FLOAT}, "cast_model_type", FLOAT),
        ("O1", {"cast_model_type": False}, "cast_model_type", False),
        ("O1", {"patch_torch_functions": False}, "patch_torch_functions", False),
        ("O2", {"keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32", False),
        ("O3", {"keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32", True),
        ("O0", {"loss_scale": "dynamic"}, "loss_scale", "dynamic"),
        ("O2", {"loss_scale": "128.0"}, "loss_scale", 128.0),
        ("O0", {"master_weights": True}, "master_weights", True),
        ("O3", {"master_weights": 1}, "master_weights", True),
        ("O2", {"master_weights": "False"}, "master_weights", False),
        ("O2", {"patch_torch_functions": "False"}, "patch_torch_functions", False),
        ("O2", {"cast_model_type": BFLOAT}, "cast_model_type", BFLOAT),
        ("O2", {"max_loss_scale": None}, "loss_scale", "dynamic"),
        ("O2", {"keep_batchnorm_fp32": None}, "keep_batchnorm_fp32", True),
    ],
)
def test_accepted_overrides_train_a_step(level, overrides, name, value):
    model, optimizer = start(level, **overrides)
    assert getattr(amp._amp_state.opt_properties, name) == value
    before = [p.detach().float().clone() for p in model.parameters()]
    dtype = next(model.parameters()).dtype if not amp._amp_state.opt_properties.cast_model_type else FLOAT
    backward(model(torch.randn(8, 4, dtype=dtype)).float().sum() * 1e-3, optimizer)
    optimizer.step()
    assert any((a != b).any() for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.contract("1.2.overrides")
def test_hard_override_turns_refusals_into_warnings(caplog):
    amp._amp_state.hard_override = True
    start("O2", patch_torch_functions_type=HALF)
    assert "Warning:" in caplog.text
    assert "patch_torch_functions_type" in caplog.text


@pytest.mark.contract("1.2.returns")
@pytest.mark.parametrize("enabled", [True, False])
def test_returns_the_objects_passed(enabled):
    for in_list, wrap in itertools.product((False, True), ("none", "one", "list", "empty")):
        model, optimizer = pair()
        models = [model] if in_list else model
        optimizers = {"none": None, "one": optimizer, "list": [optimizer], "empty": []}[wrap]
        found = amp.initialize(models, optimizers, opt_level="O2", verbosity=0, enabled=enabled)
        if optimizers is None:
            assert found is models
        else:
            assert isinstance(found, tuple)
            assert found[0] is models
            assert found[1] is optimizers


@pytest.mark.contract("1.2.types", "1.3.1")
def test_disabled_validates_nothing_and_does_nothing():
    model, optimizer = pair()
    assert amp.initialize("model", (1, 2), enabled=False, opt_level="whatever") == ("model", (1, 2))
    assert amp.initialize(model, enabled=False) is model
    loss = torch.ones((), dtype=torch.float64, requires_grad=True)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert amp.state_dict() == OrderedDict()
    amp.load_state_dict({})


@pytest.mark.contract("1.2.again", "1.2.fp32")
def test_optimizer_is_initialized_only_once_and_a_half_precision_model_on_demand():
    model, optimizer = pair()
    amp._amp_state.allow_incoming_model_not_fp32 = True
    amp.initialize(model.half(), optimizer, opt_level="O2", verbosity=0)
    for again in (optimizer, LARC(optimizer)):
        with pytest.raises(RuntimeError, match="once"):
            amp.initialize(model, again, verbosity=0)


@pytest.mark.contract("1.2.again")
def test_model_initialized_twice_is_cast_once():
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    amp.initialize(model, [], opt_level="O0", verbosity=0)
    assert len(model._forward_pre_hooks) == 1


@pytest.mark.contract("1.2.again")
def test_reset_restores_model_and_optimizer():
    model, optimizer = pair()
    plain_step = optimizer.step
    amp.initialize(model, optimizer, opt_level="O0", loss_scale="dynamic", verbosity=0)
    amp.reset()
    assert optimizer.step == plain_step
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not hasattr(optimizer, "_amp_stash")
    with pytest.raises(RuntimeError, match="never initialized"), amp.scale_loss(torch.ones(()), optimizer):
        pass
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0)


@pytest.mark.contract("1.9")
def test_level_is_printed_unless_silenced(capsys):
    amp.initialize(*pair(), opt_level="O2")
    out = capsys.readouterr().out
    assert "O2" in out
    assert "keep_batchnorm_fp32    : True" in out
    amp.initialize(*pair(), opt_level="O2", verbosity=0)
    assert capsys.readouterr().out == ""


@pytest.mark.contract("1.8", "7.2")
@pytest.mark.parametrize("make_before", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_schedulers_work_created_before_or_after(make_before, level, recwarn):
    model, optimizer = pair()
    if make_before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if not make_before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    backward(model(torch.randn(4, 4)).sum() * float("inf"), optimizer)
    assert optimizer._amp_stash.already_patched
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    optimizer.zero_grad()
    weight = model[0].weight.detach().clone()
    backward(model(torch.randn(4, 4)).float().pow(2).mean() / 8, optimizer)
    optimizer.step()
    assert (model[0].weight != weight).any()
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


@pytest.mark.contract("3.4")
def test_optimizer_and_model_can_be_copied():
    model, optimizer = start("O2")
    twin = copy.deepcopy(optimizer)
    assert not hasattr(twin, "_amp_stash")
    assert copy.deepcopy(model)[0].weight.dtype is HALF
