"""What several GPUs would cost and gain: measured where there are some, predicted from one.

    python benchmarks/scaling.py pipelines     # none, native, prefetch; rows on device and host
    python benchmarks/scaling.py codecs        # casts of rows on their way, forward and back
    python benchmarks/scaling.py shuffler      # cost of dealing users out, gain for 2, 8, 64 ranks
    python benchmarks/scaling.py steps         # two batch sizes on one GPU -> predictions
    torchrun --nproc_per_node N benchmarks/scaling.py steps [--scaling strong]

Prints a JSON line for each cell. A cell is the median of --windows windows, with the spread
(largest less smallest). A window is an epoch of --steps steps, collation included; windows of
pipelines that are compared take turns on one model.
`exposed_share` is the time in which a collective's kernel runs and no other, out of a profiled
window's time: GPU only.

The model is the hidden-1024 one on synthetic users with zipf lengths and a table of --rows rows
under row-wise Adagrad; --small makes all of it fit a laptop.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs

from benchmarks.scaling_model import Workload, fitted, predict
from configs.loader import load_experiment
from configs.schema import ExperimentArgs
from data.balance import attention_work, deal
from training.distributed import World, process_group
from training.pipeline import Pipeline, build_pipeline
from training.trainer import Trainer

NUM_GPUS = (1, 2, 8, 64, 1024)
LARGE = {
    "events/FeatureArgs.max_sequence_length": 1024,
    "lengths/RandomDistribution.dist_type": "'zipf'",
    "lengths/RandomDistribution.alpha": 1.2,
    "lengths/RandomDistribution.low": 64,
    "NetworkArgs.num_layers": 4,
    "NetworkArgs.hidden_size": 1024,
    "NetworkArgs.num_attention_heads": 4,
    "NetworkArgs.kv_channels": 256,
    "NetworkArgs.dtype_str": "'bfloat16'",
}
SMALL = {"NetworkArgs.hidden_size": 64, "NetworkArgs.num_attention_heads": 4}


def main() -> None:
    """Runs the cells of one theme and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("theme", choices=("pipelines", "codecs", "shuffler", "steps"))
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=224, help="users a GPU (of all: strong)")
    parser.add_argument("--steps", type=int, default=32, help="of a window")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--cache-ratio", type=float, default=0.01)
    parser.add_argument("--scaling", choices=("weak", "strong"), default="weak")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--placements", nargs="+", default=["device", "host_cached"])
    parser.add_argument("--gin-binding", action="append", default=[])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    if arguments.theme == "shuffler":
        tell(shuffler_cells(arguments))
        return
    with process_group() as world:
        cells: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
            "pipelines": pipeline_cells,
            "codecs": codec_cells,
            "steps": step_cells,
        }
        tell(cells[arguments.theme](arguments, world), is_main=world.is_main)


def tell(cells: Iterator[dict[str, Any]], *, is_main: bool = True) -> None:
    """Prints each cell as soon as it is there."""
    for cell in cells:
        if is_main:
            print(json.dumps(cell), flush=True)


def experiment_of(arguments: argparse.Namespace, **changes: Any) -> ExperimentArgs:
    """The model on synthetic data, with bindings by "Class.field"."""
    values = {
        "item_table/EmbeddingArgs.item_vocab_size_or_capacity": arguments.rows,
        "TrainerArgs.train_batch_size": arguments.batch,
        "TrainerArgs.ckpt_save_interval": 0,
        "BenchmarkDatasetArgs.num_generated_batches": arguments.steps,
        "OptimizerArgs.sparse_optimizer_str": "'rowwise_adagrad'",
        **(SMALL if arguments.small else LARGE),
        **changes,
    }
    bindings = [f"{name} = {value}" for name, value in values.items()]
    return load_experiment(
        "benchmark_ranking.gin", bindings=[*bindings, *arguments.gin_binding], task="ranking"
    )


