"""``DistributedDataParallel`` and ``Reducer`` under Apex's signatures, on any device and backend (contract 5.1, 5.2).

Differences from Apex: buffers are broadcast at construction as well as parameters; every floating dtype is reduced;
ranks may differ in which parameters a pass uses (a parameter that no rank used gets no gradient); every backward pass
is reduced, also several after one forward; accumulation without reduction is correct at every opt level; with
``gradient_average=False`` gradients reduced before are not summed again; sparse gradients become dense; the wrapper can
be copied and pickled.
Buckets are laid out once, in reverse order of registration, not in the order of the first pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.apex.parallel.backward_reducer import BackwardReducer
from harness.apex.parallel.buckets import Bucket, CommonStrides, Scaling, make_buckets, piece_size, sums_over_ranks
from harness.apex.parallel.collectives import broadcast_from_rank_zero, device_type, require_process_group


class DistributedDataParallel(nn.Module):
    """``module`` whose gradients are averaged over all ranks when ``backward`` returns.

    All ranks must construct it, around models of the same shape; it copies rank 0's parameters and buffers to the
    others. Needs a process group. Wrap after ``amp.initialize``. Parameters that are replaced, frozen or moved later
    are noticed at the next call; the value of a new one is not copied from rank 0.

    Ranks may differ in which parameters a pass uses. If the model also holds a ``SyncBatchNorm``, use
    ``delay_allreduce=True`` then: its collectives run during the backward pass too, and all collectives must run in the
    same order on every rank.

    Args:
        module: the model; also available as ``.module``.
        message_size: minimum number of elements sent at once while the backward pass runs.
        delay_allreduce: send everything at the end of the backward pass instead.
        shared_param: raises ValueError, as in Apex.
        allreduce_trigger_params: close a bucket after each of these, instead of by ``message_size``.
        retain_allreduce_buffers: let gradients be views of the buffers they were reduced in.
        allreduce_always_fp32: sum float16 and bfloat16 gradients in float32.
        num_allreduce_streams: accepted; the backend schedules its own streams.
        allreduce_communicators: (process groups, streams), ``num_allreduce_streams`` of each; accepted, the default
            process group is used.
        gradient_average: divide the sum by the number of ranks.
        gradient_predivide_factor: divide by this before the sum; when averaging, multiply by it afterwards.
        gradient_average_split_factor: accepted and ignored, as in Apex.
        prof: accepted and ignored; ``torch.profiler`` always shows the reductions.
    """

    wraps_module = True  # amp.initialize warns about such a model

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: list[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        super().__init__()
        require_process_group("DistributedDataParallel")
        if shared_param is not None:
            raise ValueError("shared_param is not supported. Leave it out; models with shared weights work without it.")
        if delay_allreduce and allreduce_trigger_params is not None:
            raise ValueError("allreduce_trigger_params needs delay_allreduce=False. Leave one of the two out.")
        _check_streams(delay_allreduce, num_allreduce_streams, allreduce_communicators)
        _check_devices(module)
        self.module = module
        self.delay_allreduce = delay_allreduce
        self.message_size = message_size
        self.allreduce_trigger_params = allreduce_trigger_params
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = gradient_predivide_factor
        self.world_size = dist.get_world_size()
        self._enabled = True
        self._reducer: BackwardReducer | None = None
        alike = broadcast_from_rank_zero([*module.parameters(), *module.buffers()])
        self._strides = CommonStrides(list(module.parameters()), alike)
        self._arm()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self.world_size > 1 and self._parameters_changed():
            self._arm()
        return self.module(*inputs, **kwargs)

    def disable_allreduce(self) -> None:
        """Let gradients accumulate on each rank until ``enable_allreduce``."""
        self._set_enabled(False)

    def enable_allreduce(self) -> None:
        """Reduce from the next backward pass on, including what accumulated while disabled."""
        self._set_enabled(True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes inside accumulate on each rank; the next one outside reduces the sum."""
        before = self._enabled
        self._set_enabled(False)
        try:
            yield
        finally:
            self._set_enabled(before)

    @property
    def allreduce_buffers(self) -> list[Tensor]:
        """The flat buffers of the last reduction, under ``retain_allreduce_buffers``."""
        return [bucket.flat for bucket in self._reducer.buckets] if self._reducer is not None else []

    @property
    def num_passes(self) -> int:
        """Number of backward passes that were reduced."""
        return self._reducer.num_passes if self._reducer is not None else 0

    def _set_enabled(self, enabled: bool) -> None:
        self._enabled = enabled
        if self._reducer is not None:
            self._reducer.enabled = enabled

    def _parameters_changed(self) -> bool:
        """Return True if a parameter was replaced, frozen, unfrozen, cast or moved since the reducer was made; in a
        fresh copy; and once the reducer has reduced what frozen parameters still held."""
        reducer = self._reducer
        return reducer is None or self._armed_for.changed() or (reducer.has_frozen and not reducer.holds_local)

    def _arm(self) -> None:
        """Make a reducer for the parameters as they are now; it takes over what the one before has still to reduce."""
        if self.world_size == 1:
            return
        before = self._reducer
        self._armed_for = _Snapshot(self.module)
        every = list(self.module.parameters())
        held = {id(parameter) for parameter in before.parameters} if before and before.holds_local else set()
        parameters = [parameter for parameter in every if parameter.requires_grad or id(parameter) in held]
        self._reducer = BackwardReducer(
            parameters,
            Scaling(self.world_size, self.gradient_average, self.gradient_predivide_factor),
            message_size=min(self.message_size, piece_size(parameters)) if self.delay_allreduce else self.message_size,
            overlap=not self.delay_allreduce,
            fp32=self.allreduce_always_fp32,
            retain=self.retain_allreduce_buffers,
            triggers=self.allreduce_trigger_params,
            strides=self._strides.by_parameter(every),
        )
        self._reducer.enabled = self._enabled
        if before is not None:
            self._reducer.succeed(before)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_reducer": None, "_armed_for": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; it makes a reducer of its own when its forward is called."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _Snapshot:
    """The parameters of ``module``, and what a reducer needs to know of them, at one time.

    ``changed`` compares them with those of now, at every forward pass: it visits the modules in a list, which takes a
    tenth of the time of ``module.parameters()``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._parameters = list(module.parameters())  # alive, so that no other parameter gets the id of one of them
        self._facts = self._look()

    def changed(self) -> bool:
        """Return True if a module or parameter was replaced, or a parameter frozen, unfrozen, cast or moved."""
        return self._look() != self._facts

    def _look(self) -> tuple[list[Any], ...]:
        found = [each for module in self._modules for each in module._parameters.values() if each is not None]
        return (
            [id(child) for module in self._modules for child in module._modules.values()],
            [id(each) for each in found],
            [each.requires_grad for each in found],
            [each.dtype for each in found],
            [each.device for each in found],
        )


def _check_streams(delay: bool, streams: int, communicators: Any) -> None:
    if delay and streams > 1:
        raise ValueError(f"num_allreduce_streams={streams} needs delay_allreduce=False. Leave one of the two out.")
    if communicators is not None and [len(part) for part in communicators] != [streams, streams]:
        raise ValueError(
            "allreduce_communicators must hold as many process groups, and as many streams, as num_allreduce_streams "
            f"({streams}); got {[len(part) for part in communicators]}. Leave it out to use the "
            "default process group."
        )


def _check_devices(module: nn.Module) -> None:
    if device_type() != "cpu":
        names = [name for name, parameter in module.named_parameters() if parameter.device.type == "cpu"]
        if names:
            raise ValueError(
                f"The {dist.get_backend()} backend takes {device_type()} tensors only. Parameters on the CPU: "
                f"{len(names)}, such as {names[0]}. "
                'Call model.cuda() before DistributedDataParallel, or use init_process_group("gloo").'
            )


class Reducer:
    """Averages over all ranks, at each ``reduce()``, the gradients of a module or given tensors.

    All ranks must construct it, and call ``reduce()`` equally often. Needs the default process group.

    With amp, call ``reduce()`` inside the ``scale_loss`` context, after ``backward()``. At the end of the context each
    rank checks the gradients it finds for overflow; gradients averaged later can neither correct that check nor reach
    master weights, so loss scales and weights would drift apart between ranks.

    Args:
        module_or_grads_list: a module, of which rank 0's parameters and buffers are copied to all ranks now, and
            whose trainable parameters' gradients are averaged; a gradient missing on some ranks counts as zero there,
            and stays None if no rank has one. Or tensors, in arbitrarily nested iterables, averaged in place: the same
            number and shapes on every rank. Note that ``zero_grad(set_to_none=True)``, torch's default, leads to new
            gradient tensors; pass the module then.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Any]) -> None:
        require_process_group("Reducer")
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads = [] if isinstance(module_or_grads_list, nn.Module) else list(_flatten(module_or_grads_list))
        self._scaling = Scaling(dist.get_world_size(), average=True, predivide=1.0)
        self._buckets: list[Bucket] = []
        self._kinds: list[tuple[Any, ...]] = []
        if self.module is not None:
            parameters = list(self.module.parameters())
            self._strides = CommonStrides(
                parameters, alike=broadcast_from_rank_zero([*parameters, *self.module.buffers()])
            )

    @torch.no_grad()
    def reduce(self) -> None:
        """Average now. All ranks call it."""
        if dist.get_world_size() == 1:
            return
        if self.module is None:
            for tensor, average in self._averages(self.grads, list(self.grads)):
                tensor.copy_(average)
            return
        trainable: list[Tensor] = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for parameter, average in self._averages(trainable, [parameter.grad for parameter in trainable]):
            if parameter.grad is None or parameter.grad.layout is not torch.strided:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(average)

    def _averages(self, tensors: list[Tensor], values: list[Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (tensor, average of its values) wherever some rank has a value."""
        kinds = [(id(tensor), tensor.dtype, tensor.device) for tensor in tensors]
        if kinds != self._kinds:
            strides = None if self.module is None else self._strides.by_parameter(list(self.module.parameters()))
            self._buckets = make_buckets(tensors, range(len(tensors)), piece_size(tensors), fp32=False, strides=strides)
            self._kinds = kinds
        for i, average in sums_over_ranks(self._buckets, values, self._scaling):
            yield tensors[i], average


def _flatten(items: Any) -> Iterator[Tensor]:
    if isinstance(items, Tensor):
        yield items
    elif isinstance(items, Iterable) and not isinstance(items, str):
        for item in items:
            yield from _flatten(item)
    else:
        raise TypeError(
            f"Reducer takes a module, or tensors in nested iterables; got an object of type {type(items).__name__}. "
            "For gradients that may be None, pass the module that they belong to."
        )
