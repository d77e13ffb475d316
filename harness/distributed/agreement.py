"""The values that must be equal on all ranks at the start, and the error that lists those that differ."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.errors import LaunchError

_SHOWN, _SHOWN_HOSTS, _WIDTH = 8, 3, 80  # values and hosts in a message; characters of a value
_ABSENT = "not set"

Differences = dict[str, tuple[str, str, str]]
"""{name: (remedy, value of rank 0, value of this rank)}"""


@dataclass(frozen=True)
class Facts:
    """Values, by name, that must be equal on all ranks, and what to do if they are not. The values are JSON."""

    remedy: str
    values: Mapping[str, Any]
    partial: bool = False
    """A name that only one of two ranks has does not count as a difference."""


def to_text(facts: Sequence[Facts]) -> str:
    return json.dumps([asdict(fact) for fact in facts], sort_keys=True, default=str)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def differences(theirs: str, mine: str) -> Differences:
    """What differs between two results of ``to_text``, of rank 0 and of this rank."""
    found: Differences = {}
    sides = [{fact["remedy"]: fact for fact in json.loads(text)} for text in (theirs, mine)]
    for remedy in dict.fromkeys(itertools.chain(*sides)):
        one, other = (side.get(remedy, {"values": {}, "partial": False}) for side in sides)
        a, b = one["values"], other["values"]
        for name in [*a, *(name for name in b if name not in a)]:
            both = name in a and name in b
            if (both and a[name] != b[name]) or not (both or one["partial"] or other["partial"]):
                found[name] = (remedy, *(_shown(side[name]) if name in side else _ABSENT for side in (a, b)))
    return found


def disagreement(hosts: Mapping[int, str], reports: Mapping[int, Differences]) -> LaunchError:
    """The error for ``reports``, the differences from rank 0 by rank; ``hosts`` of all ranks, by rank."""
    first: dict[str, tuple[str, str]] = {}
    for report in reports.values():
        first |= {name: (remedy, value) for name, (remedy, value, _) in report.items() if name not in first}
    lines = []
    for name, (_, value) in itertools.islice(first.items(), _SHOWN):
        ranks: dict[str, list[int]] = {}
        for rank in sorted(hosts):
            ranks.setdefault(reports.get(rank, {}).get(name, ("", "", value))[2], []).append(rank)
        groups = [f"{value} on {named(group)} ({_hosts(group, hosts)})" for value, group in ranks.items()]
        lines.append(f"  {name}: {'; '.join(groups[:_SHOWN])}" + ("; ..." if len(groups) > _SHOWN else ""))
    if len(first) > _SHOWN:
        lines.append(f"  and {len(first) - _SHOWN} more")
    count = "1 value differs" if len(first) == 1 else f"{len(first)} values differ"
    remedies = dict.fromkeys(remedy for remedy, _ in first.values())
    return LaunchError(f"the ranks were started differently: {count}\n" + "\n".join(lines), hint="; ".join(remedies))


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


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
