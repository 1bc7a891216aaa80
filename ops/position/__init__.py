"""Which row of a learned position table a token reads."""

import torch
from torch import Tensor


def position_indices(
    seq_offsets_B1: Tensor,
    num_contextuals_B: Tensor,
    *,
    num_candidates_B: Tensor,
    num_tokens: int,
    max_num_contextuals: int,
    num_positions: int,
) -> Tensor:
    """Return the table row of every token, (T,) int64, in [0, num_positions).

    With c = max_num_contextuals: contextual token k reads row k, every candidate row c, and the
    history counts back from its newest token: rows c + 1, c + 2, ..., the oldest ones sharing the
    last row. So a row means the same distance from "now" for short and long users, candidates
    share one position whatever slot they are in, and (rows c + odd) tells items from actions.

    Raises:
        ValueError: the table is too small to hold contextuals, candidates and one history row.
    """
    if num_positions < max_num_contextuals + 2:
        raise ValueError(
            f"NetworkArgs.num_position_buckets must be at least {max_num_contextuals + 2} with "
            f"{max_num_contextuals} contextual features, got {num_positions}"
        )
    lengths_B = torch.diff(seq_offsets_B1)
    users_B = torch.arange(lengths_B.numel(), device=lengths_B.device)
    user_T = torch.repeat_interleave(users_B, lengths_B, output_size=num_tokens)
    tokens_T = torch.arange(num_tokens, device=lengths_B.device)
    index_T = tokens_T - seq_offsets_B1[user_T]
    first_candidate_B = seq_offsets_B1[1:] - num_candidates_B
    back_T = (first_candidate_B[user_T] - tokens_T).clamp(min=0) + max_num_contextuals
    is_contextual_T = index_T < num_contextuals_B[user_T]
    return torch.where(is_contextual_T, index_T, back_T).clamp(max=num_positions - 1)
