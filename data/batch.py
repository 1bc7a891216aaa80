"""The one thing a model is fed: `SequenceBatch`, and its vectorised construction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

_PER_USER = ("num_candidates_B", "sample_ids_B", "user_ids_B")
_PER_EVENT = ("labels_E", "timestamps_E")


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
    """Stride B; keys in order: the item feature, the action feature if any, contextual features.
    Lengths: history + candidates; history only; 1 each (all 0 for padding users)."""
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
    """Tokens of the longest user (host side)."""

    def __post_init__(self) -> None:
        batch_size = self.features.stride()
        num_keys = len(self.features.keys())
        _expect_rows("features.lengths", self.features.lengths(), num_keys * batch_size)
        _expect_rows("features.values", self.features.values(), self.num_tokens)
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
        if self.num_candidates_B.device.type == "cpu":  # reading values elsewhere would wait
            self._check_candidates(batch_size)

    def _check_candidates(self, batch_size: int) -> None:
        candidates_B = self.num_candidates_B.numpy()
        lengths_B = self.features.lengths()[:batch_size].numpy()
        wrong_B = (candidates_B < 0) | (candidates_B > lengths_B)
        if wrong_B.any():
            row = int(wrong_B.argmax())
            raise ValueError(
                f"SequenceBatch.num_candidates_B must lie in 0..events of its user, got "
                f"{candidates_B[row]} candidates for {lengths_B[row]} events of "
                f"{self.features.keys()[0]!r} in row {row}"
            )

    @property
    def batch_size(self) -> int:
        """Users in the batch, padding users included."""
        return self.features.stride()

    @property
    def is_real(self) -> torch.Tensor:
        """Bool (B,), False for padding users."""
        return self.sample_ids_B >= 0

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
    tokens_S = item_lengths_S + len(contextual_feature_names)
    if action_feature_name is not None:
        keys.append(action_feature_name)
        values.append(samples.actions_E[_is_history(samples)])
        lengths.append(samples.history_lengths_S)
        tokens_S = tokens_S + samples.history_lengths_S
    keys.extend(contextual_feature_names)
    values.extend(samples.contextual_FS)
    lengths.extend([np.ones(num_samples, np.int64)] * len(contextual_feature_names))
    return SequenceBatch(
        features=_keyed_jagged(keys, values, lengths, batch_size),
        labels_E=torch.from_numpy(samples.labels_E),
        num_candidates_B=_padded(samples.num_candidates_S, batch_size, 0),
        timestamps_E=torch.from_numpy(samples.timestamps_E),
        sample_ids_B=_padded(samples.sample_ids_S, batch_size, -1),
        user_ids_B=_padded(samples.user_ids_S, batch_size, -1),
        num_samples=num_samples,
        num_tokens=sum(len(value) for value in values),
        max_length=int(tokens_S.max(initial=0)),
    )


def _is_history(samples: PackedSamples) -> np.ndarray:
    """Bool (E,): True where an event precedes its user's candidates."""
    parts = np.stack([samples.history_lengths_S, samples.num_candidates_S], axis=1).ravel()
    return np.repeat(np.tile([True, False], len(samples.history_lengths_S)), parts)


def _padded(values_S: np.ndarray, batch_size: int, fill: int) -> torch.Tensor:
    padded = np.full(batch_size, fill, np.int64)
    padded[: len(values_S)] = values_S
    return torch.from_numpy(padded)


def _keyed_jagged(
    keys: list[str], values: list[np.ndarray], lengths: list[np.ndarray], batch_size: int
) -> KeyedJaggedTensor:
    lengths_KB = np.zeros((len(keys), batch_size), np.int64)
    for row, length in zip(lengths_KB, lengths, strict=True):
        row[: len(length)] = length
    offsets = np.zeros(lengths_KB.size + 1, np.int64)
    np.cumsum(lengths_KB.ravel(), out=offsets[1:])
    # Everything torchrec would derive later, with a wait on a GPU, is known here for free.
    per_key = [len(value) for value in values]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(lengths_KB.ravel()),
        offsets=torch.from_numpy(offsets),
        stride=batch_size,
        length_per_key=per_key,
        offset_per_key=np.concatenate([[0], np.cumsum(per_key)]).tolist(),
    )
