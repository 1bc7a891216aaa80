"""Rows of all ranks, of which each has its own number."""

import torch
import torch.distributed as dist
from torch import Tensor


def num_ranks(group: dist.ProcessGroup | None = None) -> int:
    """Processes of a group (None: of the run), 1 where there is no group at all."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def own_rank() -> int:
    """This process's rank in the run, 0 where there is no group at all."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather_ragged(
    rows_N: Tensor, *, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, list[int]]:
    """The rows of all ranks one after the other, (sum of N, ...), and how many each rank gave.

    Collective. The numbers travel between the hosts, which do not wait for their devices for it;
    no rows travel where no rank has any.

    Args:
        rows_N: this rank's rows, perhaps none; the same dtype and width on every rank.
        group: who takes part, None for all.
    """
    world_size = num_ranks(group)
    if world_size == 1:
        return rows_N, [rows_N.shape[0]]
    counts_W = torch.empty(world_size, dtype=torch.int64)
    dist.all_gather_into_tensor(counts_W, torch.tensor([rows_N.shape[0]]), group=group)
    counts: list[int] = counts_W.tolist()
    longest = max(counts)
    if longest == 0:
        return rows_N, counts
    padded_N = rows_N.new_zeros(longest, *rows_N.shape[1:])
    padded_N[: rows_N.shape[0]] = rows_N
    gathered = rows_N.new_empty(world_size * longest, *rows_N.shape[1:])
    dist.all_gather_into_tensor(gathered, padded_N, group=group)
    parts = gathered.split(longest)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]), counts
