"""Random negatives: items of the catalogue, drawn anew for each batch."""

from __future__ import annotations

import numpy as np

_STREAM = 1
"""Keeps these draws apart from the sample order, which has the same seed and epoch."""


class NegativeDraws:
    """Draws that every rank makes alike, without a word between them.

    Args:
        catalogue: bool, one entry for each item id: True for those that may be drawn.
        num_negatives: ids of a draw.
        seed: key of the draws, >= 0.

    Raises:
        ValueError: num_negatives is < 1 or more than the catalogue has.
    """

    def __init__(self, catalogue: np.ndarray, num_negatives: int, *, seed: int) -> None:
        self._ids_M = np.flatnonzero(catalogue)
        if not 1 <= num_negatives <= len(self._ids_M):
            raise ValueError(
                f"RetrievalArgs.num_negatives must lie in 1..{len(self._ids_M)}, the items of the "
                f"data set, got {num_negatives}; lower it, or leave it out and set "
                f'RetrievalArgs.negatives_sampler = "in_batch"'
            )
        self._num_negatives, self._seed = num_negatives, seed

    def draw(self, epoch: int, batch: int) -> np.ndarray:
        """Different ids for batch number `batch` of all ranks, int64 (num_negatives,).

        Every set of so many items is equally likely. The cost follows the draw, not the catalogue.
        """
        key = np.random.SeedSequence([self._seed, epoch, batch], spawn_key=(_STREAM,))
        generator = np.random.Generator(np.random.Philox(key))
        chosen = generator.choice(
            len(self._ids_M), self._num_negatives, replace=False, shuffle=False
        )
        return self._ids_M[chosen]
