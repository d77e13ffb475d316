"""The user's own objects that a run calls when it starts, after steps and evaluations, and before checkpoints.

Every rank has its own objects. Without hooks a step only looks at an empty tuple.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from harness.config import plugins, signatures
from harness.config.schema import HookSection
from harness.distributed import collective_errors
from harness.distributed.runtime import Runtime
from harness.errors import (
    ConfigError,
    HarnessError,
    OwnCodeError,
    first_line,
    of_part,
    place_of,
    plural,
    similar,
    users_line,
)
from harness.training.checkpoints.own_state import require_plain
from harness.training.state import State

BEFORE_TRAINING, AFTER_STEP = "before_training", "after_step"
AFTER_EVALUATION, BEFORE_CHECKPOINT = "after_evaluation", "before_checkpoint"
_CALLS = {  # with these arguments
    BEFORE_TRAINING: "run", AFTER_STEP: "run", AFTER_EVALUATION: "run, report", BEFORE_CHECKPOINT: "run",
}  # fmt: skip
_MAY_END = (AFTER_STEP, AFTER_EVALUATION)
_STATE = {"state_dict": "", "load_state_dict": "state"}

log = logging.getLogger("harness")


class Hooked(Protocol):
    """What this module uses of a ``harness.training.run.Run``, which the hooks get whole."""

    runtime: Runtime
    state: State


@dataclass(frozen=True)
class Hook:
    """An object of the user's. ``where``: the key that names it."""

    name: str
    where: str
    object: Any

    def has(self, method: str) -> bool:
        return hasattr(self.object, method)

    def plain_attributes(self) -> dict[str, int]:
        """Return the hashes of the attributes that a checkpoint could hold, but for weights, which it holds anyway."""
        found = {}
        for name, value in getattr(self.object, "__dict__", {}).items():
            with suppress(OwnCodeError, RecursionError):
                require_plain(value, name, self.where)
                if "Parameter containing" not in (text := repr(value)):
                    found[name] = hash(text)
        return found

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what the method returns; its errors name the user's line."""
        try:
            return getattr(self.object, method)(*arguments)
        except HarnessError:
            raise
        except Exception as error:
            if collective_errors.diagnose(error):  # another rank failed
                raise
            raise OwnCodeError(
                f"the hook {self.name} fails in {method}: {type(error).__name__}: {first_line(error)}",
                where=users_line(error) or self.where,
                hint="the traceback is in failure.json of the run folder",
            ) from error


class Hooks:
    """The hooks of a run, in the order of the configuration."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self.all = tuple(hooks)
        self.after_step = self._with(AFTER_STEP)
        self._with_state = self._with("state_dict")
        # What a hook with before_training loses in a resume, that may make again.
        stateless = (hook for hook in self.all if not (hook.has("state_dict") or hook.has(BEFORE_TRAINING)))
        self._unsaved = [(hook, hook.plain_attributes()) for hook in stateless]

    def _with(self, method: str) -> tuple[Hook, ...]:
        return tuple(hook for hook in self.all if hook.has(method))

    def call(self, method: str, run: Hooked, *more: Any) -> None:
        """Call ``method`` of all hooks that have it. Training ends, on all ranks at this step, if one of them returns a
        reason on any rank. Collective.

        Hooks may communicate, so they are not called in ``together``: if one fails, the watchdog ends the other ranks.
        """
        if not (called := self._with(method)):
            return
        ends = ""
        for hook in called:
            reason = hook.call(method, run, *more)
            if reason is not None and (method not in _MAY_END or not isinstance(reason, str) or not reason):
                allowed = "return a text to end training, or nothing" if method in _MAY_END else "return nothing"
                what = f"{method} of the hook {hook.name} returned {reason!r}"
                raise OwnCodeError(what, where=hook.where, hint=f"{allowed}: a run ends after a step or an evaluation")
            ends = ends or reason or ""
        if method in _MAY_END and run.runtime.max_async([bool(ends)])()[0]:
            run.state.ended = next(filter(None, run.runtime.gather(ends)))
            log.info("training ends at step %d: %s", run.state.step, run.state.ended)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of each hook that has one, and warn of those that lack one."""
        self._warn_of_unsaved()
        found = []
        for hook in self._with_state:
            state = hook.call("state_dict")
            if state is None:
                what = f"state_dict() of the hook {hook.name} returned None"
                raise OwnCodeError(what, where=hook.where, hint="return the state, such as {'bad': self.bad}")
            require_plain(state, f"state_dict() of the hook {hook.name}", hook.where)
            found.append({"name": hook.name, "state": copy.deepcopy(state)})
        return found

    def _warn_of_unsaved(self) -> None:
        """Warn, once, of each hook with attributes that training has changed, and that are not saved."""
        for hook, before in list(self._unsaved):
            now = hook.plain_attributes()
            if changed := [name for name in now if now[name] != before.get(name)]:
                self._unsaved.remove((hook, before))
                state = ", ".join(f"{name!r}: self.{name}" for name in changed)
                log.warning(
                    "training changes %s of the hook %s, which no checkpoint holds, so that a resume goes on with the "
                    "first value; define state_dict(), which returns {%s}, and load_state_dict(state), which sets it",
                    ", ".join(changed), hook.name, state,
                )  # fmt: skip

    def load_state_dict(self, saved: list[dict[str, Any]]) -> None:
        """Restore the hooks of the same names. A run that starts from another one's checkpoint may have others."""
        left = list(saved)
        for hook in self._with_state:
            mine = next((each for each in left if each["name"] == hook.name), None)
            if mine is not None:
                left.remove(mine)
                hook.call("load_state_dict", mine["state"])

    def describe(self) -> dict[str, str]:
        """Return the hooks, for the log and ``harness check``; empty if there are none."""
        shown = [f"{hook.name} ({', '.join(filter(hook.has, (*_CALLS, 'state_dict')))})" for hook in self.all]
        return {"hooks": ", ".join(shown)} if shown else {}


