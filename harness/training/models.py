"""The models: ours, torchvision's, or any class by its dotted path. nn.Modules only, un-wrapped, in float32."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import ConfigError, first_line


class SmallCNN(nn.Module):
    """Two 3x3 convolutions, global average pooling and a linear layer: for small images such as digits."""

    def __init__(
        self, num_classes: int, in_channels: int = 1, width: int = 32, dropout: float = 0.0, batch_norm: bool = False
    ) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> list[nn.Module]:
            norm: list[nn.Module] = [nn.BatchNorm2d(outputs)] if batch_norm else []
            return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=not batch_norm), *norm, nn.ReLU()]

        self.features = nn.Sequential(
            *block(in_channels, width), *block(width, 2 * width), nn.MaxPool2d(2), *block(2 * width, 2 * width)
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2 * width * 4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        features = nn.functional.adaptive_avg_pool2d(self.features(images), 2)
        return self.classifier(self.dropout(features.flatten(1)))


class MLP(nn.Module):
    """Two linear layers over the flattened image."""

    def __init__(self, num_classes: int, in_channels: int = 1, hidden: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        return self.layers(images)


class LinearModel(nn.Module):
    """One linear layer over the flattened image: the baseline to beat."""

    def __init__(self, num_classes: int, in_channels: int = 1) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        return self.layer(images.flatten(1))


class MnistNet(nn.Module):
    """The network of PyTorch's MNIST example: two 3x3 convolutions, pooling, two linear layers, dropout before each.

    Its last layer yields logits, not logarithms of probabilities: the loss takes them.
    """

    def __init__(self, num_classes: int, in_channels: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Dropout(0.25), nn.Flatten(), nn.LazyLinear(128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, num_classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        return self.layers(images)


class FashionCNN(nn.Module):
    """Two blocks of 3x3 convolution, batch norm and pooling, then three linear layers with nothing between but dropout.

    The network that FashionMNIST tutorials use; 2,304 features of a 28x28 image come down to 600, 120 and the classes.
    """

    def __init__(self, num_classes: int, in_channels: int = 1, dropout: float = 0.25) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.LazyLinear(600), nn.Dropout(dropout), nn.Linear(600, 120), nn.Linear(120, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> logits (batch, classes)."""
        return self.classifier(self.features(images))


class CharLSTM(nn.Module):
    """Layers of LSTM over one-hot characters, and a linear layer over each position's state."""

    def __init__(self, num_characters: int, hidden: int = 128, num_layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_characters = num_characters
        self.lstm = nn.LSTM(num_characters, hidden, num_layers, batch_first=True, dropout=dropout)
        self.output = nn.Linear(hidden, num_characters)

    def forward(self, codes: Tensor) -> Tensor:
        """int64 (batch, positions) -> logits of what comes next (batch, positions, characters)."""
        one_hot = nn.functional.one_hot(codes, self.num_characters).to(self.output.weight.dtype)
        return self.output(self.lstm(one_hot)[0])


class CharGRU(nn.Module):
    """Learned embeddings of characters, layers of GRU, and a linear layer, with dropout between all of them."""

    def __init__(
        self, num_characters: int, embedding: int = 64, hidden: int = 256, num_layers: int = 2, dropout: float = 0.3
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, embedding)
        self.gru = nn.GRU(
            embedding, hidden, num_layers, batch_first=True, dropout=dropout if num_layers > 1 else 0.0
        )  # torch warns of dropout that has no layer to stand before
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden, num_characters)

    def forward(self, codes: Tensor) -> Tensor:
        """int64 (batch, positions) -> logits of what comes next (batch, positions, characters)."""
        return self.output(self.dropout(self.gru(self.dropout(self.embedding(codes)))[0]))


OURS: dict[str, type[nn.Module]] = {
    "small_cnn": SmallCNN,
    "mlp": MLP,
    "linear": LinearModel,
    "mnist_net": MnistNet,
    "fashion_cnn": FashionCNN,
    "char_lstm": CharLSTM,
    "char_gru": CharGRU,
}


def build(name: str, args: Mapping[str, Any], known: Mapping[str, Any], example: Tensor) -> nn.Module:
    """The model ``name`` with ``args`` from the configuration and what the task knows (num_classes, in_channels).

    Of ``known``, the model gets what its signature takes. ``example`` is one prepared batch: lazy layers take their
    sizes from it, and a model that cannot take it is a ConfigError rather than a crash at the first step.
    """
    make, takes_all = _find(name)
    accepted = inspect.signature(make).parameters
    given = {**{key: value for key, value in known.items() if takes_all or key in accepted}, **args}
    if takes_all:  # torchvision's builders hide their arguments; all of them take 3 channels
        given.pop("in_channels", None)
    try:
        inspect.signature(make).bind(**given)
        model = make(**given)
    except (TypeError, ValueError, AssertionError) as error:
        takes = ", ".join(key for key in accepted if key not in ("args", "kwargs", "self"))
        raise ConfigError(
            f"model {name} cannot be made: {error}", where="model.args", hint=f"it takes: {takes}"
        ) from None
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name} makes a {type(model).__name__}, not a torch.nn.Module", where="model.name")
    try:
        with torch.no_grad():
            outputs = model.eval()(example)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        raise ConfigError(
            f"model {name} cannot take a batch of shape {tuple(example.shape)}: {first_line(error)}",
            where="model.name",
            hint="check task.image_size and task.color (torchvision's models want rgb)",
        ) from None
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if "num_classes" in known and shape != (len(example), known["num_classes"]):
        raise ConfigError(
            f"model {name} yields {shape} of {len(example)} images, not {known['num_classes']} logits for each",
            where="model.name",
            hint="a model of your own gets the number of classes if it takes num_classes; or say it in model.args",
        )
    return model.train()


def _find(name: str) -> tuple[Callable[..., nn.Module], bool]:
    """(what makes the model, whether it hides its arguments behind **kwargs)."""
    if name in OURS:
        return OURS[name], False
    from torchvision.models import get_model_builder, list_models

    if name in list_models():
        return get_model_builder(name), True
    module, _, attribute = name.rpartition(".")
    if not module:
        near = difflib.get_close_matches(name, [*OURS, *list_models()], n=1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"ours are {', '.join(OURS)}; or a torchvision name; or package.module.Class"
        )
        raise ConfigError(f"there is no model {name!r}", where="model.name", hint=hint)
    try:
        found: Callable[..., nn.Module] = getattr(importlib.import_module(module), attribute)
        inspect.signature(found)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model {name!r} cannot be imported: {error}",
            where="model.name",
            hint="write package.module.Class, importable from here",
        ) from None
    return found, False
