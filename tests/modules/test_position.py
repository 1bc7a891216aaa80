import torch

from modules.jagged_sequence import JaggedSequence
from modules.position import PositionEmbedding


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
