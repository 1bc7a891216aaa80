"""Checkpoints: everything a run needs to go on exactly, published whole or not at all.

    checkpoints/step-00000700/
        *.distcp, .metadata     weights, optimizers, FP8 scales, RNG, and their index
        operative_config.gin    the settings of the run that wrote it
        state.json              format version, step, data position, versions, sizes of the files
    checkpoints/best            with early stopping: a link to the best one so far

A checkpoint is written beside its place under a temporary name and renamed when it is complete.
state.json comes last and lists the other files with their sizes and checksums: what is cut or
missing later is noticed when a checkpoint is looked for, what was changed when it is loaded.

A save in the background copies what it writes to memory of the host first and writes from a thread;
there is never more than one such copy, since a save waits for the one before. Its ranks talk in a
process group of their own, out of the way of the training.
"""

import json
import logging
import os
import platform
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torchrec.distributed import DistributedModelParallel

from training.checkpoint_files import TensorWriter
from training.checkpoint_tensors import as_whole, cause_of, fp8_tensors, load_with_fp8
from training.distributed import World
from training.optimizer import RunOptimizer

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
CONFIG_NAME = "operative_config.gin"
BEST_NAME = "best"
CHECKPOINTS_NAME = "checkpoints"
_STATE_NAME = "state.json"
_BLOCK_BYTES = 2**22


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; earlier ones are untouched."""


def latest_checkpoint(folder: Path, *, run: Path | None = None) -> Path | None:
    """The complete checkpoint with the highest step in ``folder``, None if there is none.

    Damaged ones are passed over with a warning that says why, those of another run than ``run``
    in silence.
    """
    for path in reversed(_checkpoints(folder)):
        try:
            state = read_state(path)
        except ValueError as error:
            logger.warning("passing over %s", error)
        else:
            if run is None or run_of(path, state) == run.resolve():
                return path
    return None


def run_of(checkpoint: Path, state: Mapping[str, Any]) -> Path:
    """The run folder that a checkpoint belongs to: the one it lies in, wherever that was moved or
    copied to; for one in ckpt_save_dir the folder that wrote it."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == CHECKPOINTS_NAME else Path(state["run"])


def _checkpoints(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def checkpoint_name(step: int) -> str:
    """Name of the folder of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def best_of(state: Mapping[str, Any]) -> str | None:
    """Name of the best checkpoint at the time a state was saved; None without early stopping."""
    step = (state.get("early_stopping") or {}).get("best_step")
    return None if step is None else checkpoint_name(step)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The host-side state of a checkpoint, once all its files are there in full length.

    Raises:
        ValueError: not a complete checkpoint, or of a format this version does not read.
    """
    way_out = "name another folder checkpoints/step-N of a run, or resume = 'latest'"
    path = checkpoint / _STATE_NAME
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{checkpoint}: not a complete checkpoint ({_STATE_NAME}: {error}); {way_out}"
        ) from None
    if not (isinstance(state, dict) and isinstance(state.get("files", {}), dict)):
        raise ValueError(f"{checkpoint}: not a complete checkpoint ({_STATE_NAME}); {way_out}")
    if state.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version must be {FORMAT_VERSION}, got "
            f"{state.get('format_version')!r}; load it with the version of Octet that wrote it"
        )
    for name, num_bytes in state["files"].items():
        file = checkpoint / name
        found = file.stat().st_size if file.exists() else "no file"
        if found != num_bytes:
            raise ValueError(
                f"{checkpoint}: not a complete checkpoint ({name} must have {num_bytes} bytes, "
                f"got {found}); {way_out}"
            )
    return state


