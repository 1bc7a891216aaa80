"""The items that a step's targets are told apart from: the same ones on every rank.

In-batch: the distinct items that all ranks' users have in this step, or some of them. Random: ids
that the loader drew. Either way their rows are cut off (`Negatives.rows_MD` is a leaf), so that
all parts of a step share one copy, and one `backward` sends their gradient on.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from modules.gather import gather_ragged, num_ranks, own_rank


@dataclass(frozen=True, kw_only=True)
class Negatives:
    """Ids and embedding rows of a step's negatives (`model.trunk.Shared`).

    Attributes:
        ids_M: int64, in rising order, equal on all ranks.
        rows_MD: their embedding rows, equal on all ranks: a leaf that collects this rank's own
            gradient.
        is_used_M: False for the repeats of an id, and for what is no item; None: all are used.
    """

    ids_M: Tensor
    rows_MD: Tensor
    is_used_M: Tensor | None
    send: Callable[[Tensor], None]
    """Takes the gradient of rows_MD, summed over ranks, on to where the rows came from."""

    def backward(self) -> None:
        """See `model.trunk.Shared.backward`."""
        own_MD = self.rows_MD.grad
        grad_MD = torch.zeros_like(self.rows_MD) if own_MD is None else own_MD.clone()
        _sum_over_ranks_(grad_MD)
        self.send(grad_MD)


def random_negatives(ids_M: Tensor, rows_MD: Tensor) -> Negatives:
    """Negatives that every rank has looked up for itself: ids without repeats, rows in their order.

    The gradient of a row, summed over ranks, goes back through the lookup of one of them, the ranks
    taking turns: the same rows of gradients as in a single process, so their norm is the same.
    """
    ids_M, order_M = torch.sort(ids_M)
    sorted_MD = rows_MD.index_select(0, order_M)
    is_own_M = torch.arange(ids_M.shape[0], device=ids_M.device) % num_ranks() == own_rank()

    def send(grad_MD: Tensor) -> None:
        if sorted_MD.requires_grad:
            sorted_MD.backward(torch.where(is_own_M.unsqueeze(1), grad_MD, 0.0))

    leaf_MD = sorted_MD.detach().requires_grad_()
    return Negatives(ids_M=ids_M, rows_MD=leaf_MD, is_used_M=None, send=send)


@dataclass(frozen=True, kw_only=True)
class InBatchNegatives:
    """Draws negatives from the items of the global batch; calling it is collective.

    Every rank sees the ids of all ranks and so chooses the same; each row is contributed by the
    rank that comes first with its id, and gets its gradient back there, summed over ranks. Only
    rows that were chosen travel, in one all-reduce each way.

    Attributes:
        num_negatives: how many distinct items to keep (fewer where there are fewer); None keeps
            all. The choice depends on the ids of the global batch and the seed, not on how the
            batch lies on ranks.
        drops_repeats: leave repeated ids out, whose number a GPU would have to wait for. False
            keeps them as columns that count for nothing, which costs the scores' matrix product
            their share of the columns; `num_negatives` bounds both.
        seed: of the choice.
    """

    num_negatives: int | None = None
    drops_repeats: bool = True
    seed: int = 0

    def __call__(self, ids_E: Tensor, rows_ED: Tensor) -> Negatives:
        """The step's negatives.

        Args:
            ids_E: items of this rank's users, int64, repeats allowed; -1 for events that lend none.
            rows_ED: their embedding rows.
        """
        all_ids_A, counts = gather_ragged(ids_E)
        ids_A, position_A = torch.sort(all_ids_A, stable=True)
        is_used_A = ids_A >= 0
        is_used_A[1:] &= ids_A[1:] != ids_A[:-1]
        if self.drops_repeats:
            ids_A, position_A = ids_A[is_used_A], position_A[is_used_A]
            is_used_A = is_used_A[is_used_A]
        if self.num_negatives is not None and self.num_negatives < ids_A.shape[0]:
            chosen_M = self._choose(ids_A, is_used_A, salt=self._salt(all_ids_A))
            ids_A, position_A = ids_A[chosen_M], position_A[chosen_M]
            is_used_A = is_used_A[chosen_M]
        own_MD = _own_rows(rows_ED, position_A - sum(counts[: own_rank()]))
        rows_MD = own_MD.detach().clone()
        _sum_over_ranks_(rows_MD)  # one rank has the row, all others zeros

        def send(grad_MD: Tensor) -> None:
            if own_MD.requires_grad:
                own_MD.backward(grad_MD)

        return Negatives(
            ids_M=ids_A,
            rows_MD=rows_MD.requires_grad_(),
            is_used_M=None if self.drops_repeats else is_used_A,
            send=send,
        )

    def _salt(self, all_ids_A: Tensor) -> Tensor:
        """A number from all events, repeats included: batches of the same items still differ."""
        seed = _mixed(torch.full_like(all_ids_A[:1], self.seed))
        return (_mixed(all_ids_A ^ seed) * (all_ids_A >= 0)).sum()

    def _choose(self, ids_A: Tensor, is_used_A: Tensor, *, salt: Tensor) -> Tensor:
        """Where the chosen ids stand, (num_negatives,) in rising order; used ones go first."""
        assert self.num_negatives is not None
        priority_A = _mixed(ids_A ^ salt).clamp(min=torch.iinfo(torch.int64).min + 1)
        priority_A.masked_fill_(~is_used_A, torch.iinfo(torch.int64).min)
        return priority_A.topk(self.num_negatives).indices.sort().values


def _sum_over_ranks_(rows_MD: Tensor) -> None:
    """In place; nothing travels where there is nothing, of which all ranks know."""
    if num_ranks() > 1 and rows_MD.numel() > 0:
        dist.all_reduce(rows_MD)


def _own_rows(rows_ED: Tensor, index_M: Tensor) -> Tensor:
    """(M, D): rows_ED[index_M] where the index lies inside, zeros where it does not."""
    num_rows = rows_ED.shape[0]
    if num_rows == 0:
        return rows_ED.new_zeros(index_M.shape[0], rows_ED.shape[1])
    is_own_M1 = ((index_M >= 0) & (index_M < num_rows)).unsqueeze(1)
    # Any row will do where none is meant; spread out, their zero gradients do not queue at one.
    return torch.where(is_own_M1, rows_ED.index_select(0, index_M.remainder(num_rows)), 0.0)


def _mixed(x: Tensor) -> Tensor:
    """A hash of int64 values: the finaliser of SplitMix64 (Steele et al. 2014), modulo 2^64."""
    for factor, shift in ((-0x40A7B892E31B1A47, 30), (-0x6B2FB644ECCEEE15, 27)):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, num_bits: int) -> Tensor:
    """x >> num_bits with zeros coming in, which torch's signed shift does not do."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)
