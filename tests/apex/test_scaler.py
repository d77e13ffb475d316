"""The loss scaler as a state machine, and its state dict (contract 1.4, 2)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from harness.apex import amp, amp_C
from harness.apex.amp.device_flags import flags
from harness.apex.amp.scaler import LossScaler
from harness.apex.multi_tensor_apply import multi_tensor_applier
from tests.apex.shared import through_a_file
from tests.syncs import fake_gpu


def overflow(scaler: LossScaler) -> bool:
    scaler.unscale_([torch.tensor([1.0, float("inf")])], scaler.loss_scale())
    skip = scaler.update_scale()
    scaler.clear_overflow_state()
    return skip


def clean(scaler: LossScaler) -> bool:
    scaler.unscale_([torch.ones(2)], scaler.loss_scale())
    return scaler.update_scale()


def test_a_late_flag_of_an_earlier_step_leaves_a_deferred_context():
    scaler = LossScaler("dynamic")
    scaler.unscale_([torch.tensor([math.inf])], 1.0)
    flags.push(scaler.update_on_device(), scaler.count)
    scaler.defer()
    assert not clean(scaler)
    assert scaler._unskipped == 2


@pytest.mark.contract("2.1", "2.2")
@pytest.mark.parametrize(
    ("arguments", "updates", "scale", "unskipped"),
    [
        (("dynamic",), "", 2.0**16, 0),
        (("dynamic",), "+" * 1999, 2.0**16, 1999),
        (("dynamic",), "+" * 2000, 2.0**17, 0),
        (("dynamic",), "+" * 2001 + "!", 2.0**16, 0),
        (("dynamic", None, 2.0**17), "+" * 4000, 2.0**17, 0),
        (("dynamic", None, 4.0), "", 4.0, 0),
        (("dynamic", None, 0.5), "", 0.5, 0),
        (("dynamic", 2.0**17), "", 2.0**17, 0),
        (("dynamic", 0), "!" * 300, 2.0**-126, 0),  # its inverse is finite
        ((128.0,), "!+", 128.0, 2),
    ],
)
def test_scale_after_clean_updates_and_overflows(arguments, updates, scale, unskipped):
    scaler = LossScaler(*arguments)
    for update in updates:
        skips = clean(scaler) if update == "+" else overflow(scaler)
        assert skips == (update == "!" and scaler.dynamic)
    assert (scaler.loss_scale(), scaler._unskipped) == (scale, unskipped)
    assert math.isfinite(float(torch.tensor(1.0 / scale)))


@pytest.mark.contract("1.4", "2.2")
def test_counter_above_the_window_still_grows_the_scale():
    """A static scaler counts without bound, and its checkpoint may be loaded into a dynamic one."""
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 5000}})
    (scaler,) = amp._amp_state.loss_scalers
    clean(scaler)
    assert (scaler.loss_scale(), scaler._unskipped) == (2048.0, 0)
    clean(scaler)
    assert (scaler.loss_scale(), scaler._unskipped) == (2048.0, 1)


@pytest.mark.contract("1.4")
@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize(("scale", "unskipped"), [(0.0, 0), (-2.0, 0), (math.inf, 0), (math.nan, 0), (2.0, -5)])
def test_state_with_which_nothing_can_train_is_refused(level, scale, unskipped):
    amp.initialize(nn.Linear(1, 1), opt_level=level, num_losses=2, verbosity=0)
    before = amp.state_dict()
    good = {"loss_scale": 4.0, "unskipped": 3}
    with pytest.raises(ValueError, match="loss_scaler1"):
        amp.load_state_dict({"loss_scaler0": good, "loss_scaler1": {"loss_scale": scale, "unskipped": unskipped}})
    assert amp.state_dict() == before


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


@pytest.mark.host
@pytest.mark.parametrize("bad", [1.0, float("inf")])
def test_bfloat16_gradients_on_cuda(bad, monkeypatch):
    """torch's kernel for CUDA lacks bfloat16."""
    plain = torch._amp_foreach_non_finite_check_and_unscale_

    def kernel(gradients, found, factor):
        assert gradients[0].dtype is not torch.bfloat16, "not implemented for BFloat16"
        plain(gradients, found, factor)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", kernel)
    with fake_gpu():
        gradient = torch.full((3,), bad, dtype=torch.bfloat16, device="cuda:0")
        scaler = LossScaler("dynamic")
        scaler.unscale_([gradient], 2.0)
        assert (gradient.dtype, gradient[0].item()) == (torch.bfloat16, bad / 2)
        assert scaler.update_scale() is (bad == float("inf"))


