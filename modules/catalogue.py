"""Exact ranks in the whole catalogue, of which each rank of the run scores its own share.

Nothing is sorted: a target's rank is one more than the number of items that score as high or
higher. Numbers add up over shares, so the table is never in one place.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from modules.gather import gather_ragged
from modules.losses import Similarity

TIE_TOLERANCE = 1e-9
"""Scores closer than this, relative to their size where that is above 1, are equal: the round-off
of two float64 matrix products, far below what float32 weights can mean."""


@dataclass(frozen=True, kw_only=True)
class CatalogueShare:
    """Some consecutive rows of the item table.

    Attributes:
        rows_ND: embedding rows, not normalised.
        first_id: item of the first row.
        exists_N: bool, False for rows that are no item of the data set and are never ranked.
    """

    rows_ND: Tensor
    first_id: int
    exists_N: Tensor


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Queries, what they should find, and what they must not be offered.

    Attributes:
        query_UD: float64, through `Similarity.embed`.
        target_users_C: row of the target's query. target_ids_C: its item.
        target_scores_C: its score, float64.
        seen_users_S: row of a query. seen_ids_S: an item that this user had before.
    """

    query_UD: Tensor
    target_users_C: Tensor
    target_ids_C: Tensor
    target_scores_C: Tensor
    seen_users_S: Tensor
    seen_ids_S: Tensor

    def none(self) -> "Questions":
        """Nothing asked, of the same kinds of numbers."""
        return Questions(**{field.name: getattr(self, field.name)[:0] for field in fields(self)})

    def of_all_ranks(self) -> "Questions":
        """The questions of all ranks, one rank after the other. Collective."""
        query_UD, counts = gather_ragged(self.query_UD)
        first = [sum(counts[:rank]) for rank in range(len(counts))]
        gathered: dict[str, Tensor] = {"query_UD": query_UD}
        for field in fields(self)[1:]:
            values, numbers = gather_ragged(getattr(self, field.name))
            if field.name.endswith(("users_C", "users_S")):
                shift = torch.tensor(first, device=values.device)
                size = torch.tensor(numbers, device=values.device)
                values = values + shift.repeat_interleave(size)
            gathered[field.name] = values
        return Questions(**gathered)


@torch.no_grad()
def score_share(
    share: CatalogueShare,
    questions: Questions,
    similarity: Similarity,
    *,
    max_elements: int = 2**22,
) -> tuple[Tensor, Tensor]:
    """How many items of a share beat each target, (C,) int64, and each query's logsumexp, (U,).

    An item beats a target where it scores as high or higher (ties are decided against the model,
    and so is what is no number), exists, was not seen by the user before, and is not the target
    itself. The logsumexp, float64, is over all items that exist.

    Args:
        max_elements: scores held at a time.
    """
    num_users, num_targets = questions.query_UD.shape[0], questions.target_ids_C.shape[0]
    counts_C = torch.zeros_like(questions.target_ids_C)
    logsumexp_U = questions.query_UD.new_full((num_users,), -torch.inf)
    tolerance_C = TIE_TOLERANCE * questions.target_scores_C.abs().clamp(min=1.0)
    threshold_C1 = (questions.target_scores_C - tolerance_C).unsqueeze(1)
    step = max(1, max_elements // max(1, num_users + num_targets))
    for begin in range(0, share.rows_ND.shape[0], step):
        part = slice(begin, begin + step)
        items_ND = similarity.embed(share.rows_ND[part].double())
        scores_UN = similarity.scores(questions.query_UD, items_ND)
        scores_UN.masked_fill_(~share.exists_N[part], -torch.inf)
        logsumexp_U = torch.logaddexp(logsumexp_U, scores_UN.logsumexp(dim=1))
        first_id = share.first_id + begin
        columns_S = questions.seen_ids_S - first_id
        is_here_S = (columns_S >= 0) & (columns_S < items_ND.shape[0])
        scores_UN[questions.seen_users_S[is_here_S], columns_S[is_here_S]] = -torch.inf
        beats_CN = ~(scores_UN.index_select(0, questions.target_users_C) < threshold_C1)
        columns_C = questions.target_ids_C - first_id
        own_C = ((columns_C >= 0) & (columns_C < items_ND.shape[0])).nonzero().squeeze(1)
        beats_CN[own_C, columns_C[own_C]] = False
        counts_C += beats_CN.sum(dim=1)
    return counts_C, logsumexp_U
