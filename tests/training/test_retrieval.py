"""Retrieval through the trainer: it learns, and no way to run it changes a result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import ExperimentArgs
from tests.support.experiments import (
    cpu_world,
    replicated_items,
    retrieval_experiment,
    users_of_one_length,
    weights,
    write_movielens,
)
from tests.support.two_ranks import TwoRanks
from training.distributed import World
from training.step import TrainStep
from training.trainer import Trainer

DROPOUT = {"hidden_dropout": 0.2, "input_dropout": 0.1}
RANDOM = {"num_negatives": 20, "negatives_sampler": "random"}
BIASES = {"use_time_bias": True, "use_relative_position_bias": True}
FIGURES = ["loss", "hr@10", "ndcg@10", "hr@50", "mrr"]


@pytest.fixture(scope="module")
def movielens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_movielens(tmp_path_factory.mktemp("movielens"))


def records(folder: str | Path, split: str) -> list[dict[str, Any]]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["split"] == split]


def losses(folder: str | Path) -> list[float]:
    return [record["loss"] for record in records(folder, "train")]


LEARNERS: dict[str, dict[str, Any]] = {
    "in-batch": {},
    "few in-batch": {"retrieval": {"num_negatives": 50}},
    "random": {"retrieval": RANDOM | {"num_negatives": 50}},
    "not normalised": {"retrieval": {"normalize_embeddings": False, "temperature": 1.0}},
    "narrow items": {"network": {"item_embedding_dim": 8}},
}


@pytest.mark.parametrize("case", LEARNERS)
def test_finds_the_planted_transitions(run_folder: str, world: World, case: str) -> None:
    """60 items: chance is 10/60 for HR@10, and about .076 for NDCG@10."""
    changed = LEARNERS[case]
    experiment = retrieval_experiment(
        run_folder,
        trainer={"max_train_iters": 160, "train_batch_size": 32, "eval_interval": 50},
        optimizer={"learning_rate": 2e-2, "sparse_learning_rate": 0.3},
        dataset={"num_generated_batches": 30} | users_of_one_length(),
        network={"embedding_init_std": 0.1} | changed.get("network", {}),
        retrieval=changed.get("retrieval"),
    )
    trainer = Trainer(experiment, world=world)
    untrained = trainer.evaluate("test")
    assert untrained["hr@10"] < 0.3
    figures = trainer.fit()
    held_out = [int(batch.num_candidates_B.sum()) for batch in trainer.loaders["test"].epoch(0)]
    assert figures["num_events"] == sum(held_out)
    assert figures["hr@10"] > 0.45
    assert figures["ndcg@10"] > 0.25
    (test,) = records(run_folder, "test")
    assert list(test)[:7] == ["step", "split", *FIGURES]
    assert {"grad_norm", "lr", "tokens_per_s"} <= set(records(run_folder, "train")[0])


@pytest.mark.parametrize("case", ["in-batch", "random"])
def test_every_trainable_tensor_moves(run_folder: str, world: World, case: str) -> None:
    network = BIASES | {"item_embedding_dim": 8, "contextual_embedding_dim": 4}
    retrieval = LEARNERS[case].get("retrieval")
    trainer = Trainer(
        retrieval_experiment(
            run_folder,
            network=network,
            retrieval=retrieval,
            dataset={"contextual_feature_names": ("user_id", "age")},
        ),
        world=world,
    )
    trainer.model.train()
    step = TrainStep(trainer.model.module, trainer.optimizer)
    before = weights(trainer.model)
    step(next(trainer.loaders["train"].epoch(0)))
    after = weights(trainer.model)
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_gradients_start_from_zero(run_folder: str, world: World) -> None:
    trainer = Trainer(
        retrieval_experiment(run_folder, optimizer={"learning_rate": 1e-30}), world=world
    )
    trainer.model.train()
    step = TrainStep(trainer.model.module, trainer.optimizer, num_parts=2)
    batch = next(trainer.loaders["train"].epoch(0))
    first, second = step(batch), step(batch)
    assert first.grad_norm > 0
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    assert second.loss == pytest.approx(first.loss, rel=1e-6)


def watch_samples(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Sample ids and random negatives of every batch that a step trains on, in order."""
    seen: list[list[int]] = []
    plain = TrainStep.__call__

    def watched(self: TrainStep, batch: Any, **options: Any) -> Any:
        end = len(batch.features.values())
        negatives = batch.features.values()[end - batch.num_negatives : end]
        seen.append([s for s in batch.sample_ids_B.tolist() if s >= 0] + negatives.tolist())
        return plain(self, batch, **options)

    monkeypatch.setattr(TrainStep, "__call__", watched)
    return seen


