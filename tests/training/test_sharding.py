"""Blocks that are sharded, conversion of shards to whole tensors and back, and overflow and clipping over shards."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from harness.config.schema import ParallelSection, PrecisionSection
from harness.training import build
from harness.training.optimizer.ema import Ema
from harness.training.strategies import sharding
from harness.training.strategies.sharding import blocks, full, layout, local, part_like, shard, whole, without_values
from tests.ranks import run_ranks
from tests.syncs import CUDA, Memory, fake_gpu, fakes


def names(model: nn.Module, at_least: int) -> list[str]:
    called = {module: name for name, module in model.named_modules()}
    return [called[block] for block in blocks(model, at_least)]


def test_large_elements_of_containers_are_blocks():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    assert names(model, 50) == ["0", "3.0"]  # the elements of the inner container
    assert names(model, 1000) == []


def test_layers_of_a_transformer_are_blocks():
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.stages = nn.ModuleList([nn.TransformerEncoder(layer, 2), nn.Linear(16, 16)])

    assert names(Wrapped(), 100) == ["stages.0.layers.0", "stages.0.layers.1", "stages.1"]


def test_residual_blocks_include_their_shortcuts():
    from torchvision.models import resnet18

    found = names(resnet18(), 1 << 16)
    assert found == [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]


def test_tied_weights_stay_with_the_root():
    model = nn.ModuleDict({"embedding": nn.Embedding(16, 16), "middle": nn.Linear(16, 16), "output": nn.Linear(16, 16)})
    model["output"].weight = model["embedding"].weight
    assert names(model, 100) == ["middle"]


def _weights_around_an_evaluation(forward_before: bool) -> tuple[bool, bool]:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))  # 5 rows do not fill the shards of two ranks
    shard(model, torch.device("cpu"), at_least=10)
    params = list(model.parameters())
    ema = Ema(params, params, 0.9)
    for average in ema.average:
        local(average).zero_()
    shards = [local(param.detach()).clone() for param in params]
    inputs = torch.ones(4, 3)
    if forward_before:
        model(inputs).sum().backward()
    with torch.no_grad(), ema.swapped_in():
        averaged = not model(inputs).any()
    kept = model(inputs).any()  # from the weights, not from the average that the last pass gathered
    return averaged, bool(kept) and all(map(torch.equal, shards, [local(param.detach()) for param in params]))


@pytest.mark.parametrize("forward_before", [True, False])
def test_training_goes_on_with_the_weights_after_an_evaluation_of_the_average(forward_before):
    """Also if the evaluation is the first pass, as after a resume, in which torch may move the shards."""
    assert run_ranks(2, _weights_around_an_evaluation, forward_before) == [(True, True)] * 2


def _whole_and_back():
    torch.manual_seed(torch.distributed.get_rank())  # different on each rank, until all get rank 0's weights
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.BatchNorm1d(2))
    before = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    assert shard(model, torch.device("cpu"), at_least=10) == 2
    state = model.state_dict()
    kept = whole(state, keep=torch.distributed.get_rank() == 0)
    for name, tensor in state.items():
        again = part_like(tensor, whole(tensor, keep=True))
        assert type(again) is type(tensor)
        assert torch.equal(local(again), local(tensor))
        assert name not in dict(model.named_parameters()) or local(tensor).numel() < max(tensor.numel(), 3)
    return before, {name: value if value is None else value.tolist() for name, value in kept.items()}


def test_shards_to_whole_tensors_and_back():
    (before, kept), (_, other) = run_ranks(2, _whole_and_back)
    assert kept == before
    assert other["0.weight"] is None
    assert other["2.running_mean"] is not None  # not sharded, so on every rank


def _overflow_in_one_shard(level):
    from harness.config.schema import OptimizerSection
    from harness.distributed.launch_env import Launch
    from harness.distributed.runtime import Runtime
    from harness.training.optimizer import optimizer_builder, precision
    from harness.training.reproducibility.logical_ranks import LogicalRanks
    from harness.training.strategies.base import strategy_class

    torch.manual_seed(0)
    section, runtime = ParallelSection(strategy="fsdp"), Runtime(Launch(world_size=2))
    amp = precision.choose(PrecisionSection(opt_level=level, loss_scale="dynamic"), runtime.device)
    parallel = strategy_class(section)(section, amp, LogicalRanks(runtime))
    model = parallel.prepare(nn.Linear(3, 2, bias=False))
    optimizer = optimizer_builder.build(OptimizerSection(), model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer)
    parallel.wrap(model)
    verdicts = []
    for factor in (1.0, 1e36, 1.0):  # times the loss scale: inf, in the second row of the weight alone
        before = local(model.weight.detach()).clone()
        for last in (False, True):
            with parallel.micro_batch(SimpleNamespace(rank=0, num_rows=4), last):
                outputs = parallel.model(torch.ones(4, 3)).float()
                loss = (outputs * torch.tensor([1.0, factor])).mean()
                with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled:
                    scaled.backward()
        finite = bool(local(model.weight.grad).isfinite().all())
        skips = amp.will_skip(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        moved = not torch.equal(before, local(model.weight.detach()))
        verdicts.append((finite, skips, moved, amp.loss_scale()))
    return verdicts


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_overflow_in_one_shard_skips_the_step_on_all_ranks(level):
    first, second = run_ranks(2, _overflow_in_one_shard, level)
    assert [finite for finite, *_ in first] == [True, True, True]  # no overflow on rank 0
    assert [finite for finite, *_ in second] == [True, False, True]
    assert [rest for _, *rest in first] == [rest for _, *rest in second]
    assert [rest for _, *rest in first] == [[False, True, 65536.0], [True, False, 32768.0], [False, True, 32768.0]]


def _clipped():
    """The norm is that of the whole gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model(torch.ones(4, 3)).sum().backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    clipped = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    shard(model, torch.device("cpu"), at_least=10)
    model(torch.ones(4, 3)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert norm.isfinite()
    torch.testing.assert_close(norm.full_tensor().item(), expected)
    for param, gradient in zip(model.parameters(), clipped, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), gradient)


