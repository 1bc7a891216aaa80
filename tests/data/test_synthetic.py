from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from configs.schema import BenchmarkDatasetArgs, EmbeddingArgs, FeatureArgs, RandomDistribution
from data.dataset import Datasets
from data.distributions import bounded, draw, mix
from data.loader import SequenceLoader, build_datasets

NUM_ITEMS = 40


def _args(**changes: object) -> BenchmarkDatasetArgs:
    def table(name: str, rows: int) -> EmbeddingArgs:
        return EmbeddingArgs(
            feature_names=(name,), table_name=f"table_{name}", item_vocab_size_or_capacity=rows
        )

    events = FeatureArgs(
        feature_names=("item", "act"),
        max_sequence_length=30,
        is_jagged=True,
        seqlen_dist=RandomDistribution(dist_type="uniform", low=0, high=31),
    )
    values = {
        "feature_args": (events, FeatureArgs(feature_names=("user",), max_sequence_length=1)),
        "embedding_args": (table("item", NUM_ITEMS), table("act", 256), table("user", 50)),
        "item_feature_name": "item",
        "action_feature_name": "act",
        "contextual_feature_names": ("user",),
        "max_num_candidates": 5,
        "num_generated_batches": 20,
    }
    return BenchmarkDatasetArgs(**{**values, **changes})


def _build(args: BenchmarkDatasetArgs | None = None, **settings: object) -> Datasets:
    return build_datasets(args or _args(), **{"seed": 3, "global_batch_size": 16, **settings})


def _all(dataset):
    return dataset.batch(np.arange(len(dataset)), batch_size=len(dataset))


def test_a_sample_does_not_depend_on_its_batch():
    datasets = _build()
    everybody = _all(datasets.train)
    dense = everybody.features["item"].to_dense()
    labels = everybody.labels_E.split(everybody.features["item"].lengths().tolist())
    for indices in ([5], [200, 5, 17], [17, 0, 5, 9]):
        batch = datasets.train.batch(np.array(indices), batch_size=4)
        own = batch.labels_E.split(batch.features["item"].lengths().tolist())
        for row, index in enumerate(indices):
            assert batch.sample_ids_B[row] == everybody.sample_ids_B[index] == index
            assert batch.features["item"].to_dense()[row].tolist() == dense[index].tolist()
            assert own[row].tolist() == labels[index].tolist()


def test_seeds_differ_and_repeat():
    first, again, other = (_all(_build(seed=seed).train) for seed in (3, 3, 4))
    assert first.features.values().tolist() == again.features.values().tolist()
    assert first.features.values().tolist() != other.features.values().tolist()
    assert _build(seed=3).train.fingerprint != _build(seed=4).train.fingerprint


