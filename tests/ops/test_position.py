import pytest
import torch

from ops.jagged import lengths_to_offsets
from ops.position import position_indices


def indices(num_positions: int) -> list[int]:
    lengths = torch.tensor([7, 0, 2, 3])
    return position_indices(
        lengths_to_offsets(lengths),
        torch.tensor([2, 0, 2, 0]),
        num_candidates_B=torch.tensor([2, 0, 0, 3]),
        num_tokens=12,
        max_num_contextuals=2,
        num_positions=num_positions,
    ).tolist()


def test_position_indices() -> None:
    contextual, history, candidates = [0, 1], [5, 4, 3], [2, 2]
    assert indices(100) == [*contextual, *history, *candidates, 0, 1, 2, 2, 2]


def test_old_history_shares_the_last_row() -> None:
    assert indices(5) == [0, 1, 4, 4, 3, 2, 2, 0, 1, 2, 2, 2]


def test_a_table_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="num_position_buckets must be at least 4"):
        indices(3)
