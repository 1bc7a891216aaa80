"""Events at the same second, whose true order nobody recorded."""

from __future__ import annotations

import numpy as np

from data.distributions import mix

_STREAM = 2
"""Keeps these draws apart from the sample order and the negatives, of the same seed and epoch."""


def shuffle_ties(
    events_E: np.ndarray,
    times_E: np.ndarray,
    lengths_P: np.ndarray,
    *,
    epoch_key: tuple[int, int],
) -> np.ndarray:
    """The events with those of equal time in another order, int64 (E,); all others stay in place.

    Args:
        events_E: positions in the events file, part after part.
        times_E: their times, rising within a part.
        lengths_P: events of each part; none leaves its part.
        epoch_key: (seed, epoch). With it the order of two events depends on these two alone, so it
            is the same in any batch.
    """
    seed = np.random.SeedSequence(epoch_key, spawn_key=(_STREAM,)).generate_state(1, np.uint64)
    draws_E = mix(mix(events_E.astype(np.uint64)) ^ seed)
    part_E = np.repeat(np.arange(len(lengths_P)), lengths_P)
    return events_E[np.lexsort((draws_E, times_E, part_E))]
