"""Fields that do nothing in a given combination; setting one earns a warning, not a refusal."""

import dataclasses
from typing import Any

from configs.schema import (
    BenchmarkDatasetArgs,
    DatasetArgs,
    DynamicEmbeddingArgs,
    EmbeddingArgs,
    ExperimentArgs,
    FeatureArgs,
    MixedPrecisionArgs,
    OptimizerArgs,
    RandomDistribution,
    TensorModelParallelArgs,
    TrainerArgs,
)


def inert_in_class(built: Any) -> dict[str, str]:
    """Field -> reason, for what one object alone decides."""
    match built:
        case RandomDistribution():
            return _inert_in_distribution(built)
        case FeatureArgs() if not built.is_jagged:
            return {"seqlen_dist": "is_jagged is False, every user has max_sequence_length"}
        case DynamicEmbeddingArgs():
            return _inert_in_dynamic_table(built) | _inert_in_table(built)
        case EmbeddingArgs():
            return _inert_in_table(built)
        case OptimizerArgs():
            return _inert_in_optimizer(built)
        case TensorModelParallelArgs() if built.tensor_model_parallel_size == 1:
            return {"sequence_parallel": "tensor_model_parallel_size is 1"}
        case MixedPrecisionArgs():
            return _inert_in_precision(built)
        case TrainerArgs():
            return _inert_in_trainer(built)
    return {}


def _inert_in_trainer(trainer: TrainerArgs) -> dict[str, str]:
    inert: dict[str, str] = {}
    if not trainer.profile:
        reason = "profile is False"
        inert |= {"profile_step_start": reason, "profile_step_end": reason}
    elif (
        trainer.max_train_iters is not None and trainer.profile_step_start > trainer.max_train_iters
    ):
        inert["profile"] = (
            f"TrainerArgs.profile_step_start = {trainer.profile_step_start} comes after the last "
            f"step, TrainerArgs.max_train_iters = {trainer.max_train_iters}"
        )
    if trainer.nonfinite_policy == "stop":
        inert["nonfinite_budget"] = "nonfinite_policy is 'stop'"
    if trainer.early_stopping_metric is None:
        inert["early_stopping_patience"] = "early_stopping_metric is None"
    if trainer.ckpt_save_interval == 0:
        reason = "ckpt_save_interval is 0, nothing is saved"
        inert |= {"ckpt_save_dir": reason, "ckpt_keep_last": reason}
    return inert


def _inert_in_distribution(distribution: RandomDistribution) -> dict[str, str]:
    kind = distribution.dist_type
    reason = f"dist_type is {kind!r}"
    used = {"uniform": (), "normal": ("mean", "std"), "zipf": ("alpha",)}
    used["lognormal"] = used["normal"]
    return {name: reason for name in ("mean", "std", "alpha") if name not in used[kind]}


def _inert_in_table(table: EmbeddingArgs) -> dict[str, str]:
    if table.sharding_type == "data_parallel":
        reason = "sharding_type is 'data_parallel', every rank has a copy"
        return dict.fromkeys(("shard_by", "placement", "cache_ratio"), reason)
    if table.placement != "host_cached":
        return {"cache_ratio": f"placement is {table.placement!r}, not 'host_cached'"}
    return {}


def _inert_in_dynamic_table(table: DynamicEmbeddingArgs) -> dict[str, str]:
    order = ("global_hbm_for_values", "item_vocab_gpu_capacity", "item_vocab_gpu_capacity_ratio")
    given = [name for name in order if getattr(table, name) is not None]
    first, *others = given or [""]
    inert = dict.fromkeys(others, f"{first} is set and comes first")
    return inert | {"dist_type": "ids are spread over ranks by a hash"}


def _inert_in_optimizer(optimizer: OptimizerArgs) -> dict[str, str]:
    adam = optimizer.optimizer_str in ("adam", "adamw")
    if adam or optimizer.sparse_optimizer_str in ("auto", "adam"):
        return {}
    reason = f"neither optimizer_str = {optimizer.optimizer_str!r} nor the tables' is Adam"
    return dict.fromkeys(("adam_beta1", "adam_beta2", "adam_eps"), reason)


