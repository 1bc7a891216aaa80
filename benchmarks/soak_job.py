"""One training job under torchrun that a soak does harm to, and what can be seen of it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

RESTARTED = "restarted by the launcher"

# A job that shows no progress for so long hangs: the start of two processes on a busy machine,
# and torchrun's patience with one that ignores SIGTERM, stay well below it.
HANG_SECONDS = 120.0

SMALL: dict[str, Any] = {
    "TrainerArgs.log_interval": 1,
    "TrainerArgs.eval_interval": 40,
    "TrainerArgs.max_eval_iters": 1,
    "TrainerArgs.ckpt_save_interval": 5,
    "TrainerArgs.process_group_timeout_seconds": 20,
    "TrainerArgs.slow_step_seconds": 5,
    "BenchmarkDatasetArgs.num_generated_batches": 20,
}


class HangError(AssertionError):
    """A job neither went on nor ended."""


class Job:
    """torchrun with an entry; a context manager that leaves no process behind.

    Args:
        folder: of the run (output_dir); the log goes beside it.
        values: settings beside ``SMALL``, by "Class.field".
        processes: ranks on this host.
        gin_file, bindings: what is trained; ``values`` come after.
        max_restarts: of torchrun.
        flags: of the entry.
        script: in place of the entry.
    """

    def __init__(
        self,
        folder: Path,
        *,
        values: Mapping[str, Any],
        processes: int = 2,
        gin_file: str = "benchmark_ranking.gin",
        bindings: tuple[str, ...] = (),
        max_restarts: int = 0,
        flags: tuple[str, ...] = (),
        script: str = "pretrain_gr_ranking.py",
    ) -> None:
        self.folder = folder
        settings = SMALL | {"TrainerArgs.output_dir": str(folder)} | dict(values)
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc_per_node={processes}", f"--max-restarts={max_restarts}", script),
            *("--gin-config-file", gin_file, *flags),
            *(f"--gin-binding={binding}" for binding in bindings),
            *(f"--gin-binding={name} = {value!r}" for name, value in settings.items()),
        ]
        self.log = folder.with_suffix(".log")
        self._seen_workers: set[int] = set()

    def __enter__(self) -> "Job":
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._output = self.log.open("a")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self.workers()
        for pid in (self.process.pid, *self._seen_workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._output.close()

    def workers(self) -> list[int]:
        """Process ids of the ranks that are there now, by local rank."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with contextlib.suppress(OSError):
            found = sorted(int(pid) for pid in path.read_text().split())
            self._seen_workers.update(found)
            return found
        return []

    def num_records(self) -> int:
        """Training records since the processes started, or started again."""
        return self.text().rpartition(RESTARTED)[2].count(" train  loss ")

    def num_restarts(self) -> int:
        """How often the processes have told that they were started again."""
        return self.text().count(RESTARTED)

    def until(self, what: str, is_so: Callable[[], bool], *, poll_seconds: float = 0.05) -> float:
        """Waits until something is so, or the job has ended; returns the seconds it took.

        Raises:
            HangError: neither happens; the ranks' stacks are in the log then.
        """
        begin = time.monotonic()
        while not is_so() and self.process.poll() is None:
            if time.monotonic() - begin > HANG_SECONDS:
                for pid in self.workers():
                    os.kill(pid, signal.SIGABRT)
                time.sleep(2.0)
                raise HangError(f"{self.folder.name}: no {what} in {HANG_SECONDS:g} s")
            time.sleep(poll_seconds)
        return time.monotonic() - begin

    def until_training(self) -> float:
        """Until the first record of the present processes."""
        return self.until("record", lambda: self.num_records() > 0)

    def until_restarted(self, num_restarts: int) -> float:
        """Until the first record after more restarts than that."""

        def is_back() -> bool:
            return self.num_restarts() > num_restarts and self.num_records() > 0

        return self.until("restart", is_back)

    def end(self) -> int:
        """Waits for the end of the job; its exit status."""
        self.until("end", lambda: False, poll_seconds=0.05)
        return self.process.wait()

    def text(self) -> str:
        """What the job has written to the terminal."""
        return self.log.read_text(errors="replace")


def records(folder: Path) -> list[dict[str, Any]]:
    """What a run's metrics.jsonl says, without what depends on the clock and on memory."""
    of_the_machine = ("tokens_per_s", "samples_per_s", "peak_mem_bytes", "mfu")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in of_the_machine}
        for line in lines
    ]
