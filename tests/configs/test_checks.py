"""Combinations that cannot work are refused; what is merely not built yet validates."""

import pytest

from configs.loader import ConfigError, load_experiment
from configs.precision_schema import RECOMMENDED_ATTENTION_MODE
from tests.configs.conftest import FILES, Load, Refusal

FP8 = 'MixedPrecisionArgs.mixed_precision_dtype = "fp8"\nMixedPrecisionArgs.'
HEAD = "RankingArgs.prediction_head_arch"


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (
            "NetworkArgs.disable_contextual_mask = False\nDatasetArgs.history_loss = True",
            ["NetworkArgs.disable_contextual_mask", "DatasetArgs.history_loss", "label"],
        ),
        ("NetworkArgs.is_causal = False", ["NetworkArgs.is_causal", "candidates"]),
        (
            "TensorModelParallelArgs.tensor_model_parallel_size = 4",
            ["NetworkArgs.num_attention_heads", "tensor_model_parallel_size = 4", "got 2"],
        ),
        (
            "TrainerArgs.resume = 'latest'\nTrainerArgs.ckpt_load_dir = 'weights'",
            ["TrainerArgs.resume", "ckpt_load_dir = 'weights'"],
        ),
        (
            "TrainerArgs.profile = True\nTrainerArgs.profile_step_start = 200",
            ["TrainerArgs.profile_step_end", "profile_step_start = 200", "got 200"],
        ),
        (
            "NetworkArgs.num_position_buckets = 6",
            ["NetworkArgs.num_position_buckets must be >= 7", "5 contextual features", "got 6"],
        ),
        (
            "TrainerArgs.process_group_timeout_seconds = 0",
            ["TrainerArgs.process_group_timeout_seconds", "> 0, got 0"],
        ),
        ("TrainerArgs.nonfinite_policy = 'ignore'", ["nonfinite_policy", "'stop'", "'skip'"]),
        ("TrainerArgs.nonfinite_budget = 0", ["TrainerArgs.nonfinite_budget", ">= 1, got 0"]),
        (FP8 + "fp8_log_interval = 0", ["fp8_log_interval", ">= 1", "got 0"]),
        ("TrainerArgs.early_stopping_metric = 'acu'", ["'acu'", "did you mean 'auc'?"]),
        ("DatasetArgs.like_threshold = 1", ["DatasetArgs.like_threshold", "(1, 5]", "got 1"]),
        ("DatasetArgs.like_threshold = 5.5", ["(1, 5]", "got 5.5"]),
        ("DatasetArgs.like_threshold = 4", [HEAD, "must end with 1", "[16, 1]"]),
        ("RankingArgs.num_tasks = 5", ["RankingArgs.num_tasks", "at most 1", "ml-100k"]),
        (FP8 + "linear_recipe = 'rowwise'", ["linear_backend = 'te'", "'native' or 'emulated'"]),
        (FP8 + "linear_recipe = 'nvfp4'", ["'nvfp4'", "'mxfp8'"]),
        (FP8 + "linear_scaling_precision = 'e5m2'", ["'hybrid' or 'e4m3'", "'e5m2'"]),
        (FP8 + "fp8_alignment_mode = 'truncate'", ["'pad'", "labels"]),
        (FP8 + "amax_history_len = 0", ["amax_history_len", ">= 1, got 0"]),
        (FP8 + "margin = 9", ["MixedPrecisionArgs.margin", ">= 0 and <= 8", "got 9"]),
        (FP8 + "margin = -1", ["MixedPrecisionArgs.margin", ">= 0", "got -1"]),
        (
            FP8 + "filter_modules = ['layers']",
            ["case.gin:15", "stack.layers.0.input.uvqk", "filter_modules has 'layers'"],
        ),
        (
            FP8 + "linear_recipe = 'mxfp8'\nMixedPrecisionArgs.linear_backend = 'emulated'\n"
            "NetworkArgs.linear_channels = 24\nMixedPrecisionArgs.filter_modules = ['uvqk']",
            ["stack.layers.2.output.proj: width 48 is not divisible by 32", "case.gin:17"],
        ),
        (FP8 + "num_layers_at_start_in_bf16 = -1", ["num_layers_at_start_in_bf16", ">= 0"]),
        (FP8 + "hstu_attn_quantization_mode = 'per-hed'", ["did you mean 'per_head'?"]),
        (FP8 + "linear_recipe = None", ["mixed_precision_dtype", "neither linears nor attention"]),
        (
            FP8 + "hstu_attn_quantization_mode = '1xdim'\nNetworkArgs.kernel_backend = 'triton'",
            ["'per_row'", "kernel_backend = 'triton'"],
        ),
        (
            FP8 + "first_last_layers_bf16 = True\n"
            "MixedPrecisionArgs.num_layers_at_start_in_bf16 = 2",
            ["num_layers_at_start_in_bf16", "num_layers = 3", "got 2 + 1"],
        ),
    ],
)
def test_impossible_combination_is_refused(refusal: Refusal, lines: str, parts: list[str]) -> None:
    message = refusal(lines)
    assert "case.gin:" in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("dataset", "lines", "width"),
    [
        ("ml-100k", "", 5),
        ("ml-1m", "", 5),
        ("ml-20m", "", 10),
        ("ml-20m", "DatasetArgs.like_threshold = 4", 1),
        ("kuairand-pure", "RankingArgs.num_tasks = 8", 8),
        ("kuairand-27k", "RankingArgs.num_tasks = 3", 3),
        ("kuairand-1k", "", 1),
    ],
)
def test_head_width_follows_labels(
    load: Load, refusal: Refusal, dataset: str, lines: str, width: int
) -> None:
    without = (HEAD, "DatasetArgs.dataset_name")
    lines += f"\nDatasetArgs.dataset_name = '{dataset}'\n{HEAD} = "
    experiment = load(f"{lines}[16, {width}]", without=without)
    assert experiment.ranking.prediction_head_arch[-1] == width
    message = refusal(f"{lines}[16, {width + 1}]", without=without)
    assert f"must end with {width}" in message and f"got [16, {width + 1}]" in message


