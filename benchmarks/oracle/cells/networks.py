"""O1 to O3 on other kinds of networks: recurrent, attention, convolutions in one and three dimensions, losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.oracle import original
from benchmarks.oracle.cells.kit import Result, cells, fit, sgd


class Recurrent(nn.Module):
    """A recurrent layer over 5 steps of 6 features and a linear layer."""

    def __init__(self, make: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.layer, self.head = _flat(make(6, 12, **options)), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][-1])


def _flat(layer: nn.Module) -> nn.Module:
    """Put the weights of a recurrent layer into one buffer, as torch does on CUDA; the original relies on it."""
    weights = [weight for group in layer.all_weights for weight in group]  # type: ignore[union-attr]
    buffer, place = torch.cat([weight.detach().flatten() for weight in weights]), 0
    for weight in weights:
        weight.data = buffer[place : place + weight.numel()].view_as(weight)
        place += weight.numel()
    return layer


class Cells(nn.Module):
    """A cell applied at each of the 5 steps, with one weight for all of them."""

    def __init__(self, make: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = make(6, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x:
            state = self.cell(step) if state is None else self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Attention(nn.Module):
    """Attention written out: two products around a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.query, self.key, self.value = (nn.Linear(6, 12) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.matmul(self.query(x), self.key(x).transpose(-1, -2)) / 12**0.5
        mixed = functional.softmax(scores, dim=-1) @ self.value(x)
        return self.head(self.norm(self.inputs(x) + mixed).mean(0))


class Module(nn.Module):
    """A torch module between two linear layers."""

    def __init__(self, body: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], width: int = 12) -> None:
        super().__init__()
        self.first, self.body, self.call, self.head = nn.Linear(6, 12), body, call, nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.call(self.body, self.first(x)))


def _attend(module: nn.Module, x: Tensor) -> Tensor:
    return module(x, x, x)[0].mean(0)


def _attend_with_weights(module: nn.Module, x: Tensor) -> Tensor:
    return module(x, x, x, need_weights=True)[0].mean(0)


def _last(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).mean(0)


def _volume(module: nn.Module, x: Tensor) -> Tensor:
    return module(x.reshape(4, 1, 5, 3, 8).repeat(2, 1, 1, 1, 1)).flatten(1)[:, :12]


def _channels(module: nn.Module, x: Tensor) -> Tensor:
    return module(x.permute(1, 2, 0)).mean(-1)


def _dot_product_attention(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x)
    return functional.scaled_dot_product_attention(y, y, y).mean(0)


def _batched_products(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x)
    return torch.baddbmm(x, torch.bmm(y, y.mT), x).mean(0)


def _norms(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x)
    return (y.pow(2).sum(0) / (y.norm(dim=0) + 1)).sqrt()


