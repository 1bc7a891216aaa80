"""TrainStep: what one step changes, and what a bad step leaves as it was."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from data.batch import SequenceBatch
from tests.support.experiments import batch_of, cpu_world, synthetic_experiment, weights
from tests.support.two_ranks import TwoRanks
from training.distributed import World
from training.step import NonFiniteError, TrainStep
from training.trainer import Trainer


def make(folder: str, world: World, **overrides: dict) -> tuple[Trainer, TrainStep]:
    trainer = Trainer(synthetic_experiment(folder, **overrides), world=world)
    trainer.model.train()
    clip_grad = trainer.experiment.optimizer.clip_grad
    return trainer, TrainStep(trainer.model.module, trainer.optimizer, clip_grad=clip_grad)


def batches(trainer: Trainer, count: int) -> list[SequenceBatch]:
    loader = trainer.loaders["train"]
    found = [batch for _, batch in zip(range(count), loader.epoch(0), strict=False)]
    assert len(found) == count
    return found


def test_every_trainable_tensor_moves(run_folder: str, world: World) -> None:
    biases = {"use_time_bias": True, "use_relative_position_bias": True}
    trainer, step = make(run_folder, world, network=biases)
    before = weights(trainer.model)
    for batch in batches(trainer, 3):
        step(batch)
    after = weights(trainer.model)
    unmoved = [name for name in before if torch.equal(before[name], after[name])]
    assert unmoved == []


def test_gradients_start_from_zero(run_folder: str, world: World) -> None:
    """At learning rate ~0 two steps on one batch see the same gradient: nothing piles up."""
    trainer, step = make(run_folder, world, optimizer={"learning_rate": 1e-30})
    (batch,) = batches(trainer, 1)
    first, second = step(batch), step(batch)
    assert first.grad_norm > 0
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    assert second.loss == pytest.approx(first.loss, rel=1e-6)


def test_overfits_eight_users(run_folder: str, world: World) -> None:
    trainer, step = make(
        run_folder, world, optimizer={"learning_rate": 2e-2, "sparse_learning_rate": 0.1}
    )
    (batch,) = batches(trainer, 1)
    losses = [step(batch).loss for _ in range(150)]
    assert losses[0] > 1.3
    assert losses[-1] < 0.05


def test_clipping_bounds_the_update_but_reports_the_true_norm(
    run_folder: str, world: World
) -> None:
    # SGD with rate 1 moves a parameter by exactly its gradient.
    overrides = {"optimizer_str": "sgd", "sparse_optimizer_str": "sgd", "learning_rate": 1.0}
    trainer, step = make(run_folder, world, optimizer=overrides | {"clip_grad": 1e-3})
    before = weights(trainer.model)
    result = step(batches(trainer, 1)[0])
    after = weights(trainer.model)
    dense = [name for name in before if name.startswith("trunk.")]
    moved = math.sqrt(sum(float((after[n] - before[n]).square().sum()) for n in dense))
    assert result.grad_norm > 1e-2
    assert moved <= 1e-3 * (1 + 1e-4)


def _spoil_item_gradient(module: torch.nn.Module, inputs: tuple) -> None:
    inputs[1]["item"].register_hook(lambda gradient: gradient * math.nan)


@pytest.mark.parametrize("where", ["loss", "dense gradient", "table gradient"])
def test_bad_step_changes_nothing_and_names_its_cause(
    run_folder: str, world: World, where: str
) -> None:
    trainer, step = make(run_folder, world)
    good, bad, *_ = batches(trainer, 2)
    step(good)
    trunk = trainer.model.module.trunk
    if where == "loss":
        trunk.head.register_forward_hook(lambda module, inputs, output: output * math.nan)
        expected = "the loss"
    elif where == "dense gradient":
        weight = dict(trunk.named_parameters())["head.layers.0.weight"]
        weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        expected = "head.layers.0.weight"
    else:
        trunk.register_forward_pre_hook(_spoil_item_gradient)
        expected = "embeddings of item"
    before, optimizer_before = weights(trainer.model), trainer.optimizer.dense_state()
    optimizer_before = {
        n: {k: t.clone() for k, t in s.items()} for n, s in optimizer_before.items()
    }
    with pytest.raises(NonFiniteError, match=rf"step 2 .*rank 0: .*{expected}"):
        step(bad)
    assert step.num_steps == 1
    after = weights(trainer.model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name, state in trainer.optimizer.dense_state().items():
        assert all(torch.equal(state[key], optimizer_before[name][key]) for key in state)


def _nan_on_rank_one(rank: int, world_size: int, folder: str) -> dict:
    trainer, step = make(folder, cpu_world(rank, world_size), trainer={"train_batch_size": 4})
    feed = batches(trainer, 3)
    step(feed[0])
    step(feed[1])
    before = weights(trainer.model)
    if rank == 1:
        weight = dict(trainer.model.module.trunk.named_parameters())["head.layers.0.weight"]
        weight.register_hook(lambda gradient: gradient * math.nan)
    try:
        step(feed[2])
    except NonFiniteError as error:
        after = weights(trainer.model)
        return {"error": str(error), "kept": all(torch.equal(before[n], after[n]) for n in before)}
    return {"error": "none", "kept": False}


def test_two_ranks_see_a_nan_of_one(run_folder: str, two_ranks: TwoRanks) -> None:
    first, second = two_ranks.run(_nan_on_rank_one, run_folder)
    for outcome in (first, second):
        assert "step 3 " in outcome["error"]
        assert "rank 1: the gradient of head.layers.0.weight" in outcome["error"]
        assert "rank 0" not in outcome["error"]
        assert outcome["kept"]


# SGD shows the size of a gradient, which Adam's first step hides.
SGD = {"optimizer_str": "sgd", "sparse_optimizer_str": "sgd", "learning_rate": 1.0}
Users = list[tuple[int, int]]


def _step_on_share(
    rank: int, world_size: int, folder: str, shares: Sequence[Users], optimizer: dict[str, Any]
) -> dict[str, Any]:
    """One step on this rank's users, given as (history events, candidates)."""
    world = cpu_world(rank, world_size)
    trainer, step = make(folder, world, trainer={"train_batch_size": 4}, optimizer=optimizer)
    first_user = sum(map(len, shares[:rank]))
    before = weights(trainer.model)
    result = step(batch_of(shares[rank], batch_size=4, first_user=first_user))
    return {
        "before": before,
        "after": weights(trainer.model),
        "result": dataclasses.asdict(result),
    }


