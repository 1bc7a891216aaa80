"""After torchrun --max-restarts has started the processes again: the job goes on by itself.

A run folder names the launchers that trained in it (torchrun's agents, one a host). Processes that
a launcher started again look for the newest folder that names theirs, and resume its newest
checkpoint. Without one they start as the first did.
"""

import dataclasses
import json
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from configs.schema import ExperimentArgs
from training.checkpoint import latest_checkpoint, read_state, run_of
from training.distributed import World
from training.run_folder import checkpoint_folder, run_folders
from training.startup import is_restarted

logger = logging.getLogger(__name__)

_LAUNCHERS_NAME = ".launchers.json"


def launchers(*, world: World) -> list[str]:
    """Those of all ranks, sorted; collective. An agent outlives the processes that it restarts."""
    agent = os.getppid()
    identity = [os.environ.get("TORCHELASTIC_RUN_ID", "none"), socket.gethostname(), str(agent)]
    with suppress(OSError):  # where there is /proc: number and host may come again, these do not
        identity.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        identity.append(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19])
    found = [""] * world.world_size
    dist.all_gather_object(found, " ".join(identity))
    return sorted(set(found))


def note_launchers(folder: Path, names: list[str]) -> None:
    """Leaves them in a run folder that is this run's."""
    (folder / _LAUNCHERS_NAME).write_text(json.dumps(names), encoding="utf-8")


def resumed_after_restart(experiment: ExperimentArgs, *, world: World) -> ExperimentArgs:
    """The experiment, set to resume where this job was before its launcher restarted it.

    Unchanged in processes that were not restarted. Collective; every rank gets rank 0's answer.
    """
    if not is_restarted():
        return experiment
    names = launchers(world=world)
    answer: list[str | None] = [None]
    if world.is_main:
        found = _checkpoint_of(experiment, set(names))
        answer = [None if found is None else str(found)]
        logger.warning(
            "restarted by the launcher: %s",
            "the job has no checkpoint yet, so it starts anew"
            if found is None
            else f"going on from {found}",
        )
    dist.broadcast_object_list(answer)
    if answer[0] is None:
        return experiment
    trainer = dataclasses.replace(experiment.trainer, resume=answer[0], ckpt_load_dir=None)
    return dataclasses.replace(experiment, trainer=trainer)


def _checkpoint_of(experiment: ExperimentArgs, names: set[str]) -> Path | None:
    """The newest complete checkpoint of the newest run folder that one of the launchers is of."""
    runs = run_folders(experiment)
    resume = experiment.trainer.resume
    if resume is not None and resume != "latest":
        # It may have been dropped since; what lies beside it knows the run.
        beside = latest_checkpoint(Path(resume).resolve().parent)
        runs += [] if beside is None else [run_of(beside, read_state(beside))]
    for run in reversed(runs):
        note = run / _LAUNCHERS_NAME
        if not note.is_file() or names.isdisjoint(json.loads(note.read_text(encoding="utf-8"))):
            continue
        found = latest_checkpoint(checkpoint_folder(experiment, run), run=run)
        if found is not None:
            return found
    return None
