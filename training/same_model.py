"""Whether a checkpoint's weights mean the same under the present settings."""

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from configs.loader import ConfigError, load_experiment
from configs.schema import BenchmarkDatasetArgs, DynamicEmbeddingArgs, ExperimentArgs
from training.checkpoint import CONFIG_NAME, read_state

# Settings that leave the function a model computes in evaluation as it is.
_FREE = {
    "kernel_backend",
    "embedding_backend",
    "recompute_input_layernorm",
    "recompute_input_silu",
    "hidden_dropout",
    "input_dropout",
    "prediction_head_dropout",
    "eval_metrics",
    "num_negatives",
    "negatives_sampler",
    "temperature",
}


def check_same_model(checkpoint: Path, experiment: ExperimentArgs) -> None:
    """Refuses a checkpoint whose settings make another model than the present ones.

    Raises:
        ValueError: naming the field, both values and the way out; or ``checkpoint`` is none.
    """
    _compare(checkpoint, experiment, _model_settings, "makes another model of the same weights")
    _check_same_ranks(checkpoint, experiment)


def _check_same_ranks(checkpoint: Path, experiment: ExperimentArgs) -> None:
    """Ids of a dynamic table are dealt out over the ranks, each with rows of its own."""
    tables = experiment.dataset.embedding_args or ()
    dynamic = [t.table_name for t in tables if isinstance(t, DynamicEmbeddingArgs)]
    saved, here = read_state(checkpoint)["world_size"], dist.get_world_size()
    if dynamic and saved != here:
        raise ValueError(
            f"{checkpoint} must be loaded by {saved} processes, as it was saved, because of "
            f"DynamicEmbeddingArgs {', '.join(dynamic)}, got {here}; start {saved} processes"
        )


def check_same_objective(checkpoint: Path, experiment: ExperimentArgs) -> None:
    """Refuses to resume under another loss than the run had so far.

    Raises:
        ValueError: naming the field, both values and the way out; or ``checkpoint`` is none.
    """
    _compare(checkpoint, experiment, _objective_settings, "is another loss")


def check_same_scale(checkpoint: Path, experiment: ExperimentArgs) -> None:
    """Refuses to evaluate scores on another scale than they were trained on.

    Raises:
        ValueError: naming the field, both values and the way out; or ``checkpoint`` is none.
    """
    _compare(checkpoint, experiment, _scale_settings, "is another scale of the same scores")


def check_same_data(checkpoint: Path, experiment: ExperimentArgs) -> None:
    """Refuses data settings under which events that were trained on could be scored as test.

    Raises:
        ValueError: naming the field, both values and the way out; or ``checkpoint`` is none.
    """
    _compare(
        checkpoint, experiment, _data_settings, "could score events that these weights have seen"
    )


def _compare(
    checkpoint: Path,
    experiment: ExperimentArgs,
    settings: Callable[[ExperimentArgs], dict[str, object]],
    consequence: str,
) -> None:
    saved = _saved_experiment(checkpoint, experiment)
    here = settings(experiment)
    for field, value in settings(saved).items():
        if here.get(field) != value:
            raise ValueError(
                f"{field} must be {value!r} as in {checkpoint}, got {here.get(field)!r}: another "
                f"value {consequence}; use the checkpoint's {CONFIG_NAME}, or a checkpoint of "
                "these settings"
            )


def _saved_experiment(checkpoint: Path, experiment: ExperimentArgs) -> ExperimentArgs:
    """The experiment that wrote a checkpoint."""
    read_state(checkpoint)
    config = checkpoint / CONFIG_NAME
    try:
        return load_experiment(config, task=experiment.task)
    except ConfigError as error:
        problem: ValueError = error
    other: Literal["ranking", "retrieval"] = "ranking" if experiment.retrieval else "retrieval"
    with suppress(ConfigError):
        load_experiment(config, task=other)
        problem = ValueError(
            f"{checkpoint} is a checkpoint of a {other} run, this is a {experiment.task} run; name "
            f"one of a {experiment.task} run, or start pretrain_gr_{other}.py"
        )
    raise problem


def _objective_settings(experiment: ExperimentArgs) -> dict[str, object]:
    retrieval = experiment.retrieval
    if retrieval is None:
        return {}
    names = ("temperature", "num_negatives", "negatives_sampler")
    return {f"RetrievalArgs.{name}": getattr(retrieval, name) for name in names}


def _scale_settings(experiment: ExperimentArgs) -> dict[str, object]:
    retrieval = experiment.retrieval
    return {} if retrieval is None else {"RetrievalArgs.temperature": retrieval.temperature}


def _model_settings(experiment: ExperimentArgs) -> dict[str, object]:
    parts = (experiment.network, experiment.ranking or experiment.retrieval)
    settings: dict[str, object] = {
        f"{type(part).__name__}.{field.name}": getattr(part, field.name)
        for part in parts
        if part is not None
        for field in dataclasses.fields(part)
        if field.name not in _FREE
    }
    dataset = experiment.dataset
    owner = type(dataset).__name__
    for name in ("dataset_name", "like_threshold", "max_num_candidates", "embedding_args"):
        settings[f"{owner}.{name}"] = getattr(dataset, name, None)
    # What they come to, so that all contextual features and None are the same.
    settings[f"{owner}.contextual_feature_names"] = list(experiment.contextual_feature_names)
    if isinstance(dataset, BenchmarkDatasetArgs):
        settings[f"{owner}.action_feature_name"] = experiment.action_feature_name
    else:
        settings[f"{owner}.use_actions"] = dataset.use_actions
    settings[f"{owner} (max_seq_len in tokens)"] = experiment.max_seq_len
    settings["NetworkArgs.disable_contextual_mask (resolved)"] = (
        experiment.resolved_disable_contextual_mask
    )
    return settings


def _data_settings(experiment: ExperimentArgs) -> dict[str, object]:
    dataset = experiment.dataset
    if isinstance(dataset, BenchmarkDatasetArgs):
        return {"TrainerArgs.seed": experiment.trainer.seed}
    return {
        "DatasetArgs.split": experiment.split,
        "DatasetArgs.train_on_validation": dataset.train_on_validation,
    }
