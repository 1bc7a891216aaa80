"""Processes of one run: who this one is, its device, and collectives that carry plain numbers."""

import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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
    timeout = timedelta(seconds=timeout_seconds)
    arguments: dict[str, Any] = {}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        fresh = fresh_store(store, rank=rank, world_size=world_size, timeout=timeout)
        arguments = {"store": fresh, "rank": rank, "world_size": world_size}
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
        **arguments,
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


def fresh_store(store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of a launcher's store that these processes have to themselves; collective.

    torchrun's agent keeps its store when it restarts the processes, addresses of the dead ones
    included, and those would be connected to. Neither its count of restarts (each host has its
    own) nor a key of fixed name tells old from new. So each rank asks under a name of its own, and
    rank 0 answers everyone until all have said that they know its name.

    Raises:
        RuntimeError: the other ranks do not come within the time.
    """
    own = uuid.uuid4().hex
    if rank != 0:
        store.set(f"ask/{rank}", own)
        store.wait([f"answer/{own}"], timeout)
        name = store.get(f"answer/{own}").decode()
        store.set(f"known/{name}/{rank}", "")
        return dist.PrefixStore(name, store)
    deadline = time.monotonic() + timeout.total_seconds()
    absent = set(range(1, world_size))
    while absent := {one for one in absent if not store.check([f"known/{own}/{one}"])}:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"ranks {sorted(absent)} did not come within TrainerArgs."
                f"process_group_timeout_seconds = {timeout.total_seconds():g}; see why they did "
                "not start, or allow more time"
            )
        for one in absent:
            if store.check([f"ask/{one}"]):
                store.set(f"answer/{store.get(f'ask/{one}').decode()}", own)
        time.sleep(0.01)
    return dist.PrefixStore(own, store)


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
