"""Small experiments built in code, and the world of the test process."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from configs.schema import (
    BenchmarkDatasetArgs,
    DatasetArgs,
    EmbeddingArgs,
    ExperimentArgs,
    FeatureArgs,
    NetworkArgs,
    OptimizerArgs,
    RankingArgs,
    RetrievalArgs,
    TrainerArgs,
)
from data.batch import PackedSamples, SequenceBatch, collate
from data.dataset import SequenceDataset
from training.distributed import World

Overrides = Mapping[str, Any] | None


def synthetic_experiment(
    folder: str,
    *,
    trainer: Overrides = None,
    dataset: Overrides = None,
    network: Overrides = None,
    optimizer: Overrides = None,
    ranking: Overrides = None,
) -> ExperimentArgs:
    """A two-layer model on synthetic data: 5 classes, users of up to 12 events, 3 candidates.

    Dropout is off and the order fixed unless overridden, so that runs can be compared.
    """
    return ExperimentArgs(
        **_training(folder, trainer, network, optimizer),
        dataset=_synthetic_data({"max_num_candidates": 3} | dict(dataset or {})),
        ranking=_ranking(ranking),
    )


def retrieval_experiment(
    folder: str,
    *,
    data: Path | None = None,
    trainer: Overrides = None,
    dataset: Overrides = None,
    network: Overrides = None,
    optimizer: Overrides = None,
    retrieval: Overrides = None,
) -> ExperimentArgs:
    """The same model made to retrieve the next of 60 items, one held out for each user.

    Args:
        data: folder of `write_movielens` to use instead of synthetic data, shuffled.
    """
    if data is None:
        chosen: Any = _synthetic_data({"max_num_candidates": 1} | dict(dataset or {}))
    else:
        chosen = _movielens_data(data, {"max_num_candidates": 0} | dict(dataset or {}))
    return ExperimentArgs(
        **_training(folder, trainer, network, optimizer),
        dataset=chosen,
        retrieval=RetrievalArgs(**({"temperature": 0.1} | dict(retrieval or {}))),
    )


def movielens_experiment(
    data: Path,
    folder: str,
    *,
    trainer: Overrides = None,
    dataset: Overrides = None,
    network: Overrides = None,
    optimizer: Overrides = None,
) -> ExperimentArgs:
    """A small ranking model on `write_movielens` data, shuffled, 3 candidates."""
    return ExperimentArgs(
        **_training(folder, trainer, network, optimizer),
        dataset=_movielens_data(data, {"max_num_candidates": 3} | dict(dataset or {})),
        ranking=_ranking(None),
    )


def _training(
    folder: str, trainer: Overrides, network: Overrides, optimizer: Overrides
) -> dict[str, Any]:
    trainer_args = {
        "train_batch_size": 8,
        "eval_batch_size": 8,
        "max_train_iters": 6,
        "eval_interval": 100,
        "log_interval": 1,
        "output_dir": folder,
    }
    network_args = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "kv_channels": 8,
        "hidden_dropout": 0.0,
        "dtype_str": "float32",
    }
    optimizer_args = {"optimizer_str": "adam", "learning_rate": 1e-2}
    return {
        "trainer": TrainerArgs(**(trainer_args | dict(trainer or {}))),
        "network": NetworkArgs(**(network_args | dict(network or {}))),
        "optimizer": OptimizerArgs(**(optimizer_args | dict(optimizer or {}))),
    }


def _ranking(ranking: Overrides) -> RankingArgs:
    return RankingArgs(**({"prediction_head_arch": (16, 5)} | dict(ranking or {})))


def _synthetic_data(dataset: Mapping[str, Any]) -> BenchmarkDatasetArgs:
    tables = [
        ("item", 60, "model_parallel"),
        ("action", 5, "data_parallel"),
        ("user_id", 40, "data_parallel"),
        ("age", 4, "data_parallel"),
    ]
    dataset_args = {
        "feature_args": (
            FeatureArgs(feature_names=("item", "action"), max_sequence_length=12, is_jagged=True),
            FeatureArgs(feature_names=("user_id", "age"), max_sequence_length=1),
        ),
        "embedding_args": tuple(
            EmbeddingArgs(
                feature_names=(name,),
                table_name=name,
                item_vocab_size_or_capacity=rows,
                sharding_type=sharding,
            )
            for name, rows, sharding in tables
        ),
        "item_feature_name": "item",
        "action_feature_name": "action",
        "contextual_feature_names": ("user_id", "age"),
        "num_generated_batches": 4,
    }
    return BenchmarkDatasetArgs(**(dataset_args | dict(dataset)))


def _movielens_data(data: Path, dataset: Mapping[str, Any]) -> DatasetArgs:
    dataset_args = {
        "dataset_name": "ml-100k",
        "dataset_path": str(data),
        "max_history_seqlen": 10,
        "shuffle": True,
    }
    return DatasetArgs(**(dataset_args | dict(dataset)))


def replicated_items(experiment: ExperimentArgs) -> ExperimentArgs:
    """A synthetic experiment whose item table has a copy on every rank, like all its others."""
    dataset = experiment.dataset
    assert isinstance(dataset, BenchmarkDatasetArgs)
    tables = tuple(
        dataclasses.replace(table, sharding_type="data_parallel")
        for table in dataset.embedding_args
    )
    return dataclasses.replace(
        experiment, dataset=dataclasses.replace(dataset, embedding_args=tables)
    )


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Every trainable tensor of this rank by name, dense and table rows, cloned and flat."""
    return {
        name: (
            torch.cat([shard.tensor.reshape(-1) for shard in value.local_shards()])
            if hasattr(value, "local_shards")
            else value
        ).clone()
        for name, value in model.state_dict().items()
    }


