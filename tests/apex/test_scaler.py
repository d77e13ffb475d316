"""The loss scaler as a state machine, and its state dict (contract 1.4, 2)."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import nn

from harness.apex import amp
from harness.apex.amp.scaler import LossScaler


def overflow(scaler: LossScaler) -> bool:
    scaler.unscale_([torch.tensor([1.0, float("inf")])], scaler.loss_scale())
    skip = scaler.update_scale()
    scaler.clear_overflow_state()
    return skip


def clean(scaler: LossScaler) -> bool:
    scaler.unscale_([torch.ones(2)], scaler.loss_scale())
    return scaler.update_scale()


@pytest.mark.contract("2.1")
def test_constants():
    scaler = LossScaler("dynamic")
    assert (scaler.loss_scale(), scaler._unskipped) == (65536.0, 0)
    for _ in range(1999):
        assert not clean(scaler)
    assert (scaler.loss_scale(), scaler._unskipped) == (65536.0, 1999)
    assert not clean(scaler)
    assert (scaler.loss_scale(), scaler._unskipped) == (131072.0, 0)
    clean(scaler)
    assert overflow(scaler)
    assert (scaler.loss_scale(), scaler._unskipped) == (65536.0, 0)


@pytest.mark.contract("2.2")
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_any_bad_element_is_found(bad, dtype):
    scaler = LossScaler("dynamic")
    gradients = [torch.ones(3, dtype=dtype), torch.ones(2, 2, dtype=dtype), torch.ones(3)]
    gradients[1][1, 0] = bad
    scaler.unscale_(gradients, 2.0)
    assert scaler._overflow_buf.item()
    assert scaler.update_scale()
    assert gradients[0][0] == 0.5


@pytest.mark.contract("2.1", "2.2")
def test_the_maximum_caps_growth_and_start():
    scaler = LossScaler("dynamic", max_loss_scale=2.0**17)
    scaler._unskipped = 1999
    clean(scaler)
    scaler._unskipped = 1999
    clean(scaler)
    assert scaler.loss_scale() == 2.0**17
    assert LossScaler("dynamic", max_loss_scale=4.0).loss_scale() == 4.0
    assert LossScaler("dynamic", max_loss_scale=0.5).loss_scale() == 0.5


@pytest.mark.contract("2.2")
def test_the_floor_is_one_unless_given(caplog):
    scaler = LossScaler("dynamic")
    for _ in range(40):
        assert overflow(scaler)
    assert scaler.loss_scale() == 1.0
    assert caplog.text.count("reduces the loss scale") == 16, "said once per change of scale"
    assert caplog.text.count("floor") == 1
    assert "zero_grad" in caplog.text
    for _ in range(10):
        overflow(scaler)
    assert caplog.text.count("floor") == 2, "repeated after 50 in a row"
    assert LossScaler("dynamic", min_loss_scale=2.0**17).loss_scale() == 2.0**17


@pytest.mark.contract("2.2")
def test_no_floor_still_never_reaches_zero():
    scaler = LossScaler("dynamic", min_loss_scale=0)
    for _ in range(300):
        overflow(scaler)
    assert scaler.loss_scale() > 0
    assert math.isfinite(float(torch.tensor(1.0 / scaler.loss_scale())))


@pytest.mark.contract("2.2")
def test_back_off_never_raises_the_scale():
    scaler = LossScaler("dynamic", min_loss_scale=128.0)
    scaler._loss_scale = 64.0
    overflow(scaler)
    assert scaler.loss_scale() == 64.0


@pytest.mark.contract("2.2")
def test_a_static_scale_counts_and_never_skips():
    scaler = LossScaler(128.0)
    assert not overflow(scaler)
    assert not clean(scaler)
    assert (scaler.loss_scale(), scaler._unskipped) == (128.0, 2)


@pytest.mark.contract("1.9")
def test_messages_respect_verbosity(caplog):
    amp.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0)
    overflow(amp._amp_state.loss_scalers[0])
    assert caplog.text == ""


def start(level="O2", **overrides):
    model = nn.Linear(2, 2)
    return amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level=level, verbosity=0, **overrides)


@pytest.mark.contract("1.4")
def test_state_dict_is_plain_and_in_apex_form():
    start(num_losses=2)
    amp._amp_state.loss_scalers[1]._loss_scale = 8.0
    saved = amp.state_dict()
    assert saved == {
        "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 8.0, "unskipped": 0},
    }
    assert type(saved["loss_scaler0"]["loss_scale"]) is float
    assert type(saved["loss_scaler0"]["unskipped"]) is int
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == saved
    mine = {"other": 1}
    assert amp.state_dict(mine) is mine
    assert set(mine) == {"other", "loss_scaler0", "loss_scaler1"}


@pytest.mark.contract("1.4")
def test_load_state_dict_restores_and_leaves_its_input_alone():
    start(num_losses=2)
    given = {
        "loss_scaler0": {"loss_scale": 4.0, "unskipped": 7},
        "loss_scaler1": {"loss_scale": 2.0, "unskipped": 1},
    }
    amp.load_state_dict(given)
    assert amp.state_dict() == given


@pytest.mark.contract("1.4")
def test_load_state_dict_of_another_length(caplog):
    start()
    entry = {"loss_scale": 4.0, "unskipped": 7}
    amp.load_state_dict({"loss_scaler0": entry, "loss_scaler1": {"loss_scale": 2.0, "unskipped": 0}})
    assert amp.state_dict() == {"loss_scaler0": entry}
    assert "2 loss scalers" in caplog.text


@pytest.mark.contract("1.4")
def test_load_state_dict_refuses_foreign_keys_after_applying_the_rest():
    start()
    entry = {"loss_scale": 4.0, "unskipped": 7}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        amp.load_state_dict({"model": {}, "loss_scaler0": entry})
    assert amp.state_dict() == {"loss_scaler0": entry}


@pytest.mark.contract("1.4", "10.12")
def test_a_dynamic_scale_is_not_loaded_into_a_static_scaler(caplog):
    start("O0")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}})
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}
    assert "static" in caplog.text


@pytest.mark.contract("1.4")
def test_state_before_initialize_is_empty():
    assert amp.state_dict() == {}
    amp.load_state_dict({})


@pytest.mark.contract("1.4")
def test_loading_while_amp_is_off_is_said(caplog):
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})
    assert "amp is off here" in caplog.text
    caplog.clear()
    amp.load_state_dict({})
    assert not caplog.text
