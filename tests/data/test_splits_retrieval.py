"""Retrieval's folds and the blocks of training samples without candidates."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.splits import FOLDS, SampleTable, SplitRule, make_splits, train_table

Sample = tuple[int, list[int], list[int]]

FIVE = [1, 2, 3, 5, 8]


def _offsets(counts: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _rule(**rule: object) -> SplitRule:
    return SplitRule(**{"max_history_seqlen": 1000, "task": "retrieval", **rule})


def _splits(counts: list[int], **rule: object) -> dict[str, SampleTable]:
    return make_splits(_rule(**rule), offsets_U1=_offsets(counts))


def _samples(table: SampleTable, counts: list[int]) -> list[Sample]:
    """(user row, history, candidates), events numbered from 0 within their user."""
    samples = []
    for row, user in enumerate(table.user_rows_S.tolist()):
        columns = (table.history_begin_S, table.candidates_begin_S, table.candidates_end_S)
        begin, middle, end = (int(column[row]) - sum(counts[:user]) for column in columns)
        samples.append((user, list(range(begin, middle)), list(range(middle, end))))
    return samples


def _skipped(splits: dict[str, SampleTable]) -> list[int]:
    return [splits[fold].num_skipped_users for fold in FOLDS]


def _of_one(count: int, **rule: object) -> list[list[int]]:
    """Training histories of one user that has `count` training events, beside test users."""
    counts = [count, *[9] * 3]
    table = _splits(counts, split="by_user", **rule)["train"]
    return [history for user, history, _ in _samples(table, counts) if user == 0]


@pytest.mark.parametrize("candidates", [0, 4])
def test_leave_one_out_by_hand(candidates, caplog):
    """One candidate, whatever is asked for; users of 1, 2 and 3 events leave nothing to train."""
    with caplog.at_level(logging.INFO, logger="data.splits"):
        splits = _splits(FIVE, split="leave_one_out", max_num_candidates=candidates)
    assert _samples(splits["test"], FIVE) == [
        (1, [0], [1]),
        (2, [0, 1], [2]),
        (3, [0, 1, 2, 3], [4]),
        (4, [0, 1, 2, 3, 4, 5, 6], [7]),
    ]
    assert _samples(splits["validation"], FIVE) == [
        (2, [0], [1]),
        (3, [0, 1, 2], [3]),
        (4, [0, 1, 2, 3, 4, 5], [6]),
    ]
    assert _samples(splits["train"], FIVE) == [(3, [0, 1, 2], []), (4, [0, 1, 2, 3, 4, 5], [])]
    assert _skipped(splits) == [3, 2, 1]
    assert "leave_one_out split, train: 2 samples of 2 users, 3 users skipped" in caplog.text


def test_leave_one_out_trains_on_validation_where_asked():
    splits = _splits(FIVE, split="leave_one_out", train_on_validation=True)
    train = _samples(splits["train"], FIVE)
    assert [(user, len(history)) for user, history, _ in train] == [(2, 2), (3, 4), (4, 7)]
    assert _skipped(splits) == [2, 2, 1]


@pytest.mark.parametrize(("asked", "last"), [(0, 1), (1, 1), (2, 2)])
def test_by_user_by_hand(asked, last):
    splits = _splits(FIVE, split="by_user", max_num_candidates=asked)
    assert _samples(splits["train"], FIVE) == [(1, [0, 1], []), (2, [0, 1, 2], [])]
    events = list(range(8))
    assert _samples(splits["validation"], FIVE) == [(3, events[: 5 - last], events[5 - last : 5])]
    assert _samples(splits["test"], FIVE) == [(4, events[: 8 - last], events[8 - last :])]
    assert _skipped(splits) == [1, 0, 0]


def test_by_user_skips_held_out_users_without_history():
    splits = _splits([4, 4, 4, 1, 8], split="by_user")
    assert len(splits["validation"]) == 0
    assert _skipped(splits) == [0, 1, 0]


def test_temporal_by_hand():
    splits = _splits(FIVE, split="temporal", max_num_candidates=2)
    assert _samples(splits["test"], FIVE) == [
        (2, [0], [1, 2]),
        (3, [0, 1, 2], [3, 4]),
        (4, [0, 1, 2, 3, 4, 5], [6, 7]),
    ]
    assert _samples(splits["validation"], FIVE) == [(3, [0], [1, 2]), (4, [0, 1, 2, 3], [4, 5])]
    # Training has no candidates; the user of 2 events is in no other fold and keeps both.
    assert _samples(splits["train"], FIVE) == [(1, [0, 1], []), (4, [0, 1, 2, 3], [])]
    assert _skipped(splits) == [3, 3, 2]


def test_evaluation_keeps_the_newest_history():
    splits = _splits([9], split="leave_one_out", max_history_seqlen=3)
    assert _samples(splits["test"], [9]) == [(0, [5, 6, 7], [8])]
    assert _samples(splits["validation"], [9]) == [(0, [4, 5, 6], [7])]


@pytest.mark.parametrize(
    ("count", "blocks"),
    [
        (1, []),
        (2, [[0, 1]]),
        (4, [[0, 1, 2, 3]]),
        (5, [[0, 1], [1, 2, 3, 4]]),
        (7, [[0, 1, 2, 3], [3, 4, 5, 6]]),
        (9, [[0, 1, 2], [2, 3, 4, 5], [5, 6, 7, 8]]),
    ],
)
def test_blocks_overlap_by_one_event(count, blocks):
    assert _of_one(count, max_history_seqlen=4) == blocks
    assert _of_one(count, max_history_seqlen=4, train_windows="last") == blocks[-1:]


@pytest.mark.parametrize(
    ("count", "blocks"),
    [
        (1, [[0]]),
        (4, [[0, 1, 2, 3]]),
        (5, [[0], [1, 2, 3, 4]]),
        (9, [[0], [1, 2, 3, 4], [5, 6, 7, 8]]),
    ],
)
def test_blocks_of_ranking_do_not_overlap(count, blocks):
    assert _of_one(count, max_history_seqlen=4, task="ranking") == blocks
    last = {"max_history_seqlen": 4, "task": "ranking", "train_windows": "last"}
    assert _of_one(count, **last) == blocks[-1:]


def test_random_blocks_by_hand():
    """Nine events in blocks of 4: eight are predicted, three a block, 0 to 2 in the newest one."""
    expected = {
        0: [[0, 1, 2], [2, 3, 4, 5], [5, 6, 7, 8], [8]],
        1: [[0, 1], [1, 2, 3, 4], [4, 5, 6, 7], [7, 8]],
        2: [[0], [0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8]],
    }
    found = {}
    for epoch in range(30):
        rule = {"train_windows": "random", "max_history_seqlen": 4, "epoch_key": (1, epoch)}
        blocks = _of_one(9, **rule)
        found[len(blocks[-1]) - 1] = blocks
    assert found == expected


def _table_of(counts: list[int], rule: SplitRule) -> list[Sample]:
    table = train_table(rule, offsets_U1=_offsets(counts))
    used = ~rule.is_empty(table)
    return _samples(table.take(np.flatnonzero(used)), counts)


@settings(max_examples=150, deadline=None)
@given(
    counts=st.lists(st.integers(0, 40), min_size=4, max_size=8),
    length=st.integers(2, 9),
    epoch=st.integers(0, 5),
    windows=st.sampled_from(["all", "random"]),
    task=st.sampled_from(["retrieval", "ranking"]),
    split=st.sampled_from(["leave_one_out", "by_user"]),
)
def test_every_event_is_a_target_exactly_once(counts, length, epoch, windows, task, split):
    """Retrieval predicts all but a user's first event, ranking's history loss all of them."""
    rule = _rule(
        split=split,
        max_history_seqlen=length,
        train_windows=windows,
        task=task,
        epoch_key=(5, epoch),
    )
    whole = _rule(split=split, task=task, train_windows="last")
    expected = {user: history for user, history, _ in _table_of(counts, whole)}
    lead = 1 if task == "retrieval" else 0
    targets: dict[int, list[int]] = {}
    blocks: dict[int, int] = {}
    for user, history, candidates in _table_of(counts, rule):
        assert not candidates
        assert lead < len(history) <= length
        targets.setdefault(user, []).extend(history[lead:])
        blocks[user] = blocks.get(user, 0) + 1
    assert targets == {user: events[lead:] for user, events in expected.items()}
    short = [user for user, events in expected.items() if len(events) <= length]
    assert all(blocks[user] == 1 for user in short), "a history that fits is left whole"


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    length=st.integers(2, 9),
)
def test_random_blocks_are_as_many_each_epoch(counts, length):
    def lengths(epoch: int) -> list[int]:
        rule = _rule(
            split="leave_one_out",
            max_history_seqlen=length,
            train_windows="random",
            epoch_key=(3, epoch),
        )
        return train_table(rule, offsets_U1=_offsets(counts)).user_rows_S.tolist()

    assert lengths(0) == lengths(1) == lengths(7)


def test_random_blocks_change_with_epoch_and_seed_only():
    def blocks(*key: int) -> list[list[int]]:
        return _of_one(200, max_history_seqlen=30, train_windows="random", epoch_key=key)

    assert blocks(1, 0) == blocks(1, 0)
    assert len({str(blocks(seed, epoch)) for seed in (1, 2) for epoch in range(4)}) > 4


@settings(max_examples=150, deadline=None)
@given(
    counts=st.lists(st.integers(0, 14), min_size=1, max_size=8),
    candidates=st.integers(0, 4),
    length=st.integers(2, 6),
    windows=st.sampled_from(["all", "random", "last"]),
    split=st.sampled_from(["temporal", "leave_one_out", "by_user"]),
    final=st.booleans(),
)
def test_held_out_events_are_never_trained_on(counts, candidates, length, windows, split, final):
    candidates = max(1, candidates) if split == "temporal" else candidates
    counts = [16, *counts, 16, 16, 16]  # each fold has somebody
    splits = _splits(
        counts,
        split=split,
        max_num_candidates=candidates,
        max_history_seqlen=length,
        train_windows=windows,
        train_on_validation=final,
    )
    trained = {
        (user, event) for user, history, _ in _samples(splits["train"], counts) for event in history
    }
    held_out = 1 if split == "leave_one_out" else max(1, candidates)
    for fold in ("validation", "test"):
        predicted = set()
        for user, history, targets in _samples(splits[fold], counts):
            assert len(targets) == held_out
            assert len(history) == min(length, targets[0]) >= 1
            predicted |= {(user, event) for event in targets}
        assert predicted
        assert not predicted & trained or (fold == "validation" and final)


@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 2], [3, 3, 3], []])
def test_data_without_a_pair_to_train_on_stops_with_a_reason(counts):
    with pytest.raises(ValueError, match=r"fold of split 'leave_one_out' is empty: .*retrieval"):
        _splits(counts, split="leave_one_out")


def test_a_block_of_one_event_is_refused():
    with pytest.raises(ValueError, match=r"max_history_seqlen must be >= 2, got 1; retrieval"):
        _splits(FIVE, split="leave_one_out", max_history_seqlen=1)
    with pytest.raises(ValueError, match="task must be one of ranking, retrieval, got 'both'"):
        _splits(FIVE, split="leave_one_out", task="both")