def test_clipping_of_shards():
    run_ranks(2, _clipped)


def _in_bfloat16():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 8), nn.Linear(8, 3))
    shard(model, torch.device("cpu"), 64, torch.bfloat16)
    seen = {}
    for name, module in model.named_children():

        def forward(x, name=name, module=module, plain=module.forward):
            seen[name] = [str(tensor.dtype) for tensor in (x, *module.parameters())]
            return plain(x)

        module.forward = forward
    out = model(torch.randn(4, 1, 8, 8))
    out.square().mean().backward()
    return seen, str(out.dtype), {(str(param.dtype), str(param.grad.dtype)) for param in model.parameters()}


def test_weights_are_used_in_bfloat16_and_updated_in_float32():
    """Except in batch norms, whose statistics are float32."""
    half, whole = "torch.bfloat16", "torch.float32"
    for seen, out, kept in run_ranks(2, _in_bfloat16):
        assert [seen[name] for name in ("0", "3", "4")] == [[half] * 3] * 3
        assert seen["1"] == [half, whole, whole]
        assert out == whole
        assert kept == {(whole, whole)}


class Odd(nn.Module):
    """Tied weights, a lazy layer, a mask that is not saved, a table made from values, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 8)]
        )
        self.lazy = nn.LazyLinear(8)
        self.output = nn.Linear(8, 16, bias=False)
        self.output.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.randn(3), requires_grad=False)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.register_buffer("mask", torch.rand(4), persistent=False)

    def forward(self, tokens):
        x = self.embedding(tokens) * self.mask.sum() + self.scale.sum()
        for layer in self.layers:
            x = layer(x)
        return self.output(self.lazy(x))


def _odd():
    torch.manual_seed(0)
    model = Odd()
    device = model.embedding.weight.device
    model.eval()(torch.zeros(2, dtype=torch.long, device=device))  # which makes the lazy layer
    return model.train()


def values(model):
    return {
        name: full(tensor.detach()).tolist()
        for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    }


def _shards_of_a_model_without_values():
    whole_one = _odd()
    expected, shape = values(whole_one), layout(whole_one)
    if torch.distributed.get_rank():
        with without_values():
            model = _odd()
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert layout(model) == shape
    else:
        model = whole_one
    shard(model, torch.device("cpu"), at_least=50)
    assert model.output.weight is model.embedding.weight
    assert not model.scale.requires_grad
    assert values(model) == expected
    return sum(local(param).numel() for param in model.parameters())


def test_rank_without_values_gets_those_of_rank_0():
    assert sum(run_ranks(2, _shards_of_a_model_without_values)) == sum(param.numel() for param in _odd().parameters())


def test_model_that_needs_its_values_is_built_with_them(caplog):
    class Needy(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.largest = self.weight.max().item()

    caplog.set_level("INFO", logger="harness")
    task = SimpleNamespace(model=lambda section: Needy())
    config = SimpleNamespace(model=SimpleNamespace(freeze=[], lora=None), seed=0)
    model = build._without_values(config, task)
    assert not model.weight.is_meta
    assert torch.equal(model.weight, build.build_model(config, task).weight)
    assert "built with its values" in caplog.text


class Large(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)


def _peaks(rank, world_size, size):
    """Bytes of the model, of this rank's shards and of the largest unit; peaks on the host and on the device. Nothing
    has values, so that any size fits; nothing is sent."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    host = 0
    with fake_gpu():
        mesh = sharding.init_device_mesh("cuda", (world_size,))
        if rank:
            with Memory() as memory, without_values():  # really without memory
                model = Large(*size)
            host = memory.peaks["host"]
        with FakeTensorMode(allow_non_fake_inputs=True), Memory() as memory:
            model = model if rank else Large(*size)
            whole_bytes = sum(param.nbytes for param in model.parameters())
            units = [sum(param.nbytes for param in block.parameters()) for block in blocks(model)]
            with mock.patch.object(sharding, "init_device_mesh", return_value=mesh):
                shard(model, CUDA)
            own = sum(local(param).nbytes for param in model.parameters())
    dist.destroy_process_group()
    return (
        whole_bytes,
        own,
        max([*units, whole_bytes - sum(units)]),
        max(host, memory.peaks["host"]),
        memory.peaks["device"],
    )


@fakes
@pytest.mark.parametrize(
    "size", [(128, 3, 500), pytest.param((6144, 40, 50304), marks=pytest.mark.slow)], ids=["small", "18 billion"]
)
def test_start_needs_the_shards_and_one_block(size):
    """On any rank but the first, no more than one weight on the host."""
    for rank in (0, 1, 7):
        ((whole_bytes, own, unit, host, device),) = run_ranks(1, _peaks, rank, 8, size, group=False, timeout_s=200)
        assert own == pytest.approx(whole_bytes / 8, rel=0.05)
        assert device <= own + unit + unit / 8
        largest = max(size[0] * size[2], 4 * size[0] ** 2) * 4
        assert host == whole_bytes if rank == 0 else host <= largest
        if size[0] > 1000:
            assert whole_bytes > 18e9 * 4
            assert device < 12 * 2**30
