"""FP8 linears through the trainer: what they may not disturb (emulated backend, one CPU)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import ExperimentArgs, MixedPrecisionArgs
from data.batch import SequenceBatch
from modules.linear import watch
from modules.linear.state import Fp8State, fp8_state_dict
from modules.linear.te import te_recipe
from tests.support import te_stand_in
from tests.support.experiments import batch_of, cpu_world, synthetic_experiment, weights
from tests.support.two_ranks import TwoRanks
from tests.training.test_checkpoint import assert_same, full_state
from training.distributed import World
from training.nonfinite import SkipBudget
from training.step import NonFiniteError, TrainStep
from training.trainer import Trainer

FIRST = "stack.layers.0.input.uvqk"
SGD = {"optimizer_str": "sgd", "sparse_optimizer_str": "sgd", "learning_rate": 0.05}


def fp8_experiment(
    folder: str, precision: dict[str, Any] | None = None, **parts: Any
) -> ExperimentArgs:
    """`synthetic_experiment` with emulated FP8 linears under delayed scaling."""
    fields = {
        "mixed_precision_dtype": "fp8",
        "linear_backend": "emulated",
        "linear_recipe": "delayed",
        "amax_history_len": 3,
    }
    return dataclasses.replace(
        synthetic_experiment(folder, **parts),
        precision=MixedPrecisionArgs(**(fields | (precision or {}))),
    )


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Weights, optimizer state, FP8 state and what is pending in it."""
    found = full_state(trainer)
    found |= {f"fp8/{name}": value for name, value in fp8_state_dict(trainer.model).items()}
    return found | {"fp8/pending": fp8_state(trainer).amax.clone()}


def fp8_state(trainer: Trainer) -> Fp8State:
    (state,) = (module for module in trainer.model.modules() if isinstance(module, Fp8State))
    return state


def losses(folder: str | Path) -> list[float | None]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["split"] == "train"]


def batches(trainer: Trainer, count: int) -> list[SequenceBatch]:
    return [
        batch for _, batch in zip(range(count), trainer.loaders["train"].epoch(0), strict=False)
    ]


def make_step(trainer: Trainer, **options: Any) -> TrainStep:
    trainer.model.train()
    return TrainStep(trainer.model.module, trainer.optimizer, **options)


# Non-finite steps.


def _poison(trainer: Trainer, where: str) -> None:
    """Makes every following step of this rank bad."""
    trunk = trainer.model.module.trunk
    if where == "gradient":
        trunk.head.layers[0].weight.register_hook(lambda gradient: gradient * math.nan)
    elif where == "rows":
        trunk.stack.layers[0].register_forward_pre_hook(
            lambda module, inputs: (inputs[0].with_values(inputs[0].values_TD * math.nan),)
        )
    else:
        state = fp8_state(trainer)
        trunk.head.register_forward_hook(lambda *_: state.amax[0:1].fill_(math.inf) and None)


def _spoilt_run(rank: int, world_size: int, folder: str, where: str, size: int) -> dict[str, Any]:
    """Two good steps, bad ones by rank 1 until the run ends; what is left, and good ones again."""
    experiment = fp8_experiment(folder, trainer={"train_batch_size": 4})
    trainer = Trainer(experiment, world=cpu_world(rank, world_size))
    step = make_step(trainer, budget=SkipBudget(size=size))
    feed = batches(trainer, 4)
    for batch in feed[:2]:
        step(batch)
    before = everything(trainer)
    if rank == 1:
        _poison(trainer, where)
    skipped = [step(batch) for batch in (feed[2], feed[3])[:size]]
    with pytest.raises(NonFiniteError) as ended:
        step(feed[2])
    return {
        "error": str(ended.value),
        "skipped": [(one.step, one.is_skipped, one.num_skipped, one.loss) for one in skipped],
        "before": before,
        "after": everything(trainer),
        "num_steps": step.num_steps,
    }


