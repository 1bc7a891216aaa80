"""Synthetic data for retrieval: planted transitions, folds, and distributions as asked."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from configs.schema import BenchmarkDatasetArgs, EmbeddingArgs, FeatureArgs, RandomDistribution
from data.dataset import Datasets
from data.loader import build_datasets
from data.synthetic import FOLLOW_PROBABILITY

NUM_ITEMS = 200
ZIPF = RandomDistribution(dist_type="zipf", alpha=1.2)


def _args(
    *,
    lengths: RandomDistribution | None = None,
    items: RandomDistribution | None = None,
    max_length: int = 30,
    **changes: object,
) -> BenchmarkDatasetArgs:
    def table(name: str, rows: int) -> EmbeddingArgs:
        return EmbeddingArgs(
            feature_names=(name,), table_name=f"table_{name}", item_vocab_size_or_capacity=rows
        )

    events = FeatureArgs(
        feature_names=("item", "act"),
        max_sequence_length=max_length,
        is_jagged=True,
        seqlen_dist=lengths,
        value_dists=None if items is None else {"item": items},
    )
    values = {
        "feature_args": (events, FeatureArgs(feature_names=("user",), max_sequence_length=1)),
        "embedding_args": (table("item", NUM_ITEMS), table("act", 256), table("user", 50)),
        "item_feature_name": "item",
        "action_feature_name": "act",
        "contextual_feature_names": ("user",),
        "num_generated_batches": 100,
    }
    return BenchmarkDatasetArgs(**{**values, **changes})


def _build(args: BenchmarkDatasetArgs | None = None, **settings: object) -> Datasets:
    settings = {"seed": 3, "global_batch_size": 32, "task": "retrieval", **settings}
    return build_datasets(args or _args(), **settings)


def _batch(dataset):
    return dataset.batch(np.arange(len(dataset)), batch_size=len(dataset))


def _users(dataset) -> list[np.ndarray]:
    return [t.numpy() for t in _batch(dataset).features["item"].to_dense()]


def _pairs(dataset) -> tuple[np.ndarray, np.ndarray]:
    users = _users(dataset)
    return np.concatenate([u[:-1] for u in users]), np.concatenate([u[1:] for u in users])


def _counted(dataset) -> np.ndarray:
    """Transition counts: what a model that only counts pairs knows."""
    counts = np.zeros((NUM_ITEMS, NUM_ITEMS), np.int64)
    np.add.at(counts, _pairs(dataset), 1)
    return counts


@pytest.mark.parametrize("items", [None, ZIPF], ids=["uniform", "zipf"])
def test_counting_pairs_finds_the_planted_transition(items):
    """HR@1 is as the docstring says; guessing the most frequent item does not come near."""
    folds = _build(_args(items=items))
    guess = _counted(folds.train).argmax(axis=1)
    assert (guess == (np.arange(NUM_ITEMS) + 1) % NUM_ITEMS).mean() > 0.98
    previous, following = _pairs(_build(_args(items=items), seed=3).test)
    hit_rate = (guess[previous] == following).mean()
    first = np.concatenate([u[:1] for u in _users(folds.train)])
    drawn = np.bincount(first, minlength=NUM_ITEMS) / len(first)
    by_luck = drawn[(previous + 1) % NUM_ITEMS].mean()
    expected = FOLLOW_PROBABILITY + (1 - FOLLOW_PROBABILITY) * by_luck
    assert hit_rate == pytest.approx(expected, abs=0.025)  # 5 standard deviations of the sample
    popular = np.bincount(_pairs(folds.train)[1]).argmax()
    assert (following == popular).mean() < 0.15


def test_ranking_has_no_transitions():
    """Half of all pairs would stand out at once; ranking items are drawn alone."""
    previous, following = _pairs(_build(task="ranking").train)
    assert ((previous + 1) % NUM_ITEMS == following).mean() < 3 / NUM_ITEMS


def test_a_sample_is_a_function_of_seed_and_id():
    folds = _build()
    users = _users(folds.train)
    for indices in ([5], [200, 5, 17], [17, 0, 5, 9]):
        batch = folds.train.batch(np.array(indices), batch_size=4)
        for row, index in enumerate(indices):
            assert batch.features["item"].to_dense()[row].tolist() == users[index].tolist()
    other = _users(_build(seed=4).train)
    assert [u.tolist() for u in users] != [u.tolist() for u in other]
    fingerprints = {
        _build(seed=seed, task=task).train.fingerprint
        for seed in (3, 4)
        for task in ("ranking", "retrieval")
    }
    assert len(fingerprints) == 4


@pytest.mark.parametrize("asked", [0, 1, 4])
def test_candidates_are_held_out_and_never_trained(asked):
    folds = _build(_args(max_num_candidates=asked))
    train = _batch(folds.train)
    assert set(train.num_candidates_B.tolist()) == {0}
    assert train.features["item"].lengths().max() == 30 - asked
    for fold in (folds.validation, folds.test):
        batch = _batch(fold)
        lengths_B = batch.features["item"].lengths()
        # A user of one event has no room for a candidate, one of n < C + 1 events for n - 1.
        assert (batch.num_candidates_B == (lengths_B - 1).clamp(0, max(1, asked))).all()
        assert batch.features["act"].lengths().max() <= 30 - asked


def test_training_keeps_the_newest_events():
    """The same users with and without room for four candidates."""
    whole, cut = _build(), _build(_args(max_num_candidates=4))
    for all_items, items in zip(_users(whole.train), _users(cut.train), strict=True):
        assert items.tolist() == all_items[-26:].tolist()
    for fold in ("labels_E", "timestamps_E"):
        columns = [getattr(_batch(folds.train), fold) for folds in (whole, cut)]
        own = [
            column.split(_batch(folds.train).features["item"].lengths().tolist())
            for column, folds in zip(columns, (whole, cut), strict=True)
        ]
        assert all(b.tolist() == a[-26:].tolist() for a, b in zip(*own, strict=True)), fold


def test_too_short_sequences_are_refused():
    with pytest.raises(ValueError, match=r"max_sequence_length of 'item' must be >= 6 .* got 5"):
        _build(_args(max_length=5, max_num_candidates=4))
    assert len(_build(_args(max_length=6, max_num_candidates=4)).train) > 0


def test_lengths_are_distributed_as_asked():
    lengths = RandomDistribution(dist_type="lognormal", mean=12.0, std=5.0)
    args = _args(lengths=lengths, max_length=100)
    found = np.array([len(u) for u in _users(_build(args).train)])
    assert found.mean() == pytest.approx(12.0, rel=0.03)
    assert found.std() == pytest.approx(5.0, rel=0.1)
    uniform = np.array([len(u) for u in _users(_build().train)])
    assert (uniform.min(), uniform.max()) == (0, 30)
    shares = np.bincount(uniform) / len(uniform)
    assert np.abs(shares - 1 / 31).max() < 0.02


def _first_and_all(items: RandomDistribution) -> tuple[np.ndarray, np.ndarray]:
    users = _users(_build(_args(items=items, num_generated_batches=400)).train)
    drawn = np.concatenate([u[:1] for u in users])
    return drawn, np.concatenate(users)


def test_uniform_ids_stay_uniform():
    dist = RandomDistribution(dist_type="uniform", low=20, high=70)
    for ids in _first_and_all(dist):
        shares = np.bincount(ids, minlength=NUM_ITEMS)[20:70] / len(ids)
        assert (ids.min(), ids.max()) == (20, 69)
        assert shares.sum() == pytest.approx(1.0)
        assert np.abs(shares * 50 - 1).max() < 0.3


def test_zipf_ids_are_drawn_as_asked_and_followed_as_stated():
    """Every id's share is what drawing and following make of the drawn shares, step by step."""
    drawn, everything = _first_and_all(ZIPF)
    plain = np.concatenate(_users(_build(_args(items=ZIPF), task="ranking").train))
    shares = [np.bincount(ids, minlength=NUM_ITEMS) / len(ids) for ids in (drawn, plain)]
    assert np.abs(shares[0] - shares[1]).max() < 0.012
    users = np.array([len(u) for u in _users(_build(_args(items=ZIPF)).train)])
    here, expected = shares[1], np.zeros(NUM_ITEMS)
    for position in range(30):
        expected += here * (users > position).sum()
        here = FOLLOW_PROBABILITY * np.roll(here, 1) + (1 - FOLLOW_PROBABILITY) * shares[1]
    expected /= expected.sum()
    found = np.bincount(everything, minlength=NUM_ITEMS) / len(everything)
    assert found.argmax() == expected.argmax()
    assert np.abs(found[:20] / expected[:20] - 1).max() < 0.08  # thousands of events each
    assert np.abs(found - expected).max() < 0.003


