"""A field that does nothing warns once; a default written out does not."""

import pytest

from tests.configs.conftest import Load

FP8 = 'MixedPrecisionArgs.mixed_precision_dtype = "fp8"\nMixedPrecisionArgs.'

TABLE = """
DatasetArgs.embedding_args = [@EmbeddingArgs()]
EmbeddingArgs.feature_names = ["zip"]
EmbeddingArgs.table_name = "zip"
EmbeddingArgs.item_vocab_size_or_capacity = 5000
EmbeddingArgs."""


@pytest.mark.parametrize(
    ("lines", "field", "reason"),
    [
        ("TrainerArgs.profile_step_start = 5", "profile_step_start = 5", "profile is False"),
        (
            "TrainerArgs.profile = True\nTrainerArgs.profile_step_start = 11",
            "TrainerArgs.profile = True",
            "TrainerArgs.profile_step_start = 11 comes after the last step, "
            "TrainerArgs.max_train_iters = 10",
        ),
        ("TrainerArgs.nonfinite_budget = 3", "nonfinite_budget = 3", "nonfinite_policy is 'stop'"),
        ("MixedPrecisionArgs.fp8_log_interval = 5", "fp8_log_interval", "dtype is None"),
        ("TensorModelParallelArgs.sequence_parallel = True", "sequence_parallel", "size is 1"),
        (TABLE + "cache_ratio = 0.5", "cache_ratio = 0.5", "placement is 'device'"),
        (
            TABLE + "sharding_type = 'data_parallel'\nEmbeddingArgs.shard_by = 'table_wise'",
            "shard_by = 'table_wise'",
            "every rank has a copy",
        ),
        ("NetworkArgs.num_time_buckets = 9", "num_time_buckets", "use_time_bias is False"),
        ("NetworkArgs.embedding_backend = 'x'", "embedding_backend", "servers"),
        ("MixedPrecisionArgs.linear_recipe = 'mxfp8'", "linear_recipe", "dtype is None"),
        ("MixedPrecisionArgs.hstu_attn_quantization_mode = 'fp8'", "quantization", "is None"),
        ("MixedPrecisionArgs.linear_scaling_precision = 'e5m2'", "precision", "is None"),
        ("MixedPrecisionArgs.first_last_layers_bf16 = True", "first_last", "is None"),
        (FP8 + "margin = 1", "margin", "not 'delayed'"),
        (FP8 + "num_layers_at_end_in_bf16 = 2", "num_layers_at_end", "bf16 is False"),
        (
            FP8 + "linear_backend = 'native'\nMixedPrecisionArgs.linear_recipe = 'rowwise'\n"
            "MixedPrecisionArgs.fp8_wgrad = False",
            "fp8_wgrad = False",
            "'rowwise' are never FP8",
        ),
        (
            FP8 + "linear_backend = 'emulated'\nMixedPrecisionArgs.auto_filter_small = False",
            "auto_filter_small = False",
            "linear_backend = 'emulated'",
        ),
        (
            FP8 + "auto_filter_attention = False",
            "auto_filter_attention = False",
            "hstu_attn_quantization_mode is 'bf16'",
        ),
    ],
)
def test_field_without_effect_warns_once(
    load: Load, caplog: pytest.LogCaptureFixture, lines: str, field: str, reason: str
) -> None:
    load(lines)
    assert len(caplog.messages) == 1
    message = caplog.messages[0]
    assert "case.gin:" in message and field in message and "has no effect" in message
    assert reason in message


@pytest.mark.parametrize(
    "lines",
    [
        "TrainerArgs.profile_step_start = 100",
        "TrainerArgs.profile = True\nTrainerArgs.profile_step_start = 10",
        "NetworkArgs.target_group_size = 1",
        "MixedPrecisionArgs.linear_recipe = 'tensorwise'",
        FP8 + "linear_recipe = 'delayed'\nMixedPrecisionArgs.margin = 8",
        FP8 + "fp8_wgrad = False\nMixedPrecisionArgs.auto_filter_small = False",
        FP8 + "linear_backend = 'native'\nMixedPrecisionArgs.linear_recipe = 'rowwise'",
        FP8 + "linear_backend = 'emulated'",
        TABLE + "placement = 'host_cached'\nEmbeddingArgs.cache_ratio = 0.5",
        "TrainerArgs.early_stopping_metric = 'gauc'",
        "TrainerArgs.nonfinite_policy = 'skip'\nTrainerArgs.nonfinite_budget = 3",
    ],
)
def test_default_or_working_field_does_not_warn(
    load: Load, caplog: pytest.LogCaptureFixture, lines: str
) -> None:
    load(lines)
    assert caplog.messages == []


def test_profiled_steps_count_from_1(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    lines = "TrainerArgs.profile = True\nTrainerArgs.profile_step_start = "
    assert load(lines + "0").trainer.profile_step_start == 1
    open_end = load(lines + "11", without=("TrainerArgs.max_train_iters",))
    assert open_end.trainer.profile_step_start == 11
    assert not any("profile" in message for message in caplog.messages)


def test_synthetic_candidates_and_optimizer_fields(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    load(
        "NetworkArgs.target_group_size = 2\n"
        "OptimizerArgs.optimizer_str = 'sgd'\nOptimizerArgs.sparse_optimizer_str = 'sgd'\n"
        "OptimizerArgs.adam_beta1 = 0.8",
        without=("DatasetArgs.max_num_candidates", "OptimizerArgs.optimizer_str"),
    )
    text = "\n".join(caplog.messages)
    assert len(caplog.messages) == 2
    for name in ("target_group_size", "adam_beta1"):
        assert name in text


def test_open_end_and_batch_scaling_are_said(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    load("NetworkArgs.scaling_seqlen = -1", without=("TrainerArgs.max_train_iters",))
    assert "TrainerArgs.num_epochs = 1" in caplog.messages[0]
    assert "NetworkArgs.scaling_seqlen = -1" in caplog.messages[1]
    assert len(caplog.messages) == 2
