"""Operations that are not deterministic on CUDA: torch's list, a search in everything shipped, and torch's error."""

from __future__ import annotations

import os
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness import api, cli
from harness.config import loader, plugins
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import ConfigError
from harness.runs.run_dir import RunFolder
from harness.tools.data import digits
from harness.training import build
from harness.training.check import preflight
from harness.training.exit_report import explained
from harness.training.model import model_builder
from harness.training.model.built_in.small_cnn import Model as SmallCNN
from harness.training.model.built_in.small_cnn import quarters
from harness.training.reproducibility import determinism
from harness.training.reproducibility.determinism import Audit
from harness.training.reproducibility.nondeterministic import OPERATIONS
from tests import datasets
from tests.conftest import ROOT
from tests.end_to_end.processes import drivers
from tests.fixtures import settings, write_photos, write_rows, write_yaml
from tests.ranks import run_ranks, wait_for

CONFIGS = {
    "digits": (1, ["train.ema_decay=0.9", "model.channels_last=true"]),
    "fashion_mnist": (1, ["task.train_rows=300", "task.eval_rows=100", "precision.opt_level=O2"]),
    "finetune": (1, ["model.weights=null"]),
    "imagenet": (1, ["model.name=resnet18", "batch.global=4", "train.deterministic=true"]),
    "mnist": (2, ["task.train_rows=300", "task.eval_rows=100", "optimizer.larc={}"]),
    "multi_label": (1, []),
    "pet_names": (1, ["batch.global=64"]),
    "pet_names_gru": (1, ["batch.global=64", "precision.opt_level=O4"]),
    "regression": (1, ["precision.opt_level=O4"]),
    "text": (1, ["task.loss.name=focal", "task.loss.args=null", "task.loss.class_weights=balanced"]),
}
IMAGE = torch.zeros(2, 3, 64, 64)


def trained(arguments: list[str]) -> tuple[set[str], set[str]]:
    """(operations of the list, all operations) of a training run in this process."""
    with Audit() as audit:
        assert cli.main(["train", *arguments]) == 0
    return audit.found, audit.seen


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
def test_shipped_configuration(tmp_path, name):
    """Forward, backward, exchange, update, evaluation, metrics and checkpoint of two steps."""
    ranks, overrides = CONFIGS[name]
    if name in ("digits", "finetune"):
        digits.write(tmp_path)
        where = [f"task.{key}_csv={tmp_path}/{key}.csv" for key in ("train", "eval")] + [f"task.root={tmp_path}"]
        where += ["data.num_workers=0", f"data.cache_dir={tmp_path}/cache"]
    elif name in datasets.OWN_TABLES:
        where = datasets.own_table(tmp_path / "data", name)
    elif name == "imagenet":
        where = [f"task.{key}_csv={write_photos(tmp_path, key, 8)}" for key in ("train", "eval")]
        where += [f"task.root={tmp_path}", "data.num_workers=0", f"data.cache_dir={tmp_path}/cache"]
    elif "mnist" in name:
        where = [f"task.root={datasets.images(tmp_path / 'data', name)}"]
    else:
        where = [f"task.names={datasets.write_names(tmp_path / 'names.txt')}"]
    words = ["-c", str(ROOT / "configs" / f"{name}.yaml"), f"output={tmp_path}/runs", *where, *overrides]
    for found, seen in run_ranks(ranks, trained, [*words, "train.max_steps=2", "train.clip_norm=1"], group=False):
        assert found == set()
        assert any("backward" in name for name in seen)  # the search has seen the backward pass


LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in ("convnext_tiny", "vit_b_16")]


