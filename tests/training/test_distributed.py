"""How a process finds its place in a run, and the collectives that carry plain numbers."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.commands import run_command
from tests.support.two_ranks import TwoRanks
from training.distributed import fresh_store, gather_rows, process_group

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*LAUNCHER, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_half_a_launcher_is_refused_naming_the_command(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("RANK", "0")
    no_launcher.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError) as refused, process_group():
        pass
    for text in ("RANK, WORLD_SIZE", "MASTER_ADDR, MASTER_PORT", "torchrun --nproc_per_node"):
        assert text in str(refused.value)


def test_more_processes_than_gpus_are_refused(no_launcher: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCHER, ("0", "3", "0", "localhost", "1"), strict=True):
        no_launcher.setenv(name, value)
    no_launcher.setattr(torch.cuda, "is_available", lambda: True)
    no_launcher.setattr(torch.cuda, "device_count", lambda: 2)
    message = "at most the 2 GPUs of this host, got 3.*CUDA_VISIBLE_DEVICES"
    with pytest.raises(RuntimeError, match=message), process_group():
        pass


ALONE = """
import os, torch.distributed as dist
from training.distributed import process_group
with process_group(timeout_seconds=7) as world:
    from torch.distributed.distributed_c10d import _get_default_group
    timeout = _get_default_group()._get_backend(world.device).options._timeout
    print(world.rank, world.world_size, world.device, dist.get_backend(), timeout.seconds)
print(dist.is_initialized())
"""


def test_plain_python_is_a_run_of_one_with_the_timeout_asked_for() -> None:
    result = run_command(
        [sys.executable, "-c", ALONE], env={"CUDA_VISIBLE_DEVICES": ""}, timeout_seconds=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["0", "1", "cpu", "gloo", "7", "False"]


def join(store: dist.Store, *, seconds: float = 20.0) -> list[dist.Store]:
    """Three ranks that start together with a launcher's store."""

    def one(rank: int) -> dist.Store:
        timeout = timedelta(seconds=seconds)
        return fresh_store(store, rank=rank, world_size=3, timeout=timeout)

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(one, range(3)))


def test_restarted_ranks_share_a_store_without_what_dead_ones_left() -> None:
    store = dist.HashStore()
    store.set("ask/1", "of a rank that died before it was answered")
    first = join(store)
    first[0].set("address", "of a dead process")
    again = join(store)
    assert not again[1].check(["address"])
    again[0].set("address", "here")
    assert [one.get("address") for one in again] == [b"here"] * 3


def test_a_rank_that_never_comes_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not come .*timeout_seconds = 0.1"):
        fresh_store(dist.HashStore(), rank=0, world_size=3, timeout=timedelta(seconds=0.1))


def _rows(rank: int, world_size: int) -> list[list[float]]:
    return gather_rows(torch.tensor([float(rank), 1.0])).tolist()


def test_rows_of_all_ranks_are_gathered_in_order(two_ranks: TwoRanks) -> None:
    assert two_ranks.run(_rows) == [[[0.0, 1.0], [1.0, 1.0]]] * 2
