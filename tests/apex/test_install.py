"""``harness.apex.install``: imports of apex and of its old modules, other packages of that name, and undoing it."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import importlib.util
import io
import pickle
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace

import pytest
import torch

import harness.apex
from harness.apex.patches import Patches

# Modules of Apex that scripts and old pickles name, and what they held.
OLD_MODULES = {
    "amp._amp_state": "AmpState _amp_state master_params maybe_print warn_or_err",
    "amp._initialize": "_amp_state LossScaler",
    "amp.amp": "init half_function float_function promote_function register_half_function register_float_function "
    "register_promote_function",
    "amp.frontend": "O0 O1 O2 O3 Properties initialize load_state_dict opt_levels state_dict",
    "amp.handle": "AmpHandle NoOpHandle disable_casts scale_loss",
    "amp.opt": "OptimWrapper",
    "contrib.clip_grad.clip_grad": "clip_grad_norm_",
    "contrib.xentropy.softmax_xentropy": "SoftmaxCrossEntropyLoss",
    "contrib.optimizers": "FP16_Optimizer FusedAdam FusedLAMB FusedSGD",
    "contrib.optimizers.fp16_optimizer": "FP16_Optimizer",
    "contrib.optimizers.fused_adam": "FusedAdam",
    "fp16_utils.fp16_optimizer": "FP16_Optimizer",
    "fp16_utils.fp16util": "BN_convert_float FP16Model clip_grad_norm convert_module convert_network "
    "master_params_to_model_params model_grads_to_master_grads network_to_half prep_param_lists to_python_float tofp16",
    "fp16_utils.loss_scaler": "DynamicLossScaler LossScaler",
    "normalization.fused_layer_norm": "FusedLayerNormFunction FusedRMSNormAffineMixedDtypesFunction",
    "optimizers.fused_adam": "FusedAdam",
    "optimizers.fp16_optimizer": "FP16_Optimizer",
    "parallel.distributed": "DistributedDataParallel Reducer ReduceOp apply_flat_dist_call extract_tensors "
    "flat_dist_call flatten split_by_type split_half_float_double unflatten",
    "parallel.optimized_sync_batchnorm": "SyncBatchNorm",
    "parallel.sync_batchnorm": "SyncBatchNorm",
}


@pytest.fixture
def installed():
    harness.apex.install()
    yield
    harness.apex.uninstall()


@pytest.fixture
def impostor(tmp_path, monkeypatch):
    """A package named apex in front of all others: NVIDIA's as it is today."""
    package = tmp_path / "apex"
    (package / "optimizers").mkdir(parents=True)
    (package / "__init__.py").write_text("from . import optimizers\n")
    (package / "optimizers" / "__init__.py").write_text("class FusedAdam: pass\n")
    (package / "transformer.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "apex" not in sys.modules
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


def snapshot():
    """Every attribute of every module of harness, all imported modules, and the import finders."""
    owners = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "harness"}
    attributes = {f"{name}.{key}": id(value) for name, owner in owners.items() for key, value in vars(owner).items()}
    return attributes, set(sys.modules), list(sys.meta_path)


@pytest.mark.contract("1.1")
def test_imports_of_apex_scripts(installed):
    names: dict = {}
    exec(
        "import apex\n"
        "from apex import amp, optimizers, parallel\n"
        "from apex.parallel import DistributedDataParallel as DDP\n"
        "from apex.parallel import Reducer, SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group, LARC\n"
        "from apex.parallel import ReduceOp\n"
        "from apex.parallel.LARC import LARC as LARCClass\n"
        "from apex.optimizers import FusedAdam, FusedSGD, FusedLAMB, FusedNovoGrad, FusedAdagrad\n"
        "from apex.normalization import FusedLayerNorm\n"
        "from apex.multi_tensor_apply import multi_tensor_applier\n"
        "from apex.mlp import MLP\n"
        "from apex.fused_dense import FusedDense\n"
        "from apex.fp16_utils import *\n"
        "import amp_C, apex_C\n"
        "from apex.optimizers import FP16_Optimizer as Flat\n"
        "from apex.contrib.optimizers import FP16_Optimizer as FlatInContrib\n"
        "from apex.parallel.distributed import DistributedDataParallel as DDP, unflatten\n",
        names,
    )
    assert names["apex"] is harness.apex
    assert names["amp"] is importlib.import_module("harness.apex.amp")
    assert names["DDP"] is importlib.import_module("harness.apex.parallel").DistributedDataParallel
    assert names["amp_C"] is importlib.import_module("harness.apex.amp_C")
    assert names["apex_C"].unflatten is names["unflatten"]
    assert names["Flat"] is names["FlatInContrib"] is not names["FP16_Optimizer"]
    with pytest.raises(ImportError, match="NoSuchOptimizer"):
        from apex.optimizers import NoSuchOptimizer  # noqa: F401
    assert {*OLD_MODULES["fp16_utils.fp16util"].split(), "FP16_Optimizer", "LossScaler", "DynamicLossScaler"} <= set(
        names
    )
    assert issubclass(harness.apex.DeprecatedFeatureWarning, FutureWarning)


