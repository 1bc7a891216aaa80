"""What retrieval needs beside the samples, and features that are left out."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import DatasetArgs
from data import dataset as dataset_module
from data.dataset import Datasets
from data.loader import build_datasets
from data.manifest import read_manifest
from data.preprocess import preprocess
from tests.data.conftest import write_ml_100k

FIVE = [1, 2, 3, 5, 8]


def _all(dataset):
    return dataset.batch(np.arange(len(dataset)), batch_size=max(1, len(dataset)))


def _lists(batch, key: str) -> list[list[int]]:
    return [t.tolist() for t in batch.features[key].to_dense()]


def _seen(dataset, sample_ids: list[int]) -> list[list[int]]:
    items, lengths = dataset.seen_items(np.array(sample_ids, np.int64))
    assert items.dtype == lengths.dtype == np.int64
    assert len(items) == lengths.sum()
    return [part.tolist() for part in np.split(items, np.cumsum(lengths)[:-1])]


def _from_items(tmp_path, histories: list[list[int]], **args: object) -> Datasets:
    """Users 1.. with these items in this order, for retrieval."""
    ratings = [
        (user, item, 3, 1_000_000 + 10 * n)
        for user, items in enumerate(histories, start=1)
        for n, item in enumerate(items)
    ]
    users = range(1, len(histories) + 1)
    source = write_ml_100k(tmp_path / "source", ratings, users=users)
    preprocess("ml-100k", source=source, output=tmp_path / "ml-100k")
    settings = {"max_history_seqlen": 100, "dataset_path": str(tmp_path / "ml-100k"), **args}
    return build_datasets(DatasetArgs(dataset_name="ml-100k", **settings), task="retrieval")


def test_folds_of_five_users(make_dataset):
    """Item n is a user's n-th event; leave one out, so test users have 2, 3, 5 and 8 events."""
    folds = build_datasets(make_dataset(FIVE), task="retrieval")
    train, validation, test = (_all(f) for f in (folds.train, folds.validation, folds.test))
    assert _lists(test, "item_id") == [list(range(1, n + 1)) for n in (2, 3, 5, 8)]
    assert test.num_candidates_B.tolist() == [1] * 4
    assert _lists(test, "action") == [list(range(n)) for n in (1, 2, 4)] + [[0, 1, 2, 3, 4, 0, 1]]
    assert _lists(validation, "item_id") == [list(range(1, n + 1)) for n in (2, 4, 7)]
    assert validation.num_candidates_B.tolist() == [1] * 3
    assert _lists(train, "item_id") == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]
    assert train.num_candidates_B.tolist() == [0, 0]


@pytest.mark.parametrize("split", ["temporal", "by_user"])
def test_every_held_out_sample_has_the_candidates_asked_for(split, make_dataset):
    args = make_dataset([12] * 20, max_num_candidates=3, split=split)
    folds = build_datasets(args, task="retrieval")
    assert set(_all(folds.train).num_candidates_B.tolist()) == {0}
    for fold in (folds.validation, folds.test):
        assert set(_all(fold).num_candidates_B.tolist()) == {3}


def test_seen_items_are_the_whole_history_though_samples_are_cut(tmp_path):
    histories = [[5, 9, 5, 7, 9, 8, 3, 6], [2, 4, 2, 2, 6]]
    folds = _from_items(tmp_path, histories, max_history_seqlen=2)
    first = folds.test.first_sample_id
    assert _lists(_all(folds.test), "item_id") == [[8, 3, 6], [2, 2, 6]]
    assert _seen(folds.test, [first, first + 1]) == [[5, 9, 5, 7, 9, 8, 3], [2, 4, 2, 2]]
    first = folds.validation.first_sample_id
    assert _seen(folds.validation, [first + 1, first]) == [[2, 4, 2], [5, 9, 5, 7, 9, 8]]


def test_padding_users_have_seen_nothing(make_dataset):
    test = build_datasets(make_dataset(FIVE), task="retrieval").test
    batch = test.batch(np.array([2, 0]), batch_size=4)
    assert _seen(test, batch.sample_ids_B.tolist()) == [[1, 2, 3, 4], [1], [], []]
    assert _seen(test, [-1, -1]) == [[], []]
    items, lengths = test.seen_items(np.zeros(0, np.int64))
    assert (len(items), len(lengths)) == (0, 0)


