"""The trainer: from settings to a finished run folder."""

import itertools
import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from configs.loader import experiment_to_gin
from configs.schema import ExperimentArgs
from data.loader import Datasets
from model.build import build_model
from modules.linear.engine import LinearEngine
from modules.linear.recipe import LinearRecipe
from training.checkpoint import (
    Checkpointer,
    adopt,
    best_of,
    checkpoint_name,
    load_weights,
    read_state,
)
from training.distributed import World, from_main
from training.early_stopping import early_stopping
from training.evaluate import build_evaluator
from training.flops import ideal_seconds_of
from training.folds import FOLDS, fold_loader, open_datasets
from training.fp8_step import weights_held
from training.grid import make_grid
from training.nonfinite import SkipBudget
from training.optimizer import RunOptimizer, fuse_table_optimizer, resolve_table_optimizer
from training.pipeline import Pipeline, Segment, build_pipeline
from training.precision import fp8_autocast
from training.profile import StepProfiler
from training.restart import launchers, note_launchers
from training.run_folder import (
    checkpoint_folder,
    claim_new_folder,
    folder_to_resume_in,
    lock_folder,
    resumed_checkpoint,
)
from training.same_model import (
    check_same_data,
    check_same_model,
    check_same_objective,
    check_same_scale,
)
from training.sharding import initialize_dense, initialize_tables, shard_tables
from training.signals import EndedBySignalError, Request, SaveRequests
from training.stall_watch import StallWatch
from training.step import TrainStep
from training.telemetry import Telemetry
from training.trace import STEP_NAME

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Tools:
    """What looks at the steps of a run."""

    telemetry: Telemetry
    profiler: StepProfiler
    watch: StallWatch


