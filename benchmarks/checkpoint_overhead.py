"""What checkpoints cost a training: wall time of a step without saves, and with them.

    python benchmarks/checkpoint_overhead.py --folder /tmp/overhead        # one GPU
    python benchmarks/checkpoint_overhead.py --folder /tmp/overhead --small  # tries the script

Layers of h512_128x512 (benchmarks/hstu_layer.py) and an item table, trained by the Trainer on
synthetic data; a save every 100 steps, in the background and in the way. Prints a JSON object a
run: median and mean step, saves counted in, the mean's overhead over the runs without saves, which
stand first and last to show drift, the bytes of a checkpoint, and what the first save costs beside
(page-locked memory for the copy, once a run). write_s over the seconds of 100 steps means that the
storage does not keep up: a save then waits for the one before. Exit status 1: 3% or more for saves
in the background.
"""

import argparse
import dataclasses
import itertools
import json
import shutil
import sys
import time
import warnings
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.loader import load_experiment
from configs.schema import ExperimentArgs

_LIMIT_PERCENT = 3.0
_FIRST, _LAST = 150, 450  # steps that are timed

_SIZES: dict[str, Any] = {
    "TrainerArgs.train_batch_size": 128,
    "events/FeatureArgs.max_sequence_length": 256,
    "item_table/EmbeddingArgs.item_vocab_size_or_capacity": 1_000_000,
    "NetworkArgs.num_layers": 8,
    "NetworkArgs.hidden_size": 512,
    "NetworkArgs.num_attention_heads": 4,
    "NetworkArgs.kv_channels": 128,
    "NetworkArgs.dtype_str": "bfloat16",
    "lengths/RandomDistribution.mean": 240,
}
_RUNS = {"none": (0, True), "background": (100, True), "waiting": (100, False), "again": (0, True)}


def experiment(folder: Path, *, interval: int, in_background: bool, small: bool) -> ExperimentArgs:
    """150 steps to settle, the first save among them, then 300 that are timed, with 3 saves."""
    values: dict[str, Any] = {
        "TrainerArgs.output_dir": str(folder),
        "TrainerArgs.max_train_iters": _LAST + 1,
        "OptimizerArgs.sparse_optimizer_str": "rowwise_adagrad",
        "TrainerArgs.eval_interval": 100_000,
        "TrainerArgs.ckpt_save_interval": interval,
        "TrainerArgs.ckpt_in_background": in_background,
        "BenchmarkDatasetArgs.num_generated_batches": 20,
    }
    bindings = [
        f"{name} = {value!r}" for name, value in (values | ({} if small else _SIZES)).items()
    ]
    return load_experiment("benchmark_ranking.gin", bindings=bindings, task="ranking")


def timed_run(args: ExperimentArgs) -> tuple[list[float], list[float]]:
    """When each step of a run had ended (with a wait for the device), and seconds of each write."""
    from training.checkpoint import Checkpointer
    from training.distributed import process_group
    from training.step import StepResult, TrainStep
    from training.trainer import Trainer

    ends: list[float] = []
    writes: list[float] = []
    step, write = TrainStep.__call__, Checkpointer._write

    def timed_step(self: TrainStep, *arguments: Any, **options: Any) -> StepResult:
        result = step(self, *arguments, **options)
        ends.append(time.perf_counter())
        return result

    def timed_write(self: Checkpointer, *arguments: Any) -> None:
        begin = time.perf_counter()
        write(self, *arguments)
        writes.append(time.perf_counter() - begin)

    with (
        mock.patch.object(TrainStep, "__call__", timed_step),
        mock.patch.object(Checkpointer, "_write", timed_write),
        process_group() as world,
    ):
        Trainer(args, world=world).fit()
    return ends, writes


def main() -> int:
    parser = argparse.ArgumentParser(description="The cost of checkpoints.")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints, emptied after")
    parser.add_argument("--small", action="store_true", help="the sizes of benchmark_ranking.gin")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, float] = {}
    for name, (interval, in_background) in _RUNS.items():
        folder = arguments.folder / name
        args = experiment(
            folder, interval=interval, in_background=in_background, small=arguments.small
        )
        args = dataclasses.replace(args, name=name)
        ends, writes = timed_run(args)
        all_ms = [1000 * (end - begin) for begin, end in itertools.pairwise(ends)]
        steps_ms = all_ms[_FIRST - 1 : _LAST - 1]
        files = list(folder.glob("checkpoints/step-*/*"))
        found[name] = mean(steps_ms)
        shown = {
            "saves": name,
            "step_ms": round(found[name], 3),
            "median_step_ms": round(median(steps_ms), 3),
            "longest_step_ms": round(max(steps_ms), 1),
            "first_save_ms": round(max(all_ms[90:110]) - median(steps_ms), 1),
            "write_s": round(median(writes), 2) if writes else None,
            "checkpoint_bytes": sum(file.stat().st_size for file in files)
            // max(1, len(list(folder.glob("checkpoints/step-*")))),
        }
        print(json.dumps(shown), flush=True)
        shutil.rmtree(folder)
    base = min(found["none"], found["again"])
    overhead = {name: round(100 * (found[name] / base - 1), 2) for name in found}
    print(json.dumps({"overhead_percent": overhead}))
    return int(overhead["background"] >= _LIMIT_PERCENT)


if __name__ == "__main__":
    raise SystemExit(main())
