"""The one thing a model is fed: `SequenceBatch`, and its vectorised construction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

_PER_USER = ("num_candidates_B", "sample_ids_B", "user_ids_B")
_PER_EVENT = ("labels_E", "timestamps_E")


def negatives_feature(item_feature_name: str) -> str:
    """Key of the feature that holds a step's random negatives beside the items' own one."""
    return f"{item_feature_name}_negatives"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SequenceBatch(Pipelineable):
    """A fixed number of users with their events, packed without padding tokens.

    B users always equals the nominal batch size: a short batch is filled with padding users, who
    have no events, no contextual ids and no candidates, and carry sample id -1. E counts item
    events, user after user, each user's history before its candidates. All tensors are int64.

    Raises:
        ValueError: a field whose leading dimension, dtype or candidate counts contradict the rest.
    """

    features: KeyedJaggedTensor
    """Stride B; keys in order: the item feature, the action feature if any, contextual features,
    then `negatives_feature(item feature)` where there are random negatives. Lengths: history +
    candidates; history only; 1 each (all 0 for padding users); num_negatives for the first user,
    padding or not, and 0 for all others."""
    labels_E: torch.Tensor
    """Class id or bit mask of every item event; a history event's action input says the same."""
    num_candidates_B: torch.Tensor
    """How many of a user's last item events are candidates."""
    timestamps_E: torch.Tensor
    """Seconds since 1970 of every item event."""
    sample_ids_B: torch.Tensor
    """Unique over the three splits of a data set; -1 marks a padding user."""
    user_ids_B: torch.Tensor
    """Raw user id, -1 for padding users."""
    num_samples: int
    """Real users (host side)."""
    num_tokens: int
    """Contextual + item + action tokens of the whole batch (host side)."""
    max_length: int
    """Tokens of the longest user, of the whole step where this is a part of one (host side)."""
    host_lengths_KB: np.ndarray
    """The lengths of `features` on the host, whatever device the batch is on: int64, one row for
    each key."""
    host_candidates_B: np.ndarray
    """num_candidates_B on the host."""
    num_negatives: int = 0
    """Ids of the negatives feature, which is a key only where this is > 0 (host side)."""

    def __post_init__(self) -> None:
        batch_size = self.features.stride()
        num_keys = len(self.features.keys())
        _expect_rows("features.lengths", self.features.lengths(), num_keys * batch_size)
        num_values = self.num_tokens + self.num_negatives
        _expect_rows("features.values", self.features.values(), num_values)
        num_events = self.features.length_per_key()[0]
        for name in _PER_USER:
            _expect_rows(name, getattr(self, name), batch_size)
        for name in _PER_EVENT:
            _expect_rows(name, getattr(self, name), num_events)
        if not 0 <= self.num_samples <= batch_size:
            raise ValueError(
                f"SequenceBatch.num_samples must lie in 0..{batch_size} (the batch size), "
                f"got {self.num_samples}"
            )
        self._check_host_lengths()
        if self.num_candidates_B.device.type == "cpu":  # reading values elsewhere would wait
            self._check_candidates()

    def _check_host_lengths(self) -> None:
        keys, host_KB = self.features.keys(), self.host_lengths_KB
        shape = (len(keys), self.batch_size)
        if host_KB.dtype != np.int64 or host_KB.shape != shape:
            raise ValueError(
                f"SequenceBatch.host_lengths_KB must be int64 of shape {shape}, "
                f"got {host_KB.dtype} of shape {host_KB.shape}"
            )
        lengths, per_key = self.features.lengths(), host_KB.sum(axis=1).tolist()
        on_host = lengths.device.type == "cpu"
        if per_key != self.features.length_per_key() or (
            on_host and not np.array_equal(lengths.numpy(), host_KB.ravel())
        ):
            raise ValueError(
                f"SequenceBatch.host_lengths_KB must be the lengths of features, with "
                f"{self.features.length_per_key()} ids of its keys, got others, with {per_key}"
            )
        extra = keys[-1] == negatives_feature(keys[0])
        if self.num_negatives != (host_KB[-1, 0] if extra else 0):
            raise ValueError(
                f"SequenceBatch.num_negatives must be the ids of {negatives_feature(keys[0])!r}, "
                f"the last key, all of the first user, or 0 without it; got {self.num_negatives} "
                f"with keys {keys}"
            )
        # What the model trusts to refuse sequences that are too long, on any device.
        tokens_B = host_KB[:-1].sum(axis=0) if extra else host_KB.sum(axis=0)
        if self.max_length < tokens_B.max(initial=0):
            raise ValueError(
                f"SequenceBatch.max_length must be at least the {tokens_B.max()} tokens of the "
                f"longest user, got {self.max_length}"
            )

    def _check_candidates(self) -> None:
        candidates_B, lengths_B = self.num_candidates_B.numpy(), self.host_lengths_KB[0]
        wrong_B = (candidates_B < 0) | (candidates_B > lengths_B)
        if wrong_B.any():
            row = int(wrong_B.argmax())
            raise ValueError(
                f"SequenceBatch.num_candidates_B must lie in 0..events of its user, got "
                f"{candidates_B[row]} candidates for {lengths_B[row]} events of "
                f"{self.features.keys()[0]!r} in row {row}"
            )
        if not np.array_equal(candidates_B, self.host_candidates_B):
            raise ValueError(
                f"SequenceBatch.host_candidates_B must equal num_candidates_B, "
                f"got {self.host_candidates_B.tolist()} and {candidates_B.tolist()}"
            )

    @property
    def batch_size(self) -> int:
        """Users in the batch, padding users included."""
        return self.features.stride()

    @property
    def is_real(self) -> torch.Tensor:
        """Bool (B,), False for padding users."""
        return self.sample_ids_B >= 0

    def split(self, num_parts: int) -> list[BatchPart]:
        """The batch in parts of equally many users, in order; no wait for a device.

        The parts leave the negatives feature out: those rows are shared by all of them. One part
        is this batch itself.

        Raises:
            ValueError: num_parts is < 1 or does not divide the batch size.
        """
        if num_parts < 1 or self.batch_size % num_parts:
            raise ValueError(
                f"num_parts must divide the batch size {self.batch_size}, got {num_parts}"
            )
        num_keys = len(self.features.keys()) - (self.num_negatives > 0)
        bounds_KP1 = self._part_bounds(num_parts, num_keys)
        parts = []
        for part in range(num_parts):
            rows = {
                key: slice(int(bounds[part]), int(bounds[part + 1]))
                for key, bounds in zip(self.features.keys(), bounds_KP1, strict=False)
            }
            batch = self if num_parts == 1 else self._part(part, num_parts, rows)
            parts.append(BatchPart(batch=batch, rows=rows))
        return parts

    def _part_bounds(self, num_parts: int, num_keys: int) -> np.ndarray:
        """Int64 (K, num_parts + 1): ids of each key before each part, and all of them."""
        bounds_KP1 = np.zeros((num_keys, num_parts + 1), np.int64)
        size = self.batch_size // num_parts
        lengths_KPU = self.host_lengths_KB[:num_keys].reshape(num_keys, num_parts, size)
        np.cumsum(lengths_KPU.sum(axis=2), axis=1, out=bounds_KP1[:, 1:])
        return bounds_KP1

    def _part(self, part: int, num_parts: int, rows: Mapping[str, slice]) -> SequenceBatch:
        size = self.batch_size // num_parts
        users = slice(part * size, (part + 1) * size)
        host_lengths_KB = self.host_lengths_KB[: len(rows), users]
        values = self.features.values()
        starts = self.features.offset_per_key()
        lengths_KB = self.features.lengths().view(-1, self.batch_size)[: len(rows), users]
        events = rows[self.features.keys()[0]]
        fields: dict[str, Any] = {name: getattr(self, name)[users] for name in _PER_USER}
        fields |= {name: getattr(self, name)[events] for name in _PER_EVENT}
        return SequenceBatch(
            features=_keyed_jagged(
                list(rows),
                torch.cat(
                    [
                        values[start + row.start : start + row.stop]
                        for start, row in zip(starts, rows.values(), strict=False)
                    ]
                ),
                lengths_KB.reshape(-1),
                host_lengths_KB,
            ),
            num_samples=min(max(self.num_samples - users.start, 0), size),
            num_tokens=int(host_lengths_KB.sum()),
            max_length=self.max_length,
            host_lengths_KB=host_lengths_KB,
            host_candidates_B=self.host_candidates_B[users],
            **fields,
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> SequenceBatch:
        """The same batch on `device`."""
        return self._map(
            lambda t: t.to(device=device, non_blocking=non_blocking),
            self.features.to(device=device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> SequenceBatch:
        """The same batch in page-locked host memory."""
        return self._map(lambda t: t.pin_memory(), self.features.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory of every tensor until the work queued on `stream` is done."""
        self.features.record_stream(stream)
        for name in _PER_USER + _PER_EVENT:
            getattr(self, name).record_stream(stream)

    def _map(
        self, function: Callable[[torch.Tensor], torch.Tensor], features: KeyedJaggedTensor
    ) -> SequenceBatch:
        moved: dict[str, Any] = {n: function(getattr(self, n)) for n in _PER_USER + _PER_EVENT}
        return dataclasses.replace(self, features=features, **moved)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BatchPart:
    """Consecutive users of a batch, as a batch of its own."""

    batch: SequenceBatch
    rows: dict[str, slice]
    """Where the part's ids of a feature stand among the whole batch's ids of that feature."""


def _expect_rows(name: str, tensor: torch.Tensor, num_rows: int) -> None:
    if tensor.dim() != 1 or tensor.shape[0] != num_rows or tensor.dtype != torch.int64:
        raise ValueError(
            f"SequenceBatch.{name} must be int64 of shape ({num_rows},), "
            f"got {str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedSamples:
    """Real samples in numpy, before they become a batch: S users, E events, all int64.

    Events lie user after user, history before candidates. `contextual_FS` holds one row for each
    contextual feature.
    """

    history_lengths_S: np.ndarray
    num_candidates_S: np.ndarray
    items_E: np.ndarray
    labels_E: np.ndarray
    actions_E: np.ndarray
    timestamps_E: np.ndarray
    contextual_FS: np.ndarray
    sample_ids_S: np.ndarray
    user_ids_S: np.ndarray

    def newest(self, max_history: int) -> PackedSamples:
        """The same samples with at most so many history events each, the newest ones."""
        num_dropped_S = np.maximum(self.history_lengths_S - max_history, 0)
        kept_S = self.history_lengths_S + self.num_candidates_S - num_dropped_S
        parts = np.stack([num_dropped_S, kept_S], axis=1).ravel()
        kept_E = np.repeat(np.tile([False, True], len(kept_S)), parts)
        events = ("items_E", "labels_E", "actions_E", "timestamps_E")
        return dataclasses.replace(
            self,
            history_lengths_S=self.history_lengths_S - num_dropped_S,
            **{name: getattr(self, name)[kept_E] for name in events},
        )


def is_history(samples: PackedSamples) -> np.ndarray:
    """Bool (E,): True where an event precedes its user's candidates."""
    parts = np.stack([samples.history_lengths_S, samples.num_candidates_S], axis=1).ravel()
    return np.repeat(np.tile([True, False], len(samples.history_lengths_S)), parts)


def collate(
    samples: PackedSamples,
    *,
    batch_size: int,
    item_feature_name: str,
    action_feature_name: str | None,
    contextual_feature_names: Sequence[str],
) -> SequenceBatch:
    """The batch of `samples`, filled up with padding users to `batch_size`.

    Raises:
        ValueError: more samples than `batch_size`, or fields that contradict each other.
    """
    num_samples = len(samples.sample_ids_S)
    if num_samples > batch_size:
        raise ValueError(f"batch_size must be >= the {num_samples} samples given, got {batch_size}")
    item_lengths_S = samples.history_lengths_S + samples.num_candidates_S
    keys, values, lengths = [item_feature_name], [samples.items_E], [item_lengths_S]
    if action_feature_name is not None:
        keys.append(action_feature_name)
        values.append(samples.actions_E[is_history(samples)])
        lengths.append(samples.history_lengths_S)
    keys.extend(contextual_feature_names)
    values.extend(samples.contextual_FS)
    lengths.extend([np.ones(num_samples, np.int64)] * len(contextual_feature_names))
    lengths_KB = np.zeros((len(keys), batch_size), np.int64)
    lengths_KB[:, :num_samples] = lengths
    candidates_B = _padded(samples.num_candidates_S, batch_size, 0)
    return SequenceBatch(
        features=_keyed_jagged(
            keys,
            torch.from_numpy(np.concatenate(values)),
            torch.from_numpy(lengths_KB.reshape(-1)),
            lengths_KB,
        ),
        labels_E=torch.from_numpy(samples.labels_E),
        num_candidates_B=candidates_B,
        timestamps_E=torch.from_numpy(samples.timestamps_E),
        sample_ids_B=_padded(samples.sample_ids_S, batch_size, -1),
        user_ids_B=_padded(samples.user_ids_S, batch_size, -1),
        num_samples=num_samples,
        num_tokens=int(lengths_KB.sum()),
        max_length=int(lengths_KB.sum(axis=0).max(initial=0)),
        host_lengths_KB=lengths_KB,
        host_candidates_B=candidates_B.numpy().copy(),  # a worker moves the tensor
    )


def with_negatives(batch: SequenceBatch, negatives_M: np.ndarray) -> SequenceBatch:
    """`batch` with the ids `negatives_M` (int64, at least one) as its negatives feature.

    Raises:
        ValueError: no ids, or a feature of that name is there already.
    """
    keys = batch.features.keys()
    name = negatives_feature(keys[0])
    if name in keys or not len(negatives_M):
        raise ValueError(
            f"random negatives need at least one id and no other feature called {name!r}, got "
            f"{len(negatives_M)} ids beside features {keys}; rename that feature"
        )
    row_B = np.zeros((1, batch.batch_size), np.int64)
    row_B[0, 0] = len(negatives_M)
    lengths_KB = np.concatenate([batch.host_lengths_KB, row_B])
    return dataclasses.replace(
        batch,
        features=_keyed_jagged(
            [*keys, name],
            torch.cat([batch.features.values(), torch.from_numpy(negatives_M)]),
            torch.from_numpy(lengths_KB.reshape(-1)),
            lengths_KB,
        ),
        host_lengths_KB=lengths_KB,
        num_negatives=len(negatives_M),
    )


def _padded(values_S: np.ndarray, batch_size: int, fill: int) -> torch.Tensor:
    padded = np.full(batch_size, fill, np.int64)
    padded[: len(values_S)] = values_S
    return torch.from_numpy(padded)


def _keyed_jagged(
    keys: list[str], values: torch.Tensor, lengths: torch.Tensor, host_lengths_KB: np.ndarray
) -> KeyedJaggedTensor:
    # Everything torchrec would derive later, with a wait on a GPU, is known here for free.
    per_key = host_lengths_KB.sum(axis=1)
    return KeyedJaggedTensor(
        keys=keys,
        values=values,
        lengths=lengths,
        offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        stride=host_lengths_KB.shape[1],
        length_per_key=per_key.tolist(),
        offset_per_key=[0, *np.cumsum(per_key).tolist()],
    )
