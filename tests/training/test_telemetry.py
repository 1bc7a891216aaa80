from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.support.experiments import cpu_world
from training.step import StepResult
from training.telemetry import Telemetry, to_json


def result(step: int, *, loss: float, num_labels: int) -> StepResult:
    return StepResult(
        step=step,
        loss=loss,
        num_labels=num_labels,
        grad_norm=1.0,
        num_tokens=100,
        num_samples=10,
        learning_rate=0.1,
    )


def records(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_training_record_weighs_steps_by_their_labels(tmp_path: Path) -> None:
    with Telemetry(tmp_path, world=cpu_world(), num_steps=2) as telemetry:
        telemetry.step(result(1, loss=1.0, num_labels=1), seconds=0.5)
        telemetry.step(result(2, loss=2.0, num_labels=3), seconds=1.5)
        telemetry.log_training()
        telemetry.log_training()
    (record,) = records(tmp_path)
    assert record["loss"] == pytest.approx(1.75)
    assert record["tokens_per_s"] == pytest.approx(100)
    assert record["samples_per_s"] == pytest.approx(10)
    assert list(record)[:3] == ["step", "split", "loss"]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Telemetry(tmp_path, world=cpu_world(1, 2), num_steps=1) as telemetry:
        telemetry.step(result(1, loss=1.0, num_labels=1), seconds=0.5)
        telemetry.log_training()
        telemetry.record(1, "test", {"auc": 0.5})
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_number_becomes_null() -> None:
    line = to_json({"auc": math.nan, "loss": math.inf, "step": 1, "split": "test"})
    assert json.loads(line) == {"auc": None, "loss": None, "step": 1, "split": "test"}


def test_a_torn_last_line_is_dropped_on_resume(tmp_path: Path) -> None:
    kept = json.dumps({"step": 1, "split": "train"}) + "\n"
    late = json.dumps({"step": 3, "split": "train"}) + "\n"
    (tmp_path / "metrics.jsonl").write_text(kept + late + '{"step": 4, "spl')
    with Telemetry(tmp_path, world=cpu_world(), num_steps=9, first_step=2):
        pass
    assert (tmp_path / "metrics.jsonl").read_text() == kept