def test_an_empty_fold_answers_for_padding_users(make_dataset):
    folds = build_datasets(make_dataset([4, 4, 4, 1, 8], split="by_user"), task="retrieval")
    assert len(folds.validation) == 0
    assert _seen(folds.validation, [-1, -1]) == [[], []]


@pytest.mark.parametrize("shift", [-1, 4])
def test_sample_ids_of_another_fold_are_refused(shift, make_dataset):
    test = build_datasets(make_dataset(FIVE), task="retrieval").test
    wrong = test.first_sample_id + shift
    with pytest.raises(ValueError, match=rf"lie in \[5, 9\), got {wrong}"):
        test.seen_items(np.array([test.first_sample_id, -1, wrong]))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_seen_items_are_what_the_events_say(data, tmp_path_factory):
    items = st.lists(st.integers(1, 6), min_size=1, max_size=9)
    histories = data.draw(st.lists(items, min_size=1, max_size=4))
    histories.append([1, 2, 3, 4])
    length = data.draw(st.integers(2, 4))
    folds = _from_items(tmp_path_factory.mktemp("d"), histories, max_history_seqlen=length)
    test = folds.test
    ids = test.first_sample_id + np.arange(len(test))
    expected = [history[:-1] for history in histories if len(history) > 1]
    assert _seen(test, ids.tolist()) == expected
    occurs = {item for history in histories for item in history}
    assert set(np.flatnonzero(test.catalogue()).tolist()) == occurs


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_the_catalogue_holds_the_items_of_every_fold(at_once, tmp_path, monkeypatch):
    """Item 9 is in the test fold only, 8 in validation only; ids 0, 3, 4 and 6 never occur."""
    monkeypatch.setattr(dataset_module, "_EVENTS_READ_AT_ONCE", at_once)
    folds = _from_items(tmp_path, [[5, 2, 7, 8, 9], [1, 5, 2]])
    for fold in (folds.train, folds.validation, folds.test):
        catalogue = fold.catalogue()
        assert catalogue.dtype == bool
        assert len(catalogue) == fold.facts.vocab_sizes["item_id"] == 10
        assert np.flatnonzero(catalogue).tolist() == [1, 2, 5, 7, 8, 9]
    assert folds.train.catalogue() is folds.test.catalogue(), "the events are read once"


def test_a_pickled_fold_reads_its_catalogue_anew(make_dataset):
    test = build_datasets(make_dataset(FIVE), task="retrieval").test
    expected = test.catalogue()
    again = pickle.loads(pickle.dumps(test))
    assert again.catalogue().tolist() == expected.tolist()
    assert _seen(again, [again.first_sample_id]) == [[1]]


def test_items_alone(make_dataset):
    args = make_dataset([3, 4, 5, 6, 7], max_history_seqlen=4, use_actions=False)
    for task in ("ranking", "retrieval"):
        folds = build_datasets(args, task=task)
        assert folds.facts.action_feature_name is None
        assert "action" not in folds.facts.vocab_sizes
        batch = _all(folds.test)
        assert "action" not in batch.features.keys()  # noqa: SIM118
        num_contextuals = len(folds.facts.contextual_feature_names)
        lengths_B = batch.features["item_id"].lengths()
        assert batch.max_length == int(lengths_B.max()) + num_contextuals
    # The newest four of the history, then the candidate; labels stay beside their items.
    assert _lists(batch, "item_id")[-1] == [3, 4, 5, 6, 7]
    packed_E = batch.features["item_id"].values()
    assert batch.labels_E.tolist() == ((packed_E - 1) % 5).tolist()


