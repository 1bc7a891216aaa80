"""SampledSoftmax and Similarity, against sums written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from modules.losses import SampledSoftmax, Similarity

EPS = 1e-6
ROWS, NEGATIVES, WIDTH = 11, 7, 5


def similarity(*, is_normalized: bool = True, temperature: float = 0.3) -> Similarity:
    return Similarity(temperature=temperature, is_normalized=is_normalized, l2_norm_eps=EPS)


def by_hand(
    rows: dict[str, Tensor],
    target_ids: list[int],
    negative_ids: list[int],
    *,
    is_normalized: bool,
    temperature: float,
    counted: list[bool],
) -> Tensor:
    """The loss row by row, a negative at a time; ids that repeat count once."""

    def unit(x: Tensor) -> Tensor:
        return x / torch.clamp(x.square().sum().sqrt(), min=EPS) if is_normalized else x

    total = torch.zeros((), dtype=torch.float64)
    for row, target in enumerate(target_ids):
        if not counted[row]:
            continue
        query = unit(rows["query"][row])
        scores = [query @ unit(rows["target"][row]) / temperature]
        for column, negative in enumerate(negative_ids):
            is_repeat = negative in negative_ids[:column]
            if negative != target and not is_repeat:
                scores.append(query @ unit(rows["negative"][column]) / temperature)
        total = total + torch.logsumexp(torch.stack(scores), dim=0) - scores[0]
    return total


def draw(*, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"query": ROWS, "target": ROWS, "negative": NEGATIVES}
    rows = {
        name: torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
        for name, size in sizes.items()
    }
    rows["target"][3] *= 1e-8  # shorter than l2_norm_eps: divided by that instead
    return rows


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize("max_chunk_elements", [1, 3 * NEGATIVES, 10_000])
@pytest.mark.parametrize("uncounted", [[], [0, 4, 10]])
def test_loss_and_gradients_are_those_of_the_sum_by_hand(
    is_normalized: bool, max_chunk_elements: int, uncounted: list[int]
) -> None:
    """Repeated negatives (5 and 9) count once; targets 2, 5, 9 hit, 30 lies beyond all of them."""
    negative_ids = [2, 4, 5, 5, 9, 9, 12]
    target_ids = [2, 5, 9, 3, 30, 0, 12, 4, 7, 2, 11]
    counted = [row not in uncounted for row in range(ROWS)]
    exact = {name: value.requires_grad_() for name, value in draw().items()}
    expected = by_hand(
        exact,
        target_ids,
        negative_ids,
        is_normalized=is_normalized,
        temperature=0.3,
        counted=counted,
    )
    expected.backward()
    found = {name: value.detach().float().requires_grad_() for name, value in draw().items()}
    loss = SampledSoftmax(
        similarity=similarity(is_normalized=is_normalized), max_chunk_elements=max_chunk_elements
    ).loss_sum(
        found["query"],
        found["target"],
        torch.tensor(target_ids),
        negative_MD=found["negative"],
        negative_ids_M=torch.tensor(negative_ids),
        is_used_M=torch.tensor([True, True, True, False, True, False, True]),
        is_counted_R=torch.tensor(counted) if uncounted else None,
    )
    (2 * loss).backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, value in found.items():
        assert value.grad is not None and exact[name].grad is not None
        # A row shorter than eps has a huge gradient: judged against its own size.
        wanted = 2 * exact[name].grad.float()
        torch.testing.assert_close(value.grad, wanted, rtol=1e-4, atol=1e-5)
    assert not found["negative"].grad[3].any(), "a repeat pushes nothing"


def test_only_the_target_among_the_negatives_costs_nothing() -> None:
    rows = {name: value.float().requires_grad_() for name, value in draw().items()}
    loss = SampledSoftmax(similarity=similarity()).loss_sum(
        rows["query"],
        rows["target"],
        torch.full((ROWS,), 6),
        negative_MD=rows["negative"][:1],
        negative_ids_M=torch.tensor([6]),
    )
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not any(value.grad.any() for value in rows.values())


@pytest.mark.parametrize(("num_rows", "num_negatives"), [(0, NEGATIVES), (ROWS, 0), (0, 0)])
def test_nothing_to_tell_apart_is_zero_with_zero_gradients(
    num_rows: int, num_negatives: int
) -> None:
    rows = {name: value.float().requires_grad_() for name, value in draw().items()}
    loss = SampledSoftmax(similarity=similarity()).loss_sum(
        rows["query"][:num_rows],
        rows["target"][:num_rows],
        torch.arange(num_rows),
        negative_MD=rows["negative"][:num_negatives],
        negative_ids_M=torch.arange(100, 100 + num_negatives),
    )
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(value.grad is not None and not value.grad.any() for value in rows.values())


def test_large_scores_stay_finite() -> None:
    rows = {name: (value * 100).float().requires_grad_() for name, value in draw().items()}
    sharp = similarity(is_normalized=False, temperature=0.01)
    loss = SampledSoftmax(similarity=sharp).loss_sum(
        rows["query"],
        rows["target"],
        torch.arange(50, 50 + ROWS),
        negative_MD=rows["negative"],
        negative_ids_M=torch.arange(NEGATIVES),
    )
    loss.backward()
    assert math.isfinite(float(loss.detach())) and float(loss.detach()) > 1e4
    assert all(value.grad.isfinite().all() for value in rows.values())


def test_a_spoilt_row_that_does_not_count_leaves_the_loss_alone() -> None:
    rows = {name: value.float() for name, value in draw().items()}
    settings = {
        "negative_MD": rows["negative"],
        "negative_ids_M": torch.arange(NEGATIVES),
        "is_counted_R": torch.arange(ROWS) != 2,
    }
    objective = SampledSoftmax(similarity=similarity(is_normalized=False))
    ids = torch.arange(50, 50 + ROWS)
    expected = objective.loss_sum(rows["query"], rows["target"], ids, **settings)
    rows["query"][2] = torch.inf
    found = objective.loss_sum(rows["query"], rows["target"], ids, **settings)
    assert torch.isfinite(expected) and torch.equal(found, expected)


def test_scores_of_pairs_are_those_of_the_table() -> None:
    rows = {name: value.float() for name, value in draw().items()}
    same = similarity()
    query, item = same.embed(rows["query"]), same.embed(rows["target"])
    torch.testing.assert_close(same.scores(query, item).diagonal(), same.paired_scores(query, item))
    assert float(same.paired_scores(item, item)[0]) == pytest.approx(1 / 0.3, rel=1e-6)
