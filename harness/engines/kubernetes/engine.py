"""Engine kubernetes: a PyTorchJob of Kubeflow's training operator, applied and followed through ``kubectl``.

pytorchjob.py writes the manifest. The operator starts and restarts the pods; this engine follows their states and the
log of the first pod until none runs any more.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from harness.distributed.monitor import EngineReport
from harness.distributed.rank_exit import RankExit
from harness.engines.base import Job
from harness.engines.kubernetes import pytorchjob
from harness.errors import EXIT_DATA, EXIT_DONE, EXIT_STOPPED, EXIT_USAGE, LaunchError

_POLL_S = 1.0
_CALL_S = 30.0  # for one call of kubectl
_OUT_OF_REACH_S = 120.0  # without an answer of the cluster, until this engine stops following the job
_ENDING_S = 30.0  # beyond their grace period, for pods to end when their job has
_LOG_S = 10.0  # for the last lines of a pod that has ended
_QUIET = (EXIT_DONE, EXIT_STOPPED, EXIT_USAGE, EXIT_DATA)  # exit codes that need no further explanation
# The report of harness launch in a pod, and the lines that follow it after a failure.
_REPORT = re.compile(r"done: |failed: rank \d|stopped early with a checkpoint: |ended on request, ")
_DETAIL = re.compile(r"  rank \d+: |logs: ")
_KLOG = re.compile(r"^[EWIF]\d{4} .*\n?", re.M)  # lines of kubectl's own log, which precede its error message
_HINT = (
    "kubectl get pytorchjobs must work on this machine, with a cluster that has Kubeflow's training operator; "
    "or add --dry-run > job.yaml, and run kubectl apply -f job.yaml where it works"
)
_SELECTOR = "training.kubeflow.org/job-name"


def render(job: Job) -> str:
    return pytorchjob.manifest(job)


def start(job: Job) -> KubernetesRun:
    submit(job)
    return KubernetesRun(job)


def submit(job: Job) -> str:
    """Apply the manifest, replacing a finished job of this name; return the name of the job."""
    text, name, kubectl = render(job), pytorchjob.name_of(job), Kubectl(job)
    before = kubectl.job()
    if before is not None:
        if not _condition(before):
            raise LaunchError(
                f"the job {name} is already running in namespace {job.settings.kubernetes.namespace}",
                hint=f"end it with kubectl delete pytorchjob {name}, or choose another launch.kubernetes.name",
            )
        # With its pods: the new ones will have the same names.
        kubectl("delete", "pytorchjob", name, "--cascade=foreground", timeout_s=job.settings.grace_s + _ENDING_S)
    kubectl("apply", "-f", "-", text=text)
    return f"pytorchjob/{name}"


class Kubectl:
    """``kubectl`` in the namespace of a job."""

    def __init__(self, job: Job) -> None:
        self._name, self._namespace = pytorchjob.name_of(job), job.settings.kubernetes.namespace
        program = shutil.which("kubectl")
        if program is None:
            raise LaunchError("kubectl is not on the PATH", hint=_HINT)
        self._program = program

    def __call__(self, *words: str, text: str | None = None, timeout_s: float = _CALL_S) -> str:
        """Run kubectl and return its output. Raises LaunchError with its error message."""
        try:
            done = subprocess.run(
                self.command(*words), input=text, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"kubectl {words[0]}: the cluster did not answer within {timeout_s:.0f} s", hint=_HINT
            ) from None
        if done.returncode:
            message = _KLOG.sub("", done.stderr).strip() or done.stderr.strip() or f"exit code {done.returncode}"
            raise LaunchError(f"kubectl {words[0]}: {message}", hint=_HINT)
        return done.stdout

    def command(self, *words: str) -> list[str]:
        return [self._program, "--namespace", self._namespace, *words]

    def job(self) -> dict[str, Any] | None:
        """The job in the cluster, or None."""
        found = self("get", "pytorchjob", self._name, "--ignore-not-found", "--output", "json")
        return json.loads(found) if found.strip() else None

    def pods(self) -> list[dict[str, Any]]:
        return json.loads(self("get", "pods", "--selector", f"{_SELECTOR}={self._name}", "--output", "json"))["items"]


class KubernetesRun:
    """An applied job."""

    def __init__(self, job: Job) -> None:
        self._job, self._kubectl = job, Kubectl(job)
        self._names = pytorchjob.pods_of(job)
        self._log = PodLog(self._kubectl, self._names[0])
        self._num_stops = 0
        self._codes: dict[str, int] = {}  # the last exit code of each pod's container
        self._states: dict[str, str] = {}  # the printed state of each pod

    def stop(self) -> None:
        """Delete the job, which gives its pods SIGTERM and the grace period; called again: delete them at once."""
        self._num_stops += 1
        name = pytorchjob.name_of(self._job)
        words = ["delete", "pytorchjob", name, "--wait=false", "--ignore-not-found"]
        if self._num_stops > 1:
            selector = f"{_SELECTOR}={name}"
            words = ["delete", "pods", "--selector", selector, "--grace-period=0", "--force", "--wait=false"]
        with suppress(OSError):
            subprocess.Popen(self._kubectl.command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def follow(self) -> EngineReport:
        answered = time.monotonic()
        over_at = float("inf")
        while True:
            try:
                found, pods = self._kubectl.job(), self._kubectl.pods()
            except (LaunchError, ValueError) as error:
                if time.monotonic() < answered + _OUT_OF_REACH_S:
                    time.sleep(_POLL_S)
                    continue
                self._log.close()
                lost = f"the cluster does not answer, and the job may still be running: {error}"
                return EngineReport([RankExit.lost(lost)])
            answered = time.monotonic()
            self._look(pods)
            if found is None or _condition(found):
                over_at = min(over_at, answered)
                if not _active(pods) or answered > over_at + self._job.settings.grace_s + _ENDING_S:
                    self._log.close()
                    return self._report(found)
            time.sleep(_POLL_S)

    def _look(self, pods: list[dict[str, Any]]) -> None:
        """Note the exit codes of pods, print their states, and follow the log of the first one."""
        for pod in pods:
            name, status = pod["metadata"]["name"], pod.get("status", {})
            for container in status.get("containerStatuses", ()):
                for state in (container.get("lastState", {}), container.get("state", {})):
                    if "terminated" in state:
                        self._codes[name] = state["terminated"]["exitCode"]
            if (state := _state(status)) != self._states.get(name):
                self._states[name] = state
                print(f"pod {name}: {state}", file=sys.stderr)
            if name == self._names[0] and status.get("phase") in ("Running", "Succeeded", "Failed"):
                restarts = sum(container.get("restartCount", 0) for container in status.get("containerStatuses", ()))
                self._log.follow(f"{pod['metadata'].get('uid')}/{restarts}")

    def _report(self, found: dict[str, Any] | None) -> EngineReport:
        report, nproc = self._log.report, self._job.settings.nproc
        if found is None and report.startswith("stopped early"):  # deleted pods leave no exit code
            self._codes.setdefault(self._names[0], pytorchjob.STOPPED_CODE)
        codes = {name: _exit_code(self._codes[name]) for name in self._names if name in self._codes}
        if found is not None and _condition(found) == "Succeeded":
            codes = {self._names[0]: EXIT_DONE}  # whatever was restarted in between
        failing = [f"pod {name} ended with exit code {code}" for name, code in codes.items() if code not in _QUIET]
        exits = [RankExit.from_code(number * nproc, codes[name])
                 for number, name in enumerate(self._names) if name in codes]  # fmt: skip
        exits.sort(key=lambda exit: exit.exit_code >= 0)  # a killed pod ended before those that noticed
        if not self._num_stops and (failing or not codes):
            lost = ", ".join(failing) or (_message(found) if found else "the job was deleted")
            exits.append(
                RankExit.lost(lost + (f"; the report of the run: {report.removeprefix('failed: ')}" if report else ""))
            )
        return EngineReport(exits, stopped=self._num_stops > 0)


class PodLog:
    """The log of a pod, copied to this terminal while it grows. The report of ``harness launch`` in it is kept in
    ``report`` instead, since this process prints its own."""

    def __init__(self, kubectl: Kubectl, pod: str) -> None:
        self._kubectl, self._pod = kubectl, pod
        self._container = ""
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self.report = ""

    def follow(self, container: str) -> None:
        """Follow ``container``, unless that is already followed."""
        if container == self._container:
            return
        self.close()
        self._container, self.report = container, ""
        command = self._kubectl.command("logs", "--follow", "--container", pytorchjob.CONTAINER, self._pod)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
        )
        self._process = process
        self._thread = threading.Thread(target=self._copy, args=(process,), daemon=True)
        self._thread.start()

    def _copy(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if _REPORT.match(line):
                self.report = line.strip()
            elif not (self.report and _DETAIL.match(line)):
                print(line, end="", flush=True)

    def close(self) -> None:
        """Wait for the last lines."""
        if self._process is not None and self._thread is not None:
            self._thread.join(_LOG_S)
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()


def _condition(job: dict[str, Any]) -> str:
    """Succeeded or Failed, once the job is over."""
    for condition in job.get("status", {}).get("conditions") or ():
        if condition["type"] in ("Succeeded", "Failed") and condition["status"] == "True":
            return str(condition["type"])
    return ""


def _message(job: dict[str, Any]) -> str:
    failed = [one for one in job.get("status", {}).get("conditions") or () if one["type"] == "Failed"]
    return f"{failed[-1].get('reason', '')}: {failed[-1].get('message', '')}" if failed else "no pod has an exit code"


def _active(pods: list[dict[str, Any]]) -> bool:
    return any(pod.get("status", {}).get("phase") in ("Pending", "Running") for pod in pods)


def _state(status: dict[str, Any]) -> str:
    """The phase of a pod, and the reason if it is waiting."""
    containers = status.get("containerStatuses") or ()
    waiting = [one["state"]["waiting"] for one in containers if one.get("state", {}).get("waiting")]
    conditions = status.get("conditions") or ()
    waiting += [one for one in conditions if one["type"] == "PodScheduled" and one["status"] == "False"]
    reasons = [f"({one.get('reason', '')} {one.get('message', '')}".strip() + ")" for one in waiting]
    return " ".join([str(status.get("phase", "unknown")), *reasons])


def _exit_code(code: int) -> int:
    """The exit code of a rank for that of a container: minus the signal that killed it, and 75 for STOPPED_CODE."""
    if code == pytorchjob.STOPPED_CODE:
        return EXIT_STOPPED
    return 128 - code if code > 128 else code
