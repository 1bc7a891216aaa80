"""What checkpoints cost a training: wall time of a step without saves, and with them.

    python benchmarks/checkpoint_overhead.py --folder /tmp/overhead        # one GPU
    python benchmarks/checkpoint_overhead.py --folder /tmp/overhead --small  # tries the script

Layers of h512_128x512 (benchmarks/hstu_layer.py) and an item table, trained by the Trainer on
synthetic data in one run, block by block: without saves and with one every 100 steps, in turn. The
last 100 steps of each block of 200 are timed, so what a save leaves running is done before a block
without. The first block, with the first save, which takes page-locked memory for all others, is
told apart. Prints a JSON object for each kind of block, medians over blocks, and the overhead.
save_ms is what a save keeps the training waiting, write_s what it takes in the background: over the
seconds of 100 steps, storage does not keep up, and a save waits for the one before. Exit status 1:
an overhead of 3% or more.
"""

import argparse
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
_BLOCK = 200
_SETTLES = 100
_INTERVAL = 100
_ORDER = ("first", *("none", "background") * 3, "none")

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


def kind_at(step: int) -> str:
    """The block that what follows a step belongs to."""
    return _ORDER[min(step // _BLOCK, len(_ORDER) - 1)]


def experiment(folder: Path, *, small: bool) -> ExperimentArgs:
    """All blocks, with a save due every 100 steps."""
    values: dict[str, Any] = {
        "TrainerArgs.output_dir": str(folder),
        "TrainerArgs.max_train_iters": _BLOCK * len(_ORDER) + 1,
        "TrainerArgs.eval_interval": 100_000,
        "TrainerArgs.ckpt_save_interval": _INTERVAL,
        "OptimizerArgs.sparse_optimizer_str": "rowwise_adagrad",
        "BenchmarkDatasetArgs.num_generated_batches": 20,
    }
    bindings = [
        f"{name} = {value!r}" for name, value in (values | ({} if small else _SIZES)).items()
    ]
    return load_experiment("benchmark_ranking.gin", bindings=bindings, task="ranking")


def timed_run(
    args: ExperimentArgs,
) -> tuple[list[float], dict[str, list[float]], dict[str, list[float]]]:
    """When each step had ended (with a wait for the device); seconds of saves, writes by kind."""
    from training.checkpoint import Checkpointer
    from training.distributed import process_group
    from training.step import StepResult, TrainStep
    from training.trainer import Trainer

    ends: list[float] = []
    saves: dict[str, list[float]] = {}
    writes: dict[str, list[float]] = {}
    step, save, write = TrainStep.__call__, Checkpointer.save, Checkpointer._write

    def timed_step(self: TrainStep, *arguments: Any, **options: Any) -> StepResult:
        result = step(self, *arguments, **options)
        ends.append(time.perf_counter())
        return result

    def save_if_due(self: Checkpointer, folder: Path, number: int, **options: Any) -> Path:
        kind = kind_at(number)
        if kind == "none":
            return folder
        begin = time.perf_counter()
        final = save(self, folder, number, **options | {"in_background": True})
        saves.setdefault(kind, []).append(time.perf_counter() - begin)
        return final

    def timed_write(self: Checkpointer, tensors: Any, final: Path, state: dict[str, Any]) -> None:
        begin = time.perf_counter()
        write(self, tensors, final, state)
        writes.setdefault(kind_at(state["step"]), []).append(time.perf_counter() - begin)

    with (
        mock.patch.object(TrainStep, "__call__", timed_step),
        mock.patch.object(Checkpointer, "save", save_if_due),
        mock.patch.object(Checkpointer, "_write", timed_write),
        process_group() as world,
    ):
        Trainer(args, world=world).fit()
    return ends, saves, writes


def main() -> int:
    parser = argparse.ArgumentParser(description="The cost of checkpoints.")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints, emptied after")
    parser.add_argument("--small", action="store_true", help="the sizes of benchmark_ranking.gin")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    ends, saves, writes = timed_run(experiment(arguments.folder, small=arguments.small))
    checkpoints = list(arguments.folder.glob("checkpoints/step-*"))
    num_bytes = sum(file.stat().st_size for path in checkpoints for file in path.iterdir())
    steps_ms = [1000 * (end - begin) for begin, end in itertools.pairwise(ends)]
    blocks: dict[str, list[float]] = {}
    for number, kind in enumerate(_ORDER):
        first = number * _BLOCK + _SETTLES - 1
        blocks.setdefault(kind, []).append(mean(steps_ms[first : first + _INTERVAL]))
    for kind, found in blocks.items():
        shown = {
            "saves": kind,
            "step_ms": round(median(found), 3),
            "spread_ms": round(max(found) - min(found), 3),
            "save_ms": round(1000 * median(saves[kind]), 1) if kind in saves else None,
            "write_s": round(median(writes[kind]), 2) if kind in writes else None,
        }
        print(json.dumps(shown), flush=True)
    print(json.dumps({"checkpoint_bytes": num_bytes // len(checkpoints)}))
    base = median(blocks["none"])
    overhead = {
        kind: round(100 * (median(found) / base - 1), 2)
        for kind, found in blocks.items()
        if kind != "none"
    }
    print(json.dumps({"overhead_percent": overhead}))
    shutil.rmtree(arguments.folder)
    return int(overhead["background"] >= _LIMIT_PERCENT)


if __name__ == "__main__":
    raise SystemExit(main())
