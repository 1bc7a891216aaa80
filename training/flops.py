"""FLOPs of a training step by the precision each product ran in, and what share of peak that is.

Counted are the matrix products of the HSTU layers and of the ranking head, and attention's, forward
and backward: 2 * rows * K * N a product, three products a linear; 6 * (A + V) a head and visible
pair. What is computed again to save memory, elementwise work, embeddings and the retrieval loss are
not counted.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from configs.schema import ExperimentArgs
from data.batch import SequenceBatch
from model.ranking import RankingTrunk
from model.trunk import Trunk
from modules.hstu_config import HSTUConfig
from modules.hstu_layer import HSTULayer
from modules.linear.engine import LinearEngine

PEAK_FLOPS: dict[str, dict[str, float]] = {
    "H200 NVL": {"fp8": 1671e12, "bfloat16": 835e12, "float16": 835e12, "float32": 60e12},
    "H200": {"fp8": 1979e12, "bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "GH200": {"fp8": 1979e12, "bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "H100 PCIe": {"fp8": 1513e12, "bfloat16": 756e12, "float16": 756e12, "float32": 51e12},
    "H100 NVL": {"fp8": 1671e12, "bfloat16": 835e12, "float16": 835e12, "float32": 60e12},
    "H100": {"fp8": 1979e12, "bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "B200": {"fp8": 4500e12, "bfloat16": 2250e12, "float16": 2250e12, "float32": 80e12},
    "L40S": {"fp8": 733e12, "bfloat16": 362e12, "float16": 362e12, "float32": 91.6e12},
    "L4": {"fp8": 242e12, "bfloat16": 121e12, "float16": 121e12, "float32": 30.3e12},
    "A100": {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
}
"""Words of a device's name -> FLOPs a second by precision. All are the dense figures of NVIDIA's
data sheets, half of those printed "with sparsity"; FP32 is without TF32. The first entry whose
words are all in the name counts (`peaks_of`)."""


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """One linear and the precision of its three products."""

    in_features: int
    out_features: int
    forward: str
    """Of the product with the weight, and of the one that gives the input's gradient."""
    weight_gradient: str
    on_tokens: bool
    """Its rows are all tokens; else the supervised events."""


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """Counts for one model."""

    linears: tuple[LinearShape, ...]
    config: HSTUConfig
    num_layers: int
    attention_precision: str
    num_contextuals: int
    """Contextual tokens of a user."""
    supervises_history: bool
    """The head runs on all item events of a batch, not on its candidates alone."""

    @classmethod
    def of(cls, trunk: Trunk, experiment: ExperimentArgs) -> "StepFlops":
        """Return the counter of an experiment's trunk."""
        dtype = experiment.network.dtype_str
        return cls(
            linears=tuple(_linears(trunk, dtype)),
            config=trunk.stack.config,
            num_layers=len(trunk.stack.layers),
            attention_precision=_attention_precision(trunk.stack.config, dtype),
            num_contextuals=experiment.num_contextuals,
            supervises_history=experiment.history_loss,
        )

    def __call__(self, batch: SequenceBatch) -> dict[str, float]:
        """FLOPs of one step on a batch by precision, from lengths the host has."""
        num_events = batch.host_lengths_KB[0].sum()
        if not self.supervises_history:
            num_events = batch.host_candidates_B.sum()
        flops: dict[str, float] = {}
        for linear in self.linears:
            rows = batch.num_tokens if linear.on_tokens else int(num_events)
            product = 2.0 * rows * linear.in_features * linear.out_features
            for precision, count in ((linear.forward, 2), (linear.weight_gradient, 1)):
                flops[precision] = flops.get(precision, 0.0) + count * product
        config = self.config
        width = config.num_own_heads * (config.attention_dim + config.linear_dim)
        pairs = num_visible_pairs(*self._token_counts(batch), config)
        attention = 6.0 * width * pairs * self.num_layers
        precision = self.attention_precision
        flops[precision] = flops.get(precision, 0.0) + attention
        return flops

    def _token_counts(self, batch: SequenceBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Contextual, history and candidate tokens of each user."""
        lengths_KB = batch.host_lengths_KB
        if batch.num_negatives:
            lengths_KB = lengths_KB[:-1]
        first_contextual = len(lengths_KB) - self.num_contextuals
        contextuals_B = lengths_KB[first_contextual:].sum(axis=0)
        candidates_B = batch.host_candidates_B
        history_B = lengths_KB[:first_contextual].sum(axis=0) - candidates_B
        return contextuals_B, history_B, candidates_B


def _linears(trunk: Trunk, dtype: str) -> Iterator[LinearShape]:
    for layer in trunk.stack.layers:
        assert isinstance(layer, HSTULayer)
        yield _shape(layer.input.uvqk, layer.input.engine, dtype, on_tokens=True)
        yield _shape(layer.output.proj, layer.output.engine, dtype, on_tokens=True)
    if isinstance(trunk, RankingTrunk):
        for linear in trunk.head.layers:
            if isinstance(linear, nn.Linear):
                # The head runs in FP32 whatever the stack does.
                yield _shape(linear, trunk.head.engine_of(linear), "float32", on_tokens=False)


def _attention_precision(config: HSTUConfig, dtype: str) -> str:
    """Of all six products. Kernels that take dS in two FP8 parts do dQ's twice: it counts once."""
    if config.attention_fp8 is None:
        return dtype
    # The emulation rounds to FP8 and multiplies in FP32, whatever the dtype of the rows.
    return "float32" if config.attention_backend == "pytorch" else "fp8"


def _shape(
    linear: nn.Linear, engine: LinearEngine | None, dtype: str, *, on_tokens: bool
) -> LinearShape:
    forward = weight_gradient = dtype
    if engine is not None and engine.recipe.backend == "emulated":
        # It rounds to FP8 and multiplies all three in FP32, whatever the dtype of the rows.
        forward = weight_gradient = "float32"
    elif engine is not None:
        forward = "fp8"
        if engine.recipe.fp8_wgrad and engine.recipe.scaling != "rowwise":
            weight_gradient = "fp8"
    return LinearShape(
        in_features=linear.in_features,
        out_features=linear.out_features,
        forward=forward,
        weight_gradient=weight_gradient,
        on_tokens=on_tokens,
    )


def ideal_seconds(flops: Mapping[str, float], peaks: Mapping[str, float]) -> float:
    """Time that the products would take at the peak of the precision each ran in."""
    return sum(count / peaks[precision] for precision, count in flops.items())


def ideal_seconds_of(
    trunk: Trunk, experiment: ExperimentArgs, *, device: torch.device
) -> Callable[[SequenceBatch], float] | None:
    """What turns a batch into `ideal_seconds` of its step, None where no peak is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    peaks = peaks_of(name)
    if peaks is None:
        return None
    flops = StepFlops.of(trunk, experiment)
    return lambda batch: ideal_seconds(flops(batch), peaks)


def peaks_of(device_name: str | None) -> dict[str, float] | None:
    """Peaks by precision of a device, None where they are not known (a CPU, say).

    Args:
        device_name: as CUDA tells it, "NVIDIA H100 80GB HBM3". Whole words count: the H20, the L40
            and the GB200 are none of the devices above. A MIG slice ("... MIG 1g.10gb") has a part
            of its device's peak that no data sheet gives.
    """
    words = set(re.split(r"[^A-Za-z0-9]+", device_name or ""))
    if "MIG" in words:
        return None
    for name, peaks in PEAK_FLOPS.items():
        if words.issuperset(name.split()):
            return peaks
    return None


def num_visible_pairs(
    contextuals_B: np.ndarray, history_B: np.ndarray, candidates_B: np.ndarray, config: HSTUConfig
) -> int:
    """Pairs (row, column) of the attention's mask, in all (DESIGN.md section 5).

    Args:
        contextuals_B, history_B, candidates_B: tokens of each user, int64.
        config: mask switches of the layer.
    """
    c, h, t = contextuals_B, history_B, candidates_B
    window, group = config.attention_window, config.target_group_size
    sees_all = not config.is_causal or not config.disable_contextual_mask
    contextual = c * (c + h) if sees_all else c * (c + 1) // 2
    looked_back = _looked_back(h, window)
    history = h * c + (looked_back if config.is_causal else 2 * looked_back - h)
    own_group = t // group * (group * (group + 1) // 2) + t % group * (t % group + 1) // 2
    candidate = t * c + own_group
    if window is None:
        candidate = candidate + t * h
    else:
        for place in range(min(group, int(t.max(initial=0)))):
            num_there = t // group + (place < t % group)
            candidate = candidate + num_there * np.minimum(h, max(window - 1 - place, 0))
    return int((contextual + history + candidate).sum())


def _looked_back(history_B: np.ndarray, window: int | None) -> np.ndarray:
    """History tokens that history tokens see, themselves and earlier ones, a user's in all."""
    h = history_B
    if window is None:
        return h * (h + 1) // 2
    near = np.minimum(h, window)
    return near * (near + 1) // 2 + (h - near) * window
