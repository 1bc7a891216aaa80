"""Batches in a reproducible order, the same union of samples for any number of processes."""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from configs.schema import BenchmarkDatasetArgs, DatasetArgs
from data.batch import SequenceBatch
from data.dataset import Datasets, EventDataset, EventStore, FeatureFacts, SequenceDataset
from data.manifest import find_dataset, read_manifest
from data.splits import FOLDS, SplitRule, make_splits
from data.synthetic import build_synthetic


class SequenceLoader:
    """Yields one rank's share of every global batch.

    With B users a rank and W ranks, global batch i holds samples order[i*W*B : (i+1)*W*B] and rank
    r takes its r-th part of B. Short and empty parts are filled with padding users, so all ranks
    yield `num_batches` batches of exactly B users. The order of an epoch depends on (seed, epoch)
    and the number of samples only; no global random state is read or written.

    Args:
        dataset: where the samples come from.
        batch_size: users a rank and batch (B).
        shuffle: another order each epoch, instead of the data set's own.
        seed: key of the orders, >= 0.
        rank: this process, in 0..world_size - 1.
        world_size: data-parallel processes (W).
        num_workers: processes that collate ahead; 0 collates in this one.
        pin_memory: return batches in page-locked memory.

    Raises:
        ValueError: a size or rank out of range.
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
        self._epoch, self._next_batch = 0, 0

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

    def __getitem__(self, index: int) -> SequenceBatch:
        begin = (index * self.world_size + self.rank) * self.batch_size
        indices_S = self.order[begin : begin + self.batch_size]
        return self.dataset.batch(indices_S, batch_size=self.batch_size)


def _unchanged(batch: SequenceBatch) -> SequenceBatch:
    return batch


def build_datasets(
    args: DatasetArgs | BenchmarkDatasetArgs,
    *,
    task: str = "ranking",
    seed: int = 1234,
    global_batch_size: int = 1,
    num_tasks: int = 1,
    num_classes: int = 2,
) -> Datasets:
    """The train, validation and test folds that `args` describes.

    Args:
        args: a preprocessed data set, or a synthetic one.
        task: "ranking" or "retrieval"; decides the split where `args` leaves it open.
        seed: of a synthetic data set.
        global_batch_size: users a batch over all ranks; sizes a synthetic data set.
        num_tasks: of a synthetic data set; more than one makes its labels bit masks.
        num_classes: of a synthetic data set with one task.

    Raises:
        ValueError: missing or damaged data, or a split that leaves no samples.
    """
    if isinstance(args, BenchmarkDatasetArgs):
        return build_synthetic(
            args,
            seed=seed,
            global_batch_size=global_batch_size,
            num_tasks=num_tasks,
            num_classes=num_classes,
        )
    folder = find_dataset(args.dataset_name, args.dataset_path)
    manifest = read_manifest(folder, dataset_name=args.dataset_name)
    rule = split_rule(args, task=task)
    store = EventStore(folder, manifest)
    facts = FeatureFacts(
        item_feature_name=manifest.item_feature_name,
        action_feature_name=manifest.action_feature_name,
        contextual_feature_names=manifest.contextual_feature_names,
        vocab_sizes=dict(manifest.vocab_sizes),
        num_classes=manifest.num_classes,
        label_kind=manifest.label_kind,
    )
    folds: dict[str, EventDataset] = {}
    first_sample_id = 0
    tables = make_splits(rule, offsets_U1=store.offsets_U1)
    for fold in FOLDS:
        described = f"{manifest.files['events'].sha256} {fold} {dataclasses.asdict(rule)}"
        folds[fold] = EventDataset(
            store,
            tables[fold],
            facts=facts,
            first_sample_id=first_sample_id,
            fingerprint=hashlib.sha256(described.encode()).hexdigest()[:16],
            rule=rule if fold == "train" and rule.train_windows == "random" else None,
        )
        first_sample_id += len(tables[fold])
    return Datasets(**folds, facts=facts)


def split_rule(args: DatasetArgs, *, task: str) -> SplitRule:
    """The split `args` asks for; None means temporal with candidates, else the task's own."""
    split = args.split
    if split is None and args.max_num_candidates > 0:
        split = "temporal"
    if split is None:
        split = "leave_one_out" if task == "retrieval" else "by_user"
    return SplitRule(
        split=split,
        max_history_seqlen=args.max_history_seqlen,
        max_num_candidates=args.max_num_candidates,
        train_windows=args.train_windows,
        train_on_validation=args.train_on_validation,
    )
