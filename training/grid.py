"""Ranks by users and by heads: who shares a model with whom, and whose gradients are summed.

With TensorModelParallelArgs.tensor_model_parallel_size = T, consecutive ranks form groups of T that
share one model (`modules.linear.parallel`); ranks that stand at the same place in their groups are
replicas of each other. With T = 1 all ranks are replicas.
"""

import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import TensorModelParallelArgs
from modules.linear.parallel import GradientKind, TensorParallel
from training.distributed import World


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How the ranks of a run share the work: by users, and by heads of one model.

    Attributes:
        data: this process among those that have the same heads and other users.
        data_group: those processes; None in a run of one process.
        tensor: the ranks that have the same users and other heads; None = no rank has.
    """

    data: World
    data_group: dist.ProcessGroup | None
    tensor: TensorParallel | None = None

    @property
    def tensor_size(self) -> int:
        """Ranks that share one model."""
        return 1 if self.tensor is None else self.tensor.size


def make_grid(args: TensorModelParallelArgs, *, world: World, timeout_seconds: float) -> Grid:
    """Divides the ranks into groups that share a model, consecutive ones; collective.

    Raises:
        ValueError: the number of processes is no multiple of the group's size.
    """
    size = args.tensor_model_parallel_size
    if size == 1:
        return Grid(data=world, data_group=dist.GroupMember.WORLD if world.world_size > 1 else None)
    if world.world_size % size:
        raise ValueError(
            f"TensorModelParallelArgs.tensor_model_parallel_size must divide the number of "
            f"processes, got {size} and {world.world_size}; start a multiple of {size} processes, "
            "or set 1"
        )
    with warnings.catch_warnings():
        # It says what it does without TransformerEngine and Apex, of which nothing here is used.
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state  # takes seconds

    if world.device.type == "cpu" and not torch.cuda.is_available():
        # Megatron's mappings make their results on the current CUDA device. On a machine without
        # one this is it; nothing else there asks.
        torch.cuda.current_device = _cpu  # type: ignore[assignment]
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        size,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=math.ceil(timeout_seconds / 60),
    )
    data_rank = parallel_state.get_data_parallel_rank()
    return Grid(
        data=dataclasses.replace(world, rank=data_rank, world_size=world.world_size // size),
        data_group=parallel_state.get_data_parallel_group(),
        tensor=TensorParallel(
            size=size,
            rank=parallel_state.get_tensor_model_parallel_rank(),
            group=parallel_state.get_tensor_model_parallel_group(),
            splits_tokens=args.sequence_parallel,
        ),
    )


def _cpu() -> torch.device:
    return torch.device("cpu")


class SummedGradients:
    """Gradients summed over the ranks that have some of them, kept aside until they are wanted.

    Sums, not means: the loss is already divided by the label count of all ranks. The tensors
    themselves keep this rank's own gradients until ``write_back``, so that a bad step can still
    be traced to its rank.

    Args:
        own: this rank's gradients, all of one dtype, in the same order on every rank.
        kinds: what each of them is, where ranks share a model (`modules.linear.parallel`).
        grid: how they share it; None = every rank has whole gradients.
    """

    def __init__(
        self,
        own: list[Tensor],
        *,
        kinds: Sequence[GradientKind] = (),
        grid: Grid | None = None,
    ) -> None:
        self._own = own
        self._parts: list[Tensor] | None = None
        if grid is not None and grid.tensor is not None:
            self._parts = _summed_by_kind(own, kinds, grid)
        elif own and dist.get_world_size() > 1:
            self._parts = _flat_sum(own, None)

    @property
    def gradients(self) -> list[Tensor]:
        """The sums, in the order given."""
        return self._own if self._parts is None else self._parts

    def write_back(self) -> None:
        """Overwrites this rank's gradients with the sums."""
        if self._parts is not None:
            torch._foreach_copy_(self._own, self._parts)


def _flat_sum(own: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Sums over a group, or all ranks, in one all-reduce."""
    flat = torch.cat([gradient.reshape(-1) for gradient in own])
    dist.all_reduce(flat, group=group)
    sizes = [gradient.numel() for gradient in own]
    return [part.view_as(gradient) for part, gradient in zip(flat.split(sizes), own, strict=True)]


def _summed_by_kind(
    own: Sequence[Tensor], kinds: Sequence[GradientKind], grid: Grid
) -> list[Tensor]:
    """Whole gradients, or those of this rank's parts; see `GradientKind`."""
    is_part = [kind is GradientKind.PART for kind in kinds]
    sums: dict[bool, Iterator[Tensor]] = {}
    for wanted, group in ((False, None), (True, grid.data_group)):
        chosen = [one for one, part in zip(own, is_part, strict=True) if part == wanted]
        sums[wanted] = iter(_flat_sum(chosen, group))
    found = [next(sums[part]) for part in is_part]
    scaled = [one for one, kind in zip(found, kinds, strict=True) if kind is not GradientKind.WHOLE]
    torch._foreach_mul_(scaled, grid.tensor_size)
    return found