@pytest.mark.parametrize(
    ("where", "cause"),
    [
        ("gradient", "rank 1: the gradient of head.layers.0.weight"),
        ("rows", f"rank 1: the loss, first in FP8 operand {FIRST}: x"),
        ("maximum", f"rank 1: FP8 operand {FIRST}: x"),
    ],
)
@pytest.mark.parametrize("size", [0, 2])
def test_a_bad_step_of_one_rank_changes_nothing_on_both(
    run_folder: str, two_ranks: TwoRanks, where: str, cause: str, size: int
) -> None:
    for found in two_ranks.run(_spoilt_run, run_folder, where, size):
        assert f"step {3 + size} is not finite" in found["error"]
        assert cause in found["error"]
        assert "rank 0" not in found["error"]
        assert ("nonfinite_budget = 2 skipped steps are used up" in found["error"]) == (size == 2)
        assert [one[:3] for one in found["skipped"]] == [(3, True, 1), (4, True, 2)][:size]
        assert all(math.isnan(one[3]) for one in found["skipped"])
        assert found["num_steps"] == 2 + size
        assert found["before"]["fp8/pending"].abs().max() == 0
        assert_same(found["before"], found["after"])


def test_a_run_goes_on_after_skipped_steps_and_counts_them_over_a_resume(
    run_folder: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"max_train_iters": 6, "ckpt_save_interval": 3, "nonfinite_policy": "skip"}
    experiment = fp8_experiment(run_folder, trainer=settings | {"nonfinite_budget": 2})
    trainer = Trainer(experiment, world=world)
    calls: list[int] = []

    def spoil(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient * math.nan if len(calls) in (2, 5) else gradient

    trainer.model.module.trunk.head.layers[0].weight.register_hook(spoil)
    figures = trainer.fit()
    assert math.isfinite(figures["loss"])
    found = losses(run_folder)
    assert [loss is None for loss in found] == [False, True, False, False, True, False]
    told = [text for text in caplog.messages if "skipped" in text]
    assert "step 2 is not finite (rank 0: the gradient of head" in told[0]
    assert "skipped (1 of TrainerArgs.nonfinite_budget = 2)" in told[0]
    checkpoint = Path(run_folder) / "checkpoints" / "step-00000003"
    assert json.loads((checkpoint / "state.json").read_text())["num_skipped"] == 1
    again = dataclasses.replace(
        experiment, trainer=dataclasses.replace(experiment.trainer, resume=str(checkpoint))
    )
    assert Trainer(again, world=world).skips.num_skipped == 1


def _fit_with_a_nan(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    experiment = fp8_experiment(
        folder, trainer={"train_batch_size": 4, "max_train_iters": 5, "nonfinite_policy": "skip"}
    )
    trainer = Trainer(experiment, world=cpu_world(rank, world_size))
    calls: list[int] = []

    def spoil(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient * math.nan if rank == 1 and len(calls) == 3 else gradient

    trainer.model.module.trunk.head.layers[0].weight.register_hook(spoil)
    trainer.fit()
    return {"skipped": trainer.skips.num_skipped, "state": everything(trainer)}


def test_two_ranks_skip_the_same_step_and_stay_equal(run_folder: str, two_ranks: TwoRanks) -> None:
    first, second = two_ranks.run(_fit_with_a_nan, run_folder)
    assert first["skipped"] == second["skipped"] == 1
    assert_same(first["state"], second["state"])
    assert all(value.isfinite().all() for value in first["state"].values())
    assert [loss is None for loss in losses(run_folder)] == [False, False, True, False, False]


# Evaluation.


@pytest.mark.parametrize("fp8_eval", [False, True])
def test_evaluation_leaves_weights_state_and_random_streams(
    run_folder: str, world: World, fp8_eval: bool
) -> None:
    experiment = fp8_experiment(
        run_folder,
        {"fp8_eval": fp8_eval},
        trainer={"eval_batch_size": 5},
        network={"hidden_dropout": 0.2},
    )
    trainer = Trainer(experiment, world=world)
    assert trainer.loaders["validation"].num_samples % 5 == 2
    step = make_step(trainer)
    for batch in batches(trainer, 2):
        step(batch)
    before, draws = everything(trainer), torch.get_rng_state()
    figures = trainer.evaluate("validation")
    assert math.isfinite(figures["loss"])
    assert_same(before, everything(trainer))
    assert torch.equal(draws, torch.get_rng_state())
    assert trainer.model.training


def test_fp8_eval_is_another_arithmetic(run_folder: str, world: World) -> None:
    found = []
    for fp8_eval in (False, True):
        trainer = Trainer(fp8_experiment(run_folder, {"fp8_eval": fp8_eval}), world=world)
        found.append(trainer.evaluate("validation")["loss"])
    plain = Trainer(synthetic_experiment(run_folder), world=world).evaluate("validation")["loss"]
    assert found[0] == plain
    assert found[1] != plain
    assert found[1] == pytest.approx(plain, rel=0.02)


def test_losses_do_not_depend_on_evaluations_between(tmp_path: Path, world: World) -> None:
    found = []
    for name, interval in (("never", 1000), ("twice", 2)):
        experiment = fp8_experiment(
            str(tmp_path / name),
            {"fp8_eval": True},
            trainer={"eval_interval": interval, "eval_batch_size": 3, "max_train_iters": 10},
            network={"hidden_dropout": 0.2},
        )
        Trainer(experiment, world=world).fit()
        found.append(losses(tmp_path / name))
    assert len(found[0]) == 10
    assert found[0] == found[1]


# Checkpoints.


def _experiment(kind: str, folder: Path, **trainer: Any) -> ExperimentArgs:
    make = fp8_experiment if kind == "fp8" else synthetic_experiment
    return make(str(folder), trainer=trainer)


@pytest.mark.parametrize("loaded", ["bf16", "fp8"])
@pytest.mark.parametrize("saved", ["bf16", "fp8"])
@pytest.mark.parametrize("field", ["resume", "ckpt_load_dir"])
def test_all_four_directions_load(
    tmp_path: Path,
    world: World,
    caplog: pytest.LogCaptureFixture,
    saved: str,
    loaded: str,
    field: str,
) -> None:
    caplog.set_level("INFO", logger="training")
    first = Trainer(_experiment(saved, tmp_path / "a", max_train_iters=3), world=world)
    first.fit()
    checkpoint = tmp_path / "a" / "checkpoints" / "step-00000003"
    caplog.clear()
    experiment = _experiment(loaded, tmp_path / "b", max_train_iters=8, **{field: str(checkpoint)})
    second = Trainer(experiment, world=world)
    assert_same(weights(first.model), weights(second.model))
    told = [text for text in caplog.messages if "FP8" in text]
    if loaded == "fp8":
        found, state = fp8_state_dict(second.model), fp8_state(second)
        assert state.is_warm == (saved == "fp8")
        if saved == "fp8":
            assert_same(fp8_state_dict(first.model), found)
            assert told == []
        else:
            assert found == {}
            assert len(told) == 1
            assert "4 of 4 FP8 linears" in told[0] and "start afresh" in told[0]
    else:
        assert len(told) == (saved == "fp8")
    before = losses(tmp_path / "a")
    second.fit()
    after = losses(str(second.folder))[-5:]
    assert all(loss is not None and math.isfinite(loss) for loss in after)
    assert after[0] == pytest.approx(before[-1], rel=0.3)


def test_the_first_loss_after_a_load_is_that_of_the_straight_run(
    tmp_path: Path, world: World
) -> None:
    straight = {}
    for kind in ("bf16", "fp8"):
        Trainer(
            _experiment(kind, tmp_path / kind, max_train_iters=4, ckpt_save_interval=3), world=world
        ).fit()
        straight[kind] = losses(tmp_path / kind)[3]
    for saved in straight:
        for loaded in straight:
            checkpoint = str(tmp_path / saved / "checkpoints" / "step-00000003")
            trainer = Trainer(
                _experiment(loaded, tmp_path / "new", max_train_iters=4, resume=checkpoint),
                world=world,
            )
            step = make_step(trainer, num_steps=3)
            (batch,) = batches(trainer, 4)[3:]
            loss = step(batch).loss
            assert loss == pytest.approx(straight[saved], rel=0.02)
            if saved == loaded:
                assert loss == straight[saved]


def test_a_missing_weight_is_still_an_error(
    run_folder: str, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(fp8_experiment(run_folder), world=world)
    make_step(trainer)(batches(trainer, 1)[0])
    tensors = trainer.checkpointer._tensors()
    missing = f"trunk.{FIRST}.weight"
    del tensors["model"][missing]
    monkeypatch.setattr(trainer.checkpointer, "_tensors", lambda: tensors)
    saved = trainer.checkpointer.save(tmp_path, 1, run=tmp_path, data_state={})
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=rf"cannot be loaded .*{missing}"):
        trainer.checkpointer.load(saved)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_resumed_run_is_the_straight_run(tmp_path: Path, world: World, recipe: str) -> None:
    def experiment(folder: str, **trainer: Any) -> ExperimentArgs:
        return fp8_experiment(
            str(tmp_path / folder),
            {"linear_recipe": recipe},
            trainer={"max_train_iters": 7, "ckpt_save_interval": 4} | trainer,
            network={"hidden_dropout": 0.2},
        )

    straight = Trainer(experiment("straight"), world=world)
    straight.fit()
    checkpoint = str(tmp_path / "straight" / "checkpoints" / "step-00000004")
    resumed = Trainer(experiment("other", resume=checkpoint), world=world)
    resumed.fit()
    assert_same(full_state(straight), full_state(resumed))
    assert_same(fp8_state_dict(straight.model), fp8_state_dict(resumed.model))
    assert bool(fp8_state_dict(straight.model)) == (recipe == "delayed")


# Parts of a step, and recomputation.


def test_parts_of_a_step_record_what_the_whole_records(run_folder: str, world: World) -> None:
    """From the second step on: in the first each part scales with its own maxima."""
    users = [(9, 3), (0, 2), (1, 0), (5, 1), (0, 0), (2, 3)]
    found: dict[int, dict[str, Tensor]] = {}
    for num_parts in (1, 2, 4):
        trainer = Trainer(fp8_experiment(run_folder, optimizer=SGD), world=world)
        make_step(trainer)(batch_of(users, batch_size=8, first_user=10))
        before = weights(trainer.model)
        make_step(trainer, num_parts=num_parts, num_steps=1)(batch_of(users, batch_size=8))
        found[num_parts] = everything(trainer) | {
            f"moved/{name}": value - before[name] for name, value in weights(trainer.model).items()
        }
    whole = found[1]
    for num_parts in (2, 4):
        parts = found[num_parts]
        newest = {name: parts[name][0] for name in parts if name.endswith(".history")}
        assert len(newest) == 4
        for name, maxima in newest.items():
            # x and w; a sum over other rows may round a gradient otherwise
            torch.testing.assert_close(maxima[:2], whole[name][0, :2], rtol=1e-6, atol=0)
            torch.testing.assert_close(maxima[2:], whole[name][0, 2:], rtol=1e-5, atol=0)
        for name, value in parts.items():
            if name.startswith("moved/"):
                error = (value - whole[name]).norm() / whole[name].norm()
                assert error < 2e-3, name


def test_recomputation_changes_nothing(tmp_path: Path, world: World) -> None:
    found = []
    for recompute in (False, True):
        network = {
            "recompute_input_layernorm": recompute,
            "recompute_input_silu": recompute,
            "hidden_dropout": 0.2,
        }
        trainer = Trainer(
            fp8_experiment(str(tmp_path / str(recompute)), network=network), world=world
        )
        trainer.fit()
        found.append((losses(tmp_path / str(recompute)), everything(trainer)))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


# A look at operands.


def test_operands_are_written_every_so_many_steps_only(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    measure = watch._measure
    monkeypatch.setattr(watch, "_measure", lambda *a: looks.append(1) or measure(*a))
    runs = {}
    for name, interval in (("never", None), ("watched", 2)):
        experiment = fp8_experiment(
            str(tmp_path / name),
            {"fp8_log_interval": interval, "first_last_layers_bf16": True,
             "num_layers_at_end_in_bf16": 0},
            trainer={"max_train_iters": 5},
        )  # fmt: skip
        Trainer(experiment, world=world).fit()
        runs[name] = losses(tmp_path / name)
        if interval is None:
            assert looks == []
    assert runs["never"] == runs["watched"]
    assert not (tmp_path / "never" / "fp8.jsonl").exists()
    lines = (tmp_path / "watched" / "fp8.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    operands = [
        (f"stack.layers.1.{linear}", operand)
        for linear in ("input.uvqk", "output.proj")
        for operand in ("x", "w", "dy")
    ]
    assert len(looks) % 2 == 0 and len(looks) >= 2 * len(operands)
    assert [record["step"] for record in records] == [2] * len(operands) + [4] * len(operands)
    assert sorted((r["module"], r["operand"]) for r in records[:6]) == sorted(operands)
    for record in records:
        assert record["amax"] > 0
        largest = 57344 if record["operand"] == "dy" else 448
        # a maximum beyond what the history of 3 knows is cut, and nothing else
        is_beyond = record["amax"] * record["scale"] > 1.08 * largest
        assert (record["saturated_percent"] > 0) == is_beyond
        assert record["saturated_percent"] < 50
        assert 0 <= record["underflow_percent"] < 50


# Transformer Engine, which keeps scales of its own, by a stand-in.


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    te_recipe.cache_clear()
    te_stand_in.install(monkeypatch)
    yield
    te_recipe.cache_clear()


def te_experiment(folder: str, **parts: Any) -> ExperimentArgs:
    network = {"dtype_str": "bfloat16", "hidden_dropout": 0.2}
    precision = {"linear_backend": "te", "fp8_eval": True, "auto_filter_small": False}
    return fp8_experiment(folder, precision, network=network, **parts)


def te_everything(trainer: Trainer) -> dict[str, Tensor]:
    return full_state(trainer) | {
        f"fp8/{name}": value.clone() for name, value in fp8_state_dict(trainer.model).items()
    }


def test_a_librarys_scales_come_through_a_bad_step_and_an_evaluation(
    run_folder: str, world: World, te: None
) -> None:
    trainer = Trainer(te_experiment(run_folder), world=world)
    step = make_step(trainer, budget=SkipBudget(size=1))
    feed = batches(trainer, 4)
    for batch in [*feed, *feed]:
        step(batch)
    before = te_everything(trainer)
    assert len([name for name in before if name.startswith("fp8/")]) == 4 * 5
    handle = trainer.model.module.trunk.head.layers[0].weight.register_hook(lambda g: g * math.nan)
    assert step(feed[0]).is_skipped
    handle.remove()
    assert_same(before, te_everything(trainer))
    trainer.evaluate("validation")
    assert_same(before, te_everything(trainer))
    assert not step(feed[0]).is_skipped


def test_a_resumed_run_with_a_librarys_scales_is_the_straight_run(
    tmp_path: Path, world: World, te: None
) -> None:
    settings = {"max_train_iters": 6, "ckpt_save_interval": 3, "eval_interval": 2}
    straight = Trainer(te_experiment(str(tmp_path / "straight"), trainer=settings), world=world)
    straight.fit()
    # The library updates every module that the process has ever run, so look before the next one.
    expected = te_everything(straight)
    checkpoint = str(tmp_path / "straight" / "checkpoints" / "step-00000003")
    again = te_experiment(str(tmp_path / "other"), trainer=settings | {"resume": checkpoint})
    resumed = Trainer(again, world=world)
    resumed.fit()
    assert len([name for name in expected if name.startswith("fp8/")]) == 4 * 5
    assert_same(expected, te_everything(resumed))
