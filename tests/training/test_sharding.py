"""Initial weights: equal for any number of ranks, and nobody else's random stream."""

from __future__ import annotations

from typing import Any

import torch

from data.loader import build_datasets
from model.build import build_ranking_model
from tests.support.experiments import cpu_world, synthetic_experiment
from tests.support.two_ranks import TwoRanks
from training.distributed import World
from training.sharding import initialize_dense
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


def test_ranks_draw_different_dropout(run_folder: str, two_ranks: TwoRanks) -> None:
    first, second = two_ranks.run(_initial, run_folder)
    assert not torch.equal(first["draw"], second["draw"])


def test_same_seed_same_weights_other_seed_others(run_folder: str) -> None:
    experiment = synthetic_experiment(run_folder)
    facts = build_datasets(experiment.dataset, num_classes=5).facts
    model, _ = build_ranking_model(experiment, facts, device_type="cpu")
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
