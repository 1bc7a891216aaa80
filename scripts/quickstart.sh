#!/usr/bin/env bash
# From a fresh clone to test metrics on MovieLens-100k: set-up, data, training.
#
#   bash scripts/quickstart.sh [--nproc N] [--source PATH] [trainer flags]
#
#   --nproc N       processes (default 1)
#   --source PATH   ml-100k.zip or its folder, where there is no network
#   anything else goes to the trainer, for instance --gin-binding 'TrainerArgs.max_train_iters = 20'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

nproc=1 source=()
while [ $# -gt 0 ]; do
    case $1 in
        --nproc) nproc=${2:?"--nproc needs a number"} && shift 2 ;;
        --source) source=(--source "${2:?"--source needs a path"}") && shift 2 ;;
        *) break ;;
    esac
done

bash scripts/setup.sh
bin=$PWD/.venv/bin
"$bin/python" data/preprocess.py --dataset ml-100k ${source[@]+"${source[@]}"}

# One thread a process: at this size two are a quarter faster on an idle machine, and several times
# slower as soon as anything else runs, because idle threads spin.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$bin/torchrun" --standalone --nproc_per_node "$nproc" pretrain_gr_ranking.py \
    --gin-config-file movielens_ranking.gin "$@"
