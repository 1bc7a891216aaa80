#!/usr/bin/env bash
#SBATCH --job-name=octet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=octet-%j.log
# A run on several nodes under Slurm, from the tree's root on a file system that all nodes see:
#
#   sbatch --nodes 4 scripts/cluster/slurm.sh pretrain_gr_ranking.py --gin-config-file FILE
#
# One task a node; torchrun starts the processes of its GPUs. A node that fails ends the job.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

export NNODES=$SLURM_JOB_NUM_NODES
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}

srun --kill-on-bad-exit=1 --label bash -c \
    'NODE_RANK=$SLURM_NODEID exec bash scripts/cluster/node.sh "$@"' node "$@"
