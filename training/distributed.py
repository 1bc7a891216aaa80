"""Processes of one run: who this one is, its device, and collectives that carry plain numbers."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

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