@pytest.mark.parametrize("name", [*plugins.names("model"), "resnet18", *LARGE])
def test_shipped_model(name):
    character, text = name.startswith("char_"), name.startswith("text_")
    known = (
        {"num_characters": 9}
        if character
        else {"num_classes": 4, **({"num_tokens": 9} if text else {"in_channels": 3})}
    )
    example = torch.zeros(2, 5, dtype=torch.int64) if character or text else IMAGE
    args = {"image_size": 64} if name == "vit_b_16" else {}
    model = model_builder.build(name, args, known, example)
    with Audit() as audit:
        F.cross_entropy(
            model(example).flatten(0, -2), torch.zeros(10 if character else 2, dtype=torch.int64)
        ).backward()
    assert audit.found == set()
    assert any("backward" in seen for seen in audit.seen)


@pytest.mark.parametrize(("height", "width"), [(4, 4), (1, 1), (1, 3), (3, 3), (14, 14), (2, 5), (16, 8)])
def test_quarters_are_those_of_adaptive_pooling(height, width):
    """So that a checkpoint from before keeps its meaning; for digits (4 x 4) the bits are equal."""
    images = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0), requires_grad=True)
    expected = F.adaptive_avg_pool2d(images, 2)
    found = quarters(images)
    torch.testing.assert_close(found, expected)
    given = torch.randn(found.shape)
    gradients = [torch.autograd.grad(output, images, given)[0] for output in (found, expected)]
    torch.testing.assert_close(*gradients)
    if height == width == 4:
        assert torch.equal(found, expected)
        assert torch.equal(*gradients)


def _x(*shape: int) -> torch.Tensor:
    return torch.rand(shape, requires_grad=True)


