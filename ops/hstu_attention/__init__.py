"""HSTU attention: pointwise SiLU attention over packed sequences (HSTU, arXiv 2402.17152).

For a user with c contextual, h history and t candidate tokens, in this order, n = c + h + t:

    P_ij = silu(A**-0.5 * <q_i, k_j> + bias_ij) / scaling_seqlen * M_ij        O_i = sum_j P_ij v_j

    M: contextual row  sees all contextual and history columns, no candidate
                       (disable_contextual_mask: causal, like a history row)
       history row i   sees columns j <= i, so all contextual ones
       candidate row i sees contextual and history columns, and columns j <= i of its own group
                       (the candidates with the same index // target_group_size)

    c=1 h=3 t=2 g=1 ->  c  1 1 1 1 0 0      h2  1 1 1 0 0 0      t0  1 1 1 1 1 0
                        h1 1 1 0 0 0 0      h3  1 1 1 1 0 0      t1  1 1 1 1 0 1

    is_causal=False: every row sees all contextual and history columns; candidates are refused.

Positions. Contextual and history tokens stand at their index in the sequence; candidate k stands at
c + h + k % target_group_size, whatever group it is in. So neither the window nor a bias tells a
candidate which slot of the list it came from, and moving a group moves its outputs with it.

Window w: a history or candidate row keeps the history columns with |p_i - p_j| < w. Contextual
columns, the row's own group and contextual rows are not cut.

Bias, added to the scores of the columns that are visible, per head:
    position_bias[h, min(|p_i - p_j|, num_position_buckets - 1)]
    time_bias[h, b(|t_i - t_j|)] with b(d) = floor(ln(max(d, 1)) / 0.301), at most num_time_buckets
    - 1. Times are integers, seconds by convention. An item or action token (history or candidate)
    carries the time of its event, a contextual token that of the user's first event.
"""

from torch import Tensor

from ops.hstu_attention import emulated_impl, fbgemm_impl, pytorch_impl, reference
from ops.hstu_attention.checks import check_arguments
from ops.hstu_attention.dispatch import (
    BACKENDS,
    CallShape,
    available_backends,
    choose_backend,
    refuse_fp8,
    refuse_unavailable,
)
from ops.hstu_attention.spec import FP8_MODES, AttentionSpec, Fp8Spec

__all__ = [
    "BACKENDS",
    "FP8_MODES",
    "AttentionSpec",
    "CallShape",
    "Fp8Spec",
    "available_backends",
    "choose_backend",
    "hstu_attention",
]


# backends and kinds of device; asking anew costs the host as much as a launch
_seen_to_run: set[tuple[str, str]] = set()


def hstu_attention(
    q_THA: Tensor,
    k_THA: Tensor,
    *,
    v_THV: Tensor,
    seq_offsets: Tensor,
    max_seq_len: int,
    scaling_seqlen: float | Tensor,
    backend: str,
    num_contextuals: Tensor | None = None,
    num_candidates: Tensor | None = None,
    target_group_size: int = 1,
    is_causal: bool = True,
    disable_contextual_mask: bool = False,
    attention_window: int | None = None,
    timestamps: Tensor | None = None,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    deterministic: bool = False,
    fp8: Fp8Spec | None = None,
) -> Tensor:
    """Return the attention output O_THV in the dtype of the inputs; mask, bias: module docstring.

    Args:
        q_THA: queries (T, H, A), any floating dtype; any strides, as are k_THA and v_THV.
        k_THA: keys (T, H, A).
        v_THV: values (T, H, V).
        seq_offsets: (B + 1,) int32 or int64, from 0, never falling. T may exceed the last offset:
            rows past it come out zero and receive zero gradients, whatever they held.
        max_seq_len: no sequence is longer (checked where the offsets lie on the CPU).
        scaling_seqlen: divisor of the weights, a positive number or a 0-dim tensor.
        backend: "pytorch", "triton", "cutlass", or "reference" (the dense oracle of the tests); see
            `choose_backend`.
        num_contextuals: (B,) integers, None for zeros.
        num_candidates: (B,) integers, None for zeros; at most the sequence length.
        target_group_size: candidates of one group see each other causally.
        is_causal: False lets every row see all columns; needs sequences without candidates.
        disable_contextual_mask: contextual rows are causal too.
        attention_window: number of positions a row looks back over, itself included; None = all.
        timestamps: (T,) integers, needed with time_bias.
        position_bias: (H, num_position_buckets), trained.
        time_bias: (H, num_time_buckets), trained.
        deterministic: the same bits every run; slower bias gradients on a GPU.
        fp8: quantise to FP8, None = not at all; "pytorch" emulates it, other backends refuse it.

    Raises:
        ValueError: shapes, offsets or counts that contradict each other. Values are read only
            from CPU tensors: on a GPU the caller guarantees them.
        NotImplementedError: a backend that cannot run here, or a call that it does not have.
    """
    spec = AttentionSpec(
        max_seq_len=max_seq_len,
        scaling_seqlen=scaling_seqlen,
        num_contextuals=num_contextuals,
        num_candidates=num_candidates,
        target_group_size=target_group_size,
        is_causal=is_causal,
        disable_contextual_mask=disable_contextual_mask,
        attention_window=attention_window,
        timestamps=timestamps,
        position_bias=position_bias,
        time_bias=time_bias,
        deterministic=deterministic,
        fp8=fp8,
    )
    check_arguments(q_THA, k_THA, v_THV=v_THV, seq_offsets=seq_offsets, spec=spec)
    if fp8 is not None:
        reason = refuse_fp8(backend)
        if reason is not None:
            raise NotImplementedError(
                f"hstu_attention(backend) = {backend!r} cannot run: {reason}; "
                "what runs here: pytorch, or fp8 = None"
            )
        return emulated_impl.hstu_attention(
            q_THA, k_THA, v_THV=v_THV, seq_offsets=seq_offsets, spec=spec
        )
    if backend == "pytorch":
        return pytorch_impl.hstu_attention(
            q_THA, k_THA, v_THV=v_THV, seq_offsets=seq_offsets, spec=spec
        )
    if backend == "reference":
        return reference.hstu_attention(
            q_THA, k_THA, v_THV=v_THV, seq_offsets=seq_offsets, spec=spec
        )
    if backend == "auto":
        raise ValueError(
            "hstu_attention(backend) must be a backend's name, got 'auto'; "
            "ask choose_backend once, when the model is built"
        )
    place = (backend, q_THA.device.type)
    refusal = None
    if place not in _seen_to_run:
        refusal = refuse_unavailable(backend, field="hstu_attention(backend)", device_type=place[1])
    if refusal is None:
        _seen_to_run.add(place)
    if refusal is None and backend == "triton":
        from ops.hstu_attention import triton_impl  # not at the top: triton may be absent

        return triton_impl.hstu_attention(
            q_THA, k_THA, v_THV=v_THV, seq_offsets=seq_offsets, spec=spec
        )
    if refusal is None and backend == "cutlass":
        return fbgemm_impl.hstu_attention(
            q_THA, k_THA, v_THV=v_THV, seq_offsets=seq_offsets, spec=spec
        )
    raise refusal or AssertionError(backend)