def users_of_one_length(length: int = 12) -> dict[str, Any]:
    """Changes of `synthetic_experiment`'s data: every user has so many events."""
    return {
        "feature_args": (
            FeatureArgs(
                feature_names=("item", "action"), max_sequence_length=length, is_jagged=False
            ),
            FeatureArgs(feature_names=("user_id", "age"), max_sequence_length=1),
        )
    }


class FirstSamples:
    """The first samples of a data set, for folds of an exact size."""

    def __init__(self, dataset: SequenceDataset, count: int) -> None:
        assert count <= len(dataset)
        self._dataset, self._count = dataset, count
        self.fingerprint = f"{dataset.fingerprint}-{count}"

    def __len__(self) -> int:
        return self._count

    def at_epoch(self, seed: int, epoch: int) -> FirstSamples:
        return self

    def batch(self, indices_S: np.ndarray, *, batch_size: int) -> SequenceBatch:
        return self._dataset.batch(indices_S, batch_size=batch_size)

    def num_tokens(self, indices_S: np.ndarray) -> np.ndarray:
        return self._dataset.num_tokens(indices_S)

    def catalogue(self) -> np.ndarray:
        return self._dataset.catalogue()

    def seen_items(self, sample_ids_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._dataset.seen_items(sample_ids_S)


def batch_of(
    users: Sequence[tuple[int, int]], *, batch_size: int, first_user: int = 0
) -> SequenceBatch:
    """A batch for `synthetic_experiment`: users by their numbers of history events and candidates.

    User n is the same in every batch, so that a batch can be split and put together again.
    """
    draws = [np.random.default_rng(first_user + n) for n in range(len(users))]
    sizes = [history + candidates for history, candidates in users]
    events = [
        (draw.integers(0, 60, size), draw.integers(0, 5, size), np.arange(size) * 100)
        for draw, size in zip(draws, sizes, strict=True)
    ]
    none = np.zeros(0, np.int64)
    items_E, labels_E, timestamps_E = (
        np.concatenate([none, *column]) for column in zip(*events, strict=True)
    ) if events else (none, none, none)  # fmt: skip
    return collate(
        PackedSamples(
            history_lengths_S=np.array([history for history, _ in users], np.int64),
            num_candidates_S=np.array([candidates for _, candidates in users], np.int64),
            items_E=items_E,
            labels_E=labels_E,
            actions_E=labels_E,
            timestamps_E=timestamps_E,
            contextual_FS=np.array(
                [[draw.integers(0, 40), draw.integers(0, 4)] for draw in draws], np.int64
            )
            .reshape(-1, 2)
            .T,
            sample_ids_S=np.arange(first_user, first_user + len(users)),
            user_ids_S=np.arange(first_user, first_user + len(users)),
        ),
        batch_size=batch_size,
        item_feature_name="item",
        action_feature_name="action",
        contextual_feature_names=["user_id", "age"],
    )


def cpu_world(rank: int = 0, world_size: int = 1) -> World:
    """The world of a process that is already in a gloo group."""
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        device=torch.device("cpu"),
    )


@contextmanager
def single_process_group(store: str) -> Iterator[World]:
    """A gloo group of one, for tests in this process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        yield cpu_world()
    finally:
        dist.destroy_process_group()


def write_movielens(folder: Path, *, num_users: int = 24, num_items: int = 40) -> Path:
    """A small ml-100k look-alike in the original format, preprocessed; returns its folder.

    Users have 4 to 30 ratings at growing times. Ratings follow the item and the user, so that a
    model has something to learn.
    """
    from data.preprocess import preprocess  # needs polars, which a machine that trains may lack

    raw = folder / "raw"
    raw.mkdir(parents=True)
    draw = random.Random(7)
    quality = [draw.gauss(0, 1) for _ in range(num_items + 1)]
    ratings, users = [], []
    for user in range(1, num_users + 1):
        taste = draw.gauss(0, 0.7)
        # Each item once, as in MovieLens: equal candidates tie, and noise would break the tie.
        for event, item in enumerate(draw.sample(range(1, num_items + 1), draw.randint(4, 30))):
            score = 3.5 + taste + quality[item] + draw.gauss(0, 0.3)
            time = 880_000_000 + 1000 * user + event
            ratings.append(f"{user}\t{item}\t{min(5, max(1, round(score)))}\t{time}")
        users.append(f"{user}|{20 + user}|{'MF'[user % 2]}|artist|{10_000 + user % 3}")
    (raw / "u.data").write_text("\n".join(ratings) + "\n")
    (raw / "u.user").write_text("\n".join(users) + "\n")
    output = folder / "ml-100k"
    preprocess("ml-100k", source=raw, output=output)
    return output
