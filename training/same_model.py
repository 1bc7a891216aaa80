"""Whether a checkpoint's weights mean the same under the present settings."""

import dataclasses
from pathlib import Path

from configs.loader import load_experiment
from configs.schema import ExperimentArgs
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
}


def check_same_model(checkpoint: Path, experiment: ExperimentArgs) -> None:
    """Compares the settings stored in a checkpoint with the present ones.

    Raises:
        ValueError: one differs that changes the model or its inputs, naming the field, both values
            and the way out; or ``checkpoint`` is no checkpoint.
    """
    read_state(checkpoint)
    saved = load_experiment(checkpoint / CONFIG_NAME, task=experiment.task)
    here = _model_settings(experiment)
    for field, value in _model_settings(saved).items():
        if here.get(field) != value:
            raise ValueError(
                f"{field} must be {value!r} as in {checkpoint}, got {here.get(field)!r}: another "
                "value makes another model of the same weights; use the checkpoint's "
                f"{CONFIG_NAME} or a checkpoint of these settings"
            )


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
    settings[f"{owner} (max_seq_len in tokens)"] = experiment.max_seq_len
    settings["NetworkArgs.disable_contextual_mask (resolved)"] = (
        experiment.resolved_disable_contextual_mask
    )
    return settings
