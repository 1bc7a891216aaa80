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

# Physical cores this process may use: hyper-threads do not help dense arithmetic.
physical_cores() {
    local allowed physical
    allowed=$(nproc)
    physical=$(lscpu -p=CORE,SOCKET 2>/dev/null | grep -v '^#' | sort -u | wc -l)
    if [ "$physical" -ge 1 ] && [ "$physical" -lt "$allowed" ]; then echo "$physical"; else echo "$allowed"; fi
}

bash scripts/setup.sh
bin=$PWD/.venv/bin
"$bin/python" data/preprocess.py --dataset ml-100k ${source[@]+"${source[@]}"}

if [ -z "${OMP_NUM_THREADS:-}" ]; then
    # torchrun sets 1 for each of several processes; one process may have the whole machine.
    OMP_NUM_THREADS=1
    [ "$nproc" != 1 ] || OMP_NUM_THREADS=$(physical_cores)
    export OMP_NUM_THREADS
fi
# Idle threads sleep instead of spinning: on a machine that others use too, spinning costs ten times.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
exec "$bin/torchrun" --standalone --nproc_per_node "$nproc" pretrain_gr_ranking.py \
    --gin-config-file movielens_ranking.gin "$@"
