"""What a loader needs from a data set, and the data set over memory-mapped MovieLens events."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from data.batch import PackedSamples, SequenceBatch, collate
from data.manifest import Manifest
from data.splits import SampleTable


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
    """The columns of a preprocessed data set; event columns stay on disk, mapped into memory."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        events = _columns(folder / manifest.files["events"].name)
        self.items_N, self.labels_N = events["item_id"], events["label"]
        self.timestamps_N = events["timestamp"]
        users = _columns(folder / manifest.files["users"].name)
        self.user_ids_U = users["user_id"]
        self.offsets_U1 = np.append(users["event_offset"], len(self.items_N))
        names = manifest.contextual_feature_names
        self.contextual_FU = np.stack([users[name] for name in names])

    def __reduce__(self) -> tuple[type[EventStore], tuple[Path, Manifest]]:
        return EventStore, (self.folder, self.manifest)  # a spawned worker maps the files anew


def _columns(path: Path) -> dict[str, np.ndarray]:
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    columns = {}
    for name in table.column_names:
        chunks = table.column(name)
        # Preprocessing writes one chunk; only then is the array the file itself.
        array = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
        columns[name] = array.to_numpy(zero_copy_only=chunks.num_chunks == 1)
    return columns


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
    ) -> None:
        self.store, self.samples, self.facts = store, samples, facts
        self.first_sample_id, self.fingerprint = first_sample_id, fingerprint

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices_S: np.ndarray, *, batch_size: int) -> SequenceBatch:
        store, samples = self.store, self.samples
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
