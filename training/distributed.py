"""Processes of one run: who this one is, its device, and collectives that carry plain numbers."""

import dataclasses
import logging
import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import TensorModelParallelArgs
from modules.linear.parallel import GradientKind, TensorParallel

logger = logging.getLogger(__name__)

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among those of the run.

    Attributes:
        rank, world_size: global rank and number of processes.
        local_rank, local_world_size: the same on this host.
        device: where the model lives: its own GPU, or the CPU.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process logs, prints and writes the run folder."""
        return self.rank == 0


@contextmanager
def process_group(*, timeout_seconds: float = 600.0) -> Iterator[World]:
    """Joins the run's process group (NCCL on GPUs, gloo on CPU) and leaves it at the end.

    A plain ``python`` start, without torchrun's variables, runs as one process.

    Raises:
        RuntimeError: part of the launcher's variables is missing, or there are more
            processes on this host than GPUs.
    """
    environment = _launcher_environment()
    local_rank = int(environment["LOCAL_RANK"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_world_size > torch.cuda.device_count():
            raise RuntimeError(
                f"torchrun --nproc_per_node must be at most the {torch.cuda.device_count()} GPUs "
                f"of this host, got {local_world_size}; start fewer processes, or hide the GPUs "
                "with CUDA_VISIBLE_DEVICES= to run on the CPU"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    os.environ.update(environment)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield World(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            local_rank=local_rank,
            local_world_size=local_world_size,
            device=device,
        )
    finally:
        dist.destroy_process_group()


def _launcher_environment() -> dict[str, str]:
    present = [name for name in _LAUNCHER_VARIABLES if name in os.environ]
    if not present:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        return {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
    missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"the environment names {', '.join(present)} but not {', '.join(missing)}; start with "
            "`torchrun --nproc_per_node N SCRIPT ...`, or unset them to run as one process"
        )
    return {name: os.environ[name] for name in _LAUNCHER_VARIABLES}


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


def sum_over_ranks_(tensor: Tensor) -> Tensor:
    """The tensor itself, summed in place over all ranks; a single process launches nothing."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_rows(row: Tensor) -> Tensor:
    """Every rank's copy of a 1-D tensor, stacked: (world_size, len(row)), the same on all ranks."""
    world_size = dist.get_world_size()
    if world_size == 1:
        return row.unsqueeze(0)
    rows = row.new_empty(world_size * row.numel())
    dist.all_gather_into_tensor(rows, row)
    return rows.view(world_size, -1)


def from_main(value: float, *, world: World) -> float:
    """Rank 0's value on every rank; collective."""
    sent = torch.tensor(value, dtype=torch.float64, device=world.device)
    dist.broadcast(sent, src=0)
    return float(sent)
