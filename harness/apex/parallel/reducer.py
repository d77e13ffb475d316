"""When gradients cross the ranks: the hooks on parameters and the end of a backward pass.

Every rank must run the same sequence of backward passes, reduced or not, and each must reach at least one parameter;
which ones may differ by rank. Collectives are issued in bucket order on every rank, whatever order gradients arrive in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from harness.apex import exchange
from harness.apex.parallel.buckets import Bucket, Scaling, layout
from harness.apex.parallel.sparse import sum_over_ranks


class GradientReducer:
    """Reduces the gradients of ``parameters`` over the default process group, backward pass by backward pass.

    ``message_size``: least number of elements in a bucket, unless ``triggers`` say where buckets end. ``overlap``: send
    a bucket as soon as it is full, else all at the end of the pass. While ``enabled`` is False gradients accumulate
    locally (``holds_local``) and are reduced with the next enabled backward pass, wherever amp has put them meanwhile.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        scaling: Scaling,
        message_size: int,
        overlap: bool,
        fp32: bool = False,
        retain: bool = False,
        sparse: Sequence[Tensor] = (),
        triggers: Sequence[Tensor] | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.enabled = True
        self.holds_local = False
        self._scaling, self._retain = scaling, retain
        self._overlap, self._message_size = overlap, message_size
        sparse_ids = {id(parameter) for parameter in sparse}
        self._sparse = [i for i, parameter in enumerate(self.parameters) if id(parameter) in sparse_ids]
        # about the order in which gradients become ready
        dense = [i for i in reversed(range(len(self.parameters))) if i not in self._sparse]
        self.buckets = layout(self.parameters, dense, message_size, fp32, triggers)
        self._bucket_of = {i: bucket for bucket in self.buckets for i in bucket.indices}
        self._pending = [False] * len(self.parameters)  # has local amounts that no reduction has seen
        self._ids = {id(parameter) for parameter in self.parameters}
        self._pass = -1
        self._launched = 0
        self._handles = self._register_hooks(scaling.carry != 1.0)
        exchange.register(self)

    def owns(self, parameter: Tensor) -> bool:
        """Whether ``parameter`` is one of those reduced here."""
        return id(parameter) in self._ids

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _register_hooks(self, carries: bool) -> list[Any]:
        this = weakref.ref(self)  # a reducer nobody holds any more must not go on reducing

        def after(i: int) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                reducer = this()
                if reducer is not None:
                    reducer._arrived(i)

            return hook

        def before(i: int) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                reducer = this()
                if reducer is not None:
                    reducer._about_to_accumulate(i)

            return hook

        handles: list[Any] = []
        for i, parameter in enumerate(self.parameters):
            handles.append(parameter.register_post_accumulate_grad_hook(after(i)))
            if carries:
                handles.append(parameter.register_hook(before(i)))
        return handles

    def _about_to_accumulate(self, i: int) -> None:
        """Sums only: an amount that was reduced before must not be summed again with what is added to it now."""
        if self._pending[i]:
            return
        parameter = self.parameters[i]
        reduced = parameter.grad
        if reduced is None and not self.enabled:
            reduced = exchange.get_hidden(parameter)
        if reduced is not None:
            reduced.mul_(self._scaling.carry)

    def _arrived(self, i: int) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._pass:
            self._begin(task)
        self._pending[i] = True
        if self._overlap and self.enabled and i in self._bucket_of:
            self._bucket_of[i].missing -= 1
            buckets = self.buckets
            while self._launched < len(buckets) and buckets[self._launched].missing <= 0:
                self._launch(buckets[self._launched])

    def _begin(self, task: int) -> None:
        """The first gradient of a backward pass."""
        self._pass = task
        if not self.enabled:
            self.holds_local = True
            return
        for bucket in self.buckets:
            if bucket.work is not None:  # left by a pass that raised
                bucket.work.wait()
                bucket.work = None
            bucket.missing = len(bucket.indices)
        self._launched = 0
        Variable._execution_engine.queue_callback(self._end)

    def _launch(self, bucket: Bucket) -> None:
        gradients = [parameter.grad for parameter in bucket.parameters]
        bucket.launch(gradients, [self._pending[i] for i in bucket.indices], self._scaling)
        self._launched += 1

    @torch.no_grad()
    def _end(self) -> None:
        """The end of a backward pass that reduces."""
        if self._pass == -1:
            return  # queued twice: a backward pass ran inside this one and ended first
        for bucket in self.buckets[self._launched :]:
            self._launch(bucket)
        for bucket in self.buckets:
            self._collect(bucket)
        for i in self._sparse:
            self._reduce_sparse(i)
        if self.holds_local:
            self._reduce_hidden()
            self.holds_local = False
        self._pending = [False] * len(self.parameters)
        self._pass = -1

    def _collect(self, bucket: Bucket) -> None:
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
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            targets.append(parameter.grad)
            results.append(total)
        if fused:  # one pass over memory instead of two; on an accelerator launches would cost more than the pass
            for target, total in zip(targets, results, strict=True):
                torch.mul(total, factor, out=target)
        elif targets:
            torch._foreach_copy_(targets, results)

    def _reduce_sparse(self, i: int) -> None:
        parameter, scaling = self.parameters[i], self._scaling
        gradient = parameter.grad
        if gradient is not None and not self._pending[i] and scaling.carry != 1.0:
            gradient = gradient * scaling.carry
        total = sum_over_ranks(gradient, parameter)
        if total is not None:
            parameter.grad = total * (scaling.before * scaling.after)

    def _reduce_hidden(self) -> None:
        """Reduce what amp moved out of ``.grad`` since the last reduction, in float32 (contract 5.1.6)."""
        hidden = [exchange.get_hidden(parameter) for parameter in self.parameters]
        if not self.parameters:
            return
        somewhere = torch.tensor([float(any(h is not None for h in hidden))], device=self.parameters[0].device)
        dist.all_reduce(somewhere, op=dist.ReduceOp.MAX)
        if not somewhere.item():
            return
        for bucket in layout(self.parameters, range(len(self.parameters)), self._message_size, fp32=True):
            gradients = [_dense(hidden[i]) for i in bucket.indices]
            flagged = [gradient is not None for gradient in gradients]
            bucket.launch(gradients, flagged, self._scaling)
            for place, total in bucket.finish(flagged):
                gradient = gradients[place]
                if gradient is None or gradient is not hidden[bucket.indices[place]]:
                    exchange.set_hidden(bucket.parameters[place], total * self._scaling.after)
                else:
                    gradient.copy_(total * self._scaling.after)


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
