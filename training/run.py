"""What the entry scripts do once the settings are read: check, build, train or evaluate."""

import dataclasses
import logging
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from configs.schema import ExperimentArgs
from training.signals import INTERRUPTED, TERMINATED, EndedBySignalError, save_requests
from training.startup import (
    check_built,
    check_checkpoints,
    check_data,
    check_folders,
    check_machine,
)

logger = logging.getLogger(__name__)


def run(experiment: ExperimentArgs, *, evaluate: str | None = None) -> None:
    """Trains, or evaluates the checkpoint ``evaluate``, and prints the figures as a JSON line.

    Exits with one line on stderr and status 1 for what this machine, its data or this version
    cannot do. Settings were refused before; an error of ours keeps its traceback.
    """
    with _told_in_one_line():
        check_built(experiment)
        check_checkpoints(experiment, evaluate=evaluate)
        check_data(experiment)
        if evaluate is None:
            check_folders(experiment)
    # Deprecations inside torch and torchrec are for their authors, not for a user.
    warnings.simplefilter("ignore", FutureWarning)
    # A single process saves without collectives, as it means to (`training.checkpoint`).
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    # torch takes seconds to import: everything that can fail without it has been checked.
    from torch.distributed.elastic.multiprocessing.errors import record

    from training.determinism import fixed_order_of_sums
    from training.distributed import process_group
    from training.restart import resumed_after_restart
    from training.telemetry import set_up_logging
    from training.trainer import Trainer

    @record
    def launched() -> None:
        with ExitStack() as stack:
            with _told_in_one_line():
                stack.enter_context(fixed_order_of_sums(experiment.trainer.deterministic))
                timeout_seconds = experiment.trainer.process_group_timeout_seconds
                world = stack.enter_context(process_group(timeout_seconds=timeout_seconds))
                set_up_logging(is_main=world.is_main)
                checked = _without_start(experiment) if evaluate is not None else experiment
                check_machine(checked, device_type=world.device.type)
                if evaluate is None:
                    checked = resumed_after_restart(checked, world=world)
                trainer = Trainer(checked, world=world, trains=evaluate is None)
                if evaluate is not None:
                    for fold, figures in trainer.evaluate_checkpoint(Path(evaluate)).items():
                        _tell(world.is_main, experiment, figures, split=fold, run=evaluate)
                    return
            limit_seconds = experiment.trainer.ckpt_signal_seconds
            with _told_in_one_line(), save_requests(limit_seconds=limit_seconds) as requests:
                figures = trainer.fit(requests)
            _tell(world.is_main, experiment, figures, split="test", run=str(trainer.folder))

    launched()


def _without_start(experiment: ExperimentArgs) -> ExperimentArgs:
    """The experiment without what it would have started from, and what only training needs:
    evaluation names its weights, and runs in FP8 only with ``fp8_eval``."""
    trainer = dataclasses.replace(
        experiment.trainer,
        resume=None,
        ckpt_load_dir=None,
        early_stopping_metric=None,
        pipeline_type="native",
    )
    precision = experiment.precision
    if not precision.fp8_eval:
        precision = dataclasses.replace(precision, mixed_precision_dtype=None)
    return dataclasses.replace(experiment, trainer=trainer, precision=precision)


def _tell(
    is_main: bool, experiment: ExperimentArgs, figures: Mapping[str, float], *, split: str, run: str
) -> None:
    """The metrics asked for as a log line, all of them as a line of JSON on standard output."""
    if not is_main:
        return
    from training.telemetry import to_json

    task = experiment.ranking or experiment.retrieval
    assert task is not None
    shown = "  ".join(
        f"{name} {figures.get(name.lower(), math.nan):.4f}" for name in task.eval_metrics
    )
    logger.info("%s: %s  (%s)", split, shown, run)
    sys.stdout.write(to_json({"split": split, "run": run, **figures}) + "\n")
    sys.stdout.flush()


@contextmanager
def _told_in_one_line() -> Iterator[None]:
    """Turns what we refuse, and what the system refuses us, into one line and exit status 1."""
    try:
        yield
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(
                "error: interrupted; go on from the newest checkpoint, if one was saved, with "
                "--resume latest (SIGTERM saves first, SIGUSR1 saves and goes on)\n"
            )
        raise SystemExit(INTERRUPTED) from None
    except EndedBySignalError as ended:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"{ended}\n")
        raise SystemExit(TERMINATED) from None
    except (ValueError, RuntimeError, OSError) as error:
        if not isinstance(error, OSError) and not _is_raised_by_us(error):
            raise  # a fault inside torch, say: its traceback is what helps
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            # All ranks refuse alike: rank 0 speaks first, and torchrun then ends the others.
            time.sleep(2.0)
        sys.stderr.write(f"error: {f'rank {rank}: ' if rank != '0' else ''}{error}\n")
        raise SystemExit(1) from None


def _is_raised_by_us(error: BaseException) -> bool:
    """Whether the innermost frame is this project's: then the message is meant for the user."""
    frames = traceback.extract_tb(error.__traceback__)
    source = Path(frames[-1].filename).resolve()
    root = Path(__file__).resolve().parents[1]
    return source.is_relative_to(root) and "site-packages" not in source.parts
