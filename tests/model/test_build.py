"""From settings to tables and objective."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import DatasetArgs, EmbeddingArgs, ExperimentArgs, RankingArgs
from data.dataset import FeatureFacts
from model.build import build_model, item_table, ranking_objective, table_specs
from model.ranking import RankingTrunk
from model.retrieval import RetrievalTrunk
from model.trunk import SequenceModel
from modules.hstu_config import HSTUConfig
from ops.hstu_attention import fbgemm_impl
from tests.support.experiments import retrieval_experiment, synthetic_experiment

FACTS = FeatureFacts(
    item_feature_name="item_id",
    action_feature_name="action",
    contextual_feature_names=("user_id", "sex", "age", "occupation", "zip"),
    vocab_sizes={
        "item_id": 1683,
        "action": 5,
        "user_id": 70_000,
        "sex": 2,
        "age": 74,
        "occupation": 21,
        "zip": 795,
    },
    num_classes=5,
    label_kind="classes",
)

SYNTHETIC = FeatureFacts(
    item_feature_name="item",
    action_feature_name="action",
    contextual_feature_names=("user_id", "age"),
    vocab_sizes={"item": 60, "action": 5, "user_id": 40, "age": 4},
    num_classes=5,
    label_kind="classes",
)


@pytest.fixture
def experiment(tmp_path: Path) -> ExperimentArgs:
    base = synthetic_experiment(str(tmp_path))
    dataset = DatasetArgs(dataset_name="ml-100k", max_history_seqlen=10, max_num_candidates=3)
    return dataclasses.replace(base, dataset=dataset)


def changed(experiment: ExperimentArgs, part: str, **values: object) -> ExperimentArgs:
    new = dataclasses.replace(getattr(experiment, part), **values)
    return dataclasses.replace(experiment, **{part: new})


def test_items_and_large_tables_are_sharded(experiment: ExperimentArgs) -> None:
    specs = {spec.name: spec for spec in table_specs(experiment, FACTS)}
    assert {name for name, spec in specs.items() if spec.is_sharded} == {"item_id", "user_id"}
    assert specs["item_id"].num_rows == 1683
    assert all(spec.dim == experiment.network.hidden_size for spec in specs.values())


def test_widths_of_items_and_contextuals_are_free(experiment: ExperimentArgs) -> None:
    experiment = changed(experiment, "network", item_embedding_dim=12, contextual_embedding_dim=6)
    specs = {spec.name: spec.dim for spec in table_specs(experiment, FACTS)}
    assert specs["item_id"] == specs["action"] == 12
    assert specs["zip"] == 6
    model, _ = build_model(experiment, FACTS, device_type="cpu")
    projections = model.trunk.preprocessor.projections
    assert set(projections) == {f"feature_{name}" for name in FACTS.vocab_sizes}


def test_given_tables_replace_the_default_ones(experiment: ExperimentArgs) -> None:
    table = EmbeddingArgs(
        feature_names=("age", "zip"),
        table_name="places",
        item_vocab_size_or_capacity=900,
        sharding_type="model_parallel",
    )
    specs = table_specs(changed(experiment, "dataset", embedding_args=(table,)), FACTS)
    by_name = {spec.name: spec for spec in specs}
    assert by_name["places"].feature_names == ("age", "zip")
    assert by_name["places"].num_rows == 900
    assert by_name["places"].is_sharded
    assert "age" not in by_name
    assert [spec.name for spec in specs].count("places") == 1


def test_a_shared_table_serves_only_the_features_in_use(experiment: ExperimentArgs) -> None:
    table = EmbeddingArgs(
        feature_names=("age", "zip"), table_name="places", item_vocab_size_or_capacity=900
    )
    facts = dataclasses.replace(
        FACTS,
        contextual_feature_names=("age",),
        vocab_sizes={"item_id": 1683, "action": 5, "age": 74},
    )
    specs = table_specs(changed(experiment, "dataset", embedding_args=(table,)), facts)
    assert [spec.feature_names for spec in specs] == [("item_id",), ("action",), ("age",)]


def test_parameter_names_of_ranking_are_those_of_its_checkpoints(tmp_path: Path) -> None:
    """Names a run from before retrieval has in its checkpoints; an optimizer keeps them, too."""
    model, _ = build_model(synthetic_experiment(str(tmp_path)), SYNTHETIC, device_type="cpu")
    names = [name for name, _ in model.named_parameters() if ".layers.1." not in name]
    layer = "trunk.stack.layers.0"
    assert names == [
        "tables.collections.0.embeddings.table_item.weight",
        *(f"trunk.replicated.tables.table_{n}.weight" for n in ("action", "user_id", "age")),
        "trunk.preprocessor.position.weight",
        *(f"{layer}.input.norm.{n}" for n in ("weight", "bias")),
        *(f"{layer}.input.uvqk.{n}" for n in ("weight", "bias")),
        *(f"{layer}.output.norm.{n}" for n in ("weight", "bias")),
        *(f"{layer}.output.proj.{n}" for n in ("weight", "bias")),
        *(f"trunk.norm.{n}" for n in ("weight", "bias")),
        *(f"trunk.head.layers.{i}.{n}" for i in (0, 3) for n in ("weight", "bias")),
    ]


def test_the_task_decides_the_model(tmp_path: Path) -> None:
    for make, trunk_type in (
        (synthetic_experiment, RankingTrunk),
        (retrieval_experiment, RetrievalTrunk),
    ):
        model, specs = build_model(make(str(tmp_path)), SYNTHETIC, device_type="cpu")
        assert type(model) is SequenceModel and type(model.trunk) is trunk_type
        assert item_table(specs, SYNTHETIC).name == "item"


def test_a_gpu_keeps_repeated_negatives_and_larger_chunks(tmp_path: Path) -> None:
    experiment = retrieval_experiment(str(tmp_path), network={"kernel_backend": "pytorch"})
    chunks = []
    for device_type in ("cpu", "cuda"):
        trunk = build_model(experiment, SYNTHETIC, device_type=device_type)[0].trunk
        assert trunk._negatives.drops_repeats == (device_type == "cpu")
        chunks.append(trunk.objective.max_chunk_elements)
    assert chunks[0] < chunks[1]


def test_five_classes_are_positive_from_rating_four(experiment: ExperimentArgs) -> None:
    objective = ranking_objective(experiment, FACTS)
    assert (objective.kind, objective.num_outputs, objective.positive_from) == ("classes", 5, 3)


def test_half_stars_are_positive_from_rating_four(experiment: ExperimentArgs) -> None:
    experiment = dataclasses.replace(
        experiment,
        dataset=DatasetArgs(dataset_name="ml-20m", max_history_seqlen=10, max_num_candidates=3),
        ranking=RankingArgs(prediction_head_arch=(16, 10)),
    )
    assert ranking_objective(experiment, FACTS).positive_from == 7


def test_like_threshold_decides_the_binary_label(experiment: ExperimentArgs) -> None:
    experiment = dataclasses.replace(
        experiment,
        dataset=dataclasses.replace(experiment.dataset, like_threshold=3.0),
        ranking=RankingArgs(prediction_head_arch=(16, 1)),
    )
    objective = ranking_objective(experiment, FACTS)
    assert (objective.kind, objective.positive_from) == ("binary", 2)
    assert objective.targets(torch.tensor([1, 2])).tolist() == [[0], [1]]


def test_several_tasks_read_bits(tmp_path: Path) -> None:
    experiment = synthetic_experiment(
        str(tmp_path), ranking={"prediction_head_arch": (8, 2), "num_tasks": 2}
    )
    objective = ranking_objective(experiment, dataclasses.replace(FACTS, num_classes=2))
    assert (objective.kind, objective.num_scores) == ("tasks", 2)


CUTLASS = {"kernel_backend": "cutlass", "kv_channels": 32, "dtype_str": "bfloat16"}
TRITON = {"kernel_backend": "triton"}
NO_BACKEND = {
    "a bias": (CUTLASS | {"use_time_bias": True}, {}, "time_bias is not in FBGEMM's kernels"),
    "a window": (CUTLASS | {"attention_window": 5}, {}, "attention_window = 5 together with"),
    "a dtype": (CUTLASS | {"dtype_str": "float32"}, {}, "bfloat16 or float16.*got torch.float32"),
    "a head dim": (CUTLASS | {"kv_channels": 48}, {}, "one of 32, 64, 128, 256.*got 48"),
    "unequal head dims": (CUTLASS | {"linear_channels": 64}, {}, "must be equal.*32 and 64"),
    "too many users": (CUTLASS, {"eval_batch_size": 2**21}, "at most 65535 users.*got 2097152"),
    "a wide head": (TRITON | {"kv_channels": 512}, {}, "attention_dim must be 1 to 256.*got 512"),
    "rows past 32 bits": (TRITON, {"eval_batch_size": 2**28}, "268435456 users x 28 ="),
}


@pytest.mark.parametrize(("network", "trainer", "reason"), NO_BACKEND.values(), ids=NO_BACKEND)
def test_what_a_named_backend_lacks_is_refused_when_the_model_is_built(
    experiment: ExperimentArgs,
    monkeypatch: pytest.MonkeyPatch,
    network: dict[str, Any],
    trainer: dict[str, int],
    reason: str,
) -> None:
    """On a GPU whose FBGEMM package is there, from its first batch's sizes to its biases."""
    monkeypatch.setattr("ops.hstu_attention.dispatch.find_spec", lambda name: True)
    monkeypatch.setattr(fbgemm_impl, "load_package", lambda: fbgemm_impl.Package(attend=len))
    asked = changed(changed(experiment, "network", **network), "trainer", **trainer)
    backend = network["kernel_backend"]
    with pytest.raises(NotImplementedError, match=f"kernel_backend = {backend!r}.*{reason}"):
        build_model(asked, FACTS, device_type="cuda")
    auto = changed(asked, "network", kernel_backend="auto")
    model, _ = build_model(auto, FACTS, device_type="cuda")
    expected = "pytorch" if backend == "triton" else "triton"
    assert model.trunk.stack.config.attention_backend == expected


