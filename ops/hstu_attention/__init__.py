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

from typing import TYPE_CHECKING

from torch import Tensor

from ops.hstu_attention import emulated_impl, fbgemm_impl, pytorch_impl, reference
from ops.hstu_attention.checks import check_arguments
from ops.hstu_attention.dispatch import (
    BACKENDS,
    CallShape,
    available_backends,
    choose_backend,
    refuse_unavailable,
)
from ops.hstu_attention.spec import FP8_MODES, AttentionSpec, Fp8Spec

if TYPE_CHECKING:
    from ops.silu_split.triton_fp8 import GradientTarget

__all__ = [
    "BACKENDS",
    "FP8_MODES",
    "AttentionSpec",
    "CallShape",
    "Fp8Spec",
    "available_backends",
    "choose_backend",
    "hstu_attention",
    "hstu_attention_from_uvqk",
]


# backends and kinds of device, in FP8 calls too; asking anew costs the host as much as a launch
_seen_to_run: set[tuple[object, ...]] = set()


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
        fp8: quantise to FP8, None = not at all; "pytorch" emulates it, "triton" has it on Hopper
            (`dispatch.refuse_fp8`), "cutlass" where FBGEMM's package has it.

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
    if backend == "auto":
        raise ValueError(
            "hstu_attention(backend) must be a backend's name, got 'auto'; "
            "ask choose_backend once, when the model is built"
        )
    if fp8 is not None:
        _check_fp8(backend, q_THA, v_THV, spec)
        if backend == "triton":
            from ops.hstu_attention import fp8_impl  # not at the top: triton may be absent

            return fp8_impl.hstu_attention(
                q_THA, k_THA, v_THV=v_THV, seq_offsets=seq_offsets, spec=spec
            )
        if backend == "cutlass":
            return fbgemm_impl.hstu_attention(
                q_THA, k_THA, v_THV=v_THV, seq_offsets=seq_offsets, spec=spec
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


def hstu_attention_from_uvqk(
    uvqk_TX: Tensor,
    *,
    bias_X: Tensor | None,
    num_heads: int,
    seq_offsets: Tensor,
    spec: AttentionSpec,
    gradient_target: "GradientTarget | None" = None,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return O_THA and u_THA of a fused projection, by the FP8 kernels of "triton".

    To the bit `silu_split` with activates_u = False, then `hstu_attention`, but SiLU's output is
    never written: one kernel makes the quantised q, k and v.

    Args:
        uvqk_TX: X = H * 4 A, head-major [u | v | q | k].
        bias_X: added first; None for a projection that has its bias.
        num_heads: H.
        seq_offsets: as in `hstu_attention`.
        spec: with fp8, without biases.
        gradient_target: as in `silu_split`.
        recompute: keep the projection alone for the backward pass and quantise once more.

    Returns:
        The output, and u as it lies in uvqk, before bias and SiLU, for a gate that applies them.

    Raises:
        ValueError, NotImplementedError: as `hstu_attention`.
    """
    if uvqk_TX.dim() != 2 or uvqk_TX.shape[1] % (4 * num_heads):
        raise ValueError(
            f"uvqk must be (T, num_heads * 4 * attention_dim) with num_heads {num_heads}, "
            f"got {tuple(uvqk_TX.shape)}"
        )
    width = uvqk_TX.shape[1] // (4 * num_heads)
    # of the shape that q, k and v have
    u_THA = uvqk_TX.detach().view(-1, num_heads, 4 * width)[..., :width]
    check_arguments(u_THA, u_THA, v_THV=u_THA, seq_offsets=seq_offsets, spec=spec)
    _check_fp8("triton", u_THA, u_THA, spec)
    from ops.hstu_attention import fp8_impl  # not at the top: triton may be absent

    return fp8_impl.hstu_attention_from_uvqk(
        uvqk_TX,
        bias_X=bias_X,
        seq_offsets=seq_offsets,
        spec=spec,
        num_heads=num_heads,
        gradient_target=gradient_target,
        recompute=recompute,
    )


def _check_fp8(backend: str, q_THA: Tensor, v_THV: Tensor, spec: AttentionSpec) -> None:
    """Raise where a backend does not have such FP8 calls."""
    if backend == "reference":
        raise NotImplementedError(
            "hstu_attention(backend) = 'reference' cannot run: the oracle rounds nothing; "
            "what runs here: pytorch, or fp8 = None"
        )
    widths = q_THA.shape[2], v_THV.shape[2]
    biases = spec.position_bias is not None, spec.time_bias is not None
    place = (backend, q_THA.device.type, spec.fp8, q_THA.dtype, *widths, *biases)
    if place in _seen_to_run:
        return
    shape = CallShape(
        attention_dim=widths[0],
        linear_dim=widths[1],
        dtype=q_THA.dtype,
        has_position_bias=biases[0],
        has_time_bias=biases[1],
        fp8=spec.fp8,
    )
    refusal = refuse_unavailable(
        backend, field="hstu_attention(backend)", device_type=q_THA.device.type, shape=shape
    )
    if refusal is not None:
        raise refusal
    _seen_to_run.add(place)
