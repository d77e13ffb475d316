"""A stand-in for ``kubectl`` and a cluster with Kubeflow's training operator, for jobs whose pods are processes of this
machine: it runs the very commands of a manifest, with the variables that the operator sets, and restarts and deletes
pods by the operator's rules (restartPolicy ExitCode and OnFailure, backoffLimit, cleanPodPolicy Running).

It shows that our manifest and our reading of the cluster's answers go together; what a real cluster does, it cannot.
Its state lies in the folder that FAKE_CLUSTER names. The pods of a job meet at the port FAKE_PORT.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(os.environ["FAKE_CLUSTER"])


def main(words: list[str]) -> int:
    with open(HOME / "calls.txt", "a") as calls:
        calls.write(" ".join(words) + "\n")
    assert words[:1] == ["--namespace"], words
    words = words[2:]
    if words[:2] == ["get", "pytorchjob"]:
        job = read("job")
        print(json.dumps(job) if job and job["metadata"]["name"] == words[2] else "")
    elif words[:2] == ["get", "pods"]:
        print(json.dumps({"items": [pod for pod in (read("pods") or {}).values()]}))
    elif words == ["apply", "-f", "-"]:
        apply(sys.stdin.read())
    elif words[0] == "logs":
        follow(words[-1])
    elif words[:2] == ["delete", "pytorchjob"]:
        delete("--wait=false" not in words)
    elif words[:2] == ["delete", "pods"]:
        (HOME / "kill").touch()
    else:
        print(f"error: unknown command {words}", file=sys.stderr)
        return 1
    return 0


def read(name: str):
    try:
        return json.loads((HOME / f"{name}.json").read_text())
    except OSError:
        return None


def write(name: str, content: object) -> None:
    part = HOME / f"{name}.part"
    part.write_text(json.dumps(content))
    part.rename(HOME / f"{name}.json")


def apply(text: str) -> None:
    import yaml

    config, job = yaml.safe_load_all(text)
    (HOME / "config.yaml").write_text(config["data"]["config.yaml"])
    if read("job"):
        print("pytorchjob unchanged")  # as the real one does with a manifest that is there already
        return
    write("job", {**job, "status": {"conditions": []}})
    write("pods", {})
    for mark in ("delete", "kill"):
        (HOME / mark).unlink(missing_ok=True)
    with open(HOME / "operator.txt", "ab") as log:
        subprocess.Popen([sys.executable, __file__, "operate"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                         start_new_session=True)  # fmt: skip


def delete(wait: bool) -> None:
    (HOME / "delete").touch()
    job = read("job")
    if job and job["status"]["conditions"]:  # its operator has left
        (HOME / "job.json").unlink()
        (HOME / "pods.json").unlink()
    while wait and read("job"):
        time.sleep(0.05)


def follow(pod: str) -> None:
    """The log of ``pod`` until its container has ended, which the operator marks."""
    with open(HOME / f"{pod}.log") as log:
        while True:
            over = pod not in (pods := read("pods") or {}) or pods[pod]["status"]["phase"] != "Running"
            for line in log:
                print(line, end="", flush=True)
            if over:
                return
            time.sleep(0.1)


class Pod:
    def __init__(self, name: str, spec: dict, environ: dict[str, str], number: int) -> None:
        container = spec["template"]["spec"]["containers"][0]
        self.name, self.number, self.policy = name, number, spec["restartPolicy"]
        self._grace_s = spec["template"]["spec"]["terminationGracePeriodSeconds"]
        words = [re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], word) for word in container["command"]]
        self._command = [word.replace("/etc/apex-harness/config.yaml", str(HOME / "config.yaml")) for word in words]
        self._environ = {**os.environ, **environ}
        self.restarts, self._uid = 0, 0
        self._start()

    def _start(self) -> None:
        self._deadline = None
        with open(HOME / f"{self.name}.log", "wb") as log:
            self.process = subprocess.Popen(self._command, env=self._environ, stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log, start_new_session=True)  # fmt: skip

    def again(self, anew: bool) -> None:
        """Another pod in its place, or the same one with its container restarted."""
        self._uid, self.restarts = self._uid + anew, self.restarts + (not anew)
        self._start()

    @property
    def code(self) -> int | None:
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def end(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace_s
            self.process.send_signal(signal.SIGTERM)
        elif (HOME / "kill").exists() or time.monotonic() > self._deadline:
            self.process.kill()

    def status(self) -> dict:
        code = self.code
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        phase = "Running" if code is None else "Failed" if code else "Succeeded"
        containers = [{"name": "pytorch", "restartCount": self.restarts, "state": state}]
        return {"metadata": {"name": self.name, "uid": str(self._uid)},
                "status": {"phase": phase, "containerStatuses": containers}}  # fmt: skip


def operate() -> None:
    job = read("job")
    spec = job["spec"]
    pods, number = [], 0
    count = str(sum(replica["replicas"] for replica in spec["pytorchReplicaSpecs"].values()))
    for kind, replica in spec["pytorchReplicaSpecs"].items():
        for index in range(replica["replicas"]):
            environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["FAKE_PORT"], "RANK": str(number),
                       "WORLD_SIZE": count, "PET_NNODES": count, "PET_NODE_RANK": str(number),
                       "PET_NPROC_PER_NODE": spec["nprocPerNode"]}  # fmt: skip
            pods.append(Pod(f"{job['metadata']['name']}-{kind.lower()}-{index}", replica, environ, number))
            number += 1
    condition = ""
    while True:
        write("pods", {pod.name: pod.status() for pod in pods})
        if (HOME / "delete").exists():
            condition = "Deleted"
        if not condition:
            condition = decide(pods, spec["runPolicy"])
            if condition:
                job["status"]["conditions"] = [{"type": condition, "status": "True", "message": "as the pods ended"}]
                write("job", job)
        if condition:
            for pod in pods:
                if pod.code is None:
                    pod.end()
            if all(pod.code is not None for pod in pods):
                write("pods", {pod.name: pod.status() for pod in pods})
                break
        time.sleep(0.1)
    if condition == "Deleted":
        (HOME / "pods.json").unlink()
        (HOME / "job.json").unlink()


def decide(pods: list[Pod], policy: dict) -> str:
    if pods[0].code == 0:
        return "Succeeded"
    for pod in pods:
        if pod.code and pod.policy == "ExitCode":
            if pod.code < 128:
                return "Failed"
            pod.again(anew=True)
        elif pod.code and pod.policy == "OnFailure":
            if sum(pod.restarts for pod in pods) + 1 >= policy["backoffLimit"]:
                return "Failed"
            pod.again(anew=False)
    return ""


if __name__ == "__main__":
    if sys.argv[1:] == ["operate"]:
        operate()
    else:
        sys.exit(main(sys.argv[1:]))
