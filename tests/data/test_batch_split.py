"""Parts of a batch, and its negatives feature."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import (
    PackedSamples,
    SequenceBatch,
    collate,
    is_history,
    negatives_feature,
    with_negatives,
)

PER_USER = ("num_candidates_B", "sample_ids_B", "user_ids_B")
PER_EVENT = ("labels_E", "timestamps_E")


def _packed(users: list[tuple[int, int]]) -> PackedSamples:
    """(history events, candidates) of each user; every value occurs once."""
    histories, candidates = np.array(users, np.int64).reshape(-1, 2).T
    num_events = int(histories.sum() + candidates.sum())
    return PackedSamples(
        history_lengths_S=histories,
        num_candidates_S=candidates,
        items_E=100 + np.arange(num_events),
        labels_E=np.arange(num_events),
        actions_E=500 + np.arange(num_events),
        timestamps_E=1000 + np.arange(num_events),
        contextual_FS=700 + np.arange(2 * len(users)).reshape(2, -1),
        sample_ids_S=50 + np.arange(len(users)),
        user_ids_S=70 + np.arange(len(users)),
    )


def _batch(
    users: list[tuple[int, int]], *, batch_size: int, action: str | None = "act"
) -> SequenceBatch:
    return collate(
        _packed(users),
        batch_size=batch_size,
        item_feature_name="item",
        action_feature_name=action,
        contextual_feature_names=("user", "age"),
    )


def _check_parts(batch: SequenceBatch, num_parts: int) -> None:
    """Each part is what its users are in the whole batch, and nothing is lost or doubled."""
    parts = batch.split(num_parts)
    all_keys = batch.features.keys()
    keys = [key for key in all_keys if key != negatives_feature("item")]
    size = batch.batch_size // num_parts
    assert [part.batch.batch_size for part in parts] == [size] * num_parts
    for name in PER_USER + PER_EVENT:
        together = torch.cat([getattr(part.batch, name) for part in parts])
        assert torch.equal(together, getattr(batch, name)), name
    for key in keys:
        whole = batch.features[key]
        own = [part.batch.features[key] for part in parts]
        assert torch.equal(torch.cat([o.values() for o in own]), whole.values()), key
        assert torch.equal(torch.cat([o.lengths() for o in own]), whole.lengths()), key
        for part, values in zip(parts, own, strict=True):
            assert torch.equal(whole.values()[part.rows[key]], values.values()), key
    dense = {key: batch.features[key].to_dense() for key in keys}
    for index, part in enumerate(parts):
        one = part.batch
        assert list(part.rows) == keys
        users = range(index * size, (index + 1) * size)
        tokens = [sum(len(dense[key][user]) for key in keys) for user in users]
        assert (one.num_tokens, one.max_length) == (sum(tokens), batch.max_length)
        assert one.host_candidates_B.tolist() == one.num_candidates_B.tolist()
        assert one.num_samples == int((one.sample_ids_B >= 0).sum())
        assert one.num_negatives == (batch.num_negatives if num_parts == 1 else 0)
        assert one.host_lengths_KB.ravel().tolist() == one.features.lengths().tolist()
        fresh = type(one.features)(
            keys=one.features.keys(),
            values=one.features.values(),
            lengths=one.features.lengths(),
            stride=size,
        )
        assert one.features.length_per_key() == fresh.length_per_key()
        assert one.features.offset_per_key() == fresh.offset_per_key()
        assert torch.equal(one.features.offsets(), fresh.offsets())


@pytest.mark.parametrize("num_parts", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "users",
    [
        [(2, 1), (1, 2), (4, 0), (0, 3), (1, 1), (5, 2)],
        [(2, 1), (1, 2), (4, 0)],
        [(0, 0), (0, 0), (3, 1), (0, 0), (0, 0)],
        [(63, 0)],
        [],
    ],
    ids=["full", "short", "empty users", "one user", "padding only"],
)
def test_parts_put_together_are_the_batch(users, num_parts):
    for action in ("act", None):
        batch = _batch(users, batch_size=6, action=action)
        _check_parts(batch, num_parts)
        _check_parts(with_negatives(batch, np.array([9, 4, 7])), num_parts)


@settings(max_examples=80, deadline=None)
@given(
    users=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=12),
    num_parts=st.integers(1, 4),
    size=st.integers(1, 5),
)
def test_parts_of_any_batch_put_together_are_the_batch(users, num_parts, size):
    _check_parts(_batch(users[: num_parts * size], batch_size=num_parts * size), num_parts)


def test_parts_by_hand():
    batch = _batch([(2, 1), (1, 2), (1, 0)], batch_size=4)
    first, second = batch.split(2)
    assert first.batch.features.keys() == ["item", "act", "user", "age"]
    assert first.rows == {
        "item": slice(0, 6),
        "act": slice(0, 3),
        "user": slice(0, 2),
        "age": slice(0, 2),
    }
    assert second.rows["item"] == slice(6, 7)
    assert second.rows["act"] == slice(3, 4)
    values = [106, 506, 702, 705]  # the third user: one event, one id of each contextual feature
    assert second.batch.features.values().tolist() == values
    assert second.batch.features.lengths().tolist() == [1, 0, 1, 0, 1, 0, 1, 0]
    assert (second.batch.num_samples, second.batch.num_tokens, second.batch.max_length) == (
        1,
        4,
        batch.max_length,
    )


def test_one_part_is_the_batch_itself():
    batch = with_negatives(_batch([(2, 1), (1, 2)], batch_size=3), np.array([3, 1]))
    (part,) = batch.split(1)
    assert part.batch is batch
    assert part.rows["item"] == slice(0, 6)
    assert list(part.rows) == ["item", "act", "user", "age"]


def test_parts_need_no_values_of_the_device():
    """The meta device has none: reading one would raise."""
    batch = with_negatives(_batch([(2, 1), (1, 2), (1, 0)], batch_size=4), np.array([3, 1]))
    parts, moved = batch.split(2), batch.to(torch.device("meta")).split(2)
    for here, there in zip(parts, moved, strict=True):
        assert there.rows == here.rows
        assert there.batch.features.values().device.type == "meta"
        assert there.batch.features.length_per_key() == here.batch.features.length_per_key()
        assert there.batch.num_tokens == here.batch.num_tokens


@pytest.mark.parametrize("num_parts", [0, -1, 3, 8])
def test_unequal_parts_are_refused(num_parts):
    with pytest.raises(ValueError, match=f"must divide the batch size 4, got {num_parts}"):
        _batch([(1, 1)], batch_size=4).split(num_parts)


@pytest.mark.parametrize("users", [[(2, 1), (1, 2)], []], ids=["two users", "padding only"])
def test_negatives_are_the_last_feature_and_all_of_the_first_user(users):
    plain = _batch(users, batch_size=3)
    batch = with_negatives(plain, np.array([9, 4, 7]))
    assert batch.features.keys() == [*plain.features.keys(), "item_negatives"]
    negatives = batch.features["item_negatives"]
    assert negatives.values().tolist() == [9, 4, 7]
    assert negatives.lengths().tolist() == [3, 0, 0]
    assert batch.num_negatives == 3
    assert len(batch.features.values()) == batch.num_tokens + 3
    assert (batch.num_tokens, batch.max_length) == (plain.num_tokens, plain.max_length)
    for key in ("item", "act", "user", "age"):
        assert torch.equal(batch.features[key].values(), plain.features[key].values())
    assert batch.host_lengths_KB.ravel().tolist() == batch.features.lengths().tolist()


def test_negatives_that_cannot_be_are_refused():
    batch = _batch([(1, 1)], batch_size=2)
    with pytest.raises(ValueError, match="need at least one id .* got 0 ids"):
        with_negatives(batch, np.zeros(0, np.int64))
    twice = with_negatives(batch, np.array([1]))
    with pytest.raises(ValueError, match="no other feature called 'item_negatives'"):
        with_negatives(twice, np.array([1]))


def test_host_lengths_travel_with_the_batch():
    batch = with_negatives(_batch([(2, 1), (1, 2)], batch_size=3), np.array([9, 4]))
    expected = [[3, 3, 0], [2, 1, 0], [1, 1, 0], [1, 1, 0], [2, 0, 0]]
    for same in (batch, pickle.loads(pickle.dumps(batch)), batch.to(torch.device("meta"))):
        assert same.host_lengths_KB.dtype == np.int64
        assert same.host_lengths_KB.tolist() == expected
        assert same.num_negatives == 2


@pytest.mark.parametrize(
    ("field", "wrong", "message"),
    [
        ("host_lengths_KB", lambda n: n.astype(np.int32), r"must be int64 of shape \(4, 3\)"),
        ("host_lengths_KB", lambda n: n[:3], r"must be int64 of shape \(4, 3\)"),
        ("host_lengths_KB", lambda n: n + 1, "must be the lengths of features"),
        ("host_lengths_KB", lambda n: n[:, ::-1], "must be the lengths of features"),
        ("num_negatives", lambda n: n + 1, "features.values must be int64 of shape"),
    ],
)
def test_host_facts_that_contradict_the_features_are_refused(field, wrong, message):
    batch = _batch([(2, 1), (1, 2)], batch_size=3)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(batch, **{field: wrong(getattr(batch, field))})


def test_tokens_are_not_taken_for_negatives():
    batch = _batch([(2, 1), (1, 2)], batch_size=3)
    with pytest.raises(ValueError, match="num_negatives must be the ids of 'item_negatives'"):
        dataclasses.replace(batch, num_negatives=2, num_tokens=batch.num_tokens - 2)


@settings(max_examples=80, deadline=None)
@given(
    users=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=6),
    most=st.integers(1, 5),
)
def test_the_newest_history_is_kept_with_all_candidates(users, most):
    packed = _packed(users)
    kept = packed.newest(most)
    assert kept.history_lengths_S.tolist() == [min(history, most) for history, _ in users]
    assert kept.num_candidates_S.tolist() == [candidates for _, candidates in users]
    rows, begin = [], 0
    for history, candidates in users:
        end = begin + history + candidates
        rows.extend(range(begin + max(history - most, 0), end))
        begin = end
    for name in ("items_E", "labels_E", "actions_E", "timestamps_E"):
        assert getattr(kept, name).tolist() == getattr(packed, name)[rows].tolist(), name
    assert is_history(kept).sum() == kept.history_lengths_S.sum()
