#!/usr/bin/env bash
# Starts this node's share of a run: torchrun with one process for each GPU. The same line serves
# one node, every task of a Slurm job and every pod of a Kubernetes job.
#
#   bash scripts/cluster/node.sh pretrain_gr_ranking.py --gin-config-file FILE [trainer flags]
#
#   NNODES            nodes of the run (default 1)
#   NODE_RANK         this one's number (default 0)
#   MASTER_ADDR       name or address of node 0 (needed with several)
#   MASTER_PORT       a free port there (default 29500)
#   NPROC_PER_NODE    processes here (default: the GPUs, or 1 without any)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

nodes=${NNODES:-1}
if [ -z "${NPROC_PER_NODE:-}" ]; then
    NPROC_PER_NODE=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
    if [ "$NPROC_PER_NODE" -eq 0 ]; then NPROC_PER_NODE=1; fi
fi
# Threads of a process that collates and launches; the default of all cores fights over them.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

torchrun=.venv/bin/torchrun
[ -x "$torchrun" ] || torchrun=$(command -v torchrun) || {
    echo "no torchrun here: run scripts/setup.sh, or activate the environment that has it" >&2
    exit 1
}
if [ "$nodes" -eq 1 ]; then
    exec "$torchrun" --standalone --nproc_per_node "$NPROC_PER_NODE" "$@"
fi
: "${MASTER_ADDR:?"with NNODES = $nodes, MASTER_ADDR must name node 0"}"
exec "$torchrun" --nnodes "$nodes" --node_rank "${NODE_RANK:-0}" \
    --nproc_per_node "$NPROC_PER_NODE" \
    --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}" "$@"
