# CUDA image for clusters. Build from the tree's root:
#
#   docker build -t octet .
#
# Run with enough shared memory: data workers and NCCL die on the container default of 64 MB.
#
#   docker run --rm -it --gpus all --ipc=host --ulimit memlock=-1 \
#       -v "$PWD/datasets:/opt/octet/datasets" -v "$PWD/runs:/opt/octet/runs" octet \
#       torchrun --nproc_per_node 8 pretrain_gr_ranking.py --gin-config-file movielens_ranking.gin
#
# (--shm-size=16g instead of --ipc=host where sharing the host's memory is not allowed.)
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ git python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/octet

# Packages first: this layer, the slow one, is kept as long as the pins stay the same.
# transformer-engine compiles its torch extension here; its optional NCCL expert-parallel part is off.
ENV NVTE_FRAMEWORK=pytorch NVTE_WITH_NCCL_EP=0 PIP_NO_CACHE_DIR=1
COPY requirements requirements
COPY scripts/setup.sh scripts/setup.sh
RUN bash scripts/setup.sh --set gpu
ENV PATH=/opt/octet/.venv/bin:$PATH

COPY . .

# Smoke import. The driver's libraries come from the host at run time, so the build borrows
# the toolkit's stand-ins for this one command.
RUN mkdir /tmp/stubs \
    && ln -s /usr/local/cuda/lib64/stubs/libcuda.so /tmp/stubs/libcuda.so.1 \
    && ln -s /usr/local/cuda/lib64/stubs/libnvidia-ml.so /tmp/stubs/libnvidia-ml.so.1 \
    && LD_LIBRARY_PATH=/tmp/stubs:$LD_LIBRARY_PATH python -c "import torch, fbgemm_gpu, torchrec, megatron.core, transformer_engine.pytorch, training.trainer" \
    && python pretrain_gr_ranking.py --gin-config-file benchmark_ranking.gin --validate-only \
    && rm -r /tmp/stubs