def build(sections: Sequence[HookSection]) -> Hooks:
    """Import and make the hooks. Raises ConfigError, and OwnCodeError."""
    return Hooks([_made(section, f"hooks.{number}") for number, section in enumerate(sections)])


def _made(section: HookSection, where: str) -> Hook:
    name, made = section.name, plugins.import_own("hook", section.name, where)
    if not inspect.isclass(made):
        raise ConfigError(f"{name} is not a class", where=where, hint="write package.module.Class")
    _require_methods(made, name)
    parameters = inspect.signature(made).parameters
    signatures.require_parameters(name, parameters, section.args, f"{where}.args")
    try:
        inspect.signature(made).bind(**section.args)
    except TypeError as error:
        raise ConfigError(f"{name} cannot be made: {error}", where=f"{where}.args", hint="set it there") from None
    try:
        return Hook(name, where, made(**section.args))
    except Exception as error:  # of the user's own code
        what = f"the hook {name} cannot be made: {type(error).__name__}: {first_line(error)}"
        raise of_part(what, error, where, f"see its __init__ and {where}.args", making=True) from error


def _require_methods(made: type, name: str) -> None:
    """Raise ConfigError unless the class has methods of a hook, with the right arguments and no misspelled ones."""
    known = {**_CALLS, **_STATE}
    names = [key for key in dir(made) if key.startswith(("after_", "before_", "on_"))]
    odd = next((key for key in names if key not in _CALLS), "")
    if odd or not (names or hasattr(made, "state_dict")):
        near = similar(odd, _CALLS) if odd else None
        what = f"{name} has {odd}, which is never called" if odd else f"{name} has no method of a hook"
        every = ", ".join(f"{method}({arguments})" for method, arguments in _CALLS.items())
        hint = f"did you mean {near}?" if near else f"define any of {every}"
        raise ConfigError(what, where=place_of(made, odd) or name, hint=hint)
    for method, arguments in known.items():
        if not hasattr(made, method):
            continue
        count = len(arguments.split(", ")) if arguments else 0
        try:
            inspect.signature(getattr(made, method)).bind(*[None] * (count + 1))
        except TypeError:
            what = f"{method} of {name} cannot be called with {plural(count, 'argument')}"
            shown = f"self, {arguments}" if arguments else "self"
            raise ConfigError(
                what, where=place_of(made, method) or name, hint=f"define it as def {method}({shown})"
            ) from None
    if hasattr(made, "state_dict") != hasattr(made, "load_state_dict"):
        hint = "define both: a checkpoint holds what state_dict() returns, and load_state_dict(state) restores it"
        raise ConfigError(
            f"{name} has only one of state_dict and load_state_dict", where=place_of(made) or name, hint=hint
        )
