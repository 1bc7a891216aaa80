"""What a run tells: metrics.jsonl, fp8.jsonl on request, TensorBoard, and the terminal.

Only rank 0 writes.
"""

import dataclasses
import json
import logging
import math
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from modules.linear.watch import OperandFigures
from training.distributed import World
from training.step import StepResult

logger = logging.getLogger(__name__)

# One console for log lines and progress bar, or they write over each other.
_CONSOLE = Console(stderr=True)

# The figures that come first after step and split, in this order (DESIGN.md section 7).
_LEADING = ("loss", "auc", "gauc", "ne", "logloss")
# And those that come last: counts, not qualities.
_TRAILING = ("num_events", "best_step")


def set_up_logging(*, is_main: bool) -> None:
    """Log lines of rank 0 at INFO, of other ranks at WARNING; libraries only warn."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    if _CONSOLE.is_terminal:
        handler = RichHandler(console=_CONSOLE, show_path=False, show_level=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in ("configs", "data", "ops", "modules", "model", "training"):
        logging.getLogger(package).setLevel(logging.INFO if is_main else logging.WARNING)
    # Its advice on tracing functions is for the authors of TorchRec, not for a user.
    for library in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(library).setLevel(logging.ERROR)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: allocated on the GPU, or resident for a CPU process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclasses.dataclass(kw_only=True)
class _Interval:
    """What the next training record will say of the steps since the last one."""

    num_steps: int = 0
    num_taken: int = 0
    loss_sum: float = 0.0
    num_labels: int = 0
    num_tokens: int = 0
    num_samples: int = 0
    ideal_seconds: float = 0.0
    seconds: float = 0.0
    last_step: int = 0
    learning_rate: float = 0.0
    grad_norm: float | None = None
    num_skipped: int = 0

    def add(self, result: StepResult, *, seconds: float) -> None:
        self.num_steps += 1
        self.num_tokens += result.num_tokens
        self.num_samples += result.num_samples
        self.ideal_seconds += result.ideal_seconds
        self.seconds += seconds
        self.last_step = result.step
        self.learning_rate = result.learning_rate
        self.num_skipped = result.num_skipped
        if not result.is_skipped:
            self.num_taken += 1
            self.loss_sum += result.loss * result.num_labels
            self.num_labels += result.num_labels
            self.grad_norm = result.grad_norm


class Telemetry:
    """Records of a run; a context manager that closes its files.

    Args:
        folder: run folder, which holds metrics.jsonl, fp8.jsonl where operands of FP8 linears are
            watched, and tensorboard/.
        world: only rank 0 writes; the other ranks' calls do nothing.
        num_steps: steps of the whole run, for the progress bar.
        first_step: steps already done; later records of an interrupted run are dropped, so that
            the file tells one story.
        names_best: final figures carry ``best_step``, which tells them from a validation after
            the last step.
        state: of ``state_dict`` after ``first_step``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        world: World,
        num_steps: int,
        first_step: int = 0,
        names_best: bool = False,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._world = world
        self._num_steps = num_steps
        self._folder = folder
        self._interval = _Interval(**(state or {}))
        self._progress: Progress | None = None
        if not world.is_main:
            return
        path = folder / "metrics.jsonl"

        def is_told_again(record: Mapping[str, object]) -> bool:
            is_final = record["step"] == num_steps and record["split"] != "train"
            return is_final and (not names_best or "best_step" in record)

        _forget_records_after(path, first_step, is_told_again)
        _forget_records_after(folder / "fp8.jsonl", first_step)
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        if _CONSOLE.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=_CONSOLE,
            )
            self._task = self._progress.add_task(
                "train", total=num_steps, completed=first_step, figures=""
            )

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._world.is_main:
            self._file.close()
            self._tensorboard.close()

    def step(self, result: StepResult, *, seconds: float) -> None:
        """Takes in a training step and the wall time it took."""
        self._interval.add(result, seconds=seconds)
        if self._progress is not None:
            self._progress.update(
                self._task, completed=result.step, figures=f"loss {result.loss:.4f}"
            )

    def log_training(self) -> None:
        """Writes a training record over the steps since the last one; nothing if there are none.

        mfu is there where the device's peak is known (`training.flops`), num_skipped once a step
        of the run was skipped.
        """
        done = self._interval
        if done.num_steps == 0:
            return
        seconds = max(done.seconds, 1e-9)
        figures = {
            "loss": done.loss_sum / max(done.num_labels, 1) if done.num_taken else math.nan,
            "tokens_per_s": done.num_tokens / seconds,
            "samples_per_s": done.num_samples / seconds,
            "lr": done.learning_rate,
            "grad_norm": math.nan if done.grad_norm is None else done.grad_norm,
            "peak_mem_bytes": peak_memory_bytes(self._world.device),
        }
        if done.ideal_seconds > 0:
            figures["mfu"] = done.ideal_seconds / self._world.world_size / seconds
        if done.num_skipped > 0:
            figures["num_skipped"] = done.num_skipped
        self._interval = _Interval()
        self.record(done.last_step, "train", figures)

    def state_dict(self) -> dict[str, Any]:
        """The steps that no record tells of yet, plain numbers: a checkpoint between two records
        must not cost the next one half of its steps."""
        return dataclasses.asdict(self._interval)

    def record_operands(self, step: int, operands: Sequence[OperandFigures]) -> None:
        """Writes a line to fp8.jsonl for each operand of each FP8 linear, and to TensorBoard."""
        if not operands or not self._world.is_main:
            return
        with (self._folder / "fp8.jsonl").open("a", encoding="utf-8") as file:
            for one in operands:
                values = {
                    "amax": one.amax,
                    "scale": one.scale,
                    "underflow_percent": one.underflow_percent,
                    "saturated_percent": one.saturated_percent,
                }
                names = {"step": step, "module": one.module, "operand": one.operand}
                file.write(to_json(names | values) + "\n")
                for key, value in values.items():
                    self._tensorboard.add_scalar(
                        f"fp8_{key}/{one.module}.{one.operand}", value, step
                    )

    def record(self, step: int, split: str, figures: Mapping[str, float]) -> None:
        """Writes one record to metrics.jsonl, TensorBoard and the log.

        NaN and infinite figures (an AUC without both labels, say) become null in the file.
        """
        if not self._world.is_main:
            return
        values = {key: figures[key] for key in sorted(figures, key=_place)}
        self._file.write(to_json({"step": step, "split": split} | values) + "\n")
        for key, value in values.items():
            self._tensorboard.add_scalar(f"{split}/{key}", value, step)
        shown = "  ".join(f"{key} {_short(value)}" for key, value in values.items())
        logger.info("step %d/%d %s  %s", step, self._num_steps, split, shown)


def _place(key: str) -> int:
    """Rank of a figure in a record; those of one rank keep the order they come in."""
    if key in _LEADING:
        return _LEADING.index(key)
    return len(_LEADING) + (1 + _TRAILING.index(key) if key in _TRAILING else 0)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def to_json(figures: Mapping[str, object]) -> str:
    """One line of JSON; NaN and infinity, which JSON does not have, become null."""
    return json.dumps(
        {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in figures.items()
        }
    )


def _forget_records_after(
    path: Path,
    last_step: int,
    is_told_again: Callable[[Mapping[str, object]], bool] = lambda record: False,
) -> None:
    """Takes back what a resumed run is going to write again."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = []
    for line in lines:
        if not line.endswith("\n"):
            break  # cut short by a crash
        record = json.loads(line)
        if record["step"] <= last_step and not is_told_again(record):
            kept.append(line)
    aside = path.with_suffix(".aside")
    aside.write_text("".join(kept), encoding="utf-8")
    aside.replace(path)
