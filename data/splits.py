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
TASKS = ("ranking", "retrieval")


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

    def take(self, indices_S: np.ndarray) -> SampleTable:
        """The samples at these positions."""
        return dataclasses.replace(
            self,
            user_rows_S=self.user_rows_S[indices_S],
            history_begin_S=self.history_begin_S[indices_S],
            candidates_begin_S=self.candidates_begin_S[indices_S],
            candidates_end_S=self.candidates_end_S[indices_S],
        )


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
    task: str = "ranking"
    """Retrieval trains without candidates and always has at least one in evaluation."""

    @property
    def num_train_candidates(self) -> int:
        """Most candidates of a training sample."""
        return 0 if self.task == "retrieval" else self.max_num_candidates

    @property
    def num_held_out(self) -> int:
        """Candidates of an evaluation sample (leave_one_out has one, whatever this says)."""
        least = 1 if self.task == "retrieval" else 0
        return max(least, self.max_num_candidates)

    @property
    def num_lead_events(self) -> int:
        """First events of a training sample that nothing in it predicts: 1 for retrieval."""
        return 1 if self.task == "retrieval" else 0

    def border_offsets(self, num_users: int, size: int) -> np.ndarray:
        """Events in each user's newest window under random borders, (U,) in 0..size - 1."""
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(self.epoch_key)))
        return generator.integers(0, size, num_users)

    def is_empty(self, samples: SampleTable) -> np.ndarray:
        """Bool (S,): training samples that random borders left without anything to predict."""
        if self.num_train_candidates:
            return samples.candidates_end_S == samples.candidates_begin_S
        return samples.candidates_begin_S - samples.history_begin_S <= self.num_lead_events

    def __post_init__(self) -> None:
        _one_of("DatasetArgs.split", self.split, SPLITS)
        _one_of("DatasetArgs.train_windows", self.train_windows, TRAIN_WINDOWS)
        _one_of("task", self.task, TASKS)
        least = 1 + self.num_lead_events
        if self.max_history_seqlen < least:
            why = "; retrieval predicts each event from the one before" if least == 2 else ""
            raise ValueError(
                f"DatasetArgs.max_history_seqlen must be >= {least}, "
                f"got {self.max_history_seqlen}{why}"
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

    Retrieval: training samples are all history whatever C is, of two events at least, and
    by_user evaluates the last max(1, C) events too.

    Training samples without candidates are blocks of H = max_history_seqlen events, laid from the
    newest event back; train_windows = "last" keeps the newest one alone. Retrieval's overlap by
    one event, so that every event but a user's first is predicted once (H = 4, n = 9):

        ranking     e0 | e1 e2 e3 e4 | e5 e6 e7 e8
        retrieval   e0 e1 e2 | e2 e3 e4 e5 | e5 e6 e7 e8

    "random" draws the length of the newest block anew each epoch, for users of more than one.

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
    way_out = "use data with longer histories, or choose another split"
    if rule.max_num_candidates > 1:
        way_out = "lower max_num_candidates or choose another split"
    for fold in ("train", "test"):
        if not len(tables[fold]):
            raise ValueError(
                f"the {fold} fold of split {rule.split!r} is empty: with "
                f"DatasetArgs.max_num_candidates = {rule.max_num_candidates} no user has enough "
                f"events for {rule.task} (most: {int(count_U.max(initial=0))}); {way_out}"
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
    size = rule.num_held_out
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
    size, lead = rule.num_train_candidates, rule.num_lead_events
    if size:
        enough_U = among_U & (end_U >= 2)
        users_S, candidates_begin_S, candidates_end_S = _windows(
            rule, end_U, enough_U, size=size, first=1
        )
        history_begin_S = None
    else:
        enough_U = among_U & (end_U >= 1 + lead)
        block = rule.max_history_seqlen - lead
        users_S, first_S, candidates_end_S = _windows(rule, end_U, enough_U, size=block, first=lead)
        history_begin_S, candidates_begin_S = first_S - lead, candidates_end_S
    skipped = int((among_U & ~enough_U).sum())
    return _table(
        rule,
        begin_U,
        users_S,
        candidates_begin_S,
        candidates_end_S,
        num_skipped_users=skipped,
        history_begin_S=history_begin_S,
    )


def _windows(
    rule: SplitRule, end_U: np.ndarray, enough_U: np.ndarray, *, size: int, first: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows of `size` over events first..end - 1 of each user: (user, begin, end), int64 (S,).

    They are laid from the newest event back, oldest first in the result; the oldest may be short.
    """
    num_full_U = -(-(end_U - first) // size)
    # Candidate windows move for everybody; a history that fits into one block is left whole.
    moves_U = enough_U & (rule.train_windows == "random")
    if not rule.num_train_candidates:
        moves_U &= num_full_U > 1
    windows_U = np.ones_like(end_U) if rule.train_windows == "last" else num_full_U + moves_U
    windows_U = np.where(enough_U, windows_U, 0)
    users_S = np.repeat(np.arange(len(end_U)), windows_U)
    windows_after_S = np.cumsum(windows_U)[users_S] - 1 - np.arange(len(users_S))
    # Random borders: the newest window holds the 0 to size - 1 events after the first border.
    shift_U = np.zeros_like(end_U)
    if rule.train_windows == "random":
        shift_U = np.where(moves_U, size - rule.border_offsets(len(end_U), size), 0)
    last_S = end_U[users_S]
    end_S = last_S + shift_U[users_S] - windows_after_S * size
    begin_S = np.maximum(end_S - size, first)
    end_S = np.maximum(np.minimum(end_S, last_S), begin_S)
    return users_S, begin_S, end_S


def _last_events(
    rule: SplitRule, begin_U: np.ndarray, end_U: np.ndarray, size: int, chosen_U: np.ndarray
) -> SampleTable:
    """One sample for each chosen user: its last `size` of end_U events are the candidates."""
    users_S = np.flatnonzero(chosen_U)
    end_S = end_U[users_S]
    skipped = int((~chosen_U).sum())
    return _table(rule, begin_U, users_S, end_S - size, end_S, num_skipped_users=skipped)


def _table(
    rule: SplitRule,
    begin_U: np.ndarray,
    users_S: np.ndarray,
    candidates_begin_S: np.ndarray,
    candidates_end_S: np.ndarray,
    *,
    num_skipped_users: int,
    history_begin_S: np.ndarray | None = None,
) -> SampleTable:
    if history_begin_S is None:
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
        raise ValueError(f"{field} must be one of {', '.join(allowed)}, got {value!r}")
