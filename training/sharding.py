"""Places the sharded tables over the ranks (TorchRec) and fills every weight reproducibly."""

import hashlib
import logging
import math
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingDist
from torchrec.distributed.sharding.dp_sharding import DpSparseFeaturesDist
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.types import (
    CacheParams,
    CommOp,
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingPlan,
)

from configs.schema import TrainerArgs
from modules.embedding import IdRows, TableSpec
from training.distributed import World

logger = logging.getLogger(__name__)

_ROWS_PER_DRAW = 65_536
_MOST_DRAWING_THREADS = 16  # each holds a block of rows, in FP32
_COLUMN_UNIT = 4  # FBGEMM reads rows in vectors of this many numbers
_FEWEST_COLUMNS = 32  # a narrower part of a row costs as much to look up
_KERNELS = {"device": "fused", "host": "fused_uvm", "host_cached": "fused_uvm_caching"}


class _OneRankSharding(RwSequenceEmbeddingSharding):
    """Rows of a table that are all here: ids go straight to the lookup, rows straight back.

    TorchRec's own exchange with nobody costs a single GPU two waits a step for counts of ids, which
    the host knows anyway, and copies of ids and rows. The same rows in the same order, by kernels
    that move nothing between ranks.
    """

    def create_input_dist(self, device: torch.device | None = None) -> DpSparseFeaturesDist:
        return DpSparseFeaturesDist()

    def create_output_dist(self, device: torch.device | None = None) -> DpSequenceEmbeddingDist:
        return DpSequenceEmbeddingDist()


class _OneRankCollection(ShardedEmbeddingCollection):
    """A collection in a run of one process; names of weights and states are those of any run."""

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> RwSequenceEmbeddingSharding:
        assert sharding_type == "row_wise", sharding_type
        return _OneRankSharding(
            sharding_infos=sharding_infos,
            env=env,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
        )


class _OneRankSharder(EmbeddingCollectionSharder):
    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        return _OneRankCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )


def shard_tables(
    model: nn.Module,
    specs: Sequence[TableSpec],
    *,
    world: World,
    trainer: TrainerArgs,
) -> DistributedModelParallel:
    """Shards the model's EmbeddingCollections as their specs say and leaves the rest as it is.

    Gradients of the rows are summed over ranks, never averaged: the loss is normalised globally.

    Raises:
        ValueError: a table has too few rows to be spread over the ranks.
        RuntimeError: the tables do not fit the memory of the ranks.
    """
    specs = [spec for spec in specs if spec.is_sharded]
    set_gradient_division(False)
    sharder_class = EmbeddingCollectionSharder if world.world_size > 1 else _OneRankSharder
    codecs = _codecs(specs, trainer, world=world)
    sharders: list[ModuleSharder] = [
        sharder_class(qcomm_codecs_registry=codecs),
        ManagedCollisionEmbeddingCollectionSharder(
            EmbeddingCollectionSharder(qcomm_codecs_registry=codecs)
        ),
    ]
    for id_rows in (module for module in model.modules() if isinstance(module, IdRows)):
        id_rows.set_num_ranks(world.world_size)
    plan = _plan(model, specs, sharders, world=world, trainer=trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharded = DistributedModelParallel(
            model,
            device=world.device,
            plan=plan,
            sharders=sharders,
            init_data_parallel=False,
            init_parameters=False,
        )
    for collection in sharded.module.tables.dynamic:
        for kernel, _ in collection._table_to_tbe_and_index.values():
            kernel.reset_embedding_weight_momentum = partial(_forget_rows, kernel)
    return sharded


def _plan(
    model: nn.Module,
    specs: Sequence[TableSpec],
    sharders: list[ModuleSharder],
    *,
    world: World,
    trainer: TrainerArgs,
) -> ShardingPlan:
    """Which rank gets what of each table.

    A pure function of inputs that are equal on all, so each rank makes its own: a planner error
    then reaches every rank, where a broadcast would leave the others waiting.
    """
    prefetches = trainer.pipeline_type == "prefetch"
    device_bytes, host_bytes = _memory(world)
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world.world_size,
            local_world_size=world.local_world_size,
            compute_device=world.device.type,
            hbm_cap=device_bytes,
            ddr_cap=host_bytes,
        ),
        batch_size=trainer.train_batch_size,
        constraints={
            spec.module_name: _constraints(spec, world=world, prefetches=prefetches)
            for spec in specs
        },
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return planner.plan(model, sharders)
        except PlannerError as error:
            largest = max(specs, key=lambda s: s.num_rows * s.dim)
            raise RuntimeError(
                f"the tables do not fit the memory of {world.world_size} ranks; the largest is "
                f"{largest.name!r} with {largest.num_rows} rows of {largest.dim} numbers (as many "
                "rows as the highest id asks for). Start more processes, set NetworkArgs."
                "item_embedding_dim, or on a GPU EmbeddingArgs.placement = 'host_cached' "
                f"({str(error).splitlines()[0]})"
            ) from None


