"""apex-harness: the NVIDIA Apex training recipe on current PyTorch.

    from harness import load_config, train, predict

    result = train(load_config("configs/digits.yaml", {"train.epochs": 3}))
    table = predict(result.folder, "new.csv")

``harness.api`` has these functions; docs/python_api.md explains them. Nothing is imported until one of them is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.version import __version__

if TYPE_CHECKING:
    from harness.api import TrainResult, load_config, load_model, open_run, predict, train

__all__ = ["TrainResult", "__version__", "load_config", "load_model", "open_run", "predict", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    from harness import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
