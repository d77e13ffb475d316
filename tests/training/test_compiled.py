"""Compiled models: one graph per pass, and the same code for the same shapes whatever came before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.apex import amp
from harness.apex.parallel import DistributedDataParallel
from harness.errors import TrainingError
from harness.training.model import compiled
from tests.fixtures import make_config, write_rows
from tests.ranks import run_ranks


class Mixed(nn.Module):
    """A convolution, a batch norm and a transformer's layer; (batch, 1, 4, 4) -> (batch, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU())
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(128, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.features(images).flatten(2)).flatten(1))


@pytest.mark.parametrize(("setting", "mode"), [("true", None), ("reduce-overhead",) * 2, ("max-autotune",) * 2])
def test_model_compile_is_the_mode_of_torch_compile(tmp_path, monkeypatch, built, setting, mode):
    write_rows(tmp_path, "train", 16)
    write_rows(tmp_path, "eval", 6)
    config = make_config(tmp_path, [f"model.compile={setting}", "train.deterministic=false", "precision.opt_level=O0"])
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append(options) or function)
    built(config)
    assert given == [{"dynamic": False, "mode": mode}]


@pytest.mark.parametrize(
    "level", ["O1", *(pytest.param(level, marks=pytest.mark.slow) for level in ("O0", "O2", "O3", "O4", "O5"))]
)
def test_a_compiled_pass_is_one_graph(level):
    """With the casts of amp, which are hooks of the model and rules for operations, and without a graph break."""
    from torch._dynamo.utils import counters

    graphs, results = [], []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = Mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        if is_compiled:
            torch._dynamo.reset()
            counters.clear()
            compiled.compile_whole(model, backend=backend)
        for _ in range(3):
            outputs = model(torch.linspace(-1, 1, 64).view(4, 1, 4, 4))
            with amp.scale_loss(outputs.square().mean(), optimizer) as loss:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([outputs, *model.state_dict().values()])
        amp.reset()
    assert counters["graph_break"] == {}
    assert (len(graphs), counters["frames"]["total"]) == (1, 1)
    assert [value.dtype for value in results[0]] == [value.dtype for value in results[1]]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.fixture
def shapes():
    """A backend of torch.compile, and the input shapes of the graphs that it has compiled and called."""
    seen: dict[str, list[tuple[Any, ...]]] = {"compiled": [], "called": []}

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        sizes = next(tuple(value.shape) for value in inputs if isinstance(value, torch.Tensor) and value.dim() == 3)
        seen["compiled"].append(sizes)

        def call(*values: Any) -> Any:
            seen["called"].append(sizes)
            return graph.forward(*values)

        return call

    with compiled.fresh_compiler():
        yield backend, seen


def _resumed_on_four_ranks() -> tuple[bool, list[list[int]], list[list[int]]]:
    """(whether a step of a new start has the gradients of the run that went on; the sizes of the buckets of torch's
    wrapper in its first and in its third step)."""
    rank = dist.get_rank()

    def built(weights: dict[str, torch.Tensor] | None = None) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
        model.load_state_dict(weights or model.state_dict())
        return model

    def step(wrapped: nn.Module, number: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(4 * number + rank)
        wrapped.zero_grad()
        wrapped(torch.randn(6, 16, generator=generator)).square().sum().backward()
        gradients = [param.grad.clone() for param in wrapped.parameters()]
        with torch.no_grad():
            for param, gradient in zip(wrapped.parameters(), gradients, strict=True):
                param.sub_(gradient, alpha=0.01)
        return gradients

    def ours(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model, delay_allreduce=False, message_size=300)
        compiled.compile_whole(model, backend="eager")
        return wrapped

    model = built()
    going_on = ours(model)
    for number in range(2):
        step(going_on, number)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    same = all(map(torch.equal, step(going_on, 2), step(ours(built(saved)), 2)))
    torchs = nn.parallel.DistributedDataParallel(built(), bucket_cap_mb=0.0012)
    sizes = []
    for number in range(3):
        step(torchs, number)
        sizes.append([bucket.buffer().numel() for bucket in torchs.reducer._get_zeros_like_grad_buckets()])
    return same, sizes[0], sizes[2]


@pytest.mark.slow
def test_overlapped_ddp_of_a_compiled_model_resumes_exactly_where_torchs_changes_its_buckets():
    for same, first, later in run_ranks(4, _resumed_on_four_ranks, timeout_s=120):
        assert same
        assert first != later, "torch's wrapper no longer rebuilds its buckets: it could be used for compiled models"


def texts(rows: int) -> torch.Tensor:
    return torch.zeros(rows, 2, 4)


def test_code_for_a_size_does_not_depend_on_the_sizes_before(shapes):
    """By default, the second size is compiled for any size, which then also runs for the first; the ninth is not
    compiled."""
    backend, seen = shapes
    model = nn.Linear(4, 3)
    compiled.compile_whole(model, backend=backend)
    sizes = [8, 5, 8, *range(2, 13), 8]
    for rows in sizes:
        model(texts(rows))
    assert [shape[0] for shape in seen["called"]] == sizes
    assert all(type(size) is int for shape in seen["compiled"] for size in shape)
    assert len(seen["compiled"]) == len(set(sizes))


def test_a_model_with_a_new_kind_of_input_in_every_pass_fails(shapes, monkeypatch):
    """torch would run it as it is, from a pass on that depends on where the run was resumed."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 3)
    monkeypatch.setattr(compiled, "MAX_SHAPES", 3)
    model = nn.Linear(4, 3)
    compiled.compile_whole(model, backend=shapes[0])
    for rows in (2, 3, 4, 2):
        model(texts(rows))
    with pytest.raises(TrainingError) as raised:
        model(texts(5))
    assert raised.value.where == "model.compile"


def test_a_run_starts_without_what_the_process_has_compiled(shapes):
    backend, seen = shapes
    limits = [torch._dynamo.config.recompile_limit]
    for _ in range(2):
        with compiled.fresh_compiler():
            model = nn.Linear(4, 3)
            compiled.compile_whole(model, backend=backend)
            model(texts(2))
            limits.append(torch._dynamo.config.recompile_limit)
    assert len(seen["compiled"]) == 2
    assert limits == [compiled.MAX_SHAPES] * 3