def test_a_part_of_a_step_counts_not_the_step(
    experiment: ExperimentArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.hstu_attention.dispatch.find_spec", lambda name: True)
    sizes = {"train_batch_size": 2**28, "gradient_accumulation_steps": 2**20}
    asked = changed(changed(experiment, "network", **TRITON), "trainer", **sizes)
    model, _ = build_model(asked, FACTS, device_type="cuda")
    assert model.trunk.stack.config.attention_backend == "triton"


def test_auto_runs_norms_that_triton_lacks_in_pytorch_and_says_why(
    experiment: ExperimentArgs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("ops.hstu_attention.dispatch", "modules.hstu_config"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: True)
    wide = dataclasses.replace(experiment.network, hidden_size=10**6)
    built: dict[str, HSTUConfig] = {}
    with caplog.at_level("INFO", logger="modules.hstu_config"):
        for name in ("auto", "triton"):
            network = dataclasses.replace(wide, kernel_backend=name)
            try:
                built[name] = HSTUConfig.from_network(
                    network, disable_contextual_mask=False, device_type="cuda"
                )
            except NotImplementedError as refusal:
                assert "NetworkArgs.hidden_size: rows must be 1 to" in str(refusal)
    assert list(built) == ["auto"], "who names a backend gets it or nothing"
    assert built["auto"].attention_backend == "triton"
    assert built["auto"].elementwise_backend == "pytorch"
    assert "NetworkArgs.hidden_size: rows must be 1 to" in caplog.text
