"""From settings to tables and objective."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from configs.schema import DatasetArgs, EmbeddingArgs, ExperimentArgs, RankingArgs
from data.dataset import FeatureFacts
from model.build import build_ranking_model, ranking_objective, table_specs
from tests.support.experiments import synthetic_experiment

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
    model, _ = build_ranking_model(experiment, FACTS, device_type="cpu")
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
