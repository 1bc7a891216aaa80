"""Peers of the retrieval model that have no neural network: what counting items can reach.

EASE with recency: item-item weights of a ridge regression without self-weights (Steck,
Embarrassingly Shallow Autoencoders for Sparse Data, arXiv 1905.03375), applied to the history with
a weight that falls with every event back from the newest one.
"""

import numpy as np

Histories = list[np.ndarray]


def ease_with_recency(
    train: Histories, inputs: Histories, *, num_rows: int, l2: float, decay: float
) -> np.ndarray:
    """Scores (users, num_rows) of all items as the next one.

    Args:
        train: items of each user that may be learned from.
        inputs: items of each user that precede the target, oldest first.
        num_rows: highest item id + 1.
        l2: ridge penalty.
        decay: weight of an event relative to the one after it.
    """
    interactions_UI = np.zeros((len(train), num_rows))
    for user, items in enumerate(train):
        interactions_UI[user, items] = 1.0
    gram_II = interactions_UI.T @ interactions_UI
    inverse_II = np.linalg.inv(gram_II + l2 * np.eye(num_rows))
    weights_II = inverse_II / -np.diag(inverse_II)
    np.fill_diagonal(weights_II, 0.0)
    recent_UI = np.zeros((len(inputs), num_rows))
    for user, items in enumerate(inputs):
        recent_UI[user, items] = decay ** np.arange(len(items) - 1, -1, -1)
    return recent_UI @ weights_II


def ranks(
    scores_UI: np.ndarray, seen: Histories, targets_U: np.ndarray, catalogue_I: np.ndarray
) -> np.ndarray:
    """Rank from 1 of each user's target in the catalogue less the seen items; ties count against.

    Args:
        scores_UI: as `ease_with_recency` gives them.
        seen: items of each user that are left out.
        targets_U: item to be ranked.
        catalogue_I: True for ids that occur.
    """
    scores_UI = np.where(catalogue_I, scores_UI, -np.inf)
    for user, items in enumerate(seen):
        scores_UI[user, items[items != targets_U[user]]] = -np.inf
    target_U1 = np.take_along_axis(scores_UI, targets_U[:, None], axis=1)
    return (scores_UI >= target_U1).sum(axis=1)


def tuned_ease_ranks(histories: Histories, *, num_rows: int) -> tuple[np.ndarray, dict[str, float]]:
    """Leave-one-out test ranks of EASE with recency, its two settings chosen on validation NDCG@10.

    Args:
        histories: all items of each user by time; the last is the test target, the one before it
            the validation target.
        num_rows: highest item id + 1.
    """
    train = [items[:-2] for items in histories]
    catalogue_I = np.zeros(num_rows, bool)
    catalogue_I[np.concatenate(histories)] = True

    def test(back: int, l2: float, decay: float) -> np.ndarray:
        inputs = [items[: len(items) - back] for items in histories]
        targets_U = np.array([items[-back] for items in histories])
        scores_UI = ease_with_recency(train, inputs, num_rows=num_rows, l2=l2, decay=decay)
        return ranks(scores_UI, inputs, targets_U, catalogue_I)

    grid = [(l2, decay) for l2 in (100.0, 300.0, 1000.0) for decay in (0.7, 0.8, 0.9, 0.95)]
    l2, decay = max(grid, key=lambda setting: figures(test(2, *setting))["ndcg@10"])
    return test(1, l2, decay), {"l2": l2, "decay": decay}


def figures(ranks_U: np.ndarray) -> dict[str, float]:
    """hr@10, ndcg@10, hr@50 and mrr of ranks from 1."""
    return {
        "hr@10": float((ranks_U <= 10).mean()),
        "ndcg@10": float(np.where(ranks_U <= 10, 1 / np.log2(ranks_U + 1), 0.0).mean()),
        "hr@50": float((ranks_U <= 50).mean()),
        "mrr": float((1 / ranks_U).mean()),
    }
