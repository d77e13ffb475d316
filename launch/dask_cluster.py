"""Train an experiment on a Dask cluster: a running one, one started over SSH, or one on this machine. Copy and edit it.

    python launch/dask_cluster.py configs/digits.yaml train.epochs=3                          # on this machine
    python launch/dask_cluster.py --scheduler tcp://10.0.0.1:8786 --ranks 8 configs/digits.yaml
    python launch/dask_cluster.py --ssh node0 node0 node1 --ranks 2 -- configs/digits.yaml    # pip install asyncssh

A rank occupies one thread of one worker: start one worker per rank, or one per GPU (dask-cuda does). Workers need this
project in their environment, and the data at the same paths or at URLs. They need no shared disk: results are copied to
OUTPUT/NAME on this machine, and the same command resumes from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack

from distributed import Client, LocalCluster, SSHCluster

from harness.engines.dask import engine
from harness.errors import HarnessError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--scheduler", metavar="ADDRESS", help="address of a running cluster's scheduler")
    where.add_argument("--ssh", nargs="+", metavar="HOST", help="the scheduler's host, then the workers' hosts")
    parser.add_argument("--ranks", type=int, default=1, help="default: 1")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    with ExitStack() as opened:
        if arguments.ssh:  # one worker per host; {"nthreads": 1, "n_workers": 4} makes room for four ranks
            cluster = opened.enter_context(SSHCluster(arguments.ssh, worker_options={"nthreads": 1}))
        elif arguments.scheduler is None:
            cluster = opened.enter_context(
                LocalCluster(n_workers=arguments.ranks, threads_per_worker=1, memory_limit=0)
            )
        else:
            cluster = arguments.scheduler
        client = opened.enter_context(Client(cluster))
        overrides = [*arguments.overrides, "launch.nnodes=1", f"launch.nproc={arguments.ranks}"]
        try:
            return engine.run(client, arguments.config, overrides).exit_code
        except HarnessError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code


if __name__ == "__main__":  # the workers of a LocalCluster import this file
    sys.exit(main())
