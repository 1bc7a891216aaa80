"""Full-catalogue evaluation over sharded tables, against brute force in numpy."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import ExperimentArgs
from data.batch import SequenceBatch
from data.dataset import SequenceDataset
from modules.embedding import lookup_results
from tests.support.experiments import (
    batch_of,
    cpu_world,
    retrieval_experiment,
    users_of_one_length,
    write_movielens,
)
from tests.support.two_ranks import TwoRanks
from training.distributed import World
from training.trainer import Trainer

NUM_ITEMS, NUM_ROWS = 60, 70
USERS = [(5, 2), (1, 1), (0, 1), (7, 0), (3, 3)]
MISSING = [0, 13, 37, 59]


class KnownItems:
    """A split of given users that says itself which items there are, and who had which."""

    def __init__(self, dataset: SequenceDataset | None = None) -> None:
        self.fingerprint = "known"

    def catalogue(self) -> np.ndarray:
        """Fewer rows than the table has, and holes."""
        mask = np.ones(NUM_ITEMS, bool)
        mask[MISSING] = False
        return mask

    def seen(self, user: int) -> list[int]:
        """Twelve items, perhaps repeated, and the user's own history and first candidate."""
        draw = np.random.default_rng(100 + user)
        history, candidates = USERS[user]
        own = users_batch(user, user + 1, batch_size=1).features["item"].values().tolist()
        return draw.integers(0, NUM_ITEMS, 12).tolist() + own[: history + min(1, candidates)]

    def seen_items(self, sample_ids_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lists = [self.seen(int(s)) if s >= 0 else [] for s in sample_ids_S]
        return (
            np.array(list(itertools.chain(*lists)), np.int64),
            np.array([len(each) for each in lists], np.int64),
        )


class Given:
    """A loader that yields the batches it was given."""

    def __init__(self, batches: list[SequenceBatch]) -> None:
        self._batches = batches
        self.dataset = KnownItems()

    def epoch(self, epoch: int) -> Iterator[SequenceBatch]:
        return iter(self._batches)


def users_batch(first: int, last: int, *, batch_size: int) -> SequenceBatch:
    """Users first..last - 1 of USERS; real item ids only, so that every target exists."""
    batch = batch_of(USERS[first:last], batch_size=batch_size, first_user=first)
    ids = batch.features["item"].values()
    known = torch.tensor([i for i in range(NUM_ITEMS) if i not in MISSING])
    end = len(ids)
    batch.features.values()[:end] = known[batch.features.values()[:end] % len(known)]
    return batch


def make(folder: str, world: World, kind: str = "cosine") -> Trainer:
    """An untrained model with rows that are far apart, the item table larger than the catalogue."""
    base = retrieval_experiment(
        folder,
        network={"embedding_init_std": 1.0}
        | ({"item_embedding_dim": 12} if kind == "wide" else {}),
        retrieval={
            "normalize_embeddings": kind != "inner",
            "eval_metrics": ("HR@3", "NDCG@500", "MRR"),
        },
    )
    sharding = "data_parallel" if kind == "replicated" else "model_parallel"
    tables = tuple(
        dataclasses.replace(t, item_vocab_size_or_capacity=NUM_ROWS, sharding_type=sharding)
        if t.table_name == "item"
        else t
        for t in base.dataset.embedding_args
    )
    dataset = dataclasses.replace(base.dataset, embedding_args=tables)
    return Trainer(dataclasses.replace(base, dataset=dataset), world=world)


def item_rows(trainer: Trainer) -> np.ndarray:
    """The whole item table of a single process."""
    trunk = trainer.model.module.trunk
    if trunk.replicated.serves("item"):
        return trunk.replicated.weight("item").detach().double().numpy()
    (table,) = (v for n, v in trainer.model.state_dict().items() if "table_item" in n)
    return torch.cat([s.tensor for s in table.local_shards()]).double().numpy()


def brute_force(trainer: Trainer) -> dict[str, float]:
    """Each user in a batch of its own, each item in turn, sorted by hand."""
    objective = trainer.model.module.trunk.objective.similarity
    rows, catalogue = item_rows(trainer), KnownItems().catalogue()

    def unit(x: np.ndarray) -> np.ndarray:
        if not objective.is_normalized:
            return x
        return x / max(np.linalg.norm(x), objective.l2_norm_eps)

    ranks, losses = [], []
    trainer.model.eval()
    for user in range(len(USERS)):
        batch = users_batch(user, user + 1, batch_size=1)
        with torch.no_grad():
            rows_of = lookup_results(trainer.model.module.tables(batch.features))
            asked = trainer.model.module.trunk.held_out(batch, rows_of)
        query = unit(asked.query_BD[0].double().numpy())
        scores = np.array([query @ unit(row) / objective.temperature for row in rows])
        real = [i for i in range(NUM_ITEMS) if catalogue[i]]
        seen = set(KnownItems().seen(user))
        for target in asked.target_ids_C.tolist():
            rivals = [i for i in real if i not in seen and i != target]
            ranks.append(1 + sum(scores[i] >= scores[target] - 1e-9 for i in rivals))
            losses.append(math.log(np.exp(scores[real]).sum()) - scores[target])
    trainer.model.train()
    return {
        "loss": float(np.mean(losses)),
        "num_events": len(ranks),
        "hr@3": float(np.mean([rank <= 3 for rank in ranks])),
        "ndcg@3": float(np.mean([1 / math.log2(r + 1) if r <= 3 else 0 for r in ranks])),
        "hr@10": float(np.mean([rank <= 10 for rank in ranks])),
        "ndcg@10": float(np.mean([1 / math.log2(r + 1) if r <= 10 else 0 for r in ranks])),
        "hr@500": 1.0,
        "ndcg@500": float(np.mean([1 / math.log2(r + 1) for r in ranks])),
        "hr@50": float(np.mean([rank <= 50 for rank in ranks])),
        "mrr": float(np.mean([1 / rank for rank in ranks])),
    }


def _figures(
    rank: int, world_size: int, folder: str, kind: str, splits: list[list[tuple[int, int]]]
) -> list[dict[str, float]]:
    """For each split: this rank's batches, given as (first, last) user."""
    trainer = make(folder, cpu_world(rank, world_size), kind)
    return [
        trainer.evaluator(
            Given([users_batch(*users, batch_size=5) for users in split[rank::world_size]])
        )
        for split in splits
    ]


SPLITS = [
    [(0, 2), (2, 5)],
    [(0, 5), (5, 5)],
    [(0, 1), (1, 2), (2, 3), (3, 5)],
    [(5, 5), (0, 5)],
]


@pytest.mark.parametrize("kind", ["cosine", "inner", "replicated", "wide"])
def test_one_rank_two_ranks_and_brute_force_agree(
    run_folder: str, world: World, two_ranks: TwoRanks, kind: str
) -> None:
    """Seen items out, targets never; holes of the catalogue are no items; a rank with nobody.

    Also a cut (500) beyond the catalogue, and a table with more rows than the catalogue.
    """
    expected = brute_force(make(run_folder, world, kind))
    assert expected["num_events"] == 7
    assert 1 / 55 < expected["mrr"] < 1
    alone = _figures(0, 1, run_folder, kind, SPLITS)
    pair = two_ranks.run(_figures, run_folder, kind, SPLITS)
    for figures in [*alone, *pair[0], *pair[1]]:
        assert figures == pytest.approx(expected, rel=1e-6)
        assert {n: figures[n] for n in expected if n != "loss"} == pytest.approx(
            {n: expected[n] for n in expected if n != "loss"}, abs=1e-12
        )


def test_the_loss_is_the_training_loss_against_the_whole_catalogue(
    run_folder: str, world: World
) -> None:
    """One score for training and evaluation: the same query, all items as negatives."""
    trainer = make(run_folder, world)
    trunk = trainer.model.module.trunk
    items = torch.from_numpy(item_rows(trainer)).float()
    items[7] *= 1e-8  # shorter than l2_norm_eps
    batch = users_batch(0, 5, batch_size=5)
    trainer.model.eval()
    known = torch.from_numpy(np.flatnonzero(KnownItems().catalogue()))
    (table,) = (v for n, v in trainer.model.state_dict().items() if "table_item" in n)
    table.local_shards()[0].tensor[7] *= 1e-8
    with torch.no_grad():
        rows = lookup_results(trainer.model.module.tables(batch.features))
        asked = trunk.held_out(batch, rows)
        loss = trunk.objective.loss_sum(
            asked.query_BD[asked.target_users_C],
            asked.target_rows_CD,
            asked.target_ids_C,
            negative_MD=items[known],
            negative_ids_M=known,
        )
    figures = trainer.evaluator(Given([batch]))
    assert figures["loss"] == pytest.approx(float(loss) / figures["num_events"], rel=1e-5)


def test_evaluation_leaves_the_model_as_it_was(run_folder: str, world: World) -> None:
    trainer = make(run_folder, world)
    trainer.model.train()
    stream = torch.get_rng_state()
    before = item_rows(trainer).copy()
    first, second = (trainer.evaluator(Given([users_batch(0, 5, batch_size=5)])) for _ in range(2))
    assert first == second
    assert trainer.model.training and trainer.model.module.trunk.training
    assert torch.equal(torch.get_rng_state(), stream)
    assert np.array_equal(item_rows(trainer), before)


def test_a_spoilt_model_is_no_good_model(run_folder: str, world: World) -> None:
    trainer = make(run_folder, world)
    with torch.no_grad():
        trainer.model.module.trunk.norm.weight.fill_(math.nan)
    figures = trainer.evaluator(Given([users_batch(0, 2, batch_size=5)]))
    assert (figures["hr@10"], figures["ndcg@10"]) == (0.0, 0.0)
    assert math.isnan(figures["loss"])


def test_nobody_held_out_has_no_figures(run_folder: str, world: World) -> None:
    figures = make(run_folder, world).evaluator(Given([users_batch(3, 4, batch_size=5)]))
    assert figures["num_events"] == 0
    assert math.isnan(figures["loss"]) and math.isnan(figures["hr@10"])


def _real(data: Path, folder: str, **changes: Any) -> ExperimentArgs:
    return retrieval_experiment(folder, data=data, **changes)


@pytest.fixture(scope="module")
def movielens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_movielens(tmp_path_factory.mktemp("movielens"))


def _test_figures(
    rank: int, world_size: int, data: Path, folder: str, sizes: list[int]
) -> list[dict[str, float]]:
    found = []
    for size in sizes:
        experiment = _real(data, folder, trainer={"eval_batch_size": size})
        found.append(Trainer(experiment, world=cpu_world(rank, world_size)).evaluate("test"))
    return found


def test_figures_do_not_depend_on_batch_size_or_ranks(
    run_folder: str, world: World, two_ranks: TwoRanks, movielens: Path
) -> None:
    sizes = [1, 5, 24]
    alone = _test_figures(0, 1, movielens, run_folder, sizes)
    assert alone[0]["num_events"] == 24
    for found in [alone, *two_ranks.run(_test_figures, movielens, run_folder, sizes)]:
        for figures in found:
            assert figures == pytest.approx(alone[0], rel=1e-6)


@pytest.mark.parametrize("sampler", ["in_batch", "random"])
def test_an_untrained_model_scores_chance(run_folder: str, world: World, sampler: str) -> None:
    """60 items of which users had up to 11: HR@10 lies near 10/55, NDCG@10 near .085."""
    experiment = retrieval_experiment(
        run_folder,
        trainer={"eval_batch_size": 64},
        dataset={"num_generated_batches": 100} | users_of_one_length(),
        retrieval={"negatives_sampler": sampler, "num_negatives": 20},
    )
    trainer = Trainer(experiment, world=world)
    figures = trainer.evaluate("test")
    num_events = figures["num_events"]
    assert num_events >= 150
    sigma = math.sqrt(0.18 * 0.82 / num_events)
    assert abs(figures["hr@10"] - 0.18) < 0.02 + 4 * sigma
    assert abs(figures["ndcg@10"] - 0.083) < 0.01 + 2 * sigma
    assert figures["loss"] > math.log(60) - 0.5
