"""The manifest of an experiment: a PyTorchJob of Kubeflow's training operator (kubeflow.org/v1), and a ConfigMap with
the resolved configuration, so that a changed setting needs no new image.

In each pod ``harness launch --engine torchrun`` starts ``launch.nproc`` ranks. The operator sets environment variables
for the rendezvous and the number of the pod; Kubernetes substitutes them for ``$(NAME)``.
"""

from __future__ import annotations

import math
import posixpath
import re
from typing import Any

import yaml

from harness.config import loader
from harness.engines.base import Job, refuse
from harness.engines.torchrun import rendezvous
from harness.errors import LaunchError
from harness.runs import layout

# With restartPolicy ExitCode the operator restarts a pod that exits with 128 or more; less is a failure.
STOPPED_CODE = 143
CONFIG = f"/etc/apex-harness/{layout.CONFIG}"
CONTAINER, _PORT_NAME, _PORT = "pytorch", "pytorchjob-port", 23456  # names that the operator requires
_MARGIN_S = 30  # beyond the ranks' own grace period
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,44}[a-z0-9])?")  # of a job: with "-worker-999" still a valid DNS name
_ABSOLUTE = "write an absolute path, such as /data"
_OPERATOR = "the operator sets the rendezvous and the number of each machine; remove the setting"


def name_of(job: Job) -> str:
    """The job's name in the cluster. Raises LaunchError if the name of the experiment is not valid there."""
    if job.settings.kubernetes.name:
        return job.settings.kubernetes.name
    name = re.sub(r"[._]", "-", job.config.name.lower())
    if not _NAME.fullmatch(name):
        raise LaunchError(
            f"{name!r} cannot be the name of a job: use at most 46 letters, digits and -, starting with a letter",
            where=job.path,
            hint="launch.kubernetes.name=…",
        )
    return name


def pods_of(job: Job) -> list[str]:
    """The names of the job's pods, by the number of the machine."""
    name = name_of(job)
    first = "worker" if _elastic(job) else "master"
    rest = range(1, job.settings.nnodes) if _elastic(job) else range(job.settings.nnodes - 1)
    return [f"{name}-{first}-0", *(f"{name}-worker-{number}" for number in rest)]


def manifest(job: Job) -> str:
    """The manifest, as YAML. Raises LaunchError for settings that no cluster could use."""
    _check(job)
    documents = yaml.dump_all([_config_map(job), _job(job)], Dumper=_Dumper, sort_keys=False, width=100)
    if _outlives_pods(job):
        return documents
    return f"# output={job.config.output} is not on a volume claim: the run folder is lost with the pods.\n{documents}"


def _config_map(job: Job) -> dict[str, Any]:
    data = {posixpath.basename(CONFIG): loader.to_text(job.config)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job), "data": data}


def _job(job: Job) -> dict[str, Any]:
    settings = job.settings
    restarts = settings.max_restarts
    # The limit counts the restarts of every container, and one failure restarts them all.
    limit = {"backoffLimit": restarts * settings.nnodes + 1} if restarts else {}
    elastic = {"minReplicas": settings.min_nodes, "maxReplicas": settings.nnodes, "maxRestarts": restarts,
               "rdzvBackend": "c10d"}  # fmt: skip
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(job),
        "spec": {
            "nprocPerNode": str(settings.nproc),
            "runPolicy": {"cleanPodPolicy": "Running", **limit},
            **({"elasticPolicy": elastic} if _elastic(job) else {}),
            "pytorchReplicaSpecs": _replicas(job),
        },
    }


def _replicas(job: Job) -> dict[str, Any]:
    nnodes = job.settings.nnodes
    counts = {"Worker": nnodes} if _elastic(job) else {"Master": 1, "Worker": nnodes - 1}
    policy = "OnFailure" if job.settings.max_restarts else "ExitCode"
    return {
        kind: {"replicas": count, "restartPolicy": policy, "template": {"spec": _pod(job)}}
        for kind, count in counts.items()
        if count
    }


