"""Where a run's files go: runs/<name>/, never over or beside another run."""

import fcntl
import itertools
import logging
from pathlib import Path
from typing import IO

from configs.schema import ExperimentArgs
from training.checkpoint import CHECKPOINTS_NAME, latest_checkpoint, read_state, run_of

logger = logging.getLogger(__name__)

_LOCK_NAME = ".lock"


class FolderInUseError(RuntimeError):
    """Another process trains in a run folder."""


def claim_new_folder(experiment: ExperimentArgs) -> tuple[Path, IO[str]]:
    """Makes and locks the folder asked for, or the first of its -2, -3, ... that is not in use.

    The lock is what claims it: two runs that start together get two folders. A number whose
    checkpoints lie in ckpt_save_dir already is taken, too.
    """
    for path in _numbered(Path(experiment.output_dir)):
        if _is_used(path) or _is_used(checkpoint_folder(experiment, path)):
            continue
        path.mkdir(parents=True, exist_ok=True)
        try:
            lock = lock_folder(path)
        except FolderInUseError:
            continue
        if not _is_used(path):
            return path, lock
        lock.close()
    raise AssertionError("the numbers do not end")


def _is_used(path: Path) -> bool:
    if not path.is_dir():
        return path.exists()
    return any(entry.name != _LOCK_NAME for entry in path.iterdir())


def lock_folder(folder: Path) -> IO[str]:
    """Holds the folder for this process until the returned file is closed.

    Raises:
        FolderInUseError: another process trains in it. OSError: it cannot be locked at all.
    """
    lock = (folder / _LOCK_NAME).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise FolderInUseError(
            f"{folder} must be used by one run at a time, but another process trains in it; wait "
            "for it, end it, or set TrainerArgs.output_dir"
        ) from None
    except OSError:
        lock.close()
        raise
    return lock


def resumed_checkpoint(experiment: ExperimentArgs) -> Path:
    """The checkpoint that ``TrainerArgs.resume`` names.

    "latest" is the newest complete one of the last run with this name.

    Raises:
        ValueError: there is none.
    """
    resume = experiment.trainer.resume
    assert resume is not None
    if resume != "latest":
        return Path(resume)
    for run in reversed(run_folders(experiment)):
        found = latest_checkpoint(checkpoint_folder(experiment, run), run=run)
        if found is not None:
            return found
    raise ValueError(
        f"TrainerArgs.resume = 'latest' needs a complete checkpoint of a run in "
        f"{experiment.output_dir}, got none; start without resume, or name a checkpoint folder"
    )


def run_folders(experiment: ExperimentArgs) -> list[Path]:
    """The folders of all runs with this name so far, the oldest first."""
    return list(itertools.takewhile(Path.exists, _numbered(Path(experiment.output_dir))))


def folder_to_resume_in(checkpoint: Path, experiment: ExperimentArgs) -> Path | None:
    """The run folder that a checkpoint continues, None where a new one has to be made.

    It is the one where the checkpoint lies; another output_dir is told to be passed over.

    Going back to an older checkpoint starts a new folder, so that the newer ones stay what they
    are: the end of another story.
    """
    run = run_of(checkpoint, read_state(checkpoint))
    if not run.is_dir():
        return None
    newest = latest_checkpoint(checkpoint.parent)
    if newest is not None and newest.name != checkpoint.resolve().name:
        logger.warning(
            "%s is newer than %s: this run goes on in a new folder", newest, checkpoint.name
        )
        return None
    trainer = experiment.trainer
    asked = None if trainer.resume == "latest" else trainer.output_dir
    if asked is not None and Path(asked).resolve() != run.resolve():
        logger.warning(
            "the run goes on in %s, where its checkpoint lies, not in TrainerArgs.output_dir = %r",
            run,
            asked,
        )
    return run


def checkpoint_folder(experiment: ExperimentArgs, run: Path) -> Path:
    """Where the run's checkpoints go: in it, or in a folder of its name in ckpt_save_dir."""
    asked = experiment.trainer.ckpt_save_dir
    return run / CHECKPOINTS_NAME if asked is None else Path(asked) / run.name


def _numbered(wanted: Path) -> "itertools.chain[Path]":
    return itertools.chain(
        [wanted], (wanted.with_name(f"{wanted.name}-{n}") for n in itertools.count(2))
    )
