"""Random negatives: the same on every rank, other ones for each batch."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest
import torch

from data.batch import SequenceBatch
from data.dataset import Datasets
from data.loader import SequenceLoader, build_datasets
from data.negatives import NegativeDraws


@pytest.fixture
def datasets(make_dataset) -> Datasets:
    """24 users of 4 to 27 events, items 1 to 27: the item table has 28 rows, id 0 never occurs."""
    return build_datasets(make_dataset([4 + n for n in range(24)]), task="retrieval")


def _loader(dataset, **settings: object) -> SequenceLoader:
    settings = {"batch_size": 4, "shuffle": True, "seed": 7, "num_negatives": 9, **settings}
    return SequenceLoader(dataset, **settings)


def _negatives(batch: SequenceBatch) -> list[int]:
    assert batch.num_negatives == len(batch.features["item_id_negatives"].values())
    return batch.features["item_id_negatives"].values().tolist()


def _drawn(loader: SequenceLoader, epoch: int = 0, first_batch: int = 0) -> list[list[int]]:
    return [_negatives(batch) for batch in loader.epoch(epoch, first_batch)]


def test_negatives_are_different_items_of_the_catalogue(datasets):
    catalogue = set(np.flatnonzero(datasets.train.catalogue()).tolist())
    assert catalogue == set(range(1, 28))
    for epoch in range(3):
        for drawn in _drawn(_loader(datasets.train), epoch):
            assert len(set(drawn)) == len(drawn) == 9
            assert set(drawn) <= catalogue


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_and_world_sizes_draw_alike(world_size, datasets):
    """Batch number k of all ranks, whatever its size: the last ranks may have no sample left."""
    one = _drawn(_loader(datasets.train, batch_size=6), 2)
    for rank in range(world_size):
        loader = _loader(
            datasets.train, batch_size=6 // world_size, rank=rank, world_size=world_size
        )
        assert _drawn(loader, 2) == one


def test_a_rank_without_samples_draws_like_the_others(datasets):
    ranks = [_loader(datasets.validation, batch_size=16, rank=r, world_size=2) for r in (0, 1)]
    (full,), (rest,) = (list(loader.epoch(0)) for loader in ranks)
    ranks = [_loader(datasets.validation, batch_size=32, rank=r, world_size=2) for r in (0, 1)]
    (_,), (empty,) = (list(loader.epoch(0)) for loader in ranks)
    assert (empty.num_samples, empty.num_tokens) == (0, 0)
    assert _negatives(full) == _negatives(rest) == _negatives(empty)
    assert empty.features["item_id_negatives"].lengths().tolist() == [9, *[0] * 31]


def test_every_batch_epoch_and_seed_has_its_own(datasets):
    drawn = [
        tuple(sorted(negatives))
        for seed in (7, 8)
        for epoch in range(3)
        for negatives in _drawn(_loader(datasets.train, seed=seed), epoch)
    ]
    assert len(set(drawn)) == len(drawn) >= 30


def test_resuming_goes_on_with_the_same_negatives(datasets):
    straight = _drawn(_loader(datasets.train), 1)
    loader = _loader(datasets.train)
    batches = loader.epoch(1)
    before = [_negatives(next(batches)) for _ in range(2)]
    resumed = _loader(datasets.train)
    resumed.load_state_dict(loader.state_dict())
    assert before + _drawn(resumed, *resumed.position) == straight


def test_workers_draw_alike(datasets):
    here, there = (list(_loader(datasets.train, num_workers=n).epoch(0)) for n in (0, 2))
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.features.values(), other.features.values())
        assert one.features.keys() == other.features.keys()
        assert one.host_lengths_KB.tolist() == other.host_lengths_KB.tolist()
        assert one.num_negatives == other.num_negatives == 9


def test_the_samples_are_those_without_negatives(datasets):
    for one, other in zip(
        _loader(datasets.train).epoch(0),
        _loader(datasets.train, num_negatives=None).epoch(0),
        strict=True,
    ):
        assert other.num_negatives == 0
        assert other.features.keys() == one.features.keys()[:-1]
        assert torch.equal(one.features.values()[:-9], other.features.values())
        assert torch.equal(one.sample_ids_B, other.sample_ids_B)


@pytest.mark.parametrize("wrong", [0, -1, 28])
def test_more_negatives_than_items_are_refused(wrong, datasets):
    assert len(set(_drawn(_loader(datasets.train, num_negatives=27))[0])) == 27
    with pytest.raises(ValueError, match=rf"num_negatives must lie in 1\.\.27, .* got {wrong}"):
        _loader(datasets.train, num_negatives=wrong)


def test_every_item_is_drawn_equally_often():
    catalogue = np.arange(50) % 2 == 1
    draws = NegativeDraws(catalogue, 5, seed=3)
    counts = np.bincount(np.concatenate([draws.draw(0, batch) for batch in range(5000)]))
    assert counts[~catalogue].sum() == 0
    # Binomial(5000, 1/5): mean 1000, standard deviation 28.
    assert np.abs(counts[catalogue] - 1000).max() < 5 * 28


def test_a_draw_costs_what_it_draws_and_not_the_catalogue():
    draws = NegativeDraws(np.ones(4_000_000, bool), 500, seed=3)
    tracemalloc.start()
    drawn = draws.draw(0, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(drawn.tolist())) == 500
    assert peak < 400_000  # a permutation of the catalogue is 32 MB


def test_draws_survive_pickling():
    draws = NegativeDraws(np.ones(100, bool), 5, seed=3)
    again = pickle.loads(pickle.dumps(draws))
    assert again.draw(4, 2).tolist() == draws.draw(4, 2).tolist()