def _pod(job: Job) -> dict[str, Any]:
    section = job.settings.kubernetes
    asked = {"cpu": section.cpu, "memory": section.memory, "nvidia.com/gpu": str(section.gpu or "") or None}
    amounts = {name: amount for name, amount in asked.items() if amount}
    mounts = [{"name": f"claim-{number}", "mountPath": path} for number, path in enumerate(section.claims.values())]
    claims = [{"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
              for number, claim in enumerate(section.claims)]  # fmt: skip
    container = {
        "name": CONTAINER,
        "image": section.image,
        **({"workingDir": section.workdir} if section.workdir else {}),
        "command": _command(job),
        "ports": [{"name": _PORT_NAME, "containerPort": _PORT}],
        **({"resources": {"requests": amounts, "limits": dict(amounts)}} if amounts else {}),
        "volumeMounts": [
            {"name": "config", "mountPath": posixpath.dirname(CONFIG)},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *mounts,
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {
        "containers": [container],
        "terminationGracePeriodSeconds": math.ceil(job.settings.grace_s) + _MARGIN_S,
        "volumes": [
            {"name": "config", "configMap": {"name": name_of(job)}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # for the batches of loader processes
            *claims,
        ],
    }


def _command(job: Job) -> list[str]:
    """The command of every pod; the rest of the ``launch`` section is in the configuration."""
    settings = job.settings
    words = ["--engine", "torchrun", "--stopped-code", str(STOPPED_CODE)]
    if _elastic(job):
        words += ["--rendezvous", "$(PET_RDZV_ENDPOINT)"]
    else:
        words += ["--max-restarts", "0"]  # a pod is restarted whole
        if settings.nnodes > 1:
            words += ["--rendezvous", "$(MASTER_ADDR):$(MASTER_PORT)", "--node-rank", "$(RANK)"]
    return [settings.python or "python", "-m", "harness", "launch", "-c", CONFIG, *words]


def _metadata(job: Job) -> dict[str, str]:
    return {"name": name_of(job), "namespace": job.settings.kubernetes.namespace}


def _elastic(job: Job) -> bool:
    return (job.settings.min_nodes or job.settings.nnodes) < job.settings.nnodes


def _outlives_pods(job: Job) -> bool:
    section, output = job.settings.kubernetes, job.config.output
    folder = posixpath.normpath(posixpath.join(section.workdir or "/", output))
    return bool(job.url) or any(posixpath.commonpath([path, folder]) == posixpath.normpath(path)
                                  for path in section.claims.values())  # fmt: skip


def _check(job: Job) -> None:
    settings, section = job.settings, job.settings.kubernetes

    def wrong(message: str, hint: str) -> LaunchError:
        return LaunchError(message, where=job.path, hint=hint)

    if not section.image:
        raise wrong("the pods need a container image that contains the project", "launch.kubernetes.image=…")
    refuse(job, "kubernetes", rendezvous=_OPERATOR, node_rank=_OPERATOR)
    if (settings.min_nodes or 1) > settings.nnodes:
        raise wrong(f"launch.min_nodes={settings.min_nodes} is more than launch.nnodes={settings.nnodes}",
                    "use --nnodes MIN:MAX, which sets both")  # fmt: skip
    if _elastic(job):
        if not settings.max_restarts:
            raise wrong(
                "a range of machines needs launch.max_restarts: each lost machine uses one restart", "--max-restarts 3"
            )
        rendezvous.check_batch(job, settings.min_nodes or settings.nnodes)
    if section.workdir and not posixpath.isabs(section.workdir):
        raise wrong(f"launch.kubernetes.workdir is {section.workdir!r}", _ABSOLUTE)
    for claim, path in section.claims.items():
        if not posixpath.isabs(path):
            raise wrong(f"launch.kubernetes.claims: {claim} is mounted at {path!r}", _ABSOLUTE)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
