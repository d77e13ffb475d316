"""``BackwardReducer``: what ``DistributedDataParallel`` does with gradients while the backward pass runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from harness.apex.accumulated_gradients import get_aside, register_reducer, set_aside
from harness.apex.parallel.buckets import Bucket, Scaling, Strides, make_buckets, sums_over_ranks


class BackwardReducer:
    """Reduces the gradients of ``parameters`` over the default process group, backward pass by backward pass.

    Hooks on the parameters, and a callback at the end of the pass, do it. Every rank must run the same sequence of
    backward passes, reduced or not, and each pass must reach at least one parameter; which ones may differ between
    ranks. Collectives are issued in bucket order on every rank, in whatever order gradients arrive.

    ``message_size``: minimum number of elements in a bucket, unless ``triggers`` mark where buckets end. ``overlap``:
    send a bucket as soon as it is full, else all at the end of the pass. ``strides``: of each gradient in its
    buffer, equal on all ranks. While ``enabled`` is False gradients accumulate locally (``holds_local``); the next
    enabled backward pass reduces them, even where amp has set them aside, and of parameters frozen since.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        scaling: Scaling,
        message_size: int,
        overlap: bool,
        fp32: bool = False,
        retain: bool = False,
        triggers: Sequence[Tensor] | None = None,
        strides: Mapping[Tensor, Strides] | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.enabled = True
        self.holds_local = False
        self.asides: set[object] = set()
        self._scaling, self._retain = scaling, retain
        self._overlap, self._message_size, self._strides = overlap, message_size, strides
        order = range(len(self.parameters))[::-1]  # roughly that in which gradients become ready
        self.buckets = make_buckets(self.parameters, order, message_size, fp32, triggers, strides)
        self._bucket_of = {i: bucket for bucket in self.buckets for i in bucket.indices}
        self._pending = [False] * len(self.parameters)  # holds local gradients that were not reduced yet
        self._ids = {id(parameter) for parameter in self.parameters}
        self.has_frozen = not all(parameter.requires_grad for parameter in self.parameters)
        self._pass = -1
        self.num_passes = 0  # that were reduced
        self._launched = 0
        self._handles = self._register_hooks(scaling.carry != 1.0)
        register_reducer(self)

    def owns(self, parameter: Tensor) -> bool:
        """Return True if ``parameter`` is reduced here."""
        return id(parameter) in self._ids

    def succeed(self, former: BackwardReducer) -> None:
        """Take the place of ``former``, with the gradients that it has still to reduce."""
        waiting = {id(p) for p, pending in zip(former.parameters, former._pending, strict=True) if pending}
        self._pending = [id(parameter) in waiting for parameter in self.parameters]
        self.num_passes, self.holds_local, self.asides = former.num_passes, former.holds_local, former.asides
        former.holds_local = False
        for handle in former._handles:
            handle.remove()
        former._handles = []

    def _register_hooks(self, carries: bool) -> list[RemovableHandle]:
        this = weakref.ref(self)  # hooks must not keep alive, or run, a reducer that is no longer used

        def hook(method: Callable[[BackwardReducer, int], None], i: int) -> Callable[[Tensor], None]:
            def run(_: Tensor) -> None:
                reducer = this()
                if reducer is not None:
                    method(reducer, i)

            return run

        handles: list[RemovableHandle] = []
        for i, parameter in enumerate(self.parameters):
            if not parameter.requires_grad:
                continue
            handles.append(parameter.register_post_accumulate_grad_hook(hook(BackwardReducer._arrived, i)))
            if carries:
                handles.append(parameter.register_hook(hook(BackwardReducer._about_to_accumulate, i)))
        return handles

    def _about_to_accumulate(self, i: int) -> None:
        """Keep a gradient that was already reduced from being summed again, when reduction sums."""
        if self._pending[i]:
            return
        parameter = self.parameters[i]
        reduced = parameter.grad
        if reduced is None and not self.enabled:
            reduced = get_aside(parameter)
        if reduced is not None:
            reduced.mul_(self._scaling.carry)

    def _arrived(self, i: int) -> None:
        task = torch._C._current_graph_task_id()  # the only way to tell one backward pass from the next
        if task != self._pass:
            self._begin(task)
        self._pending[i] = True
        if self._overlap and self.enabled:
            self._bucket_of[i].num_missing -= 1
            buckets = self.buckets
            while self._launched < len(buckets) and buckets[self._launched].num_missing <= 0:
                self._launch(buckets[self._launched])

    def _begin(self, task: int) -> None:
        """Prepare for a backward pass whose first gradient has arrived."""
        self._pass = task
        if not self.enabled:
            self.holds_local = True
            return
        for bucket in self.buckets:
            bucket.begin_pass()
        self._launched = 0
        Variable._execution_engine.queue_callback(self._end)  # as torch's own reducers find the end of a pass

    def _launch(self, bucket: Bucket) -> None:
        gradients = [parameter.grad for parameter in bucket.parameters]
        bucket.launch(gradients, [self._pending[i] for i in bucket.indices], self._scaling)
        self._launched += 1

    @torch.no_grad()
    def _end(self) -> None:
        """Finish all reductions at the end of a backward pass."""
        if self._pass == -1:
            return  # queued twice: a nested backward pass (reentrant checkpoint) ended first
        for bucket in self.buckets[self._launched :]:
            self._launch(bucket)
        for bucket in self.buckets:
            self._collect(bucket)
        self.num_passes += 1
        if self.holds_local:
            if self.asides:
                self._reduce_set_aside()
            self.holds_local = False
        self._pending = [False] * len(self.parameters)
        self._pass = -1

    def _collect(self, bucket: Bucket) -> None:
        """Wait for the sums of ``bucket`` and put them into the parameters' gradients."""
        sums = bucket.finish([self._pending[i] for i in bucket.indices])
        factor = self._scaling.after
        fused = factor != 1.0 and bucket.flat.device.type == "cpu" and not self._retain
        if factor != 1.0 and not fused:
            bucket.flat.mul_(factor)
        targets, results = [], []
        for place, total in sums:
            parameter = bucket.parameters[place]
            if self._retain and total.dtype is parameter.dtype:
                parameter.grad = total
                continue
            if parameter.grad is None or parameter.grad.layout is not torch.strided:
                parameter.grad = torch.empty_like(parameter)
            targets.append(parameter.grad)
            results.append(total)
        if fused:  # saves a pass over memory; on an accelerator the extra kernel launches would cost more
            for target, total in zip(targets, results, strict=True):
                torch.mul(total, factor, out=target)
        elif targets:
            torch._foreach_copy_(targets, results)

    def _reduce_set_aside(self) -> None:
        """Reduce, in float32, what amp has set aside since the last reduction (contract 5.1.6)."""
        aside = [get_aside(parameter) for parameter in self.parameters]
        every = range(len(self.parameters))
        buckets = make_buckets(self.parameters, every, self._message_size, fp32=True, strides=self._strides)
        for i, total in sums_over_ranks(buckets, aside, self._scaling):
            set_aside(self.parameters[i], total.clone())