class Run:
    """A trainer's pipelines over the same batches again and again, timed by windows of steps."""

    def __init__(self, experiment: ExperimentArgs, *, world: World, folder: str) -> None:
        settings = dataclasses.replace(experiment.trainer, output_dir=folder)
        self.trainer = Trainer(dataclasses.replace(experiment, trainer=settings), world=world)
        self.trainer.model.train()
        self.world = world
        self._pipelines: dict[str, Pipeline] = {}

    def window(self, pipeline_type: str, epoch: int) -> tuple[float, int]:
        """(seconds, tokens of all ranks) of an epoch, filling and draining the pipeline."""
        if pipeline_type not in self._pipelines:
            self._pipelines[pipeline_type] = build_pipeline(
                pipeline_type,
                self.trainer._train_step(),
                model=self.trainer.model,
                optimizer=self.trainer.optimizer,
                device=self.world.device,
            )
        pipeline = self._pipelines[pipeline_type]
        feed, tokens = self.trainer.loaders["train"].epoch(epoch), 0
        self._wait()
        begin = time.perf_counter()
        with suppress(StopIteration):
            while True:
                tokens += pipeline.progress(feed).num_tokens
        self._wait()
        seconds = time.perf_counter() - begin
        pipeline.detach()
        return seconds, tokens

    def measure(self, *, windows: int, pipeline_types: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Figures by pipeline, their windows in turn after one each to warm up."""
        timed: dict[str, list[tuple[float, int]]] = {kind: [] for kind in pipeline_types}
        for epoch in range(windows + 1):
            for kind, found in timed.items():
                found.append(self.window(kind, epoch))
        return {kind: self._figures(found[1:]) for kind, found in timed.items()}

    def _figures(self, timed: list[tuple[float, int]]) -> dict[str, Any]:
        steps = self.trainer.loaders["train"].num_batches
        seconds = [taken / steps for taken, _ in timed]
        figures = {
            "world_size": self.world.world_size,
            "step_ms": 1e3 * statistics.median(seconds),
            "spread_ms": 1e3 * (max(seconds) - min(seconds)),
            "windows_ms": [round(1e3 * one, 2) for one in seconds],
            "tokens": timed[-1][1] / steps,
            "tokens_per_s": statistics.median(tokens / taken for taken, tokens in timed),
        }
        if self.world.device.type == "cuda":
            figures["peak_mem_bytes"] = torch.cuda.max_memory_allocated(self.world.device)
        return figures

    def exposed_share(self, pipeline_type: str) -> float:
        """Share of a window in which a collective's kernel runs and no other; GPU."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
            taken, _ = self.window(pipeline_type, 0)
        spans = [
            ("nccl" in event.name.lower(), event.time_range.start, event.time_range.end)
            for event in traced.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        return exposed(spans) / (1e6 * taken)

    def _wait(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        if self.world.world_size > 1:
            dist.barrier()


def exposed(spans: list[tuple[bool, float, float]]) -> float:
    """Time in which only spans of the kind True run, out of (kind, start, end)."""
    edges = sorted(
        edge for kind, start, end in spans for edge in ((start, kind, 1), (end, kind, -1))
    )
    running, total, before = {True: 0, False: 0}, 0.0, 0.0
    for at, kind, change in edges:
        if running[True] and not running[False]:
            total += at - before
        running[kind] += change
        before = at
    return total


def pipeline_cells(arguments: argparse.Namespace, world: World) -> Iterator[dict[str, Any]]:
    """Pipelines over one model each, with the rows in reach of the device and behind a cache."""
    on_gpu = world.device.type == "cuda"
    kinds = ("none", "native", "prefetch") if on_gpu else ("none", "native")
    for placement in arguments.placements if on_gpu else ("device",):
        experiment = experiment_of(
            arguments,
            **{
                "TrainerArgs.pipeline_type": repr(kinds[-1]),  # decides what a cache keeps ready
                "item_table/EmbeddingArgs.placement": repr(placement),
                "item_table/EmbeddingArgs.cache_ratio": arguments.cache_ratio,
            },
        )
        for kind, figures in _measured(experiment, arguments, world, kinds).items():
            yield {"theme": "pipelines", "pipeline_type": kind, "placement": placement, **figures}


def _measured(
    experiment: ExperimentArgs,
    arguments: argparse.Namespace,
    world: World,
    pipeline_types: Sequence[str],
    *,
    is_traced: bool = False,
) -> dict[str, dict[str, Any]]:
    on_gpu = world.device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        run = Run(experiment, world=world, folder=f"{folder}/run")
        figures = run.measure(windows=arguments.windows, pipeline_types=pipeline_types)
        if is_traced and on_gpu:
            for kind, found in figures.items():
                found["exposed_share"] = run.exposed_share(kind)
    if on_gpu:
        del run
        gc.collect()  # modules and their hooks are cycles, which hold the table
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    return figures


def codec_cells(arguments: argparse.Namespace, world: World) -> Iterator[dict[str, Any]]:
    """Encoding and decoding the rows of a step: what a codec costs, and the bytes it saves."""
    width = experiment_of(arguments).network.hidden_size
    num_rows = arguments.batch * (256 if arguments.small else 1024)
    rows = torch.randn(num_rows, width, device=world.device)
    kinds = ("fp16", "bf16", "fp8") if world.device.type == "cuda" else ("fp16", "bf16")
    for kind in kinds:
        quantized = width if kind == "fp8" else None
        codecs = get_qcomm_codecs(
            QCommsConfig(
                forward_precision=CommType(kind),
                backward_precision=CommType(kind),
                fp8_quantize_dim=quantized,
                fp8_quantize_dim_bwd=quantized,
            )
        )
        for direction, codec in (("forward", codecs.forward), ("backward", codecs.backward)):
            context = codec.create_context()
            encoded = codec.encode(rows, context)
            yield {
                "theme": "codecs",
                "codec": kind,
                "direction": direction,
                "num_rows": num_rows,
                "width": width,
                "bytes_share": encoded.numel() * encoded.element_size() / (4 * rows.numel()),
                "encode_ms": 1e3 * _seconds(lambda c=codec, x=context: c.encode(rows, x), world),
                "decode_ms": 1e3
                * _seconds(lambda c=codec, x=context, e=encoded: c.decode(e, x), world),
            }


def _seconds(action: Callable[[], object], world: World, *, calls: int = 20) -> float:
    """Median over five rounds of the mean time of a call."""
    rounds = []
    for _ in range(6):
        begin = time.perf_counter()
        for _ in range(calls):
            action()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        rounds.append((time.perf_counter() - begin) / calls)
    return statistics.median(rounds[1:])


def shuffler_cells(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Dealing out zipf lengths: host time, and the slowest rank's attention work over the mean."""
    for num_ranks in (2, 8, 64):
        figures = imbalance(num_ranks, users_per_rank=arguments.batch)
        yield {"theme": "shuffler", "num_ranks": num_ranks, **figures}


def imbalance(num_ranks: int, *, users_per_rank: int, num_batches: int = 20) -> dict[str, float]:
    """Slowest rank over mean, in the order of the data and dealt out; and what dealing costs."""
    draw = np.random.default_rng(num_ranks)
    in_order, dealt, seconds = [], [], []
    for _ in range(num_batches):
        num_tokens = (64 + draw.zipf(1.2, num_ranks * users_per_rank)).clip(max=2048)
        work = attention_work(num_tokens)
        begin = time.perf_counter()
        parts = deal(work, num_ranks)
        seconds.append(time.perf_counter() - begin)
        sums = np.array([work[part].sum() for part in parts])
        plain = work.reshape(num_ranks, -1).sum(axis=1)
        in_order.append(plain.max() / plain.mean())
        dealt.append(sums.max() / sums.mean())
    return {
        "in_order": float(np.mean(in_order)),
        "dealt": float(np.mean(dealt)),
        "gain": float(np.mean(in_order) / np.mean(dealt)),
        "deal_ms": 1e3 * statistics.median(seconds),
    }


def step_cells(arguments: argparse.Namespace, world: World) -> Iterator[dict[str, Any]]:
    """Steps of this many ranks; of one, two batch sizes and what they predict."""
    batch = arguments.batch
    if arguments.scaling == "strong":
        batch //= world.world_size
    found: dict[int, float] = {}
    cell: dict[str, Any] = {}
    for users in (batch // 2, batch) if world.world_size == 1 else (batch,):
        experiment = experiment_of(arguments, **{"TrainerArgs.train_batch_size": users})
        cell = {"theme": "steps", "scaling": arguments.scaling, "users_per_gpu": users}
        kind = experiment.trainer.pipeline_type
        cell |= _measured(experiment, arguments, world, [kind], is_traced=True)[kind]
        found[round(cell["tokens"])] = cell["step_ms"] / 1e3
        yield cell
    if world.world_size == 1:
        work = workload(experiment, found, peak_bytes=cell.get("peak_mem_bytes", 0))
        for num_gpus in NUM_GPUS:
            for is_strong in (False, True):
                line = dataclasses.asdict(predict(work, num_gpus, is_strong=is_strong))
                yield {"theme": "predicted", "scaling": ("weak", "strong")[is_strong], **line}


def workload(experiment: ExperimentArgs, steps: dict[int, float], *, peak_bytes: float) -> Workload:
    """What the model takes of a step, from the settings and two measured steps."""
    network, tokens = experiment.network, max(steps)
    fixed, per_token = fitted(steps=steps)
    heads = network.num_attention_heads
    layer = 2 * heads * (network.attention_dim + network.linear_dim) * network.hidden_size
    layer += heads * network.linear_dim * network.hidden_size
    tables = experiment.dataset.embedding_args or ()
    small = sum(t.item_vocab_size_or_capacity for t in tables if t.sharding_type is None)
    rows = sum(t.item_vocab_size_or_capacity for t in tables) - small
    table_bytes = 4.0 * rows * (network.hidden_size + 1)
    # Half of the tokens are items; actions and contexts come from replicated tables.
    row_bytes = 4.0 * network.hidden_size * tokens / 2
    return Workload(
        tokens=tokens,
        fixed_seconds=fixed,
        seconds_per_token=per_token,
        dense_bytes=4.0 * (network.num_layers * layer + small * network.hidden_size),
        row_bytes=row_bytes,
        gradient_row_bytes=row_bytes,
        table_bytes=table_bytes,
        other_bytes=max(0.0, peak_bytes - table_bytes),
    )


if __name__ == "__main__":
    main()