class Checkpointer:
    """Saves and loads the state of one run.

    Args:
        model, optimizer: what is saved.
        description: further host-side facts for state.json (run folder, data sets, optimizers).
        operative_config: text of the run's settings, kept in every checkpoint.
        keep_last: number of newest checkpoints that stay, None for all. The best ones that they
            name stay beside them.
        timeout_seconds: longest wait for another rank while saving.
    """

    def __init__(
        self,
        *,
        world: World,
        model: DistributedModelParallel,
        optimizer: RunOptimizer,
        description: Mapping[str, Any],
        operative_config: str,
        keep_last: int | None,
        timeout_seconds: float = 600.0,
    ) -> None:
        self._world = world
        self._model = model
        self._optimizer = optimizer
        self._description = dict(description)
        self._operative_config = operative_config
        self._keep_last = keep_last
        timeout = timedelta(seconds=timeout_seconds)
        is_alone = world.world_size == 1
        self._group = None if is_alone else dist.new_group(backend="gloo", timeout=timeout)
        # On a GPU the copy keeps its page-locked memory: to allocate it takes longer than to fill.
        self._stager = BlockingAsyncStager(cache_staged_state_dict=world.device.type == "cuda")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(
        self,
        folder: Path,
        step: int,
        *,
        run: Path,
        data_state: Mapping[str, Any],
        further: Mapping[str, Any] | None = None,
        in_background: bool = False,
    ) -> Path:
        """Writes ``folder/step-N`` and drops the oldest ones there; collective.

        Args:
            run: the run folder it belongs to.
            data_state: position of the training data.
            further: host-side state of this step, plain numbers and text.
            in_background: come back once everything is copied; ``wait`` says how it went.

        Raises:
            CheckpointError: it, or the one before, could not be written; the same on every rank.
        """
        self.wait()
        final = folder / checkpoint_name(step)
        state = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "run": str(run.resolve()),
            "data": dict(data_state),
            **(further or {}),
            "world_size": self._world.world_size,
            "device_type": self._world.device.type,
            "versions": _versions(),
            **self._description,
        }
        tensors = as_whole(self._model, self._tensors()) | fp8_tensors(self._model)
        if in_background:
            copied = self._stager.stage(tensors)
            self._pending = self._writer.submit(self._write, copied, final, state)
        else:
            self._write(tensors, final, state)
        return final

    def wait(self) -> None:
        """Until the save in the background, if there is one, is published; collective.

        Raises:
            CheckpointError: it could not be written, the same on every rank.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Ends the thread; a save that it is at is finished first, and only told if it fails."""
        try:
            self.wait()
        except RuntimeError as error:
            logger.error("the last save failed: %s", error)
        self._writer.shutdown()

    def _write(self, tensors: dict[str, Any], final: Path, state: dict[str, Any]) -> None:
        """Writes aside and publishes; in the background the part that does not touch the model."""
        aside = final.with_name(f".writing-{final.name}")
        try:
            self._on_main(lambda: _prepare(final.parent, aside), final)
            writer = TensorWriter(aside)
            self._agreed(
                lambda: dcp.save(
                    tensors,
                    storage_writer=writer,
                    process_group=self._group,
                    # alone, plans would still travel, by way of the training's group and device
                    no_dist=self._group is None,
                ),
                final,
            )
            state["crc32"] = self._crc32_of_all(writer)
            self._on_main(lambda: self._publish(aside, final, state), final)
        except CheckpointError:
            if self._world.is_main:
                shutil.rmtree(aside, ignore_errors=True)
            raise

    def _on_main(self, action: Callable[[], object], final: Path) -> None:
        self._agreed(action if self._world.is_main else lambda: None, final)

    def _agreed(self, action: Callable[[], object], final: Path) -> None:
        """Runs a part of a save; if it fails on one rank, it fails on all of them."""
        failure = ""
        try:
            action()
        except (OSError, CheckpointException) as error:
            failure = cause_of(error)
        failures: list[str] = [failure]
        if self._world.world_size > 1:
            failures = [""] * self._world.world_size
            dist.all_gather_object(failures, failure, group=self._group)
        cause = next((text for text in failures if text), None)
        if cause is not None:
            newest = latest_checkpoint(final.parent)
            raise CheckpointError(
                f"{final} could not be written ({cause}); free space or set "
                f"TrainerArgs.ckpt_save_dir, then resume from "
                f"{newest or 'the start: there is no earlier checkpoint'}"
            )

    def _crc32_of_all(self, writer: TensorWriter) -> dict[str, int]:
        """What each rank's writer tells of its file, together."""
        of_ranks = [writer.crc32]
        if self._world.world_size > 1:
            of_ranks = [{} for _ in range(self._world.world_size)]
            dist.all_gather_object(of_ranks, writer.crc32, group=self._group)
        return {name: value for one in of_ranks for name, value in one.items()}

    def _publish(self, aside: Path, final: Path, state: dict[str, Any]) -> None:
        (aside / CONFIG_NAME).write_text(self._operative_config, encoding="utf-8")
        files = sorted(aside.iterdir())
        state["files"] = {path.name: path.stat().st_size for path in files}
        told = state["crc32"]
        state["crc32"] = {path.name: told.get(path.name) or _crc32(path) for path in files}
        (aside / _STATE_NAME).write_text(json.dumps(state, indent=1), encoding="utf-8")
        # The other files were synced as they were written. After a power failure a name must not
        # be there without what it stands for.
        for path in (aside / CONFIG_NAME, aside / _STATE_NAME, aside):
            _sync(path)
        replaced = final.with_name(f".replaced-{final.name}")
        if final.exists():
            final.rename(replaced)
        aside.rename(final)
        _sync(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        _link_best(final.parent, best_of(state))
        if self._keep_last is not None:
            self._prune(final, state)
        logger.info("saved %s", final)

    def _prune(self, final: Path, state: Mapping[str, Any]) -> None:
        """Drops the run's older checkpoints, but never one that a kept one calls the best: should
        the newest be damaged, the one before it is still whole."""
        assert self._keep_last is not None
        run = run_of(final, state)
        states = {path: _state_of_run(path, run) for path in _checkpoints(final.parent)}
        own = [path for path, found in states.items() if path != final and found is not None]
        old = own[: max(0, len(own) - self._keep_last + 1)]
        best = {best_of(found) for path, found in states.items() if path not in old and found}
        for path in old:
            if path.name not in best:
                # By one renaming: a kill in between must not leave half of it under its name.
                dropped = path.with_name(f".dropped-{path.name}")
                path.rename(dropped)
                shutil.rmtree(dropped, ignore_errors=True)

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Restores weights, optimizers and this rank's RNG stream; returns the host-side state.

        A run on another number of processes, or another kind of device, gets fresh RNG streams
        and says so.

        Raises:
            ValueError: see ``read_state``; RuntimeError: files that are damaged or do not fit.
        """
        state = read_state(checkpoint)
        _check_contents(checkpoint, state)
        tensors = self._tensors()
        here = (self._world.world_size, self._world.device.type)
        if (state["world_size"], state["device_type"]) != here:
            del tensors["rng"]
            logger.warning(
                "%s was written by %d processes on %s, this run has %d on %s: dropout streams "
                "start afresh",
                checkpoint,
                state["world_size"],
                state["device_type"],
                *here,
            )
        load_with_fp8(self._model, tensors, checkpoint)
        self._optimizer.load_dense_state(tensors["dense_optimizer"])
        if "rng" in tensors:
            _set_rng(tensors["rng"][str(self._world.rank)], self._world.device)
        return state

    def _tensors(self) -> dict[str, Any]:
        """What a load fills: the live weights and table optimizers, copies of the rest."""
        return {
            "model": self._model.state_dict(),
            "table_optimizer": self._optimizer.tables.state_dict()["state"],
            "dense_optimizer": self._optimizer.dense_state(),
            "rng": {str(self._world.rank): _rng(self._world.device)},
        }


def load_weights(model: DistributedModelParallel, checkpoint: Path) -> None:
    """Restores tables, dense weights and FP8 scales, for evaluation or a warm start.

    Raises:
        ValueError: see ``read_state``; RuntimeError: a weight is missing or has another shape.
    """
    _check_contents(checkpoint, read_state(checkpoint))
    load_with_fp8(model, {"model": model.state_dict()}, checkpoint)


def adopt(checkpoint: Path, folder: Path, *, run: Path) -> None:
    """Copies a checkpoint into ``folder`` as one of another run, published whole.

    Raises:
        ValueError: it is not complete. OSError: it could not be written.
    """
    state = read_state(checkpoint) | {"run": str(run.resolve())}
    aside = folder / f".writing-{checkpoint.name}"
    _prepare(folder, aside)
    shutil.copytree(checkpoint, aside, dirs_exist_ok=True)
    (aside / _STATE_NAME).write_text(json.dumps(state, indent=1), encoding="utf-8")
    aside.rename(folder / checkpoint.name)
    _link_best(folder, best_of(state))


def _link_best(folder: Path, name: str | None) -> None:
    """Points ``folder/best`` at a checkpoint beside it; where there are no links, goes without."""
    link, aside = folder / BEST_NAME, folder / f".writing-{BEST_NAME}"
    try:
        if name is not None:
            aside.unlink(missing_ok=True)
            aside.symlink_to(name)
            aside.replace(link)
        elif link.is_symlink():
            link.unlink()
    except OSError as error:
        logger.warning("%s cannot be made a link to %s (%s)", link, name, error)


def _state_of_run(checkpoint: Path, run: Path) -> dict[str, Any] | None:
    """The state of a checkpoint of a run folder, None for one that is damaged or another's."""
    try:
        state = read_state(checkpoint)
    except ValueError:
        return None
    return state if run_of(checkpoint, state) == run else None


def _prepare(folder: Path, aside: Path) -> None:
    """Makes the folder to write into; puts right what a save that was killed has left."""
    for leftover in (*folder.glob(".writing-step-*"), *folder.glob(".dropped-step-*")):
        shutil.rmtree(leftover, ignore_errors=True)
    for replaced in folder.glob(".replaced-step-*"):
        final = folder / replaced.name.removeprefix(".replaced-")
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(final)
    aside.mkdir(parents=True)


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return value


def _check_contents(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Holds the files against their checksums, each rank its share; collective.

    Raises:
        RuntimeError: naming a file that was changed since it was written; on every rank.
    """
    expected: dict[str, int] = state.get("crc32", {})  # not in checkpoints of before
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = sorted(expected)[rank::world_size]
    changed = [name for name in own if _crc32(checkpoint / name) != expected[name]]
    of_ranks: list[list[str]] = [changed]
    if world_size > 1:
        of_ranks = [[] for _ in range(world_size)]
        dist.all_gather_object(of_ranks, changed)
    if found := [name for names in of_ranks for name in names]:
        raise RuntimeError(
            f"{checkpoint} cannot be loaded (the contents of {found[0]} are not what was written); "
            "name another checkpoint"
        )


def _sync(path: Path) -> None:
    """Puts a file, or a folder's list of names, on permanent storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _versions() -> dict[str, str]:
    """Of what wrote a checkpoint: for a reader who finds that figures have changed since."""
    packages = ("torch", "torchrec", "numpy")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


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