class Trainer:
    """Builds data, model and optimizers of one experiment, then trains or evaluates.

    Args:
        experiment: settings, already checked.
        world: this process among those of the run.
        trains: False = only ``evaluate_checkpoint`` is wanted; there is no optimizer then.

    Raises:
        ValueError, RuntimeError, NotImplementedError: what only shows with data and hardware at
            hand; nothing has been written then.
    """

    def __init__(self, experiment: ExperimentArgs, *, world: World, trains: bool = True) -> None:
        self.experiment, self.world = experiment, world
        trainer = experiment.trainer
        self.grid = make_grid(
            experiment.parallel, world=world, timeout_seconds=trainer.process_group_timeout_seconds
        )
        self.checkpoint = resumed_checkpoint(experiment) if trainer.resume is not None else None
        self.folder = None
        if self.checkpoint is not None:
            self.folder = folder_to_resume_in(self.checkpoint, experiment)
        self.datasets = self._datasets()
        self.loaders = {
            fold: fold_loader(experiment, self.datasets, fold, world=self.grid.data)
            for fold in FOLDS
        }
        self.num_steps = self._total_steps()
        self.early_stopping = early_stopping(trainer, is_validated=self._validates())
        model, specs = build_model(
            experiment,
            self.datasets.facts,
            device_type=world.device.type,
            parallel=self.grid.tensor,
        )
        initialize_dense(model.trunk, seed=trainer.seed)  # on the CPU: the same on any device
        model.trunk.to(world.device)
        if trains:
            fuse_table_optimizer(model.tables, experiment.optimizer, device_type=world.device.type)
        self.model = shard_tables(model, specs, world=world, trainer=trainer)
        initialize_tables(
            self.model,
            seed=trainer.seed,
            std=experiment.network.embedding_init_std,
            ranks_per_host=world.local_world_size,
        )
        self.evaluator = build_evaluator(
            experiment, self.model, self.datasets, world=world, group=self.grid.data_group
        )
        if trains:
            self._prepare_training()

    def _prepare_training(self) -> None:
        experiment, world = self.experiment, self.world
        trainer = experiment.trainer
        # Replicas start equal; dropout must differ between ranks, or they repeat each other. Ranks
        # that share a model draw alike.
        torch.manual_seed(trainer.seed * 1_000_003 + self.grid.data.rank)
        self.optimizer = RunOptimizer(self.model, experiment.optimizer, num_steps=self.num_steps)
        self.checkpointer = Checkpointer(
            world=world,
            model=self.model,
            optimizer=self.optimizer,
            description={"optimizers": self._optimizers(), "datasets": self._fingerprints()},
            operative_config=experiment_to_gin(experiment),
            keep_last=trainer.ckpt_keep_last,
            timeout_seconds=trainer.process_group_timeout_seconds,
        )
        self.skips = SkipBudget.of(trainer)
        self._unrecorded: dict[str, Any] = {}
        self.first_step = self._restore()
        if self.early_stopping is not None:
            self.early_stopping.check(self.evaluate("validation", max_batches=1))

    def _optimizers(self) -> dict[str, str]:
        """Names of the optimizers whose state a checkpoint holds, by field."""
        args = self.experiment.optimizer
        tables = resolve_table_optimizer(args, self.world.device.type)
        return {
            "OptimizerArgs.optimizer_str": args.optimizer_str,
            "OptimizerArgs.sparse_optimizer_str": tables,
        }

    def _fingerprints(self) -> dict[str, str]:
        return {fold: loader.dataset.fingerprint for fold, loader in self.loaders.items()}

    def _datasets(self) -> Datasets:
        return open_datasets(self.experiment, world=self.grid.data)

    def _total_steps(self) -> int:
        trainer = self.experiment.trainer
        limits = [trainer.max_train_iters] if trainer.max_train_iters is not None else []
        if trainer.num_epochs is not None:
            limits.append(trainer.num_epochs * self.loaders["train"].num_batches)
        return min(limits)

    def _restore(self) -> int:
        """Loads what resume or ckpt_load_dir name; returns the number of steps done."""
        weights = self.experiment.trainer.ckpt_load_dir
        if self.checkpoint is None:
            if weights is not None:
                check_same_model(Path(weights), self.experiment)
                load_weights(self.model, Path(weights))
                logger.info("weights of %s", weights)
            return 0
        check_same_model(self.checkpoint, self.experiment)
        check_same_objective(self.checkpoint, self.experiment)
        state = read_state(self.checkpoint)
        for field, name in self._optimizers().items():
            if state["optimizers"][field] != name:
                raise ValueError(
                    f"{field} must be {state['optimizers'][field]!r} as in {self.checkpoint} to "
                    f"resume, got {name!r}; keep it, or start a new run from the weights with "
                    "TrainerArgs.ckpt_load_dir"
                )
        if state["step"] > self.num_steps:
            no_limit = self.experiment.trainer.max_train_iters is None
            limit = "num_epochs" if no_limit else "max_train_iters"
            raise ValueError(
                f"TrainerArgs.{limit} must allow at least {state['step']} steps, which "
                f"{self.checkpoint} has behind it, got {self.num_steps} steps in all "
                f"({self.loaders['train'].num_batches} an epoch); raise it"
            )
        self.loaders["train"].load_state_dict(state["data"])
        if self.early_stopping is not None:
            self.early_stopping.load_state_dict(state.get("early_stopping"))
            self._check_best(self.checkpoint)
        self.skips.num_skipped = state.get("num_skipped", 0)
        self._unrecorded = state.get("telemetry", {})
        self.checkpointer.load(self.checkpoint)
        logger.info("resumed %s after step %d", self.checkpoint, state["step"])
        return int(state["step"])

    def _check_best(self, checkpoint: Path) -> None:
        """The best checkpoint is wanted at the end: that it is gone is better told now."""
        assert self.early_stopping is not None
        step = self.early_stopping.best_step
        if step is None:
            return
        try:
            read_state(checkpoint.parent / checkpoint_name(step))
        except ValueError as error:
            raise ValueError(
                f"TrainerArgs.resume must name a checkpoint whose best one lies beside it, got "
                f"{checkpoint} ({error}); or set TrainerArgs.early_stopping_metric = None"
            ) from None

    def evaluate_checkpoint(self, checkpoint: Path) -> dict[str, dict[str, float]]:
        """Figures of the held-out folds under a checkpoint's weights, by fold.

        Folds that are empty, or that the weights were trained on, are left out.

        Raises:
            ValueError: the checkpoint belongs to another model or another split.
        """
        check_same_model(checkpoint, self.experiment)
        check_same_scale(checkpoint, self.experiment)
        check_same_data(checkpoint, self.experiment)
        for fold, saved in read_state(checkpoint)["datasets"].items():
            if fold != "train" and saved != self._fingerprints()[fold]:
                logger.warning(
                    "the %s fold holds other samples than when %s was saved", fold, checkpoint
                )
        load_weights(self.model, checkpoint)
        folds = (["validation"] if self._validates() else []) + ["test"]
        return {fold: self.evaluate(fold) for fold in folds}

    def evaluate(self, fold: str, *, max_batches: int | None = None) -> dict[str, float]:
        """Loss and metrics of "validation" or "test" with the present weights."""
        precision = self.experiment.precision
        recipe = LinearRecipe.from_args(precision) if precision.fp8_eval else None
        # Without gradients: a library that scales when its region is left then lets scales be.
        engines = [one for one in self.model.modules() if isinstance(one, LinearEngine)]
        with torch.no_grad(), fp8_autocast(recipe), weights_held(engines):
            return self.evaluator(self.loaders[fold], max_batches=max_batches)

    def fit(self, requests: SaveRequests | None = None) -> dict[str, float]:
        """Trains to the last step, saves, and returns the figures of the test fold.

        With early stopping they are those of the best weights, which the model then holds, and
        ``best_step`` is one of them.

        Args:
            requests: to save, or to save and end, between steps.

        Raises:
            EndedBySignalError: it was asked to end; a checkpoint is written.
            NonFiniteError: at a step that is not finite, before it changed anything: the first, or
                with ``nonfinite_policy = "skip"`` the first after the budget.
            CheckpointError: a checkpoint could not be written.
            RuntimeError: the run folder cannot be used.
        """
        trainer = self.experiment.trainer
        step = self._train_step(requests)
        pipeline = build_pipeline(
            trainer.pipeline_type,
            step,
            model=self.model,
            optimizer=self.optimizer,
            device=self.world.device,
        )
        self.model.train()
        with ExitStack() as stack:
            stack.callback(self.checkpointer.close)
            folder = self._open_folder(stack)
            tools = self._tools(folder, stack)
            for last_step, segment in self._segments(step):
                request = self._run_segment(segment, pipeline, step, tools)
                if step.num_steps != last_step and not request:
                    raise RuntimeError(
                        f"the data ended after step {step.num_steps}, where batches up to step "
                        f"{last_step} were due; a data set must not raise StopIteration"
                    )
                pipeline.detach()
                self._after_segment(step.num_steps, tools.telemetry, request)
            return self._finish(step.num_steps, tools.telemetry)

    def _tools(self, folder: Path, stack: ExitStack) -> "_Tools":
        trainer = self.experiment.trainer
        telemetry = Telemetry(
            folder,
            world=self.world,
            num_steps=self.first_step if self._has_stopped else self.num_steps,
            first_step=self.first_step,
            names_best=self.early_stopping is not None,
            state=self._unrecorded,
        )
        profiler = StepProfiler(trainer, folder, world=self.world, first_step=self.first_step)
        watch = StallWatch(
            folder,
            rank=self.world.rank,
            slow_seconds=trainer.slow_step_seconds,
            end_seconds=trainer.process_group_timeout_seconds,
        )
        return _Tools(
            telemetry=stack.enter_context(telemetry),
            profiler=stack.enter_context(profiler),
            watch=stack.enter_context(watch),
        )

    def _train_step(self, requests: SaveRequests | None = None) -> TrainStep:
        return TrainStep(
            self.model.module,
            self.optimizer,
            clip_grad=self.experiment.optimizer.clip_grad,
            num_parts=self.experiment.trainer.gradient_accumulation_steps,
            num_steps=self.first_step,
            budget=self.skips,
            fp8_watch_interval=self.experiment.precision.fp8_log_interval,
            ideal_seconds=ideal_seconds_of(
                self.model.module.trunk, self.experiment, device=self.world.device
            ),
            grid=self.grid,
            requests=requests,
        )

    def _run_segment(
        self, segment: Segment, pipeline: Pipeline, step: TrainStep, tools: "_Tools"
    ) -> Request:
        """Runs the segment's steps; returns what a signal asked for, which cuts it short."""
        asked = Request.NONE
        while True:
            with record_function(STEP_NAME), tools.watch.step(step.num_steps + 1):
                begin = time.perf_counter()
                try:
                    result = pipeline.progress(segment)
                except StopIteration:
                    return asked
                tools.telemetry.step(result, seconds=time.perf_counter() - begin)
            tools.telemetry.record_operands(result.step, step.fp8_operands)
            tools.profiler.step(result.step)
            is_last = result.step == self.num_steps
            if result.step % self.experiment.trainer.log_interval == 0 or is_last:
                tools.telemetry.log_training()
            if result.request:
                asked = max(asked, result.request)
                segment.cut()

    def _segments(self, step: TrainStep) -> Iterator[tuple[int, Segment]]:
        """Last step and batches up to the next evaluation, checkpoint or epoch end, repeatedly.

        The pipeline drains between segments: what was fetched was trained on.
        """
        loader = self.loaders["train"]
        while (done := step.num_steps) < self.num_steps and not self._has_stopped:
            epoch, first_batch = loader.position
            if first_batch == loader.num_batches:
                epoch, first_batch = epoch + 1, 0
            size = min(
                loader.num_batches - first_batch,
                self.num_steps - done,
                *(interval - done % interval for interval in self._intervals()),
            )
            yield done + size, Segment(itertools.islice(loader.epoch(epoch, first_batch), size))

    def _intervals(self) -> list[int]:
        trainer = self.experiment.trainer
        evaluations = [trainer.eval_interval] if self._validates() else []
        return evaluations + ([trainer.ckpt_save_interval] if trainer.ckpt_save_interval else [])

    @property
    def _has_stopped(self) -> bool:
        return self.early_stopping is not None and self.early_stopping.is_over

    def _after_segment(self, step: int, telemetry: Telemetry, request: Request) -> None:
        """Validates and saves where that is due after ``step``, or asked for.

        Raises:
            EndedBySignalError: the run was asked to end before its last step.
        """
        trainer = self.experiment.trainer
        interval = trainer.ckpt_save_interval
        is_best = self._validate(step, telemetry)
        is_last = step == self.num_steps or self._has_stopped
        ends = request is Request.SAVE_AND_END and not is_last
        kept = "TrainerArgs.ckpt_save_interval = 0 keeps no checkpoint"
        if interval != 0 and (is_best or is_last or request or (interval and step % interval == 0)):
            waits = is_last or ends or not trainer.ckpt_in_background
            saved = self._save(step, telemetry, waits=waits)
            kept = f"all of it is in {saved}, go on with --resume {saved}"
        elif request:
            logger.warning("nothing is saved: %s", kept)
        if ends:
            raise EndedBySignalError(
                f"ended by SIGTERM after step {step} of {self.num_steps}: {kept}"
            )

    def _validate(self, step: int, telemetry: Telemetry) -> bool:
        """Evaluates the validation fold where that is due; whether it was the best so far.

        After the last step the final figures do that, unless those weights are still to be
        compared with the best ones.
        """
        trainer, stopping = self.experiment.trainer, self.early_stopping
        is_regular = step % trainer.eval_interval == 0
        is_due = stopping is not None if step == self.num_steps else is_regular
        if not (is_due and self._validates()):
            return False
        figures = self.evaluate("validation", max_batches=trainer.max_eval_iters)
        telemetry.record(step, "validation", figures)
        if stopping is None:
            return False
        # One rank decides: on mixed hardware figures may differ in their last digit.
        value = figures.get(stopping.metric, math.nan)
        return stopping.update(step, from_main(value, world=self.world), counts=is_regular)

    def _save(self, step: int, telemetry: Telemetry, *, waits: bool) -> Path:
        assert self.folder is not None
        stopping = self.early_stopping
        return self.checkpointer.save(
            checkpoint_folder(self.experiment, self.folder),
            step,
            run=self.folder,
            data_state=self.loaders["train"].state_dict(),
            further={
                "early_stopping": None if stopping is None else stopping.state_dict(),
                "num_skipped": self.skips.num_skipped,
                "telemetry": telemetry.state_dict(),
            },
            in_background=not waits,
        )

    def _validates(self) -> bool:
        """Validation events that are trained on measure nothing."""
        trained_on = getattr(self.experiment.dataset, "train_on_validation", False)
        return self.loaders["validation"].num_samples > 0 and not trained_on

    def _finish(self, step: int, telemetry: Telemetry) -> dict[str, float]:
        """The final figures, over the whole folds, of the last or the best weights."""
        telemetry.log_training()
        self.checkpointer.wait()
        best = self._load_best(step)
        if self._validates():
            telemetry.record(step, "validation", self.evaluate("validation") | best)
        figures = self.evaluate("test") | best
        telemetry.record(step, "test", figures)
        return figures

    def _load_best(self, step: int) -> dict[str, float]:
        """Puts the best weights in place of those after ``step``; names their step."""
        if self.early_stopping is None or self.early_stopping.best_step is None:
            return {}
        assert self.folder is not None
        best = self.early_stopping.best_step
        if best != step:
            folder = checkpoint_folder(self.experiment, self.folder)
            load_weights(self.model, folder / checkpoint_name(best))
        logger.info("final figures are those of step %d: %s", best, self.early_stopping)
        return {"best_step": best}

    def _adopt_best(self, folder: Path) -> None:
        """Copies the best checkpoint so far to where this run saves, if that is elsewhere."""
        if self.checkpoint is None or self.early_stopping is None:
            return
        name = best_of({"early_stopping": self.early_stopping.state_dict()})
        here = checkpoint_folder(self.experiment, folder)
        if name is not None and not (here / name).exists():
            adopt(self.checkpoint.parent / name, here, run=folder)

    def _open_folder(self, stack: ExitStack) -> Path:
        """The run folder, made and locked by rank 0, known to all."""
        outcome: list[tuple[str, str]] = [("", "")]
        names = launchers(world=self.world)
        if self.world.is_main:
            try:
                if self.folder is None:
                    folder, lock = claim_new_folder(self.experiment)
                else:
                    folder, lock = self.folder, lock_folder(self.folder)
                stack.enter_context(lock)
                (folder / "operative_config.gin").write_text(
                    experiment_to_gin(self.experiment), encoding="utf-8"
                )
                self._adopt_best(folder)
                note_launchers(folder, names)
                outcome = [(str(folder), "")]
            except (OSError, RuntimeError, ValueError) as error:
                outcome = [("", str(error))]
        dist.broadcast_object_list(outcome)
        chosen, failure = outcome[0]
        if failure:
            raise RuntimeError(f"the run folder cannot be used: {failure}")
        self.folder = Path(chosen)
        return self.folder
