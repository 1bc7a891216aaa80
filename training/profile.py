"""Profiler traces of a range of steps."""

import logging
from pathlib import Path
from types import TracebackType
from typing import Self

from torch.profiler import ProfilerActivity, profile

from configs.schema import TrainerArgs
from training.distributed import World

logger = logging.getLogger(__name__)


class StepProfiler:
    """Traces steps profile_step_start .. profile_step_end - 1 to ``<run>/profile/rank<r>.json``.

    A context manager around training; does nothing unless ``TrainerArgs.profile`` is set. The
    trace opens in Perfetto or chrome://tracing; `training.trace` counts in it.
    """

    def __init__(
        self, trainer: TrainerArgs, folder: Path, *, world: World, first_step: int = 0
    ) -> None:
        self._trainer = trainer
        self._path = folder / "profile" / f"rank{world.rank}.json"
        self._is_cuda = world.device.type == "cuda"
        self._first_step = first_step
        self._profile: profile | None = None

    def __enter__(self) -> Self:
        self.step(self._first_step)
        return self

    def step(self, num_steps: int) -> None:
        """Starts or ends the trace after ``num_steps`` steps of the run are done."""
        start, end = self._trainer.profile_step_start, self._trainer.profile_step_end
        is_inside = self._trainer.profile and start <= num_steps + 1 < end
        if is_inside and self._profile is None:
            activities = [ProfilerActivity.CPU]
            if self._is_cuda:
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
        elif not is_inside:
            self._write()

    def _write(self) -> None:
        if self._profile is None:
            return
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
        self._profile = None
        logger.info("profiler trace written to %s", self._path)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._write()
