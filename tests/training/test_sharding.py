"""Initial weights: equal for any number of ranks, and nobody else's random stream."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist

from data.loader import build_datasets
from model.build import build_model
from tests.support.experiments import (
    batch_of,
    cpu_world,
    retrieval_experiment,
    synthetic_experiment,
    weights,
)
from tests.support.two_ranks import TwoRanks
from training import sharding
from training.distributed import World
from training.sharding import initialize_dense
from training.step import TrainStep
from training.trainer import Trainer


def _initial(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    trainer = Trainer(synthetic_experiment(folder), world=cpu_world(rank, world_size))
    table = trainer.model.state_dict()["tables.collections.0.embeddings.table_item.weight"]
    shards = [(s.metadata.shard_offsets[0], s.tensor.clone()) for s in table.local_shards()]
    dense = {n: p.detach().clone() for n, p in trainer.model.module.trunk.named_parameters()}
    return {"dense": dense, "shards": shards, "draw": torch.rand(4)}


def test_weights_do_not_depend_on_the_number_of_ranks(
    run_folder: str, world: World, two_ranks: TwoRanks
) -> None:
    alone = _initial(0, 1, run_folder)
    pair = two_ranks.run(_initial, run_folder)
    for result in pair:
        assert result["dense"].keys() == alone["dense"].keys()
        for name, value in alone["dense"].items():
            assert torch.equal(result["dense"][name], value), name
    shards = sorted(pair[0]["shards"] + pair[1]["shards"], key=lambda shard: shard[0])
    assert len(shards) == 2
    assert torch.equal(torch.cat([rows for _, rows in shards]), alone["shards"][0][1])


@pytest.mark.parametrize("num_bytes", [2**20, 2**40])
def test_tables_are_held_against_the_memory_that_is_there(
    run_folder: str, world: World, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """100,000 rows of 32 numbers are 13 MB."""
    monkeypatch.setattr(
        sharding.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1}.get(name, num_bytes)
    )
    plain = synthetic_experiment(run_folder)
    tables = tuple(
        dataclasses.replace(table, item_vocab_size_or_capacity=100_000)
        if table.table_name == "item"
        else table
        for table in plain.dataset.embedding_args or ()
    )
    dataset = dataclasses.replace(plain.dataset, embedding_args=tables)
    experiment = dataclasses.replace(plain, dataset=dataset)
    if num_bytes == 2**20:
        with pytest.raises(RuntimeError, match="do not fit the memory of 1 ranks.*100000 rows"):
            Trainer(experiment, world=world)
    else:
        Trainer(experiment, world=world)


def test_ranks_draw_different_dropout(run_folder: str, two_ranks: TwoRanks) -> None:
    first, second = two_ranks.run(_initial, run_folder)
    assert not torch.equal(first["draw"], second["draw"])


def test_same_seed_same_weights_other_seed_others(run_folder: str) -> None:
    experiment = synthetic_experiment(run_folder)
    facts = build_datasets(experiment.dataset, num_classes=5).facts
    model, _ = build_model(experiment, facts, device_type="cpu")
    torch.manual_seed(5)
    expected_draw = torch.rand(3)
    torch.manual_seed(5)
    found = []
    for seed in (1, 1, 2):
        initialize_dense(model.trunk, seed=seed)
        found.append(torch.cat([p.detach().reshape(-1) for p in model.trunk.parameters()]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(torch.rand(3), expected_draw), "the process's own stream was used"


DROPOUT = {"hidden_dropout": 0.3, "input_dropout": 0.3}


def _three_steps(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Replicated parameters at steps 0 and 3, and how this rank drops tokens of one batch."""
    experiment = synthetic_experiment(folder, network=DROPOUT)
    trainer = Trainer(experiment, world=cpu_world(rank, world_size))
    trunk = trainer.model.module.trunk
    trainer.model.train()
    step = TrainStep(trainer.model.module, trainer.optimizer)
    dropped: list[torch.Tensor] = []
    handle = trunk.stack.register_forward_pre_hook(
        lambda module, inputs: dropped.append(inputs[0].values_TD == 0)
    )
    same = trainer.model.module(batch_of([(6, 3), (5, 2)], batch_size=8))
    handle.remove()
    found = {"mask": dropped[0], "logits": same.logits_EK.detach(), "step 0": _copied(trunk)}
    batches = trainer.loaders["train"].epoch(0)
    losses = [step(next(batches)).loss for _ in range(3)]
    return found | {"losses": losses, "step 3": _copied(trunk)}


def _copied(trunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trunk.state_dict().items()}


def test_replicas_stay_equal_and_drop_differently(run_folder: str, two_ranks: TwoRanks) -> None:
    first, second = two_ranks.run(_three_steps, run_folder)
    assert any(name.startswith("replicated.") for name in first["step 0"])
    for when in ("step 0", "step 3"):
        assert first[when].keys() == second[when].keys()
        for name, value in first[when].items():
            assert torch.equal(value, second[when][name]), f"{name} at {when}"
    assert any(not torch.equal(first["step 0"][n], v) for n, v in first["step 3"].items())
    assert first["losses"] == second["losses"]
    assert first["mask"].shape == second["mask"].shape
    assert not torch.equal(first["mask"], second["mask"])
    assert not torch.equal(first["logits"], second["logits"])


def test_the_same_seed_gives_the_same_run_on_two_ranks(
    run_folder: str, two_ranks: TwoRanks
) -> None:
    runs = [two_ranks.run(_three_steps, run_folder) for _ in range(2)]
    for before, again in zip(*runs, strict=True):
        assert before["losses"] == again["losses"]
        assert torch.equal(before["mask"], again["mask"])
        for name, value in before["step 3"].items():
            assert torch.equal(value, again["step 3"][name]), name


RANDOM = {"num_negatives": 20, "negatives_sampler": "random"}


@pytest.mark.parametrize("pipeline_type", ["none", "native"])
@pytest.mark.parametrize("task", ["ranking", "retrieval"])
def test_a_single_process_exchanges_nothing_and_gets_the_same_bits(
    tmp_path: Any, world: World, monkeypatch: pytest.MonkeyPatch, task: str, pipeline_type: str
) -> None:
    """Against TorchRec's own exchange with nobody, whose counts a GPU has to wait for."""

    def run(name: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        settings = {"max_train_iters": 3, "pipeline_type": pipeline_type, "ckpt_save_interval": 0}
        folder = str(tmp_path / name)
        if task == "ranking":
            experiment = synthetic_experiment(folder, trainer=settings)
        else:  # the item table serves a second feature, which stands last in the batch
            experiment = retrieval_experiment(folder, trainer=settings, retrieval=RANDOM)
        trainer = Trainer(experiment, world=world)
        return trainer.fit(), weights(trainer.model)

    def refused(*arguments: object, **options: object) -> None:
        raise AssertionError("ids or rows went through TorchRec's exchange")

    with monkeypatch.context() as patch:
        patch.setattr(sharding, "_OneRankSharder", EmbeddingCollectionSharder)
        expected, expected_weights = run("exchanging")
    with monkeypatch.context() as patch:
        for name in ("all_to_all_single", "all_to_all"):
            patch.setattr(dist, name, refused)
        for exchange in (RwSparseFeaturesDist, RwSequenceEmbeddingDist):
            patch.setattr(exchange, "forward", refused)
        figures, found = run("alone")
    assert figures == expected
    assert found.keys() == expected_weights.keys()
    for name, value in expected_weights.items():
        assert torch.equal(found[name], value), name