@pytest.mark.contract("1.1")
def test_package_is_light_and_looks_like_apex():
    """Apex imported its modules with the package, so they are attributes; ``amp._amp_state`` is an object there."""
    code = (
        "import sys, harness.apex as apex\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'amp' in dir(apex) and 'RNN' not in dir(apex) and not hasattr(apex, 'RNN')\n"
        "apex.install(); import apex\n"
        "assert apex.amp is sys.modules['harness.apex.amp'] and 'harness.apex.optimizers' not in sys.modules\n"
    )
    code += "".join(
        f"apex.{module}.{names.split()[0]}\n" for module, names in OLD_MODULES.items() if module != "amp._amp_state"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


@pytest.mark.parametrize("name", ["apex.amp", "apex.amp.scaler", "apex.parallel.distributed", "apex.amp.initialize"])
def test_both_names_are_one_module(installed, name):
    ours = importlib.import_module(f"harness.{name}")
    before = ours.__spec__, ours.__name__, ours.__loader__
    assert importlib.import_module(name) is ours
    assert (ours.__spec__, ours.__name__, ours.__loader__) == before
    assert callable(harness.apex.amp.initialize), "a module replaced the function of the same name"


@pytest.mark.contract("1.10")
def test_amp_state_by_its_old_path(installed):
    from apex import amp
    from apex.amp._amp_state import _amp_state, maybe_print, warn_or_err
    from apex.amp._amp_state import master_params as found

    assert amp._amp_state is _amp_state, "the module hides the object of its name"
    assert found is amp.master_params
    _amp_state.hard_override = True
    warn_or_err("no error")
    _amp_state.hard_override = False
    with pytest.raises(RuntimeError, match="an error"):
        warn_or_err("an error")
    maybe_print("no error either", True)


@pytest.mark.contract("1.1")
@pytest.mark.parametrize("name", OLD_MODULES)
def test_old_modules_have_their_names(installed, name):
    module = importlib.import_module(f"apex.{name}")
    assert not [each for each in OLD_MODULES[name].split() if not hasattr(module, each)]
    assert sys.modules[f"apex.{name}"] is module


@pytest.mark.parametrize(
    ("statement", "instead"),
    [
        ("import apex.contrib.sparsity", "to_sparse_semi_structured"),
        ("import apex.contrib.something", "of apex.contrib, only clip_grad, optimizers and xentropy exist here"),
        ("from apex.contrib.multihead_attn import SelfMultiheadAttn", "torch.nn.MultiheadAttention"),
        ("from apex.contrib.groupbn.batch_norm import BatchNorm2d_NHWC", "channels_last"),
        ("from apex.contrib.optimizers import distributed_fused_adam", "ZeroRedundancyOptimizer"),
        ("from apex.parallel.sync_batchnorm_kernel import SyncBatchnormFunction", "apex.parallel.SyncBatchNorm"),
        ("from apex.transformer import parallel_state", "Megatron-Core"),
        ("from apex import RNN", "torch.nn.LSTM"),
        ("from apex.reparameterization import apply_weight_norm", "weight_norm"),
        ("import apex.parallel.multiproc", "torchrun"),
    ],
)
def test_missing_parts_name_their_replacement(installed, statement, instead):
    with pytest.raises(ModuleNotFoundError, match="NVIDIA's own Apex") as caught:
        exec(statement)
    assert instead in str(caught.value)
    assert caught.value.name.startswith("apex.")


def test_levels_of_the_frontend_set_their_properties(installed):
    from apex.amp.frontend import O2, Properties, opt_levels

    assert list(opt_levels) == ["O3", "O2", "O1", "O0", "O4", "O5"]
    for name, level in opt_levels.items():
        assert level(Properties()) == importlib.import_module("harness.apex.amp.levels").level_properties(name)
        assert level.brief.startswith(f"{name}:  ")
    assert O2()(Properties()).master_weights is True


def test_pyprof_does_nothing_and_says_so(installed):
    from apex import pyprof

    with pytest.warns(UserWarning, match=r"no effect.*torch\.profiler") as caught:
        pyprof.nvtx.init()
    assert caught[0].filename == __file__
    pyprof.wrap(torch, "add")


@pytest.mark.parametrize("padding", [-1, 0, 3, -100])
def test_xentropy_equals_its_definition(installed, padding):
    from apex.contrib.xentropy import SoftmaxCrossEntropyLoss

    logits = torch.randn(4, 5, dtype=torch.float16, requires_grad=True)
    labels = torch.tensor([1, padding, 4, 2])
    log_p = torch.log_softmax(logits.double(), 1)
    expected = -(0.9 * log_p[range(4), labels.clamp(min=0)] + 0.1 * log_p.mean(1)) * (labels != padding)
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, padding, True)
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert not gradient[1].any()
    assert SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, padding).dtype is torch.float16


