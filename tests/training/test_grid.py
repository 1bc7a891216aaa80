"""Sums of gradients over the ranks that have some of them."""

from __future__ import annotations

from typing import Any

import torch

from configs.schema import TensorModelParallelArgs
from modules.linear.parallel import GradientKind
from tests.support.experiments import cpu_world
from tests.support.two_ranks import TwoRanks
from training.grid import SummedGradients, make_grid


def _sums(rank: int, world_size: int) -> dict[str, Any]:
    own = [torch.full((2, 3), rank + 1.0), torch.tensor([10.0 * (rank + 1)])]
    summed = SummedGradients(own)
    kept = [gradient.clone() for gradient in own]
    sums = [gradient.clone() for gradient in summed.gradients]
    summed.write_back()
    return {"kept": kept, "sums": sums, "written": own}


def test_gradients_are_summed_not_averaged_and_kept_until_wanted(two_ranks: TwoRanks) -> None:
    for rank, found in enumerate(two_ranks.run(_sums)):
        assert found["kept"][0].tolist() == [[rank + 1.0] * 3] * 2
        for name in ("sums", "written"):
            assert found[name][0].tolist() == [[3.0] * 3] * 2
            assert found[name][1].tolist() == [30.0]


def _by_kind(rank: int, world_size: int) -> list[list[float]]:
    """Gradients 1 on rank 0 and 2 on rank 1, of each kind, where both share a model."""
    args = TensorModelParallelArgs(tensor_model_parallel_size=2)
    grid = make_grid(args, world=cpu_world(rank, world_size), timeout_seconds=60.0)
    assert (grid.tensor_size, grid.data.rank, grid.data.world_size) == (2, 0, 1)
    own = [torch.tensor([rank + 1.0]) for _ in GradientKind]
    summed = SummedGradients(own, kinds=list(GradientKind), grid=grid)
    return [gradient.tolist() for gradient in summed.gradients]


def test_parts_and_tokens_count_for_their_share(two_ranks: TwoRanks) -> None:
    """Whole: 1 + 2. Tokens: twice that. Part: twice this rank's own, which nobody else has."""
    assert list(GradientKind) == [GradientKind.WHOLE, GradientKind.TOKENS, GradientKind.PART]
    assert two_ranks.run(_by_kind) == [[[3.0], [6.0], [2.0]], [[3.0], [6.0], [4.0]]]
