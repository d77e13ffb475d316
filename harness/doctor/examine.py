"""The list of checks, in the order of the report; and the verb: run them, print, and say it in the exit code."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

from harness.doctor import communication, devices, machine, software, which_apex
from harness.doctor.findings import Check, Finding, Place, as_json, as_text, look
from harness.errors import EXIT_DONE, EXIT_USAGE
from harness.version import __version__

CHECKS: list[Check] = [
    software.python,
    software.packages,
    software.torch,
    software.torchvision,
    which_apex.apex,
    which_apex.backend,
    devices.cuda,
    devices.mps,
    machine.cpu,
    machine.memory,
    machine.shared_memory,
    machine.open_files,
    machine.folder,
    communication.collectives,
    communication.network,
    communication.launch,
]

TIMEOUT_S = 60.0  # of one check; importing torch from a cold network file system takes long


def examine(place: Place, checks: Sequence[Check] = CHECKS, timeout_s: float = TIMEOUT_S) -> list[Finding]:
    """All findings of ``checks``, in their order."""
    return [finding for check in checks for finding in look(check, place, timeout_s)]


def main(environ: Mapping[str, str], as_json_text: bool) -> int:
    """Print the report. 0 when nothing is a problem, else 2: the machine or its settings, not the data, are wrong."""
    findings = examine(Place(environ))
    facts = {"harness": __version__, "host": platform.node(), "system": platform.platform()}
    if as_json_text:
        print(as_json(findings, facts))
    else:
        print(f"apex-harness {facts['harness']} on {facts['host']} ({facts['system']})\n")
        print(as_text(findings))
    return EXIT_USAGE if any(finding.mark == "problem" for finding in findings) else EXIT_DONE
