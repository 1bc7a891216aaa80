"""Argument checks of `hstu_attention`: shapes always, values only where reading them is free."""

import torch
from torch import Tensor

from ops.hstu_attention.spec import AttentionSpec
from ops.jagged.offsets import check_counts, check_offsets


def check_arguments(
    q_THA: Tensor, k_THA: Tensor, *, v_THV: Tensor, seq_offsets: Tensor, spec: AttentionSpec
) -> None:
    """Raise ValueError when arguments contradict each other (rules: `ops.hstu_attention`)."""
    _check_shapes(q_THA, k_THA, v_THV)
    num_users = seq_offsets.numel() - 1
    num_heads = q_THA.shape[1]
    check_offsets(seq_offsets, num_rows=q_THA.shape[0])
    if spec.target_group_size < 1:
        raise ValueError(f"target_group_size must be at least 1, got {spec.target_group_size}")
    if spec.attention_window is not None and spec.attention_window < 1:
        raise ValueError(
            f"attention_window must be at least 1, got {spec.attention_window}; None = no window"
        )
    if not isinstance(spec.scaling_seqlen, Tensor) and not spec.scaling_seqlen > 0:
        raise ValueError(f"scaling_seqlen must be positive, got {spec.scaling_seqlen}")
    for name in ("position_bias", "time_bias"):
        table = getattr(spec, name)
        if table is not None and (table.dim() != 2 or table.shape[0] != num_heads):
            raise ValueError(f"{name} must be (H={num_heads}, buckets), got {tuple(table.shape)}")
    if spec.time_bias is not None and spec.timestamps is None:
        raise ValueError("time_bias needs timestamps, got None; pass the times of all tokens")
    if spec.timestamps is not None and spec.timestamps.shape != q_THA.shape[:1]:
        raise ValueError(
            f"timestamps must have one entry a row ({q_THA.shape[0]}), "
            f"got {tuple(spec.timestamps.shape)}"
        )
    for name in ("num_contextuals", "num_candidates"):
        counts = getattr(spec, name)
        if counts is not None:
            check_counts(counts, name=name, num_users=num_users)
    _check_values(seq_offsets, spec)


def _check_shapes(q_THA: Tensor, k_THA: Tensor, v_THV: Tensor) -> None:
    shapes = f"q {tuple(q_THA.shape)}, k {tuple(k_THA.shape)}, v {tuple(v_THV.shape)}"
    if q_THA.dim() != 3 or q_THA.shape != k_THA.shape or q_THA.shape[:2] != v_THV.shape[:2]:
        raise ValueError(f"q and k must be (T, H, A) and v (T, H, V), got {shapes}")
    if not q_THA.dtype == k_THA.dtype == v_THV.dtype or not q_THA.is_floating_point():
        raise ValueError(
            "q, k and v must share one floating dtype, "
            f"got {q_THA.dtype}, {k_THA.dtype}, {v_THV.dtype}"
        )


def _check_values(seq_offsets: Tensor, spec: AttentionSpec) -> None:
    if seq_offsets.device.type != "cpu":
        return
    lengths = torch.diff(seq_offsets)
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest > spec.max_seq_len:
        raise ValueError(
            f"max_seq_len is {spec.max_seq_len}, but a sequence has {longest} tokens; "
            "cut its oldest history events when the batch is made"
        )
    taken = torch.zeros_like(lengths)
    for name in ("num_candidates", "num_contextuals"):
        counts = getattr(spec, name)
        if counts is None or counts.device.type != "cpu":
            continue
        taken = taken + counts
        if bool((taken > lengths).any()):
            user = int((taken > lengths).nonzero()[0])
            raise ValueError(
                f"{name} of user {user} is {int(counts[user])}, more than its sequence of "
                f"{int(lengths[user])} tokens has left"
            )
        if name == "num_candidates" and not spec.is_causal and bool((counts > 0).any()):
            raise ValueError(
                "is_causal = False has no meaning with candidates, "
                f"got up to {int(counts.max())} of them; set is_causal = True"
            )
