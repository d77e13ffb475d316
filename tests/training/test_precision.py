"""The choice between an installed Apex and harness.apex. tests/apex tests what amp does."""

from __future__ import annotations

import importlib
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.apex.on_cpu import half_kernels
from harness.config.schema import PrecisionSection
from harness.errors import ConfigError
from harness.training.optimizer.emulated_half import describe, half_on_cpu, warning
from harness.training.optimizer.precision import Precision, choose

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NAMES = ("initialize", "scale_loss", "master_params", "state_dict")


@pytest.fixture
def nvidia(monkeypatch):
    """Modules that look like NVIDIA's Apex."""
    modules = {name: types.ModuleType(name) for name in ("apex", "apex.amp", "apex.parallel")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in NAMES:
        setattr(modules["apex.amp"], name, lambda *_: None)
    return modules


def test_cpu_uses_harness_apex(nvidia):
    for backend in ("auto", "harness"):
        assert choose(PrecisionSection(backend=backend), CPU).backend == "harness.apex"
    assert choose(PrecisionSection(backend="harness"), CUDA).backend == "harness.apex"


def test_an_installed_apex_is_used_on_cuda(nvidia):
    chosen = choose(PrecisionSection(), CUDA)
    assert chosen.backend == "apex of unknown version"
    assert chosen.amp is nvidia["apex.amp"]
    assert chosen.parallel is nvidia["apex.parallel"]


def test_setting_that_needs_harness_apex(nvidia):
    assert choose(PrecisionSection(), CUDA, ours=True).backend == "harness.apex"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("apex", "no Apex is installed"),
        ("no_such_package", "the installed apex cannot be imported: No module named 'no_such_package'"),
    ],
)
def test_without_apex(monkeypatch, name, reason):
    def missing(module, *rest):
        if module.startswith("apex"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(module, *rest)

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", missing)
    assert choose(PrecisionSection(), CUDA).backend == "harness.apex"
    with pytest.raises(ConfigError, match=f"precision.backend=apex, but {reason}\n  -> use precision.backend"):
        choose(PrecisionSection(backend="apex"), CUDA)


def test_package_apex_without_amp(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.delitem(sys.modules, "apex.amp", raising=False)
    with pytest.raises(ConfigError, match="the installed apex has no amp"):
        choose(PrecisionSection(backend="apex"), CUDA)
    assert choose(PrecisionSection(), CUDA).backend == "harness.apex"


def test_apex_that_is_not_nvidias(nvidia):
    del nvidia["apex.amp"].scale_loss
    with pytest.raises(ConfigError, match=r"the installed apex\.amp is not NVIDIA's"):
        choose(PrecisionSection(backend="apex"), CUDA)


def test_harness_apex_under_the_name_apex_is_not_an_installed_apex(monkeypatch):
    import harness.apex

    for name in ("", ".amp", ".parallel"):
        monkeypatch.setitem(sys.modules, f"apex{name}", importlib.import_module(f"harness.apex{name}"))
    with pytest.raises(ConfigError, match=r"harness\.apex itself"):
        choose(PrecisionSection(backend="apex"), CUDA)
    assert choose(PrecisionSection(), CUDA).amp is harness.apex.amp


def test_levels_that_only_rocm_apex_has(nvidia):
    with pytest.raises(ConfigError, match="has no level O4"):
        choose(PrecisionSection(opt_level="O4"), CUDA)
    nvidia["apex.amp"].bfloat16_function = None  # ROCm's
    assert choose(PrecisionSection(opt_level="O4"), CUDA).amp is nvidia["apex.amp"]


def test_null_options_are_left_to_the_level():
    chosen = choose(PrecisionSection(opt_level="O2"), CPU)
    assert chosen.options == {"opt_level": "O2", "max_loss_scale": 2.0**24, "verbosity": 0}
    section = PrecisionSection(opt_level="O2", loss_scale="dynamic", keep_batchnorm_fp32=False)
    assert choose(section, CPU).options == {
        **chosen.options, "loss_scale": "dynamic", "keep_batchnorm_fp32": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no level O9"), pytest.raises(ConfigError, match="amp rejects these settings: no level O9")),
        (torch.OutOfMemoryError("no memory"), pytest.raises(torch.OutOfMemoryError)),
        (torch.AcceleratorError("no device"), pytest.raises(torch.AcceleratorError)),
    ],
)
def test_settings_that_amp_rejects(error, expected):
    def initialize(*_):
        raise error

    with expected:
        Precision(SimpleNamespace(initialize=initialize), None, "x", {}).initialize(nn.Linear(1, 1), None)


@pytest.mark.parametrize(("level", "scale"), [("O0", 1.0), ("O1", 2.0**16), ("O2", 2.0**16), ("O3", 1.0), ("O5", 1.0)])
def test_one_step(level, scale):
    torch.manual_seed(0)
    precision = choose(PrecisionSection(opt_level=level), CPU)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = precision.initialize(model, optimizer)
    before = [param.detach().clone() for param in precision.master_params(optimizer)]
    loss = model(torch.ones(3, 4)).float().square().mean()
    with precision.scale_loss(loss, optimizer, delay_unscale=False) as scaled:
        scaled.backward()
    assert not precision.will_skip(optimizer)
    assert precision.loss_scale() == scale
    optimizer.step()
    after = list(precision.master_params(optimizer))
    assert len(after) == 2
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    state = precision.state_dict()
    precision.load_state_dict(state)
    assert precision.state_dict() == state


def test_products_of_a_float16_step_run_in_float32_on_a_cpu(monkeypatch):
    """Forward and backward. torch's own float16 kernels need 15 to 60 times as long."""
    ran, get_kernel = {}, torch.library.get_kernel

    class Recorded:
        def __init__(self, op, key):
            self.types, self.kernel = ran.setdefault(op.name(), set()), get_kernel(op, key)

        def call_boxed(self, keys, *args, **kwargs):
            self.types.update(argument.dtype for argument in args if isinstance(argument, torch.Tensor))
            return self.kernel.call_boxed(keys, *args, **kwargs)

    monkeypatch.setattr(torch.library, "get_kernel", Recorded)
    section = PrecisionSection(opt_level="O1")
    precision = choose(section, CPU)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3 * 4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = precision.initialize(model, optimizer)
    with half_on_cpu(section, CPU):
        outputs = model(torch.rand(2, 2, 4, 4, requires_grad=True))
        with precision.scale_loss(outputs.float().square().mean(), optimizer, delay_unscale=False) as scaled:
            scaled.backward()
    assert outputs.dtype is torch.float16
    used = {name.removeprefix("aten::"): types for name, types in ran.items() if types}
    assert used == dict.fromkeys(("convolution", "convolution_backward", "addmm", "mm"), {torch.float32})


@pytest.mark.parametrize(("level", "half"), [("O1", torch.float16), ("O4", torch.bfloat16), ("O5", torch.bfloat16)])
def test_products_of_half_precision_on_a_cpu_without_it(monkeypatch, level, half):
    monkeypatch.setattr(half_kernels, "has_bfloat16", lambda: False)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 512, generator=generator).to(half) for _ in range(2))
    rounded = (left.float() @ right.float().T).to(half)
    with half_on_cpu(PrecisionSection(opt_level=level), CPU):
        assert torch.equal(left @ right.T, rounded)
    name = str(half).removeprefix("torch.")
    assert f"computed in float32 and rounded to {name}" in describe(PrecisionSection(opt_level=level), CPU, "ours")


