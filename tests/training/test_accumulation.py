"""Gradient accumulation: a step in parts is the step in one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.schema import ExperimentArgs
from data.batch import SequenceBatch, with_negatives
from tests.support.experiments import (
    batch_of,
    cpu_world,
    replicated_items,
    retrieval_experiment,
    synthetic_experiment,
    weights,
)
from tests.support.two_ranks import TwoRanks
from training.distributed import World
from training.step import NonFiniteError, TrainStep
from training.trainer import Trainer

# SGD shows the size of a gradient, which Adam's first step hides.
SGD = {"optimizer_str": "sgd", "sparse_optimizer_str": "sgd", "learning_rate": 0.05}
# Eight places: the first part of four has the longest users, the last one nobody.
USERS = [(9, 3), (0, 2), (1, 0), (5, 1), (0, 0), (2, 3)]
HISTORIES = [(9, 0), (7, 0), (1, 0), (5, 0), (0, 0), (2, 0)]
# Three different rows of items that users have, too, and two that they may not have.
NEGATIVES = np.array([3, 17, 41, 58, 59])


def ranking(folder: str, optimizer: dict[str, Any]) -> ExperimentArgs:
    return synthetic_experiment(folder, optimizer=optimizer)


def history_loss(folder: str, optimizer: dict[str, Any]) -> ExperimentArgs:
    return synthetic_experiment(folder, optimizer=optimizer, dataset={"max_num_candidates": 0})


def batch_scaling(folder: str, optimizer: dict[str, Any]) -> ExperimentArgs:
    return synthetic_experiment(folder, optimizer=optimizer, network={"scaling_seqlen": "batch"})


def in_batch(folder: str, optimizer: dict[str, Any]) -> ExperimentArgs:
    return retrieval_experiment(folder, optimizer=optimizer)


def few_in_batch(folder: str, optimizer: dict[str, Any]) -> ExperimentArgs:
    return retrieval_experiment(folder, optimizer=optimizer, retrieval={"num_negatives": 5})


def drawn(folder: str, optimizer: dict[str, Any]) -> ExperimentArgs:
    retrieval = {"num_negatives": len(NEGATIVES), "negatives_sampler": "random"}
    return retrieval_experiment(folder, optimizer=optimizer, retrieval=retrieval)


def in_batch_of_a_replicated_table(folder: str, optimizer: dict[str, Any]) -> ExperimentArgs:
    return replicated_items(in_batch(folder, optimizer))


def drawn_from_a_replicated_table(folder: str, optimizer: dict[str, Any]) -> ExperimentArgs:
    return replicated_items(drawn(folder, optimizer))


CASES = [
    ranking,
    history_loss,
    batch_scaling,
    in_batch,
    few_in_batch,
    drawn,
    in_batch_of_a_replicated_table,
    drawn_from_a_replicated_table,
]


def whole_batch(experiment: ExperimentArgs, users: list[tuple[int, int]]) -> SequenceBatch:
    batch = batch_of(users, batch_size=8)
    if experiment.retrieval is not None and experiment.retrieval.negatives_sampler == "random":
        return with_negatives(batch, NEGATIVES)
    return batch


def step_in_parts(
    experiment: ExperimentArgs, world: World, batch: SequenceBatch, num_parts: int
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Figures of one step, and all weights before and after it."""
    trainer = Trainer(experiment, world=world)
    trainer.model.train()
    step = TrainStep(
        trainer.model.module,
        trainer.optimizer,
        clip_grad=experiment.optimizer.clip_grad,
        num_parts=num_parts,
    )
    before = weights(trainer.model)
    result = step(batch)
    return dataclasses.asdict(result), before, weights(trainer.model)