@pytest.mark.parametrize("num_batches", [1, 10, 11, 20])
def test_held_out_users_are_the_same_for_any_global_batch(num_batches):
    args = _args(num_generated_batches=num_batches)
    small, large = (_build(args, global_batch_size=size) for size in (16, 1000))
    assert (len(small.train), len(large.train)) == (16 * num_batches, 1000 * num_batches)
    trained = set(_all(large.train).sample_ids_B.tolist())
    assert trained == set(range(len(large.train)))
    held_out = set()
    for fold in ("validation", "test"):
        one, other = getattr(small, fold), getattr(large, fold)
        assert len(one) == 32 * max(1, -(-num_batches // 10))
        assert one.fingerprint == other.fingerprint
        first, again = _all(one), _all(other)
        assert first.sample_ids_B.tolist() == again.sample_ids_B.tolist()
        assert first.features.values().tolist() == again.features.values().tolist()
        held_out |= set(first.sample_ids_B.tolist())
    assert len(held_out) == 2 * len(small.test)
    assert not held_out & trained


def test_held_out_users_are_drawn_like_the_others():
    datasets = _build(_args(num_generated_batches=200))
    train, validation, test = (
        _all(fold) for fold in (datasets.train, datasets.validation, datasets.test)
    )
    for fold in (validation, test):
        assert len(set(fold.features["user"].values().tolist())) == 50
        assert fold.features["item"].values().unique().numel() == NUM_ITEMS
        for column in ("labels_E", "num_candidates_B"):
            means = [float(getattr(b, column).double().mean()) for b in (fold, train)]
            assert means[0] == pytest.approx(means[1], rel=0.1)
    assert validation.features.values().tolist() != test.features.values().tolist()


def test_lengths_and_ids_stay_in_their_bounds():
    batch = _all(_build().train)
    lengths_B = batch.features["item"].lengths()
    assert lengths_B.min() == 0
    assert lengths_B.max() == 30
    assert (batch.num_candidates_B == (lengths_B - 1).clamp(0, 5)).all()
    items = batch.features["item"].values()
    assert items.min() == 0
    assert items.max() == NUM_ITEMS - 1
    assert batch.features["user"].values().max() < 50
    assert (batch.timestamps_E[1:29] >= batch.timestamps_E[:28]).sum() > 20


def test_fixed_lengths_are_the_maximum():
    fixed = tuple(dataclasses.replace(g, is_jagged=False) for g in _args().feature_args)
    batch = _all(_build(_args(feature_args=fixed)).train)
    assert set(batch.features["item"].lengths().tolist()) == {30}


def _item_means(labels: np.ndarray, items: np.ndarray) -> np.ndarray:
    sums, counts = (np.bincount(items, w, NUM_ITEMS) for w in (labels, np.ones(len(labels))))
    return sums / counts


def test_items_and_history_predict_the_label():
    datasets = _build(_args(num_generated_batches=100))
    train, test = _all(datasets.train), _all(datasets.test)
    means = _item_means(train.labels_E.numpy(), train.features["item"].values().numpy())
    labels, scores, history_scores = [], [], []
    lengths = test.features["item"].lengths().tolist()
    for own, items, count in zip(
        test.labels_E.split(lengths),
        test.features["item"].values().split(lengths),
        test.num_candidates_B.tolist(),
        strict=True,
    ):
        if count == 0:
            continue
        past = slice(0, len(own) - count)
        surprise = own[past].double().numpy() - means[items[past].numpy()]
        labels.extend(own[-count:].tolist())
        scores.extend(means[items[-count:].numpy()])
        history_scores.extend(means[items[-count:].numpy()] + surprise.sum() / (len(surprise) + 2))
    by_item = roc_auc_score(labels, scores)
    assert by_item > 0.65
    assert roc_auc_score(labels, history_scores) > by_item + 0.05


def test_tasks_are_bits_with_effects_of_their_own():
    datasets = _build(num_tasks=3)
    assert (datasets.facts.label_kind, datasets.facts.num_classes) == ("bitmask", 3)
    batch = _all(datasets.train)
    labels_E, items_E = batch.labels_E.numpy(), batch.features["item"].values().numpy()
    assert labels_E.min() == 0
    assert labels_E.max() == 7
    means = [_item_means((labels_E >> task) & 1, items_E) for task in range(3)]
    assert all(0.3 < m.mean() < 0.7 and m.std() > 0.15 for m in means)
    assert np.abs(np.corrcoef(means)[np.triu_indices(3, 1)]).max() < 0.6


@pytest.mark.parametrize("num_classes", [2, 5])
def test_classes_are_about_equally_frequent(num_classes):
    batch = _all(_build(_args(num_generated_batches=200), num_classes=num_classes).train)
    shares = np.bincount(batch.labels_E.numpy(), minlength=num_classes) / len(batch.labels_E)
    assert len(shares) == num_classes
    assert shares.min() > 0.6 / num_classes


def test_labels_beyond_the_action_table_are_folded_into_it():
    """Nine tasks have 512 masks: the label keeps all bits, the action input has 256 ids."""
    batch = _all(_build(num_tasks=9).train)
    actions = batch.features["act"].values()
    assert batch.labels_E.max() > 255
    assert 200 < actions.max() < 256


def test_actions_and_contextual_features_may_be_absent():
    datasets = _build(_args(action_feature_name=None, contextual_feature_names=()))
    assert datasets.facts.vocab_sizes == {"item": NUM_ITEMS}
    batch = next(SequenceLoader(datasets.train, batch_size=4, shuffle=True, seed=0).epoch(0))
    assert batch.features.keys() == ["item"]
    assert batch.num_tokens == len(batch.labels_E)


BITS = mix(np.arange(100_000))
MOMENTS = {
    "uniform": (RandomDistribution(dist_type="uniform", low=10, high=20), 14.5, 2.87),
    "normal": (RandomDistribution(dist_type="normal", mean=50.0, std=5.0), 50.0, 5.0),
    "lognormal": (RandomDistribution(dist_type="lognormal", mean=50.0, std=20.0), 50.0, 20.0),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_distributions_have_their_mean_and_spread(name):
    dist, mean, std = MOMENTS[name]
    values = draw(bounded(dist, 1000), BITS)
    assert values.mean() == pytest.approx(mean, rel=0.01)
    assert values.std() == pytest.approx(std, rel=0.03)


@pytest.mark.parametrize("alpha", [1.2, 2.0])
def test_zipf_falls_off_by_its_exponent(alpha):
    values = draw(bounded(RandomDistribution(dist_type="zipf", low=3, alpha=alpha), 1000), BITS)
    counts = np.bincount(values, minlength=1000)
    assert (values.min(), len(counts)) == (3, 1000)
    # Ranks 10..19 against 100..199: a factor of 10 in rank, 10 times as many ranks.
    ratio = counts[3 + 9 : 3 + 19].sum() / counts[3 + 99 : 3 + 199].sum()
    assert ratio == pytest.approx(10 ** (alpha - 1), rel=0.15)


@pytest.mark.parametrize("dist_type", ["uniform", "normal", "zipf", "lognormal"])
def test_draws_are_clipped_to_their_bounds(dist_type):
    dist = RandomDistribution(dist_type=dist_type, low=5, high=9, mean=7.0, std=50.0)
    values = draw(dist, BITS)
    assert set(values.tolist()) == {5, 6, 7, 8}


@pytest.mark.parametrize("task", ["ranking", "retrieval"])
def test_tokens_are_counted_as_a_batch_counts_them(task: str) -> None:
    args = _args(max_num_candidates=2, num_generated_batches=2)
    built = build_datasets(args, task=task, seed=3, global_batch_size=16)
    for fold in (built.train, built.test):
        indices_S = np.arange(16)
        batch = fold.batch(indices_S, batch_size=16)
        assert fold.num_tokens(indices_S).tolist() == batch.host_lengths_KB.sum(axis=0).tolist()
