"""What the entry scripts do once the settings are read: check, build, train or evaluate."""

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from configs.schema import ExperimentArgs
from training.startup import check_built, check_data, check_machine


def run(experiment: ExperimentArgs, *, evaluate: str | None = None) -> None:
    """Trains, or evaluates the checkpoint ``evaluate``, and prints the figures as a JSON line.

    Exits with one line on stderr and status 1 for what this machine, its data or this version
    cannot do. Settings were refused before; an error of ours keeps its traceback.
    """
    with _told_in_one_line():
        check_built(experiment)
        check_data(experiment)
    # Deprecations inside torch and torchrec are for their authors, not for a user.
    warnings.simplefilter("ignore", FutureWarning)
    # torch takes seconds to import: everything that can fail without it has been checked.
    import torch
    from torch.distributed.elastic.multiprocessing.errors import record

    from training.distributed import process_group
    from training.step import NonFiniteError
    from training.telemetry import set_up_logging
    from training.trainer import Trainer

    @record
    def launched() -> None:
        with process_group() as world:
            set_up_logging(is_main=world.is_main)
            with _told_in_one_line():
                check_machine(
                    experiment, device_type=world.device.type, world_size=world.world_size
                )
                trainer = Trainer(experiment, world=world)
                if evaluate is not None:
                    trainer.load_weights(Path(evaluate))
            if evaluate is not None:
                for fold in ("validation", "test"):
                    _print(world.is_main, trainer.evaluate(fold), split=fold)
                return
            try:
                figures = trainer.fit()
            except NonFiniteError as error:
                sys.stderr.write(f"error: rank {world.rank}: {error}\n")
                raise SystemExit(1) from None
            _print(world.is_main, figures, split="test", run=str(trainer.folder))

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    launched()


def _print(is_main: bool, figures: Mapping[str, float], **labels: str) -> None:
    if is_main:
        sys.stdout.write(json.dumps({**labels, **figures}) + "\n")
        sys.stdout.flush()


@contextmanager
def _told_in_one_line() -> Iterator[None]:
    """Turns a refusal into one line on stderr (of rank 0) and exit status 1."""
    try:
        yield
    except (ValueError, RuntimeError, NotImplementedError) as error:
        logging.getLogger(__name__).debug("refused", exc_info=error)
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
