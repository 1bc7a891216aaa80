"""A step that takes too long is told, with stacks; one that never ends, ends the process."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import run_command
from training.stall_watch import StallWatch


def sleep_in_a_step() -> None:
    time.sleep(0.6)


def test_a_slow_step_leaves_its_stack_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with StallWatch(tmp_path, rank=3, slow_seconds=0.1, end_seconds=60) as watch:
        with watch.step(1):
            pass
        time.sleep(0.3)  # between steps nothing is late
        with watch.step(2):
            sleep_in_a_step()
    text = (tmp_path / "stacks/rank-3.txt").read_text()
    assert text.startswith("step 2, after 0.")
    assert "in sleep_in_a_step" in text
    assert text.count("after 0.") == 1
    assert "rank 3: step 2 has taken" in caplog.text
    assert "TrainerArgs.slow_step_seconds = 0.1" in caplog.text


def test_fast_steps_leave_nothing(tmp_path: Path) -> None:
    with StallWatch(tmp_path, rank=0, slow_seconds=5.0, end_seconds=60) as watch:
        for number in range(3):
            with watch.step(number):
                pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "stacks").write_text("a file")
    with (
        StallWatch(tmp_path, rank=0, slow_seconds=0.1, end_seconds=60) as watch,
        watch.step(1),
    ):
        time.sleep(0.4)
    assert "no stacks of step 1" in caplog.text


ENDLESS = """
import sys, time
from pathlib import Path
import training.stall_watch as stall_watch
stall_watch._GRACE_SECONDS = 0.0
with stall_watch.StallWatch(Path(sys.argv[1]), rank=0, slow_seconds=0.1, end_seconds=0.3) as watch:
    with watch.step(7):
        time.sleep(60)
"""


def test_a_step_that_never_ends_ends_the_process(tmp_path: Path) -> None:
    result = run_command([sys.executable, "-c", ENDLESS, str(tmp_path)], timeout_seconds=30)
    assert result.returncode == 1
    assert "step 7 has not ended within TrainerArgs.process_group_timeout_seconds" in result.stderr
    assert (tmp_path / "stacks/rank-0.txt").exists()
