"""Sorts more events than fit in memory: by user, then time, equal times in order of arrival.

    add:    events as they come -> runs of at most `run_rows`, each sorted by user, on disk
    parts:  the next users with at most `part_rows` events together -> their slice of every run,
            sorted by user and time

So memory holds one run or one part, however many events there are; a single user with more than
`part_rows` events is a part of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_DENSE_IDS = 1 << 28
_COLUMNS = (("items_N", np.int64), ("labels_N", np.int16), ("times_N", np.int64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventBlock:
    """N events: users, items and times int64 (N,), labels int16 (N,)."""

    users_N: np.ndarray
    items_N: np.ndarray
    labels_N: np.ndarray
    times_N: np.ndarray

    def __len__(self) -> int:
        return len(self.users_N)

    def take(self, rows_M: np.ndarray) -> EventBlock:
        """The events in these rows, in this order."""
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return EventBlock(**{name: values_N[rows_M] for name, values_N in columns.items()})


def concatenate(blocks: list[EventBlock]) -> EventBlock:
    """One block with the events of all, in order."""
    names = [field.name for field in dataclasses.fields(EventBlock)]
    return EventBlock(**{n: np.concatenate([getattr(b, n) for b in blocks]) for n in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """Events on disk, ascending by user: users (U,) and where their events begin (U+1,)."""

    path: Path
    users_U: np.ndarray
    offsets_U1: np.ndarray

    def read(self, first_user: int, last_user: int) -> EventBlock:
        """The events of these users and all between them."""
        begin = int(np.searchsorted(self.users_U, first_user))
        end = int(np.searchsorted(self.users_U, last_user, side="right"))
        start, stop = int(self.offsets_U1[begin]), int(self.offsets_U1[end])
        columns = {}
        base = 0
        for name, dtype in _COLUMNS:
            size = np.dtype(dtype).itemsize
            columns[name] = np.fromfile(
                self.path, dtype, count=stop - start, offset=base + start * size
            )
            base += int(self.offsets_U1[-1]) * size
        counts_U = np.diff(self.offsets_U1[begin : end + 1])
        return EventBlock(users_N=np.repeat(self.users_U[begin:end], counts_U), **columns)


class EventSorter:
    """Takes events in file order and gives them back ordered.

    Args:
        work: a folder on a disk with 18 bytes of room for each event.
        run_rows: events kept in memory before they go to disk.
        part_rows: events given back at a time.
    """

    def __init__(self, work: Path, *, run_rows: int = 1 << 22, part_rows: int = 1 << 22) -> None:
        self._work, self._run_rows, self._part_rows = work, run_rows, part_rows
        self._pending: list[EventBlock] = []
        self._num_pending = 0
        self._runs: list[_Run] = []
        self._items = _DistinctIds()
        self.num_events = 0

    def add(self, block: EventBlock) -> None:
        """Takes the next events."""
        if not len(block):
            return
        self.num_events += len(block)
        self._items.add(block.items_N)
        self._pending.append(block)
        self._num_pending += len(block)
        if self._num_pending >= self._run_rows:
            self._flush()

    @property
    def num_items(self) -> int:
        """Distinct items."""
        return self._items.count

    @property
    def max_item_id(self) -> int:
        """Highest item id; -1 without events."""
        return self._items.highest

    def user_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Users with events, ascending, and how many each has; int64 (U,) both."""
        self._flush()
        if not self._runs:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        users_U, row_R = np.unique(
            np.concatenate([run.users_U for run in self._runs]), return_inverse=True
        )
        counts_U = np.zeros(len(users_U), np.int64)
        np.add.at(counts_U, row_R, np.concatenate([np.diff(run.offsets_U1) for run in self._runs]))
        return users_U, counts_U

    def parts(self) -> Iterator[EventBlock]:
        """All events, users ascending, in blocks of whole users."""
        users_U, counts_U = self.user_counts()
        ends_U = np.cumsum(counts_U)
        begin = 0
        while begin < len(users_U):
            done = int(ends_U[begin - 1]) if begin else 0
            fitting = int(np.searchsorted(ends_U, done + self._part_rows, side="right"))
            end = max(fitting, begin + 1)
            span = int(users_U[begin]), int(users_U[end - 1])
            block = concatenate([run.read(*span) for run in self._runs])
            yield block.take(_order(block))
            begin = end

    def _flush(self) -> None:
        """Writes what is pending as a run."""
        if not self._pending:
            return
        block = concatenate(self._pending)
        self._pending, self._num_pending = [], 0
        block = block.take(_stable_argsort(block.users_N))
        begins_U = np.flatnonzero(np.diff(block.users_N, prepend=block.users_N[0] - 1))
        path = self._work / f"run-{len(self._runs)}"
        with path.open("wb") as file:
            for name, dtype in _COLUMNS:
                file.write(np.ascontiguousarray(getattr(block, name), dtype).data)
        self._runs.append(
            _Run(
                path=path,
                users_U=block.users_N[begins_U],
                offsets_U1=np.append(begins_U, len(block)).astype(np.int64),
            )
        )


def _stable_argsort(values_N: np.ndarray) -> np.ndarray:
    if int(values_N.max()) < 1 << 16:
        values_N = values_N.astype(np.uint16)  # numpy sorts 16 bits by radix, ten times faster
    return np.argsort(values_N, kind="stable")


def _order(block: EventBlock) -> np.ndarray:
    """Rows by user, then time, then position, int64 (N,)."""
    first_user, first_time = int(block.users_N.min()), int(block.times_N.min())
    span = int(block.times_N.max()) - first_time + 1
    if (int(block.users_N.max()) - first_user + 1) * span >= 1 << 63:
        return np.lexsort((block.times_N, block.users_N))
    key_N = (block.users_N - first_user) * span + (block.times_N - first_time)
    return np.argsort(key_N, kind="stable")


class _DistinctIds:
    """Counts distinct ids: a flag each below _DENSE_IDS, a sorted list of the few above."""

    def __init__(self) -> None:
        self._seen = np.zeros(1 << 16, bool)
        self._large = np.zeros(0, np.int64)
        self.highest = -1

    @property
    def count(self) -> int:
        return int(np.count_nonzero(self._seen)) + len(self._large)

    def add(self, ids_N: np.ndarray) -> None:
        highest = int(ids_N.max())
        self.highest = max(self.highest, highest)
        if highest >= _DENSE_IDS:
            is_large_N = ids_N >= _DENSE_IDS
            self._large = np.union1d(self._large, ids_N[is_large_N])
            ids_N = ids_N[~is_large_N]
            highest = int(ids_N.max(initial=0))
        if highest >= len(self._seen):
            size = min(_DENSE_IDS, max(highest + 1, 2 * len(self._seen)))
            self._seen = np.concatenate([self._seen, np.zeros(size - len(self._seen), bool)])
        self._seen[ids_N] = True
