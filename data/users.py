"""The users of a data set: one row each, with an id per contextual feature."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserTable:
    """int64 columns (U,), user_id (ascending) first, and what the ids of the others stand for."""

    columns: Mapping[str, np.ndarray]
    vocabularies: Mapping[str, list[str]]

    def with_events(self, users_U: np.ndarray, counts_U: np.ndarray) -> dict[str, np.ndarray]:
        """All columns with event_offset and event_count at their end.

        Args:
            users_U: users with events, ascending; each has its row here.
            counts_U: their number of events.
        """
        user_ids = self.columns["user_id"]
        event_counts = np.zeros(len(user_ids), np.int64)
        event_counts[np.searchsorted(user_ids, users_U)] = counts_U
        offsets = np.cumsum(event_counts) - event_counts
        return {**self.columns, "event_offset": offsets, "event_count": event_counts}


def user_table(
    user_ids: Sequence[int],
    texts: Mapping[str, Sequence[str]],
    vocabularies: Mapping[str, Sequence[str]],
) -> UserTable:
    """Users in ascending order of their ids.

    Args:
        user_ids: in any order, each once.
        texts: an attribute of all users in the same order, by feature.
        vocabularies: texts by their index, by feature; the text of other features is their id.
    """
    ids = np.array(user_ids, np.int64)
    order = np.argsort(ids)
    columns = {"user_id": ids[order]}
    for name, values in texts.items():
        numbers: list[int]
        if name in vocabularies:
            positions = {text: position for position, text in enumerate(vocabularies[name])}
            numbers = [positions[text] for text in values]
        else:
            numbers = [int(text) for text in values]
        columns[name] = np.array(numbers, np.int64)[order]
    return UserTable(
        columns=columns, vocabularies={name: list(texts) for name, texts in vocabularies.items()}
    )
