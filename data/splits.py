"""Splits as views: which events of which user are history and which are candidates.

One preprocessed data set serves every split. A sample is a user and three event positions:

    events of a user   e0 e1 e2 e3 e4 e5 e6 e7 e8 | e9 e10      (time ascending)
                             ^history_begin       ^candidates_begin (= end of the history)
                                                         ^candidates_end
"""

from __future__ import annotations

import dataclasses
import logging

import numpy as np

logger = logging.getLogger(__name__)

SPLITS = ("temporal", "leave_one_out", "by_user")
TRAIN_WINDOWS = ("all", "random", "last")
FOLDS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleTable:
    """S samples as int64 columns. Positions count events over the whole events file.

    History is [history_begin, candidates_begin), candidates are [candidates_begin,
    candidates_end): they never overlap. Without candidates the history itself is supervised.
    """

    user_rows_S: np.ndarray
    history_begin_S: np.ndarray
    candidates_begin_S: np.ndarray
    candidates_end_S: np.ndarray
    num_skipped_users: int = 0
    """Users that give this fold no sample, counted once each."""

    def __len__(self) -> int:
        return len(self.user_rows_S)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitRule:
    """How events become samples. Lengths count events.

    Raises:
        ValueError: an unknown name, a length below its minimum, `temporal` without candidates.
    """

    split: str
    max_history_seqlen: int
    max_num_candidates: int = 0
    train_windows: str = "all"
    train_on_validation: bool = False
    epoch_key: tuple[int, int] = (0, 0)
    """(seed, epoch): with train_windows = "random", other borders for each."""

    def border_offsets(self, num_users: int) -> np.ndarray:
        """Events in each user's newest window under random borders, (U,) in 0..C - 1."""
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(self.epoch_key)))
        return generator.integers(0, self.max_num_candidates, num_users)

    def __post_init__(self) -> None:
        _one_of("split", self.split, SPLITS)
        _one_of("train_windows", self.train_windows, TRAIN_WINDOWS)
        if self.max_history_seqlen < 1:
            raise ValueError(
                f"DatasetArgs.max_history_seqlen must be >= 1, got {self.max_history_seqlen}"
            )
        if self.max_num_candidates < 0:
            raise ValueError(
                f"DatasetArgs.max_num_candidates must be >= 0, got {self.max_num_candidates}"
            )
        if self.split == "temporal" and self.max_num_candidates == 0:
            raise ValueError(
                'DatasetArgs.split = "temporal" needs max_num_candidates >= 1, got 0; '
                'choose "by_user" or "leave_one_out", or set max_num_candidates'
            )


def make_splits(rule: SplitRule, *, offsets_U1: np.ndarray) -> dict[str, SampleTable]:
    """The samples of the train, validation and test folds.

    Args:
        rule: the split and its lengths.
        offsets_U1: int64 (U+1,), event offsets of the users, in file order of their ids.

    - temporal: a user with n > C events gives its last C to test; of the m = n - C before, the
      last C to validation if m > C; training has the rest (all m with train_on_validation).
      Shorter users only train.
    - leave_one_out: the last event is the test candidate, the one before it the validation
      candidate; training has the rest. Two events are needed for a test, three for a validation
      sample. The evaluation folds have one candidate each, whatever C is.
    - by_user: the first 70% of users train, the next 15% validate, the last 15% test.

    Every sample has at least one history event; with C = 0 the events of a by_user or training
    sample are all history. Histories keep their newest max_history_seqlen events. Skipped users
    are counted and logged.

    Raises:
        ValueError: no user has enough events to train, or to test.
    """
    count_U = np.diff(offsets_U1)
    tables = _tables(rule, offsets_U1)
    for fold, table in tables.items():
        logger.info(
            "%s split, %s: %d samples of %d users, %d users skipped (too few events)",
            rule.split,
            fold,
            len(table),
            len(np.unique(table.user_rows_S)),
            table.num_skipped_users,
        )
    for fold in ("train", "test"):
        if not len(tables[fold]):
            raise ValueError(
                f"the {fold} fold of split {rule.split!r} is empty: with "
                f"DatasetArgs.max_num_candidates = {rule.max_num_candidates} no user has enough "
                f"events (most: {int(count_U.max(initial=0))}); lower max_num_candidates or "
                f"choose another split"
            )
    if not len(tables["validation"]):
        logger.warning("the validation fold of split %r is empty", rule.split)
    return tables


def train_table(rule: SplitRule, *, offsets_U1: np.ndarray) -> SampleTable:
    """The training samples alone, for the borders of another epoch; as many in every epoch."""
    return _tables(rule, offsets_U1)["train"]


def _tables(rule: SplitRule, offsets_U1: np.ndarray) -> dict[str, SampleTable]:
    builders = {"temporal": _temporal, "leave_one_out": _leave_one_out, "by_user": _by_user}
    return builders[rule.split](rule, offsets_U1[:-1], np.diff(offsets_U1))


