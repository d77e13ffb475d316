"""``OptimizerProxy``: the base of optimizers that wrap another one (``LARC``, ``FP16_Optimizer``)."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class OptimizerProxy(Optimizer):
    """A ``torch.optim.Optimizer``, as schedulers demand, that shares everything with the one in ``self.<inner_name>``.

    ``param_groups``, ``state``, ``defaults`` and all names not defined here are those of the inner optimizer.
    Subclasses do not call ``Optimizer.__init__``, which would create a second set.
    """

    inner_name: str

    # A GradScaler must unscale the gradients before this step, even where the inner optimizer could do it itself.
    _step_supports_amp_scaling = False

    @property
    def _inner(self) -> Optimizer:
        inner: Optimizer = getattr(self, self.inner_name)
        return inner

    def __getattr__(self, name: str) -> Any:
        # a copy under construction has no inner optimizer yet
        if name in (self.inner_name, "_inner") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._inner.param_groups = value

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self._inner.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._inner.defaults