def _memory(world: World) -> tuple[int, int]:
    """Bytes of a rank's device and its share of the host, the smallest of all ranks: plans must
    agree. Left to itself TorchRec takes a GPU for one of 32 GiB; collective."""
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.local_world_size
    device_bytes = 0
    if world.device.type == "cuda":
        device_bytes = torch.cuda.get_device_properties(world.device).total_memory
    found = torch.tensor([device_bytes, host_bytes], device=world.device)
    if world.world_size > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
    device_bytes, host_bytes = found.tolist()
    return device_bytes, host_bytes


def _forget_rows(kernel: Any, *, pruned_indices: Tensor, **_where: Tensor) -> None:
    """Zeroes what the optimizer keeps for rows that got another id; TorchRec then draws the rows.

    In place of FBGEMM's own kernel, which exists for GPUs and row-wise Adagrad only: with another
    optimizer it leaves the state of the id before. The kernel serves one table.
    """
    (states,) = kernel.split_optimizer_states()
    for state in states:
        state[pruned_indices] = 0


def _constraints(spec: TableSpec, *, world: World, prefetches: bool) -> ParameterConstraints:
    """What the planner may choose from for a table: one way, but for shard_by = "planner"."""
    kinds = [spec.shard_by]
    if world.world_size == 1:
        kinds = ["row_wise"]  # nothing is split, and _OneRankCollection exchanges nothing
    elif spec.shard_by == "planner":
        kinds = ["row_wise", "table_wise", "column_wise"]
        if not _has_row_for_each(spec, world.world_size):
            kinds.remove("row_wise")
    elif spec.shard_by == "row_wise" and not _has_row_for_each(spec, world.world_size):
        rows_per_rank = -(-spec.num_rows // world.world_size)
        raise ValueError(
            f"EmbeddingArgs.item_vocab_size_or_capacity of table {spec.name!r} must give each of "
            f"{world.world_size} ranks a row, got {spec.num_rows} ({rows_per_rank} a rank); set "
            "EmbeddingArgs.sharding_type = 'data_parallel' for it, or start fewer processes"
        )
    cache = None
    # A dynamic table's sizes are about GPU memory; a CPU has one kind. Others were refused.
    kernel = "fused" if world.device.type == "cpu" else _KERNELS[spec.placement]
    if spec.placement == "host_cached":
        cache = CacheParams(load_factor=spec.cache_ratio, prefetch_pipeline=prefetches)
    return ParameterConstraints(
        sharding_types=kinds,
        compute_kernels=[kernel],
        min_partition=_columns_per_rank(spec.dim, world.world_size),
        cache_params=cache,
    )


def _has_row_for_each(spec: TableSpec, world_size: int) -> bool:
    """TorchRec gives every rank ceil(rows / ranks) rows; its kernels cannot do without any."""
    rows_per_rank = -(-spec.num_rows // world_size)
    return rows_per_rank * (world_size - 1) < spec.num_rows


def _columns_per_rank(dim: int, world_size: int) -> int:
    """Width of the parts of a column-wise table: a rank's share, unless that is too narrow."""
    fewest = min(_FEWEST_COLUMNS, dim // 2)
    share = max(-(-dim // world_size), fewest)
    return -(-share // _COLUMN_UNIT) * _COLUMN_UNIT


def _codecs(
    specs: Sequence[TableSpec], trainer: TrainerArgs, *, world: World
) -> dict[str, QuantizedCommCodecs] | None:
    """What rows and their gradients are cast to on their way between ranks.

    FP8 has a scale for each row, or part of one: as wide as fits every table.
    """
    kinds = (trainer.table_comms_forward, trainer.table_comms_backward)
    if kinds == ("fp32", "fp32"):
        return None
    if world.world_size == 1 or not specs:
        logger.warning("TrainerArgs.table_comms_* have no effect: no rows travel between ranks")
        return None
    widths = [spec.dim for spec in specs]
    widths += [
        min(width, spec.dim - begin)
        for spec in specs
        if spec.shard_by in ("column_wise", "planner")
        for width in (_columns_per_rank(spec.dim, world.world_size),)
        for begin in range(0, spec.dim, width)
    ]
    width = math.gcd(*widths) if "fp8" in kinds else None
    config = QCommsConfig(
        forward_precision=CommType(kinds[0]),
        backward_precision=CommType(kinds[1]),
        fp8_quantize_dim=width,
        fp8_quantize_dim_bwd=width,
    )
    if world.is_main:
        logger.info("rows of tables travel as %s, their gradients as %s", *kinds)
    # Collections send nothing else; and TorchRec's own registry turns bf16 into fp16 on gloo.
    return {CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name: get_qcomm_codecs(config)}


def drop_cached_rows(model: nn.Module) -> None:
    """Makes caches of tables in host memory read their rows anew, after those were overwritten.

    A cache that is left as it is goes on answering with the rows of before, and writes them back.
    """
    tables = cast(Any, model).module.tables
    for collection in (*tables.collections, *(one._embedding_module for one in tables.dynamic)):
        for lookup in collection._lookups:
            lookup.purge()


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


@torch.no_grad()
def initialize_dense(model: nn.Module, *, seed: int, name: str = "") -> None:
    """Draws each module's parameters from a CPU stream keyed by (seed, module name).

    So weights are equal on all ranks and devices, and adding a module moves no other's weights.
    A module draws through its ``reset_parameters``, which also speaks for its children; the
    process's own RNG state is untouched.
    """
    reset = getattr(model, "reset_parameters", None)
    if reset is None:
        for child_name, child in model.named_children():
            initialize_dense(child, seed=seed, name=f"{name}.{child_name}" if name else child_name)
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_generator(seed, name).initial_seed())
        reset()


@torch.no_grad()
def initialize_tables(
    model: DistributedModelParallel, *, seed: int, std: float, ranks_per_host: int
) -> None:
    """Fills the sharded rows with normal(0, std), whatever the number of ranks.

    Rows are drawn in blocks keyed by (seed, table, block), so a rank draws only the blocks that
    hold its own rows and the table is the same for any sharding.

    Args:
        ranks_per_host: processes that share the cores; each takes its share of them.
    """
    num_cores = len(os.sched_getaffinity(0))
    num_threads = min(_MOST_DRAWING_THREADS, max(1, num_cores // ranks_per_host))
    for name, weight in model.state_dict().items():
        if not (hasattr(weight, "local_shards") and name.endswith(".weight")):
            continue
        for shard in weight.local_shards():
            _fill(shard.tensor, name, size=tuple(weight.size()),
                  offsets=tuple(shard.metadata.shard_offsets), seed=seed, std=std,
                  num_threads=num_threads)  # fmt: skip


def _fill(
    rows: Tensor,
    name: str,
    *,
    size: tuple[int, ...],
    offsets: tuple[int, ...],
    seed: int,
    std: float,
    num_threads: int,
) -> None:
    first_row, first_column = offsets
    end_row, end_column = first_row + rows.size(0), first_column + rows.size(1)

    @torch.no_grad()
    def fill(begin: int) -> None:
        # Always a whole block: how many numbers are drawn must not depend on the sharding.
        end = min(begin + _ROWS_PER_DRAW, size[0])
        draw = torch.randn(end - begin, size[1], generator=_generator(seed, f"{name}/{begin}"))
        low, high = max(begin, first_row), min(end, end_row)
        own = draw[low - begin : high - begin, first_column:end_column]
        rows[low - first_row : high - first_row] = own.mul_(std)

    blocks = range(first_row // _ROWS_PER_DRAW * _ROWS_PER_DRAW, end_row, _ROWS_PER_DRAW)
    # A draw is one thread's work: ten million rows of 1024 take a minute of one.
    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        list(pool.map(fill, blocks))
