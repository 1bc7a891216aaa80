"""What a loader needs from a data set, and the data set over memory-mapped events."""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Protocol

import numpy as np

from data.batch import PackedSamples, SequenceBatch, collate
from data.columns import ColumnFile
from data.manifest import Manifest, preprocess_command
from data.splits import SampleTable, SplitRule, train_table
from data.ties import shuffle_ties

_EVENTS_READ_AT_ONCE = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureFacts:
    """What a model must know about the features of a data set."""

    item_feature_name: str
    action_feature_name: str | None
    contextual_feature_names: tuple[str, ...]
    vocab_sizes: dict[str, int]
    """Rows a table needs for every id of a feature: its highest id + 1."""
    num_classes: int
    """Classes of a label, or bits of a label mask."""
    label_kind: str
    """"classes" or "bitmask"."""

    def num_tokens(self, history_S: np.ndarray, candidates_S: np.ndarray) -> np.ndarray:
        """Tokens of samples with so many history events and candidates."""
        tokens_per_event = 1 if self.action_feature_name is None else 2
        return len(self.contextual_feature_names) + tokens_per_event * history_S + candidates_S


class SequenceDataset(Protocol):
    """A finite, indexable set of samples that are fetched a batch at a time."""

    fingerprint: str
    """Changes whenever the samples or their order do."""

    def __len__(self) -> int: ...

    def at_epoch(self, seed: int, epoch: int) -> SequenceDataset:
        """The data set as an epoch sees it: as many samples, perhaps with other borders."""
        ...

    def batch(self, indices_S: np.ndarray, *, batch_size: int) -> SequenceBatch:
        """The samples `indices_S` (int64, at most `batch_size`), filled up with padding users."""
        ...

    def num_tokens(self, indices_S: np.ndarray) -> np.ndarray:
        """Tokens of the samples `indices_S`, int64 (S,); their events are not fetched."""
        ...

    def catalogue(self) -> np.ndarray:
        """Bool, one entry for each id of the item vocabulary: True where the item occurs in any
        fold of the data set."""
        ...

    def seen_items(self, sample_ids_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What users had before: (item ids packed sample after sample, lengths_S), int64.

        All events of a sample's user before its first candidate, also those that its history is
        too short to hold; without candidates, before the end of its history. An item that came
        several times is there as often. Sample id -1 (a padding user) has none.

        Raises:
            ValueError: an id of another fold.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Datasets:
    """The three folds; sample ids are unique over all of them."""

    train: SequenceDataset
    validation: SequenceDataset
    test: SequenceDataset
    facts: FeatureFacts


class EventStore:
    """The columns of a preprocessed data set; event columns stay on disk, mapped into memory.

    Raises:
        ValueError: a file is damaged: unreadable, or with values that its manifest rules out.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        way_out = f"run {preprocess_command(folder, manifest.dataset_name)} again"
        events = ColumnFile(
            folder / manifest.files["events"].name,
            ("item_id", "label", "timestamp"),
            num_rows=manifest.num_events,
            way_out=way_out,
        )
        events.check_range("item_id", manifest.max_ids[manifest.item_feature_name])
        events.check_range("label", manifest.max_ids[manifest.action_feature_name])
        self.items_N, self.labels_N = events["item_id"], events["label"]
        self.timestamps_N = events["timestamp"]
        names = manifest.contextual_feature_names
        users = ColumnFile(
            folder / manifest.files["users"].name,
            ("user_id", "event_offset", *names),
            num_rows=manifest.num_users,
            way_out=way_out,
        )
        for name in names:
            users.check_range(name, manifest.max_ids[name])
        self.user_ids_U = users["user_id"]
        self.contextual_FU = np.stack([users[name] for name in names])
        self.offsets_U1 = np.append(users["event_offset"], manifest.num_events)
        falls_U = self.offsets_U1[1:] < self.offsets_U1[:-1]
        if self.offsets_U1[0] != 0 or falls_U.any():
            value = self.offsets_U1[int(falls_U.argmax())]
            rule = f"must rise from 0 to {manifest.num_events}"
            raise users.damaged("event_offset", rule, value)

    @functools.cached_property
    def item_occurs(self) -> np.ndarray:
        """Bool (highest item id + 1,): items with an event. Read once, a part at a time."""
        occurs = np.zeros(self.manifest.vocab_sizes[self.manifest.item_feature_name], bool)
        for begin in range(0, len(self.items_N), _EVENTS_READ_AT_ONCE):
            occurs[self.items_N[begin : begin + _EVENTS_READ_AT_ONCE]] = True
        return occurs

    def __reduce__(self) -> tuple[type[EventStore], tuple[Path, Manifest]]:
        return EventStore, (self.folder, self.manifest)  # a spawned worker maps the files anew


class EventDataset:
    """One fold of a preprocessed data set."""

    def __init__(
        self,
        store: EventStore,
        samples: SampleTable,
        *,
        facts: FeatureFacts,
        first_sample_id: int,
        fingerprint: str,
        rule: SplitRule | None = None,
        has_shuffled_ties: bool = False,
    ) -> None:
        self.store, self.samples, self.facts = store, samples, facts
        self.first_sample_id, self.fingerprint = first_sample_id, fingerprint
        self.rule = rule
        """Of a training fold whose window borders change with the epoch, else None."""
        self._ties_key = (0, 0) if has_shuffled_ties else None
        names = store.manifest.contextual_feature_names
        rows = [names.index(name) for name in facts.contextual_feature_names]
        self._contextual_rows = np.array(rows, np.int64)

    def at_epoch(self, seed: int, epoch: int) -> EventDataset:
        moved = copy.copy(self)
        if self._ties_key is not None:
            moved._ties_key = (seed, epoch)
        if self.rule is not None:
            rule = dataclasses.replace(self.rule, epoch_key=(seed, epoch))
            moved.samples = train_table(rule, offsets_U1=self.store.offsets_U1)
        return moved

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices_S: np.ndarray, *, batch_size: int) -> SequenceBatch:
        store, samples = self.store, self.samples.take(indices_S)
        if self.rule is not None:  # random borders leave some windows without an event
            used_S = ~self.rule.is_empty(samples)
            indices_S, samples = indices_S[used_S], samples.take(used_S)
        begin_S, end_S = samples.history_begin_S, samples.candidates_end_S
        users_S = samples.user_rows_S
        events_E = self._events(samples)
        labels_E = store.labels_N[events_E].astype(np.int64)
        packed = PackedSamples(
            history_lengths_S=samples.candidates_begin_S - begin_S,
            num_candidates_S=end_S - samples.candidates_begin_S,
            items_E=store.items_N[events_E].astype(np.int64, copy=False),
            labels_E=labels_E,
            actions_E=labels_E,
            timestamps_E=store.timestamps_N[events_E],
            contextual_FS=store.contextual_FU[np.ix_(self._contextual_rows, users_S)],
            sample_ids_S=indices_S + self.first_sample_id,
            user_ids_S=store.user_ids_U[users_S],
        )
        return collate(
            packed,
            batch_size=batch_size,
            item_feature_name=self.facts.item_feature_name,
            action_feature_name=self.facts.action_feature_name,
            contextual_feature_names=self.facts.contextual_feature_names,
        )

    def num_tokens(self, indices_S: np.ndarray) -> np.ndarray:
        samples = self.samples.take(indices_S)
        return self.facts.num_tokens(
            samples.candidates_begin_S - samples.history_begin_S,
            samples.candidates_end_S - samples.candidates_begin_S,
        )

    def _events(self, samples: SampleTable) -> np.ndarray:
        """Positions of the samples' events, histories before candidates."""
        begin_S, end_S = samples.history_begin_S, samples.candidates_end_S
        events_E = ranges(begin_S, end_S - begin_S)
        if self._ties_key is None:
            return events_E
        lengths = [samples.candidates_begin_S - begin_S, end_S - samples.candidates_begin_S]
        return shuffle_ties(
            events_E,
            self.store.timestamps_N[events_E],
            np.stack(lengths, axis=1).ravel(),
            epoch_key=self._ties_key,
        )

    def catalogue(self) -> np.ndarray:
        return self.store.item_occurs

    def seen_items(self, sample_ids_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        is_real_S = sample_ids_S != -1
        samples = self.samples.take(sample_indices(self, sample_ids_S[is_real_S]))
        begin_S = self.store.offsets_U1[samples.user_rows_S]
        lengths_S = np.zeros(len(sample_ids_S), np.int64)
        lengths_S[is_real_S] = samples.candidates_begin_S - begin_S
        events_E = ranges(begin_S, lengths_S[is_real_S])
        return self.store.items_N[events_E].astype(np.int64), lengths_S


class _Fold(Protocol):
    first_sample_id: int

    def __len__(self) -> int: ...


def sample_indices(fold: _Fold, sample_ids_S: np.ndarray) -> np.ndarray:
    """Where the samples with these ids stand in their fold.

    Raises:
        ValueError: an id of another fold.
    """
    indices_S = sample_ids_S - fold.first_sample_id
    wrong_S = (indices_S < 0) | (indices_S >= len(fold))
    if wrong_S.any():
        first, end = fold.first_sample_id, fold.first_sample_id + len(fold)
        raise ValueError(
            f"sample ids of this fold lie in [{first}, {end}), got {sample_ids_S[wrong_S.argmax()]}"
        )
    return indices_S


def ranges(begin_S: np.ndarray, lengths_S: np.ndarray) -> np.ndarray:
    """Positions [begin, begin + length) of every sample, one after the other, int64 (E,)."""
    ends_S = np.cumsum(lengths_S)
    shift_S = begin_S - (ends_S - lengths_S)
    total = int(ends_S[-1]) if len(ends_S) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(shift_S, lengths_S)
