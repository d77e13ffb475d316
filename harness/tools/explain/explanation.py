"""The explanation of a run: its main cause, in words, and the causes after it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from harness.tools.explain.causes import CAUSES, SlowCause
from harness.tools.explain.facts import RunFacts


@dataclass(frozen=True)
class Explanation:
    """``cause``: the name of one of CAUSES; None if the run is not slow. ``gain``: how many times as fast it can be.
    ``then``: the other causes that count, the largest first."""

    cause: str | None
    share: float
    gain: float
    text: str
    settings: dict[str, Any]
    facts: RunFacts = field(repr=False)
    then: tuple[Explanation, ...] = ()

    def as_json(self) -> dict[str, Any]:
        facts = {name: value for name, value in asdict(self.facts).items() if name not in ("settings", "measure")}
        shares = {name: self.facts.share(name) for name in self.facts.spent}
        return {"run": str(self.facts.path), **self._answer(), "then": [other._answer() for other in self.then],
                "shares": shares, "facts": {**facts, "path": str(self.facts.path)}}  # fmt: skip

    def _answer(self) -> dict[str, Any]:
        return {"cause": self.cause, "share": self.share, "gain": self.gain, "text": self.text, "set": self.settings}


def explain(facts: RunFacts) -> Explanation:
    """Name the main cause, and the others that count."""
    found = [(min(cause.share(facts), 1.0), cause) for cause in CAUSES]
    found = sorted(((share, cause) for share, cause in found if share >= cause.limit), key=lambda pair: -pair[0])
    if not found:
        return Explanation(None, 0.0, 1.0, _not_slow(facts), {}, facts)
    first, *rest = (_explained(cause, share, facts) for share, cause in found)
    return Explanation(first.cause, first.share, first.gain, first.text, first.settings, facts, tuple(rest))


def _explained(cause: SlowCause, share: float, facts: RunFacts) -> Explanation:
    change = cause.change(facts)
    gain = 1 / max(1 - share * (1 - change.left), 0.01)
    faster = f"about {gain:.1f} times as fast" if gain < 10 else "more than 10 times as fast"
    text = f"{facts.path} {cause.what(facts)} ({share:.0%} of the run's time). {change.advice}. Expected: {faster}."
    return Explanation(cause.name, share, gain, text, change.settings, facts)


def _not_slow(facts: RunFacts) -> str:
    shares = {name: facts.share(name) for name in ("forward", "backward", "optimizer")}
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return f"{facts.path} is not slow: the model takes {sum(shares.values()):.0%} of its time ({parts})."
