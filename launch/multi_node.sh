#!/usr/bin/env bash
# Train with NPROC processes on each of NNODES machines. Run this script on every node, each with its own NODE_RANK:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 launch/multi_node.sh NPROC CONFIG [key=value ...]
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 launch/multi_node.sh NPROC CONFIG [key=value ...]
#
# Required in the environment:
#   NNODES, NODE_RANK       number of machines, and the number of this one (0 to NNODES - 1)
#   MASTER_ADDR             address of node 0 that the other nodes can reach
#   MASTER_PORT             a free port on node 0 that the other nodes can reach
# Optional:
#   LAUNCHER, PYTHON, OMP_NUM_THREADS   as in single_node.sh (the same on all nodes)
#   GLOO_SOCKET_IFNAME      the network interface for CPU traffic; default: the one that reaches MASTER_ADDR
#   NCCL_SOCKET_IFNAME      the same for GPU traffic; default: NCCL's own choice
#
# Code, configuration and data must be the same on all nodes. Node 0 writes the run folder; on a shared disk it has the
# logs of all nodes. SIGTERM on any node stops all ranks with a checkpoint; the same commands resume from it.
# For restarts, and machines that join and leave, use harness launch --engine torchrun --nnodes 1:4 --max-restarts 3.
set -euo pipefail

usage() {
    echo "error: $1" >&2
    echo "usage: NNODES=N NODE_RANK=R MASTER_ADDR=HOST MASTER_PORT=PORT [LAUNCHER=torchrun] $0 NPROC CONFIG [key=value ...]" >&2
    exit 2
}

[ $# -ge 2 ] || usage "NPROC and CONFIG are needed"
per_node=$1 config=$2
shift 2
[[ $per_node =~ ^[1-9][0-9]*$ ]] || usage "NPROC must be a number of processes, not '$per_node'"
missing=
for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT; do
    [ -n "${!name:-}" ] || missing="$missing $name"
done
[ -z "$missing" ] || usage "not set in the environment:$missing"
[[ $NNODES =~ ^[1-9][0-9]*$ ]] || usage "NNODES must be a number of machines, not '$NNODES'"
[[ $NODE_RANK =~ ^[0-9]+$ && $NODE_RANK -lt $NNODES ]] || usage "NODE_RANK must be 0 to $((NNODES - 1)), not '$NODE_RANK'"
[[ $MASTER_PORT =~ ^[1-9][0-9]*$ ]] || usage "MASTER_PORT must be a port number, not '$MASTER_PORT'"

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

# A static rendezvous: ranks follow from NODE_RANK, not from host names, which may be equal. One port serves both
# launchers and ranks (TORCH_DISABLE_SHARE_RDZV_TCP_STORE would open a second, random one); harness/distributed/meeting.py
# separates the keys of restarted ranks in that store.
exec "$python" -W ignore::FutureWarning -m "$module" --nnodes="$NNODES" --node_rank="$NODE_RANK" \
    --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" --nproc_per_node="$per_node" \
    "$root/driver.py" -c "$config" "$@"
