"""The batch script of engine slurm: its #SBATCH options, and the shell that runs on the first node."""

from __future__ import annotations

import re
import shlex

from harness.engines.base import Job, refuse
from harness.engines.slurm.settings import Settings
from harness.errors import LaunchError
from harness.runs import layout

# What the script writes before its records in the job's output. They are JSON: {"start": N}, and at the end
# {"last_exit_code": N} unless it has asked for another start.
RECORD = "harness-record: "

# launch/slurm.sbatch ends with the same lines, and a test compares them.
_BODY = r"""# The ranks meet on the first node, at the address that Slurm uses for it, on a free port. It is below
# 32768, where Linux begins to give ports to outgoing connections, so that none takes it before rank 0 does.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
MASTER_PORT=$("${rank[0]}" -c '
import random, socket
for port in random.sample(range(20000, 32768), 100):
    try:
        socket.socket().bind(("", port))
    except OSError:  # in use
        continue
    print(port)
    break')
export MASTER_ADDR MASTER_PORT

newest() { cat "$folder/@LATEST@" 2>/dev/null; }
before=$(newest)
rm -f "$folder"/@RANK_EXITS@ # of an earlier start
start=$((${SLURM_RESTART_COUNT:-0} + 1))
echo "harness: job $SLURM_JOB_ID, start $start, on $SLURM_JOB_NODELIST"
echo "@RECORD@{\"start\": $start}" # for harness launch, as at the end

# One rank per task. When one fails, the others exit by themselves, each with a report; --wait ends a rank that cannot.
# srun waits for a lost node until Slurm marks it as down, which takes minutes; harness launch ends srun with USR2.
srun --kill-on-bad-exit=0 --wait=20 --cpus-per-task="$SLURM_CPUS_PER_TASK" "${rank[@]}" &
trap 'kill -KILL $!' USR2
wait $!
code=$?

# Requeue after a stop (75) with a new checkpoint, and up to max_restarts times after a failure; never after an error
# in the configuration (2) or the data (65).
again=no
case $code in
    0 | 2 | 65) ;;
    75) [ "$(newest)" = "$before" ] || again=yes ;;
    *) [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_restarts" ] || again=yes ;;
esac
[ $again = no ] || scontrol requeue "$SLURM_JOB_ID" 2>/dev/null || again="no, scontrol requeue failed"
echo "harness: job $SLURM_JOB_ID: exit code $code, another start: $again"
[ "$again" = yes ] || echo "@RECORD@{\"last_exit_code\": $code}"
exit "$code"
"""
BODY = _BODY.replace("@LATEST@", f"{layout.CHECKPOINTS}/{layout.LATEST}")
BODY = BODY.replace("@RANK_EXITS@", f"{layout.LOGS}/{layout.RANK_EXITS}").replace("@RECORD@", RECORD)

_ELASTIC = "a Slurm job has a fixed number of nodes; remove the setting, or use launch.engine=torchrun"
_RENDEZVOUS = "the ranks of a Slurm job meet on its first node; remove the setting"


def settings_of(job: Job) -> Settings:
    settings: Settings = job.settings.engine_settings
    return settings


def script(job: Job) -> str:
    """The script for ``sbatch``. Raises LaunchError for settings that have no meaning for Slurm."""
    _check(job)
    settings, slurm = job.settings, settings_of(job)
    options = [f"job-name={job.config.name}", *_options(job)]
    blocks = [
        ["#!/usr/bin/env bash", *(f"#SBATCH --{option}" for option in options)],
        list(slurm.setup),
        [f"export {name}={shlex.quote(value)}" for name, value in job.environ().items()],
        [
            f"rank=({shlex.join(job.command())})",
            f"folder={shlex.quote(str(job.folder))}",
            f"max_restarts={settings.max_restarts}",
        ],
    ]
    return "\n\n".join(["\n".join(block) for block in blocks if block] + [BODY])


def _options(job: Job) -> list[str]:
    """The options of sbatch, without their dashes."""
    settings, slurm = job.settings, settings_of(job)
    cpus = slurm.cpus_per_task or settings.threads + job.config.data.num_workers
    values = {
        "nodes": settings.nnodes,
        "ntasks-per-node": settings.nproc,
        "cpus-per-task": cpus,
        "gpus-per-node": slurm.gpus_per_node,
        "mem": slurm.mem,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint and shlex.quote(slurm.constraint),
        "time": slurm.time,
        "signal": f"USR1@{slurm.signal_s}" if slurm.requeue else None,
        "output": slurm.output,
    }
    return [
        *(f"{name}={value}" for name, value in values.items() if value is not None),
        "open-mode=append",  # a requeued job continues its output file
        "requeue" if slurm.requeue else "no-requeue",
        *(option.removeprefix("--") for option in slurm.extra),
    ]


def _check(job: Job) -> None:
    refuse(job, "slurm", min_nodes=_ELASTIC, rendezvous=_RENDEZVOUS, node_rank=_RENDEZVOUS)
    slurm = settings_of(job)
    if not re.search(r"%\d*[jA]", slurm.output):
        raise LaunchError(
            f"launch.slurm.output={slurm.output}: that file would also receive the output of other jobs",
            where=job.path,
            hint="use %j, the job id, in the file name",
        )
    if slurm.requeue and slurm.time is not None and 0 < seconds(slurm.time) <= slurm.signal_s:
        raise LaunchError(
            f"launch.slurm.signal_s={slurm.signal_s} must be less than the time limit, {slurm.time} "
            f"({seconds(slurm.time)} s): the run would be stopped as soon as it starts",
            where=job.path,
            hint="raise launch.slurm.time, or lower launch.slurm.signal_s",
        )
    if not slurm.requeue and job.settings.max_restarts:
        raise LaunchError(
            f"launch.max_restarts={job.settings.max_restarts} and launch.slurm.requeue=false contradict each other",
            where=job.path,
            hint="remove one of them",
        )


def seconds(limit: str) -> int:
    """Seconds of a time limit: minutes, minutes:seconds, hours:minutes:seconds, or days-hours[:minutes[:seconds]]."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, secs = (parts + [0, 0])[:3]
    else:
        hours, minutes, secs = 0, *(parts + [0])[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs
