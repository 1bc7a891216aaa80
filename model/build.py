"""From settings to modules: every branch on the configuration is taken here, once."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from configs.attention_plan import plan_attention
from configs.data_schema import MAX_REPLICATED_ROWS
from configs.datasets import DATASETS
from configs.schema import (
    DatasetArgs,
    DynamicEmbeddingArgs,
    EmbeddingArgs,
    ExperimentArgs,
    RankingArgs,
    TrainerArgs,
)
from data.batch import negatives_feature
from data.dataset import FeatureFacts
from model.ranking import RankingTrunk
from model.retrieval import RetrievalTrunk
from model.trunk import SequenceModel, Trunk
from modules.embedding import ReplicatedTables, ShardedTables, TableSpec
from modules.hstu_config import HSTUConfig, refusal_of_fp8_kernels
from modules.hstu_stack import HSTUStack
from modules.linear.parallel import TensorParallel
from modules.linear.plan import attach_engines, format_plan, plan_linears, warnings_of
from modules.linear.recipe import LinearRecipe
from modules.losses import RankingObjective, SampledSoftmax, Similarity
from modules.mlp import MLP
from modules.negatives import InBatchNegatives
from modules.preprocessor import SequencePreprocessor

logger = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Scores of targets against negatives that are held at a time: a CPU's cache, or a GPU's work.
_CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**26}


def table_specs(experiment: ExperimentArgs, facts: FeatureFacts) -> list[TableSpec]:
    """The embedding tables of a run.

    Features without an EmbeddingArgs of their own get a table as large as their highest id asks
    for: items sharded over the ranks, actions and contextual features of up to 65,536 rows
    replicated, larger ones sharded. The item table also serves the random negatives, if any.
    """
    network = experiment.network
    specs: list[TableSpec] = []
    given = {f: args for args in _embedding_args(experiment) for f in args.feature_names}
    placed: set[str] = set()
    for feature, num_rows in facts.vocab_sizes.items():
        args = given.get(feature)
        if args is None:
            args = EmbeddingArgs(
                feature_names=(feature,), table_name=feature, item_vocab_size_or_capacity=num_rows
            )
        if args.table_name in placed:
            continue
        placed.add(args.table_name)
        is_sharded = feature == facts.item_feature_name
        is_sharded |= args.item_vocab_size_or_capacity > MAX_REPLICATED_ROWS
        if args.sharding_type is not None:
            is_sharded = args.sharding_type == "model_parallel"
        is_contextual = feature in facts.contextual_feature_names
        dim = network.contextual_embedding_dim if is_contextual else network.item_embedding_dim
        served = [name for name in args.feature_names if name in facts.vocab_sizes]
        if facts.item_feature_name in served and _has_random_negatives(experiment):
            served.append(negatives_feature(facts.item_feature_name))
        width = network.hidden_size if dim is None else dim
        placement, evict_strategy = args.placement, None
        if isinstance(args, DynamicEmbeddingArgs):
            placement = "device" if args.fits_devices(width) else "host"
            evict_strategy = args.evict_strategy
        specs.append(
            TableSpec(
                name=args.table_name,
                feature_names=tuple(served),
                num_rows=args.item_vocab_size_or_capacity,
                dim=width,
                is_sharded=is_sharded,
                shard_by=args.shard_by,
                placement=placement,
                cache_ratio=args.cache_ratio,
                evict_strategy=evict_strategy,
            )
        )
    return specs


def _has_random_negatives(experiment: ExperimentArgs) -> bool:
    retrieval = experiment.retrieval
    return retrieval is not None and retrieval.negatives_sampler == "random"


def _embedding_args(experiment: ExperimentArgs) -> tuple[EmbeddingArgs, ...]:
    return experiment.dataset.embedding_args or ()


def ranking_objective(experiment: ExperimentArgs, facts: FeatureFacts) -> RankingObjective:
    """What the head's outputs mean (DESIGN.md section 4, labels)."""
    ranking, dataset = experiment.ranking, experiment.dataset
    assert ranking is not None
    width = ranking.prediction_head_arch[-1]
    if ranking.num_tasks > 1:
        return RankingObjective(kind="tasks", num_outputs=width, positive_from=1)
    threshold = dataset.like_threshold if isinstance(dataset, DatasetArgs) else None
    positive_from = facts.num_classes // 2
    if isinstance(dataset, DatasetArgs):
        ratings = DATASETS[dataset.dataset_name].ratings
        liked = DATASETS[dataset.dataset_name].liked_rating if threshold is None else threshold
        positive_from = sum(rating < liked for rating in ratings)
    kind = "binary" if width == 1 else "classes"
    return RankingObjective(kind=kind, num_outputs=width, positive_from=positive_from)


