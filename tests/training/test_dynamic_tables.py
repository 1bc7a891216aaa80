"""Tables whose ids are not known beforehand: each gets a row, and a full table gives rows up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from configs.schema import DynamicEmbeddingArgs, ExperimentArgs
from data.batch import SequenceBatch
from modules.embedding import lookup_results, spread_ids
from tests.support.experiments import batch_of, cpu_world, synthetic_experiment
from tests.support.two_ranks import TwoRanks
from training.distributed import World
from training.step import TrainStep
from training.trainer import Trainer

SGD = {"optimizer_str": "sgd", "sparse_optimizer_str": "adagrad", "learning_rate": 0.1}


def experiment_of(folder: str, *, capacity: int, evict: str = "lru", **trainer: Any) -> Any:
    plain = synthetic_experiment(
        folder, optimizer=SGD, trainer={"train_batch_size": 4, "ckpt_save_interval": 0} | trainer
    )
    tables = tuple(
        DynamicEmbeddingArgs(
            feature_names=table.feature_names,
            table_name=table.table_name,
            item_vocab_size_or_capacity=capacity,
            evict_strategy=evict,
        )
        if table.table_name == "item"
        else table
        for table in plain.dataset.embedding_args
    )
    dataset = dataclasses.replace(plain.dataset, embedding_args=tables)
    return dataclasses.replace(plain, dataset=dataset)


def batch_with(items: list[int], *, batch_size: int = 4) -> SequenceBatch:
    """One user who has these items; the last is a candidate."""
    batch = batch_of([(len(items) - 1, 1)], batch_size=batch_size)
    batch.features.values()[: len(items)] = torch.tensor(items)
    return batch


def rows_of(trainer: Trainer, items: list[int]) -> torch.Tensor:
    """Rows of the items as evaluation sees them."""
    trainer.model.eval()
    with torch.no_grad():
        found = lookup_results(trainer.model.module.tables(batch_with(items).features))["item"]
    trainer.model.train()
    return found.clone()


def made(experiment: ExperimentArgs, world: World) -> tuple[Trainer, TrainStep]:
    trainer = Trainer(experiment, world=world)
    trainer.model.train()
    return trainer, TrainStep(trainer.model.module, trainer.optimizer)


def test_ids_of_any_size_get_rows_of_their_own(run_folder: str, world: World) -> None:
    trainer, step = made(experiment_of(run_folder, capacity=16), world)
    items = [7, 2**62 + 5, 0, 2**40]
    step(batch_with(items))
    rows = rows_of(trainer, [*items, 99, 98])
    assert len(torch.unique(rows[:4], dim=0)) == 4
    assert torch.equal(rows[4], rows[5]), "ids without a row share one"
    assert not any(torch.equal(rows[4], row) for row in rows[:4])
    before = rows_of(trainer, items)
    step(batch_with(items))
    assert (rows_of(trainer, items) != before).any(dim=1).all(), "every id learns"


def test_an_empty_first_step_and_a_larger_later_one_lose_no_id(
    run_folder: str, world: World
) -> None:
    """TorchRec sizes its buffers by the first step."""
    trainer, step = made(experiment_of(run_folder, capacity=64), world)
    step(batch_of([], batch_size=4))
    step(batch_with([1, 2]))
    items = list(range(100, 110))
    step(batch_with(items))
    assert len(torch.unique(rows_of(trainer, items), dim=0)) == len(items)


@pytest.mark.parametrize(("evict", "gone"), [("lru", 1), ("lfu", 2)])
def test_a_full_table_gives_up_the_right_id(
    run_folder: str, world: World, evict: str, gone: int
) -> None:
    """Room for three ids: 1 was met most often, 2 most recently but for 3."""
    trainer, step = made(experiment_of(run_folder, capacity=4, evict=evict), world)
    for items in ([1, 1, 1, 1], [2, 2], [3, 3, 3]):
        step(batch_with(items))
    unknown, *known = rows_of(trainer, [77, 1, 2, 3])
    assert not any(torch.equal(row, unknown) for row in known)
    step(batch_with([4, 4, 4, 4]))
    rows = rows_of(trainer, [77, 1, 2, 3, 4])
    lost = [item for item, row in enumerate(rows[1:], start=1) if torch.equal(row, rows[0])]
    assert lost == [gone]


def test_a_row_forgets_the_id_before(run_folder: str, world: World) -> None:
    """With two ids at a time and Adagrad: a new id starts from a fresh row and no state."""
    trainer, step = made(experiment_of(run_folder, capacity=2), world)
    for _ in range(20):
        step(batch_with([5, 5]))
    (collection,) = trainer.model.module.tables.dynamic
    ((kernel, _),) = collection._table_to_tbe_and_index.values()
    ((state,),) = kernel.split_optimizer_states()
    large = float(state[0].sum())
    trained = rows_of(trainer, [5])[0]
    step(batch_with([6, 6]))
    assert 0 < float(state[0].sum()) < large / 5
    assert float((rows_of(trainer, [6])[0] - trained).abs().max()) > 1e-3


def test_spreading_ids_keeps_them_apart() -> None:
    ids = torch.cat([torch.arange(100_000), 2**62 + torch.arange(1000)])
    spread = spread_ids(ids, 2**63 - 1)
    assert len(torch.unique(spread)) == len(ids)
    assert int(spread.min()) >= 0
    share = float((spread[:100_000] < 2**62).double().mean())
    assert share == pytest.approx(0.5, abs=0.01)


def _fit(rank: int, world_size: int, folder: str, pipeline_type: str) -> dict[str, Any]:
    settings = {"pipeline_type": pipeline_type, "max_train_iters": 12, "eval_interval": 4}
    experiment = experiment_of(folder, capacity=40, **settings)
    losses: list[float] = []
    plain = TrainStep.__call__

    def watched(self: TrainStep, batch: SequenceBatch, **options: Any) -> Any:
        result = plain(self, batch, **options)
        losses.append(result.loss)
        return result

    TrainStep.__call__ = watched
    try:
        trainer = Trainer(experiment, world=cpu_world(rank, world_size))
        figures = trainer.fit()
    finally:
        TrainStep.__call__ = plain
    dense = [p.detach().clone() for p in trainer.model.module.trunk.parameters()]
    return {"losses": losses, "figures": figures, "dense": dense}


def test_two_ranks_train_and_evict_under_each_pipeline(
    run_folder: str, two_ranks: TwoRanks
) -> None:
    plain = two_ranks.run(_fit, run_folder, "none")
    ahead = two_ranks.run(_fit, run_folder, "native") + two_ranks.run(_fit, run_folder, "prefetch")
    assert len(plain[0]["losses"]) == 12
    for found in (plain[1], *ahead):
        assert found["losses"] == plain[0]["losses"]
        assert found["figures"] == plain[0]["figures"]
        assert all(map(torch.equal, found["dense"], plain[0]["dense"]))


def _resumed(rank: int, world_size: int, folder: str, resume: str | None, steps: int) -> Any:
    """Ids, rows and states of this rank's part after so many steps."""
    settings = {"max_train_iters": steps, "ckpt_save_interval": 4, "resume": resume}
    experiment = experiment_of(folder, capacity=40, evict="lfu", **settings)
    try:
        trainer = Trainer(experiment, world=cpu_world(rank, world_size))
    except ValueError as error:
        return str(error)
    trainer.fit()
    (collection,) = trainer.model.module.tables.dynamic
    ((kernel, _),) = collection._table_to_tbe_and_index.values()
    buffers = collection._managed_collision_collection.named_buffers()
    found = {name: value.clone() for name, value in buffers if "history" not in name}
    found["rows"] = kernel.split_embedding_weights()[0].clone()
    found["state"] = kernel.split_optimizer_states()[0][0].clone()
    return found


def test_a_resumed_run_knows_its_ids(run_folder: str, world: World, two_ranks: TwoRanks) -> None:
    whole = two_ranks.run(_resumed, f"{run_folder}-whole", None, 8)
    two_ranks.run(_resumed, run_folder, None, 4)
    checkpoint = f"{run_folder}/checkpoints/step-00000004"
    again = two_ranks.run(_resumed, run_folder, checkpoint, 8)
    for expected, found in zip(whole, again, strict=True):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            if name != "rows":
                assert torch.equal(found[name], value), name
        torch.testing.assert_close(found["rows"], expected["rows"], rtol=0, atol=0)
    message = _resumed(0, 1, run_folder, checkpoint, 8)
    assert "must be loaded by 2 processes" in message and "got 1" in message
