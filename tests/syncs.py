"""A GPU for tests on machines without one: its tensors hold CPU values, and it notes where the host waits for it.

    with counted_syncs() as syncs:
        model = nn.Linear(2, 3).to("cuda:0")
        model(torch.randn(4, 2, device="cuda:0")).sum().item()
    assert [sync.what for sync in syncs] == ["_local_scalar_dense"]

Tensors on "cuda:0" are ``OnGpu``: they report that device, compute on the CPU and keep its values, so code under test
takes its CUDA branches and real decisions. torch's own rules for streams, casts and kernels of CUDA are not simulated.
Streams and events record what is queued on them (``Gpu.order``).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

ROOT = Path(__file__).resolve().parent.parent
CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")

# Operations whose result, or whose size, the host reads from the device.
SYNCING = {
    "_local_scalar_dense", "equal", "allclose", "nonzero", "masked_select", "bincount", "repeat_interleave", "_unique2",
    "unique_dim", "unique_consecutive", "unique_dim_consecutive", "_linalg_check_errors",
}  # fmt: skip
_ATTRIBUTES = {"device": CUDA, "is_cuda": True, "is_cpu": False}


@dataclass(frozen=True)
class Sync:
    """A wait of the host for the device. ``line``: of our code, as "harness/training/loop.py:12 step"."""

    what: str
    line: str

    @property
    def where(self) -> str:
        """File and function, which change less often than the line."""
        place, _, function = self.line.partition(" ")
        return f"{place.rpartition(':')[0]} {function}"


@dataclass
class Gpu:
    syncs: list[Sync] = field(default_factory=list)
    order: list[tuple[str, str]] = field(default_factory=list)
    """(stream, operation) in the order in which the host queued them."""
    streams: list[Stream] = field(default_factory=list)

    @property
    def current(self) -> Stream:
        return self.streams[-1]

    def sync(self, what: str) -> None:
        self.syncs.append(Sync(what, _our_line()))

    def queue(self, what: str) -> None:
        self.order.append((self.current.name, what))


def _our_line() -> str:
    frame: Any = sys._getframe(1)
    outside = ""
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(f"{ROOT}/harness/"):
            return f"{Path(file).relative_to(ROOT)}:{frame.f_lineno} {name}"
        if not outside and file.startswith(f"{ROOT}/") and file != __file__ and "site-packages" not in file:
            outside = f"{Path(file).relative_to(ROOT)}:{frame.f_lineno} {name}"
        frame = frame.f_back
    return outside or "outside the project"


_gpu: Gpu | None = None  # of the innermost ``fake_gpu``; also for the threads that it starts
_within = threading.local()  # inside one of our own operations, whose steps are not counted


def _noted() -> Gpu | None:
    return None if getattr(_within, "operation", False) else _gpu


def _is_cuda(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"


class OnGpu(torch.Tensor):
    """A tensor that reports cuda:0. torch's C++ code sees a CPU tensor, so autograd needs no driver."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnGpu:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=CPU,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self) -> str:
        return f"OnGpu({self.held!r})"

    def record_stream(self, stream: Any) -> None:  # torch's takes its own streams only
        if gpu := _noted():
            gpu.order.append((stream.name, "record_stream"))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(kind in (OnGpu, torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor calls again with its parts
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        gpu = _noted()
        if gpu is not None:
            _check_devices(name, tensors)
            if name in SYNCING:
                gpu.sync(name)
            elif name in ("index", "index_put_", "index_put", "_index_put_impl_"):
                _index_sync(gpu, name, args)
            gpu.queue(name)
        # "to" is handled in ``_to``: an explicit CPU in ``_to_copy`` comes from autograd, by the tensor.
        to_host = kwargs.get("device") == CPU and name.endswith("_like")
        owners = {id(value.held): value for value in tensors if isinstance(value, OnGpu)}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        args, kwargs = tree_map(_held, args), tree_map(_held, kwargs)
        with _uncounted():
            result = func(*args, **kwargs)

        def wrapped(value: Any) -> Any:
            if to_host or not isinstance(value, torch.Tensor):
                return value
            return owners[id(value)] if id(value) in owners else OnGpu(value)

        return tree_map(wrapped, result)


def _is_here(tensor: Any) -> bool:
    """True for a tensor on the device, also if it is the part of a DTensor."""
    return isinstance(tensor, OnGpu) or isinstance(getattr(tensor, "_local_tensor", None), OnGpu)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnGpu) else value


def _check_devices(name: str, tensors: list[torch.Tensor]) -> None:
    """As on CUDA, an operation takes host tensors only if they are numbers; copies and indices are exceptions."""
    if name in ("copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_", "set_", "pin_memory"):
        return
    if any(tensor.dim() and not isinstance(tensor, OnGpu) for tensor in tensors):
        raise RuntimeError(f"{name}: expected all tensors on the same device, but found cuda:0 and cpu")


def _index_sync(gpu: Gpu, name: str, args: Any) -> None:
    """A mask has to be counted, unless one value goes everywhere; an index on the host has to be copied."""
    fills = len(args) > 2 and args[2].numel() == 1
    for index in args[1]:
        if index is not None and isinstance(index, OnGpu) and index.dtype in (torch.bool, torch.uint8):
            if fills:
                continue
            gpu.sync(f"{name} with a mask")
        elif index is not None and not isinstance(index, OnGpu):
            gpu.sync(f"{name} with an index on the host")


@contextmanager
def _uncounted() -> Iterator[None]:
    before = getattr(_within, "operation", False)
    _within.operation = True
    try:
        yield
    finally:
        _within.operation = before


class _ToGpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return OnGpu(tensor.detach().clone(memory_format=torch.preserve_format))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _held(gradient)


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:  # type: ignore[override]
        return tensor.held.detach().clone(memory_format=torch.preserve_format)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return OnGpu(gradient)


def _called(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A call of torch that has an ``OnGpu`` among its arguments, or that asks for one."""
    name = (resolve_name(func) or getattr(func, "__name__", "")).rpartition("Tensor.")[2]
    first = args[0] if args else None
    if name.endswith(".__get__") and name[: -len(".__get__")] in _ATTRIBUTES and _is_here(first):
        return _ATTRIBUTES[name[: -len(".__get__")]]
    special = _SPECIAL.get(name)
    if special is not None and isinstance(first, torch.Tensor):
        done, result = special(name, args, kwargs)
        if done:
            return result
    if kwargs.get("pin_memory") and not _is_cuda(kwargs.get("device")):
        made = _called(func, args, {**kwargs, "pin_memory": False})
        made.pinned = True
        return made
    if _is_cuda(kwargs.get("device")) and not any(isinstance(value, OnGpu) for value in tree_iter((args, kwargs))):
        gpu = _noted()
        if gpu is not None and name.rpartition(".")[2] in ("tensor", "as_tensor", "new_tensor"):
            gpu.sync("copy from pageable memory")
        with torch._C.DisableTorchFunction(), _uncounted():
            made = func(*args, **{**kwargs, "device": CPU})
        return torch.nn.Parameter(OnGpu(made)) if isinstance(made, torch.nn.Parameter) else (
            OnGpu(made.detach()).requires_grad_(made.requires_grad)
        )  # fmt: skip
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _to(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[bool, Any]:
    tensor, rest = args[0], args[1:]
    if name == "cpu":
        device, dtype, non_blocking, layout = CPU, None, False, kwargs.get("memory_format")
    elif name == "cuda":
        device, dtype, layout = CUDA, None, kwargs.get("memory_format")
        non_blocking = kwargs.get("non_blocking", len(rest) > 1 and rest[1])
    elif rest and isinstance(rest[0], torch.Tensor):  # to(other)
        device, dtype, non_blocking, layout = rest[0].device, rest[0].dtype, kwargs.get("non_blocking", False), None
    else:
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*rest, **{
            key: value for key, value in kwargs.items() if key != "copy"})  # fmt: skip
    if device is None or (device.type == "cuda") == _is_here(tensor):
        if not _is_here(tensor) or device is None:
            return False, None
        with torch._C.DisableTorchFunctionSubclass():  # on the device already
            options = {"memory_format": layout} if layout is not None else {}
            return True, tensor.to(dtype if dtype is not None else tensor.dtype, copy=kwargs.get("copy", False),
                                   **options)  # fmt: skip
    gpu = _noted()
    to_host = isinstance(tensor, OnGpu)
    if gpu is not None:
        what = "copy to the host" if to_host else "copy from pinned memory" if _is_pinned(tensor) else (
            "copy from pageable memory")  # fmt: skip
        gpu.queue(what)
        if not non_blocking:
            gpu.sync(what)
    with _uncounted():
        moved = (_ToHost if to_host else _ToGpu).apply(tensor)
        if to_host and non_blocking:
            moved.pinned = True
        with torch._C.DisableTorchFunctionSubclass():
            moved = moved if dtype is None else moved.to(dtype)
            return True, moved if layout is None else moved.contiguous(memory_format=layout)


def _read(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[bool, Any]:
    if not isinstance(args[0], OnGpu):
        return False, None
    if name == "numpy":
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    if gpu := _noted():
        gpu.sync(name)
    with _uncounted():
        return True, getattr(args[0].held, name)()


def _copy(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[bool, Any]:
    into, source = args[0], args[1] if len(args) > 1 else kwargs["src"]
    non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
    gpu, both = _noted(), (isinstance(into, OnGpu), isinstance(source, OnGpu))
    if gpu is not None and both[0] != both[1] and isinstance(source, torch.Tensor):
        host = source if both[0] else into
        what = "copy to the host" if both[1] else "copy"
        gpu.queue(f"{what}, {'pinned' if _is_pinned(host) else 'pageable'}")
        if not non_blocking or (both[1] and not _is_pinned(host)):
            gpu.sync(what)
    with _uncounted():
        if both == (False, True):
            with torch.no_grad():
                into.copy_(source.held)
            return True, into
        if both == (True, False) and isinstance(source, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                into.copy_(OnGpu(source.detach()))
            return True, into
    return False, None


def _set_data(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[bool, Any]:
    tensor, value = args
    if isinstance(tensor, OnGpu) and isinstance(value, OnGpu):
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
        tensor.held = value.held.detach()
        return True, None
    return False, None


def _pin(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[bool, Any]:
    if isinstance(args[0], OnGpu):
        raise RuntimeError("cannot pin a tensor on cuda:0: only dense CPU tensors can be pinned")
    if name == "is_pinned":
        return True, _is_pinned(args[0])
    with torch._C.DisableTorchFunctionSubclass():
        pinned = args[0].clone()
    pinned.pinned = True
    return True, pinned


def _is_pinned(tensor: torch.Tensor) -> bool:
    base = getattr(tensor, "_base", None)
    return getattr(tensor, "pinned", False) or getattr(base, "pinned", False)


def _one_hot(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """torch checks the values on the CPU only, and reads them if it has to find the number of classes."""
    if not isinstance(args[0], OnGpu):
        return False, None
    if (gpu := _noted()) and kwargs.get("num_classes", args[1] if len(args) > 1 else -1) == -1:
        gpu.sync(name)
    return True, OnGpu(torch.nn.functional.one_hot(args[0].held, *args[1:], **kwargs))


def _backward(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Hooks are to see the device, as the rest of the code does."""
    given = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args[1:], strict=False)) | kwargs
    with _Calls():
        start = given.get("gradient")
        keep = given.get("retain_graph") or given.get("create_graph", False)
        torch.autograd.graph._engine_run_backward(
            (args[0],), (torch.ones_like(args[0]) if start is None else start,), bool(keep),
            given.get("create_graph", False), tuple(given.get("inputs") or ()), allow_unreachable=True,
            accumulate_grad=True,
        )  # fmt: skip
    return True, None


