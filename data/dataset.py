"""What a loader needs from a data set, and the data set over memory-mapped MovieLens events."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Protocol

import numpy as np

from data.batch import PackedSamples, SequenceBatch, collate
from data.columns import ColumnFile
from data.manifest import Manifest, preprocess_command
from data.splits import SampleTable, SplitRule, train_table


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
    ) -> None:
        self.store, self.samples, self.facts = store, samples, facts
        self.first_sample_id, self.fingerprint = first_sample_id, fingerprint
        self.rule = rule
        """Of a training fold whose window borders change with the epoch, else None."""

    def at_epoch(self, seed: int, epoch: int) -> EventDataset:
        if self.rule is None:
            return self
        rule = dataclasses.replace(self.rule, epoch_key=(seed, epoch))
        moved = copy.copy(self)
        moved.samples = train_table(rule, offsets_U1=self.store.offsets_U1)
        return moved

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices_S: np.ndarray, *, batch_size: int) -> SequenceBatch:
        store, samples = self.store, self.samples
        if self.rule is not None:  # random borders leave some windows without an event
            has_event_S = samples.candidates_end_S > samples.candidates_begin_S
            indices_S = indices_S[has_event_S[indices_S]]
        begin_S, end_S = samples.history_begin_S[indices_S], samples.candidates_end_S[indices_S]
        candidates_begin_S = samples.candidates_begin_S[indices_S]
        users_S = samples.user_rows_S[indices_S]
        events_E = ranges(begin_S, end_S - begin_S)
        labels_E = store.labels_N[events_E].astype(np.int64)
        packed = PackedSamples(
            history_lengths_S=candidates_begin_S - begin_S,
            num_candidates_S=end_S - candidates_begin_S,
            items_E=store.items_N[events_E].astype(np.int64, copy=False),
            labels_E=labels_E,
            actions_E=labels_E,
            timestamps_E=store.timestamps_N[events_E],
            contextual_FS=store.contextual_FU[:, users_S],
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


def ranges(begin_S: np.ndarray, lengths_S: np.ndarray) -> np.ndarray:
    """Positions [begin, begin + length) of every sample, one after the other, int64 (E,)."""
    ends_S = np.cumsum(lengths_S)
    shift_S = begin_S - (ends_S - lengths_S)
    total = int(ends_S[-1]) if len(ends_S) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(shift_S, lengths_S)
