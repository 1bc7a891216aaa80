"""Places the sharded tables over the ranks (TorchRec) and fills every weight reproducibly."""

import hashlib
import logging
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingDist
from torchrec.distributed.sharding.dp_sharding import DpSparseFeaturesDist
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv

from modules.embedding import TableSpec
from training.distributed import World

logger = logging.getLogger(__name__)

_ROWS_PER_DRAW = 65_536


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
    batch_size: int,
) -> DistributedModelParallel:
    """Shards the model's EmbeddingCollections row-wise and leaves the rest as it is.

    Gradients of the rows are summed over ranks, never averaged: the loss is normalised globally.

    Raises:
        ValueError: a table has too few rows to be spread over the ranks.
        RuntimeError: the tables do not fit the memory of the ranks.
    """
    for spec in specs:
        _check_rows(spec, world.world_size)
    set_gradient_division(False)
    sharders = [EmbeddingCollectionSharder() if world.world_size > 1 else _OneRankSharder()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world.world_size,
            local_world_size=world.local_world_size,
            compute_device=world.device.type,
        ),
        batch_size=batch_size,
        constraints={
            spec.module_name: ParameterConstraints(
                sharding_types=["row_wise"], compute_kernels=["fused"]
            )
            for spec in specs
            if spec.is_sharded
        },
    )
    # The plan is a pure function of equal inputs, so each rank makes its own: a planner error
    # then reaches every rank, where a broadcast would leave the others waiting.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plan = planner.plan(model, sharders)
        except PlannerError as error:
            largest = max((s for s in specs if s.is_sharded), key=lambda s: s.num_rows * s.dim)
            raise RuntimeError(
                f"the tables do not fit the memory of {world.world_size} ranks; the largest is "
                f"{largest.name!r} with {largest.num_rows} rows of {largest.dim} numbers (as many "
                "rows as the highest id asks for). Start more processes, or set "
                f"NetworkArgs.item_embedding_dim ({str(error).splitlines()[0]})"
            ) from None
        return DistributedModelParallel(
            model,
            device=world.device,
            plan=plan,
            sharders=sharders,
            init_data_parallel=False,
            init_parameters=False,
        )


def _check_rows(spec: TableSpec, world_size: int) -> None:
    """TorchRec gives every rank ceil(rows / ranks) rows; its kernels cannot do without any."""
    rows_per_rank = -(-spec.num_rows // world_size)
    if spec.is_sharded and rows_per_rank * (world_size - 1) >= spec.num_rows:
        raise ValueError(
            f"EmbeddingArgs.item_vocab_size_or_capacity of table {spec.name!r} must give each of "
            f"{world_size} ranks a row, got {spec.num_rows} ({rows_per_rank} a rank); set "
            "EmbeddingArgs.sharding_type = 'data_parallel' for it, or start fewer processes"
        )


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
def initialize_tables(model: DistributedModelParallel, *, seed: int, std: float) -> None:
    """Fills the sharded rows with normal(0, std), whatever the number of ranks.

    Rows are drawn in blocks keyed by (seed, table, block), so a rank draws only the blocks that
    hold its own rows and the table is the same for any sharding.
    """
    for name, weight in model.state_dict().items():
        if not hasattr(weight, "local_shards"):
            continue
        for shard in weight.local_shards():
            _fill(shard.tensor, name, size=tuple(weight.size()),
                  offsets=tuple(shard.metadata.shard_offsets), seed=seed, std=std)  # fmt: skip


def _fill(
    rows: Tensor,
    name: str,
    *,
    size: tuple[int, ...],
    offsets: tuple[int, ...],
    seed: int,
    std: float,
) -> None:
    first_row, first_column = offsets
    end_row, end_column = first_row + rows.size(0), first_column + rows.size(1)
    for begin in range(first_row // _ROWS_PER_DRAW * _ROWS_PER_DRAW, end_row, _ROWS_PER_DRAW):
        # Always a whole block: how many numbers are drawn must not depend on the sharding.
        end = min(begin + _ROWS_PER_DRAW, size[0])
        draw = torch.randn(end - begin, size[1], generator=_generator(seed, f"{name}/{begin}"))
        low, high = max(begin, first_row), min(end, end_row)
        rows[low - first_row : high - first_row] = (
            std * draw[low - begin : high - begin, first_column:end_column]
        )


def world_group() -> dist.ProcessGroup | None:
    """The group that spans the run, or None in a single process."""
    return None if dist.get_world_size() == 1 else dist.GroupMember.WORLD
