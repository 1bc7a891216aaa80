from __future__ import annotations

import pickle

import numpy as np
import pytest

from data.dataset import EventDataset, ranges
from data.loader import build_datasets


def test_ranges_are_laid_end_to_end():
    got = ranges(np.array([5, 0, 7, 2]), np.array([2, 0, 1, 3]))
    assert got.tolist() == [5, 6, 7, 2, 3, 4]
    assert ranges(np.array([], np.int64), np.array([], np.int64)).tolist() == []


def test_histories_keep_the_newest_events_with_their_ratings(make_dataset):
    """Maximum 4, users with 1 to 6 history events, one candidate."""
    args = make_dataset([2, 3, 4, 5, 6, 7], max_num_candidates=1, max_history_seqlen=4)
    test = build_datasets(args).test
    batch = test.batch(np.arange(6), batch_size=6)
    items = [t.tolist() for t in batch.features["item_id"].to_dense()]
    assert items[5] == [3, 4, 5, 6, 7]
    assert [t.tolist() for t in batch.features["action"].to_dense()][5] == [2, 3, 4, 0]
    # Item n has class (n - 1) % 5 and time 1,000,000 + 10 n: rows stay together everywhere.
    packed_E = np.concatenate(items)
    assert packed_E.tolist() == batch.features["item_id"].values().tolist()
    assert batch.labels_E.tolist() == ((packed_E - 1) % 5).tolist()
    assert batch.timestamps_E.tolist() == (1_000_000 + 10 * packed_E).tolist()
    assert [len(i) for i in items] == [2, 3, 4, 5, 5, 5]
    assert batch.num_candidates_B.tolist() == [1] * 6


def test_contextual_ids_belong_to_the_user_of_the_sample(make_dataset):
    test = build_datasets(make_dataset([4] * 6, max_num_candidates=1)).test
    batch = test.batch(np.array([4, 1]), batch_size=3)
    assert batch.user_ids_B.tolist() == [5, 2, -1]
    assert batch.features["user_id"].values().tolist() == [5, 2]
    assert batch.features["age"].values().tolist() == [25, 22]
    assert batch.features["user_id"].lengths().tolist() == [1, 1, 0]


def test_sample_ids_are_unique_over_the_folds(make_dataset):
    datasets = build_datasets(make_dataset([9, 12, 4, 3], max_num_candidates=2))
    ids: list[int] = []
    for fold in (datasets.train, datasets.validation, datasets.test):
        batch = fold.batch(np.arange(len(fold)), batch_size=len(fold))
        ids.extend(batch.sample_ids_B.tolist())
    assert ids == list(range(len(ids)))
    assert len(ids) == len(datasets.train) + len(datasets.validation) + len(datasets.test)


def test_event_columns_are_the_file_itself(make_dataset):
    store = build_datasets(make_dataset([9, 12], max_num_candidates=2)).train.store
    for column in (store.items_N, store.labels_N, store.timestamps_N):
        assert not column.flags.owndata
        assert not column.flags.writeable


def test_a_data_set_survives_pickling_without_its_columns(make_dataset):
    dataset = build_datasets(make_dataset([2000, 2000], max_num_candidates=20)).test
    text = pickle.dumps(dataset)
    assert len(text) < 6000  # 4000 events of 18 bytes stay on disk
    again: EventDataset = pickle.loads(text)
    indices_S = np.array([1, 0])
    here, there = (d.batch(indices_S, batch_size=2) for d in (dataset, again))
    assert here.features.values().tolist() == there.features.values().tolist()


def test_a_fingerprint_tells_folds_and_rules_apart(make_dataset):
    args = make_dataset([30, 40], max_num_candidates=2)
    first = build_datasets(args)
    other = build_datasets(type(args)(**{**vars(args), "max_history_seqlen": 7}))
    prints = [d.fingerprint for d in (first.train, first.validation, first.test, other.train)]
    assert len(set(prints)) == 4
    assert build_datasets(args).train.fingerprint == first.train.fingerprint


@pytest.mark.parametrize(
    ("task", "candidates", "split"),
    [("ranking", 2, "temporal"), ("ranking", 0, "by_user"), ("retrieval", 0, "leave_one_out")],
)
def test_the_split_left_open_follows_the_task(task, candidates, split, make_dataset):
    args = make_dataset([9] * 20, max_num_candidates=candidates)
    left_open = build_datasets(args, task=task)
    explicit = build_datasets(type(args)(**{**vars(args), "split": split}), task=task)
    assert left_open.test.fingerprint == explicit.test.fingerprint
    assert len(left_open.test) == {"temporal": 20, "by_user": 3, "leave_one_out": 20}[split]


def test_missing_data_is_one_error(tmp_path, make_dataset):
    args = make_dataset([9])
    with pytest.raises(
        ValueError, match="must hold a preprocessed data set, got .*run python data/preprocess.py"
    ):
        build_datasets(type(args)(**{**vars(args), "dataset_path": str(tmp_path / "no")}))
