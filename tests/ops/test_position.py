import pytest
import torch

from ops.jagged import lengths_to_offsets
from ops.position import PositionRule, oldest_position_indices, position_indices


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


BATCH = (lengths_to_offsets(torch.tensor([7, 0, 2, 3])), torch.tensor([2, 0, 2, 0]))
REST = {"num_candidates_B": torch.tensor([2, 0, 0, 3]), "num_tokens": 12}
SIZES = {"num_positions": 6, "max_num_contextuals": 2}


def test_a_rule_gives_the_indices_of_the_end_it_counts_from() -> None:
    newest = PositionRule(**SIZES, max_seq_len=7)
    oldest = PositionRule(**SIZES, max_seq_len=7, counting_from="oldest", tokens_per_event=2)
    assert torch.equal(newest.indices(*BATCH, **REST), position_indices(*BATCH, **REST, **SIZES))
    expected = oldest_position_indices(*BATCH, **REST, **SIZES, tokens_per_event=2)
    assert torch.equal(oldest.indices(*BATCH, **REST), expected)
    assert expected.tolist() == [0, 1, 3, 4, 3, 2, 2, 0, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("counting_from", "tokens_per_event", "history_rows", "shared_rows"),
    [("newest", 2, 3, 1), ("oldest", 2, 2, 2), ("oldest", 1, 3, 1)],
)
def test_rows_that_history_reads(
    counting_from: str, tokens_per_event: int, history_rows: int, shared_rows: int
) -> None:
    """Of 6 rows, 2 contextual ones and one of the candidates: 3, whole events of them."""
    rule = PositionRule(
        **SIZES, max_seq_len=7, counting_from=counting_from, tokens_per_event=tokens_per_event
    )
    assert (rule.history_rows, rule.shared_rows) == (history_rows, shared_rows)


@pytest.mark.parametrize(
    ("counting_from", "least"), [("newest", "4 with 2"), ("oldest", "5 with 2 .* and 2 tokens")]
)
def test_a_rule_without_room_is_refused(counting_from: str, least: str) -> None:
    with pytest.raises(ValueError, match=f"num_position_buckets must be at least {least}"):
        PositionRule(
            num_positions=3, max_num_contextuals=2, max_seq_len=7, counting_from=counting_from
        )
