from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.splits import FOLDS, SampleTable, SplitRule, make_splits

Sample = tuple[int, list[int], list[int]]


def _splits(counts: list[int], **rule: object) -> dict[str, SampleTable]:
    offsets_U1 = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return make_splits(SplitRule(**{"max_history_seqlen": 1000, **rule}), offsets_U1=offsets_U1)


def _samples(table: SampleTable, counts: list[int]) -> list[Sample]:
    """(user row, history, candidates), events numbered from 0 within their user."""
    samples = []
    for row in range(len(table)):
        user = int(table.user_rows_S[row])
        columns = (table.history_begin_S, table.candidates_begin_S, table.candidates_end_S)
        begin, middle, end = (int(column[row]) - sum(counts[:user]) for column in columns)
        samples.append((user, list(range(begin, middle)), list(range(middle, end))))
    return samples


def test_temporal_holds_out_the_latest_events():
    splits = _splits([7], split="temporal", max_num_candidates=2)
    assert _samples(splits["test"], [7]) == [(0, [0, 1, 2, 3, 4], [5, 6])]
    assert _samples(splits["validation"], [7]) == [(0, [0, 1, 2], [3, 4])]
    assert _samples(splits["train"], [7]) == [(0, [0], [1, 2])]


def test_train_windows_run_from_the_newest_event_back():
    splits = _splits([11], split="temporal", max_num_candidates=2, train_on_validation=True)
    windows = [([0], [1, 2]), ([0, 1, 2], [3, 4]), ([0, 1, 2, 3, 4], [5, 6])]
    assert _samples(splits["train"], [11]) == [
        *((0, history, candidates) for history, candidates in windows),
        (0, [0, 1, 2, 3, 4, 5, 6], [7, 8]),
    ]
    last = _splits([8], split="temporal", max_num_candidates=3, train_windows="last")
    assert _samples(last["train"], [8]) == [(0, [0], [1])]
    last = _splits([9], split="temporal", max_num_candidates=2, train_windows="last")
    assert _samples(last["train"], [9]) == [(0, [0, 1, 2], [3, 4])]


def test_the_oldest_window_may_be_short():
    splits = _splits([8], split="temporal", max_num_candidates=2)
    assert _samples(splits["train"], [8]) == [(0, [0], [1]), (0, [0, 1], [2, 3])]


def test_only_users_with_more_events_than_candidates_are_tested(caplog):
    counts = [0, 1, 20, 21]
    with caplog.at_level(logging.INFO, logger="data.splits"):
        splits = _splits(counts, split="temporal", max_num_candidates=20)
    assert _samples(splits["test"], counts) == [(3, [0], list(range(1, 21)))]
    assert splits["test"].num_skipped_users == 3
    assert "test: 1 samples of 1 users, 3 users skipped" in caplog.text
    assert "validation fold of split 'temporal' is empty" in caplog.text
    # The user with 20 events still trains: one event is history, 19 are candidates.
    assert _samples(splits["train"], counts) == [(2, [0], list(range(1, 20)))]


@pytest.mark.parametrize("counts", [[], [0], [1, 20, 3]])
def test_data_without_long_enough_users_stops_with_a_reason(counts):
    with pytest.raises(ValueError, match=r"fold of split 'temporal' is empty: .*= 20 no user"):
        _splits(counts, split="temporal", max_num_candidates=20)


def test_histories_keep_their_newest_events():
    splits = _splits([12], split="temporal", max_num_candidates=2, max_history_seqlen=3)
    assert _samples(splits["test"], [12]) == [(0, [7, 8, 9], [10, 11])]


def test_leave_one_out():
    counts = [1, 2, 3, 6]
    splits = _splits(counts, split="leave_one_out")
    assert _samples(splits["test"], counts) == [
        (1, [0], [1]),
        (2, [0, 1], [2]),
        (3, [0, 1, 2, 3, 4], [5]),
    ]
    assert _samples(splits["validation"], counts) == [(2, [0], [1]), (3, [0, 1, 2, 3], [4])]
    assert _samples(splits["train"], counts) == [
        (0, [0], []),
        (1, [0], []),
        (2, [0], []),
        (3, [0, 1, 2, 3], []),
    ]
    final = _splits(counts, split="leave_one_out", train_on_validation=True)
    assert _samples(final["train"], counts)[-1] == (3, [0, 1, 2, 3, 4], [])


