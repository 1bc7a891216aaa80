"""Processes that run cells of scripts/compare_precision.py, each one cell after the other.

A process keeps what it imported and compiled. One that failed, or ran Transformer Engine, whose
state belongs to the process, is replaced.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from benchmarks.precision_cells import Cell

_ROOT = Path(__file__).resolve().parents[1]


class Runner:
    """A process that runs the cells it is sent."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, folder))
        self.process.start()
        theirs.close()
        self.cell: Cell | None = None
        self.begin = 0.0

    def start(self, cell: Cell) -> None:
        """Send it a cell."""
        self.cell, self.begin = cell, time.monotonic()
        self.connection.send(cell)

    def finish(self) -> tuple[Cell, str, float]:
        """Return the cell that it was sent, why it failed ("": it did not) and the seconds."""
        assert self.cell is not None
        try:
            failure = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            failure = f"exit status {self.process.exitcode}"
        cell, self.cell = self.cell, None
        if failure or "te-" in cell.linears:
            self.end()
        return cell, failure, time.monotonic() - self.begin

    def end(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.terminate()
        self.process.join(10)

    @property
    def is_alive(self) -> bool:
        """Whether it takes another cell."""
        return not self.connection.closed


def run_cells(
    cells: Sequence[Cell], folder: Path, *, num_jobs: int, deadline: float
) -> Iterator[tuple[Cell, str, float]]:
    """Yield each cell with what made it fail ("" if nothing did) and its seconds, as they end.

    Args:
        num_jobs: cells at a time; those that are to be alone run after the others.
        deadline: by `time.monotonic`; what has not ended then is ended, and yielded as failed.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    beside = [cell for cell in cells if not cell.is_alone]
    yield from _run(beside, folder, num_jobs=num_jobs, deadline=deadline)
    alone = [cell for cell in cells if cell.is_alone]
    yield from _run(alone, folder, num_jobs=1, deadline=deadline)


def _run(
    cells: Sequence[Cell], folder: Path, *, num_jobs: int, deadline: float
) -> Iterator[tuple[Cell, str, float]]:
    waiting = list(cells)
    runners: list[Runner] = []
    try:
        while waiting or any(runner.cell is not None for runner in runners):
            runners = [runner for runner in runners if runner.is_alive]
            left = deadline - time.monotonic()
            while waiting and left > 0 and (idle := _idle(runners, num_jobs, folder)) is not None:
                idle.start(waiting.pop(0))
            busy = {runner.connection: runner for runner in runners if runner.cell is not None}
            ready = connection.wait(list(busy), timeout=max(left, 0.0))
            for one in ready:
                yield busy[one].finish()  # type: ignore[index]
            if not ready and time.monotonic() >= deadline:
                break
        for runner in runners:
            if runner.cell is not None:
                yield runner.cell, "not finished in time", time.monotonic() - runner.begin
        yield from ((cell, "not started in time", 0.0) for cell in waiting)
    finally:
        for runner in runners:
            if runner.is_alive:
                runner.end()


def _idle(runners: list[Runner], num_jobs: int, folder: Path) -> Runner | None:
    """A process without a cell, a new one if there may be more; None: all are busy."""
    for runner in runners:
        if runner.cell is None and runner.is_alive:
            return runner
    if len(runners) >= num_jobs:
        return None
    runners.append(Runner(folder))
    return runners[-1]


def log_of(cell: Cell, folder: Path) -> Path:
    """Where the output of its run is."""
    return folder / f"{cell.name}.log"


def _serve(cells: Connection, folder: Path) -> None:
    from benchmarks.precision_runs import run_cell
    from training.distributed import process_group

    with process_group() as world:
        while True:
            try:
                cell = cells.recv()
            except EOFError:
                return
            failure = ""
            with log_of(cell, folder).open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            try:
                run_cell(cell, folder, world=world)
            except Exception as error:
                traceback.print_exc()
                failure = f"{type(error).__name__}: {error}"
            cells.send(failure)


__all__ = ["log_of", "run_cells"]
