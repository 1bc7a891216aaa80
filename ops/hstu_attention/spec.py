"""What one attention call does beyond q, k and v, in one immutable value every backend receives."""

from dataclasses import dataclass

from torch import Tensor


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