SHARES: dict[str, list[Users]] = {
    "5 and 1 labels": [[(4, 3), (6, 2)], [(5, 1)]],
    "5 and 0 labels": [[(4, 3), (6, 2)], [(5, 0), (2, 0)]],
    "5 labels and nobody": [[(4, 3), (6, 2)], []],
    "nobody and 5 labels": [[], [(4, 3), (6, 2)]],
    "nobody with a history": [[(4, 3), (6, 2)], [(0, 1), (0, 3)]],
    "users without events": [[(4, 3)], [(0, 0), (0, 0)]],
    "not one label": [[(4, 0)], []],
}


@pytest.mark.parametrize("clip_grad", [None, 0.05])
@pytest.mark.parametrize("case", SHARES)
def test_a_label_weighs_the_same_on_any_rank(
    run_folder: str, world: World, two_ranks: TwoRanks, case: str, clip_grad: float | None
) -> None:
    """A step of two ranks is the step of one process on all their users."""
    optimizer = SGD | {"clip_grad": clip_grad}
    union = sum(SHARES[case], [])
    alone = _step_on_share(0, 1, run_folder, [union], optimizer)
    pair = two_ranks.run(_step_on_share, run_folder, SHARES[case], optimizer)
    num_labels = sum(candidates for _, candidates in union)
    for found in pair:
        assert found["result"]["num_labels"] == num_labels
        assert found["result"]["num_samples"] == len(union)
        assert found["result"] == pytest.approx(alone["result"], rel=1e-5)
    assert any(not torch.equal(alone["after"][n], alone["before"][n]) for n in alone["after"]) == (
        num_labels > 0
    )
    for name, expected in alone["after"].items():
        parts = [found["after"][name] for found in pair]
        together = torch.cat(parts) if name.startswith("tables.") else parts[0]
        torch.testing.assert_close(together, expected, rtol=0, atol=1e-6, msg=name)


def _three_samples(rank: int, world_size: int, folder: str) -> list[int]:
    trainer, step = make(folder, cpu_world(rank, world_size))
    users = [(3, 2), (4, 1)] if rank == 0 else [(2, 2)]
    none: Users = [(3, 2), (4, 1), (2, 2)] if rank == 0 else []
    fed = (batch_of(users, batch_size=2, first_user=2 * rank), batch_of(none, batch_size=4))
    return [step(batch).num_samples for batch in (*fed, *fed)]


def test_three_samples_on_two_ranks_count_as_three(run_folder: str, two_ranks: TwoRanks) -> None:
    """Short and empty batches in turn: training goes on after either."""
    assert two_ranks.run(_three_samples, run_folder) == [[3, 3, 3, 3]] * 2


def test_padding_users_leave_item_zero_alone(run_folder: str, world: World) -> None:
    """One real user among eight; item 0 is an ordinary row that only its own events move."""
    trainer, step = make(run_folder, world, optimizer=SGD)
    batch = batch_of([(6, 3)], batch_size=8)
    (name,) = (name for name in weights(trainer.model) if name.startswith("tables."))
    ids = batch.features["item"].values()
    for first_id in (1, 0):
        ids.copy_(torch.arange(first_id, first_id + 9))
        before = weights(trainer.model)[name].view(60, -1)
        step(batch)
        after = weights(trainer.model)[name].view(60, -1)
        assert (after != before).any(dim=1).nonzero()[:, 0].tolist() == ids.tolist()
