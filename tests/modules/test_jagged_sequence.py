import dataclasses

import pytest
import torch

from modules.jagged_sequence import JaggedSequence


def make(**changes) -> JaggedSequence:
    fields = {
        "values_TD": torch.zeros(5, 2),
        "seq_offsets_B1": torch.tensor([0, 3, 3, 5]),
        "num_contextuals_B": torch.tensor([1, 0, 1]),
        "num_candidates_B": torch.tensor([1, 0, 0]),
        "max_seq_len": 4,
        "scaling_seqlen": 4.0,
    }
    return JaggedSequence(**(fields | changes))


def test_sizes() -> None:
    sequence = make()
    assert (sequence.batch_size, sequence.num_tokens) == (3, 5)
    assert sequence.seq_lengths.tolist() == [3, 0, 2]


def test_with_values_changes_nothing_else() -> None:
    sequence = make()
    other = sequence.with_values(torch.ones(5, 7))
    assert other.values_TD.shape == (5, 7)
    assert other.seq_offsets_B1 is sequence.seq_offsets_B1
    assert torch.equal(sequence.values_TD, torch.zeros(5, 2))


def test_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().max_seq_len = 9


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("padding rows must not enter", {"values_TD": torch.zeros(6, 2)}),
        ("past the 4 rows", {"values_TD": torch.zeros(4, 2)}),
        ("num_contextuals_B must have shape", {"num_contextuals_B": torch.tensor([1])}),
        ("num_candidates_B must not be negative", {"num_candidates_B": torch.tensor([0, -1, 0])}),
        ("timestamps_T must have 5", {"timestamps_T": torch.zeros(4)}),
    ],
)
def test_contradictions_are_refused(message: str, changes: dict) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)