def test_nothing_supervised_is_refused(refusal: Refusal) -> None:
    candidates = "DatasetArgs.max_num_candidates"
    message = refusal("DatasetArgs.history_loss = False", without=(candidates,))
    assert "DatasetArgs.history_loss" in message
    message = refusal("NetworkArgs.is_causal = False", without=(candidates,))
    assert "see their own labels" in message


def test_temporal_split_needs_candidates(refusal: Refusal) -> None:
    message = refusal("DatasetArgs.split = 'temporal'", without=("DatasetArgs.max_num_candidates",))
    assert "DatasetArgs.split" in message and "'by_user'" in message


def test_like_threshold_without_ratings_is_refused(refusal: Refusal) -> None:
    message = refusal(
        "DatasetArgs.dataset_name = 'kuairand-1k'\nDatasetArgs.like_threshold = 1",
        without=("DatasetArgs.dataset_name",),
    )
    assert "there are no ratings" in message


def test_retrieval_refuses_a_leaking_mask(refusal: Refusal) -> None:
    message = refusal(
        "NetworkArgs.disable_contextual_mask = False",
        without=(HEAD, "DatasetArgs.max_num_candidates"),
        task="retrieval",
    )
    assert "retrieval supervises the history" in message


@pytest.mark.parametrize("metric", ["HR10", "HR@0", "AUC"])
def test_retrieval_metric_is_checked(refusal: Refusal, metric: str) -> None:
    message = refusal(
        f"RetrievalArgs.eval_metrics = ['{metric}']", without=(HEAD,), task="retrieval"
    )
    assert f"got '{metric}'" in message and "NDCG@10" in message


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (
            ("NetworkArgs.kernel_backend = 'triton'", "NetworkArgs.kv_channels = 96"),
            ["NetworkArgs.kv_channels must be 64, 128 or 256", "got 96", '"bf16"'],
        ),
        (
            ("NetworkArgs.kernel_backend = 'cutlass'", "NetworkArgs.kv_channels = 32"),
            ["NetworkArgs.kv_channels must be 64, 128 or 256", "'cutlass'", "got 32"],
        ),
        (
            (
                "NetworkArgs.kernel_backend = 'triton'",
                "NetworkArgs.kv_channels = 64",
                "NetworkArgs.linear_channels = 128",
            ),
            ["NetworkArgs.linear_channels must be None", "got 128 beside kv_channels = 64"],
        ),
        (
            (
                "NetworkArgs.kernel_backend = 'triton'",
                "NetworkArgs.kv_channels = 32",
                "MixedPrecisionArgs.auto_filter_attention = False",
            ),
            ["NetworkArgs.kv_channels must be 64, 128 or 256", "got 32"],
        ),
    ],
)
def test_heads_that_no_fp8_kernel_has_are_refused(
    refusal: Refusal, lines: tuple[str, ...], parts: list[str]
) -> None:
    asked = FP8 + "hstu_attn_quantization_mode = 'cast'\n" + "\n".join(lines)
    message = refusal(asked, without=("NetworkArgs.kv_channels",))
    for part in parts:
        assert part in message


@pytest.mark.parametrize("lines", ["'triton'\nNetworkArgs.kv_channels = 32", "'auto'"])
def test_heads_that_are_filtered_or_emulated_are_not_refused(load: Load, lines: str) -> None:
    asked = FP8 + "hstu_attn_quantization_mode = 'cast'\nNetworkArgs.kernel_backend = " + lines
    without = ("NetworkArgs.kv_channels",) if "kv_channels" in lines else ()
    assert load(asked, without=without).precision.has_fp8_attention


