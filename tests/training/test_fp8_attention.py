"""FP8 attention through the trainer, alone and with FP8 linears (emulated, one CPU)."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path

import pytest
import torch

from configs.loader import load_experiment
from configs.schema import ExperimentArgs, MixedPrecisionArgs
from ops.hstu_attention import FP8_MODES, dispatch
from tests.support.experiments import synthetic_experiment, write_movielens
from tests.training.test_checkpoint import assert_same, full_state
from tests.training.test_fp8_files import SMALL
from training.distributed import World
from training.trainer import Trainer

OFF = "MixedPrecisionArgs.mixed_precision_dtype = None"
LINEARS = {False: "MixedPrecisionArgs.linear_recipe = None", True: ""}
ATTENTION = {False: "MixedPrecisionArgs.hstu_attn_quantization_mode = 'bf16'", True: ""}


def fp8_attention(folder: str, mode: str = "per_block", **fields: bool) -> ExperimentArgs:
    """`synthetic_experiment` with FP8 attention and plain linears."""
    precision = MixedPrecisionArgs(
        mixed_precision_dtype="fp8",
        linear_recipe=None,
        hstu_attn_quantization_mode=mode,
        **fields,
    )
    trainer = {"max_train_iters": 6, "eval_batch_size": 5}
    return dataclasses.replace(
        synthetic_experiment(folder, trainer=trainer, network={"hidden_dropout": 0.2}),
        precision=precision,
    )


def train_losses(folder: Path | str) -> list[float]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["split"] == "train"]


@pytest.fixture(scope="module")
def movielens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_movielens(tmp_path_factory.mktemp("movielens"))


@pytest.mark.parametrize("name", ["benchmark_ranking_fp8", "movielens_retrieval_fp8"])
def test_linears_and_attention_in_four_combinations_from_gin(
    tmp_path: Path, world: World, movielens: Path, name: str
) -> None:
    task = "retrieval" if "retrieval" in name else "ranking"
    found: dict[tuple[bool, bool], list[float]] = {}
    for linears in (False, True):
        for attention in (False, True):
            folder = tmp_path / f"{linears}-{attention}"
            bindings = [
                *SMALL[name],
                "NetworkArgs.dtype_str = 'float32'",
                "MixedPrecisionArgs.linear_backend = 'emulated'",
                *filter(None, [LINEARS[linears], ATTENTION[attention]]),
                *([] if linears or attention else [OFF]),
                "TrainerArgs.train_batch_size = 4",
                "TrainerArgs.max_train_iters = 8",
                "TrainerArgs.log_interval = 1",
                f"TrainerArgs.output_dir = {str(folder)!r}",
            ]
            if task == "retrieval":
                bindings.append(f"DatasetArgs.dataset_path = {str(movielens)!r}")
            experiment = load_experiment(f"{name}.gin", bindings=bindings, task=task)
            figures = Trainer(experiment, world=world).fit()
            found[linears, attention] = [*train_losses(folder), figures["loss"]]
    plain = found.pop((False, False))
    assert len({tuple(losses) for losses in (plain, *found.values())}) == 4
    for combination, losses in found.items():
        assert len(losses) == len(plain) == 9
        assert losses == pytest.approx(plain, rel=0.03), combination


@pytest.mark.parametrize("mode", FP8_MODES)
def test_every_mode_trains(run_folder: str, world: World, mode: str) -> None:
    figures = Trainer(fp8_attention(run_folder, mode), world=world).fit()
    assert math.isfinite(figures["loss"])


@pytest.mark.parametrize("fp8_eval", [False, True])
def test_evaluation_leaves_the_state_alone(run_folder: str, world: World, fp8_eval: bool) -> None:
    trainer = Trainer(fp8_attention(run_folder, fp8_eval=fp8_eval), world=world)
    before, draws = full_state(trainer), torch.get_rng_state()
    assert math.isfinite(trainer.evaluate("validation")["loss"])
    assert_same(before, full_state(trainer))
    assert torch.equal(draws, torch.get_rng_state())


def test_losses_do_not_depend_on_evaluations_between(tmp_path: Path, world: World) -> None:
    found = []
    for name, interval in (("never", 1000), ("twice", 2)):
        experiment = fp8_attention(str(tmp_path / name), fp8_eval=True)
        trainer = dataclasses.replace(experiment.trainer, eval_interval=interval)
        Trainer(dataclasses.replace(experiment, trainer=trainer), world=world).fit()
        found.append(train_losses(tmp_path / name))
    assert found[0] == found[1] and len(found[0]) == 6


def test_evaluation_is_plain_unless_asked_for(run_folder: str, world: World) -> None:
    plain = Trainer(synthetic_experiment(run_folder), world=world).evaluate("validation")["loss"]
    found = [
        Trainer(fp8_attention(run_folder, fp8_eval=fp8_eval), world=world).evaluate("validation")
        for fp8_eval in (False, True)
    ]
    assert found[0]["loss"] == pytest.approx(plain, rel=1e-6)
    assert found[1]["loss"] != found[0]["loss"]
    assert found[1]["loss"] == pytest.approx(plain, rel=0.02)


def test_the_log_says_once_that_it_is_emulated(
    run_folder: str,
    world: World,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "_announced", set())
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            Trainer(fp8_attention(run_folder, "per_head"), world=world)
    said = [record for record in caplog.records if "FP8 attention" in record.message]
    assert len(said) == 1 and said[0].levelname == "WARNING"
    assert "(per_head) is emulated" in said[0].message
