"""Settings that run from the data to the figures: loader processes, splits, precision, tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import EmbeddingArgs, ExperimentArgs
from tests.support.experiments import (
    movielens_experiment,
    retrieval_experiment,
    synthetic_experiment,
    write_movielens,
)
from tests.support.two_ranks import TwoRanks
from training.distributed import World
from training.trainer import Trainer

SHORT = {"max_train_iters": 6, "eval_interval": 3}
RANDOM = {"num_negatives": 20, "negatives_sampler": "random"}


@pytest.fixture(scope="module")
def movielens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_movielens(tmp_path_factory.mktemp("movielens"))


def ranking(data: Path, folder: str, **dataset: Any) -> ExperimentArgs:
    changed = {"train_windows": "random", **dataset}
    return movielens_experiment(data, folder, trainer=SHORT, dataset=changed)


def retrieval(data: Path, folder: str, **dataset: Any) -> ExperimentArgs:
    changed = {"train_windows": "random", "shuffle_ties": True, **dataset}
    return retrieval_experiment(folder, data=data, trainer=SHORT, dataset=changed, retrieval=RANDOM)


@pytest.mark.parametrize("experiment", [ranking, retrieval])
def test_loader_processes_change_nothing(
    run_folder: str,
    world: World,
    movielens: Path,
    experiment: Callable[..., ExperimentArgs],
) -> None:
    figures = [
        Trainer(experiment(movielens, f"{run_folder}-{n}", num_workers=n), world=world).fit()
        for n in (0, 2)
    ]
    assert figures[0] == figures[1]


@pytest.mark.parametrize(
    ("dataset", "num_targets"),
    [
        ({"split": "by_user"}, 1),
        ({"split": "by_user", "max_num_candidates": 2}, 2),
        ({"split": "temporal", "max_num_candidates": 3}, 3),
        ({"split": "leave_one_out", "use_actions": False, "contextual_feature_names": ("age",)}, 1),
    ],
)
def test_every_split_trains_and_ranks_its_targets(
    run_folder: str, world: World, movielens: Path, dataset: dict[str, Any], num_targets: int
) -> None:
    trainer = Trainer(retrieval(movielens, run_folder, **dataset), world=world)
    figures = trainer.fit()
    assert figures["num_events"] == num_targets * len(trainer.datasets.test)
    assert 0 < figures["mrr"] < 1 and math.isfinite(figures["loss"])


def test_retrieval_in_bf16_follows_fp32(run_folder: str, world: World) -> None:
    losses = []
    for dtype in ("float32", "bfloat16"):
        experiment = retrieval_experiment(
            f"{run_folder}-{dtype}", trainer=SHORT, network={"dtype_str": dtype}
        )
        losses.append(Trainer(experiment, world=world).fit()["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def _build_with_items(rank: int, world_size: int, folder: str, num_items: int) -> str:
    from tests.support.experiments import cpu_world

    base = synthetic_experiment(folder)
    tables = [
        table
        if table.table_name != "item"
        else EmbeddingArgs(
            feature_names=("item",),
            table_name="item",
            item_vocab_size_or_capacity=num_items,
            sharding_type="model_parallel",
        )
        for table in base.dataset.embedding_args or ()
    ]
    experiment = synthetic_experiment(folder, dataset={"embedding_args": tuple(tables)})
    try:
        Trainer(experiment, world=cpu_world(rank, world_size)).evaluate("test")
    except ValueError as error:
        return str(error)
    return ""


def test_a_table_too_small_for_the_ranks_is_refused(run_folder: str, two_ranks: TwoRanks) -> None:
    for message in two_ranks.run(_build_with_items, run_folder, 1):
        assert "table 'item' must give each of 2 ranks a row, got 1" in message
        assert "sharding_type = 'data_parallel'" in message
    assert two_ranks.run(_build_with_items, run_folder, 2) == ["", ""]


def _nan_in_the_loss_of_rank_one(
    rank: int, world_size: int, folder: str, retrieval_args: dict[str, Any]
) -> str:
    from tests.support.experiments import cpu_world
    from training.step import NonFiniteError, TrainStep

    experiment = retrieval_experiment(folder, retrieval=retrieval_args)
    trainer = Trainer(experiment, world=cpu_world(rank, world_size))
    trainer.model.train()
    step = TrainStep(trainer.model.module, trainer.optimizer)
    if rank == 1:
        with torch.no_grad():
            trainer.model.module.trunk.norm.weight.fill_(math.nan)
    try:
        step(next(iter(trainer.loaders["train"].epoch(0))))
    except NonFiniteError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("args", [{}, RANDOM])
def test_the_rank_with_the_nan_is_named_though_negatives_are_shared(
    run_folder: str, two_ranks: TwoRanks, args: dict[str, Any]
) -> None:
    for message in two_ranks.run(_nan_in_the_loss_of_rank_one, run_folder, args):
        assert "step 1 is not finite (rank 1: the loss)" in message


def test_resuming_under_another_loss_is_refused(run_folder: str, world: World) -> None:
    Trainer(retrieval_experiment(run_folder, trainer=SHORT), world=world).fit()
    more = SHORT | {"max_train_iters": 8, "resume": "latest"}
    for changed in ({"num_negatives": 5}, {"temperature": 0.2}):
        experiment = retrieval_experiment(run_folder, trainer=more, retrieval=changed)
        with pytest.raises(ValueError, match=rf"RetrievalArgs.{next(iter(changed))} must be"):
            Trainer(experiment, world=world)


def test_weights_may_be_trained_on_at_another_temperature(run_folder: str, world: World) -> None:
    trained = Trainer(retrieval_experiment(run_folder, trainer=SHORT), world=world)
    trained.fit()
    start = SHORT | {"ckpt_load_dir": f"{run_folder}/checkpoints/step-00000006"}
    experiment = retrieval_experiment(
        f"{run_folder}-on", trainer=start, retrieval={"temperature": 0.2}
    )
    begun = Trainer(experiment, world=world)
    ours, theirs = (dict(t.model.module.trunk.named_parameters()) for t in (begun, trained))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_checkpoint_of_the_other_task_is_called_that(run_folder: str, world: World) -> None:
    Trainer(retrieval_experiment(run_folder, trainer=SHORT), world=world).fit()
    checkpoint = Path(run_folder) / "checkpoints" / "step-00000006"
    ranker = Trainer(synthetic_experiment(f"{run_folder}-ranking"), world=world)
    with pytest.raises(ValueError, match="a retrieval run, this is a ranking run.*retrieval.py"):
        ranker.evaluate_checkpoint(checkpoint)


def test_tables_beyond_all_memory_are_named(run_folder: str, world: World) -> None:
    huge = EmbeddingArgs(
        feature_names=("item",),
        table_name="item",
        item_vocab_size_or_capacity=2**36,
        sharding_type="model_parallel",
    )
    base = synthetic_experiment(run_folder)
    tables = [t for t in base.dataset.embedding_args or () if t.table_name != "item"]
    experiment = synthetic_experiment(run_folder, dataset={"embedding_args": (huge, *tables)})
    with pytest.raises(RuntimeError, match=r"'item' with 68719476736 rows of 16 numbers"):
        Trainer(experiment, world=world)
