"""Blocks that are sharded, conversion of shards to whole tensors and back, and overflow and clipping over shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.config.schema import ParallelSection, PrecisionSection
from harness.training.fsdp import blocks, local, part_like, shard, whole
from harness.training.optim import Ema
from tests.ranks import run_ranks


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
    from harness.training import optim, precision, strategy

    torch.manual_seed(0)
    section, device = ParallelSection(strategy="fsdp"), torch.device("cpu")
    amp = precision.choose(PrecisionSection(opt_level=level, loss_scale="dynamic"), device)
    model = strategy.prepare(nn.Linear(3, 2, bias=False), section, amp, device, 2)
    optimizer = optim.build(OptimizerSection(), model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer)
    parallel = strategy.wrap(model, section, amp, device, 2)
    verdicts = []
    for factor in (1.0, 1e36, 1.0):  # times the loss scale: inf, in the second row of the weight alone
        before = local(model.weight.detach()).clone()
        for last in (False, True):
            with parallel.sync_gradients(last):
                outputs = parallel.model(torch.ones(4, 3)).float()
                loss = (outputs * torch.tensor([1.0, factor])).mean()
                with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled:
                    scaled.backward()
        finite = bool(local(model.weight.grad).isfinite().all())
        skips = amp.skips(optimizer)
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
    shard(model, torch.device("cpu"), 64, torch.bfloat16, torch.bfloat16)
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
