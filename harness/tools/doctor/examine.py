"""All checks in the order of the report, and the report as text or JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from harness.errors import EXIT_DONE, EXIT_USAGE
from harness.tools.doctor import limits, network, software
from harness.tools.doctor.findings import Check, Finding, System, run_check
from harness.version import __version__

CHECKS: list[Check] = [
    software.python,
    software.packages,
    software.torch,
    software.apex,
    software.backend,
    software.cuda,
    limits.cpu,
    limits.memory,
    limits.shared_memory,
    limits.open_files,
    limits.folder,
    network.collectives,
    network.network,
    network.launch,
]

TIMEOUT_S = 60.0  # per check; importing torch from a cold network file system takes long


def environment(system: System) -> Iterator[Finding]:
    """What a bug report needs. It takes seconds, so only the JSON has it."""
    from torch.utils import collect_env

    yield Finding("environment", "ok", str(collect_env.get_pretty_env_info()))


def main(environ: Mapping[str, str], as_json: bool, checks: Sequence[Check] = CHECKS) -> int:
    """Print the report; return 2 if there is a problem, otherwise 0."""
    checks = [*checks, environment] if as_json else checks
    findings = [finding for check in checks for finding in run_check(check, System(environ), TIMEOUT_S)]
    problems, notes = (sum(finding.mark == mark for finding in findings) for mark in ("problem", "note"))
    facts = {"harness": __version__, "host": platform.node(), "system": platform.platform()}
    if as_json:
        report = {**facts, "problems": problems, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=2))
    else:
        print(f"apex-harness {facts['harness']} on {facts['host']} ({facts['system']})\n")
        width = max((len(finding.check) for finding in findings), default=0)
        for finding in findings:
            print(f"{finding.mark:<7}  {finding.check:<{width}}  {finding.text}")
            for remedy in finding.remedies:
                print(f"{'':<7}  {'':<{width}}    -> {remedy}")
        print(f"\n{f'Problems: {problems}.' if problems else 'Ready to train.'} Notes: {notes}.")
    return EXIT_USAGE if problems else EXIT_DONE
