from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from data.dataset import Datasets
from data.loader import SequenceLoader, build_datasets


@pytest.fixture
def datasets(make_dataset) -> Datasets:
    return build_datasets(make_dataset([30 + n for n in range(20)], max_num_candidates=3))


def _numbers(make_dataset, count: int) -> Datasets:
    """A test fold of `count` samples."""
    return build_datasets(make_dataset([4] * count, max_num_candidates=1))


def _ids(loader: SequenceLoader, epoch: int = 0, first_batch: int = 0) -> list[list[int]]:
    return [b.sample_ids_B.tolist() for b in loader.epoch(epoch, first_batch)]


def _real(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch if i >= 0]


def _loader(dataset, **settings: object) -> SequenceLoader:
    return SequenceLoader(dataset, **{"batch_size": 4, "shuffle": True, "seed": 7, **settings})


def test_an_epoch_holds_every_sample_once(datasets):
    for shuffle in (True, False):
        loader = _loader(datasets.train, shuffle=shuffle)
        batches = _ids(loader)
        assert len(batches) == loader.num_batches == -(-len(datasets.train) // 4)
        assert sorted(_real(batches)) == list(range(loader.num_samples))
        assert (_real(batches) == list(range(loader.num_samples))) is not shuffle


def test_each_epoch_and_seed_has_its_own_order_again_and_again(datasets):
    orders = [
        _real(_ids(_loader(datasets.train, seed=seed), epoch))
        for seed in (7, 8)
        for epoch in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[1] == _real(_ids(_loader(datasets.train), 1))


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ranks_together_make_the_batches_of_one_process(datasets, world_size):
    one = _ids(_loader(datasets.train, batch_size=2 * world_size), 3)
    ranks = [
        _ids(_loader(datasets.train, batch_size=2, rank=r, world_size=world_size), 3)
        for r in range(world_size)
    ]
    together = [sum(parts, []) for parts in zip(*ranks, strict=True)]
    assert together == one


@pytest.mark.parametrize("count", range(1, 10))
def test_ranks_end_together_and_lose_nothing(count, make_dataset):
    test = _numbers(make_dataset, count).test
    ranks = [_ids(_loader(test, batch_size=2, shuffle=False, rank=r, world_size=2)) for r in (0, 1)]
    assert len(ranks[0]) == len(ranks[1]) == -(-count // 4)
    assert sorted(_real(ranks[0]) + _real(ranks[1])) == [
        test.first_sample_id + n for n in range(count)
    ]
    assert all(len(batch) == 2 for batches in ranks for batch in batches)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_padding_users_are_told_apart_from_samples(world_size, make_dataset):
    test = _numbers(make_dataset, 103).test
    num_samples = [
        sum(b.num_samples for b in loader.epoch(0))
        for loader in (
            _loader(test, batch_size=8, shuffle=False, rank=r, world_size=world_size)
            for r in range(world_size)
        )
    ]
    assert sum(num_samples) == 103


def test_a_rank_without_samples_gets_an_empty_batch_of_the_usual_form(make_dataset):
    test = _numbers(make_dataset, 3).test
    (full,), (empty,) = (
        list(_loader(test, batch_size=4, rank=r, world_size=2).epoch(0)) for r in (0, 1)
    )
    assert (full.num_samples, empty.num_samples, empty.num_tokens) == (3, 0, 0)
    assert empty.features.keys() == full.features.keys()
    assert empty.features.lengths().shape == full.features.lengths().shape
    assert empty.features.values().dtype == full.features.values().dtype


def _walk(loader: SequenceLoader, count: int) -> list[list[int]]:
    """The next `count` batches from where the loader stands, over ends of epochs."""
    ids: list[list[int]] = []
    while len(ids) < count:
        epoch, first_batch = loader.position
        if first_batch == loader.num_batches:
            epoch, first_batch = epoch + 1, 0
        for batch in loader.epoch(epoch, first_batch):
            ids.append(batch.sample_ids_B.tolist())
            if len(ids) == count:
                break
    return ids


@pytest.mark.parametrize("stop", range(1, 13))
def test_resuming_anywhere_goes_on_as_if_never_stopped(stop, make_dataset):
    train = build_datasets(make_dataset([9] * 10, max_num_candidates=3)).train
    assert _loader(train).num_batches == 3  # so 12 batches are four epochs
    straight = _walk(_loader(train), 12)
    first = _loader(train)
    before = _walk(first, stop)
    state = first.state_dict()
    second = _loader(train)
    second.load_state_dict(state)
    assert before + _walk(second, 12 - stop) == straight


def test_the_state_is_where_the_batches_stand(datasets):
    loader = _loader(datasets.train)
    batches = loader.epoch(2, 1)
    for _ in range(4):
        next(batches)
    assert loader.position == (2, 5)
    resumed = _loader(datasets.train)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.position == (2, 5)


def test_a_finished_epoch_resumes_with_the_next(datasets):
    loader = _loader(datasets.train)
    list(loader.epoch(4))
    resumed = _loader(datasets.train)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.position == (5, 0)


def test_another_world_size_goes_on_at_the_same_sample(datasets):
    loader = _loader(datasets.train, batch_size=4)
    batches = loader.epoch(1)
    for _ in range(6):
        next(batches)
    state = loader.state_dict()
    rest = _real(_ids(loader, 1, 6))
    ranks = [_loader(datasets.train, batch_size=2, rank=r, world_size=2) for r in (0, 1)]
    for rank in ranks:
        rank.load_state_dict(state)
        assert rank.position == (1, 6)
    parts = [_ids(rank, *rank.position) for rank in ranks]
    assert [
        i for pair in zip(*parts, strict=True) for batch in pair for i in batch if i >= 0
    ] == rest
    with pytest.raises(
        ValueError, match="num_samples_done = 24 is no multiple of the global batch"
    ):
        _loader(datasets.train, batch_size=5).load_state_dict(state)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("seed", {"seed": 8}),
        ("shuffle", {"shuffle": False}),
        ("num_samples", {"fold": "test"}),
        ("order", {"order": "0" * 16}),
        ("dataset", {"dataset": "0" * 16}),
    ],
)
def test_a_state_of_something_else_is_refused_by_field(datasets, field, change):
    state = _loader(datasets.train).state_dict()
    fold = getattr(datasets, change.pop("fold", "train"))
    if field in ("order", "dataset"):
        state.update(change)
        change = {}
    with pytest.raises(ValueError, match=f"cannot resume the data position: {field} was"):
        _loader(fold, **change).load_state_dict(state)


def test_global_random_state_is_neither_read_nor_written(datasets):
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = _ids(_loader(datasets.train))
    torch.manual_seed(2), np.random.seed(2), random.seed(2)
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
    assert _ids(_loader(datasets.train)) == expected
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


def test_workers_give_the_same_batches(datasets):
    here, there = (list(_loader(datasets.train, num_workers=n).epoch(1, 40)) for n in (0, 2))
    assert len(here) == len(there) > 3
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.features.values(), other.features.values())
        assert torch.equal(one.features.lengths(), other.features.lengths())
        assert torch.equal(one.labels_E, other.labels_E)
        assert (one.num_tokens, one.max_length) == (other.num_tokens, other.max_length)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"rank": 2, "world_size": 2}, r"rank must lie in 0\.\.world_size - 1 = 1, got 2"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
    ],
)
def test_wrong_settings_are_refused(datasets, settings, message):
    with pytest.raises(ValueError, match=message):
        _loader(datasets.train, **settings)