@pytest.mark.parametrize("clip_grad", [None, 0.05])
@pytest.mark.parametrize("case", CASES)
def test_parts_add_up_to_the_whole_step(
    run_folder: str, world: World, case: Any, clip_grad: float | None
) -> None:
    experiment = case(run_folder, SGD | {"clip_grad": clip_grad})
    users = USERS if experiment.ranking is not None else HISTORIES
    batch = whole_batch(experiment, users)
    figures, before, expected = step_in_parts(experiment, world, batch, 1)
    assert clip_grad is None or figures["grad_norm"] > clip_grad
    moved = [name for name in expected if not torch.equal(before[name], expected[name])]
    assert any("table_item" in name for name in moved)
    assert any("stack" in name for name in moved)
    for num_parts in (2, 4, 8):
        found, _, after = step_in_parts(experiment, world, batch, num_parts)
        assert found == pytest.approx(figures, rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_the_update_follows_the_true_gradient(run_folder: str, world: World, case: Any) -> None:
    """A small step along -g lowers the loss by rate * |g|^2: nothing is left out or counted twice,
    neither between the parts nor between targets and negatives."""
    rate = 3e-6
    experiment = case(run_folder, SGD | {"learning_rate": rate})
    trainer = Trainer(experiment, world=world)
    trainer.model.train()
    step = TrainStep(trainer.model.module, trainer.optimizer, num_parts=4)
    batch = whole_batch(experiment, USERS if experiment.ranking is not None else HISTORIES)
    before = weights(trainer.model)
    first = step(batch)
    after = weights(trainer.model)
    second = step(batch)
    squares = [float((after[n].double() - before[n].double()).square().sum()) for n in before]
    assert first.loss - second.loss == pytest.approx(sum(squares) / rate, rel=0.02)


@pytest.mark.parametrize(
    "retrieval",
    [{"num_negatives": 60}, {"num_negatives": 60, "negatives_sampler": "random"}],
    ids=["enough in-batch", "the same at random"],
)
def test_samplers_that_give_the_same_negatives_make_the_same_step(
    run_folder: str, world: World, retrieval: dict[str, Any]
) -> None:
    plain = in_batch(run_folder, SGD)
    batch = batch_of(HISTORIES, batch_size=8)
    items = np.unique(batch.features["item"].values().numpy())
    figures, _, expected = step_in_parts(plain, world, batch, 2)
    other = dataclasses.replace(plain, retrieval=dataclasses.replace(plain.retrieval, **retrieval))
    if "negatives_sampler" in retrieval:
        batch = with_negatives(batch, items[::-1].copy())
    found, _, after = step_in_parts(other, world, batch, 2)
    assert found["loss"] == pytest.approx(figures["loss"], rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6, msg=name)


class Kept:
    """A tensor that a forward pass keeps for its backward pass, counted while it lives."""

    num_bytes = most_bytes = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        Kept.num_bytes += tensor.nbytes
        Kept.most_bytes = max(Kept.most_bytes, Kept.num_bytes)

    def __del__(self) -> None:
        Kept.num_bytes -= self.tensor.nbytes


@pytest.mark.parametrize("case", [ranking, in_batch])
def test_parts_keep_less_at_a_time(run_folder: str, world: World, case: Any) -> None:
    experiment = case(run_folder, SGD)
    batch = batch_of([(9, 0)] * 8, batch_size=8)
    most = {}
    for num_parts in (1, 4):
        Kept.most_bytes = 0
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            step_in_parts(experiment, world, batch, num_parts)
        most[num_parts] = Kept.most_bytes
    assert most[4] < 0.45 * most[1]


def test_one_part_of_several_that_is_not_finite_changes_nothing(
    run_folder: str, world: World
) -> None:
    trainer = Trainer(ranking(run_folder, SGD), world=world)
    trainer.model.train()
    calls: list[int] = []

    def spoil(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        calls.append(len(output))
        return output * float("nan") if len(calls) == 2 else output

    trainer.model.module.trunk.head.register_forward_hook(spoil)
    step = TrainStep(trainer.model.module, trainer.optimizer, num_parts=4)
    before = weights(trainer.model)
    with pytest.raises(NonFiniteError, match="step 1 .*rank 0: the loss"):
        step(batch_of(USERS, batch_size=8))
    assert len(calls) == 4
    after = weights(trainer.model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def _in_parts(rank: int, world_size: int, folder: str, name: str, num_parts: int) -> Any:
    experiment = globals()[name](folder, SGD)
    share = [HISTORIES[:2], HISTORIES[2:]][rank]
    batch = batch_of(share, batch_size=4, first_user=2 * rank)
    if experiment.retrieval.negatives_sampler == "random":
        batch = with_negatives(batch, NEGATIVES)
    trainer = Trainer(experiment, world=cpu_world(rank, world_size))
    trainer.model.train()
    result = TrainStep(trainer.model.module, trainer.optimizer, num_parts=num_parts)(batch)
    return dataclasses.asdict(result), weights(trainer.model)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c not in (ranking, history_loss, batch_scaling)]
)
def test_two_ranks_in_parts_equal_one_process_on_the_union(
    run_folder: str, world: World, two_ranks: TwoRanks, case: Any
) -> None:
    """Negatives are those of the whole global batch, whatever ranks and parts there are."""
    experiment = case(run_folder, SGD)
    batch = whole_batch(experiment, HISTORIES)
    figures, _, expected = step_in_parts(experiment, world, batch, 1)
    for num_parts in (1, 4):
        pair = two_ranks.run(_in_parts, run_folder, case.__name__, num_parts)
        for found, _ in pair:
            assert found == pytest.approx(figures, rel=1e-5)
        for name, value in expected.items():
            parts = [after[name] for _, after in pair]
            together = torch.cat(parts) if name.startswith("tables.") else parts[0]
            torch.testing.assert_close(together, value, rtol=0, atol=1e-6, msg=name)
