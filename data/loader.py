"""Batches in a reproducible order, the same union of samples for any number of processes."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from data.balance import attention_work, deal
from data.batch import SequenceBatch, with_negatives
from data.build import build_datasets
from data.dataset import Datasets, SequenceDataset
from data.negatives import NegativeDraws

__all__ = ["Datasets", "SequenceLoader", "build_datasets"]


class SequenceLoader:
    """Yields one rank's share of every global batch.

    With B users a rank and W ranks, global batch i holds samples order[i*W*B : (i+1)*W*B] and rank
    r takes its r-th part of B, or with is_balanced the part that `data.balance` deals it. Short and
    empty parts are filled with padding users, so all ranks yield `num_batches` batches of exactly B
    users. The order of an epoch depends on (seed, epoch) and the number of samples only; no global
    random state is read or written.

    Args:
        dataset: where the samples come from.
        batch_size: users a rank and batch (B).
        shuffle: another order each epoch, instead of the data set's own.
        seed: key of the orders, >= 0.
        rank: this process, in 0..world_size - 1.
        world_size: data-parallel processes (W).
        num_workers: processes that collate ahead; 0 collates in this one.
        pin_memory: return batches in page-locked memory.
        num_negatives: give each batch so many different ids of the data set's catalogue as its
            negatives feature. They depend on (seed, epoch, batch number) and the catalogue only:
            all ranks get the same ones. None gives none.
        is_balanced: deal the users of a global batch out by the work that they are. Every rank
            computes that from lengths it has: nothing is exchanged, and it is done with the
            collation, ahead of the step.

    Raises:
        ValueError: a size or rank out of range, more negatives than items.
    """

    def __init__(
        self,
        dataset: SequenceDataset,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        num_negatives: int | None = None,
        is_balanced: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in 0..world_size - 1 = {world_size - 1}, got {rank}")
        if seed < 0:
            raise ValueError(f"TrainerArgs.seed must be >= 0, got {seed}")
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.rank, self.world_size = rank, world_size
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.is_balanced = is_balanced
        self._epoch, self._next_batch = 0, 0
        self.negatives = None
        if num_negatives is not None:
            self.negatives = NegativeDraws(dataset.catalogue(), num_negatives, seed=seed)

    @property
    def num_samples(self) -> int:
        """Samples of the whole split, over all ranks."""
        return len(self.dataset)

    @property
    def global_batch_size(self) -> int:
        """Users in one batch of all ranks together."""
        return self.batch_size * self.world_size

    @property
    def num_batches(self) -> int:
        """Batches an epoch, the same on every rank."""
        return -(-self.num_samples // self.global_batch_size)

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, next batch): what `epoch` should be called with to go on."""
        return self._epoch, self._next_batch

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[SequenceBatch]:
        """The batches of `epoch` from number `first_batch` on.

        Raises:
            ValueError: `first_batch` is not in 0..num_batches.
        """
        if not 0 <= first_batch <= self.num_batches:
            raise ValueError(f"first_batch must lie in 0..{self.num_batches}, got {first_batch}")
        self._epoch, self._next_batch = epoch, first_batch
        return self._iterate(epoch, first_batch)

    def _iterate(self, epoch: int, first_batch: int) -> Iterator[SequenceBatch]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            loader: StatefulDataLoader[SequenceBatch] = StatefulDataLoader(
                _RankBatches(self, epoch),
                batch_size=None,
                sampler=range(first_batch, self.num_batches),
                collate_fn=_unchanged,
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                # The base class draws a worker seed: from here, not from the global generator.
                generator=torch.Generator().manual_seed(self.seed),
            )
        for index, batch in enumerate(loader, start=first_batch):
            self._next_batch = index + 1
            yield batch

    def _order(self, epoch: int) -> np.ndarray:
        """Sample indices in the order of `epoch`, int64 (num_samples,)."""
        if not self.shuffle:
            return np.arange(self.num_samples, dtype=np.int64)
        key = np.random.SeedSequence([self.seed, epoch])
        return np.random.Generator(np.random.Philox(key)).permutation(self.num_samples)

    def state_dict(self) -> dict[str, Any]:
        """Where this loader stands after the batches it has handed out, independent of the rank."""
        epoch = self._epoch
        num_samples_done = min(self._next_batch * self.global_batch_size, self.num_samples)
        if num_samples_done == self.num_samples:
            epoch, num_samples_done = epoch + 1, 0
        return {
            "epoch": epoch,
            "num_samples_done": num_samples_done,
            **self._identity(epoch),
        }

    def _identity(self, epoch: int) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_samples": self.num_samples,
            "dataset": self.dataset.fingerprint,
            "order": hashlib.sha256(self._order(epoch).tobytes()).hexdigest()[:16],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets `position` to go on where `state` was taken, also at another world size.

        Raises:
            ValueError: the state belongs to other data, another order or seed, or its position is
                no multiple of the global batch size.
        """
        for field, here in self._identity(int(state["epoch"])).items():
            if state[field] != here:
                raise ValueError(
                    f"cannot resume the data position: {field} was {state[field]!r} in the "
                    f"checkpoint and is {here!r} now; resume with the same data and seed, or load "
                    f"the weights only with TrainerArgs.ckpt_load_dir"
                )
        done = int(state["num_samples_done"])
        if done % self.global_batch_size:
            raise ValueError(
                f"cannot resume the data position: num_samples_done = {done} is no multiple of the "
                f"global batch size {self.global_batch_size} (TrainerArgs.train_batch_size x "
                f"processes); choose a batch size that divides it"
            )
        self._epoch, self._next_batch = int(state["epoch"]), done // self.global_batch_size


class _RankBatches(torch.utils.data.Dataset[SequenceBatch]):
    """One rank's batches of one epoch, by batch number."""

    def __init__(self, loader: SequenceLoader, epoch: int) -> None:
        self.dataset = loader.dataset.at_epoch(loader.seed, epoch)
        self.order, self.batch_size = loader._order(epoch), loader.batch_size
        self.rank, self.world_size = loader.rank, loader.world_size
        self.negatives, self.epoch = loader.negatives, epoch
        self.is_balanced = loader.is_balanced

    def __getitem__(self, index: int) -> SequenceBatch:
        batch = self.dataset.batch(self._share(index), batch_size=self.batch_size)
        if self.negatives is None:
            return batch
        return with_negatives(batch, self.negatives.draw(self.epoch, index))

    def _share(self, index: int) -> np.ndarray:
        """This rank's samples of a global batch."""
        size = self.batch_size * self.world_size
        indices_S = self.order[index * size : (index + 1) * size]
        if not self.is_balanced:
            return indices_S[self.rank * self.batch_size :][: self.batch_size]
        work_S = attention_work(self.dataset.num_tokens(indices_S))
        return indices_S[deal(work_S, self.world_size)[self.rank]]


def _unchanged(batch: SequenceBatch) -> SequenceBatch:
    return batch