@pytest.mark.parametrize("names", [(), ("age",), ("zip", "user_id"), ("sex", "age")])
def test_a_choice_of_contextual_features_in_its_order(names, make_dataset):
    everything = build_datasets(make_dataset([4] * 6))
    whole = everything.test
    chosen = build_datasets(
        DatasetArgs(
            dataset_name="ml-100k",
            dataset_path=str(whole.store.folder),
            max_history_seqlen=100,
            contextual_feature_names=names,
        )
    )
    assert chosen.facts.contextual_feature_names == names
    assert set(chosen.facts.vocab_sizes) == {"item_id", "action", *names}
    indices_S = np.arange(len(whole))[::-1]
    all_of, some = (d.batch(indices_S, batch_size=7) for d in (whole, chosen.test))
    assert some.features.keys() == ["item_id", "action", *names]
    for name in names:
        assert _lists(some, name) == _lists(all_of, name)
    assert some.num_tokens == all_of.num_tokens - (5 - len(names)) * len(whole)


def test_a_contextual_feature_the_data_has_not_is_refused(make_dataset):
    args = make_dataset([4] * 6, contextual_feature_names=("age", "shoe_size"))
    with pytest.raises(
        ValueError, match=r"contextual_feature_names must be among .* got 'shoe_size'"
    ):
        build_datasets(args)


def _earlier_fingerprint(dataset, fold: str, **changes: object) -> str:
    """What versions before retrieval said of a fold of ranking data."""
    rule = {
        "split": "temporal",
        "max_history_seqlen": 100,
        "max_num_candidates": 0,
        "train_windows": "all",
        "train_on_validation": False,
        "epoch_key": (0, 0),
    }
    sha256 = dataset.store.manifest.files["events"].sha256
    return hashlib.sha256(f"{sha256} {fold} {rule | changes}".encode()).hexdigest()[:16]


def test_fingerprints_follow_the_samples(make_dataset):
    """Those of ranking runs from before stay what they were, so that they resume."""
    args = make_dataset([30, 40, 12, 25], max_num_candidates=2)

    def prints(task: str = "ranking", **changes: object) -> tuple[str, str]:
        folds = build_datasets(type(args)(**{**vars(args), **changes}), task=task)
        return folds.train.fingerprint, folds.test.fingerprint

    plain = prints()
    dataset = build_datasets(args).test
    assert plain == tuple(
        _earlier_fingerprint(dataset, fold, max_num_candidates=2) for fold in ("train", "test")
    )
    others = [
        prints("retrieval"),
        prints(use_actions=False),
        prints(contextual_feature_names=("age",)),
        prints(contextual_feature_names=()),
    ]
    assert len({fold for pair in (plain, *others) for fold in pair}) == 10
    everything = dataset.facts.contextual_feature_names
    assert prints(contextual_feature_names=everything) == plain


@pytest.mark.parametrize("windows", ["all", "last", "random"])
def test_blocks_of_ranking_have_a_fingerprint_of_their_own(windows, make_dataset):
    """Where histories fit, all windows are what they were before there were blocks."""
    args = make_dataset([30] * 20, split="by_user", train_windows=windows)

    def folds(length: int) -> Datasets:
        return build_datasets(type(args)(**{**vars(args), "max_history_seqlen": length}))

    rule = {"split": "by_user", "train_windows": windows}
    for length, num_samples in ((30, 1), (10, {"all": 3, "last": 1, "random": 4}[windows])):
        found = folds(length)
        rule["max_history_seqlen"] = length
        assert len(found.train) == num_samples * 14
        as_before = found.train.fingerprint == _earlier_fingerprint(found.train, "train", **rule)
        assert as_before == (num_samples == 1)
        assert found.test.fingerprint == _earlier_fingerprint(found.test, "test", **rule)


def test_tables_keep_their_order_whatever_is_left_out(make_dataset):
    """Weights are drawn in this order: another one is another run of the same seed."""
    args = make_dataset(FIVE)
    everything = list(build_datasets(args).facts.vocab_sizes)
    manifest = read_manifest(args.dataset_path)
    assert everything == list(manifest.vocab_sizes)
    some = dataclasses.replace(args, use_actions=False, contextual_feature_names=("zip", "age"))
    kept = list(build_datasets(some).facts.vocab_sizes)
    assert kept == [name for name in everything if name in ("item_id", "zip", "age")]
