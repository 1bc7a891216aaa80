"""The dataclasses alone: strict types, resolved values, token counts."""

import ast
import dataclasses
import pickle
import subprocess
import sys

import pytest

from configs import schema
from configs.bindings import CLASSES
from configs.datasets import DATASETS
from configs.rules import field_hints
from tests.configs.conftest import Load
from tests.support.commands import PROJECT_ROOT


def small(**changes: object) -> schema.ExperimentArgs:
    parts: dict[str, object] = {
        "trainer": schema.TrainerArgs(train_batch_size=2, eval_batch_size=2, max_train_iters=3),
        "dataset": schema.DatasetArgs(
            dataset_name="ml-1m", max_history_seqlen=10, max_num_candidates=4
        ),
        "network": schema.NetworkArgs(
            num_layers=2, hidden_size=8, num_attention_heads=2, kv_channels=4
        ),
        "optimizer": schema.OptimizerArgs(optimizer_str="adam", learning_rate=0.1),
        "ranking": schema.RankingArgs(prediction_head_arch=(8, 5)),
    }
    return schema.ExperimentArgs(**(parts | changes))


def test_classes_are_frozen_and_keyword_only() -> None:
    for cls in (*CLASSES.values(), schema.ExperimentArgs):
        assert cls.__dataclass_params__.frozen
        assert all(field.kw_only for field in dataclasses.fields(cls))