def test_narrow_ids_stay_where_they_were_asked():
    dist = RandomDistribution(dist_type="normal", mean=100.0, std=20.0)
    drawn, everything = _first_and_all(dist)
    assert drawn.mean() == pytest.approx(100.0, abs=1.0)
    assert drawn.std() == pytest.approx(20.0, rel=0.05)
    # Successors are 4 ids further on average where runs are long; histories end some early.
    assert 101.0 < everything.mean() < 104.5
    assert everything.std() == pytest.approx(20.0, rel=0.1)


def test_seen_items_are_the_history():
    folds = _build(_args(max_num_candidates=3))
    for fold in (folds.validation, folds.test):
        batch = _batch(fold)
        ids = np.append(batch.sample_ids_B.numpy()[[4, 0, 9]], -1)
        items, lengths = fold.seen_items(ids)
        users = _users(fold)
        expected = [users[n][: len(users[n]) - int(batch.num_candidates_B[n])] for n in (4, 0, 9)]
        assert lengths.tolist() == [*map(len, expected), 0]
        assert items.tolist() == np.concatenate(expected).tolist()
        with pytest.raises(ValueError, match="sample ids of this fold lie in"):
            fold.seen_items(np.array([0]))


def test_the_catalogue_is_the_whole_table():
    folds = _build(_args(items=RandomDistribution(dist_type="uniform", high=3)))
    for fold in (folds.train, folds.validation, folds.test):
        assert fold.catalogue().tolist() == [True] * NUM_ITEMS
    alone = dataclasses.replace(_args(), action_feature_name=None, contextual_feature_names=())
    assert _build(alone).test.catalogue().sum() == NUM_ITEMS