def test_by_user_splits_users_in_the_order_of_their_ids():
    counts = [3] * 20
    splits = _splits(counts, split="by_user")
    users = {fold: splits[fold].user_rows_S.tolist() for fold in FOLDS}
    assert users == {
        "train": list(range(14)),
        "validation": list(range(14, 17)),
        "test": list(range(17, 20)),
    }
    assert _samples(splits["test"], counts)[0] == (17, [0, 1, 2], [])
    final = _splits(counts, split="by_user", train_on_validation=True)
    assert final["train"].user_rows_S.tolist() == list(range(17))
    with_candidates = _splits([3] * 19 + [2], split="by_user", max_num_candidates=2)
    assert _samples(with_candidates["test"], counts) == [(17, [0], [1, 2]), (18, [0], [1, 2])]
    assert with_candidates["test"].num_skipped_users == 1


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"split": "random"}, "split must be one of temporal, leave_one_out, by_user"),
        ({"split": "temporal"}, "needs max_num_candidates >= 1, got 0"),
        ({"split": "by_user", "max_num_candidates": -1}, "max_num_candidates must be >= 0"),
        ({"split": "by_user", "max_history_seqlen": 0}, "max_history_seqlen must be >= 1"),
        ({"split": "by_user", "train_windows": "none"}, "train_windows must be one of all"),
    ],
)
def test_a_wrong_rule_is_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        _splits([5, 5], **rule)


@settings(max_examples=150, deadline=None)
@given(
    counts=st.lists(st.integers(0, 14), min_size=1, max_size=8),
    candidates=st.integers(1, 5),
    history=st.integers(1, 6),
    windows=st.sampled_from(["all", "last"]),
    final=st.booleans(),
)
def test_temporal_folds_never_leak(counts, candidates, history, windows, final):
    counts = [*counts, 3 * candidates + 2]  # somebody is always long enough
    splits = _splits(
        counts,
        split="temporal",
        max_num_candidates=candidates,
        max_history_seqlen=history,
        train_windows=windows,
        train_on_validation=final,
    )
    predicted = {fold: [] for fold in FOLDS}
    for fold in FOLDS:
        for user, past, future in _samples(splits[fold], counts):
            assert 1 <= len(past) <= history
            assert 1 <= len(future) <= candidates
            assert past[-1] + 1 == future[0]
            assert len(past) == min(history, future[0])
            predicted[fold].extend((user, event) for event in future)
        assert len(set(predicted[fold])) == len(predicted[fold])
    test, train = set(predicted["test"]), set(predicted["train"])
    expected = {(u, n - 1 - k) for u, n in enumerate(counts) for k in range(candidates)}
    assert test == {(u, e) for u, e in expected if counts[u] > candidates}
    assert not test & train
    assert not test & set(predicted["validation"])
    assert final or not train & set(predicted["validation"])
    if windows == "all":
        trained = {(u, e) for u, n in enumerate(counts) for e in range(1, n)} - test
        assert train == (trained if final else trained - set(predicted["validation"]))


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(lambda c: max(c) > 15),
    size=st.integers(1, 7),
    epoch=st.integers(0, 5),
)
def test_random_windows_use_every_event_once_with_all_its_past(counts, size, epoch):
    rule = {"split": "temporal", "max_num_candidates": size, "train_windows": "random"}
    table = _splits(counts, **rule, epoch_key=(7, epoch))["train"]
    assert len(table) == len(_splits(counts, **rule, epoch_key=(7, epoch + 1))["train"])
    plain = _splits(counts, **{**rule, "train_windows": "all"})["train"]
    used: dict[int, list[int]] = {}
    for user, history, candidates in _samples(table, counts):
        assert len(candidates) <= size
        if candidates:
            assert history == list(range(candidates[0]))
            used.setdefault(user, []).extend(candidates)
    expected: dict[int, list[int]] = {}
    for user, _, candidates in _samples(plain, counts):
        expected.setdefault(user, []).extend(candidates)
    assert used == {user: sorted(events) for user, events in expected.items()}


def test_random_borders_change_with_epoch_and_seed_only():
    def borders(*key: int) -> list[Sample]:
        rule = {"max_num_candidates": 5, "train_windows": "random", "epoch_key": key}
        return _samples(_splits([40, 33, 28], split="temporal", **rule)["train"], [40, 33, 28])

    assert borders(1, 0) == borders(1, 0)
    assert borders(1, 0) != borders(1, 1)
    assert borders(1, 0) != borders(2, 0)
