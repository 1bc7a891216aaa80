"""Dealing users out: everybody once, nearly equal work, and close to the best there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from data.balance import attention_work, deal


def largest_over_mean(work_S: np.ndarray, parts: list[np.ndarray]) -> float:
    sums = np.array([work_S[part].sum() for part in parts])
    return float(sums.max() / sums.mean())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("num_users", [0, 1, 2, 7, 8, 11, 64, 100])
def test_everybody_is_dealt_once_in_parts_of_one_size(num_users: int, num_ranks: int) -> None:
    work_S = np.random.default_rng(num_users).integers(0, 50, num_users).astype(float)
    parts = deal(work_S, num_ranks)
    assert len(parts) == num_ranks
    assert sorted(np.concatenate(parts).tolist()) == list(range(num_users))
    assert max(map(len, parts)) <= -(-num_users // num_ranks)
    assert all((np.diff(part) > 0).all() for part in parts)


def test_the_largest_part_is_near_the_smallest_possible() -> None:
    """Against all ways to give 10 users to two ranks, five each."""
    for seed in range(20):
        work_S = attention_work(np.random.default_rng(seed).zipf(1.5, 10).clip(max=500))
        halves = itertools.combinations(range(10), 5)
        best = min(max(work_S[list(h)].sum(), work_S.sum() - work_S[list(h)].sum()) for h in halves)
        found = max(work_S[part].sum() for part in deal(work_S, 2))
        assert best <= found <= 1.1 * best


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_zipf_lengths_are_evened_out(num_ranks: int) -> None:
    """128 users a rank, up to 4096 tokens: a step lasts as long as its slowest rank."""
    draws = np.random.default_rng(3).zipf(1.2, (10, 128 * num_ranks)).clip(max=4096)
    in_order = []
    for num_tokens_S in draws:
        work_S = attention_work(num_tokens_S)
        assert largest_over_mean(work_S, deal(work_S, num_ranks)) < 1.02
        in_order.append(largest_over_mean(work_S, np.split(np.arange(len(work_S)), num_ranks)))
    assert np.mean(in_order) > 1.1


def test_squares_count_not_tokens() -> None:
    """100 + 20 + 10 against 60 + 60 + 80 tokens are 10,500 against 13,600 pairs of tokens."""
    work_S = attention_work(np.array([60, 60, 80, 20, 100, 10]))
    assert work_S.tolist() == [3600, 3600, 6400, 400, 10_000, 100]
    assert max(work_S[part].sum() for part in deal(work_S, 2)) <= 1.01 * 13_600