@pytest.mark.parametrize(
    ("pipeline_type", "retrieval", "train_windows", "batch_size", "num_parts"),
    [("none", None, "all", 5, 1), ("native", RANDOM, "random", 6, 3)],
)
def test_resume_repeats_the_straight_run(
    movielens: Path,
    tmp_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    pipeline_type: str,
    retrieval: dict[str, Any] | None,
    train_windows: str,
    batch_size: int,
    num_parts: int,
) -> None:
    """12 steps = 7 + 5 in a new trainer, over an epoch end, with dropout and shuffling."""
    seen = watch_samples(monkeypatch)

    def experiment(folder: Path, **trainer: Any) -> ExperimentArgs:
        settings = {
            "max_train_iters": 12,
            "train_batch_size": batch_size,
            "pipeline_type": pipeline_type,
            "ckpt_save_interval": 7,
            "eval_interval": 5,
            "gradient_accumulation_steps": num_parts,
        }
        return retrieval_experiment(
            str(folder),
            data=movielens,
            trainer=settings | trainer,
            dataset={"train_windows": train_windows},
            network=DROPOUT,
            retrieval=retrieval,
        )

    straight = Trainer(experiment(tmp_path / "straight"), world=world)
    batches_per_epoch = straight.loaders["train"].num_batches
    assert 7 < batches_per_epoch < 12, "the resumed part must cross an epoch end"
    expected = straight.fit()
    straight_samples = list(seen)
    assert straight_samples[:batches_per_epoch] != straight_samples[batches_per_epoch:]

    seen.clear()
    interrupted = Trainer(experiment(tmp_path / "resumed"), world=world)
    interrupted.num_steps = 9
    interrupted.fit()
    (tmp_path / "resumed/checkpoints/step-00000009/state.json").unlink()
    torch.manual_seed(99)
    resumed = Trainer(experiment(tmp_path / "resumed", resume="latest"), world=world)
    assert resumed.first_step == 7
    del seen[7:]
    figures = resumed.fit()
    assert seen == straight_samples
    assert losses(tmp_path / "resumed") == losses(tmp_path / "straight")
    assert figures == expected
    for split in ("validation", "test"):
        assert records(tmp_path / "resumed", split) == records(tmp_path / "straight", split)


@pytest.mark.parametrize("retrieval", [None, RANDOM])
def test_pipelines_agree(
    movielens: Path, tmp_path: Path, world: World, retrieval: dict[str, Any] | None
) -> None:
    outcomes = []
    for pipeline_type in ("none", "native"):
        folder = tmp_path / pipeline_type
        experiment = retrieval_experiment(
            str(folder),
            data=movielens,
            trainer={"pipeline_type": pipeline_type, "max_train_iters": 8, "eval_interval": 3},
            network=DROPOUT,
            retrieval=retrieval,
        )
        figures = Trainer(experiment, world=world).fit()
        outcomes.append((losses(folder), records(folder, "validation"), figures))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("retrieval", [None, RANDOM])
def test_evaluation_leaves_training_alone(
    tmp_path: Path, world: World, movielens: Path, retrieval: dict[str, Any] | None
) -> None:
    found = []
    for interval in (100, 2):
        folder = tmp_path / str(interval)
        trainer = Trainer(
            retrieval_experiment(
                str(folder),
                data=movielens,
                trainer={"eval_interval": interval},
                network=DROPOUT,
                retrieval=retrieval,
            ),
            world=world,
        )
        trainer.fit()
        before, stream = weights(trainer.model), torch.get_rng_state()
        first = trainer.evaluate("test")
        assert trainer.evaluate("test") == first
        assert torch.equal(torch.get_rng_state(), stream)
        after = weights(trainer.model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        found.append((losses(folder), after))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


# All with a clip that bites: without it the runs would agree whatever the norm is taken over.
UNION: dict[str, dict[str, Any]] = {
    "in-batch": {},
    "few in-batch": {"retrieval": {"num_negatives": 10}},
    "random": {"retrieval": RANDOM},
}


def union_experiment(
    folder: str, data: str, *, batch_size: int, case: str, num_parts: int = 1
) -> ExperimentArgs:
    return retrieval_experiment(
        folder,
        data=Path(data),
        trainer={
            "max_train_iters": 12,
            "train_batch_size": batch_size,
            "eval_batch_size": 5,
            "eval_interval": 5,
            "gradient_accumulation_steps": num_parts,
        },
        optimizer={"clip_grad": 1.0},
        **UNION[case],
    )


def _train_on_two(rank: int, world_size: int, folder: str, data: str, case: str) -> Any:
    experiment = union_experiment(folder, data, batch_size=4, case=case, num_parts=2)
    trainer = Trainer(experiment, world=cpu_world(rank, world_size))
    figures = trainer.fit()
    dense = {n: p.detach().clone() for n, p in trainer.model.module.trunk.named_parameters()}
    return figures, dense


@pytest.mark.parametrize("case", UNION)
def test_two_processes_equal_one_on_the_union_batch(
    movielens: Path, tmp_path: Path, world: World, two_ranks: TwoRanks, case: str
) -> None:
    data = str(movielens)
    one = Trainer(
        union_experiment(str(tmp_path / "one"), data, batch_size=8, case=case), world=world
    )
    expected = one.fit()
    (first, dense), (second, other) = two_ranks.run(
        _train_on_two, str(tmp_path / "two"), data, case
    )
    assert len(losses(tmp_path / "two")) == 12
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert first == second
    assert first.pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-5)
    assert first == pytest.approx(expected, abs=1e-6, rel=0)
    for name, value in dense.items():
        assert torch.equal(value, other[name]), f"replicas of {name} drifted apart"


