"""The soak in its short form: one kill of a rank, damaged files, and what its table says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import soak_faults
from benchmarks.soak import Row, report, run
from benchmarks.soak_faults import FAULTS, newest_whole
from tests.support.commands import run_command


def test_a_short_soak_survives(tmp_path: Path) -> None:
    """`kill` compares records and final checkpoint with a run that nobody disturbed."""
    table = tmp_path / "table.md"
    command = [sys.executable, "benchmarks/soak.py", "--folder", str(tmp_path / "soak")]
    command += ["--steps", "40", "--report", str(table)]
    faults = ["kill=1", "file cut or missing=3", "data damaged=3"]
    result = run_command([*command, "--faults", *faults], timeout_seconds=280)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert result.processes_left == 0
    text = table.read_text()
    assert "| kill | 1 | 1 |" in text
    assert "| data damaged | 3 | 3 |" in text


def test_a_fault_that_is_not_survived_is_counted_and_named() -> None:
    def lost(soak: object, tries: int) -> list[float]:
        raise AssertionError("a checkpoint is gone")

    FAULTS["lost"] = lost
    try:
        row = run(None, "lost", 2)  # type: ignore[arg-type]
    finally:
        del FAULTS["lost"]
    assert (row.tries, row.survived) == (2, 0)
    text = report({"lost": row, "kept": Row(tries=1, survived=1, seconds=[2.0])}, command="c",
                  commit="abc", machine="m")  # fmt: skip
    assert "| lost | 2 | 0 | - | - |" in text
    assert "| kept | 1 | 1 | 2.0 | 2.0 |" in text
    assert "- lost: AssertionError: a checkpoint is gone" in text


def test_a_checkpoint_that_the_job_has_dropped_meanwhile_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = tmp_path / "step-1", tmp_path / "step-2"
    newer.mkdir()
    found = iter([older, newer])

    def read(checkpoint: Path) -> dict[str, torch.Tensor]:
        if checkpoint == older:
            raise FileNotFoundError(checkpoint)
        return {"weight": torch.ones(1)}

    monkeypatch.setattr(soak_faults, "latest_checkpoint", lambda folder: next(found))
    monkeypatch.setattr(soak_faults, "tensors", read)
    assert newest_whole(tmp_path) == newer
    older.mkdir()
    monkeypatch.setattr(soak_faults, "latest_checkpoint", lambda folder: older)
    with pytest.raises(FileNotFoundError):
        newest_whole(tmp_path)
