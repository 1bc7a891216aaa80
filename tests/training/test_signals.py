"""SIGTERM and SIGUSR1: agreed on by all ranks, saved between two steps, nothing lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import PROJECT_ROOT, metric_records
from tests.support.experiments import cpu_world, movielens_experiment, write_movielens
from tests.support.two_ranks import TwoRanks
from tests.training.test_checkpoint import assert_same, full_state
from training.checkpoint import latest_checkpoint
from training.distributed import World
from training.signals import EndedBySignalError, Request, SaveRequests, save_requests
from training.trainer import Trainer

DROPOUT = {"hidden_dropout": 0.2, "input_dropout": 0.1}


@pytest.fixture(scope="module")
def movielens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_movielens(tmp_path_factory.mktemp("movielens"))


class AskedAt(SaveRequests):
    """A request that arrives while a step runs, on one rank."""

    def __init__(self, step: int, request: Request, *, is_here: bool = True) -> None:
        super().__init__()
        self._calls, self._step, self._request, self._is_here = 0, step, request, is_here

    def take(self) -> Request:
        self._calls += 1
        if self._calls == self._step and self._is_here:
            self.add(self._request)
        return super().take()


def trainer_of(data: Path, folder: Path, world: World, **settings: Any) -> Trainer:
    defaults = {"max_train_iters": 9, "log_interval": 4, "train_batch_size": 8 // world.world_size}
    experiment = movielens_experiment(
        data, str(folder), trainer=defaults | settings, network=DROPOUT
    )
    return Trainer(experiment, world=world)


def steady(folder: Path) -> list[dict[str, Any]]:
    """Records without what depends on clock and memory."""
    changing = ("tokens_per_s", "samples_per_s", "peak_mem_bytes", "mfu")
    return [
        {key: value for key, value in record.items() if key not in changing}
        for record in metric_records(folder)
    ]


@pytest.mark.parametrize("pipeline_type", ["none", "native"])
def test_a_run_ended_by_a_signal_goes_on_as_if_nothing_had_been(
    movielens: Path, tmp_path: Path, world: World, pipeline_type: str
) -> None:
    """Step 3 is asked for: between two records, in mid-epoch, with batches in the pipeline."""
    straight = trainer_of(movielens, tmp_path / "straight", world, pipeline_type=pipeline_type)
    expected = straight.fit()
    ended = trainer_of(movielens, tmp_path / "run", world, pipeline_type=pipeline_type)
    with pytest.raises(EndedBySignalError, match=r"after step (3|4|5) of 9: .*--resume"):
        ended.fit(AskedAt(3, Request.SAVE_AND_END))
    resumed = trainer_of(
        movielens, tmp_path / "run", world, pipeline_type=pipeline_type, resume="latest"
    )
    assert 3 <= resumed.first_step <= 5
    assert resumed.fit() == expected
    assert steady(tmp_path / "run") == steady(tmp_path / "straight")
    assert_same(full_state(resumed), full_state(straight))


def _ask_rank_one(rank: int, world_size: int, folder: str, data: str) -> dict[str, Any]:
    trainer = trainer_of(Path(data), Path(folder), cpu_world(rank, world_size))
    asked = AskedAt(2, Request.SAVE_AND_END, is_here=rank == 1)
    with pytest.raises(EndedBySignalError) as ended:
        trainer.fit(asked)
    newest = latest_checkpoint(Path(folder) / "checkpoints")
    assert newest is not None
    return {"text": str(ended.value), "newest": newest.name, "state": full_state(trainer)}


def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    movielens: Path, tmp_path: Path, two_ranks: TwoRanks
) -> None:
    first, second = two_ranks.run(_ask_rank_one, str(tmp_path / "run"), str(movielens))
    assert first["text"] == second["text"]
    assert first["newest"] == second["newest"]
    assert_same(first["state"], second["state"])


def test_a_request_to_save_changes_nothing(movielens: Path, tmp_path: Path, world: World) -> None:
    expected = trainer_of(movielens, tmp_path / "straight", world).fit()
    asked = trainer_of(movielens, tmp_path / "asked", world)
    assert asked.fit(AskedAt(3, Request.SAVE)) == expected
    assert steady(tmp_path / "asked") == steady(tmp_path / "straight")
    steps = sorted(path.name for path in (tmp_path / "asked/checkpoints").glob("step-*"))
    assert len(steps) == 2
    assert steps[-1] == "step-00000009"


def test_where_no_checkpoint_is_kept_none_is_written(
    movielens: Path, tmp_path: Path, world: World
) -> None:
    trainer = trainer_of(movielens, tmp_path / "run", world, ckpt_save_interval=0)
    with pytest.raises(EndedBySignalError, match="ckpt_save_interval = 0 keeps no checkpoint"):
        trainer.fit(AskedAt(3, Request.SAVE_AND_END))
    assert not (tmp_path / "run/checkpoints").exists()


def test_signals_become_requests_and_handlers_go_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with save_requests(limit_seconds=60) as requests:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.take() is Request.SAVE
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.take() is Request.SAVE_AND_END
        assert requests.take() is Request.NONE
    assert signal.getsignal(signal.SIGTERM) is before


STUCK = """
import time
from training.signals import save_requests
with save_requests(limit_seconds=0.5):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_process_that_cannot_save_ends_within_the_time() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], cwd=PROJECT_ROOT, text=True, stdout=-1, stderr=-1
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        begin = time.monotonic()
        process.terminate()
        _, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 143
    assert time.monotonic() - begin < 15
    assert "TrainerArgs.ckpt_signal_seconds = 0.5" in stderr
