"""A whole training step reads its device at one place, seen without a GPU (tests/model/test_waits).

FBGEMM's tables have no rows on the meta device: the step gets rows of the same shapes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import Tensor

from configs.schema import MixedPrecisionArgs
from tests.model.test_waits import TASKS, HiddenCopies, on_meta
from training import step as step_module
from training.distributed import World
from training.optimizer import dense_optimizer
from training.step import TrainStep


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("task", TASKS)
def test_a_step_reads_its_figures_once(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, task: str, num_parts: int
) -> None:
    experiment = TASKS[task](str(tmp_path / "run"))
    batch, trunk, rows = on_meta(experiment, monkeypatch)
    dense = dense_optimizer(trunk, experiment.optimizer)
    waited: list[tuple[int, ...]] = []

    def flag(rows_of_ranks: Tensor) -> list[list[float]]:
        waited.append(tuple(rows_of_ranks.shape))
        assert rows_of_ranks.device.type == "meta"
        return [[1.0] * rows_of_ranks.shape[1]]

    monkeypatch.setattr(step_module, "finite_flag_wait", flag)
    monkeypatch.setattr(step_module, "lookup_results", lambda results: results)
    step = TrainStep(
        SimpleNamespace(tables=lambda features: rows, trunk=trunk),
        SimpleNamespace(begin_step=lambda step: 0.1, step=dense.step),
        clip_grad=0.5,
        num_parts=num_parts,
    )
    with HiddenCopies():
        step(batch)
    assert waited == [(1, 8)]
    assert all(value.grad is not None for value in rows.values())
    assert all(parameter.grad is not None for parameter in trunk.parameters())


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_fp8_linears_read_nothing_more(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """Neither their scales, nor what a look every two steps would read on the others."""
    precision = MixedPrecisionArgs(
        mixed_precision_dtype="fp8", linear_backend="emulated", linear_recipe=recipe
    )
    experiment = dataclasses.replace(TASKS["ranking"](str(tmp_path / "run")), precision=precision)
    batch, trunk, rows = on_meta(experiment, monkeypatch)
    dense = dense_optimizer(trunk, experiment.optimizer)
    waited: list[tuple[int, ...]] = []

    def flag(rows_of_ranks: Tensor) -> list[list[float]]:
        waited.append(tuple(rows_of_ranks.shape))
        return [[1.0] * rows_of_ranks.shape[1]]

    monkeypatch.setattr(step_module, "finite_flag_wait", flag)
    monkeypatch.setattr(step_module, "lookup_results", lambda results: results)
    step = TrainStep(
        SimpleNamespace(tables=lambda features: rows, trunk=trunk),
        SimpleNamespace(begin_step=lambda step: 0.1, step=dense.step),
        fp8_watch_interval=3,
        ideal_seconds=lambda batch: 1e-3,
    )
    with HiddenCopies():
        step(batch)
        step(batch)
    assert waited == [(1, 9)] * 2
    with pytest.raises(NotImplementedError, match="[Cc]annot copy out of meta tensor"):
        step(batch)


def test_reading_anywhere_else_would_be_noticed(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, trunk, rows = on_meta(TASKS["ranking"](str(tmp_path / "run")), monkeypatch)
    monkeypatch.setattr(step_module, "lookup_results", lambda results: results)
    step = TrainStep(
        SimpleNamespace(tables=lambda features: rows, trunk=trunk),
        SimpleNamespace(begin_step=lambda step: 0.1, step=lambda: None),
    )
    with pytest.raises(NotImplementedError, match="[Cc]annot copy out of meta tensor"):
        step(batch)
