"""Records what a training script does at each optimizer step, without changing its results.

It runs inside a script that knows nothing of it, possibly in another environment than apex-harness, so it needs only
the standard library and torch, and works from Python 3.9 on. ``harness/audit/plan.py`` describes the plan, and
``harness/audit/records.py`` reads the records.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import resume_digest as digest
import resume_draws
import resume_rows
import resume_saves
import resume_scan
import torch
from torch import Tensor, nn

_SAMPLES, _OPTIMIZERS_KEPT, _BATCHES_KEPT, _SEEN_POLL_S, _SEEN_LIMIT_S = 8, 4, 64, 0.01, 120.0
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
_recorders: list[Recorder] = []
_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)


def guarded(function: Callable[..., None]) -> Callable[..., None]:
    """Let a fault of this code end the recording, and not the script. A profile function, which ``resume_draws`` sets,
    is not called for this code: it would take minutes for what is done in a second."""

    @functools.wraps(function)
    def tried(recorder: Recorder, *args: Any) -> None:
        if recorder.failed:
            return
        if profile := sys.getprofile():
            sys.setprofile(None)
        try:
            function(recorder, *args)
        except Exception:
            recorder.failed = True
            recorder.write("fault", text=traceback.format_exc())
        finally:
            if profile:
                sys.setprofile(profile)

    return tried


def start(plan_path: str, actions: dict[str, Callable[[ModuleType], None]]) -> None:
    """Record this process. ``actions``: functions of modules that are still to be imported, by name."""
    with open(plan_path, encoding="utf-8") as file:
        recorder = Recorder(json.load(file))
    _recorders.append(recorder)
    recorder.install()
    saves = resume_saves.Saves(recorder)
    saves.install(actions)
    recorder.saves = saves
    if recorder.plan.get("draws") or recorder.plan.get("chance"):
        resume_draws.install(recorder)


def of_harness(resuming: Any) -> None:
    """Record what a run of the harness saves beside the model, from the time it has been restored."""

    def restored(run: Any) -> None:
        _recorders[0].beside = functools.partial(resuming.checkpointing.beside_the_model, run)

    _after(resuming, "resume", restored)


class Recorder:
    """The records of one process: a file, opened when there is something to say of training."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.kill: dict[str, Any] | None = plan["kill"]
        self.only_places = plan.get("detail") == "places"
        self._passed = 0  # of the place of the kill, before it counts
        self.saves: Any = None
        self.beside: Callable[[], dict[str, Any]] = dict  # what a run of the harness saves beside the model
        self.steps = self.evaluations = 0
        self.has_optimizer = False
        self._lock = threading.RLock()
        self.failed = self._last = False
        self._pid, self._file, self._waiting = os.getpid(), None, list[dict[str, Any]]()
        self._calls: list[dict[str, Any]] = []
        self._inside: nn.Module | None = None  # the outermost module, while it is called
        self._window: Any = None  # the global hook, while a module with optimized parameters is to be found
        self._searched: set[int] = set()  # ids of parameters whose outermost module is unknown
        self.roots: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # prefixes of their names
        self._inner: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # in a wrapper among them, and called without it
        self._candidate: weakref.ref[nn.Module] | None = None  # the first module that was called, if none of them was
        self._prefixes: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._optimizers: list[weakref.ref[Any]] = []
        self._kept: deque[Any] = deque(maxlen=_OPTIMIZERS_KEPT)  # alive until the end, to be recorded then
        self._scalers: list[weakref.ref[Any]] = []
        self._rows: deque[Any] = deque(maxlen=_BATCHES_KEPT)  # of the batches that loaders gave since the last step
        self._begins_epoch = False  # a pass over a loader has begun, but the model has not been called since
        self._exception: str | None = None
        self.looked_at: set[int] = set()  # optimizers with a step since the process began, or since the last checkpoint
        self._waiting.append(self._process())

    def install(self) -> None:
        """Wrap the few functions of torch through which every training passes."""
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        optimizer = torch.optim.Optimizer
        _after(optimizer, "add_param_group", lambda this, *_, **__: self._optimized(this))
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(self._before_step)  # type: ignore[arg-type]
        register_optimizer_step_post_hook(lambda *_: self._after_step())
        scaler = torch.amp.GradScaler if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler
        _after(scaler, "__init__", lambda this, *_, **__: self._scalers.append(weakref.ref(this)))
        scaler.step = self._scaled(scaler.step)  # type: ignore[method-assign]
        _after(torch.utils.data.DataLoader, "__iter__", lambda *_, **__: self._loads())
        resume_rows.watch(self._gives)
        if hasattr(nn.Module, "compile"):
            _after(nn.Module, "compile", lambda this, *_, **__: self._compiled(this))
        report = sys.excepthook

        def reported(kind: Any, error: BaseException, trace: Any) -> None:
            last = traceback.extract_tb(trace)[-1:]
            place = f" ({last[0].filename}:{last[0].lineno})" if last else ""
            self._exception = f"{kind.__name__}: {error}{place}"
            report(kind, error, trace)

        sys.excepthook = reported
        atexit.register(self._end)

    # The file

    def mine(self) -> bool:
        """Return True in a process that trains: not in one that loads data. A forked rank gets records of its own."""
        if os.getpid() == self._pid:
            return True
        if torch.utils.data.get_worker_info() is not None:
            return False
        self._pid, self._file, self._lock = os.getpid(), None, threading.RLock()
        self.steps = self.evaluations = 0
        self._waiting = [self._process()]
        return True

    def _process(self) -> dict[str, Any]:
        versions = {"python": sys.version.split()[0], "torch": torch.__version__}
        return {"event": "process", "pid": os.getpid(), **versions, "time": time.time()}

    def rank(self) -> int:
        """Return the rank in torch's process group, or of the launcher's environment."""
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank()
        names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
        return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), 0)

    def write(self, event: str, **fields: Any) -> None:
        """Append a line; a kill loses nothing of what was written before it."""
        with self._lock:
            self._open_file()
            self._line({"event": event, **digest.resolve(fields)})

    def _open_file(self) -> None:
        if self._file is None:
            rank = self.rank()
            path = os.path.join(self.plan["records"], f"rank{rank}-{os.getpid()}.jsonl")
            self._file = open(path, "a", encoding="utf-8")  # type: ignore[assignment]  # noqa: SIM115  until the end
            for line in self._waiting:
                self._line({**line, "rank": rank})

    def _line(self, content: dict[str, Any]) -> None:
        file: Any = self._file
        file.write(json.dumps(content, default=str) + "\n")
        file.flush()

    # Modules: the outermost one that is called, and nothing inside it, which torch.compile may trace

    def _optimized(self, optimizer: torch.optim.Optimizer) -> None:
        self.has_optimizer = True
        known = {id(parameter) for root in self.roots for parameter in root.parameters()}
        self._searched |= {id(each) for each in optimizer.param_groups[-1]["params"]} - known
        self._open()

    def _open(self) -> None:
        if self._searched and self._window is None:
            self._window = nn.modules.module.register_module_forward_pre_hook(self._before_any)

    def _close(self) -> None:
        if self._window is not None:
            self._window.remove()
            self._window = None

    def _before_any(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if _compiling() or self._inside is not None or not self.mine():
            return
        found = {id(parameter) for parameter in module.parameters()}
        if not found & self._searched:
            if self._candidate is None and any(each.requires_grad for each in module.parameters()):
                self._candidate = weakref.ref(module)
            return
        self._searched -= found
        self._register(module)
        frame = sys._getframe(1)  # torch's, with the keywords that this kind of hook does not get
        self.begin(module, args, frame.f_locals.get("kwargs") or {})

    def _register(self, module: nn.Module) -> None:
        name = type(getattr(module, "_orig_mod", module)).__name__
        count = self._prefixes[name] = self._prefixes.get(name, 0) + 1
        prefix = "" if not self.roots else f"{name}{count if count > 1 else ''}."
        for key, parameter in [*module.named_parameters()]:
            self._names.setdefault(id(parameter), prefix + plain_name(key))
        self.roots[module] = prefix
        if getattr(module, "_compiled_call_impl", None) is not None:
            self._compiled(module)
            return
        self._hook(module)
        inner = getattr(module, "module", None)  # of DistributedDataParallel
        if isinstance(inner, nn.Module):
            self._inner.add(inner)
            self._hook(inner)

    def _hook(self, module: nn.Module) -> None:
        # First, as ``_before_any``, which sees a first call: after it, a hook of amp may cast the inputs.
        module.register_forward_pre_hook(_before_call, prepend=True, with_kwargs=True)
        module.register_forward_hook(_after_call, with_kwargs=True, always_call=True)

    def _compiled(self, module: nn.Module) -> None:
        """``module.compile()`` compiles the hooks with the call, so the call itself is wrapped."""
        call = module._compiled_call_impl

        def called(*args: Any, **kwargs: Any) -> Any:
            if _compiling() or not callable(call):
                return call(*args, **kwargs)  # type: ignore[misc]
            if module not in self.roots and self._inside is None:
                self._searched -= {id(parameter) for parameter in module.parameters()}
                self._register_names(module)
            self.begin(module, args, kwargs)
            output = None
            try:
                output = call(*args, **kwargs)
            finally:
                self.finish(module, args, kwargs, output)
            return output

        module._compiled_call_impl = called  # type: ignore[assignment]

    def _register_names(self, module: nn.Module) -> None:
        call, module._compiled_call_impl = module._compiled_call_impl, None
        self._register(module)
        module._compiled_call_impl = call

    @guarded
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inside is not None or not self.mine():
            return
        if module not in self.roots and module not in self._inner:
            return
        self._inside = module
        self._close()
        training = module.training and torch.is_grad_enabled()
        if training:
            if self._begins_epoch:
                self.write("epoch", after=self.steps)
            inputs, rows = (None, None) if self.only_places else digest.nested([args, kwargs])
            self._calls.append({"module": self._class_of(module), "in": inputs, "rows": rows, "out": None})
        else:
            self.evaluations += 1
            self.reach("evaluation", self.evaluations)
        self._begins_epoch = False
        self._training = training

    @staticmethod
    def _class_of(module: nn.Module) -> str:
        inner = getattr(module, "_orig_mod", module)
        return type(getattr(inner, "module", inner)).__name__

    @guarded
    def finish(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._inside is not module:
            return
        self._inside = None
        if self._training:
            self._calls[-1]["out"] = None if self.only_places else digest.nested(output)[0]
        self._open()

    def _loads(self) -> None:
        self._begins_epoch = True

    @guarded
    def _gives(self, index: Any) -> None:
        if not self.only_places and (parts := digest.nested(index)[0]):  # none of a dataset without indices
            self._rows.append(parts)

    # Steps

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _compiling() or not self.mine():
            return None
        self._settle()
        self.reach("step", self.steps + 1)
        closure = kwargs.get("closure") if "closure" in kwargs else next(iter(args[1:2]), None)
        if not callable(closure):
            self._step(optimizer, False)
            return None
        recorded = False

        @functools.wraps(closure)
        def observed(*rest: Any, **options: Any) -> Any:
            nonlocal recorded
            loss = closure(*rest, **options)
            if not recorded:
                recorded = True
                self._step(optimizer, False)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    def _scaled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``GradScaler.step``, which skips the optimizer after an overflow."""

        @functools.wraps(step)
        def scaled(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.steps
            result = step(scaler, optimizer, *args, **kwargs)
            if self.steps == before and self.mine():
                self.reach("step", self.steps + 1)
                self._step(optimizer, True)
                self._after_step()
            return result

        return scaled

    @guarded
    def _settle(self) -> None:
        self.saves.settle()

    @guarded
    def _step(self, optimizer: Any, skipped: bool) -> None:
        self.steps += 1
        if not self.roots and self._candidate is not None and (found := self._candidate()) is not None:
            self._searched.clear()  # the optimizer has copies of the weights, as at amp's O2
            self._close()
            self._register(found)
        if self.only_places:
            self.write("step", number=self.steps, evaluations=self.evaluations)
            self._calls = []
            return
        alive = [each for each in self._optimizers if each() is not None]
        index = next((i for i, each in enumerate(alive) if each() is optimizer), len(alive))
        if index == len(alive):
            alive.append(weakref.ref(optimizer))
        self._optimizers = alive
        if not any(each is optimizer for each in self._kept):
            self._kept.append(optimizer)
        names = self._named(optimizer)
        looks = index not in self.looked_at
        weights = {name: digest.tensor(parameter) for name, parameter in names.items()}
        self.write(
            "step",
            number=self.steps,
            optimizer=index,
            skipped=skipped,
            calls=self._calls,
            rows=[*self._rows],
            evaluations=self.evaluations,
            weights=weights,
            buffers=self._buffers(),
            state=_state(optimizer, names),
            groups=[_numbers(group) for group in optimizer.param_groups],
            gradients={name: digest.tensor(p.grad) for name, p in names.items() if p.grad is not None},
            scale=self._scales(),
            beside=self._beside(),
            streams=resume_scan.streams(),
            samples={name: _samples(parameter) for name, parameter in names.items()} if looks else {},
            others=None if self.looked_at else resume_scan.others(self, optimizer),
            **self._attributes(),
        )
        self.looked_at.add(index)
        self._last = bool(self.plan.get("until")) and digest.resolve(weights) == self.plan["until"]
        self._calls = []
        self._rows.clear()

    def _beside(self) -> dict[str, Any]:
        """Without times, with one digest of the evaluations, which become many, and with the hooks of the first rank
        only, which a checkpoint holds."""
        found = self.beside()
        if self.rank():
            found.pop("hooks", None)
        if "state" in found:
            state = {key: value for key, value in found["state"].items() if not key.endswith("_s")}
            found["state"] = {**state, "history": digest.text(state["history"])}
        return digest.content(found)

    def _attributes(self) -> dict[str, Any]:
        if self.steps not in (self.plan.get("attributes") or ()):
            return {}
        return {"attributes": resume_scan.attributes([*self.roots], [*self._kept])}

    def _named(self, optimizer: Any) -> dict[str, Tensor]:
        return {
            self._names.get(id(parameter), f"group {group}, parameter {index}"): parameter
            for group, section in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(section["params"])
        }

    def _buffers(self) -> dict[str, Any]:
        return {
            prefix + plain_name(name): digest.tensor(buffer)
            for root, prefix in list(self.roots.items())
            for name, buffer in root.named_buffers()
        }

    def _scales(self) -> list[Any]:
        """[scale, steps since it last grew] of each scaler."""
        scalers = [each() for each in self._scalers]
        return [
            [float(each.get_scale()), int(each._get_growth_tracker())]
            for each in scalers
            if each is not None and each.is_enabled()
        ]

    def _after_step(self) -> None:
        if _compiling() or not self.mine():
            return
        limit = self.plan.get("steps")
        if self._last or (limit and self.steps >= limit):
            self.write("stopped", number=self.steps)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    @guarded
    def _end(self) -> None:
        """At exit."""
        if not self.mine():
            return
        self.saves.settle()
        if self.only_places:
            self.write("end", evaluations=self.evaluations)
            return
        weights: dict[str, Any] = {}
        state: dict[str, Any] = {}
        for optimizer in self._kept:
            names = self._named(optimizer)
            weights.update({name: digest.tensor(parameter) for name, parameter in names.items()})
            state.update(_state(optimizer, names))
        others = resume_scan.others(self, *self._kept) if self._kept else {}
        self.write(
            "end", weights=weights, state=state, buffers=self._buffers(), others=others, exception=self._exception,
            evaluations=self.evaluations,
        )  # fmt: skip

    # The kill

    def reach(self, place: str, number: int, path: str | None = None) -> None:
        """Be killed, if this is the planned place."""
        if not self.is_due(place, number):
            return
        kill: Any = self.kill
        self.kill = None
        mark = {
            "place": place, "number": number, "step": self.steps, "rank": kill["rank"], "pid": os.getpid(),
            "path": path, "target": kill["target"], "time": time.time() + kill["delay_s"],
        }  # fmt: skip
        if kill["delay_s"]:
            timer = threading.Timer(kill["delay_s"], self._die, (kill, mark))
            timer.daemon = True
            timer.start()
        else:
            self._die(kill, mark)

    def is_due(self, place: str, number: int) -> bool:
        """Return True if the planned kill is here. Must be asked about each ``number`` of a place, in their order."""
        kill = self.kill
        if kill is None or kill["place"] != place or self.rank() != kill["rank"]:
            return False
        if place != "step" and self.steps < kill["after"]:
            self._passed = number
        return number == self._passed + kill["number"]

    def _die(self, kill: dict[str, Any], mark: dict[str, Any]) -> None:
        self.write("killed", **mark)
        target = os.path.join(self.plan["records"], "mark.json")
        with open(target + ".tmp", "w", encoding="utf-8") as file:
            json.dump(mark, file)
        os.replace(target + ".tmp", target)
        how = signal.Signals[f"SIG{self.plan['signal']}"]
        if kill["target"] != "all":
            os.kill(os.getpid() if kill["target"] == "rank" else os.getppid(), how)
        elif how != signal.SIGKILL:
            limit = time.monotonic() + _SEEN_LIMIT_S
            while not os.path.exists(target.replace("mark.json", "mark.seen")) and time.monotonic() < limit:
                time.sleep(_SEEN_POLL_S)
        else:
            while True:  # until the runner has killed all processes
                os.kill(os.getpid(), signal.SIGSTOP)


# Functions, and not methods, which a copy of a module would copy together with the recorder.


def _before_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _compiling():
        _recorders[0].begin(module, args, kwargs)


def _after_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if not _compiling():
        _recorders[0].finish(module, args, kwargs, output)


def _after(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Call ``action`` with the arguments of a method after it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(this, *args, **kwargs)
        action(this, *args, **kwargs)
        return result

    setattr(owner, name, wrapped)


def plain_name(name: str) -> str:
    """Return a parameter's name without those of wrappers such as DistributedDataParallel."""
    for wrapper in _WRAPPERS:
        name = name.replace(f".{wrapper}", ".")
        while name.startswith(wrapper):
            name = name[len(wrapper) :]
    return name


def _state(optimizer: Any, names: dict[str, Tensor]) -> dict[str, Any]:
    """Digests of the optimizer's tensors and numbers, by parameter and key."""
    found: dict[str, Any] = {}
    for name, parameter in names.items():
        for key, value in (optimizer.state.get(parameter) or {}).items():
            found[f"{name}.{key}"] = digest.tensor(value) if isinstance(value, Tensor) else digest.nested(value)[0]
    return found


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if key != "params" and isinstance(value, (int, float, tuple, list)):
            found[key] = digest.plain(value) if isinstance(value, (int, float)) else str(value)
    return found


def _samples(parameter: Tensor) -> list[Any]:
    """Return the values at eight places."""
    try:
        value = parameter.detach()
        value = value.to_local() if hasattr(value, "to_local") else value
        flat = value.reshape(-1)
        places = torch.linspace(0, max(0, flat.numel() - 1), min(_SAMPLES, flat.numel())).long()
        return [digest.plain(number) for number in flat[places.to(flat.device)].double().tolist()]
    except (RuntimeError, NotImplementedError, TypeError):
        return []