def _temporal(rule: SplitRule, begin_U: np.ndarray, count_U: np.ndarray) -> dict[str, SampleTable]:
    size = rule.max_num_candidates
    tested_U = count_U > size
    before_test_U = count_U - np.where(tested_U, size, 0)
    validated_U = tested_U & (before_test_U > size)
    held_out_U = validated_U & (not rule.train_on_validation)
    return {
        "train": _train(rule, begin_U, before_test_U - np.where(held_out_U, size, 0)),
        "validation": _last_events(rule, begin_U, before_test_U, size, validated_U),
        "test": _last_events(rule, begin_U, count_U, size, tested_U),
    }


def _leave_one_out(
    rule: SplitRule, begin_U: np.ndarray, count_U: np.ndarray
) -> dict[str, SampleTable]:
    tested_U, validated_U = count_U >= 2, count_U >= 3
    before_test_U = count_U - tested_U
    held_out_U = validated_U & (not rule.train_on_validation)
    return {
        "train": _train(rule, begin_U, before_test_U - held_out_U),
        "validation": _last_events(rule, begin_U, before_test_U, 1, validated_U),
        "test": _last_events(rule, begin_U, count_U, 1, tested_U),
    }


def _by_user(rule: SplitRule, begin_U: np.ndarray, count_U: np.ndarray) -> dict[str, SampleTable]:
    num_users = len(count_U)
    row_U = np.arange(num_users)
    train_end, validation_end = num_users * 70 // 100, num_users * 85 // 100
    train_U = row_U < (validation_end if rule.train_on_validation else train_end)
    folds = {
        "validation": (row_U >= train_end) & (row_U < validation_end),
        "test": row_U >= validation_end,
    }
    size = rule.max_num_candidates
    tables = {"train": _train(rule, begin_U, count_U, among_U=train_U)}
    for fold, among_U in folds.items():
        enough_U = among_U & (count_U > size)
        table = _last_events(rule, begin_U, count_U, size, enough_U)
        skipped = int((among_U & ~enough_U).sum())
        tables[fold] = dataclasses.replace(table, num_skipped_users=skipped)
    return tables


def _train(
    rule: SplitRule, begin_U: np.ndarray, end_U: np.ndarray, *, among_U: np.ndarray | None = None
) -> SampleTable:
    """Training samples of each user's first end_U events."""
    among_U = np.ones(len(end_U), bool) if among_U is None else among_U
    size = rule.max_num_candidates
    if size == 0:
        enough_U = among_U & (end_U >= 1)
        windows_U = enough_U.astype(np.int64)
    else:
        enough_U = among_U & (end_U >= 2)
        num_windows = {
            "last": np.ones_like(end_U),
            "all": -(-(end_U - 1) // size),
            "random": -(-(end_U - 1) // size) + 1,
        }
        windows_U = np.where(enough_U, num_windows[rule.train_windows], 0)
    users_S = np.repeat(np.arange(len(end_U)), windows_U)
    # Windows of a user come oldest first; they are laid from its newest event back.
    windows_after_S = np.cumsum(windows_U)[users_S] - 1 - np.arange(len(users_S))
    # Random borders: the newest window holds the 0 to C - 1 events after the first border.
    shift_S = np.zeros_like(end_U)
    if rule.train_windows == "random" and size:
        shift_S = size - rule.border_offsets(len(end_U))
    last_S = end_U[users_S]
    candidates_end_S = last_S + shift_S[users_S] - windows_after_S * size
    candidates_begin_S = np.maximum(candidates_end_S - size, 1) if size else candidates_end_S
    candidates_end_S = np.minimum(candidates_end_S, last_S)
    if size:
        candidates_end_S = np.maximum(candidates_end_S, candidates_begin_S)
    skipped = int((among_U & ~enough_U).sum())
    return _table(rule, begin_U, users_S, candidates_begin_S, candidates_end_S, skipped)


def _last_events(
    rule: SplitRule, begin_U: np.ndarray, end_U: np.ndarray, size: int, chosen_U: np.ndarray
) -> SampleTable:
    """One sample for each chosen user: its last `size` of end_U events are the candidates."""
    users_S = np.flatnonzero(chosen_U)
    end_S = end_U[users_S]
    return _table(rule, begin_U, users_S, end_S - size, end_S, int((~chosen_U).sum()))


def _table(
    rule: SplitRule,
    begin_U: np.ndarray,
    users_S: np.ndarray,
    candidates_begin_S: np.ndarray,
    candidates_end_S: np.ndarray,
    num_skipped_users: int,
) -> SampleTable:
    history_begin_S = np.maximum(candidates_begin_S - rule.max_history_seqlen, 0)
    first_S = begin_U[users_S]
    return SampleTable(
        user_rows_S=users_S.astype(np.int64),
        history_begin_S=first_S + history_begin_S,
        candidates_begin_S=first_S + candidates_begin_S,
        candidates_end_S=first_S + candidates_end_S,
        num_skipped_users=num_skipped_users,
    )


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"DatasetArgs.{field} must be one of {', '.join(allowed)}, got {value!r}")
