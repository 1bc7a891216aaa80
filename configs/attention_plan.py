"""Whether a model's attention runs in FP8, and why not: decided once, from the settings."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema import ExperimentArgs

FP8_HEAD_DIMS = (64, 128, 256)
"""Widths of a head that there are FP8 kernels for."""

MEASURED: dict[int, dict[int, float]] = {
    64: {2048: 0.66},
    128: {512: 0.68, 2048: 1.07, 8192: 1.26},
    256: {2048: 1.02, 8192: 1.26},
}
"""Head dim -> length of all sequences -> BF16's time over FP8's: forward and backward of our
kernels at four heads and 65,536 or 32,768 tokens, mode per_block, quantisation included, the lower
of device time and wall clock (benchmarks/fp8_attention_h200_202612.md). A head dim that is not here
is not filtered."""

_FIELD = "MixedPrecisionArgs.auto_filter_attention"


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """How the attention of all layers runs."""

    mode: str
    """hstu_attn_quantization_mode, "bf16" where nothing is quantised."""
    reason: str
    warning: str | None = None
    """What who asked for it may not have meant."""

    def without_kernels(self, lacking: str) -> "AttentionPlan":
        """Return the plan where our FP8 kernels cannot run the model, for that reason."""
        return _filtered(lacking)

    @property
    def is_fp8(self) -> bool:
        """Whether it is quantised."""
        return self.mode != "bf16"


def plan_attention(experiment: "ExperimentArgs", *, device_type: str) -> AttentionPlan:
    """Return how the attention of an experiment runs on a device type.

    auto_filter_attention keeps it in BF16 where heads or sequences are so small that our FP8
    kernels lose. What emulates FP8 (a CPU, or kernel_backend = "pytorch") and FBGEMM's package
    never win, and are never filtered.
    """
    precision, network = experiment.precision, experiment.network
    if not precision.has_fp8_attention:
        return AttentionPlan(mode="bf16", reason="not asked for")
    asked = AttentionPlan(mode=precision.hstu_attn_quantization_mode, reason="asked for")
    is_ours = device_type == "cuda" and network.kernel_backend in ("auto", "triton")
    if not precision.auto_filter_attention or not is_ours:
        return asked
    head_dim, length = network.attention_dim, experiment.max_seq_len
    if head_dim < FP8_HEAD_DIMS[0]:
        return _filtered(f"head dim {head_dim}, no FP8 kernels for heads below {FP8_HEAD_DIMS[0]}")
    speedup = expected_speedup(head_dim, length)
    if speedup is None:
        text = (
            f"{_FIELD} = True keeps no attention out of FP8 at head dim {head_dim}, which was not "
            "measured; it may be slower than without FP8"
        )
        return AttentionPlan(mode=asked.mode, reason=asked.reason, warning=text)
    if speedup < 1.0:
        known = f"{speedup:.2f}x is known" if speedup else "shorter than all that was measured"
        return _filtered(
            f"head dim {head_dim}, FP8 may be slower at {length} tokens a user ({known})"
        )
    return asked


def _filtered(reason: str) -> AttentionPlan:
    return AttentionPlan(mode="bf16", reason=f"auto_filter_attention: {reason}")


def expected_speedup(head_dim: int, length: int) -> float | None:
    """Return how much faster FP8 attention is; below 1 it may be slower.

    The figure is that of the longest measured sequences that are no longer; 0 where all are.

    Args:
        head_dim: None is returned for one that was not measured.
        length: max_seq_len, in tokens.
    """
    measured = MEASURED.get(head_dim)
    if measured is None:
        return None
    inside = [known for known in measured if known <= length]
    return measured[max(inside)] if inside else 0.0


__all__ = ["FP8_HEAD_DIMS", "MEASURED", "AttentionPlan", "expected_speedup", "plan_attention"]
