"""From settings to modules: every branch on the configuration is taken here, once."""

import logging

import torch
from torch import nn

from configs.data_schema import MAX_REPLICATED_ROWS
from configs.datasets import DATASETS
from configs.schema import DatasetArgs, EmbeddingArgs, ExperimentArgs, RankingArgs
from data.dataset import FeatureFacts
from model.ranking import RankingModel, RankingTrunk
from modules.embedding import ReplicatedTables, ShardedTables, TableSpec
from modules.hstu_config import HSTUConfig
from modules.hstu_stack import HSTUStack
from modules.losses import RankingObjective
from modules.mlp import MLP
from modules.preprocessor import SequencePreprocessor

logger = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def table_specs(experiment: ExperimentArgs, facts: FeatureFacts) -> list[TableSpec]:
    """The embedding tables of a run.

    Features without an EmbeddingArgs of their own get a table as large as their highest id asks
    for: items sharded over the ranks, actions and contextual features of up to 65,536 rows
    replicated, larger ones sharded.
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
        specs.append(
            TableSpec(
                name=args.table_name,
                feature_names=args.feature_names,
                num_rows=args.item_vocab_size_or_capacity,
                dim=network.hidden_size if dim is None else dim,
                is_sharded=is_sharded,
            )
        )
    return specs


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


def build_ranking_model(
    experiment: ExperimentArgs, facts: FeatureFacts, *, device_type: str
) -> tuple[RankingModel, list[TableSpec]]:
    """The model to run on "cpu" or "cuda", and all its table specs.

    The trunk is on the CPU, where its weights are drawn; sharded tables have no rows yet.

    Raises:
        NotImplementedError, ValueError: the kernel backend cannot run here.
    """
    network, ranking = experiment.network, experiment.ranking
    assert ranking is not None
    specs = table_specs(experiment, facts)
    dims = {feature: spec.dim for spec in specs for feature in spec.feature_names}
    config = HSTUConfig.from_network(
        network,
        disable_contextual_mask=experiment.resolved_disable_contextual_mask,
        device_type=device_type,
    )
    trunk = RankingTrunk(
        replicated=ReplicatedTables(
            [spec for spec in specs if not spec.is_sharded],
            init_std=network.embedding_init_std,
        ),
        preprocessor=SequencePreprocessor(
            facts,
            feature_dims=dims,
            hidden_size=network.hidden_size,
            max_seq_len=experiment.max_seq_len,
            num_position_buckets=network.num_position_buckets,
            scaling_seqlen=experiment.resolved_scaling_seqlen,
            dropout=network.input_dropout,
            dtype=DTYPES[network.dtype_str],
        ),
        stack=HSTUStack(config, network.num_layers),
        norm=nn.LayerNorm(network.hidden_size, eps=network.norm_epsilon),
        head=_head(network.hidden_size, ranking),
        objective=ranking_objective(experiment, facts),
        supervise_history=experiment.history_loss,
        has_candidates=experiment.max_num_candidates > 0 or experiment.split == "leave_one_out",
    )
    return RankingModel(ShardedTables([s for s in specs if s.is_sharded]), trunk), specs


def _head(hidden_size: int, ranking: RankingArgs) -> nn.Module:
    return MLP(
        hidden_size,
        ranking.prediction_head_arch,
        activation=ranking.prediction_head_act_type,
        bias=ranking.prediction_head_bias,
        dropout=ranking.prediction_head_dropout,
    )
