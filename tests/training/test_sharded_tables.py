"""Tables on two ranks, however they are cut: the losses of one process on the union batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from configs.schema import EmbeddingArgs, ExperimentArgs
from modules.embedding import TableSpec
from tests.support.experiments import (
    cpu_world,
    retrieval_experiment,
    synthetic_experiment,
)
from tests.support.two_ranks import TwoRanks
from training.distributed import World
from training.sharding import _constraints
from training.step import TrainStep
from training.trainer import Trainer

# SGD shows the size of a gradient, and does not turn round-off of a small one into a large step.
OPTIMIZER = {"optimizer_str": "sgd", "sparse_optimizer_str": "sgd", "learning_rate": 0.02}
NUM_STEPS = 5


def _tables(experiment: ExperimentArgs, **fields: Any) -> ExperimentArgs:
    """The experiment with other fields for the tables of items and actions."""
    tables = tuple(
        dataclasses.replace(table, **{"sharding_type": "model_parallel"} | fields)
        if table.table_name in ("item", "action")
        else table
        for table in experiment.dataset.embedding_args or ()
    )
    dataset = dataclasses.replace(experiment.dataset, embedding_args=tables)
    return dataclasses.replace(experiment, dataset=dataset)


def _train(
    rank: int, world_size: int, folder: str, fields: dict[str, Any], trainer: dict[str, Any]
) -> dict[str, Any]:
    """Losses of some steps of 8 users in all, and the weights of this rank afterwards."""
    experiment = _tables(
        synthetic_experiment(
            folder, trainer={"train_batch_size": 8 // world_size} | trainer, optimizer=OPTIMIZER
        ),
        **fields,
    )
    built = Trainer(experiment, world=cpu_world(rank, world_size))
    built.model.train()
    step = TrainStep(built.model.module, built.optimizer)
    batches = built.loaders["train"].epoch(0)
    losses = [step(next(batches)).loss for _ in range(NUM_STEPS - 1)]
    batches = built.loaders["train"].epoch(0)  # rows that were updated are looked up again
    losses.append(step(next(batches)).loss)
    plans = built.model.plan.plan.values()
    return {
        "losses": losses,
        "dense": {n: p.detach().clone() for n, p in built.model.module.trunk.named_parameters()},
        "tables": _shards(built.model),
        "plan": {table.sharding_type for plan in plans for table in plan.values()},
    }


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process on the union of the two ranks' batches."""
    return _train(0, 1, str(tmp_path_factory.mktemp("alone") / "run"), {}, {})


def _shards(model: Any) -> dict[str, list[tuple[list[int], torch.Tensor]]]:
    """This rank's parts of every table and where they stand in it."""
    return {
        name: [(s.metadata.shard_offsets, s.tensor.clone()) for s in value.local_shards()]
        for name, value in model.state_dict().items()
        if hasattr(value, "local_shards")
    }


def _assert_same_tables(found: Sequence[dict[str, Any]], alone: dict[str, Any]) -> None:
    for name, [(_, expected)] in alone["tables"].items():
        together = torch.full_like(expected, torch.nan)
        for offsets, rows in found[0]["tables"][name] + found[1]["tables"][name]:
            part = together[offsets[0] :, offsets[1] :]
            part[: rows.shape[0], : rows.shape[1]] = rows
        torch.testing.assert_close(together, expected, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "fields",
    [
        {"sharding_type": "data_parallel"},
        {"shard_by": "row_wise"},
        {"shard_by": "table_wise"},
        {"shard_by": "column_wise"},
        {"shard_by": "planner"},
    ],
    ids=lambda fields: next(iter(fields.values())),
)
def test_losses_are_those_of_one_process(
    run_folder: str, two_ranks: TwoRanks, alone: dict[str, Any], fields: dict[str, Any]
) -> None:
    first, second = two_ranks.run(_train, run_folder, fields, {})
    assert first["losses"] == second["losses"]
    if "sharding_type" in fields:  # these rows are updated by the dense optimizer
        expected = _train(0, 1, run_folder, fields, {})["losses"]
    else:
        expected = alone["losses"]
        assert fields["shard_by"] in ("planner", *first["plan"])
        _assert_same_tables((first, second), alone)
    assert first["losses"] == pytest.approx(expected, rel=1e-5)
    assert first["dense"].keys() == second["dense"].keys()
    for name, value in first["dense"].items():
        assert torch.equal(value, second["dense"][name]), name


