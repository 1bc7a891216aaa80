"""Watches that steps end: tells where a slow one stands, ends a process whose step never does.

When one rank hangs, the others wait for it in a collective. So each rank that is late writes the
stacks of all its threads; the one that is not in a collective is the one to look at.
"""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)

STACKS_NAME = "stacks"

# The collectives' own timeout comes first: its error says more.
_GRACE_SECONDS = 30.0


class StallWatch:
    """A thread that looks at the clock of the present step; a context manager that ends it.

    Args:
        folder: run folder; stacks go to stacks/rank-N.txt in it.
        rank: of this process.
        slow_seconds: a step that takes longer is told, once.
        end_seconds: of any wait between ranks; a step that takes so long, and a grace period, ends
            this process with status 1.
    """

    def __init__(self, folder: Path, *, rank: int, slow_seconds: float, end_seconds: float) -> None:
        self._path = folder / STACKS_NAME / f"rank-{rank}.txt"
        self._rank = rank
        self._slow_seconds = slow_seconds
        self._end_seconds = end_seconds + _GRACE_SECONDS
        self._present: tuple[int, float] | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around one step."""
        self._present = (number, time.monotonic())
        try:
            yield
        finally:
            self._present = None

    def _watch(self) -> None:
        told = 0
        while not self._is_over.wait(min(1.0, self._slow_seconds / 4)):
            present = self._present
            if present is None:
                continue
            step, begin = present
            seconds = time.monotonic() - begin
            if seconds > self._slow_seconds and step != told:
                told = step
                self._tell(step, seconds)
            if seconds > self._end_seconds:
                self._tell(step, seconds)
                logger.error(
                    "rank %d: step %d has not ended within TrainerArgs."
                    "process_group_timeout_seconds and %.0f seconds: the process ends; resume from "
                    "the last checkpoint, or allow more time",
                    self._rank,
                    step,
                    _GRACE_SECONDS,
                )
                logging.shutdown()
                os._exit(1)

    def _tell(self, step: int, seconds: float) -> None:
        try:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"step {step}, after {seconds:.1f} seconds\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.write("\n")
        except OSError as error:
            logger.error("rank %d: no stacks of step %d: %s", self._rank, step, error)
            return
        logger.warning(
            "rank %d: step %d has taken %.1f seconds (TrainerArgs.slow_step_seconds = %g); where "
            "its threads stand is in %s",
            self._rank,
            step,
            seconds,
            self._slow_seconds,
            self._path,
        )
