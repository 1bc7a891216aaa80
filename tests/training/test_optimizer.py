from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from configs.schema import OptimizerArgs
from data.loader import build_datasets
from model.build import build_model
from tests.support.experiments import retrieval_experiment, synthetic_experiment, weights
from training.distributed import World
from training.optimizer import dense_optimizer, learning_rate_factor, resolve_table_optimizer
from training.step import TrainStep
from training.trainer import Trainer


def args(**values: object) -> OptimizerArgs:
    return OptimizerArgs(**({"optimizer_str": "adam", "learning_rate": 1e-2} | values))


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("constant", 1, 0.25),
        ("constant", 4, 1.0),
        ("constant", 99, 1.0),
        ("linear", 10, 0.5),
        ("linear", 14, 0.1),
        ("linear", 20, 0.0),
        ("cosine", 5, 1.0),
        ("cosine", 10, 0.5),
        ("cosine", 15, 0.0),
    ],
)
def test_schedule_warms_up_then_falls(schedule: str, step: int, expected: float) -> None:
    settings = args(warmup_steps=4, lr_schedule=schedule)
    assert learning_rate_factor(settings, step=step, num_steps=14) == pytest.approx(expected)


def test_auto_is_adam_on_a_gpu_and_rowwise_adagrad_on_the_cpu() -> None:
    assert resolve_table_optimizer(args(), "cuda") == "adam"
    assert resolve_table_optimizer(args(), "cpu") == "rowwise_adagrad"


def test_adam_on_cpu_tables_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="sparse_optimizer_str .* got 'adam'.*'auto'"):
        resolve_table_optimizer(args(sparse_optimizer_str="adam"), "cpu")


