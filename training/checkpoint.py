"""Checkpoints: everything a run needs to go on exactly, published whole or not at all.

    checkpoints/step-00000700/
        state.json              format version, step, data position, world size, versions
        operative_config.gin    the settings of the run that wrote it
        *.distcp, .metadata     torch.distributed.checkpoint: weights, optimizers, RNG streams

A checkpoint is written beside its place under a temporary name and renamed when it is complete, so
a folder that carries its name can be loaded.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed import DistributedModelParallel

from training.distributed import World
from training.optimizer import RunOptimizer

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
CONFIG_NAME = "operative_config.gin"
_STATE_NAME = "state.json"


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step below ``folder``, None if there is none."""
    complete = [path.parent for path in folder.glob(f"step-*/{_STATE_NAME}")]
    return max(complete, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The host-side state of a checkpoint.

    Raises:
        ValueError: not a complete checkpoint, or of a format this version does not read.
    """
    path = checkpoint / _STATE_NAME
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{checkpoint} is not a complete checkpoint ({_STATE_NAME}: {error}); name a folder "
            "checkpoints/step-N of a run, or resume = 'latest'"
        ) from None
    if state.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version must be {FORMAT_VERSION}, got "
            f"{state.get('format_version')!r}; load it with the version of Octet that wrote it"
        )
    return state


class Checkpointer:
    """Saves and loads the state of one run.

    Args:
        folder: where ``step-N`` folders go.
        model, optimizer: what is saved.
        operative_config: text of the run's settings, kept in every checkpoint.
        keep_last: number of newest checkpoints that stay, None for all.
    """

    def __init__(
        self,
        folder: Path,
        *,
        world: World,
        model: DistributedModelParallel,
        optimizer: RunOptimizer,
        operative_config: str,
        keep_last: int | None,
    ) -> None:
        self._folder = folder
        self._world = world
        self._model = model
        self._optimizer = optimizer
        self._operative_config = operative_config
        self._keep_last = keep_last

    def save(self, step: int, data_state: Mapping[str, Any]) -> Path:
        """Writes the checkpoint of ``step`` and drops the oldest ones; collective.

        Raises:
            RuntimeError: it could not be written; earlier checkpoints are untouched.
        """
        final = self._folder / f"step-{step:08d}"
        aside = self._folder / f".writing-{final.name}"
        failure = ""
        try:
            if self._world.is_main:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
            dist.barrier()
            dcp.save(self._tensors(), checkpoint_id=str(aside), no_dist=False)
            if self._world.is_main:
                self._publish(aside, final, step, data_state)
        except (OSError, CheckpointException) as error:
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        failures: list[str] = [""] * self._world.world_size
        dist.all_gather_object(failures, failure)
        if any(failures):
            if self._world.is_main:
                shutil.rmtree(aside, ignore_errors=True)
            first = next(text for text in failures if text)
            raise RuntimeError(
                f"the checkpoint of step {step} could not be written to {self._folder} ({first}); "
                f"the newest complete one is {latest_checkpoint(self._folder)}"
            )
        return final

    def _publish(self, aside: Path, final: Path, step: int, data_state: Mapping[str, Any]) -> None:
        state = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "data": dict(data_state),
            "world_size": self._world.world_size,
            "torch_version": torch.__version__,
        }
        (aside / CONFIG_NAME).write_text(self._operative_config, encoding="utf-8")
        (aside / _STATE_NAME).write_text(json.dumps(state, indent=1), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        if self._keep_last is not None:
            for old in sorted(self._folder.glob("step-*"))[: -self._keep_last]:
                shutil.rmtree(old, ignore_errors=True)
        logger.info("saved %s", final)

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Restores weights, optimizers and this rank's RNG stream; returns the host-side state.

        A run on another number of processes gets fresh RNG streams for the ranks that the
        checkpoint does not know, and says so.

        Raises:
            ValueError: see ``read_state``; RuntimeError: files that are damaged or do not fit.
        """
        state = read_state(checkpoint)
        tensors = self._tensors()
        if state["world_size"] != self._world.world_size:
            del tensors["rng"]
            logger.warning(
                "%s was written by %d processes, this run has %d: dropout streams start afresh",
                checkpoint,
                state["world_size"],
                self._world.world_size,
            )
        _load(tensors, checkpoint)
        self._optimizer.load_dense_state(tensors["dense_optimizer"])
        if "rng" in tensors:
            _set_rng(tensors["rng"][str(self._world.rank)], self._world.device)
        return state

    def _tensors(self) -> dict[str, Any]:
        """All tensors of the run. Those of weights and table optimizers are the live ones."""
        return {
            "model": self._model.state_dict(),
            "table_optimizer": self._optimizer.tables.state_dict()["state"],
            "dense_optimizer": self._optimizer.dense_state(),
            "rng": {str(self._world.rank): _rng(self._world.device)},
        }


def load_weights(model: DistributedModelParallel, checkpoint: Path) -> None:
    """Restores tables and dense weights only, for evaluation or a warm start.

    Raises:
        ValueError: see ``read_state``; RuntimeError: a weight is missing or has another shape.
    """
    read_state(checkpoint)
    _load({"model": model.state_dict()}, checkpoint)


def _load(tensors: dict[str, Any], checkpoint: Path) -> None:
    try:
        dcp.load(tensors, checkpoint_id=str(checkpoint))
    except (OSError, CheckpointException, RuntimeError, ValueError, EOFError) as error:
        reason = str(error).strip().splitlines()
        raise RuntimeError(
            f"{checkpoint} cannot be loaded ({reason[-1] if reason else type(error).__name__}); "
            "its files are damaged or belong to another model; name another checkpoint"
        ) from error


def _rng(device: torch.device) -> torch.Tensor:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _set_rng(state: torch.Tensor, device: torch.device) -> None:
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[size:].clone(), device)