CALLS = {
    "AvgPool3d": lambda: F.avg_pool3d(_x(1, 1, 2, 2, 2), 2),
    "AdaptiveAvgPool2d": lambda: F.adaptive_avg_pool2d(_x(1, 1, 4, 4), 2),
    "AdaptiveAvgPool3d": lambda: F.adaptive_avg_pool3d(_x(1, 1, 4, 4, 4), 2),
    "AdaptiveMaxPool2d": lambda: F.adaptive_max_pool2d(_x(1, 1, 4, 4), 2),
    "FractionalMaxPool2d": lambda: F.fractional_max_pool2d(_x(1, 1, 4, 4), 2, output_size=2),
    "FractionalMaxPool3d": lambda: F.fractional_max_pool3d(_x(1, 1, 4, 4, 4), 2, output_size=2),
    "MaxUnpool1d": lambda: F.max_unpool1d(_x(1, 1, 2), torch.tensor([[[0, 2]]]), 2),
    "MaxUnpool2d": lambda: F.max_unpool2d(_x(1, 1, 1, 2), torch.tensor([[[[0, 2]]]]), 2),
    "MaxUnpool3d": lambda: F.max_unpool3d(_x(1, 1, 1, 1, 2), torch.tensor([[[[[0, 2]]]]]), 2),
    "interpolate": lambda: F.interpolate(_x(1, 1, 4), scale_factor=2, mode="linear"),
    "ReflectionPad1d": lambda: F.pad(_x(1, 1, 4), (1, 1), mode="reflect"),
    "ReflectionPad2d": lambda: F.pad(_x(1, 1, 4, 4), (1, 1, 1, 1), mode="reflect"),
    "ReflectionPad3d": lambda: F.pad(_x(1, 1, 4, 4, 4), (1,) * 6, mode="reflect"),
    "NLLLoss": lambda: F.cross_entropy(_x(1, 2, 3, 3), torch.zeros(1, 3, 3, dtype=torch.int64)),
    "CTCLoss": lambda: F.ctc_loss(
        _x(4, 1, 3).log_softmax(2), torch.ones(1, 2, dtype=torch.int64), torch.tensor([4]), torch.tensor([2])
    ),
    "EmbeddingBag": lambda: F.embedding_bag(torch.tensor([[0, 1]]), _x(3, 2), mode="max"),
    "put_": lambda: _x(3).clone().put_(torch.tensor([1]), torch.ones(1)),
    "histc": lambda: torch.histc(torch.rand(3), 2),
    "bincount": lambda: torch.bincount(torch.tensor([1, 2]), weights=torch.rand(2)),
    "median": lambda: _x(3, 3).median(0)[0],
    "grid_sample": lambda: F.grid_sample(_x(1, 1, 2, 2), torch.zeros(1, 2, 2, 2), align_corners=False),
    "scatter_reduce": lambda: _x(3).scatter_reduce(0, torch.tensor([0, 0]), torch.ones(2), "amax"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_found(name):
    with Audit() as audit:
        output = CALLS[name]()
        if output.requires_grad:
            output.sum().backward()
    assert audit.found == {"MaxUnpool1d", "MaxUnpool2d"} if name in ("MaxUnpool1d", "MaxUnpool2d") else {name}


def test_deterministic_variants_are_not_found():
    with Audit() as audit:
        F.embedding_bag(torch.tensor([[0, 1]]), _x(3, 2), mode="mean").sum().backward()
        torch.bincount(torch.tensor([1, 2]))
        _x(3).scatter_reduce(0, torch.tensor([0, 0]), torch.ones(2), "sum").sum().backward()
        F.interpolate(_x(1, 1, 4), scale_factor=2).sum().backward()
        F.adaptive_avg_pool2d(_x(1, 1, 4, 4), 1).sum().backward()  # torch uses mean for it
    assert audit.found == set()


@pytest.mark.skipif(torch.__version__ < "2.14", reason="the list is of a newer torch")
def test_list_is_that_of_the_documentation():
    text = torch.use_deterministic_algorithms.__doc__.partition(":class:`RuntimeError` when ``mode=True``")[2]
    text = text.partition("In addition, several")[0]
    entries = re.findall(r"\* :\w+:`torch\.([\w.]+)`(.*?)(?=\n +\* |\Z)", text, re.S)
    elsewhere = re.compile(r"MPS tensor(?! with CUDA)|quantized")
    documented = {
        name.rpartition(".")[2] for name, when in entries if not elsewhere.search(when) or "CUDA or MPS" in when
    }
    assert documented == set(OPERATIONS)


@pytest.fixture
def level(monkeypatch):
    """``determinism.require``, undone after the test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    benchmark = torch.backends.cudnn.benchmark
    yield determinism.require
    determinism.require(False)
    torch.backends.cudnn.benchmark = benchmark


@pytest.mark.parametrize(
    ("precisions", "recorded"),
    [
        (("none", "tf32", "tf32"), [False, True]),
        (("tf32", "ieee", "ieee"), [True, False]),
        (("ieee", "ieee", "tf32"), [False, False, True]),
    ],
)
def test_kernels_record_tf32_also_if_it_was_set_by_fp32_precision(precisions, recorded, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    with api._as_before():
        for place, precision in zip(determinism.tf32_places(), precisions, strict=True):
            place.fp32_precision = precision
        assert determinism.kernels(torch.device("cuda"))["tf32"] == recorded


def test_levels(level):
    level(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # set by the user
    with pytest.raises(RuntimeError, match="deterministic") as caught:
        CALLS["MaxUnpool2d"]()
    shown = str(explained(caught.value))
    assert "torch has no deterministic implementation of max_unpooling2d_forward_out" in shown
    assert "use train.deterministic=warn" in shown
    assert "MaxUnpool2d: interpolate(mode='nearest')" in shown
    level("warn")
    with pytest.warns(UserWarning, match="max_unpooling2d_forward_out does not have a deterministic"):
        CALLS["MaxUnpool2d"]()
    assert not torch.backends.cudnn.benchmark
    level(False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    ("kernel", "instead"),
    [
        ("adaptive_avg_pool2d_backward_cuda", "AdaptiveAvgPool2d: x.mean((-2, -1))"),
        ("upsample_bicubic2d_backward_out_cuda", "interpolate: interpolate(mode='nearest')"),
        ("median CUDA with indices output", "median: sort"),
        ("_bincount_cuda", "bincount: index_add"),
        ("nll_loss2d_forward_out_cuda_template", "NLLLoss: cross_entropy"),
        ("some_new_kernel_cuda", "or false"),
    ],
)
def test_error_of_torch_is_explained(kernel, instead):
    """The texts are those of torch's CUDA kernels."""
    error = RuntimeError(f"{kernel} does not have a deterministic implementation, but you set 'torch.use_determini...")
    shown = explained(error)
    assert shown.exit_code == 2
    assert f"train.deterministic: torch has no deterministic implementation of {kernel}" in str(shown)
    assert instead in shown.hint
    assert explained(ValueError("something else")).args == ("something else",)


class Unpooling(nn.Module):
    """Uses an operation that torch refuses in deterministic mode, also on the CPU."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, images):
        pooled, where = F.max_pool2d(images, 2, return_indices=True)
        return self.layer(F.max_unpool2d(pooled, where, 2).flatten(1))


@pytest.mark.slow
def test_own_model_that_is_not_deterministic(tmp_path):
    """Refused in one message, before training; trained with a warning under train.deterministic=warn."""
    write_rows(tmp_path, "train", 12)
    write_rows(tmp_path, "eval", 6)
    tree = settings(tmp_path, model={"name": f"{__name__}.Unpooling"}, train={"epochs": 1})
    words, terminal = ["-c", str(write_yaml(tmp_path / "x.yaml", tree))], tmp_path / "terminal.txt"
    assert wait_for(drivers(1, words, terminal), 60) == [2]
    shown = terminal.read_text()
    assert ": train.deterministic: torch has no deterministic implementation of max_unpooling2d_forward_out" in shown
    assert "use train.deterministic=warn" in shown
    assert "Traceback" not in shown
    assert wait_for(drivers(1, [*words, "train.deterministic=warn"], terminal), 60) == [0]
    assert " deterministic: " not in terminal.read_text(), "a start is shown in a few lines, the rest as harness check"
    log = (tmp_path / "runs" / "small" / "logs" / "rank-0.log").read_text()
    assert "deterministic: deterministic algorithms where torch has them; logs/rank-N.log has a warning for" in log
    assert "max_unpooling2d_forward_out does not have a deterministic implementation" in log


class Recurrent(nn.Module):
    """A recurrent module of ``kind`` for images of 8 x 8."""

    def __init__(self, num_classes: int, kind: str = "GRU", num_layers: int = 2, dropout: float = 0.3) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(8, 8, num_layers, batch_first=True, dropout=dropout)
        self.output = nn.Linear(64, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.output(self.layer(images.flatten(1, 2))[0].flatten(1))


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_dropout_that_cudnn_keeps_to_itself_is_flagged_on_cuda(kind, caplog, monkeypatch):
    model, cuda, cpu = Recurrent(3, kind), torch.device("cuda:0"), torch.device("cpu")
    with pytest.raises(ConfigError, match=kind) as raised:
        determinism.require_restorable(model, cuda, True)
    assert "char_gru" in raised.value.hint
    determinism.require_restorable(model, cuda, "warn")
    assert len(caplog.records) == 1
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)  # then torch draws the numbers
    determinism.require_restorable(model, cuda, True)
    monkeypatch.undo()
    determinism.require_restorable(model, cuda, False)
    determinism.require_restorable(model, cpu, True)
    determinism.require_restorable(Recurrent(3, kind, dropout=0.0), cuda, True)
    assert len(caplog.records) == 1


def test_recurrent_dropout_is_reported_before_a_run(tmp_path, monkeypatch):
    """By ``harness check`` on any machine, and as an error for a GPU, there and at the start of a run."""
    write_rows(tmp_path, "train", 12)
    write_rows(tmp_path, "eval", 6)
    path = str(write_yaml(tmp_path / "x.yaml", settings(tmp_path, model={"name": f"{__name__}.Recurrent"})))
    plan = preflight.examine(path, [], 1)
    assert plan.errors == []
    assert "dropout between the layers of GRU" in plan.facts["deterministic"]
    monkeypatch.setattr(preflight.devices, "choose", lambda *_, **__: torch.device("cuda:0"))
    plan = preflight.examine(path, [], 1)
    assert f"{path}: train.deterministic" in [problem.where for problem in plan.errors]
    runtime = Runtime(device=torch.device("cuda:0"))
    monkeypatch.setattr(determinism, "require", lambda level: None)  # changes the process
    folder = RunFolder(tmp_path / "runs")
    (tmp_path / "runs" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="dropout between the layers of GRU"):
        build.build(loader.load(path), runtime, folder, Stop(runtime))


@pytest.mark.parametrize(("name", "kind"), [("char_gru", nn.GRU), ("char_lstm", nn.LSTM)])
def test_shipped_recurrent_models_equal_one_module_of_several_layers(name, kind):
    """On a CPU, bit for bit: initial weights, dropout and gradients."""
    codes = torch.randint(0, 5, (4, 6), generator=torch.Generator().manual_seed(1))
    sizes = {"hidden": 8, "num_layers": 3, "dropout": 0.3} | ({"embedding": 4} if name == "char_gru" else {})
    model = model_builder.build(name, sizes, {"num_characters": 5}, codes)
    assert determinism.unrestorable(model) == set()
    whole = kind(model.layers[0].input_size, 8, 3, batch_first=True, dropout=0.3)
    whole.load_state_dict({
        key.replace("_l0", f"_l{number}"): value
        for number, layer in enumerate(model.layers) for key, value in layer.state_dict().items()
    })  # fmt: skip
    torch.manual_seed(0)
    found = model(codes)
    torch.manual_seed(0)
    if name == "char_gru":
        expected = model.output(model.dropout(whole(model.dropout(model.embedding(codes)))[0]))
    else:
        expected = model.output(whole(F.one_hot(codes, 5).float())[0])
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(value.square().mean(), model.output.weight) for value in (found, expected)]
    assert torch.equal(gradients[0][0], gradients[1][0])


def fills_of_a_step(level: bool | str) -> tuple[int, list[float]]:
    """(tensors that are filled with a constant in a step of a convolutional network, the weights after it)."""
    determinism.require(level)
    torch.manual_seed(0)
    model = SmallCNN(3, width=8, batch_norm=True)
    optimizer = torch.optim.Adam(model.parameters())
    images = torch.randn(4, 1, 8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(images).square().mean().backward()
        optimizer.step()
    fills = sum(event.count for event in profile.key_averages() if event.key == "aten::fill_")
    return fills, torch.nn.utils.parameters_to_vector(model.parameters()).tolist()


def test_deterministic_mode_does_not_fill_new_tensors():
    """By default torch writes NaN into each of them first. The weights are the same."""
    (plain, expected), (strict, weights), (warned, _) = (
        run_ranks(1, fills_of_a_step, level, group=False)[0] for level in (False, True, "warn")
    )
    assert strict == warned == plain
    assert weights == expected


def cublas_setting_when_ranks_connect(words: list[str]) -> list[str | None]:
    from harness.training import run_start

    seen = []

    def connect(*_, **__) -> None:
        seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        raise ConfigError("planned")

    run_start.open_runtime = connect
    assert cli.main(["train", *words]) == 2
    return seen


def test_cublas_is_configured_before_cuda_starts(tmp_path):
    """cuBLAS reads the variable once; CUDA starts when the ranks connect."""
    words = ["-c", str(write_yaml(tmp_path / "x.yaml", settings(tmp_path)))]
    assert run_ranks(1, cublas_setting_when_ranks_connect, words, group=False) == [[":4096:8"]]
