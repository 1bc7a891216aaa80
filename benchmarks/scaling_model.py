"""Predicts a step on N GPUs from steps on one. docs/scaling.md explains terms and assumptions.

step = compute(own tokens) * imbalance + exposed communication + waits of the host
"""

import dataclasses
import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What connects the GPUs. Bandwidths are what one GPU sends, bytes a second, as reached.

    Attributes:
        gpus_per_node: GPUs that NVLink joins.
        nvlink_bytes_per_second: 450e9 is H200's rate in one direction; collectives reach 80% of it.
        network_bytes_per_second: one 400 Gb/s adapter for each GPU, of which 90% is reached.
        nvlink_seconds, network_seconds: start of a collective, and of each of its hops.
        host_seconds: a step's reads of how many ids are exchanged, and the longer flag.
    """

    gpus_per_node: int = 8
    nvlink_bytes_per_second: float = 0.8 * 450e9
    network_bytes_per_second: float = 0.9 * 50e9
    nvlink_seconds: float = 10e-6
    network_seconds: float = 25e-6
    host_seconds: float = 300e-6


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one GPU does in a step, measured alone.

    Attributes:
        tokens: of a step of one GPU.
        fixed_seconds, seconds_per_token: a line through steps of two batch sizes.
        dense_bytes: gradients that every rank has, float32.
        row_bytes: of rows looked up in sharded tables, as they travel forward.
        gradient_row_bytes: of their gradients, as they travel back.
        table_bytes: all sharded tables with optimizer states.
        other_bytes: everything else in a GPU's memory.
        imbalance: slowest rank over the mean, by number of ranks; 1 without jagged lengths.
    """

    tokens: int
    fixed_seconds: float
    seconds_per_token: float
    dense_bytes: float
    row_bytes: float
    gradient_row_bytes: float
    table_bytes: float
    other_bytes: float
    imbalance: dict[int, float] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step on N GPUs: seconds, tokens a second of all of them, share of N times one, bytes."""

    num_gpus: int
    compute_seconds: float
    exposed_seconds: float
    step_seconds: float
    tokens_per_second: float
    efficiency: float
    bytes_per_gpu: float


def predict(
    work: Workload, num_gpus: int, *, cluster: Cluster | None = None, is_strong: bool = False
) -> Prediction:
    """A step of `num_gpus` GPUs that have as many tokens each (weak) or in all (strong) as one."""
    cluster = cluster or Cluster()
    share = 1 / num_gpus if is_strong else 1.0
    scaled = dataclasses.replace(
        work, row_bytes=work.row_bytes * share, gradient_row_bytes=work.gradient_row_bytes * share
    )
    variable = work.seconds_per_token * work.tokens * share
    compute = work.fixed_seconds + variable * work.imbalance.get(num_gpus, 1.0)
    exposed = 0.0 if num_gpus == 1 else _exposed(scaled, num_gpus, cluster)
    step = compute + exposed
    rate = work.tokens * share * num_gpus / step
    alone = work.tokens / (work.fixed_seconds + work.seconds_per_token * work.tokens)
    return Prediction(
        num_gpus=num_gpus,
        compute_seconds=compute,
        exposed_seconds=exposed,
        step_seconds=step,
        tokens_per_second=rate,
        efficiency=rate / (num_gpus * alone),
        bytes_per_gpu=work.table_bytes / num_gpus + work.other_bytes,
    )


def _exposed(work: Workload, num_gpus: int, cluster: Cluster) -> float:
    """Nothing of these overlaps with compute in our step: rows are needed before the trunk, their
    gradients leave after the flag, dense gradients are summed in one piece before it. Ids travel
    during the step before (pipeline_type native or prefetch)."""
    rows = exchange_seconds(work.row_bytes, num_gpus, cluster)
    gradients = exchange_seconds(work.gradient_row_bytes, num_gpus, cluster)
    dense = sum_seconds(work.dense_bytes, num_gpus, cluster)
    return rows + gradients + dense + cluster.host_seconds


def exchange_seconds(num_bytes: float, num_gpus: int, cluster: Cluster) -> float:
    """All-to-all of `num_bytes` a GPU, evenly over all; NVLink and network work at once."""
    inside = min(num_gpus, cluster.gpus_per_node)
    by_nvlink = num_bytes * (inside - 1) / num_gpus / cluster.nvlink_bytes_per_second
    by_network = num_bytes * (num_gpus - inside) / num_gpus / cluster.network_bytes_per_second
    start = cluster.nvlink_seconds
    if num_gpus > inside:
        # Messages shrink with the number of peers: each costs a tenth of a start.
        start = cluster.network_seconds * (1 + (num_gpus - inside) / 10 / cluster.gpus_per_node)
    return start + max(by_nvlink, by_network)


def sum_seconds(num_bytes: float, num_gpus: int, cluster: Cluster) -> float:
    """All-reduce of `num_bytes`: in each node, then every GPU its part over the nodes, and back."""
    inside = min(num_gpus, cluster.gpus_per_node)
    nodes = math.ceil(num_gpus / inside)
    seconds = cluster.nvlink_seconds
    seconds += 2 * num_bytes * (inside - 1) / inside / cluster.nvlink_bytes_per_second
    if nodes > 1:
        seconds += 2 * cluster.network_seconds * math.ceil(math.log2(nodes))
        part = num_bytes / inside
        seconds += 2 * part * (nodes - 1) / nodes / cluster.network_bytes_per_second
    return seconds


def fitted(*, steps: dict[int, float]) -> tuple[float, float]:
    """(fixed seconds, seconds a token) of the line through steps of two numbers of tokens.

    Raises:
        ValueError: not two steps, or the larger one is not slower.
    """
    if len(steps) != 2:
        raise ValueError(f"two steps make a line, got {len(steps)}; give tokens: seconds twice")
    (fewer, fast), (more, slow) = sorted(steps.items())
    if slow <= fast:
        raise ValueError(
            f"a step of {more} tokens must be slower than one of {fewer}, got {slow} and {fast} s; "
            "take larger batches"
        )
    per_token = (slow - fast) / (more - fewer)
    return max(0.0, fast - per_token * fewer), per_token
