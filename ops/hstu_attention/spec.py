"""What one attention call does beyond q, k and v, in one immutable value every backend receives."""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MODES = ("cast", "per_row", "per_block", "per_head", "per_batch", "per_tensor")
"""What shares a scale in FP8 attention; see `ops.hstu_attention.emulated_impl`."""

FP8_BLOCK_ROWS = 128
"""Rows of a user that share a scale at most."""

FP8_FACTOR = 133 / 128
"""q, k and v are multiplied by it before their cast.

SiLU's outputs gather at its minimum, -0.278, which E4M3 rounds to -0.281 with most of what is near:
an error that a sum over keys does not average out. Times this they are rounded to both sides. Error
of o against float64, SiLU of unit normals, 2048 tokens: 0.91e-2 instead of 1.24e-2.
"""


@dataclass(frozen=True, kw_only=True)
class Fp8Spec:
    """FP8 attention: q, k, v and the weights in E4M3.

    Raises:
        ValueError: a mode or format that there is not.
    """

    mode: str
    """One of FP8_MODES."""
    grad_dtype: torch.dtype = torch.float8_e4m3fn
    """Of the output's gradient; float8_e5m2 has more range, which its scales make up for."""
    weight_exponent: int = 0
    """silu(S) is cast times 2**weight_exponent: for q and k so small that it would be flushed."""

    def __post_init__(self) -> None:
        if self.mode not in FP8_MODES:
            raise ValueError(
                f"Fp8Spec.mode must be one of {', '.join(FP8_MODES)}, got {self.mode!r}; "
                "for attention that is not quantised pass fp8 = None"
            )
        if self.grad_dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise ValueError(
                "Fp8Spec.grad_dtype must be torch.float8_e4m3fn or torch.float8_e5m2, "
                f"got {self.grad_dtype}; choose one of these"
            )


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Mask, divisor and bias of one `hstu_attention` call; fields as documented there."""

    max_seq_len: int
    scaling_seqlen: float | Tensor
    num_contextuals: Tensor | None = None
    num_candidates: Tensor | None = None
    target_group_size: int = 1
    is_causal: bool = True
    disable_contextual_mask: bool = False
    attention_window: int | None = None
    timestamps: Tensor | None = None
    position_bias: Tensor | None = None
    time_bias: Tensor | None = None
    deterministic: bool = False
    fp8: Fp8Spec | None = None
