r"""Train an experiment of apex-harness on Flyte. Copy this file, edit the task's resources, and run it:

pyflyte run \
    flyte_workflow.py experiment --config configs/digits.yaml \
    --overrides '["launch.nproc=2", "launch.flyte.cpu=2", "launch.flyte.memory=4Gi"]'
pyflyte run --remote -p PROJECT -d DOMAIN \
    flyte_workflow.py experiment --config configs/digits.yaml \
    --overrides '["launch.nproc=2", "launch.flyte.cpu=2", "launch.flyte.memory=4Gi"]'

The first command trains on this machine, in the working folder. The second trains on a cluster: its image must contain
the project, and `output` of the configuration should be a disk or a URL that outlives the pods.
"""

from flytekit import Resources, task, workflow
from flytekit.types.file import FlyteFile

from harness.engines.flyte.task import Results, train_node

MACHINE = Resources(cpu="2", mem="4Gi")


@task(
    container_image=None,  # with the project installed; not used on this machine
    requests=MACHINE,
    limits=MACHINE,
    shared_memory=True,  # for the batches of loader processes
    retries=0,  # resume from the newest checkpoint; configuration and data errors are not retried
)
def train(config: FlyteFile, overrides: list[str]) -> Results:
    """One machine, with launch.nproc ranks."""
    return train_node(config.download(), overrides)


@workflow
def experiment(config: FlyteFile, overrides: list[str] = []) -> Results:  # noqa: B006 - Flyte copies it
    """The best weights, the validation metrics of each epoch, the summary, the full record and the report."""
    return train(config=config, overrides=overrides)