def build_model(
    experiment: ExperimentArgs,
    facts: FeatureFacts,
    *,
    device_type: str,
    parallel: TensorParallel | None = None,
) -> tuple[SequenceModel, list[TableSpec]]:
    """The model of the experiment's task to run on "cpu" or "cuda", and all its table specs.

    With `parallel` the stack has this rank's part of the heads.

    The trunk is on the CPU, where its weights are drawn; sharded tables have no rows yet.

    Raises:
        NotImplementedError, ValueError: the kernel backend cannot run here.
    """
    specs = table_specs(experiment, facts)
    parts = _trunk_parts(experiment, facts, specs, device_type=device_type, parallel=parallel)
    if experiment.retrieval is None:
        trunk = _ranking_trunk(experiment, facts, parts)
    else:
        trunk = _retrieval_trunk(experiment, facts, parts, device_type=device_type)
    _attach_fp8(trunk, experiment)
    tables = ShardedTables(
        [spec for spec in specs if spec.is_sharded],
        init_std=experiment.network.embedding_init_std,
    )
    return SequenceModel(tables, trunk), specs


def _attach_fp8(trunk: Trunk, experiment: ExperimentArgs) -> None:
    """Give the linears that run in FP8 their engines; say what runs how."""
    recipe = LinearRecipe.from_args(experiment.precision)
    if recipe is None:
        return
    plan = plan_linears(experiment)
    logger.info("linears:\n%s", format_plan(plan, recipe))
    for text in warnings_of(plan, experiment):
        logger.warning(text)
    attach_engines(trunk, plan, recipe)


def item_table(specs: Sequence[TableSpec], facts: FeatureFacts) -> TableSpec:
    """The table that the items are looked up in."""
    (spec,) = (spec for spec in specs if facts.item_feature_name in spec.feature_names)
    return spec


def _trunk_parts(
    experiment: ExperimentArgs,
    facts: FeatureFacts,
    specs: Sequence[TableSpec],
    *,
    device_type: str,
    parallel: TensorParallel | None,
) -> dict[str, Any]:
    """Arguments of `Trunk`."""
    network = experiment.network
    dims = {feature: spec.dim for spec in specs for feature in spec.feature_names}
    is_retrieval = experiment.retrieval is not None
    num_positions = network.num_position_buckets
    if is_retrieval:
        num_positions = min(num_positions, _trained_positions(experiment, facts))
    positions = "oldest" if is_retrieval else "newest"
    config = _layer_config(experiment, device_type=device_type, parallel=parallel)
    return {
        "replicated": ReplicatedTables(
            [spec for spec in specs if not spec.is_sharded],
            init_std=network.embedding_init_std,
        ),
        "preprocessor": SequencePreprocessor(
            facts,
            feature_dims={name: dim for name, dim in dims.items() if name in facts.vocab_sizes},
            hidden_size=network.hidden_size,
            max_seq_len=experiment.max_seq_len,
            num_position_buckets=num_positions,
            scaling_seqlen=experiment.resolved_scaling_seqlen,
            dropout=network.input_dropout,
            dtype=DTYPES[network.dtype_str],
            positions=positions if network.use_position_embedding else None,
            backend=config.elementwise_backend,
        ),
        "stack": HSTUStack(config, network.num_layers),
        "norm": nn.LayerNorm(network.hidden_size, eps=network.norm_epsilon),
    }