def _joined(module: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([torch.cat([module(x), x]), torch.cat([x, x])]).mean((0, 1))


class Shared(nn.Module):
    """One linear layer applied three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).mean(0)
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.head(x)


class Words(nn.Module):
    """An embedding whose weight is also that of the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(4, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        indices = x[..., 0].gt(0).long() + 2 * x[..., 1].gt(0).long()
        return functional.linear(functional.gelu(self.body(self.embed(indices).mean(0))), self.embed.weight)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "two-layer bidirectional LSTM": lambda: _Wide(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN tanh": lambda: Recurrent(nn.RNN),
    "RNN relu": lambda: Recurrent(nn.RNN, nonlinearity="relu"),
    "LSTMCell": lambda: Cells(nn.LSTMCell),
    "GRUCell": lambda: Cells(nn.GRUCell),
    "RNNCell": lambda: Cells(nn.RNNCell),
    "weight used three times": Shared,
    "tied embedding": Words,
    "attention written out": Attention,
    "MultiheadAttention": lambda: Module(nn.MultiheadAttention(12, 3), _attend),
    "TransformerEncoderLayer": lambda: Module(nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0), _last),
    "Conv1d": lambda: Module(nn.Sequential(nn.Conv1d(12, 12, 3, padding=1), nn.BatchNorm1d(12), nn.ReLU()), _channels),
    "Conv3d": lambda: Module(nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4)), _volume),
    "ConvTranspose1d": lambda: Module(nn.ConvTranspose1d(12, 12, 3), _channels),
    "GroupNorm and SiLU": lambda: Module(
        nn.Sequential(nn.Conv1d(12, 12, 1), nn.GroupNorm(3, 12), nn.SiLU()), _channels
    ),
    "InstanceNorm": lambda: Module(nn.Sequential(nn.Conv1d(12, 12, 1), nn.InstanceNorm1d(12, affine=True)), _channels),
    "PReLU": lambda: Module(nn.Sequential(nn.Linear(12, 12), nn.PReLU()), _last),
    "softplus and log_softmax": lambda: Module(nn.Sequential(nn.Softplus(), nn.LogSoftmax(-1)), _last),
    "Bilinear": lambda: Module(nn.Bilinear(12, 12, 12), lambda body, x: body(x, x).mean(0)),
    "einsum": lambda: Module(nn.Linear(12, 12), lambda body, x: torch.einsum("tbi,tbj->bij", body(x), x).mean(1)),
    "scaled_dot_product_attention": lambda: Module(nn.Linear(12, 12), _dot_product_attention),
    "torch.softmax": lambda: Module(nn.Linear(12, 12), lambda body, x: torch.softmax(body(x), -1).mean(0)),
    "baddbmm and bmm": lambda: Module(nn.Linear(12, 12), _batched_products),
    "norms and powers": lambda: Module(nn.Linear(12, 12), _norms),
    "cat and stack": lambda: Module(nn.Linear(12, 12), _joined),
}


class _Wide(nn.Module):
    def __init__(self, make: Callable[..., nn.Module]) -> None:
        super().__init__()
        layer = make(6, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.layer, self.head = _flat(layer), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.transpose(0, 1))[0][:, -1])


def _sequences(number: int) -> Any:
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    for _ in range(number):
        yield torch.randn(5, 8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def _train(network: str, level: str) -> Result:
    from apex import amp

    net = NETWORKS[network]()
    pair = amp.initialize(net, sgd(net.parameters()), opt_level=level, loss_scale=128.0, verbosity=0)
    return fit(*pair, _sequences(6))


@cells("network", level=("O1", "O2"), network=NETWORKS)
def network(level: str, network: str) -> Result:
    return _train(network, level)


@cells(
    "network, cast at each use", network=("LSTMCell", "GRUCell", "RNNCell", "weight used three times", "tied embedding")
)
def network_uncached(network: str) -> Result:
    """At O1, with a weight cast at each of its uses, in the original as here."""
    original.without_cache()
    return _train(network, "O1")


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": lambda x, y: functional.mse_loss(x, functional.one_hot(y, 4).to(x.dtype)),
    "l1_loss": lambda x, y: functional.l1_loss(x, functional.one_hot(y, 4).to(x.dtype)),
    "smooth_l1_loss": lambda x, y: functional.smooth_l1_loss(x, functional.one_hot(y, 4).float()),
    "nll_loss": lambda x, y: functional.nll_loss(functional.log_softmax(x, -1), y),
    "binary_cross_entropy_with_logits": lambda x, y: functional.binary_cross_entropy_with_logits(
        x, functional.one_hot(y, 4).to(x.dtype)
    ),
    "kl_div": lambda x, y: functional.kl_div(
        functional.log_softmax(x, -1), torch.full_like(x, 0.25), reduction="batchmean"
    ),
    "cosine_embedding_loss": lambda x, y: functional.cosine_embedding_loss(x, x.flip(0), y.sign().mul(2).sub(1)),
    "triplet_margin_loss": lambda x, y: functional.triplet_margin_loss(x, x.roll(1, 0), x.roll(2, 0)),
    "multi_margin_loss": lambda x, y: functional.multi_margin_loss(x, y),
    "label smoothing": lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1),
    "mean of squares": lambda x, y: (x - functional.one_hot(y, 4)).pow(2).mean(),
}


@cells("loss", level=("O1", "O2"), loss=LOSSES)
def losses(level: str, loss: str) -> Result:
    from apex import amp

    net = Recurrent(nn.GRU)
    pair = amp.initialize(net, sgd(net.parameters()), opt_level=level, verbosity=0)
    return fit(*pair, _sequences(5), loss=LOSSES[loss])