@pytest.mark.contract("1.1")
def test_find_spec_of_a_missing_part_returns_none(installed):
    assert importlib.util.find_spec("apex.amp") is not None
    for name in ("apex.contrib.sparsity", "apex.transformer", "apex.no_such_part"):
        assert importlib.util.find_spec(name) is None
        with pytest.raises(ModuleNotFoundError, match="apex is harness.apex here, which has no"):
            importlib.import_module(name)


@pytest.mark.contract("9")
def test_imported_impostor_is_set_aside_and_restored(impostor):
    import apex

    theirs = apex, apex.optimizers, sys.modules["apex.optimizers"]
    assert apex is not harness.apex
    harness.apex.install()
    try:
        from apex import amp
        from apex.optimizers import FusedAdam

        assert amp is harness.apex.amp
        assert FusedAdam is harness.apex.optimizers.FusedAdam
        with pytest.raises(ModuleNotFoundError, match="which has no transformer"):  # theirs does
            importlib.import_module("apex.transformer")
    finally:
        harness.apex.uninstall()
    assert (sys.modules["apex"], apex.optimizers, sys.modules["apex.optimizers"]) == theirs
    assert "apex.amp" not in sys.modules
    importlib.import_module("apex.transformer")


@pytest.mark.contract("9")
@pytest.mark.parametrize(
    "text",
    ['raise ImportError("cannot import name UnencryptedCookieSessionFactoryConfig")', "from apex import optimizers"],
    ids=["of PyPI", "without amp"],
)
def test_impostor_is_never_imported(impostor, text):
    (impostor / "__init__.py").write_text(text)
    with pytest.raises(ImportError):
        importlib.import_module("apex.amp")
    harness.apex.install()
    try:
        assert importlib.import_module("apex.amp") is harness.apex.amp
    finally:
        harness.apex.uninstall()