@pytest.mark.parametrize(
    ("switches", "linears", "attention"),
    [
        ("", False, False),
        (FP8 + "fp8_eval = True", True, False),
        (FP8 + "hstu_attn_quantization_mode = 'per-head'", True, True),
        (
            FP8 + "linear_recipe = None\n"
            "MixedPrecisionArgs.hstu_attn_quantization_mode = 'per_head'",
            False,
            True,
        ),
    ],
)
def test_fp8_linears_and_attention_switch_apart(
    load: Load, switches: str, linears: bool, attention: bool
) -> None:
    precision = load(switches).precision
    assert (precision.has_fp8_linears, precision.has_fp8_attention) == (linears, attention)


@pytest.mark.parametrize(
    ("spelling", "mode"),
    [
        ("recommended", RECOMMENDED_ATTENTION_MODE),
        ("fp8", "cast"),
        ("1xdim", "per_row"),
        ("128x1", "per_row"),
        ("per-block", "per_block"),
        ("per-head", "per_head"),
        ("per-batch", "per_batch"),
        ("per-tensor", "per_tensor"),
        ("per_tensor", "per_tensor"),
    ],
)
def test_attention_mode_spellings(load: Load, spelling: str, mode: str) -> None:
    precision = load(FP8 + f"hstu_attn_quantization_mode = '{spelling}'").precision
    assert precision.hstu_attn_quantization_mode == mode


@pytest.mark.parametrize(
    ("backend", "recipes"),
    [
        ("te", {"delayed", "tensorwise", "blockwise", "mxfp8"}),
        ("native", {"delayed", "tensorwise", "rowwise", "blockwise"}),
        ("emulated", {"delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"}),
    ],
)
def test_recipes_of_each_linear_backend(
    load: Load, refusal: Refusal, backend: str, recipes: set[str]
) -> None:
    for recipe in ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"):
        lines = FP8 + f"linear_backend = '{backend}'\nMixedPrecisionArgs.linear_recipe = '{recipe}'"
        if (backend, recipe) == ("native", "blockwise"):
            assert "must be 'e4m3'" in refusal(lines)
            lines += "\nMixedPrecisionArgs.linear_scaling_precision = 'e4m3'"
        if recipe in recipes:
            assert load(lines).precision.linear_recipe == recipe
        else:
            assert repr(recipe) in refusal(lines)


SYNTHETIC = (FILES / "fixed_lengths_prefetch.gin").read_text()


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("['ad', 'click']", "['ad', 'clock']", ["no feature 'click'", "did you mean 'clock'?"]),
        ("'ad': @ad_ids", "'add': @ad_ids", ["got 'add'"]),
        ("feature_names = ['click']", "feature_names = ['klick']", ["did you mean 'click'?"]),
        ("feature_names = ['click']", "feature_names = ['ad']", ["feature 'ad' twice"]),
        ("table_name = 'click'", "table_name = 'ad'", ["table 'ad' twice"]),
        ("= 300\n", "= 300\nBenchmarkDatasetArgs.max_num_candidates = 300\n", ["< max_sequence"]),
        ("alpha = 1.4", "alpha = 1.0", ["a number > 1", "got 1.0"]),
        ("alpha = 1.4", "alpha = 1.4\nad_ids/RandomDistribution.high = 400001", ["[0, 400000)"]),
        ("'uniform'", "'uniform'\nclick_lengths/RandomDistribution.low = 301", ["low = 301"]),
        ("'uniform'", "'normal'", ["RandomDistribution.mean", "dist_type = 'normal'"]),
        ("'uniform'", "'lognormal'", ["RandomDistribution.mean", "> 0"]),
        ("contextual_feature_names=[]", "contextual_feature_names=['ad']", ["got 'ad'"]),
        ("= [\n    64, 4,\n]", "= [64, 5]", ["must end with 4", "got [64, 5]"]),
        (
            "table_name = 'click'",
            "table_name = 'click.v2'",
            ["EmbeddingArgs.table_name", "digits, _ and -", "got 'click.v2'", "'click_v2'"],
        ),
        (
            "['ad', 'click']",
            "['ad', '-click']",
            ["FeatureArgs.feature_names", "rename '-click', for example to 'click'"],
        ),
        ("@clicks/FeatureArgs(),", "@click/FeatureArgs(),", ["did you mean 'clicks'?"]),
        ("@clicks/FeatureArgs(),", "@ad_ids/RandomDistribution(),", ["FeatureArgs()"]),
    ],
)
def test_impossible_synthetic_data_is_refused(
    tmp_path, old: str, new: str, parts: list[str]
) -> None:
    assert old in SYNTHETIC
    path = tmp_path / "case.gin"
    path.write_text(SYNTHETIC.replace(old, new))
    with pytest.raises(ConfigError, match=r"case\.gin:\d+: ") as refused:
        load_experiment(path, task="ranking")
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_a_decay_that_the_table_kernel_ignores_is_refused(refusal: Refusal, name: str) -> None:
    lines = (
        f"OptimizerArgs.sparse_optimizer_str = {name!r}\nOptimizerArgs.sparse_weight_decay = 0.1"
    )
    message = refusal(lines)
    for part in ("OptimizerArgs.sparse_weight_decay must be 0", name, "got 0.1"):
        assert part in message
