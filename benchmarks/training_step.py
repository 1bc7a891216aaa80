"""What a training step waits for, launches and costs: a real run of the trainer, from its trace.

    python benchmarks/training_step.py --gin-config-file movielens_ranking.gin \
        --gin-binding 'NetworkArgs.kernel_backend = "triton"'
    python benchmarks/training_step.py --gin-config-file benchmark_ranking.gin \
        --gin-binding 'NetworkArgs.dtype_str = "bfloat16"' --gin-binding ...

Two runs of `Trainer.fit` in one process and a temporary folder. The first is timed over --steps
steps after as many to warm up, then --traced steps go to a profiler trace. The second, on a GPU,
runs under torch.cuda.set_sync_debug_mode("warn"), which tells the Python line of most calls that
wait. Prints one JSON line:

    step_ms, tokens_per_s, samples_per_s    without a profiler, data loading included
    a_step          counts of a traced step, none of which logs (see `training.trace.TraceFigures`)
    *_share         of the traced steps' time; flag_wait_idle_share is what the finite flag costs
    leftovers       what waits beside the flag, by operators, over all traced steps
    python_lines    what torch warned of in the whole second run, by innermost lines of this tree

Exits with status 1 where a traced step waits for more than its flag, or copies from pageable
memory. A step of a small model is bound by its host: what the profiler costs, the shares include.
"""

import argparse
import dataclasses
import json
import logging
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.loader import load_experiment
from configs.schema import ExperimentArgs
from training.distributed import World, process_group
from training.telemetry import set_up_logging
from training.trace import TraceFigures, read_trace
from training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
_PER_STEP = (
    "num_flag_waits",
    "num_copies_to_host",
    "num_pageable_copies_to_device",
    "num_pinned_copies_to_device",
    "num_waits",
    "num_device_reads",
    "num_host_reads",
    "num_allocations",
    "num_launches",
)
_SHARES = ("flag_wait_host_share", "flag_wait_idle_share", "device_busy_share")


def main() -> None:
    """Runs, traces, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gin-config-file", default="movielens_ranking.gin")
    parser.add_argument("--gin-binding", action="append", default=[])
    parser.add_argument("--task", choices=("ranking", "retrieval"), default="ranking")
    parser.add_argument("--steps", type=int, default=50, help="timed, and before that warm-up")
    parser.add_argument("--traced", type=int, default=10, choices=range(1, 1001), metavar="1..1000")
    parser.add_argument("--keep-trace", type=Path, help="copy the trace here")
    arguments = parser.parse_args()
    experiment = load_experiment(
        arguments.gin_config_file, bindings=arguments.gin_binding, task=arguments.task
    )
    warnings.simplefilter("ignore", FutureWarning)
    with tempfile.TemporaryDirectory() as folder, process_group() as world:
        set_up_logging(is_main=True)
        run = with_steps(experiment, f"{folder}/run", arguments.steps, arguments.traced)
        trainer = Trainer(run, world=world)
        clock = Clock()
        logging.getLogger("training.telemetry").addHandler(clock)
        trainer.fit()
        trace = Path(folder) / "run" / "profile" / "rank0.json"
        if arguments.keep_trace is not None:
            arguments.keep_trace.write_bytes(trace.read_bytes())
        figures = read_trace(trace)
        line = describe(arguments, trainer, figures)
        line["step_ms"] = round(1e3 * clock.seconds(arguments.steps) / arguments.steps, 3)
        line |= speed(Path(folder) / "run" / "metrics.jsonl", 2 * arguments.steps)
        if world.device.type == "cuda":
            line["python_lines"] = python_lines(experiment, f"{folder}/again", world=world)
    print(json.dumps(line))
    if figures.leftovers:
        raise SystemExit(1)


def with_steps(experiment: ExperimentArgs, folder: str, steps: int, traced: int) -> ExperimentArgs:
    """The experiment with warm-up, timed and traced steps, and nothing between them."""
    trainer = dataclasses.replace(
        experiment.trainer,
        max_train_iters=2 * steps + traced + 1,
        num_epochs=None,
        log_interval=steps,
        eval_interval=10**9,
        max_eval_iters=1,
        ckpt_save_interval=0,
        early_stopping_metric=None,
        output_dir=folder,
        profile=traced > 0,
        profile_step_start=2 * steps + 1,
        profile_step_end=2 * steps + traced + 1,
    )
    return dataclasses.replace(experiment, trainer=trainer)


def describe(
    arguments: argparse.Namespace, trainer: Trainer, figures: TraceFigures
) -> dict[str, Any]:
    """What ran and what its trace says."""
    device = trainer.world.device
    values = dataclasses.asdict(figures)
    return {
        "gin": arguments.gin_config_file,
        "bindings": arguments.gin_binding,
        "attention": trainer.model.module.trunk.stack.config.attention_backend,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "num_traced_steps": figures.num_steps,
        "traced_step_ms": round(1e3 * figures.step_seconds, 3),
        "a_step": {name: round(values[name] / figures.num_steps, 2) for name in _PER_STEP},
        **{name: round(values[name], 4) for name in _SHARES},
        "leftovers": values["leftovers"],
    }


def speed(metrics: Path, step: int) -> dict[str, float]:
    """Throughput of the steps up to ``step``, from the run's own record of them."""
    records = [json.loads(text) for text in metrics.read_text().splitlines()]
    (timed,) = (r for r in records if r["split"] == "train" and r["step"] == step)
    return {name: timed[name] for name in ("tokens_per_s", "samples_per_s", "peak_mem_bytes")}


class Clock(logging.Handler):
    """Notes when the run told of each training record."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[int, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Takes in a line "step N/M split figures"."""
        if isinstance(record.args, tuple) and record.args[2:3] == ("train",):
            self._told[int(str(record.args[0]))] = record.created

    def seconds(self, steps: int) -> float:
        """Wall time of the second ``steps`` steps, data loading and epoch ends included."""
        return self._told[2 * steps] - self._told[steps]


def python_lines(experiment: ExperimentArgs, folder: str, *, world: World) -> dict[str, Any]:
    """Lines that torch warned of while 40 steps ran, and how often; start and end included."""
    run = with_steps(experiment, folder, 20, 0)
    trainer = Trainer(run, world=world)
    with warned() as lines:
        trainer.fit()
    return {"num_steps": run.trainer.max_train_iters, **dict(lines.most_common())}


@contextmanager
def warned() -> Iterator[Counter[str]]:
    """Collects where calls that wait come from, while torch warns of them."""
    lines: Counter[str] = Counter()

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if "synchroniz" not in str(message):
            return
        stack = [f for f in traceback.extract_stack()[:-1] if Path(f.filename).stem != "warnings"]
        ours = [frame for frame in stack if Path(frame.filename).is_relative_to(ROOT)]
        shown = [stack[-1], *(frame for frame in reversed(ours[-4:]) if frame is not stack[-1])]
        lines[" < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in shown)] += 1

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            yield lines
    finally:
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    main()