def _on_held(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Storage and address are those of the values."""
    if not isinstance(args[0], OnGpu):
        return False, None
    return True, getattr(args[0].held, name)(*args[1:], **kwargs)


_SPECIAL: dict[str, Any] = {
    "one_hot": _one_hot,
    "backward": _backward,
    **dict.fromkeys(("to", "cpu", "cuda"), _to), **dict.fromkeys(("tolist", "numpy"), _read),
    "copy_": _copy, "data.__set__": _set_data, "pin_memory": _pin, "is_pinned": _pin,
    "get_device": lambda name, args, kwargs: (isinstance(args[0], OnGpu), 0),
    **dict.fromkeys(("untyped_storage", "_typed_storage", "data_ptr"), _on_held),
}  # fmt: skip


class _Calls(TorchFunctionMode):
    """Calls that make tensors, and copies to the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {})


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, name: str = "", gpu: Gpu | None = None) -> None:
        self.gpu = gpu or _gpu
        self.name = name or f"side {_number()}"
        self.device, self.cuda_stream, self.priority = CUDA, id(self), priority

    def _note(self, what: str) -> None:
        if self.gpu is not None:
            self.gpu.order.append((self.name, what))

    def wait_stream(self, other: Stream) -> None:
        self._note(f"wait for {other.name}")

    def wait_event(self, event: Event) -> None:
        self._note(f"wait for event {event.number} of {event.stream}")

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        if self.gpu is not None:
            self.gpu.sync("Stream.synchronize")

    def __enter__(self) -> Stream:
        assert self.gpu is not None
        self.gpu.streams.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        assert self.gpu is not None
        self.gpu.streams.pop()


