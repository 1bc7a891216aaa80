"""Run folders: one run each, nothing of another run lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from configs.schema import ExperimentArgs
from tests.support.experiments import synthetic_experiment
from training.distributed import World
from training.run_folder import claim_new_folder, lock_folder
from training.trainer import Trainer


def fit(folder: Path, world: World, **trainer: Any) -> Trainer:
    experiment = synthetic_experiment(str(folder), trainer={"max_train_iters": 2} | trainer)
    made = Trainer(experiment, world=world)
    made.fit()
    return made


def lines(folder: Path) -> list[tuple[int, str]]:
    text = (folder / "metrics.jsonl").read_text()
    return [(record["step"], record["split"]) for record in map(json.loads, text.splitlines())]


def claim(experiment: ExperimentArgs) -> str:
    folder, lock = claim_new_folder(experiment)
    lock.close()
    return folder.name


def test_claiming_takes_the_first_free_number(tmp_path: Path) -> None:
    experiment = synthetic_experiment(str(tmp_path / "run"))
    assert claim(experiment) == claim(experiment) == "run", "nothing was written in it"
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    (tmp_path / "run-2").write_text("a file is in the way")
    assert claim(experiment) == "run-3"


def test_two_runs_that_start_together_get_two_folders(tmp_path: Path) -> None:
    experiment = synthetic_experiment(str(tmp_path / "run"))
    first, first_lock = claim_new_folder(experiment)
    second, second_lock = claim_new_folder(experiment)
    assert (first.name, second.name) == ("run", "run-2")
    first_lock.close()
    second_lock.close()


def test_a_name_whose_checkpoints_lie_elsewhere_is_taken(tmp_path: Path) -> None:
    shared = tmp_path / "checkpoints"
    (shared / "run" / "step-00000009").mkdir(parents=True)
    experiment = synthetic_experiment(str(tmp_path / "run"), trainer={"ckpt_save_dir": str(shared)})
    assert claim(experiment) == "run-2"


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    with pytest.raises(RuntimeError, match="one run at a time"):
        lock_folder(tmp_path)
    lock.close()
    lock_folder(tmp_path).close()


def test_runs_that_share_a_checkpoint_folder_keep_apart(tmp_path: Path, world: World) -> None:
    shared = str(tmp_path / "checkpoints")
    long = fit(tmp_path / "a", world, ckpt_save_dir=shared, max_train_iters=4)
    short = fit(tmp_path / "b", world, ckpt_save_dir=shared, max_train_iters=2)
    assert sorted(str(p.relative_to(shared)) for p in Path(shared).glob("*/*")) == [
        "a/step-00000004",
        "b/step-00000002",
    ]
    resumed = fit(tmp_path / "b", world, ckpt_save_dir=shared, max_train_iters=3, resume="latest")
    assert resumed.first_step == 2
    assert resumed.folder == short.folder.resolve()
    assert long.folder is not None


def test_going_back_to_an_older_checkpoint_starts_a_new_folder(
    tmp_path: Path, world: World
) -> None:
    fit(tmp_path / "run", world, max_train_iters=4, ckpt_save_interval=2)
    before = lines(tmp_path / "run")
    older = str(tmp_path / "run/checkpoints/step-00000002")
    branch = fit(tmp_path / "run", world, max_train_iters=4, resume=older)
    assert branch.folder == tmp_path / "run-2"
    assert lines(tmp_path / "run") == before
    assert [step for step, split in lines(tmp_path / "run-2") if split == "train"] == [3, 4]


def test_resuming_a_finished_run_says_nothing_twice(tmp_path: Path, world: World) -> None:
    fit(tmp_path / "run", world)
    before = lines(tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step-00000002/state.json"
    written = checkpoint.stat().st_mtime_ns
    fit(tmp_path / "run", world, resume="latest")
    assert lines(tmp_path / "run") == before
    assert checkpoint.stat().st_mtime_ns == written


def test_a_moved_run_goes_on_where_it_is(tmp_path: Path, world: World) -> None:
    fit(tmp_path / "run", world)
    (tmp_path / "run").rename(tmp_path / "moved")
    resumed = fit(tmp_path / "moved", world, max_train_iters=3, resume="latest")
    assert resumed.first_step == 2
    assert resumed.folder == (tmp_path / "moved").resolve()
    assert not (tmp_path / "run").exists()


def test_resuming_a_copy_leaves_the_original_alone(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path / "run", world)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    fit(tmp_path / "run", world, max_train_iters=3, resume="latest")
    before = lines(tmp_path / "run")
    checkpoint = tmp_path / "copy/checkpoints/step-00000002"
    with caplog.at_level("WARNING"):
        branch = fit(tmp_path / "else", world, max_train_iters=4, resume=str(checkpoint))
    assert branch.folder == (tmp_path / "copy").resolve()
    assert "not in TrainerArgs.output_dir" in caplog.text and not (tmp_path / "else").exists()
    assert lines(tmp_path / "run") == before
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000003"]