def test_products_that_torch_refuses_stay_refused(monkeypatch):
    monkeypatch.setattr(half_kernels, "has_bfloat16", lambda: False)
    half, full = torch.ones(2, 2, dtype=torch.float16), torch.ones(2, 2)
    for product in (torch.mm, lambda *both: torch.addmm(full, *both)):
        for left, right in ((half, full), (full, half)):
            with pytest.raises(RuntimeError) as alone:
                product(left, right)
            with half_on_cpu(PrecisionSection(opt_level="O1"), CPU), pytest.raises(RuntimeError) as ours:
                product(left, right)
            assert str(ours.value) == str(alone.value)


def test_warning_of_a_cpu_without_bfloat16(monkeypatch):
    monkeypatch.setattr(half_kernels, "has_bfloat16", lambda: False)
    section = PrecisionSection(opt_level="O4")
    told = "at O4, its products are computed in float32 and rounded; use precision.opt_level=O0"
    assert warning(section, CPU) == f"this CPU has no arithmetic for bfloat16; {told}"
    assert warning(PrecisionSection(opt_level="O0"), CPU) == ""
    monkeypatch.setattr(half_kernels, "has_bfloat16", lambda: True)
    assert warning(section, CPU) == ""
    monkeypatch.setattr(half_kernels, "slow_dtypes", lambda: {torch.float16})
    assert "at O1, its products" in warning(PrecisionSection(opt_level="O1"), CPU)
    assert "at O1, the default, its products" in warning(PrecisionSection(), CPU)


@pytest.mark.parametrize(
    ("card", "major", "warns"), [("Tesla V100", 7, True), ("Tesla T4", 7, True), ("A100", 8, False)]
)
def test_warning_of_a_gpu_without_bfloat16(monkeypatch, card, major, warns):
    """With a fake card: torch asks its capability."""
    monkeypatch.setattr(torch.version, "hip", None)
    for name, value in (("is_available", True), ("current_device", 0), ("get_device_name", card),
                        ("get_device_properties", SimpleNamespace(major=major))):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    cuda = torch.device("cuda")
    text = warning(PrecisionSection(opt_level="O5"), cuda)
    told = "at O5, its products are computed in float32 and rounded; use precision.opt_level=O1"
    expected = f"{card} has no arithmetic for bfloat16; {told}"
    assert text == (expected if warns else "")
    assert warning(PrecisionSection(opt_level="O1"), cuda) == ""


def test_a_torch_without_onednn_has_no_bfloat16_kernels(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", object())  # it has no operations then
    assert half_kernels.slow_dtypes() == {torch.float16, torch.bfloat16}


@pytest.mark.parametrize("level", ["O0", "O4"])
def test_kernels_of_torch_that_are_not_replaced(monkeypatch, level):
    monkeypatch.setattr(half_kernels, "has_bfloat16", lambda: True)
    values = torch.ones(4, 4, dtype=torch.bfloat16)
    with half_on_cpu(PrecisionSection(opt_level=level), CPU), torch.profiler.profile() as profile:
        values @ values
    assert not any("to_copy" in event.name for event in profile.events())
    assert describe(PrecisionSection(opt_level=level), CPU, "harness.apex") == f"{level} by harness.apex"
    assert describe(PrecisionSection(), torch.device("cuda"), "harness.apex") == "O1 by harness.apex"