TASKS: dict[str, Any] = {
    "ranking": synthetic_experiment,
    "in-batch": retrieval_experiment,
    "random": functools.partial(
        retrieval_experiment, retrieval={"num_negatives": 20, "negatives_sampler": "random"}
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_schedule_reaches_dense_weights_and_tables(
    run_folder: str, world: World, task: str
) -> None:
    """Past the end of the line nothing moves any more."""
    experiment = TASKS[task](
        run_folder, trainer={"max_train_iters": 2}, optimizer={"lr_schedule": "linear"}
    )
    trainer = Trainer(experiment, world=world)
    step = TrainStep(trainer.model.module, trainer.optimizer)
    batch = next(trainer.loaders["train"].epoch(0))
    assert step(batch).learning_rate == pytest.approx(1e-2)
    assert step(batch).learning_rate == pytest.approx(5e-3)
    before = weights(trainer.model)
    assert step(batch).learning_rate == 0.0
    for name, value in weights(trainer.model).items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("changed", "factor"),
    [({"warmup_steps": 4}, 0.25), ({"clip_grad": 1e-2}, None)],
    ids=["warm-up", "clip"],
)
@pytest.mark.parametrize("task", TASKS)
def test_warm_up_and_clip_shrink_every_update_alike(
    run_folder: str, world: World, task: str, changed: dict[str, Any], factor: float | None
) -> None:
    """SGD moves a weight by rate times gradient, so updates can be compared one by one."""
    sgd = {"optimizer_str": "sgd", "sparse_optimizer_str": "sgd", "learning_rate": 0.1}
    moves = []
    for optimizer in (sgd, sgd | changed):
        trainer = Trainer(TASKS[task](run_folder, optimizer=optimizer), world=world)
        trainer.model.train()
        clip_grad = trainer.experiment.optimizer.clip_grad
        step = TrainStep(trainer.model.module, trainer.optimizer, clip_grad=clip_grad)
        before = weights(trainer.model)
        result = step(next(trainer.loaders["train"].epoch(0)))
        after = weights(trainer.model)
        moves.append({name: after[name] - before[name] for name in before})
    plain, small = moves
    if factor is None:
        factor = changed["clip_grad"] / result.grad_norm
    assert any(name.startswith("tables.") and plain[name].abs().max() > 1e-3 for name in plain)
    for name, move in plain.items():
        torch.testing.assert_close(small[name], factor * move, rtol=1e-3, atol=1e-7, msg=name)


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.local_shards()[0].tensor if hasattr(value, "local_shards") else value


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_row_wise_adagrad_is_what_it_says(run_folder: str, world: World, decay: float) -> None:
    """One step of a table row against the formula: one accumulator a row, the mean square.

    Weight decay is L2, on the rows that the batch reads.
    """
    experiment = synthetic_experiment(
        run_folder,
        optimizer={
            "sparse_optimizer_str": "rowwise_adagrad",
            "sparse_learning_rate": 0.1,
            "sparse_weight_decay": decay,
        },
    )
    trainer = Trainer(experiment, world=world)
    model = trainer.model.module
    batch = next(trainer.loaders["train"].epoch(0))
    table = trainer.model.state_dict()["tables.collections.0.embeddings.table_item.weight"]
    rows = table.local_shards()[0].tensor
    before = rows.clone()
    captured: list[torch.Tensor] = []
    model.trunk.register_forward_pre_hook(
        lambda module, inputs: captured.append(inputs[1]["item"]) and None
    )
    trainer.model.train()
    TrainStep(model, trainer.optimizer)(batch)
    ids = batch.features["item"].values()
    gradient = torch.zeros_like(before).index_add_(0, ids, captured[0].grad)
    gradient += decay * before
    root = gradient.square().mean(dim=1, keepdim=True).sqrt()
    expected = before - 0.1 * gradient / (root + experiment.optimizer.adam_eps)
    touched = ids.unique()
    torch.testing.assert_close(rows[touched], expected[touched], rtol=1e-4, atol=1e-6)
    untouched = torch.ones(len(rows), dtype=torch.bool).index_fill_(0, touched, False)
    assert torch.equal(rows[untouched], before[untouched])


@pytest.mark.parametrize("name", ["adagrad", "sgd", "rowwise_adagrad"])
def test_every_cpu_table_optimizer_learns(run_folder: str, world: World, name: str) -> None:
    experiment = synthetic_experiment(
        run_folder, optimizer={"sparse_optimizer_str": name, "sparse_learning_rate": 0.1}
    )
    trainer = Trainer(experiment, world=world)
    trainer.model.train()
    step = TrainStep(trainer.model.module, trainer.optimizer)
    batch = next(trainer.loaders["train"].epoch(0))
    table = trainer.model.state_dict()["tables.collections.0.embeddings.table_item.weight"]
    before = _plain(table).clone()
    losses = [step(batch).loss for _ in range(15)]
    assert losses[-1] < losses[0] - 0.1
    assert not torch.equal(_plain(table), before)


def test_replicated_tables_have_their_own_decay(run_folder: str) -> None:
    experiment = synthetic_experiment(
        run_folder, optimizer={"weight_decay": 0.1, "replicated_weight_decay": 0.2}
    )
    facts = build_datasets(experiment.dataset, num_classes=5).facts
    model, _ = build_model(experiment, facts, device_type="cpu")
    names = {id(p): name for name, p in model.trunk.named_parameters()}
    decay = {
        names[id(parameter)]: group["weight_decay"]
        for group in dense_optimizer(model.trunk, experiment.optimizer).param_groups
        for parameter in group["params"]
    }
    assert decay.keys() == dict(model.trunk.named_parameters()).keys()
    assert decay["replicated.tables.table_user_id.weight"] == 0.2
    assert decay["head.layers.0.weight"] == 0.1
    assert decay["head.layers.0.bias"] == decay["norm.weight"] == 0.0


def test_table_kernels_start_each_step_from_its_number(run_folder: str, world: World) -> None:
    """The count is Adam's bias correction: lookups in evaluation must not advance it."""
    trainer = Trainer(synthetic_experiment(run_folder), world=world)
    kernels = trainer.optimizer.table_kernels
    assert len(kernels) == 1
    for step in (1, 2, 7):
        kernels[0].iter.add_(5)
        kernels[0].iter_cpu.add_(5)
        trainer.optimizer.begin_step(step)
        assert (int(kernels[0].iter), int(kernels[0].iter_cpu)) == (step - 1, step - 1)
