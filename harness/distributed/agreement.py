"""The values that must be equal on all ranks at the start, and the error that lists those that differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import LaunchError, first_few

_SHOWN, _SHOWN_HOSTS, _WIDTH = 8, 3, 80  # values and hosts in a message; characters of a value
_ABSENT = "not set"


@dataclass(frozen=True)
class Facts:
    """Values, by name, that must be equal on all ranks, and what to do if they are not. The values are JSON."""

    remedy: str
    values: Mapping[str, Any]
    partial: bool = False
    """A rank that lacks a name does not differ from the others."""


def disagreement(gathered: Mapping[int, Sequence[Facts]], hosts: Mapping[int, str]) -> LaunchError | None:
    """Return the error that lists what differs between the ranks, with their hosts; None if they agree."""
    names = {(name, fact.remedy): fact.partial for rank in gathered for fact in gathered[rank] for name in fact.values}
    values = {
        rank: {(name, fact.remedy): value for fact in gathered[rank] for name, value in fact.values.items()}
        for rank in sorted(gathered)
    }
    lines, remedies = [], []
    for (name, remedy), partial in names.items():
        ranks: dict[str, list[int]] = {}
        for rank, rank_values in values.items():
            if (name, remedy) in rank_values:
                text = json.dumps(rank_values[name, remedy], sort_keys=True, default=str)
                ranks.setdefault(text, []).append(rank)
            elif not partial:
                ranks.setdefault(_ABSENT, []).append(rank)
        if len(ranks) > 1:
            remedies.append(remedy)
            groups = [
                f"{_short(value)} on {rank_names(group)} ({_hosts(group, hosts)})" for value, group in ranks.items()
            ]
            lines.append(f"  {name}: {'; '.join(groups[:_SHOWN])}" + ("; ..." if len(groups) > _SHOWN else ""))
    if not lines:
        return None
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    count = "1 value differs" if len(lines) == 1 else f"{len(lines)} values differ"
    text = "\n".join([f"the ranks were started differently: {count}", *lines[:_SHOWN], *more])
    return LaunchError(text, hint="; ".join(dict.fromkeys(remedies)))


def rank_names(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []  # first and last of each
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    ranges = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    text = ", ".join(ranges[:_SHOWN]) + (", ..." if len(runs) > _SHOWN else "")
    return f"rank{'' if len(runs) == 1 and runs[0][0] == runs[0][1] else 's'} {text}"


def _hosts(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return first_few(names, _SHOWN_HOSTS)


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
