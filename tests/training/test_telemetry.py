from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from modules.linear.watch import OperandFigures
from tests.support.experiments import cpu_world
from training.step import StepResult
from training.telemetry import Telemetry, to_json


def result(step: int, *, loss: float, num_labels: int, **more: Any) -> StepResult:
    return StepResult(
        step=step,
        loss=loss,
        num_labels=num_labels,
        grad_norm=1.0,
        num_tokens=100,
        num_samples=10,
        learning_rate=0.1,
        **more,
    )


def records(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def operand(**more: Any) -> OperandFigures:
    figures = {
        "module": "stack.layers.0.input.uvqk",
        "operand": "x",
        "amax": 3.5,
        "scale": 128.0,
        "num_values": 200,
        "num_underflowed": 1,
        "num_saturated": 3,
    }
    return OperandFigures(**(figures | more))


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


def test_a_record_over_a_resume_is_that_of_a_straight_run(tmp_path: Path) -> None:
    steps = [result(1, loss=0.1, num_labels=3), result(2, loss=0.7, num_labels=5)]
    steps += [result(3, loss=1.3, num_labels=2)]
    told = []
    for name, cut in (("straight", 3), ("resumed", 2)):
        folder = tmp_path / name
        folder.mkdir()
        with Telemetry(folder, world=cpu_world(), num_steps=3) as telemetry:
            for step in steps[:cut]:
                telemetry.step(step, seconds=0.5)
            if cut == 3:
                telemetry.log_training()
            state = json.loads(json.dumps(telemetry.state_dict()))
        if cut < 3:
            with Telemetry(folder, world=cpu_world(), num_steps=3, state=state) as telemetry:
                telemetry.step(steps[2], seconds=0.5)
                telemetry.log_training()
        (record,) = records(folder)
        told.append({key: record[key] for key in record if key != "peak_mem_bytes"})
    assert told[0] == told[1]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Telemetry(tmp_path, world=cpu_world(1, 2), num_steps=1) as telemetry:
        telemetry.step(result(1, loss=1.0, num_labels=1), seconds=0.5)
        telemetry.log_training()
        telemetry.record(1, "test", {"auc": 0.5})
        telemetry.record_operands(1, [operand()])
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


def test_skipped_steps_are_counted_and_weigh_nothing(tmp_path: Path) -> None:
    skipped = {"is_skipped": True, "loss": math.nan, "num_labels": 5}
    with Telemetry(tmp_path, world=cpu_world(), num_steps=3) as telemetry:
        telemetry.step(result(1, loss=1.0, num_labels=1), seconds=0.5)
        telemetry.step(result(2, num_skipped=1, **skipped), seconds=0.5)
        telemetry.log_training()
        telemetry.step(result(3, num_skipped=2, **skipped), seconds=0.5)
        telemetry.log_training()
        telemetry.step(result(4, loss=2.0, num_labels=1, num_skipped=2), seconds=0.5)
        telemetry.log_training()
    first, second, third = records(tmp_path)
    assert (first["loss"], first["grad_norm"], first["num_skipped"]) == (1.0, 1.0, 1)
    assert (second["loss"], second["grad_norm"], second["num_skipped"]) == (None, None, 2)
    assert (third["loss"], third["num_skipped"]) == (2.0, 2)


def test_mfu_is_ideal_time_over_time_of_all_ranks(tmp_path: Path) -> None:
    with Telemetry(tmp_path, world=cpu_world(0, 2), num_steps=3) as telemetry:
        for step in (1, 2):
            telemetry.step(result(step, loss=1.0, num_labels=1, ideal_seconds=0.3), seconds=0.5)
        telemetry.log_training()
        telemetry.step(result(3, loss=1.0, num_labels=1), seconds=0.5)
        telemetry.log_training()
    known, unknown = records(tmp_path)
    assert known["mfu"] == pytest.approx(0.6 / 2 / 1.0)
    assert "mfu" not in unknown


def test_operands_go_to_a_file_of_their_own(tmp_path: Path) -> None:
    operands = (operand(), operand(operand="dy", amax=math.inf, num_values=4))
    with Telemetry(tmp_path, world=cpu_world(), num_steps=2) as telemetry:
        telemetry.record_operands(1, ())
        assert not (tmp_path / "fp8.jsonl").exists()
        telemetry.record_operands(2, operands)
    first, second = records(tmp_path, "fp8.jsonl")
    assert first == {
        "step": 2,
        "module": "stack.layers.0.input.uvqk",
        "operand": "x",
        "amax": 3.5,
        "scale": 128.0,
        "underflow_percent": 0.5,
        "saturated_percent": 1.5,
    }
    assert second["amax"] is None
    assert (second["operand"], second["underflow_percent"]) == ("dy", 25.0)


def test_a_resumed_run_takes_back_later_operands(tmp_path: Path) -> None:
    with Telemetry(tmp_path, world=cpu_world(), num_steps=4) as telemetry:
        for step in (2, 4):
            telemetry.record_operands(step, [operand()])
    with Telemetry(tmp_path, world=cpu_world(), num_steps=4, first_step=3):
        pass
    assert [record["step"] for record in records(tmp_path, "fp8.jsonl")] == [2]