def test_real_amp_c_is_kept(tmp_path, monkeypatch):
    (tmp_path / "amp_C.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    harness.apex.install()
    try:
        assert importlib.import_module("amp_C").real
    finally:
        harness.apex.uninstall()
        assert sys.modules.pop("amp_C").real


def test_uninstall_restores_everything():
    def install_import_uninstall():
        harness.apex.install()
        harness.apex.install()
        assert sum(type(finder).__module__ == "harness.apex.import_hook" for finder in sys.meta_path) == 1
        for name in OLD_MODULES:
            importlib.import_module(f"apex.{name}")
        importlib.import_module("amp_C")
        during = snapshot()
        harness.apex.uninstall()
        harness.apex.uninstall()
        return during

    install_import_uninstall()  # imports everything that is imported lazily
    before = snapshot()
    during = install_import_uninstall()
    assert snapshot() == before
    assert all(during[i] != before[i] for i in range(3)), "there was nothing to undo"


def test_patches_are_undone_in_reverse():
    class Base:
        name = "inherited"

    class Owner(Base):
        @staticmethod
        def method():
            return 1

    before, mapping, patches = dict(vars(Owner)), {}, Patches()
    patches.set(Owner, "name", 1)
    patches.set(Owner, "name", 2)
    patches.set(Owner, "method", None)
    patches.set_item(mapping, "key", 1)
    assert (Owner.name, Owner.method, mapping) == (2, None, {"key": 1})
    patches.close()
    assert dict(vars(Owner)) == before
    assert Owner.name == "inherited"
    assert not mapping
    patches.set(Owner, "name", 1, yields=True)
    Owner.name = 3
    patches.close()
    assert Owner.name == 3


@pytest.mark.contract("9")
def test_plain_data_in_old_checkpoints_loads(tmp_path):
    """A learning rate from a numpy schedule, and the arguments: torch.load rejects both since 2.6."""
    np = pytest.importorskip("numpy")
    before = set(torch.serialization.get_safe_globals())
    checkpoint = {"lr": np.float64(0.5), "best": np.float32(1), "args": argparse.Namespace(lr=1), "steps": np.int64(3)}
    checkpoint |= {"day": datetime.datetime(2020, 1, 1), "path": Path("a")}
    checkpoint |= {"options": SimpleNamespace(lr=1), "step": np.uint16(1)}
    arrays = {"rng": np.random.get_state()[1], "names": np.array(["a", "b"])}
    torch.save(checkpoint, tmp_path / "checkpoint.pth")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "checkpoint.pth")
    harness.apex.install()
    try:
        assert torch.load(tmp_path / "checkpoint.pth") == checkpoint
        torch.save(arrays, tmp_path / "arrays.pth")
        assert all(np.array_equal(each, arrays[name]) for name, each in torch.load(tmp_path / "arrays.pth").items())
        torch.save({"anything": argparse.ArgumentParser}, tmp_path / "other.pth")
        with pytest.raises(pickle.UnpicklingError, match=r"other.pth.*argparse.ArgumentParser.*--trust-checkpoints"):
            torch.load(tmp_path / "other.pth")
    finally:
        harness.apex.uninstall()
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.contract("9")
@pytest.mark.parametrize("module", [b"pathlib", b"pathlib._local"])
def test_paths_load_from_checkpoints_of_each_python(installed, module):
    """3.13 keeps the classes in a module of their own."""
    file, saved = io.BytesIO(), [Path("a"), PurePosixPath("b"), PureWindowsPath("c")]
    torch.save(saved, file, _use_new_zipfile_serialization=False)  # a pickle with names of no stated length
    content, count = re.subn(rb"cpathlib(\._local)?\n", b"c" + module + b"\n", file.getvalue())
    assert count == 3
    assert torch.load(io.BytesIO(content)) == saved


@pytest.mark.contract("9")
def test_trusted_checkpoints_load_with_a_notice(installed, tmp_path, capsys):
    file = io.BytesIO(b"header")
    file.seek(6)
    torch.save({"model": torch.nn.Linear(1, 1)}, file)
    file.seek(6)
    with pytest.raises(pickle.UnpicklingError, match=r"torch.nn.modules.linear.Linear.*trust_checkpoints=True"):
        torch.load(file)
    harness.apex.install(trust_checkpoints=True)
    file.seek(6)
    assert isinstance(torch.load(file)["model"], torch.nn.Linear)
    assert "loading it may run code" in capsys.readouterr().err
    file.seek(6)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(file, weights_only=True)  # the script insists
    torch.save({"lr": 1.0}, tmp_path / "plain.pth")
    assert torch.load(tmp_path / "plain.pth", map_location="cpu") == {"lr": 1.0}
    (tmp_path / "damaged.pth").write_bytes(b"\x01nothing")
    with pytest.raises(pickle.UnpicklingError, match="invalid load key"):
        torch.load(tmp_path / "damaged.pth")
    assert "plain.pth" not in capsys.readouterr().err
    harness.apex.uninstall()
    assert torch.load.__code__.co_filename == torch.serialization.__file__


def test_uninstall_keeps_safe_globals_of_the_script(installed):
    class Own:
        pass

    with torch.serialization.safe_globals([Own]):
        assert argparse.Namespace in torch.serialization.get_safe_globals()
        harness.apex.uninstall()
        assert Own in torch.serialization.get_safe_globals()
        assert argparse.Namespace not in torch.serialization.get_safe_globals()


def test_libraries_find_the_distribution(installed):
    """transformers and others ask for it before they import apex."""
    assert importlib.metadata.version("apex") == "0.1+harness"
    assert importlib.metadata.metadata("apex")["Summary"].startswith("The Apex API on plain PyTorch")
    assert "apex" in {found.metadata["Name"] for found in importlib.metadata.distributions()}
    assert torch.__version__.startswith(importlib.metadata.version("torch"))
    harness.apex.uninstall()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")
