from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from data.batch import PackedSamples, SequenceBatch, collate


def _packed(histories: list[int], candidates: list[int], num_contextuals: int = 2) -> PackedSamples:
    """Users with so many events; items count up from 100, labels from 0, times from 1000."""
    num_users, num_events = len(histories), sum(histories) + sum(candidates)
    return PackedSamples(
        history_lengths_S=np.array(histories, np.int64),
        num_candidates_S=np.array(candidates, np.int64),
        items_E=100 + np.arange(num_events),
        labels_E=np.arange(num_events),
        actions_E=np.arange(num_events),
        timestamps_E=1000 + np.arange(num_events),
        contextual_FS=np.arange(num_contextuals * num_users).reshape(num_contextuals, num_users),
        sample_ids_S=50 + np.arange(num_users),
        user_ids_S=70 + np.arange(num_users),
    )


def _collate(
    histories: list[int], candidates: list[int], *, batch_size: int, action: str | None = "act"
) -> SequenceBatch:
    return collate(
        _packed(histories, candidates),
        batch_size=batch_size,
        item_feature_name="item",
        action_feature_name=action,
        contextual_feature_names=("user", "age"),
    )


def test_collate_packs_events_user_by_user():
    batch = _collate([2, 1], [1, 2], batch_size=3)
    assert batch.features.keys() == ["item", "act", "user", "age"]
    assert batch.features["item"].to_dense() is not None
    lists = {key: [t.tolist() for t in batch.features[key].to_dense()] for key in ("item", "act")}
    assert lists == {"item": [[100, 101, 102], [103, 104, 105], []], "act": [[0, 1], [3], []]}
    assert [t.tolist() for t in batch.features["user"].to_dense()] == [[0], [1], []]
    assert [t.tolist() for t in batch.features["age"].to_dense()] == [[2], [3], []]
    assert batch.labels_E.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.timestamps_E.tolist() == [1000, 1001, 1002, 1003, 1004, 1005]
    assert batch.num_candidates_B.tolist() == [1, 2, 0]
    assert batch.sample_ids_B.tolist() == [50, 51, -1]
    assert batch.user_ids_B.tolist() == [70, 71, -1]
    assert batch.is_real.tolist() == [True, True, False]
    assert (batch.batch_size, batch.num_samples) == (3, 2)
    assert batch.num_tokens == 6 + 3 + 4
    assert batch.max_length == 2 + 3 + 2  # contextual + item + action tokens of the first user


def test_an_action_input_is_the_label_of_its_history_event_and_no_candidate_has_one():
    batch = _collate([3, 0, 4], [2, 5, 0], batch_size=3)
    lengths_B = batch.features["act"].lengths()
    assert torch.equal(lengths_B, batch.features["item"].lengths() - batch.num_candidates_B)
    assert batch.features["act"].values().tolist() == [0, 1, 2, 10, 11, 12, 13]


def test_without_actions_a_batch_has_items_and_contextual_features_only():
    batch = _collate([2, 1], [1, 2], batch_size=2, action=None)
    assert batch.features.keys() == ["item", "user", "age"]
    assert batch.num_tokens == 6 + 4
    assert batch.max_length == 2 + 3


@pytest.mark.parametrize(
    ("histories", "candidates"), [([0, 0], [3, 5]), ([3, 0], [0, 5]), ([3, 5], [0, 0])]
)
def test_all_or_no_candidates_are_fine(histories, candidates):
    batch = _collate(histories, candidates, batch_size=2)
    assert batch.num_candidates_B.tolist() == candidates


def test_a_batch_of_nobody_has_the_usual_shapes_and_types():
    batch = _collate([], [], batch_size=4)
    usual = _collate([1, 1, 1, 1], [1, 1, 1, 1], batch_size=4)
    assert batch.features.keys() == usual.features.keys()
    assert batch.features.lengths().tolist() == [0] * 16
    assert batch.features.values().dtype == usual.features.values().dtype == torch.int64
    assert batch.sample_ids_B.tolist() == [-1] * 4
    assert (batch.num_samples, batch.num_tokens, batch.max_length) == (0, 0, 0)


def test_more_samples_than_the_batch_holds_are_refused():
    with pytest.raises(ValueError, match="batch_size must be >= the 3 samples given, got 2"):
        _collate([1, 1, 1], [0, 0, 0], batch_size=2)


def test_derived_lengths_equal_what_torchrec_computes():
    features = _collate([2, 0, 5], [1, 2, 0], batch_size=5).features
    fresh = type(features)(
        keys=features.keys(), values=features.values(), lengths=features.lengths(), stride=5
    )
    assert features.length_per_key() == fresh.length_per_key()
    assert features.offset_per_key() == fresh.offset_per_key()
    assert torch.equal(features.offsets(), fresh.offsets())


PER_USER = ("num_candidates_B", "sample_ids_B", "user_ids_B")
PER_EVENT = ("labels_E", "timestamps_E")


@pytest.mark.parametrize("field", PER_USER + PER_EVENT)
@pytest.mark.parametrize("change", [1, -1, "dtype", "rank"])
def test_a_mis_sized_field_is_refused_by_name(field, change):
    batch = _collate([2, 1], [1, 2], batch_size=3)
    good = getattr(batch, field)
    wrong = {
        1: torch.cat([good, good[:1]]),
        -1: good[:-1],
        "dtype": good.int(),
        "rank": good[:, None],
    }[change]
    with pytest.raises(ValueError, match=rf"SequenceBatch\.{field} must be int64 of shape"):
        dataclasses.replace(batch, **{field: wrong})


def test_wrong_counts_are_refused_by_name():
    batch = _collate([2, 1], [1, 2], batch_size=3)
    with pytest.raises(ValueError, match=r"num_samples must lie in 0\.\.3"):
        dataclasses.replace(batch, num_samples=4)
    with pytest.raises(ValueError, match=r"features\.values must be int64 of shape \(12,\)"):
        dataclasses.replace(batch, num_tokens=12)


def test_a_longest_user_that_is_longer_is_refused():
    """The model refuses what is too long by this number, and on a GPU by nothing else."""
    batch = _collate([2, 1], [1, 2], batch_size=3)
    assert dataclasses.replace(batch, max_length=8).max_length == 8  # a part of a step
    with pytest.raises(ValueError, match="max_length must be at least the 7 tokens"):
        dataclasses.replace(batch, max_length=6)
    with pytest.raises(ValueError, match="max_length must be at least the 7 tokens"):
        dataclasses.replace(batch.to(torch.device("meta")), max_length=6)


@pytest.mark.parametrize("wrong", [[4, 2, 0], [1, -1, 0], [1, 2, 1]])
def test_more_candidates_than_events_are_refused(wrong):
    batch = _collate([2, 1], [1, 2], batch_size=3)
    with pytest.raises(ValueError, match=r"num_candidates_B must lie in 0\.\.events of its user"):
        dataclasses.replace(batch, num_candidates_B=torch.tensor(wrong))


def test_to_moves_every_tensor_and_keeps_the_counts():
    batch = _collate([2, 1], [1, 2], batch_size=3)
    moved = batch.to(torch.device("meta"), non_blocking=True)
    for field in PER_USER + PER_EVENT:
        assert getattr(moved, field).device.type == "meta"
        assert getattr(moved, field).shape == getattr(batch, field).shape
    assert moved.features.values().device.type == "meta"
    assert moved.features.length_per_key() == batch.features.length_per_key()
    counts = ("num_samples", "num_tokens", "max_length", "batch_size")
    assert [getattr(moved, n) for n in counts] == [getattr(batch, n) for n in counts]
