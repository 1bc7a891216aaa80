"""Rows of all ranks, of which each has its own number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modules.gather import gather_ragged, num_ranks
from tests.support.two_ranks import TwoRanks


def rows_of(rank: int, count: int, width: int | None) -> Tensor:
    rows = torch.arange(count) + 100 * rank
    return rows if width is None else rows.double().unsqueeze(1).repeat(1, width)


def _gathered(
    rank: int, world_size: int, counts: list[int], width: int | None
) -> tuple[int, Tensor, list[int]]:
    return num_ranks(), *gather_ragged(rows_of(rank, counts[rank], width))


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("counts", [[3, 3], [2, 5], [0, 4], [4, 0], [0, 0]], ids=str)
def test_rank_after_rank(two_ranks: TwoRanks, counts: list[int], width: int | None) -> None:
    expected = torch.cat([rows_of(rank, count, width) for rank, count in enumerate(counts)])
    for size, rows, numbers in two_ranks.run(_gathered, counts, width):
        assert (size, numbers) == (2, counts)
        assert torch.equal(rows, expected)
        assert rows.dtype == expected.dtype


def test_one_process_has_its_own() -> None:
    rows = rows_of(0, 4, 2)
    found, counts = gather_ragged(rows)
    assert found is rows
    assert counts == [4]
