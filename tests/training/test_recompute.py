"""Blocks that run again in the backward pass: the same gradients, buffers and random numbers, and less memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from harness.errors import ConfigError
from harness.training.model import recompute
from tests.end_to_end.models import Blocks


class Block(nn.Module):
    """Everything that a second run could get wrong: statistics, random numbers, state that the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = spectral_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, scale=1.0):
        self.calls = self.calls + 1  # another tensor, not another value
        return x + nn.functional.dropout(self.norm(self.layer(x)).relu(), 0.5) * scale * self.calls


class Net(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.start, self.blocks = nn.Linear(4, 6), nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x):
        x = self.start(x)
        for block in (*self.blocks, self.blocks[0]):  # one runs twice
            x = block(x, scale=0.5)
        return x


def named(model, modules):
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in modules]


def trained(model: nn.Module, num_steps: int = 3) -> list[torch.Tensor]:
    """The losses, weights, buffers and random numbers of a few steps with two micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    torch.manual_seed(1)
    for _ in range(num_steps):
        for _ in range(2):
            loss = model(torch.randn(5, 4)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *model.state_dict().values(), torch.rand(3)]


@pytest.mark.parametrize("wanted", [True, ["blocks.0", "blocks.2.*"], ["*"]])
def test_training_is_the_same_bit_for_bit(wanted):
    torch.manual_seed(0)
    plain = Net()
    again = copy.deepcopy(plain)
    assert recompute.apply(again, wanted)
    assert again.state_dict().keys() == plain.state_dict().keys()
    for expected, found in zip(trained(plain), trained(again), strict=True):
        assert torch.equal(expected, found)


def test_a_buffer_that_first_changes_in_a_later_pass():
    class Late(nn.Module):
        counting = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("calls", torch.ones(()))

        def forward(self, x):
            if self.counting:
                self.calls += 1
            return self.layer(x).tanh() * self.calls.clone()

    torch.manual_seed(0)
    plain = nn.Sequential(Late())
    again = copy.deepcopy(plain)
    recompute.apply(again, ["0"])
    for model in (plain, again):
        model(torch.ones(2, 4)).sum().backward()
        model[0].counting = True
        model(torch.ones(2, 4)).sum().backward()
        assert model[0].calls == 2
    assert torch.equal(plain[0].layer.weight.grad, again[0].layer.weight.grad)


def test_a_graph_that_is_kept_can_run_again():
    torch.manual_seed(0)
    plain = Net()
    again = copy.deepcopy(plain)
    recompute.apply(again, True)
    grads = []
    for model in (plain, again):
        torch.manual_seed(1)
        loss = model(torch.randn(5, 4)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        grads += [model.start.weight.grad, model.blocks[0].norm.running_mean]
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(grads[1], grads[3])


def test_blocks_keep_only_their_inputs():
    def kept_bytes(model):
        total = 0

        def pack(tensor):
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(64, 4)).sum()
        return total

    model = Net(8)
    before = kept_bytes(model)
    recompute.apply(model, True)
    assert kept_bytes(model) < before / 3
    model.eval()
    calls = model.blocks[0].calls.clone()
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert model.blocks[0].calls == calls + 2


def test_repeated_elements_of_containers_are_the_blocks():
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(8, 2), nn.ReLU())
    assert named(model, recompute.repeated_blocks(model)) == ["0.layers.0", "0.layers.1"]
    assert recompute.repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2))) == []
    stages = nn.Sequential(nn.Sequential(Net(1), Net(1)), nn.Linear(1, 1))  # an outer block, not the parts in it
    assert named(stages, recompute.repeated_blocks(stages)) == ["0.0", "0.1"]


def test_a_model_without_such_modules():
    with pytest.raises(ConfigError, match=r"model.activation_checkpointing: the model has no blocks[\s\S]*\[0\]"):
        recompute.apply(nn.Sequential(nn.Linear(2, 2)), True)
    with pytest.raises(ConfigError, match=r"no module of the model matches 'block.0'[\s\S]*did you mean blocks.0"):
        recompute.apply(Net(), ["block.0"])
    assert recompute.apply(Net(), ["norm"])[:2] == ["blocks.0.norm", "blocks.1.norm"]  # ends, as in model.freeze
    assert recompute.apply(Net(), False) == recompute.apply(Net(), []) == []


@pytest.mark.slow
def test_compiled_blocks_give_the_same_weights():
    torch.manual_seed(0)
    model = Blocks(3, num_blocks=1, dropout=0.0)  # a compiled model draws other numbers
    models = [model, copy.deepcopy(model), copy.deepcopy(model)]
    recompute.apply(models[2], True)
    found = []
    for model in models:
        if model is not models[0]:
            model.compile(backend="aot_eager_decomp_partition")  # all of the default but its generated code
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(4, 1, 8, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.state_dict())
    for name, value in found[1].items():
        assert torch.equal(value, found[2][name]), name
        torch.testing.assert_close(value, found[0][name], rtol=1e-4, atol=1e-5)
