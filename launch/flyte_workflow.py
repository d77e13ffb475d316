r"""Trains an experiment of apex-harness on Flyte. Copy this page, edit what the task asks for, and run it:

pyflyte run \
    flyte_workflow.py experiment --config configs/digits.yaml \
    --overrides '["launch.nproc=2", "launch.flyte.cpu=2", "launch.flyte.memory=4Gi"]'
pyflyte run --remote -p PROJECT -d DOMAIN \
    flyte_workflow.py experiment --config configs/digits.yaml \
    --overrides '["launch.nproc=2", "launch.flyte.cpu=2", "launch.flyte.memory=4Gi"]'

The first trains on this machine, in the working folder. The second does on a cluster: the image holds the project, and
`output` of the configuration should lie on a disk or in a store that outlives the pods.
"""

from flytekit import Resources, task, workflow
from flytekit.types.file import FlyteFile

from harness.engines.flyte.task import Results, train_node

MACHINE = Resources(cpu="2", mem="4Gi")


@task(
    container_image=None,  # with the project in it; a run of this machine uses none
    requests=MACHINE,
    limits=MACHINE,
    shared_memory=True,  # loader processes hand their batches over in it
    retries=0,  # from the newest checkpoint, after a stop or a failure; a wrong configuration is not retried
)
def train(config: FlyteFile, overrides: list[str]) -> Results:
    """One machine, with launch.nproc ranks of the configuration."""
    return train_node(config.download(), overrides)


@workflow
def experiment(config: FlyteFile, overrides: list[str] = []) -> Results:  # noqa: B006 - Flyte copies it
    """The best weights, the metrics of each epoch, the summary, the whole record and the report of an experiment."""
    return train(config=config, overrides=overrides)
