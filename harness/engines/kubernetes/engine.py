"""Engine kubernetes: a PyTorchJob that Kubeflow's training operator runs, all through ``kubectl``.

What is applied lives in ``harness.engines.kubernetes.pytorchjob``. The operator starts the pods and restarts them; here its word
on them is followed, and the log of the first pod, until nothing of the job runs any more.
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

from harness.distributed.monitor import Outcome
from harness.engines.base import Job
from harness.engines.kubernetes import pytorchjob
from harness.errors import EXIT_DATA, EXIT_DONE, EXIT_STOPPED, EXIT_USAGE, LaunchError

_POLL_S = 1.0
_CALL_S = 30.0  # for one word of kubectl
_OUT_OF_REACH_S = 120.0  # without an answer of the cluster, until it is given up to follow
_ENDING_S = 30.0  # beyond their grace period, for pods to end when their job has
_LOG_S = 10.0  # for the last lines of a pod that has ended
_QUIET = (EXIT_DONE, EXIT_STOPPED, EXIT_USAGE, EXIT_DATA)  # of pods that have said all there is to say
# The last words of harness launch, and the lines that go with those of a failure.
_CONCLUSION = re.compile(r"done: |failed: rank \d|stopped early with a checkpoint: |ended as asked, ")
_DETAIL = re.compile(r"  rank \d+: |logs: ")
_KLOG = re.compile(r"^[EWIF]\d{4} .*\n?", re.M)  # lines of kubectl's own log, which come before its complaint
_HINT = (
    "kubectl get pytorchjobs must work here, with a cluster that has Kubeflow's training operator; "
    "or add --dry-run > job.yaml, and kubectl apply -f job.yaml where it does"
)
_SELECTOR = "training.kubeflow.org/job-name"


def render(job: Job) -> str:
    return pytorchjob.manifest(job)


def start(job: Job) -> Kubernetes:
    submit(job)
    return Kubernetes(job)


def submit(job: Job) -> str:
    """Apply the manifest, in place of a job of this name that is over; the job's name there."""
    text, name, kubectl = render(job), pytorchjob.name_of(job), Kubectl(job)
    before = kubectl.job()
    if before is not None:
        if not _condition(before):
            raise LaunchError(
                f"the job {name} is running in namespace {job.settings.kubernetes.namespace}",
                hint=f"kubectl delete pytorchjob {name} ends it; or launch.kubernetes.name=…",
            )
        # With its pods, which would have the names of the new ones.
        kubectl("delete", "pytorchjob", name, "--cascade=foreground", timeout_s=job.settings.grace_s + _ENDING_S)
    kubectl("apply", "-f", "-", text=text)
    return f"pytorchjob/{name}"