@pytest.mark.contract("2.1", "2.2")
@pytest.mark.parametrize("replace", [False, True])
def test_loops_that_unscale_by_themselves_report_overflow(replace):
    """They hand the flag to multi_tensor_applier, or a flag of their own to the scaler."""
    scaler = LossScaler("dynamic")
    for bad in (1.0, math.inf, 1.0):
        scaler.clear_overflow_state()
        if replace:
            scaler._overflow_buf = torch.zeros(1, dtype=torch.int32)
        gradients = [torch.tensor([bad])]
        multi_tensor_applier(amp_C.multi_tensor_scale, scaler._overflow_buf, [gradients, gradients], 1 / 65536)
        assert bool(scaler._overflow_buf.item()) == (bad == math.inf)
        assert scaler.update_scale() == (bad == math.inf)
    assert (scaler.loss_scale(), scaler._overflow_buf.dtype) == (2.0**15, torch.int32)


@pytest.mark.contract("2.2")
def test_floor_is_one_by_default(caplog):
    scaler = LossScaler("dynamic")
    for _ in range(40):
        assert overflow(scaler)
    assert scaler.loss_scale() == 1.0
    assert caplog.text.count("reduces the loss scale") == 16, "logged once per change of scale"
    assert caplog.text.count("floor") == 1
    assert "zero_grad" in caplog.text
    for _ in range(10):
        overflow(scaler)
    assert caplog.text.count("floor") == 2, "repeated after 50 in a row"


@pytest.mark.contract("2.2")
def test_back_off_never_raises_the_scale():
    scaler = LossScaler("dynamic", min_loss_scale=128.0)
    scaler._loss_scale = 64.0
    overflow(scaler)
    assert scaler.loss_scale() == 64.0


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
    assert through_a_file(saved) == saved
    mine = {"other": 1}
    assert amp.state_dict(mine) is mine
    assert set(mine) == {"other", "loss_scaler0", "loss_scaler1"}


ENTRY = {"loss_scale": 4.0, "unskipped": 7}


@pytest.mark.contract("1.4")
def test_load_state_dict_of_the_same_or_another_length(caplog):
    second = {"loss_scale": 2.0, "unskipped": 1}
    start(num_losses=2)
    amp.load_state_dict({"loss_scaler0": ENTRY, "loss_scaler1": second})
    assert amp.state_dict() == {"loss_scaler0": ENTRY, "loss_scaler1": second}
    assert not caplog.text
    start()
    amp.load_state_dict({"loss_scaler0": ENTRY, "loss_scaler1": second})
    assert amp.state_dict() == {"loss_scaler0": ENTRY}
    assert "loss scalers in the amp state: 2;" in caplog.text
    start()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        amp.load_state_dict({"model": {}, "loss_scaler0": ENTRY})
    assert amp.state_dict() == {"loss_scaler0": ENTRY}, "scalers are applied first"


@pytest.mark.contract("1.4", "10.12")
def test_dynamic_scale_is_not_loaded_into_a_static_scaler(caplog):
    start("O0")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}})
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}
    assert "static" in caplog.text


@pytest.mark.contract("1.4")
def test_state_is_empty_while_amp_is_off_and_loading_one_warns(caplog):
    assert amp.state_dict() == {}
    amp.load_state_dict({})
    assert not caplog.text
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})
    assert "amp is off here" in caplog.text


def test_unscale_takes_the_arguments_of_apex():
    scaler = LossScaler("dynamic")
    gradients, masters = [torch.full((2,), 2.0**17)], [torch.zeros(2)]
    scaler.unscale(gradients, masters, scaler.loss_scale(), models_are_masters=False)
    assert masters[0].tolist() == [2.0, 2.0]
    scaler.unscale(gradients, masters, 1.0, False, scale_override=2.0**15)
    assert masters[0].tolist() == [4.0, 4.0]
    scaler.unscale([gradients[0] * float("inf")], masters, None)
    assert scaler.update_scale()
