"""Deals the users of a global batch out so that ranks have about the same attention work."""

import heapq

import numpy as np


def deal(work_S: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Positions in `work_S` for every rank, ascending: sums of work nearly equal, counts, too.

    The balanced largest differencing method (Karmarkar and Karp's, with parts of equal size:
    Michiels, Korst, Aarts and van Leeuwen 2003). Users are put into groups of one for each rank,
    by falling work. The two groups, or unions of groups, whose ranks differ most are united again
    and again, the largest part of one with the smallest of the other. A pure function of its
    arguments, so all ranks deal alike without a word to each other.

    Args:
        work_S: work of each user, float64, >= 0.
        num_ranks: how many parts; each gets at most ceil(S / num_ranks) users.
    """
    num_users = len(work_S)
    num_groups = -(-num_users // num_ranks)
    order = np.argsort(-work_S, kind="stable")
    # The last group is filled up with nobody, who has no work.
    users_GW = np.full(num_groups * num_ranks, num_users)
    users_GW[:num_users] = order
    users_GW = users_GW.reshape(num_groups, num_ranks)
    sums_GW = np.append(work_S, 0.0)[users_GW]
    parts = [
        (-(sums_W[0] - sums_W[-1]), number, sums_W, users_W[:, None])
        for number, (sums_W, users_W) in enumerate(zip(sums_GW, users_GW, strict=True))
    ]
    heapq.heapify(parts)
    while len(parts) > 1:
        _, number, one_W, one_users = heapq.heappop(parts)
        _, _, other_W, other_users = heapq.heappop(parts)
        sums_W = one_W + other_W[::-1]
        users_Wn = np.concatenate([one_users, other_users[::-1]], axis=1)
        falling = np.argsort(-sums_W, kind="stable")
        sums_W, users_Wn = sums_W[falling], users_Wn[falling]
        heapq.heappush(parts, (-(sums_W[0] - sums_W[-1]), number, sums_W, users_Wn))
    if not parts:
        return [np.zeros(0, np.int64)] * num_ranks
    return [np.sort(users_n[users_n < num_users]) for users_n in parts[0][3]]


def attention_work(num_tokens_S: np.ndarray) -> np.ndarray:
    """Relative cost of a user's attention, float64: the square of the tokens."""
    return num_tokens_S.astype(np.float64) ** 2
