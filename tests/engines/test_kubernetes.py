"""Engine kubernetes: golden and validated manifests, and runs through a stand-in for kubectl.

No cluster was used. ``fake_kubectl`` runs a manifest's commands as local processes, by the operator's rules.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from harness.config import loader
from harness.engines import launch
from harness.engines.kubernetes import engine
from harness.errors import LaunchError
from harness.runs.outcome import ExitCollector
from tests.conftest import ROOT
from tests.end_to_end.experiment import assert_same_run, run, write_config, write_images
from tests.end_to_end.processes import END_S, started, wait_for_steps, wait_until
from tests.ranks import free_port

MODELS = "tests.end_to_end.models"
GOLDEN = Path(__file__).parent / "golden"
IMAGE = "launch.kubernetes.image=registry.example/apex-harness:1"
CLAIMS = ["launch.kubernetes.claims={datasets: /data, runs: /runs}", "output=/runs"]
MACHINE = ["launch.kubernetes.cpu=8", "launch.kubernetes.memory=32Gi", "launch.kubernetes.gpu=4", "launch.nproc=4"]
ELASTIC = ["launch.nnodes=4", "launch.min_nodes=2", "launch.max_restarts=3", "batch.global=96"]
JOBS = {
    "one": [IMAGE],
    "two": [IMAGE, *CLAIMS, *MACHINE, "launch.nnodes=2", "launch.kubernetes.workdir=/workspace"],
    "restarted": [IMAGE, *CLAIMS, "launch.nnodes=2", "launch.max_restarts=3", "launch.python=python3.12"],
    "elastic": [IMAGE, *CLAIMS, *MACHINE, *ELASTIC, "launch.kubernetes.name=my-job"],
}
SLOW = {"name": f"{MODELS}.Slow", "args": {"step_s": 0.1}}
START_S = 90  # for two launchers and their ranks, on a machine that does something else besides


@pytest.fixture(scope="module")
def stripes(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("stripes"))


def plan(*words):
    return launch.plan("configs/digits.yaml", words)


def documents(text):
    config, job = yaml.safe_load_all(text)
    return config, job


@pytest.mark.parametrize("name", JOBS)
def test_render(name, tmp_path):
    """The manifest is the golden file; HARNESS_GOLDEN=write writes it. The configuration in it loads as what it was."""
    job, path = plan(*JOBS[name]), GOLDEN / f"kubernetes_{name}.yaml"
    text = engine.render(job)
    config, manifest = documents(text)
    inside = tmp_path / "inside.yaml"
    inside.write_text(config["data"].pop("config.yaml"))
    assert loader.load(inside) == job.config
    comment = text.partition("apiVersion")[0]
    shown = comment + yaml.safe_dump_all([config, manifest], sort_keys=False)
    if os.environ.get("HARNESS_GOLDEN") == "write":
        path.write_text(shown)
    assert shown == path.read_text()


def test_manifest_in_launch_is_current(tmp_path):
    """Except for its comments, and its configuration, which has only the changed settings."""
    config, job = documents((ROOT / "launch" / "pytorchjob.yaml").read_text())
    path = tmp_path / "config.yaml"
    path.write_text(config["data"]["config.yaml"])
    ours, our_job = documents(engine.render(launch.plan(str(path), ["launch.engine=kubernetes"])))
    assert job == our_job
    assert config["metadata"] == ours["metadata"]


def unknown_fields(value, kind, models, where=""):
    """Differences of ``value`` from ``kind``, a type of the operator's or of Kubernetes' own Python models."""
    if held := re.fullmatch(r"(dict[(\[]str, ?|list\[)(.*)[)\]]", kind, re.IGNORECASE):
        inside = value.items() if isinstance(value, dict) else [("[]", one) for one in value]
        return [found for key, one in inside for found in unknown_fields(one, held[2], models, f"{where}.{key}")]
    plain = {"str": str, "int": int, "bool": bool, "object": object}
    if kind in plain:
        return [] if isinstance(value, plain[kind]) else [f"{where}: {value!r} is no {kind}"]
    model = getattr(models[0], kind, None) or getattr(models[1], kind)
    known = {field: model.openapi_types[name] for name, field in model.attribute_map.items()}
    found = [f"{where}.{field} is unknown to {kind}" for field in value.keys() - known.keys()]
    for field in value.keys() & known.keys():
        found += unknown_fields(value[field], known[field], models, f"{where}.{field}")
    return found


@pytest.mark.parametrize("name", JOBS)
def test_manifest_is_valid(name):
    """By Kubernetes' own schemas (a pod, a ConfigMap) and by the training operator's own model of a PyTorchJob."""
    hint = "the manifest cannot be validated: pip install kubernetes-validate kubeflow-training==1.9.3"
    validate = pytest.importorskip("kubernetes_validate", reason=hint).validate
    training = pytest.importorskip("kubeflow.training.models", reason=hint)
    core = pytest.importorskip("kubernetes.client.models", reason=hint)
    config, job = documents(engine.render(plan(*JOBS[name])))
    validate(config, "1.31", strict=True)
    assert unknown_fields(job, "KubeflowOrgV1PyTorchJob", (training, core)) == []
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        metadata = {"name": job["metadata"]["name"], **replica["template"].get("metadata", {})}
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **replica["template"]}, "1.31", strict=True)
    wrong = {**job, "spec": {**job["spec"], "runPolicies": {}, "nprocPerNode": 4}}
    assert len(unknown_fields(wrong, "KubeflowOrgV1PyTorchJob", (training, core))) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "container image"),
        ([IMAGE, "launch.nnodes=2", "launch.rendezvous=a:1"], "launch.rendezvous"),
        ([IMAGE, "launch.nnodes=2", "launch.min_nodes=1"], "needs launch.max_restarts"),
        ([IMAGE, "launch.nnodes=2", "launch.min_nodes=3"], "more than launch.nnodes"),
        (
            [IMAGE, "launch.nnodes=3", "launch.min_nodes=2", "launch.max_restarts=1"],
            "cannot be divided evenly among 3 machines",
        ),
        ([IMAGE, "launch.kubernetes.claims={runs: runs}"], "is mounted at 'runs'"),
        ([IMAGE, CLAIMS[0], "launch.kubernetes.workdir=work"], "workdir is 'work'"),
        ([IMAGE, "name=7.up"], "cannot be the name of a job"),
    ],
)
def test_settings_that_no_cluster_can_use(words, said):
    with pytest.raises(LaunchError, match=said):
        engine.render(plan(*words))


def test_missing_kubectl_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="kubectl") as refused:
        engine.start(plan(IMAGE))
    assert "--dry-run" in refused.value.hint


KLOG = 'E1121 11:49:50.999465   10212 memcache.go:265] "Unhandled Error" err="dial tcp: connection refused"\n'


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (f"{KLOG * 5}The connection was refused", "The connection was refused"),
        (KLOG, KLOG.strip()),
        ("", "exit code 1"),
    ],
)
def test_error_of_kubectl_is_shown(monkeypatch, tmp_path, said, shown):
    (tmp_path / "said.txt").write_text(said)
    script = tmp_path / "kubectl"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/said.txt >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LaunchError) as refused:
        engine.start(plan(IMAGE))
    assert refused.value.message == f"kubectl get: {shown}"
    assert "--dry-run" in refused.value.hint


# A cluster whose answers are given


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """A kubectl that prints files: job.json, pods.json, log.txt; calls.txt has what it was asked."""
    folder = tmp_path / "answers"
    folder.mkdir()
    script = folder / "kubectl"
    script.write_text(
        f'#!/bin/sh\ncd {folder}\necho "$@" >> calls.txt\nshift 2\n'
        'case "$1 $2" in\n"get pytorchjob") cat job.json ;;\n"get pods") cat pods.json ;;\n'
        '"logs --follow") cat log.txt ;;\n"apply -f") cat > applied.yaml; mv after.json job.json ;;\nesac\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "_POLL_S", 0.01)
    (folder / "job.json").touch()

    def answer(condition, codes, log="", **pod):
        conditions = [{"type": condition, "status": "True", "reason": "Why", "message": "so"}] if condition else []
        (folder / "after.json").write_text(json.dumps({"status": {"conditions": conditions}}))
        pods = []
        for name, code in codes.items():
            container = {"name": "pytorch", "restartCount": 0, "state": {"terminated": {"exitCode": code}}}
            status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [container]}
            pods.append({"metadata": {"name": name, "uid": "1"}, "status": status | pod})
        (folder / "pods.json").write_text(json.dumps({"items": pods}))
        (folder / "log.txt").write_text(log)
        return folder

    return answer


def concluded(job):
    """The outcome of ``harness launch`` on a machine that cannot see the run folder."""
    collector = ExitCollector(job.folder, job.world_size)
    return collector.conclude(engine.start(job).follow())


JOB = [str(ROOT / "configs" / "digits.yaml"), [IMAGE, "launch.nnodes=2", "launch.nproc=4", "output=/nowhere"]]


@pytest.mark.parametrize(
    ("condition", "master", "worker", "code", "said"),
    [
        ("Succeeded", 0, 0, 0, "done"),
        ("Failed", 143, 143, 75, "stopped early"),
        ("Failed", 2, 2, 2, "exit code 2"),
        ("Failed", 65, 65, 65, "exit code 65"),
        ("Failed", 70, 137, 70, "rank 4 at step 0: Killed: the process received SIGKILL"),
        ("Failed", 70, 70, 70, "Lost: pod digits-master-0 ended with exit code 70, pod digits-worker-0 ended with "
                               "exit code 70; the report of the run: rank 3 on h at step 5: ValueError: no"),
    ],
)  # fmt: skip
def test_exit_codes_of_pods(answers, condition, master, worker, code, said, capfd):
    log = "done: 3 files read\nepoch 1\nfailed: rank 3 on h at step 5: ValueError: no\n  rank 0: failed\n"
    folder = answers(condition, {"digits-master-0": master, "digits-worker-0": worker}, log)
    conclusion = concluded(launch.plan(*JOB))
    assert conclusion.exit_code == code
    assert said in conclusion.text
    shown = capfd.readouterr()
    assert "epoch 1" in shown.out
    assert "rank 0: failed" not in shown.out, "the report of the pod is not repeated"
    assert (folder / "applied.yaml").read_text() == engine.render(launch.plan(*JOB))


def test_pending_pod_is_shown_with_its_reason(answers, capfd):
    waiting = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False",
               "reason": "Unschedulable", "message": "0/3 nodes are available"}]}  # fmt: skip
    answers("", {"digits-master-0": 0}, containerStatuses=[], **waiting)
    started_ = engine.start(launch.plan(*JOB))
    started_._look(started_._kubectl.pods())
    assert "pod digits-master-0: Pending (Unschedulable 0/3 nodes are available)" in capfd.readouterr().err


def test_running_job_is_left_alone(answers):
    folder = answers("", {})
    (folder / "job.json").write_text('{"status": {}}')
    with pytest.raises(LaunchError, match="digits is already running in namespace default"):
        engine.submit(launch.plan(*JOB))
    assert not (folder / "applied.yaml").exists()


def test_finished_job_is_replaced(answers):
    folder = answers("", {})
    (folder / "job.json").write_text('{"status": {"conditions": [{"type": "Failed", "status": "True"}]}}')
    assert engine.submit(launch.plan(*JOB)) == "pytorchjob/digits"
    calls = (folder / "calls.txt").read_text().splitlines()
    assert [call.split()[2] for call in calls] == ["get", "delete", "apply"]


def test_cluster_that_does_not_answer(answers, monkeypatch):
    folder = answers("", {"digits-master-0": 0})
    job = engine.start(launch.plan(*JOB))
    (folder / "pods.json").unlink()
    monkeypatch.setattr(engine, "_OUT_OF_REACH_S", 0.2)
    assert "does not answer" in job.follow().exits[0].message


# A cluster of processes


@pytest.fixture
def cluster(tmp_path):
    """{environment variable: value} under which kubectl is the stand-in."""
    home, programs = tmp_path / "cluster", tmp_path / "programs"
    home.mkdir()
    programs.mkdir()
    script = programs / "kubectl"
    words = [sys.executable, str(Path(__file__).with_name("fake_kubectl.py"))]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    script.chmod(0o755)
    return {"FAKE_CLUSTER": str(home), "FAKE_PORT": str(free_port()), "PATH": f"{programs}:{os.environ['PATH']}"}


def command(config, nnodes):
    return [sys.executable, "-m", "harness", "launch", "-c", config, "--engine", "kubernetes", "--nnodes", str(nnodes),
            IMAGE, f"launch.python={sys.executable}"]  # fmt: skip


def launchers(run_):
    """Process ids of the pods' harness launch, by machine."""
    found = {}
    for pid, environ in run_.alive().items():
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"--stopped-code" in words and "PET_NODE_RANK" in environ:  # else it was read before the exec
                found[environ["PET_NODE_RANK"]] = pid
    return [found[number] for number in sorted(found)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_evicted_and_failed_run_ends_with_the_same_weights(tmp_path, stripes, cluster):
    """An evicted pod makes all stop and restart; an exception ends the run with one report; the command resumes it."""
    model = {"name": f"{MODELS}.Raises", "args": {"rank": 1, "step": 20, "step_s": 0.2}}
    settings = {"model": model, "train": {"log_every": 1, "epochs": 5}, "checkpoint": {"every_steps": 4}}
    whole, config = (write_config(tmp_path / name, stripes, **settings) for name in ("whole", "pods"))
    assert run(whole, 2, "model.args.step=100", "model.args.step_s=0") == [0, 0]
    folder = tmp_path / "pods" / "runs" / "run"
    with started(command(config, 2), tmp_path / "1.txt", **cluster) as run_:
        wait_for_steps(folder, 5, START_S)
        before = launchers(run_)
        os.kill(before[1], signal.SIGTERM)
        wait_until(lambda: len(now := launchers(run_)) == 2 and not set(now) & set(before), START_S, "both pods again")
        assert run_.wait(START_S + END_S) == 70, run_.text()
        assert not run_.alive()
    assert run_.text().count("failed: rank 1 on") == 1, run_.text()
    assert "ArithmeticError: a layer went wrong, only here" in run_.text()
    assert "resumed from" in run_.text()
    with started(command(config, 2), tmp_path / "2.txt", **cluster) as run_:  # fewer than 20 steps are left
        assert run_.wait(START_S + END_S) == 0, run_.text()
        assert not run_.alive()
    assert "done: " in run_.text().splitlines()[-1]
    assert_same_run(tmp_path / "whole" / "runs" / "run", folder)


@pytest.mark.slow
def test_stop_writes_a_checkpoint(tmp_path, stripes, cluster):
    """SIGTERM to the command, of a job of one pod."""
    config = write_config(tmp_path, stripes, model=SLOW, train={"log_every": 1, "epochs": 1000})
    with started(command(config, 1), tmp_path / "terminal.txt", **cluster) as run_:
        wait_for_steps(tmp_path / "runs" / "run", 1, START_S)
        run_.signal(signal.SIGTERM)
        assert run_.wait(END_S) == 75, run_.text()
        assert not run_.alive()
    assert "stopped early with a checkpoint" in run_.text().splitlines()[-1]