_counts = [0]


def _number() -> int:
    _counts[0] += 1
    return _counts[0]


class Event:
    """An event that the device has always passed."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.number, self.stream = _number(), ""

    def record(self, stream: Stream | None = None) -> None:
        assert _gpu is not None
        stream = stream or _gpu.current
        self.stream = stream.name
        stream._note(f"record event {self.number}")

    def wait(self, stream: Stream | None = None) -> None:
        assert _gpu is not None
        (stream or _gpu.current).wait_event(self)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1.0

    def synchronize(self) -> None:
        if _gpu is not None:
            _gpu.sync("Event.synchronize")
            _gpu.order.append(("host", f"wait for event {self.number} of {self.stream}"))


def _grouped(group: Any) -> Any:
    """torch groups tensors by device in C++, which sees the CPU."""

    def grouped(lists: Any, with_indices: bool = False) -> Any:
        found = group(lists, with_indices)
        return {
            (CUDA if any(_is_here(value) for value in tree_iter(entry)) else device, dtype): entry
            for (device, dtype), entry in found.items()
        }

    return grouped


def _fakes_need_a_driver() -> bool:
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            torch.empty(1, device="cuda:0").copy_(torch.empty(1, device="cuda:0"))
    except RuntimeError:
        return True
    return False


fakes = pytest.mark.skipif(_fakes_need_a_driver(), reason="torch 2.9 asks CUDA's driver about fake tensors, too")


@contextmanager
def fake_gpu() -> Iterator[Gpu]:
    """Context in which "cuda:0" is a device whose tensors are ``OnGpu``."""
    global _gpu
    gpu, before = Gpu(), _gpu
    gpu.streams.append(Stream(name="default", gpu=gpu))
    state = torch.Generator().get_state()
    fakes: dict[str, Any] = {
        "Stream": Stream, "Event": Event, "stream": lambda stream: stream if stream is not None else mock.MagicMock(),
        "current_stream": lambda device=None: gpu.current, "default_stream": lambda device=None: gpu.streams[0],
        "synchronize": lambda device=None: gpu.sync("torch.cuda.synchronize"),
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "set_device": lambda device: None, "_lazy_init": lambda: None,
        "get_device_name": lambda device=None: "a fake GPU", "get_device_capability": lambda device=None: (9, 0),
        "get_rng_state": lambda device="cuda": state, "set_rng_state": lambda new, device="cuda": None,
        "get_rng_state_all": lambda: [state], "set_rng_state_all": lambda new: None, "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None, "max_memory_allocated": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0, "empty_cache": lambda: None, "is_current_stream_capturing":
        lambda: False, "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
    }  # fmt: skip
    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        if hasattr(torch, "accelerator"):  # torch's optimizers ask it whether a graph is being captured
            for name in ("current_stream", "is_available", "synchronize"):
                stack.enter_context(mock.patch.object(torch.accelerator, name, fakes[name]))
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives

        if hasattr(_fsdp_collectives, "record_grad_output_stream"):  # it takes torch's own streams only
            stack.enter_context(mock.patch.object(_fsdp_collectives, "record_grad_output_stream"))
        from torch._subclasses import fake_tensor

        if hasattr(fake_tensor, "init_gpu_context"):  # DTensor's shapes are computed with fake tensors
            stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context"))
        group = torch.utils._foreach_utils._group_tensors_by_device_and_dtype
        stack.enter_context(mock.patch.object(
            torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(_grouped(
                torch.optim.Optimizer._group_tensors_by_device_and_dtype))))  # fmt: skip
        for module in (torch.utils._foreach_utils, torch.nn.utils.clip_grad):
            stack.enter_context(mock.patch.object(module, "_group_tensors_by_device_and_dtype", _grouped(group)))
        stack.enter_context(
            mock.patch.object(  # a parameter on the CPU cannot become an OnGpu
                torch,
                "_has_compatible_shallow_copy_type",
                lambda *both: isinstance(both[0], OnGpu) is isinstance(both[1], OnGpu),
            )
        )
        stack.enter_context(_Calls())
        _gpu = gpu
        try:
            yield gpu
        finally:
            _gpu = before


class Memory(TorchDispatchMode):
    """The most bytes of tensors on the host and on the device at any time, those of fake tensors too."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks = {"host": 0, "device": 0}
        self._live: dict[int, tuple[str, StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._live = {key: entry for key, entry in self._live.items() if not entry[1].expired()}
        for value in tree_iter(result):
            on_device = isinstance(value, OnGpu) or getattr(_within, "operation", False)
            value = _held(value)
            if isinstance(value, torch.Tensor) and value.device.type != "meta" and not hasattr(value, "_local_tensor"):
                storage = value.untyped_storage()
                place = "device" if on_device else "host"
                self._live.setdefault(storage._cdata, (place, StorageWeakRef(storage), storage.nbytes()))
        for place in self.peaks:
            now = sum(size for at, _, size in self._live.values() if at == place)
            self.peaks[place] = max(self.peaks[place], now)
        return result


@contextmanager
def counted_syncs() -> Iterator[list[Sync]]:
    """``fake_gpu``; the waits of the host so far. Clear the list to leave out those of a preparation."""
    with fake_gpu() as gpu:
        yield gpu.syncs
