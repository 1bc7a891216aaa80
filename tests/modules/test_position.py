import pytest
import torch

from modules.jagged_sequence import JaggedSequence
from modules.position import PositionEmbedding, indices_from_oldest


def test_adds_the_row_of_each_position() -> None:
    sequence = JaggedSequence(
        values_TD=torch.randn(6, 4),
        seq_offsets_B1=torch.tensor([0, 6, 6]),
        num_contextuals_B=torch.tensor([1, 0]),
        num_candidates_B=torch.tensor([2, 0]),
        max_seq_len=6,
        scaling_seqlen=6.0,
    )
    embedding = PositionEmbedding(8, 4, max_num_contextuals=1)
    out = embedding(sequence)
    rows = embedding.weight[torch.tensor([0, 4, 3, 2, 1, 1])]
    torch.testing.assert_close(out.values_TD, sequence.values_TD + rows)
    out.values_TD.sum().backward()
    assert embedding.weight.grad[:, 0].tolist() == [1, 2, 1, 1, 1, 0, 0, 0]


def test_reset_parameters_follows_the_default_generator() -> None:
    embedding = PositionEmbedding(8, 4, max_num_contextuals=1)
    weights = []
    for _ in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            embedding.reset_parameters()
        weights.append(embedding.weight.detach().clone())
    assert torch.equal(*weights)


def jagged(lengths: list[int], contextuals: list[int], candidates: list[int]) -> JaggedSequence:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return JaggedSequence(
        values_TD=torch.zeros(int(offsets[-1]), 1),
        seq_offsets_B1=offsets,
        num_contextuals_B=torch.tensor(contextuals),
        num_candidates_B=torch.tensor(candidates),
        max_seq_len=20,
        scaling_seqlen=20.0,
    )


def test_counting_from_the_oldest_gives_an_event_the_same_row_whatever_follows() -> None:
    sequence = jagged([2 + 6 + 2, 2 + 4, 0, 2 + 1], [2, 2, 0, 2], [2, 0, 0, 1])
    settings = {"max_num_contextuals": 2, "num_positions": 20, "tokens_per_event": 2}
    index = indices_from_oldest(sequence, **settings).tolist()
    assert index == [0, 1, 3, 4, 5, 6, 7, 8, 2, 2, 0, 1, 3, 4, 5, 6, 0, 1, 2]


@pytest.mark.parametrize(
    ("num_positions", "tokens_per_event", "expected"),
    [
        (8, 2, [2, 3, 4, 5, 6, 7, 6, 7]),
        (7, 2, [2, 3, 4, 5, 4, 5, 4, 5]),
        (4, 1, [2, 3, 3, 3, 3, 3, 3, 3]),
    ],
)
def test_events_beyond_the_table_share_the_last_event_s_rows(
    num_positions: int, tokens_per_event: int, expected: list[int]
) -> None:
    """Item with item and action with action."""
    sequence = jagged([1 + 8], [1], [0])
    index = indices_from_oldest(
        sequence,
        max_num_contextuals=1,
        num_positions=num_positions,
        tokens_per_event=tokens_per_event,
    )
    assert index.tolist() == [0, *expected]


def test_a_table_without_room_for_an_event_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_position_buckets must be at least 4 .* got 3"):
        indices_from_oldest(
            jagged([3], [1], [0]), max_num_contextuals=1, num_positions=3, tokens_per_event=2
        )


def test_the_module_counts_from_where_it_is_told() -> None:
    sequence = jagged([1 + 4], [1], [0])
    embedding = PositionEmbedding(8, 1, max_num_contextuals=1, counting_from="oldest")
    rows = embedding.weight[torch.tensor([0, 2, 3, 4, 5])]
    torch.testing.assert_close(embedding(sequence).values_TD, rows)
