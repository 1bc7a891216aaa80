"""The trainer: from settings to a finished run folder."""

import itertools
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from configs.loader import experiment_to_gin
from configs.schema import ExperimentArgs
from data.batch import SequenceBatch
from data.loader import Datasets, SequenceLoader, build_datasets
from model.build import build_ranking_model
from training.checkpoint import Checkpointer, load_weights, read_state
from training.distributed import World
from training.evaluate import evaluate
from training.optimizer import RunOptimizer, fuse_table_optimizer
from training.pipeline import build_pipeline
from training.profile import StepProfiler
from training.run_folder import checkpoint_folder, new_run_folder, resumed_checkpoint, run_of
from training.same_model import check_same_model
from training.sharding import initialize_dense, initialize_tables, shard_tables
from training.startup import check_output_folder
from training.step import TrainStep
from training.telemetry import Telemetry

logger = logging.getLogger(__name__)


class Trainer:
    """Builds data, model and optimizers of one experiment, then trains or evaluates.

    Args:
        experiment: settings, already checked.
        world: this process among those of the run.

    Raises:
        ValueError, RuntimeError, NotImplementedError: what only shows with data and hardware at
            hand; nothing has been written then.
    """

    def __init__(self, experiment: ExperimentArgs, *, world: World) -> None:
        self.experiment, self.world = experiment, world
        trainer = experiment.trainer
        self.checkpoint = resumed_checkpoint(experiment) if trainer.resume is not None else None
        folder = run_of(self.checkpoint) if self.checkpoint is not None else None
        self.folder = folder or _agreed_folder(experiment, world)
        check_output_folder(self.folder)
        if self.checkpoint is not None:
            read_state(self.checkpoint)
        self.datasets = self._datasets()
        self.loaders = {fold: self._loader(fold) for fold in ("train", "validation", "test")}
        self.num_steps = self._total_steps()
        model, specs = build_ranking_model(
            experiment, self.datasets.facts, device_type=world.device.type
        )
        initialize_dense(model.trunk, seed=trainer.seed)  # on the CPU: the same on any device
        model.trunk.to(world.device)
        fuse_table_optimizer(model.tables, experiment.optimizer, device_type=world.device.type)
        self.model = shard_tables(model, specs, world=world, batch_size=trainer.train_batch_size)
        initialize_tables(self.model, seed=trainer.seed, scale=0.02)
        # Replicas start equal; dropout must differ between ranks, or they repeat each other.
        torch.manual_seed(trainer.seed * 1_000_003 + world.rank)
        self.optimizer = RunOptimizer(self.model, experiment.optimizer, num_steps=self.num_steps)
        self.checkpointer = Checkpointer(
            checkpoint_folder(experiment, self.folder),
            world=world,
            model=self.model,
            optimizer=self.optimizer,
            operative_config=experiment_to_gin(experiment),
            keep_last=trainer.ckpt_keep_last,
        )
        self.first_step = self._restore()

    def _datasets(self) -> Datasets:
        experiment = self.experiment
        assert experiment.ranking is not None
        return build_datasets(
            experiment.dataset,
            task=experiment.task,
            seed=experiment.trainer.seed,
            global_batch_size=experiment.trainer.train_batch_size * self.world.world_size,
            num_tasks=experiment.ranking.num_tasks,
            num_classes=max(2, experiment.ranking.prediction_head_arch[-1]),
        )

    def _loader(self, fold: str) -> SequenceLoader:
        trainer, dataset = self.experiment.trainer, self.experiment.dataset
        is_train = fold == "train"
        return SequenceLoader(
            getattr(self.datasets, fold),
            batch_size=trainer.train_batch_size if is_train else trainer.eval_batch_size,
            shuffle=is_train and getattr(dataset, "shuffle", False),
            seed=trainer.seed,
            rank=self.world.rank,
            world_size=self.world.world_size,
            num_workers=getattr(dataset, "num_workers", 0),
            pin_memory=self.world.device.type == "cuda",
        )

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
                self.load_weights(Path(weights))
            return 0
        check_same_model(self.checkpoint, self.experiment)
        state = self.checkpointer.load(self.checkpoint)
        self.loaders["train"].load_state_dict(state["data"])
        logger.info("resumed %s after step %d", self.checkpoint, state["step"])
        return int(state["step"])

    def load_weights(self, checkpoint: Path) -> None:
        """Takes tables and dense weights from a checkpoint of the same model."""
        check_same_model(checkpoint, self.experiment)
        load_weights(self.model, checkpoint)
        logger.info("weights of %s", checkpoint)

    def evaluate(self, fold: str) -> dict[str, float]:
        """Loss and metrics of "validation" or "test" with the present weights."""
        limit = self.experiment.trainer.max_eval_iters
        return evaluate(self.model.module, self.loaders[fold], world=self.world, max_batches=limit)

    def fit(self) -> dict[str, float]:
        """Trains to the last step, saves, and returns the figures of the test fold.

        Raises:
            NonFiniteError: at the first step that is not finite, before it changed anything.
        """
        trainer = self.experiment.trainer
        step = TrainStep(
            self.model.module,
            self.optimizer,
            clip_grad=self.experiment.optimizer.clip_grad,
            num_steps=self.first_step,
        )
        pipeline = build_pipeline(
            trainer.pipeline_type,
            step,
            model=self.model,
            optimizer=self.optimizer,
            device=self.world.device,
        )
        self._open_folder()
        self.model.train()
        telemetry = Telemetry(
            self.folder, world=self.world, num_steps=self.num_steps, first_step=self.first_step
        )
        profiler = StepProfiler(trainer, self.folder, world=self.world, first_step=self.first_step)
        with telemetry, profiler:
            for segment in self._segments():
                while True:
                    begin = time.perf_counter()
                    try:
                        result = pipeline.progress(segment)
                    except StopIteration:
                        break
                    telemetry.step(result, seconds=time.perf_counter() - begin)
                    profiler.step(result.step)
                    if result.step % trainer.log_interval == 0 or result.step == self.num_steps:
                        telemetry.log_training()
                pipeline.detach()
                self._between_segments(step.num_steps, telemetry)
            return self._finish(telemetry)

    def _segments(self) -> Iterator[Iterator[SequenceBatch]]:
        """Batches up to the next evaluation, checkpoint or epoch end, again and again.

        The pipeline drains between segments: what was fetched was trained on.
        """
        loader = self.loaders["train"]
        done = self.first_step
        while done < self.num_steps:
            epoch, first_batch = loader.position
            if first_batch == loader.num_batches:
                epoch, first_batch = epoch + 1, 0
            size = min(
                loader.num_batches - first_batch,
                self.num_steps - done,
                *(interval - done % interval for interval in self._intervals()),
            )
            done += size
            yield itertools.islice(loader.epoch(epoch, first_batch), size)

    def _intervals(self) -> list[int]:
        trainer = self.experiment.trainer
        return [trainer.eval_interval] + (
            [trainer.ckpt_save_interval] if trainer.ckpt_save_interval else []
        )

    def _between_segments(self, step: int, telemetry: Telemetry) -> None:
        trainer = self.experiment.trainer
        if step == self.num_steps:
            return
        if step % trainer.eval_interval == 0 and self._validates():
            telemetry.record(step, "validation", self.evaluate("validation"))
        if trainer.ckpt_save_interval and step % trainer.ckpt_save_interval == 0:
            self.checkpointer.save(step, self.loaders["train"].state_dict())

    def _validates(self) -> bool:
        """Validation events that are trained on measure nothing."""
        trained_on = getattr(self.experiment.dataset, "train_on_validation", False)
        return self.loaders["validation"].num_samples > 0 and not trained_on

    def _finish(self, telemetry: Telemetry) -> dict[str, float]:
        if self.experiment.trainer.ckpt_save_interval != 0:
            self.checkpointer.save(self.num_steps, self.loaders["train"].state_dict())
        if self._validates():
            telemetry.record(self.num_steps, "validation", self.evaluate("validation"))
        figures = self.evaluate("test")
        telemetry.record(self.num_steps, "test", figures)
        return figures

    def _open_folder(self) -> None:
        if self.world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "operative_config.gin").write_text(
                experiment_to_gin(self.experiment), encoding="utf-8"
            )
        dist.barrier()


def _agreed_folder(experiment: ExperimentArgs, world: World) -> Path:
    """The new run folder as rank 0 sees it: ranks may look at different moments."""
    choice: list[str] = [str(new_run_folder(experiment))] if world.is_main else [""]
    dist.broadcast_object_list(choice)
    return Path(choice[0])
