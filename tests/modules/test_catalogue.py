"""Exact ranks in a catalogue that is cut into shares, against sorting it whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modules.catalogue import CatalogueShare, Questions, score_share
from modules.losses import Similarity
from tests.support.two_ranks import TwoRanks

NUM_ITEMS, WIDTH = 50, 6
COSINE = Similarity(temperature=0.2, is_normalized=True, l2_norm_eps=1e-6)
INNER = Similarity(temperature=0.2, is_normalized=False, l2_norm_eps=1e-6)


def table() -> Tensor:
    """Float32 rows; items 3, 4 and 5 are one and the same row, 8 is four times another."""
    rows = torch.randn(NUM_ITEMS, WIDTH, generator=torch.Generator().manual_seed(1))
    rows[4] = rows[5] = rows[3]
    rows[8] = 4 * rows[7]
    return rows


def exists() -> Tensor:
    mask = torch.ones(NUM_ITEMS, dtype=torch.bool)
    mask[[0, 11, 49]] = False
    return mask


TARGETS = [(0, 3), (0, 20), (1, 8), (2, 4), (3, 12), (3, 12), (4, 48)]
SEEN = {0: [1, 2, 5, 5, 30], 1: [7], 2: [], 3: [12, 13, 40], 4: list(range(1, 45))}


def questions(similarity: Similarity, users: list[int], rows: Tensor | None = None) -> Questions:
    """The questions of some of the five users; user u's query is the same whoever asks with it."""
    rows = table() if rows is None else rows
    queries = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2))
    query = similarity.embed(queries[users].double())
    targets = [(users.index(u), item) for u, item in TARGETS if u in users]
    seen = [(users.index(u), item) for u in users for item in SEEN[u]]
    target_users, target_ids = torch.tensor(targets, dtype=torch.int64).reshape(-1, 2).T
    seen_users, seen_ids = torch.tensor(seen, dtype=torch.int64).reshape(-1, 2).T
    scores = similarity.paired_scores(
        query[target_users], similarity.embed(rows[target_ids].double())
    )
    return Questions(
        query_UD=query,
        target_users_C=target_users,
        target_ids_C=target_ids,
        target_scores_C=scores,
        seen_users_S=seen_users,
        seen_ids_S=seen_ids,
    )


def by_sorting(similarity: Similarity) -> tuple[list[int], list[float]]:
    """Pessimistic ranks of TARGETS and their losses, in numpy, item by item."""
    items, queries = (
        table().double().numpy(),
        torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2)).double().numpy(),
    )
    if similarity.is_normalized:
        items = items / np.linalg.norm(items, axis=1, keepdims=True)
        queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    ranks, losses = [], []
    for user, target in TARGETS:
        scores = np.array([queries[user] @ item for item in items]) / similarity.temperature
        real = [i for i in range(NUM_ITEMS) if exists()[i]]
        rivals = [i for i in real if i != target and i not in SEEN[user]]
        ranks.append(1 + sum(scores[i] >= scores[target] - 1e-12 for i in rivals))
        losses.append(math.log(sum(math.exp(scores[i]) for i in real)) - scores[target])
    return ranks, losses


def scored(
    similarity: Similarity, asked: Questions, *, cuts: list[int], max_elements: int
) -> tuple[list[int], list[float]]:
    """Ranks and losses with the table cut into shares."""
    bounds = [0, *cuts, NUM_ITEMS]
    found = [
        score_share(
            CatalogueShare(rows_ND=table()[low:high], first_id=low, exists_N=exists()[low:high]),
            asked,
            similarity,
            max_elements=max_elements,
        )
        for low, high in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    counts, partial = zip(*found, strict=True)
    logsumexp = torch.stack(partial).logsumexp(dim=0)[asked.target_users_C]
    return (sum(counts) + 1).tolist(), (logsumexp - asked.target_scores_C).tolist()


@pytest.mark.parametrize("similarity", [COSINE, INNER], ids=["cosine", "inner"])
@pytest.mark.parametrize("max_elements", [1, 60, 10_000])
@pytest.mark.parametrize("cuts", [[], [25], [1, 2, 12], [0, 50]], ids=str)
def test_ranks_and_losses_are_those_of_sorting(
    similarity: Similarity, max_elements: int, cuts: list[int]
) -> None:
    ranks, losses = scored(
        similarity, questions(similarity, list(range(5))), cuts=cuts, max_elements=max_elements
    )
    expected_ranks, expected_losses = by_sorting(similarity)
    assert ranks == expected_ranks
    assert losses == pytest.approx(expected_losses, abs=1e-9)


def test_equal_items_all_come_before_the_target() -> None:
    """Items 3, 4, 5 are equal: user 2 asks for 4 and is offered 3 and 5 first."""
    ranks, _ = scored(COSINE, questions(COSINE, [2]), cuts=[4], max_elements=7)
    unequal = table()
    unequal[3] = unequal[5] = -unequal[4]
    better = COSINE.embed(unequal.double()) @ questions(COSINE, [2]).query_UD[0]
    num_better = int((better[exists()] > better[4]).sum())
    assert ranks == [num_better + 2 + 1 - int(better[3] > better[4])]


def test_a_seen_target_is_still_ranked_and_a_seen_rival_is_not() -> None:
    """User 3 had item 12 before and is asked for it; user 4 has only 45..48 left."""
    ranks, _ = scored(COSINE, questions(COSINE, [3, 4]), cuts=[], max_elements=10_000)
    assert ranks[0] == ranks[1] == by_sorting(COSINE)[0][4]
    assert ranks[2] <= 4


def _constant(num_items: int, value: float) -> list[int]:
    rows = torch.full((num_items, WIDTH), value)
    targets = torch.arange(num_items)
    users = torch.zeros(num_items, dtype=torch.int64)
    query = COSINE.embed(torch.ones(1, WIDTH, dtype=torch.float64))
    item = COSINE.embed(rows.double())
    none = torch.zeros(0, dtype=torch.int64)
    asked = Questions(
        query_UD=query,
        target_users_C=users,
        target_ids_C=targets,
        target_scores_C=COSINE.paired_scores(query[users], item),
        seen_users_S=none,
        seen_ids_S=none,
    )
    everything = torch.ones(num_items, dtype=torch.bool)
    share = CatalogueShare(rows_ND=rows, first_id=0, exists_N=everything)
    return (score_share(share, asked, COSINE)[0] + 1).tolist()


@pytest.mark.parametrize("value", [0.7, 0.0, math.nan], ids=["equal", "zero", "not a number"])
def test_a_model_that_says_nothing_never_hits(value: float) -> None:
    """Constant scores over 1000 items: HR@10 is 0, not 1 (S29)."""
    ranks = _constant(1000, value)
    assert min(ranks) == 1000
    assert sum(rank <= 10 for rank in ranks) / 1000 <= 0.01


def _gathered(rank: int, world_size: int, shares: list[list[int]]) -> dict[str, Any]:
    both = questions(COSINE, shares[rank]).of_all_ranks()
    return {name: getattr(both, name) for name in Questions.__dataclass_fields__}


@pytest.mark.parametrize("shares", [[[0, 1], [2, 3, 4]], [[0, 2], []], [[], [3]]], ids=str)
def test_questions_of_two_ranks_are_those_of_one(
    two_ranks: TwoRanks, shares: list[list[int]]
) -> None:
    alone = questions(COSINE, sum(shares, []))
    for found in two_ranks.run(_gathered, shares):
        for name, value in found.items():
            assert torch.equal(value, getattr(alone, name)), name
