"""Where a run's files go: runs/<name>/, never over an earlier run."""

import itertools
from pathlib import Path

from configs.schema import ExperimentArgs
from training.checkpoint import latest_checkpoint


def new_run_folder(experiment: ExperimentArgs) -> Path:
    """The folder asked for, or the first of its -2, -3, ... that is not in use."""
    wanted = Path(experiment.output_dir)
    return next(path for path in _numbered(wanted) if not path.exists() or not any(path.iterdir()))


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
    wanted = Path(experiment.output_dir)
    runs = list(itertools.takewhile(lambda path: path.exists(), _numbered(wanted)))
    for run in reversed(runs):
        found = latest_checkpoint(checkpoint_folder(experiment, run))
        if found is not None:
            return found
    raise ValueError(
        f"TrainerArgs.resume = 'latest' needs a complete checkpoint in {wanted}/checkpoints, got "
        "none; start without resume, or name a checkpoint folder"
    )


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in, None where it lies outside of one."""
    run = checkpoint.resolve().parent.parent
    return run if (run / "metrics.jsonl").exists() else None


def checkpoint_folder(experiment: ExperimentArgs, run: Path) -> Path:
    """Where the run's checkpoints go."""
    asked = experiment.trainer.ckpt_save_dir
    return run / "checkpoints" if asked is None else Path(asked)


def _numbered(wanted: Path) -> itertools.chain[Path]:
    return itertools.chain(
        [wanted], (wanted.with_name(f"{wanted.name}-{n}") for n in itertools.count(2))
    )