def test_every_field_has_a_docstring() -> None:
    documented: dict[str, set[str]] = {}
    for path in (PROJECT_ROOT / "configs").glob("*schema.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                pairs = zip(node.body, node.body[1:], strict=False)
                documented[node.name] = {
                    field.target.id
                    for field, text in pairs
                    if isinstance(field, ast.AnnAssign)
                    and isinstance(text, ast.Expr)
                    and isinstance(text.value, ast.Constant)
                }
    for name, cls in CLASSES.items():
        inherited = {f for base in cls.__mro__ for f in documented.get(base.__name__, set())}
        assert set(field_hints(cls)) <= inherited, name
    assert len(documented) > len(CLASSES)


def test_code_is_checked_like_a_file() -> None:
    for seed in (True, 2**31):
        rule = rf"TrainerArgs\.seed must be an integer >= 0 and <= 2147483647, got {seed}"
        with pytest.raises(ValueError, match=rule):
            schema.TrainerArgs(train_batch_size=1, eval_batch_size=1, seed=seed)
    assert schema.TrainerArgs(train_batch_size=1, eval_batch_size=1, seed=2**31 - 1)


def test_values_are_stored_in_one_form() -> None:
    network = schema.NetworkArgs(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        kv_channels=8,
        hidden_dropout=0,
        kernel_backend="Triton",
    )
    assert type(network.hidden_dropout) is float
    assert network.kernel_backend == "triton"
    assert schema.RankingArgs(prediction_head_arch=[8, 5]).prediction_head_arch == (8, 5)
    assert schema.RetrievalArgs(eval_metrics=["hr@5", "mrr"]).eval_metrics == ("HR@5", "MRR")


def test_linear_dim_follows_attention_dim_unless_set() -> None:
    network = small().network
    assert (network.attention_dim, network.linear_dim) == (4, 4)
    assert dataclasses.replace(network, linear_channels=6).linear_dim == 6


def test_training_ends_after_one_epoch_unless_told() -> None:
    sizes = {"train_batch_size": 1, "eval_batch_size": 1}
    assert schema.TrainerArgs(**sizes).num_epochs == 1
    assert schema.TrainerArgs(**sizes, max_train_iters=5).num_epochs is None
    assert schema.TrainerArgs(**sizes, num_epochs=4).num_epochs == 4


def test_max_seq_len_counts_tokens() -> None:
    experiment = small()
    assert experiment.contextual_feature_names == ("user_id", "sex", "age", "occupation", "zip")
    assert experiment.max_seq_len == 5 + 2 * 10 + 4
    assert experiment.resolved_scaling_seqlen == experiment.max_seq_len
    retrieval = small(
        dataset=schema.DatasetArgs(dataset_name="ml-20m", max_history_seqlen=10),
        ranking=None,
        retrieval=schema.RetrievalArgs(),
    )
    assert retrieval.split == "leave_one_out"
    assert retrieval.max_seq_len == 1 + 2 * 10 + 1


@pytest.mark.parametrize(("action", "tokens"), [("action", 1 + 2 * 8 + 4), (None, 1 + 8 + 4)])
def test_synthetic_max_sequence_length_counts_candidates(action: str | None, tokens: int) -> None:
    names = ["item"] if action is None else ["item", action]
    dataset = schema.BenchmarkDatasetArgs(
        feature_args=[
            schema.FeatureArgs(feature_names=names, max_sequence_length=12),
            schema.FeatureArgs(feature_names=["user"], max_sequence_length=1),
        ],
        embedding_args=[
            schema.EmbeddingArgs(
                feature_names=[name], table_name=name, item_vocab_size_or_capacity=9
            )
            for name in [*names, "user"]
        ],
        item_feature_name="item",
        action_feature_name=action,
        contextual_feature_names=["user"],
        max_num_candidates=4,
    )
    experiment = small(dataset=dataset)
    assert experiment.max_history_events == 8
    assert experiment.max_seq_len == tokens


@pytest.mark.parametrize(
    ("candidates", "asked", "split", "history_loss"),
    [
        (4, None, "temporal", False),
        (4, True, "temporal", True),
        (4, False, "temporal", False),
        (0, None, "by_user", True),
        (0, True, "by_user", True),
    ],
)
def test_split_and_history_loss_follow_candidates(
    candidates: int, asked: bool | None, split: str, history_loss: bool
) -> None:
    dataset = schema.DatasetArgs(
        dataset_name="ml-1m",
        max_history_seqlen=10,
        max_num_candidates=candidates,
        history_loss=asked,
    )
    experiment = small(dataset=dataset)
    assert (experiment.split, experiment.history_loss) == (split, history_loss)


@pytest.mark.parametrize(
    ("lines", "causal", "reason"),
    [
        ("", False, "no history position is supervised"),
        ("DatasetArgs.history_loss = True", True, "history positions are supervised"),
        ("NetworkArgs.disable_contextual_mask = True", True, "is set"),
        ("NetworkArgs.disable_contextual_mask = False", False, "is set"),
    ],
)
def test_contextual_mask_follows_the_leak_rule(
    load: Load, lines: str, causal: bool, reason: str
) -> None:
    experiment = load(lines)
    assert experiment.resolved_disable_contextual_mask is causal
    assert reason in experiment.disable_contextual_mask_reason


def test_one_layer_cannot_leak(load: Load) -> None:
    lines = (
        "NetworkArgs.num_layers = 1\nDatasetArgs.history_loss = True\n"
        "NetworkArgs.disable_contextual_mask = False"
    )
    assert not load(lines, without=("NetworkArgs.num_layers",)).resolved_disable_contextual_mask


@pytest.mark.parametrize(
    ("ranking", "kind"),
    [({"prediction_head_arch": (8, 5)}, "cross_entropy"), ({"prediction_head_arch": (1,)}, "bce")],
)
def test_loss_kind_follows_the_head(ranking: dict[str, object], kind: str) -> None:
    threshold = 4.0 if kind == "bce" else None
    dataset = schema.DatasetArgs(
        dataset_name="ml-1m",
        max_history_seqlen=9,
        max_num_candidates=2,
        like_threshold=threshold,
    )
    experiment = small(dataset=dataset, ranking=schema.RankingArgs(**ranking))
    assert experiment.loss_kind == kind


def test_rating_scales() -> None:
    assert DATASETS["ml-1m"].ratings == (1, 2, 3, 4, 5)
    assert DATASETS["ml-20m"].ratings == (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5)
    assert DATASETS["kuairand-1k"].ratings == ()
    assert DATASETS["ml-100k"].feature_names[:2] == ("item_id", "action")


def test_experiment_holds_exactly_one_task() -> None:
    with pytest.raises(ValueError, match="got both"):
        small(retrieval=schema.RetrievalArgs())
    with pytest.raises(ValueError, match="got neither"):
        small(ranking=None)


def test_experiment_survives_pickling_and_ignores_its_name() -> None:
    experiment = small()
    assert pickle.loads(pickle.dumps(experiment)) == experiment
    assert dataclasses.replace(experiment, name="other") == experiment
    assert small(name="x").output_dir == "runs/x"


def test_configs_import_nothing_heavy() -> None:
    code = (
        "import sys, configs.cli, configs.datasets; "
        "print([m for m in ('torch', 'numpy', 'polars', 'pyarrow', 'absl') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]")


def dynamic_table(**fields: object) -> schema.DynamicEmbeddingArgs:
    return schema.DynamicEmbeddingArgs(
        feature_names=("shop",), table_name="shop", item_vocab_size_or_capacity=1000, **fields
    )


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({}, True),
        ({"item_vocab_gpu_capacity_ratio": 0.5}, False),
        ({"item_vocab_gpu_capacity_ratio": 1}, True),
        ({"item_vocab_gpu_capacity": 999, "item_vocab_gpu_capacity_ratio": 1}, False),
        ({"item_vocab_gpu_capacity": 1000}, True),
        ({"global_hbm_for_values": 1000 * 8 * 4 - 1, "item_vocab_gpu_capacity": 1000}, False),
        ({"global_hbm_for_values": 1000 * 8 * 4}, True),
    ],
)
def test_the_first_size_decides_where_a_dynamic_table_is(
    fields: dict[str, float], fits: bool
) -> None:
    assert dynamic_table(**fields).fits_devices(8) == fits


@pytest.mark.parametrize(
    ("field", "value"), [("shard_by", "table_wise"), ("placement", "host"), ("shard_by", "planner")]
)
def test_a_dynamic_table_is_cut_by_rows(field: str, value: str) -> None:
    with pytest.raises(
        schema.ConfigError, match=rf"DynamicEmbeddingArgs\.{field} must be .*'{value}'"
    ):
        dynamic_table(**{field: value})


def test_a_step_whose_rows_are_fetched_ahead_is_not_skipped() -> None:
    sizes = {"train_batch_size": 2, "eval_batch_size": 2, "pipeline_type": "prefetch"}
    schema.TrainerArgs(**sizes)
    with pytest.raises(schema.ConfigError, match=r"nonfinite_policy must be 'stop'.*'native'"):
        schema.TrainerArgs(**sizes, nonfinite_policy="skip")
