"""The oracle: HSTU attention one user at a time, dense, as the formula reads.

Slow on purpose and never edited to agree with a kernel. Differentiable by autograd; float64 inputs
are computed in float64, everything else in float32. The contract is in `ops.hstu_attention`.
"""

import torch
from torch import Tensor

from ops.hstu_attention.spec import AttentionSpec


def hstu_attention(
    q_THA: Tensor, k_THA: Tensor, *, v_THV: Tensor, seq_offsets: Tensor, spec: AttentionSpec
) -> Tensor:
    """Return O_THV; see `ops.hstu_attention.hstu_attention`."""
    offsets = seq_offsets.tolist()
    num_users = len(offsets) - 1
    contextuals = _counts(spec.num_contextuals, num_users)
    candidates = _counts(spec.num_candidates, num_users)
    total, num_rows = offsets[-1], q_THA.shape[0]
    outputs = []
    for user in range(num_users):
        rows = slice(offsets[user], offsets[user + 1])
        length = offsets[user + 1] - offsets[user]
        num_history = length - contextuals[user] - candidates[user]
        counts = (contextuals[user], num_history, candidates[user])
        times_N = None if spec.timestamps is None else spec.timestamps[rows]
        outputs.append(_attend(q_THA[rows], k_THA[rows], v_THV[rows], counts, times_N, spec))
    # an empty user keeps the graph connected when there is no other one
    outputs.append(_attend(q_THA[:0], k_THA[:0], v_THV[:0], (0, 0, 0), None, spec))
    outputs.append(v_THV.new_zeros(num_rows - total, *v_THV.shape[1:]))
    return torch.cat(outputs)


def visible(
    num_contextuals: int, num_history: int, num_candidates: int, spec: AttentionSpec
) -> Tensor:
    """Return the mask M (n, n), bool, of one user: [i, j] says that row i sees column j."""
    first_candidate = num_contextuals + num_history
    index = torch.arange(first_candidate + num_candidates)
    row, column = index[:, None], index[None, :]
    causal = column <= row
    contextual_row = row < num_contextuals
    candidate_column = column >= first_candidate
    history_column = (column >= num_contextuals) & ~candidate_column

    sees_all = torch.full_like(causal, not spec.is_causal)
    if not spec.disable_contextual_mask:
        sees_all = sees_all | contextual_row
    seen = (causal | sees_all) & ~candidate_column

    row_group = (row - first_candidate) // spec.target_group_size
    column_group = (column - first_candidate) // spec.target_group_size
    own_group = (row >= first_candidate) & candidate_column & (row_group == column_group)
    seen = seen | (own_group & causal)

    if spec.attention_window is not None:
        p = positions(num_contextuals, num_history, num_candidates, spec.target_group_size)
        near = (p[:, None] - p[None, :]).abs() < spec.attention_window
        seen = seen & (near | ~history_column | contextual_row)
    return seen


def positions(
    num_contextuals: int, num_history: int, num_candidates: int, target_group_size: int
) -> Tensor:
    """Return the position of each token of one user, (n,) int64."""
    first_candidate = num_contextuals + num_history
    own = torch.arange(first_candidate)
    return torch.cat([own, first_candidate + torch.arange(num_candidates) % target_group_size])


def _attend(
    q_NHA: Tensor,
    k_NHA: Tensor,
    v_NHV: Tensor,
    counts: tuple[int, int, int],
    times_N: Tensor | None,
    spec: AttentionSpec,
) -> Tensor:
    compute_dtype = torch.float64 if q_NHA.dtype == torch.float64 else torch.float32
    q, k, v = (x.to(compute_dtype) for x in (q_NHA, k_NHA, v_NHV))
    scores_HNN = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    if spec.position_bias is not None:
        position = positions(*counts, spec.target_group_size).to(q.device)
        distance_NN = (position[:, None] - position[None, :]).abs()
        bucket_NN = distance_NN.clamp(max=spec.position_bias.shape[1] - 1)
        scores_HNN = scores_HNN + spec.position_bias[:, bucket_NN]
    if spec.time_bias is not None:
        times = times_N if times_N is not None else torch.zeros(0, device=q.device)
        elapsed_NN = (times[:, None] - times[None, :]).abs().clamp(min=1).double()
        bucket_NN = (elapsed_NN.log() / 0.301).floor().long()
        scores_HNN = (
            scores_HNN + spec.time_bias[:, bucket_NN.clamp(max=spec.time_bias.shape[1] - 1)]
        )
    weights_HNN = torch.nn.functional.silu(scores_HNN) / spec.scaling_seqlen
    weights_HNN = weights_HNN * visible(*counts, spec).to(q.device)
    return torch.einsum("hij,jhd->ihd", weights_HNN, v).to(v_NHV.dtype)


def _counts(counts_B: Tensor | None, num_users: int) -> list[int]:
    return [0] * num_users if counts_B is None else counts_B.tolist()
