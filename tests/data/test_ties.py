"""Events at the same second change places in training, and nothing else does."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import DatasetArgs
from data.loader import build_datasets
from data.preprocess import preprocess
from data.ties import shuffle_ties
from tests.data.conftest import write_ml_100k


@given(parts=st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=6), epoch=st.integers(0, 9))
def test_only_equal_times_of_one_part_change_places(parts, epoch):
    times_E = np.array([time for part in parts for time in sorted(part)], np.int64)
    lengths_P = np.array([len(part) for part in parts], np.int64)
    events_E = np.arange(len(times_E)) + 1000
    shuffled_E = shuffle_ties(events_E, times_E, lengths_P, epoch_key=(7, epoch))
    part_E = np.repeat(np.arange(len(parts)), lengths_P)
    assert sorted(shuffled_E) == sorted(events_E)
    assert (times_E[shuffled_E - 1000] == times_E).all()
    assert (part_E[shuffled_E - 1000] == part_E).all()


def test_every_order_is_equally_likely():
    orders = [
        tuple(shuffle_ties(np.arange(3), np.zeros(3), np.array([3]), epoch_key=(0, epoch)).tolist())
        for epoch in range(1200)
    ]
    counts = [orders.count(order) for order in sorted(set(orders))]
    assert len(counts) == 6
    assert max(counts) < 200 + 5 * 200**0.5 and min(counts) > 200 - 5 * 200**0.5


def test_order_does_not_depend_on_the_batch():
    alone = shuffle_ties(np.arange(50, 90), np.zeros(40), np.array([40]), epoch_key=(1, 2))
    together = shuffle_ties(np.arange(90), np.zeros(90), np.array([20, 30, 40]), epoch_key=(1, 2))
    assert together[50:].tolist() == alone.tolist()
    assert alone.tolist() != sorted(alone)


def test_labels_follow_their_items_and_held_out_folds_keep_the_files_order(tmp_path):
    """One user; item n has rating n % 5 + 1; the first six events share a second."""
    seconds = [100] * 6 + [200, 300, 300]
    ratings = [(1, n + 1, n % 5 + 1, 880_000_000 + t) for n, t in enumerate(seconds)]
    source = write_ml_100k(tmp_path / "source", ratings, users=[1])
    preprocess("ml-100k", source=source, output=tmp_path / "ml-100k")
    args = DatasetArgs(
        dataset_name="ml-100k",
        dataset_path=str(tmp_path / "ml-100k"),
        max_history_seqlen=20,
        shuffle_ties=True,
    )
    folds = build_datasets(args, task="retrieval")
    seen = set()
    for epoch in range(8):
        batch = folds.train.at_epoch(3, epoch).batch(np.arange(1), batch_size=1)
        items = batch.features["item_id"].values().tolist()
        assert sorted(items[:6]) == [1, 2, 3, 4, 5, 6] and items[6:] == [7]
        assert batch.labels_E.tolist() == [(item - 1) % 5 for item in items]
        seen.add(tuple(items))
    assert len(seen) > 4
    for fold, items in ((folds.validation, 8), (folds.test, 9)):
        batch = fold.at_epoch(3, 1).batch(np.arange(1), batch_size=1)
        assert batch.features["item_id"].values().tolist() == list(range(1, items + 1))


def test_another_order_is_another_training_fold(tmp_path):
    ratings = [(1, n, 3, 880_000_000) for n in range(1, 6)]
    source = write_ml_100k(tmp_path / "source", ratings, users=[1])
    preprocess("ml-100k", source=source, output=tmp_path / "ml-100k")
    plain, shuffled = (
        build_datasets(
            DatasetArgs(
                dataset_name="ml-100k",
                dataset_path=str(tmp_path / "ml-100k"),
                max_history_seqlen=20,
                shuffle_ties=asked,
            ),
            task="retrieval",
        )
        for asked in (False, True)
    )
    assert plain.train.fingerprint != shuffled.train.fingerprint
    assert plain.test.fingerprint == shuffled.test.fingerprint