@pytest.mark.parametrize(
    ("forward", "backward", "tolerance"),
    [("fp16", "bf16", 1e-3), ("bf16", "fp16", 1e-2), ("fp32", "bf16", 1e-3)],
)
def test_rows_may_travel_in_fewer_bits(
    run_folder: str,
    two_ranks: TwoRanks,
    alone: dict[str, Any],
    forward: str,
    backward: str,
    tolerance: float,
) -> None:
    """Losses stay near, but are other ones from the first step on that the cast touches."""
    comms = {"table_comms_forward": forward, "table_comms_backward": backward}
    first, second = two_ranks.run(_train, run_folder, {}, comms)
    assert first["losses"] == second["losses"] == pytest.approx(alone["losses"], rel=tolerance)
    assert (first["losses"][0] == pytest.approx(alone["losses"][0], rel=1e-6)) == (
        forward == "fp32"
    )
    assert first["losses"][-1] != pytest.approx(alone["losses"][-1], rel=1e-6)


def _retrieval(rank: int, world_size: int, folder: str, fields: dict[str, Any]) -> dict[str, float]:
    experiment = retrieval_experiment(folder, trainer={"eval_batch_size": 8 // world_size})
    trainer = Trainer(_tables(experiment, **fields), world=cpu_world(rank, world_size))
    return trainer.evaluate("test")


def test_a_catalogue_on_one_rank_is_ranked_by_both(
    run_folder: str, world: World, two_ranks: TwoRanks
) -> None:
    expected = _retrieval(0, 1, run_folder, {})
    for found in two_ranks.run(_retrieval, run_folder, {"shard_by": "table_wise"}):
        assert found == pytest.approx(expected, rel=1e-6)


def test_one_process_splits_nothing(run_folder: str, world: World) -> None:
    plain = _train(0, 1, run_folder, {}, {})
    comms = {"table_comms_forward": "bf16", "table_comms_backward": "fp16"}
    assert _train(0, 1, run_folder, {"shard_by": "column_wise"}, comms)["losses"] == plain["losses"]


def test_kernels_that_a_placement_asks_for() -> None:
    """Only a GPU runs them; what the planner is told shows without one."""
    spec = TableSpec(name="a", feature_names=("a",), num_rows=9, dim=8, is_sharded=True)
    world = dataclasses.replace(cpu_world(0, 2), device=torch.device("cuda"))
    cached = dataclasses.replace(spec, placement="host_cached", cache_ratio=0.4)
    found = _constraints(cached, world=world, prefetches=True)
    assert (found.sharding_types, found.compute_kernels) == (["row_wise"], ["fused_uvm_caching"])
    assert (found.cache_params.load_factor, found.cache_params.prefetch_pipeline) == (0.4, True)
    hosted = dataclasses.replace(spec, placement="host")
    found = _constraints(hosted, world=world, prefetches=True)
    assert (found.compute_kernels, found.cache_params) == (["fused_uvm"], None)
    # A dynamic table's sizes are about GPU memory, of which a CPU has none.
    assert _constraints(hosted, world=cpu_world(0, 2), prefetches=False).compute_kernels == [
        "fused"
    ]


def test_defaults_are_what_ran_before() -> None:
    table = EmbeddingArgs(feature_names=("a",), table_name="a", item_vocab_size_or_capacity=9)
    assert (table.shard_by, table.placement) == ("row_wise", "device")