def test_a_start_outside_the_epoch_is_refused(datasets):
    loader = _loader(datasets.train)
    assert list(loader.epoch(0, loader.num_batches)) == []
    with pytest.raises(ValueError, match="first_batch must lie in"):
        loader.epoch(0, loader.num_batches + 1)


def test_random_windows_move_between_epochs_and_leave_out_empty_ones(make_dataset):
    args = make_dataset(
        [30, 24, 41], split="temporal", max_num_candidates=4, train_windows="random"
    )
    train = build_datasets(args).train
    loader = SequenceLoader(train, batch_size=4, shuffle=False, seed=3)
    epochs = []
    for epoch in (0, 1, 0):
        batches = list(loader.epoch(epoch))
        assert len(batches) == loader.num_batches
        counts = [n for batch in batches for n in batch.num_candidates_B[: batch.num_samples]]
        assert min(counts) >= 1, "a window without events is no sample"
        epochs.append([batch.labels_E.tolist() for batch in batches])
        supervised = sum(int(n) for n in counts)
        assert supervised == 3 * -1 + (30 - 8) + (24 - 8) + (41 - 8)
    assert epochs[0] == epochs[2]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("shuffle", [True, False])
def test_balanced_ranks_have_the_same_union_and_less_difference(
    make_dataset, shuffle: bool, num_workers: int
) -> None:
    lengths = [4 + (7 * n) % 60 for n in range(27)]  # the last global batch is short
    train = build_datasets(make_dataset(lengths, max_num_candidates=1)).train

    def parts(is_balanced: bool) -> list[list[list[int]]]:
        loaders = [
            _loader(train, shuffle=shuffle, rank=r, world_size=3, is_balanced=is_balanced)
            for r in range(3)
        ]
        for loader in loaders:
            loader.num_workers = num_workers
        return [list(step) for step in zip(*map(_ids, loaders), strict=True)]

    plain, balanced = parts(False), parts(True)
    assert [sorted(_real(step)) for step in plain] == [sorted(_real(step)) for step in balanced]
    assert all(len(part) == 4 for step in balanced for part in step)
    assert plain != balanced

    def largest(steps: list[list[list[int]]]) -> int:
        work = train.num_tokens(np.arange(len(train))) ** 2
        return sum(max(work[[i for i in part if i >= 0]].sum() for part in step) for step in steps)

    assert largest(balanced) < 0.8 * largest(plain)


def test_tokens_are_counted_as_a_batch_counts_them(datasets) -> None:
    for fold in (datasets.train, datasets.test):
        indices_S = np.arange(min(len(fold), 8))
        batch = fold.batch(indices_S, batch_size=8)
        expected = batch.host_lengths_KB.sum(axis=0)[: len(indices_S)]
        assert fold.num_tokens(indices_S).tolist() == expected.tolist()