class Kubectl:
    """``kubectl`` in the namespace of a job."""

    def __init__(self, job: Job) -> None:
        self._name, self._namespace = pytorchjob.name_of(job), job.settings.kubernetes.namespace
        program = shutil.which("kubectl")
        if program is None:
            raise LaunchError("kubectl, through which a cluster is spoken to, is not on the PATH", hint=_HINT)
        self._program = program

    def __call__(self, *words: str, text: str | None = None, timeout_s: float = _CALL_S) -> str:
        """What kubectl prints. Raises LaunchError with what it says of a failure."""
        try:
            done = subprocess.run(
                self.command(*words), input=text, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            complaint = f"the cluster did not answer within {timeout_s:.0f} s"
            raise LaunchError(f"kubectl {words[0]}: {complaint}", hint=_HINT) from None
        if done.returncode:
            complaint = _KLOG.sub("", done.stderr).strip() or done.stderr.strip() or f"exit code {done.returncode}"
            raise LaunchError(f"kubectl {words[0]}: {complaint}", hint=_HINT)
        return done.stdout

    def command(self, *words: str) -> list[str]:
        return [self._program, "--namespace", self._namespace, *words]

    def job(self) -> dict[str, Any] | None:
        """The job as the cluster knows it, or None."""
        found = self("get", "pytorchjob", self._name, "--ignore-not-found", "--output", "json")
        return json.loads(found) if found.strip() else None

    def pods(self) -> list[dict[str, Any]]:
        return json.loads(self("get", "pods", "--selector", f"{_SELECTOR}={self._name}", "--output", "json"))["items"]


class Kubernetes:
    """A job that was applied."""

    def __init__(self, job: Job) -> None:
        self._job, self._kubectl = job, Kubectl(job)
        self._names = pytorchjob.pods_of(job)
        self._log = Log(self._kubectl, self._names[0])
        self._asked = 0
        self._codes: dict[str, int] = {}  # how each pod's container ended last
        self._told: dict[str, str] = {}  # what was said of each pod

    def stop(self) -> None:
        """Delete the job, which gives its pods SIGTERM and the grace period; called again: delete them at once."""
        self._asked += 1
        name = pytorchjob.name_of(self._job)
        words = ["delete", "pytorchjob", name, "--wait=false", "--ignore-not-found"]
        if self._asked > 1:
            selector = f"{_SELECTOR}={name}"
            words = ["delete", "pods", "--selector", selector, "--grace-period=0", "--force", "--wait=false"]
        with suppress(OSError):
            subprocess.Popen(self._kubectl.command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def follow(self) -> Outcome:
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
                return Outcome(lost=f"the cluster is out of reach, and the job may be running on: {error}")
            answered = time.monotonic()
            self._look(pods)
            if found is None or _condition(found):
                over_at = min(over_at, answered)
                if not _active(pods) or answered > over_at + self._job.settings.grace_s + _ENDING_S:
                    self._log.close()
                    return self._outcome(found)
            time.sleep(_POLL_S)

    def _look(self, pods: list[dict[str, Any]]) -> None:
        """Take down how pods ended, say what has become of them, and follow the first one's log."""
        for pod in pods:
            name, status = pod["metadata"]["name"], pod.get("status", {})
            for container in status.get("containerStatuses", ()):
                for state in (container.get("lastState", {}), container.get("state", {})):
                    if "terminated" in state:
                        self._codes[name] = state["terminated"]["exitCode"]
            said = _said(status)
            if said != self._told.get(name):
                self._told[name] = said
                print(f"pod {name}: {said}", file=sys.stderr)
            if name == self._names[0] and status.get("phase") in ("Running", "Succeeded", "Failed"):
                restarts = sum(container.get("restartCount", 0) for container in status.get("containerStatuses", ()))
                self._log.of(f"{pod['metadata'].get('uid')}/{restarts}")

    def _outcome(self, found: dict[str, Any] | None) -> Outcome:
        said, nproc = self._log.conclusion, self._job.settings.nproc
        if found is None and said.startswith("stopped early"):  # deleted pods leave no exit code behind
            self._codes.setdefault(self._names[0], pytorchjob.STOPPED_CODE)
        codes = {name: _exit_code(self._codes[name]) for name in self._names if name in self._codes}
        if found is not None and _condition(found) == "Succeeded":
            codes = {self._names[0]: EXIT_DONE}  # whatever was restarted on the way
        failing = [f"pod {name} ended with exit code {code}" for name, code in codes.items() if code not in _QUIET]
        lost = ""
        if not self._asked and (failing or not codes):
            lost = ", ".join(failing) or (_message(found) if found else "somebody deleted the job")
            lost += f"; its last words: {said}" if said else ""
        exits = [(number * nproc, codes[name]) for number, name in enumerate(self._names) if name in codes]
        exits.sort(key=lambda exit: exit[1] >= 0)  # a pod that was killed ended before those that noticed
        return Outcome(dict(exits), lost, stopped=bool(self._asked))


class Log:
    """The log of a pod, copied to this terminal as it comes; the last words of ``harness launch`` there are held back,
    for this one has the same to say."""

    def __init__(self, kubectl: Kubectl, pod: str) -> None:
        self._kubectl, self._pod = kubectl, pod
        self._of = ""
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self.conclusion = ""

    def of(self, container: str) -> None:
        """Begin with ``container``, if that is not the one being followed."""
        if container == self._of:
            return
        self.close()
        self._of, self.conclusion = container, ""
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
            if _CONCLUSION.match(line):
                self.conclusion = line.strip()
            elif not (self.conclusion and _DETAIL.match(line)):
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
    return f"{failed[-1].get('reason', '')}: {failed[-1].get('message', '')}" if failed else "no pod says how it ended"


def _active(pods: list[dict[str, Any]]) -> bool:
    return any(pod.get("status", {}).get("phase") in ("Pending", "Running") for pod in pods)


def _said(status: dict[str, Any]) -> str:
    """The phase of a pod, and why it waits if it does."""
    containers = status.get("containerStatuses") or ()
    waiting = [one["state"]["waiting"] for one in containers if one.get("state", {}).get("waiting")]
    conditions = status.get("conditions") or ()
    waiting += [one for one in conditions if one["type"] == "PodScheduled" and one["status"] == "False"]
    reasons = [f"({one.get('reason', '')} {one.get('message', '')}".strip() + ")" for one in waiting]
    return " ".join([str(status.get("phase", "unknown")), *reasons])


def _exit_code(code: int) -> int:
    """A container's exit code as a rank's: minus the signal where one ended it, and 75 for what 143 stands for."""
    if code == pytorchjob.STOPPED_CODE:
        return EXIT_STOPPED
    return 128 - code if code > 128 else code