@pytest.mark.parametrize("max_num_candidates", [0, 3])
def test_every_held_out_event_is_scored(
    movielens: Path, tmp_path: Path, world: World, max_num_candidates: int
) -> None:
    """24 users have 4 events or more; without candidates set, one event of each is held out."""
    experiment = retrieval_experiment(
        str(tmp_path / "run"), data=movielens, dataset={"max_num_candidates": max_num_candidates}
    )
    trainer = Trainer(experiment, world=world)
    figures = trainer.evaluate("test")
    if max_num_candidates == 0:
        assert figures["num_events"] == 24
    else:
        assert figures["num_events"] == 3 * trainer.loaders["test"].num_samples


@pytest.mark.parametrize("pipeline_type", ["none", "native"])
def test_runs_with_a_replicated_item_table(
    tmp_path: Path, world: World, pipeline_type: str
) -> None:
    experiment = replicated_items(
        retrieval_experiment(
            str(tmp_path / "run"), trainer={"pipeline_type": pipeline_type, "max_train_iters": 3}
        )
    )
    figures = Trainer(experiment, world=world).fit()
    assert len(losses(tmp_path / "run")) == 3
    assert 0 <= figures["mrr"] <= 1


OTHER_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "actions": ("DatasetArgs.use_actions", {"dataset": {"use_actions": False}}),
    "contextual": (
        "DatasetArgs.contextual_feature_names",
        {"dataset": {"contextual_feature_names": ("age", "user_id")}},
    ),
    "normalisation": (
        "RetrievalArgs.normalize_embeddings",
        {"retrieval": {"normalize_embeddings": False}},
    ),
    "temperature": ("RetrievalArgs.temperature", {"retrieval": {"temperature": 0.2}}),
    "norm": ("RetrievalArgs.l2_norm_eps", {"retrieval": {"l2_norm_eps": 1e-3}}),
    "positions": (
        "NetworkArgs.use_position_embedding",
        {"network": {"use_position_embedding": False}},
    ),
}


@pytest.fixture(scope="module")
def trained(
    movielens: Path, tmp_path_factory: pytest.TempPathFactory, world: World
) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings = {"max_train_iters": 2}
    trainer = Trainer(
        retrieval_experiment(str(folder), data=movielens, trainer=settings), world=world
    )
    figures = trainer.fit()
    return folder / "checkpoints" / "step-00000002", figures


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_evaluation_of_another_model_is_refused_by_its_field(
    movielens: Path, tmp_path: Path, world: World, trained: tuple[Path, Any], case: str
) -> None:
    field, changed = OTHER_MODELS[case]
    other = retrieval_experiment(str(tmp_path / "run"), data=movielens, **changed)
    with pytest.raises(ValueError, match=rf"{field} must be .* as in .*, got "):
        Trainer(other, world=world).evaluate_checkpoint(trained[0])


@pytest.mark.parametrize(
    "changed",
    [
        {"retrieval": RANDOM},
        {"retrieval": {"eval_metrics": ("HR@3", "MRR")}},
        {"trainer": {"gradient_accumulation_steps": 4, "eval_batch_size": 3}},
    ],
)
def test_settings_of_the_training_leave_evaluation_as_it_is(
    movielens: Path,
    tmp_path: Path,
    world: World,
    trained: tuple[Path, dict[str, float]],
    changed: dict[str, Any],
) -> None:
    checkpoint, expected = trained
    other = retrieval_experiment(str(tmp_path / "run"), data=movielens, **changed)
    found = Trainer(other, world=world).evaluate_checkpoint(checkpoint)["test"]
    shared = {name: value for name, value in found.items() if name in expected}
    assert shared == pytest.approx(expected, rel=1e-6)
