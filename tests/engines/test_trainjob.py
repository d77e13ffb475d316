"""launch/trainjob.yaml: Kubeflow's models accept it, and its command trains on two machines under Kubeflow's variables.

No cluster was used.
"""

from __future__ import annotations

import re
import shlex
import sys
from argparse import ArgumentParser
from contextlib import ExitStack

import pytest
import yaml

from harness.config import loader
from harness.engines import launch_command
from tests.conftest import ROOT
from tests.end_to_end.experiment import assert_same_run, run, write_config, write_images
from tests.end_to_end.processes import END_S, START_S, started
from tests.ranks import free_port

CONFIG, JOB = yaml.safe_load_all((ROOT / "launch" / "trainjob.yaml").read_text())
TRAINER = JOB["spec"]["trainer"]
(NODE,) = JOB["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
POD = NODE["template"]["spec"]["template"]["spec"]


def pod_variables(number: int, port: int = 29500, nproc: int = TRAINER["numProcPerNode"]) -> dict[str, str]:
    """What Kubeflow Trainer sets in pod ``number``: pkg/runtime/framework/plugins/torch/torch.go of release 2.3."""
    return {
        "PET_NNODES": str(TRAINER["numNodes"]), "PET_NPROC_PER_NODE": str(nproc), "PET_NODE_RANK": str(number),
        "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port),
    }  # fmt: skip


def pod_command(variables: dict[str, str]) -> list[str]:
    """The command after Kubernetes has replaced $(NAME), which it leaves alone if there is no such variable."""
    return [re.sub(r"\$\((\w+)\)", lambda m: variables.get(m[1], m[0]), word) for word in TRAINER["command"]]


def test_kubeflow_accepts_the_manifest():
    reason = "the manifest cannot be validated: pip install kubeflow-trainer-api"
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=reason)
    kind, config = models.TrainerV1alpha1TrainJob, models.IoK8sApiCoreV1ConfigMap
    assert kind.from_dict(JOB).to_dict() == JOB  # the models leave out fields that they do not know
    assert config.from_dict(CONFIG).to_dict() == CONFIG
    wrong = {**JOB, "spec": {**JOB["spec"], "trainer": {**TRAINER, "numProcsPerNode": 4}}}
    assert kind.from_dict(wrong).to_dict() != wrong
    with pytest.raises(ValueError, match="numNodes"):
        kind.from_dict({**JOB, "spec": {**JOB["spec"], "trainer": {**TRAINER, "numNodes": "2"}}})


def test_parts_of_the_manifest_fit_each_other(tmp_path):
    assert (JOB["apiVersion"], JOB["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    (container,) = POD["containers"]
    assert NODE["name"] == container["name"] == "node"  # of the runtime torch-distributed
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert volumes["config"]["configMap"]["name"] == CONFIG["metadata"]["name"]
    (name,) = CONFIG["data"]
    assert f"{mounts['config']}/{name}" in TRAINER["command"]
    assert TRAINER["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == str(TRAINER["numProcPerNode"])
    path = tmp_path / name
    path.write_text(CONFIG["data"][name])
    config = loader.load(str(path))
    assert config.output == mounts["runs"]
    assert config.batch.misfit(TRAINER["numNodes"] * TRAINER["numProcPerNode"]) is None
    assert config.launch.grace_s < POD["terminationGracePeriodSeconds"]


def test_command_is_one_of_harness_launch():
    parser = ArgumentParser()
    launch_command.add_arguments(parser)
    words = pod_command(pod_variables(1))
    assert words[:4] == ["python", "-m", "harness", "launch"]
    arguments = parser.parse_args(words[4:])
    assert (arguments.engine, arguments.nnodes.most, arguments.nproc.most) == ("torchrun", 2, 4)
    own = [f"launch.torchrun.{word}" for word in ("rendezvous=127.0.0.1:29500", "node_rank=1")]
    assert arguments.overrides == own
    assert "$" not in shlex.join(words)


@pytest.mark.slow
def test_two_pods_train_as_two_ranks(tmp_path, monkeypatch):
    data = write_images(tmp_path / "data")
    whole, pods = (write_config(tmp_path / name, data) for name in ("whole", "pods"))
    assert run(whole, 2) == [0, 0]
    port = free_port()
    with ExitStack() as stack:
        running = []
        for number in range(TRAINER["numNodes"]):
            variables = pod_variables(number, port, nproc=1)
            _, *words = pod_command(variables)
            words[words.index("-c") + 1] = str(pods)
            pod = started([sys.executable, *words], tmp_path / f"{number}.txt", **variables)
            running.append(stack.enter_context(pod))
        codes = [pod.wait(START_S + END_S) for pod in running]
        assert codes == [0, 0], [pod.text() for pod in running]
    assert_same_run(tmp_path / "whole" / "runs" / "run", tmp_path / "pods" / "runs" / "run")
