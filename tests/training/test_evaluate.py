"""Evaluation: every real event once, whatever the batch size and the number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch

from configs.schema import ExperimentArgs
from data.batch import SequenceBatch
from data.loader import SequenceLoader
from tests.support.experiments import (
    FirstSamples,
    batch_of,
    cpu_world,
    synthetic_experiment,
    users_of_one_length,
)
from tests.support.two_ranks import TwoRanks
from training.distributed import World
from training.trainer import Trainer


def one_event_a_user(folder: str) -> ExperimentArgs:
    dataset = {"max_num_candidates": 1, "num_generated_batches": 50} | users_of_one_length()
    return synthetic_experiment(folder, dataset=dataset)


def first_users(trainer: Trainer, *, count: int, batch_size: int) -> SequenceLoader:
    return SequenceLoader(
        FirstSamples(trainer.datasets.test, count),
        batch_size=batch_size,
        shuffle=False,
        seed=0,
        rank=trainer.world.rank,
        world_size=trainer.world.world_size,
    )


def _figures(
    rank: int, world_size: int, folder: str, sizes: Sequence[tuple[int, int]]
) -> list[dict[str, float]]:
    """Figures of the first `count` test users at `batch_size` a rank, for each pair of `sizes`."""
    trainer = Trainer(one_event_a_user(folder), world=cpu_world(rank, world_size))
    return [
        trainer.evaluator(first_users(trainer, count=count, batch_size=batch_size))
        for count, batch_size in sizes
    ]


class Given:
    """A loader that yields the batches it was given."""

    def __init__(self, batches: list[SequenceBatch]) -> None:
        self._batches = batches

    def epoch(self, epoch: int) -> Iterator[SequenceBatch]:
        return iter(self._batches)


def _share(
    trainer: Trainer, rank: int, world_size: int, *, count: int, batch_size: int
) -> list[SequenceBatch]:
    """What a rank of a larger world would be fed."""
    loader = first_users(trainer, count=count, batch_size=batch_size)
    loader.rank, loader.world_size = rank, world_size
    return list(loader.epoch(0))


def pair_count(trainer: Trainer, *, count: int) -> float:
    """AUC as the share of ordered pairs, from scores of one user at a time."""
    trainer.model.eval()
    objective = trainer.model.module.trunk.objective
    scores, targets = [], []
    with torch.no_grad():
        for batch in first_users(trainer, count=count, batch_size=1).epoch(0):
            output = trainer.model.module(batch)
            scores += objective.scores(output.logits_EK)[:, 0].tolist()
            targets += objective.targets(output.labels_E)[:, 0].tolist()
    assert len(scores) == count
    positive = [s for s, t in zip(scores, targets, strict=True) if t]
    negative = [s for s, t in zip(scores, targets, strict=True) if not t]
    wins = sum((p > n) + 0.5 * (p == n) for p, n in itertools.product(positive, negative))
    return wins / (len(positive) * len(negative))


@pytest.mark.parametrize(("count", "batch_size"), [(103, 8), (128 + 11, 64)])
def test_auc_and_count_do_not_depend_on_the_number_of_ranks(
    run_folder: str, world: World, two_ranks: TwoRanks, count: int, batch_size: int
) -> None:
    """139 users at 64 a rank leave 11 for the last global batch, and none to the second rank."""
    trainer = Trainer(one_event_a_user(run_folder), world=world)
    expected = pair_count(trainer, count=count)
    sizes = [(count, batch_size)]
    found = _figures(0, 1, run_folder, sizes)
    found += sum(two_ranks.run(_figures, run_folder, sizes), [])
    shares = [_share(trainer, rank, 3, count=count, batch_size=batch_size) for rank in range(3)]
    found.append(trainer.evaluator(Given(sum(shares, []))))
    assert len(found) == 4
    for figures in found:
        assert figures["num_events"] == count
        assert figures["auc"] == pytest.approx(expected, abs=1e-6)
        assert figures == pytest.approx(found[0], rel=1e-6, nan_ok=True)  # gauc: one event a user


def test_three_users_on_two_ranks(run_folder: str, world: World, two_ranks: TwoRanks) -> None:
    """At 2 a rank the second rank has one user; at 4 a rank it has none."""
    sizes = [(3, 2), (3, 4)]
    alone = _figures(0, 1, run_folder, sizes)
    for found in two_ranks.run(_figures, run_folder, sizes):
        for figures, expected in zip(found, alone, strict=True):
            assert figures["num_events"] == 3
            assert figures == pytest.approx(expected, rel=1e-6, nan_ok=True)


def _given(
    rank: int, world_size: int, folder: str, shares: list[list[tuple[int, int]]]
) -> dict[str, float]:
    trainer = Trainer(synthetic_experiment(folder), world=cpu_world(rank, world_size))
    batch = batch_of(shares[rank], batch_size=4, first_user=sum(map(len, shares[:rank])))
    return trainer.evaluator(Given([batch]))


@pytest.mark.parametrize(
    ("second", "num_events"),
    [([(0, 3), (0, 1)], 9), ([(0, 0), (0, 0)], 5), ([(4, 0)], 5), ([], 5)],
    ids=["no history", "no events", "no candidates", "nobody"],
)
def test_a_rank_with_little_to_score(
    run_folder: str,
    world: World,
    two_ranks: TwoRanks,
    second: list[tuple[int, int]],
    num_events: int,
) -> None:
    first = [(4, 3), (6, 2)]
    alone = _given(0, 1, run_folder, [first + second])
    assert alone["num_events"] == num_events
    for figures in two_ranks.run(_given, run_folder, [first, second]):
        assert figures == pytest.approx(alone, rel=1e-6, nan_ok=True)
