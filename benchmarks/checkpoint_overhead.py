"""What checkpoints cost a training: wall time of a step without saves, and with them.

    python benchmarks/checkpoint_overhead.py --folder /tmp/overhead        # one GPU
    python benchmarks/checkpoint_overhead.py --folder /tmp/overhead --small  # tries the script

Layers of h512_128x512 (benchmarks/hstu_layer.py) and an item table, trained by the Trainer on
synthetic data; a save every 100 steps, in the background and in the way. Prints a JSON object a
run: median and mean step, saves counted in, the mean's overhead over the runs without saves, which
stand first and last to show drift, and the bytes of a checkpoint. Exit status 1: 3% or more for
saves in the background.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import time
import warnings
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.loader import load_experiment
from configs.schema import ExperimentArgs

_LIMIT_PERCENT = 3.0

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
    """100 steps to settle, then 300 that are timed, with 3 saves."""
    values: dict[str, Any] = {
        "TrainerArgs.output_dir": str(folder),
        "TrainerArgs.max_train_iters": 401,
        "TrainerArgs.eval_interval": 100_000,
        "TrainerArgs.ckpt_save_interval": interval,
        "TrainerArgs.ckpt_in_background": in_background,
        "BenchmarkDatasetArgs.num_generated_batches": 20,
    }
    bindings = [
        f"{name} = {value!r}" for name, value in (values | ({} if small else _SIZES)).items()
    ]
    return load_experiment("benchmark_ranking.gin", bindings=bindings, task="ranking")


def step_ends(args: ExperimentArgs) -> list[float]:
    """When each step of a run had ended; a step ends with a wait for the device."""
    from training.distributed import process_group
    from training.step import StepResult, TrainStep
    from training.trainer import Trainer

    ends: list[float] = []
    plain = TrainStep.__call__

    def timed(self: TrainStep, *arguments: Any, **options: Any) -> StepResult:
        result = plain(self, *arguments, **options)
        ends.append(time.perf_counter())
        return result

    TrainStep.__call__ = timed  # type: ignore[method-assign]
    try:
        with process_group() as world:
            Trainer(args, world=world).fit()
    finally:
        TrainStep.__call__ = plain  # type: ignore[method-assign]
    return ends


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
        ends = step_ends(args)[99:400]
        steps_ms = [1000 * (end - begin) for begin, end in zip(ends, ends[1:], strict=False)]
        files = list(folder.glob("checkpoints/step-*/*"))
        found[name] = mean(steps_ms)
        shown = {
            "saves": name,
            "step_ms": round(found[name], 3),
            "median_step_ms": round(median(steps_ms), 3),
            "longest_step_ms": round(max(steps_ms), 1),
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
