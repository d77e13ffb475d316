#!/usr/bin/env bash
# Train with NPROC processes on this machine (one per GPU, or per one or two CPU cores):
#
#   launch/single_node.sh NPROC CONFIG [key=value ...]
#   launch/single_node.sh 4 configs/digits.yaml train.epochs=3
#
# Optional, in the environment or by editing this file:
#   LAUNCHER         torch.distributed.launch (default), or torchrun: LAUNCHER=torchrun launch/single_node.sh ...
#   PYTHON           the interpreter; default: this project's .venv, else python3
#   OMP_NUM_THREADS  CPU threads per process; default: the cores of this machine divided by the processes.
#                    On a CPU, the last bits of a result depend on it: set it if runs must agree between machines.
#
# Ctrl-C or SIGTERM stops training with a checkpoint, and the same command resumes from it.
# Exit code: 0 when training is done, else 1. torch's launchers only print the ranks' exit code; harness launch
# --engine torchrun returns it.
set -euo pipefail

usage() {
    echo "error: $1" >&2
    echo "usage: [LAUNCHER=torchrun] $0 NPROC CONFIG [key=value ...]" >&2
    exit 2
}

[ $# -ge 2 ] || usage "NPROC and CONFIG are needed"
per_node=$1 config=$2
shift 2
[[ $per_node =~ ^[1-9][0-9]*$ ]] || usage "NPROC must be a number of processes, not '$per_node'"

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3

case ${LAUNCHER:-torch.distributed.launch} in
    torch.distributed.launch) module=torch.distributed.launch ;;
    torchrun) module=torch.distributed.run ;; # what the torchrun command runs, with the interpreter chosen above
    *) usage "LAUNCHER must be torch.distributed.launch or torchrun, not '$LAUNCHER'" ;;
esac

if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=$((cores > per_node ? cores / per_node : 1))
fi

# --standalone picks a free port, so that several runs fit on one machine. -W hides torch's advice to use torchrun.
# exec replaces this shell with the launcher, so that signals reach the ranks.
exec "$python" -W ignore::FutureWarning -m "$module" --standalone --nproc_per_node="$per_node" \
    "$root/driver.py" -c "$config" "$@"