def _layer_config(
    experiment: ExperimentArgs, *, device_type: str, parallel: TensorParallel | None
) -> HSTUConfig:
    """What all layers are; says how their attention runs, where FP8 was asked for.

    Raises:
        NotImplementedError: FP8 attention without a kernel, under "auto" and with no filter.
    """
    plan = plan_attention(experiment, device_type=device_type)
    network, precision = experiment.network, experiment.precision
    max_num_users = _largest_batch(experiment.trainer)
    if plan.is_fp8 and network.kernel_backend == "auto" and device_type == "cuda":
        # An emulation is asked for by its name: under "auto" it would only be slow.
        lacking = refusal_of_fp8_kernels(
            network,
            precision,
            device_type=device_type,
            max_num_users=max_num_users,
            max_seq_len=experiment.max_seq_len,
        )
        if lacking is not None and not precision.auto_filter_attention:
            raise NotImplementedError(
                "MixedPrecisionArgs.auto_filter_attention = False cannot run with "
                f"NetworkArgs.kernel_backend = 'auto': {lacking}; what runs here: 'pytorch', "
                "which emulates it, or auto_filter_attention = True, which keeps BF16"
            )
        plan = plan if lacking is None else plan.without_kernels(lacking)
    config = HSTUConfig.from_network(
        network,
        disable_contextual_mask=experiment.resolved_disable_contextual_mask,
        device_type=device_type,
        deterministic=experiment.trainer.deterministic,
        max_num_users=max_num_users,
        max_seq_len=experiment.max_seq_len,
        precision=precision if plan.is_fp8 else None,
        parallel=parallel,
    )
    if precision.has_fp8_attention:
        runs_in = f"FP8 ({plan.mode})" if plan.is_fp8 else network.dtype_str
        logger.info(
            "attention of all layers: %s by %s, %s", runs_in, config.attention_backend, plan.reason
        )
    if plan.warning is not None:
        logger.warning(plan.warning)
    return config


def _largest_batch(trainer: TrainerArgs) -> int:
    """Users that go through the stack at a time, in training or in evaluation."""
    in_a_part = trainer.train_batch_size // trainer.gradient_accumulation_steps
    return max(in_a_part, trainer.eval_batch_size)


def _trained_positions(experiment: ExperimentArgs, facts: FeatureFacts) -> int:
    """Rows of a position table that counts from the oldest event: all that training queries.

    The newest event of a full training window predicts nothing, so a row of its own would be
    random where evaluation asks from there: it shares the row of the event before.
    """
    tokens_per_event = 1 if facts.action_feature_name is None else 2
    num_events = max(1, experiment.max_history_events - 1)
    return len(facts.contextual_feature_names) + 1 + tokens_per_event * num_events


def _ranking_trunk(
    experiment: ExperimentArgs, facts: FeatureFacts, parts: Mapping[str, Any]
) -> RankingTrunk:
    assert experiment.ranking is not None
    return RankingTrunk(
        **parts,
        head=_head(experiment.network.hidden_size, experiment.ranking),
        objective=ranking_objective(experiment, facts),
        supervise_history=experiment.history_loss,
        has_candidates=experiment.max_num_candidates > 0 or experiment.split == "leave_one_out",
    )


def _retrieval_trunk(
    experiment: ExperimentArgs, facts: FeatureFacts, parts: Mapping[str, Any], *, device_type: str
) -> RetrievalTrunk:
    retrieval, network = experiment.retrieval, experiment.network
    assert retrieval is not None
    in_batch = InBatchNegatives(
        num_negatives=retrieval.num_negatives,
        drops_repeats=device_type == "cpu",
        seed=experiment.trainer.seed,
    )
    item_dim = network.item_embedding_dim or network.hidden_size
    return RetrievalTrunk(
        **parts,
        query=nn.Identity()
        if item_dim == network.hidden_size
        else nn.Linear(network.hidden_size, item_dim),
        objective=SampledSoftmax(
            similarity=Similarity(
                temperature=retrieval.temperature,
                is_normalized=retrieval.normalize_embeddings,
                l2_norm_eps=retrieval.l2_norm_eps,
            ),
            max_chunk_elements=_CHUNK_ELEMENTS[device_type],
        ),
        negatives=None if _has_random_negatives(experiment) else in_batch,
        facts=facts,
    )


def _head(hidden_size: int, ranking: RankingArgs) -> nn.Module:
    return MLP(
        hidden_size,
        ranking.prediction_head_arch,
        activation=ranking.prediction_head_act_type,
        bias=ranking.prediction_head_bias,
        dropout=ranking.prediction_head_dropout,
    )