def _inert_in_precision(precision: MixedPrecisionArgs) -> dict[str, str]:
    names = [field.name for field in dataclasses.fields(precision)]
    names.remove("mixed_precision_dtype")
    if precision.mixed_precision_dtype is None:
        reason = "MixedPrecisionArgs.mixed_precision_dtype is None, nothing runs in FP8"
        return dict.fromkeys(names, reason)
    if not precision.has_fp8_linears:
        of_attention = ("hstu_attn_quantization_mode", "auto_filter_attention", "fp8_eval")
        names = [name for name in names if name not in of_attention]
        return dict.fromkeys(names, "no linear runs in FP8")
    inert: dict[str, str] = {}
    if not precision.has_fp8_attention:
        inert["auto_filter_attention"] = "hstu_attn_quantization_mode is 'bf16'"
    if precision.linear_recipe != "delayed":
        reason = f"linear_recipe is {precision.linear_recipe!r}, not 'delayed'"
        inert |= dict.fromkeys(("amax_history_len", "amax_compute_algo", "margin"), reason)
    if not precision.first_last_layers_bf16:
        kept = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        inert |= dict.fromkeys(kept, "first_last_layers_bf16 is False")
    if precision.linear_recipe == "rowwise":
        inert["fp8_wgrad"] = "weight gradients of linear_recipe = 'rowwise' are never FP8 products"
    if precision.linear_backend == "emulated":
        inert["auto_filter_small"] = "linear_backend = 'emulated' is never faster, nor filtered"
    return inert


def inert_in_experiment(experiment: ExperimentArgs) -> dict[str, str]:
    """ "Class.field" -> reason, for what only the whole run decides."""
    inert = {"NetworkArgs.embedding_backend": "only servers of the model read it"}
    network = experiment.network
    if experiment.num_contextuals == 0:
        reason = "there are no contextual features"
        inert["NetworkArgs.disable_contextual_mask"] = reason
        inert["NetworkArgs.contextual_embedding_dim"] = reason
    if experiment.max_num_candidates == 0:
        inert["NetworkArgs.target_group_size"] = "there are no candidates"
    if not network.use_position_embedding and not network.use_relative_position_bias:
        inert["NetworkArgs.num_position_buckets"] = "nothing depends on positions"
    if not network.use_time_bias:
        inert["NetworkArgs.num_time_buckets"] = "use_time_bias is False"
    if getattr(experiment.dataset, "train_on_validation", False):
        reason = "validation events are trained on (train_on_validation), so none are evaluated"
        inert["TrainerArgs.eval_interval"] = reason
        inert["TrainerArgs.max_eval_iters"] = reason
    if experiment.retrieval is not None:
        if experiment.split == "leave_one_out" and isinstance(experiment.dataset, DatasetArgs):
            reason = (
                "retrieval holds one event out with leave_one_out and trains without candidates"
            )
            inert["DatasetArgs.max_num_candidates"] = reason
        inert["NetworkArgs.target_group_size"] = "retrieval scores the catalogue, not candidates"
        inert["DatasetArgs.history_loss"] = "retrieval always supervises the history"
        inert["DatasetArgs.like_threshold"] = "retrieval has no like labels"
        inert["MixedPrecisionArgs.enable_fp8_for_prediction_head"] = "retrieval has no such head"
        if not experiment.retrieval.normalize_embeddings:
            inert["RetrievalArgs.l2_norm_eps"] = "normalize_embeddings is False"
    if experiment.ranking is not None and len(experiment.ranking.prediction_head_arch) == 1:
        reason = "the head has one layer"
        inert["RankingArgs.prediction_head_act_type"] = reason
        inert["RankingArgs.prediction_head_dropout"] = reason
    if isinstance(experiment.dataset, BenchmarkDatasetArgs):
        inert |= _inert_in_synthetic(experiment.dataset)
    return inert


def _inert_in_synthetic(dataset: BenchmarkDatasetArgs) -> dict[str, str]:
    used = {dataset.item_feature_name, dataset.action_feature_name}
    used |= set(dataset.contextual_feature_names)
    names = {name for group in dataset.feature_args for name in group.feature_names}
    idle = sorted(names - used)
    if not idle:
        return {}
    reason = f"{', '.join(idle)} is neither item, action nor contextual feature"
    return {"BenchmarkDatasetArgs.feature_args": reason}
