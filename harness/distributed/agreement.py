"""The values that must be equal on all ranks at the start, and the error that lists those that differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import LaunchError

_SHOWN, _SHOWN_HOSTS, _WIDTH = 8, 3, 80  # values and hosts in a message; characters of a value
_ABSENT = "not set"


@dataclass(frozen=True)
class Facts:
    """Values, by name, that must be equal on all ranks, and what to do if they are not. The values are JSON."""

    remedy: str
    values: Mapping[str, Any]
    partial: bool = False
    """A rank that lacks a name does not differ from the others."""


def disagreement(facts: Mapping[int, Sequence[Facts]], hosts: Mapping[int, str]) -> LaunchError | None:
    """Return the error that lists what differs between the ranks, with their hosts; None if they agree."""
    names = dict.fromkeys((fact.remedy, name) for rank in facts for fact in facts[rank] for name in fact.values)
    known = {rank: {fact.remedy: fact for fact in facts[rank]} for rank in sorted(facts)}
    lines, remedies = [], []
    for remedy, name in names:
        ranks: dict[str, list[int]] = {}
        for rank, own in known.items():
            fact = own.get(remedy, Facts(remedy, {}))
            if name in fact.values:
                ranks.setdefault(json.dumps(fact.values[name], sort_keys=True, default=str), []).append(rank)
            elif not fact.partial:
                ranks.setdefault(_ABSENT, []).append(rank)
        if len(ranks) > 1:
            remedies.append(remedy)
            groups = [f"{_short(value)} on {named(group)} ({_hosts(group, hosts)})" for value, group in ranks.items()]
            lines.append(f"  {name}: {'; '.join(groups[:_SHOWN])}" + ("; ..." if len(groups) > _SHOWN else ""))
    if not lines:
        return None
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    count = "1 value differs" if len(lines) == 1 else f"{len(lines)} values differ"
    text = "\n".join([f"the ranks were started differently: {count}", *lines[:_SHOWN], *more])
    return LaunchError(text, hint="; ".join(dict.fromkeys(remedies)))


def named(ranks: Iterable[int]) -> str:
    """ "rank 3" or "ranks 0-2, 5" """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs[:_SHOWN]) + (", ..." if len(runs) > _SHOWN else "")
    return f"rank{'' if len(runs) == 1 and len(runs[0]) == 1 else 's'} {text}"


def _hosts(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return ", ".join(names[:_SHOWN_HOSTS]) + (f" and {len(names) - _SHOWN_HOSTS} more" if names[_SHOWN_HOSTS:] else "")


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
