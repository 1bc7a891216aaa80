"""Checks across classes: combinations that cannot work, refused before anything is built."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from configs.attention_plan import FP8_HEAD_DIMS
from configs.data_schema import (
    BenchmarkDatasetArgs,
    DatasetArgs,
    DynamicEmbeddingArgs,
    FeatureArgs,
)
from configs.datasets import DATASETS
from configs.linear_plan import check_linears
from configs.rules import ConfigError, did_you_mean
from configs.table_checks import check_item_rows, check_tables, check_widths
from configs.task_schema import is_retrieval_metric

if TYPE_CHECKING:
    from configs.schema import ExperimentArgs

_RANKING_METRICS = ("auc", "gauc", "ne", "logloss", "accuracy", "auc_multiclass", "loss")


def group_of(dataset: BenchmarkDatasetArgs, feature_name: str) -> FeatureArgs:
    """The group that generates a feature; raises ConfigError when none does."""
    for group in dataset.feature_args:
        if feature_name in group.feature_names:
            return group
    known = [name for group in dataset.feature_args for name in group.feature_names]
    raise ConfigError(
        f"BenchmarkDatasetArgs.feature_args must generate every feature that is used, got no "
        f"feature {feature_name!r}; {did_you_mean(feature_name, known) or 'add it'}",
        "BenchmarkDatasetArgs.feature_args",
        "BenchmarkDatasetArgs.item_feature_name",
        "BenchmarkDatasetArgs.action_feature_name",
        "BenchmarkDatasetArgs.contextual_feature_names",
    )


def resolve_contextual_mask(experiment: "ExperimentArgs") -> tuple[bool, str]:
    """Whether contextual tokens are causal, and why.

    A contextual token that sees the whole history hands it, one layer later, to every history
    token. So it may see it only when no history token is supervised or there is one layer.
    """
    asked = experiment.network.disable_contextual_mask
    if asked is not None:
        return asked, "NetworkArgs.disable_contextual_mask is set"
    if experiment.num_contextuals == 0:
        return False, "there are no contextual features"
    if not experiment.history_loss:
        return False, "no history position is supervised, so contextual tokens may see all of it"
    if experiment.network.num_layers == 1:
        return False, "one layer cannot hand the history on from contextual tokens"
    return True, "history positions are supervised and would see their own labels through it"


def check_experiment(experiment: "ExperimentArgs") -> None:
    """Raises ConfigError for the first combination that cannot work."""
    checks: tuple[Callable[[ExperimentArgs], None], ...] = (
        _check_task,
        _check_dataset,
        check_widths,
        check_item_rows,
        _check_positions,
        _check_supervision,
        _check_mask,
        _check_head,
        _check_parallel,
        _check_precision,
        check_linears,
        _check_metric,
        _check_table_decay,
    )
    for check in checks:
        check(experiment)


def _check_task(experiment: "ExperimentArgs") -> None:
    if (experiment.ranking is None) == (experiment.retrieval is None):
        count = "both" if experiment.ranking is not None else "neither"
        raise ConfigError(
            f"ExperimentArgs must hold either ranking or retrieval, got {count}; give one of them"
        )


def _check_dataset(experiment: "ExperimentArgs") -> None:
    dataset = experiment.dataset
    if isinstance(dataset, DatasetArgs):
        _check_contextual_choice(dataset)
        _check_ties(dataset)
        action = filter(None, (experiment.action_feature_name,))
        used = (experiment.item_feature_name, *action, *experiment.contextual_feature_names)
        check_tables(experiment, used)
        return
    groups = dataset.feature_args
    names = [name for group in groups for name in group.feature_names]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"BenchmarkDatasetArgs.feature_args must name each feature once, got {name!r} "
                f"{names.count(name)} times; remove one",
                "BenchmarkDatasetArgs.feature_args",
            )
    _check_item_group(dataset)
    _check_contextual_groups(dataset)
    check_tables(experiment, names)
    _check_values_fit(dataset, experiment)


def _check_ties(dataset: DatasetArgs) -> None:
    if dataset.shuffle_ties and dataset.dataset_name.startswith("kuairand"):
        raise ConfigError(
            f"DatasetArgs.shuffle_ties must be False for {dataset.dataset_name}, got True; its "
            "events are ordered by milliseconds, so the order inside a second is known: remove it",
            "DatasetArgs.shuffle_ties",
            "DatasetArgs.dataset_name",
        )


def _check_contextual_choice(dataset: DatasetArgs) -> None:
    known, asked = DATASETS[dataset.dataset_name].contextual_feature_names, []
    for name in dataset.contextual_feature_names or ():
        if name not in known or name in asked:
            hint = "" if name in asked else did_you_mean(name, known)
            raise ConfigError(
                f"DatasetArgs.contextual_feature_names must name features of "
                f"{dataset.dataset_name} ({', '.join(known)}), each once, got {name!r}; "
                f"{hint or 'remove it'}",
                "DatasetArgs.contextual_feature_names",
                "DatasetArgs.dataset_name",
            )
        asked.append(name)


def _check_item_group(dataset: BenchmarkDatasetArgs) -> None:
    items = group_of(dataset, dataset.item_feature_name)
    if items.max_sequence_length <= dataset.max_num_candidates:
        raise ConfigError(
            f"BenchmarkDatasetArgs.max_num_candidates must be < max_sequence_length = "
            f"{items.max_sequence_length} of the item feature, which counts candidates, got "
            f"{dataset.max_num_candidates}; leave at least one history event",
            "BenchmarkDatasetArgs.max_num_candidates",
            "BenchmarkDatasetArgs.feature_args",
        )
    action = dataset.action_feature_name
    if action is not None and group_of(dataset, action) is not items:
        raise ConfigError(
            f"BenchmarkDatasetArgs.action_feature_name must be in the FeatureArgs of the item "
            f"feature, got {action!r} in another one; items and actions share their lengths, so "
            f"put both in one feature_names",
            "BenchmarkDatasetArgs.action_feature_name",
            "BenchmarkDatasetArgs.feature_args",
        )


def _check_contextual_groups(dataset: BenchmarkDatasetArgs) -> None:
    names = dataset.contextual_feature_names
    for name in names:
        group = group_of(dataset, name)
        events = (dataset.item_feature_name, dataset.action_feature_name)
        if name in events or names.count(name) > 1:
            raise ConfigError(
                f"BenchmarkDatasetArgs.contextual_feature_names must name other features than "
                f"items and actions, each once, got {name!r}; remove it",
                "BenchmarkDatasetArgs.contextual_feature_names",
            )
        if group.max_sequence_length != 1:
            raise ConfigError(
                f"FeatureArgs.max_sequence_length must be 1 for the contextual feature {name!r} "
                f"(one id per user), got {group.max_sequence_length}; set 1",
                "BenchmarkDatasetArgs.contextual_feature_names",
                "BenchmarkDatasetArgs.feature_args",
            )


def _check_values_fit(dataset: BenchmarkDatasetArgs, experiment: "ExperimentArgs") -> None:
    rows: dict[str, float] = {
        # A dynamic table takes any id.
        name: math.inf
        if isinstance(table, DynamicEmbeddingArgs)
        else table.item_vocab_size_or_capacity
        for table in dataset.embedding_args
        for name in table.feature_names
    }
    action = () if experiment.action_feature_name is None else (experiment.action_feature_name,)
    for name in (dataset.item_feature_name, *action, *dataset.contextual_feature_names):
        if name not in rows:
            raise ConfigError(
                f"BenchmarkDatasetArgs.embedding_args must hold a table for every feature that is "
                f"used, got none for {name!r}; add one with feature_names = [{name!r}]",
                "BenchmarkDatasetArgs.embedding_args",
            )
        values = (group_of(dataset, name).value_dists or {}).get(name)
        if values is not None and max(values.low + 1, values.high or 0) > rows[name]:
            raise ConfigError(
                f"FeatureArgs.value_dists must draw ids in [0, {rows[name]}), the table of "
                f"{name!r}, got [{values.low}, {values.high}); lower them or raise "
                "item_vocab_size_or_capacity",
                "BenchmarkDatasetArgs.feature_args",
                "BenchmarkDatasetArgs.embedding_args",
            )


def _check_positions(experiment: "ExperimentArgs") -> None:
    if not experiment.network.use_position_embedding:
        return
    # Retrieval tells the item from the action token in its row, too.
    history = 1
    if experiment.retrieval is not None and experiment.action_feature_name is not None:
        history = 2
    count, least = experiment.network.num_position_buckets, experiment.num_contextuals + 1 + history
    if count < least:
        raise ConfigError(
            f"NetworkArgs.num_position_buckets must be >= {least} (a row for each of "
            f"{experiment.num_contextuals} contextual features, one for candidates and {history} "
            f"for the history), got {count}; raise it",
            "NetworkArgs.num_position_buckets",
        )


def _check_supervision(experiment: "ExperimentArgs") -> None:
    if experiment.retrieval is not None and experiment.max_history_events < 2:
        raise ConfigError(
            f"{type(experiment.dataset).__name__} must leave at least 2 history events for "
            f"retrieval (each is predicted from the one before), got "
            f"{experiment.max_history_events}; raise max_history_seqlen or max_sequence_length",
            "DatasetArgs.max_history_seqlen",
            "BenchmarkDatasetArgs.feature_args",
        )
    if experiment.max_num_candidates == 0 and not experiment.history_loss:
        raise ConfigError(
            "DatasetArgs.history_loss must not be False when max_num_candidates is 0, got False; "
            "nothing would be supervised: set max_num_candidates or leave history_loss out",
            "DatasetArgs.history_loss",
            "DatasetArgs.max_num_candidates",
        )
    if not experiment.network.is_causal:
        reason = (
            "candidates must not be seen by the history"
            if experiment.max_num_candidates > 0
            else "supervised history positions would see their own labels"
        )
        raise ConfigError(
            f"NetworkArgs.is_causal must be True for this data, got False; {reason}: remove it",
            "NetworkArgs.is_causal",
            f"{type(experiment.dataset).__name__}.max_num_candidates",
        )


def _check_mask(experiment: "ExperimentArgs") -> None:
    network = experiment.network
    leaks = experiment.history_loss and experiment.num_contextuals > 0 and network.num_layers > 1
    if network.disable_contextual_mask is False and leaks:
        supervised_by = (
            "retrieval supervises the history"
            if experiment.retrieval is not None
            else "DatasetArgs.history_loss supervises the history (None = wherever "
            "max_num_candidates is 0)"
        )
        raise ConfigError(
            f"NetworkArgs.disable_contextual_mask must not be False here, got False; "
            f"{supervised_by}, and with {network.num_layers} layers contextual tokens would hand "
            "each position its own label: leave it out or set True",
            "NetworkArgs.disable_contextual_mask",
            "DatasetArgs.history_loss",
        )


def _check_head(experiment: "ExperimentArgs") -> None:
    ranking, dataset = experiment.ranking, experiment.dataset
    threshold = dataset.like_threshold if isinstance(dataset, DatasetArgs) else None
    if threshold is not None:
        _check_threshold(experiment, threshold)
    if ranking is None:
        return
    facts = experiment.facts
    num_tasks, width = ranking.num_tasks, ranking.prediction_head_arch[-1]
    fields = ["RankingArgs.prediction_head_arch", "RankingArgs.num_tasks"]
    if facts is not None:
        fields.append("DatasetArgs.dataset_name")
        most = facts.num_classes if facts.label_kind == "bitmask" else 1
        if num_tasks > most:
            raise ConfigError(
                f"RankingArgs.num_tasks must be at most {most} for {dataset_name(experiment)}, got "
                f"{num_tasks}; an event has {most} label{'s' if most > 1 else ''} there",
                *fields[1:],
            )
    if num_tasks > 1:
        expected, why = num_tasks, f"num_tasks = {num_tasks}: one logit per task"
    elif facts is None:
        return
    elif threshold is not None:
        expected, why = 1, f"like_threshold = {threshold:g}: one logit"
        fields.append("DatasetArgs.like_threshold")
    elif facts.label_kind == "bitmask":
        expected, why = 1, "num_tasks = 1: one logit for bit 0"
    else:
        expected, why = facts.num_classes, f"{dataset_name(experiment)}: one logit per rating"
    if width != expected:
        raise ConfigError(
            f"RankingArgs.prediction_head_arch must end with {expected} ({why}), got "
            f"{list(ranking.prediction_head_arch)}; write "
            f"{[*ranking.prediction_head_arch[:-1], expected]}",
            *fields,
        )


def dataset_name(experiment: "ExperimentArgs") -> str:
    """The name of the real data set."""
    assert isinstance(experiment.dataset, DatasetArgs)
    return experiment.dataset.dataset_name


def _check_threshold(experiment: "ExperimentArgs", threshold: float) -> None:
    facts = experiment.facts
    assert facts is not None
    ratings = facts.ratings
    if not ratings or not ratings[0] < threshold <= ratings[-1]:
        rule = (
            f"must lie in ({ratings[0]:g}, {ratings[-1]:g}]"
            if ratings
            else "must be None: there are no ratings"
        )
        raise ConfigError(
            f"DatasetArgs.like_threshold {rule} for {dataset_name(experiment)}, got {threshold:g}; "
            f"{'otherwise all labels are equal' if ratings else 'remove it'}",
            "DatasetArgs.like_threshold",
            "DatasetArgs.dataset_name",
        )


def _check_parallel(experiment: "ExperimentArgs") -> None:
    size = experiment.parallel.tensor_model_parallel_size
    network = experiment.network
    if network.num_attention_heads % size:
        raise ConfigError(
            f"NetworkArgs.num_attention_heads must be divisible by tensor_model_parallel_size = "
            f"{size}, got {network.num_attention_heads}; change one of them",
            "NetworkArgs.num_attention_heads",
            "TensorModelParallelArgs.tensor_model_parallel_size",
        )


def _check_precision(experiment: "ExperimentArgs") -> None:
    precision, network = experiment.precision, experiment.network
    kept = precision.num_bf16_layers_at_start + precision.num_bf16_layers_at_end
    alone = not precision.enable_fp8_for_prediction_head or experiment.ranking is None
    too_many = kept > network.num_layers or (kept == network.num_layers and alone)
    if precision.has_fp8_linears and too_many:
        raise ConfigError(
            f"MixedPrecisionArgs.num_layers_at_start_in_bf16 + num_layers_at_end_in_bf16 must be < "
            f"NetworkArgs.num_layers = {network.num_layers}, got "
            f"{precision.num_bf16_layers_at_start} + {precision.num_bf16_layers_at_end}; no linear "
            "would run in FP8: lower them, or set linear_recipe = None for FP8 attention alone",
            "MixedPrecisionArgs.num_layers_at_start_in_bf16",
            "MixedPrecisionArgs.num_layers_at_end_in_bf16",
            "MixedPrecisionArgs.first_last_layers_bf16",
            "NetworkArgs.num_layers",
        )
    mode = precision.hstu_attn_quantization_mode
    lacking = mode in ("per_row", "per_batch")
    if precision.has_fp8_attention and network.kernel_backend == "triton" and lacking:
        raise ConfigError(
            f"MixedPrecisionArgs.hstu_attn_quantization_mode must be bf16, cast, per_block, "
            f"per_head or per_tensor with kernel_backend = 'triton', got {mode!r}; choose one of "
            "these or set NetworkArgs.kernel_backend = 'cutlass'",
            "MixedPrecisionArgs.hstu_attn_quantization_mode",
            "NetworkArgs.kernel_backend",
        )
    if precision.has_fp8_attention and network.kernel_backend in ("triton", "cutlass"):
        _check_fp8_heads(experiment)


def _check_fp8_heads(experiment: "ExperimentArgs") -> None:
    """Head dims that no FP8 kernel has; those that auto_filter_attention leaves in BF16 may be."""
    network, precision = experiment.network, experiment.precision
    dims = (network.attention_dim, network.linear_dim)
    is_filtered = precision.auto_filter_attention and network.kernel_backend == "triton"
    if dims[0] == dims[1] and dims[0] in FP8_HEAD_DIMS:
        return
    if is_filtered and dims[0] < FP8_HEAD_DIMS[0]:
        return
    field = "kv_channels" if dims[0] not in FP8_HEAD_DIMS else "linear_channels"
    got = dims[0] if field == "kv_channels" else f"{dims[1]} beside kv_channels = {dims[0]}"
    rule = "64, 128 or 256" if field == "kv_channels" else "None or equal to kv_channels"
    raise ConfigError(
        f"NetworkArgs.{field} must be {rule} for FP8 attention with kernel_backend = "
        f"{network.kernel_backend!r}, got {got}; choose one of these or set "
        'MixedPrecisionArgs.hstu_attn_quantization_mode = "bf16"',
        f"NetworkArgs.{field}",
        "MixedPrecisionArgs.hstu_attn_quantization_mode",
        "NetworkArgs.kernel_backend",
    )


def _check_metric(experiment: "ExperimentArgs") -> None:
    metric = experiment.trainer.early_stopping_metric
    if metric is None:
        return
    if getattr(experiment.dataset, "train_on_validation", False):
        raise ConfigError(
            f"TrainerArgs.early_stopping_metric must be None when DatasetArgs.train_on_validation "
            f"is True, got {metric!r}; events that are trained on measure nothing: remove one",
            "TrainerArgs.early_stopping_metric",
            "DatasetArgs.train_on_validation",
        )
    if experiment.ranking is not None:
        known, names = metric in _RANKING_METRICS, list(_RANKING_METRICS)
        allowed = ", ".join(_RANKING_METRICS)
    else:
        known = metric == "loss" or (metric == metric.lower() and is_retrieval_metric(metric))
        names = ["hr@10", "ndcg@10", "mrr", "loss"]
        allowed = "hr@k, ndcg@k, mrr, loss"
    if not known:
        raise ConfigError(
            f"TrainerArgs.early_stopping_metric must be one of {allowed} in a {experiment.task} "
            f"run, got {metric!r}; {did_you_mean(metric.lower(), names) or 'choose one'}",
            "TrainerArgs.early_stopping_metric",
        )


def _check_table_decay(experiment: "ExperimentArgs") -> None:
    optimizer = experiment.optimizer
    has_decay = optimizer.sparse_optimizer_str not in ("adagrad", "sgd")
    if optimizer.sparse_weight_decay > 0 and not has_decay:
        raise ConfigError(
            f"OptimizerArgs.sparse_weight_decay must be 0 with sparse_optimizer_str = "
            f"{optimizer.sparse_optimizer_str!r}, whose table kernel ignores it, got "
            f"{optimizer.sparse_weight_decay}; set it to 0 or choose 'rowwise_adagrad' or 'adam'",
            "OptimizerArgs.sparse_weight_decay",
            "OptimizerArgs.sparse_optimizer_str",
        )
