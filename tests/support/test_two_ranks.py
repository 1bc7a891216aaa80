from __future__ import annotations

import os
import random
import re
import sys
import time

import pytest

from tests.support.commands import CommandTimeoutError, run_command
from tests.support.two_ranks import RankError, TwoRanks


def _sum_of_ranks(rank: int, world_size: int, base: int) -> tuple[int, int, int]:
    import torch
    import torch.distributed as dist

    value = torch.tensor(base + rank)
    dist.all_reduce(value)
    return rank, world_size, int(value)


def _tensor(rank: int, world_size: int):
    import torch

    return torch.full((3,), rank)


def _fail_on(rank: int, world_size: int, failing: tuple[int, ...]) -> int:
    if rank in failing:
        raise ValueError(f"wrong on purpose on rank {rank}")
    return rank


def _fail_before_collective(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 1:
        raise ValueError("rank 1 never comes")
    dist.all_reduce(torch.zeros(1))


def _sleep_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(600)


def _die(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)


def _destroy_group(rank: int, world_size: int) -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def _leave_collective_behind(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 0:
        dist.all_reduce(torch.zeros(1), async_op=True)


def _leave_state_behind(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    dist.new_group([0, 1])
    torch.rand(5)


def _look_around(rank: int, world_size: int) -> tuple[object, ...]:
    import torch
    from torch.distributed import distributed_c10d

    return (
        str(torch.get_default_dtype()),
        torch.is_grad_enabled(),
        os.environ.get("LEFT_BEHIND"),
        os.getcwd() == "/",
        len(distributed_c10d._world.pg_map),
        random.random(),
        float(torch.rand(1)),
    )


def _environment_of_rank(rank: int, world_size: int) -> tuple[str, ...]:
    return tuple(
        os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    )


def test_both_ranks_run_the_case_in_one_group(two_ranks: TwoRanks) -> None:
    assert two_ranks.run(_sum_of_ranks, 10) == [(0, 2, 21), (1, 2, 21)]


def test_tensors_come_back_by_value(two_ranks: TwoRanks) -> None:
    first, second = two_ranks.run(_tensor)
    assert (first.tolist(), second.tolist()) == ([0, 0, 0], [1, 1, 1])


def test_ranks_see_what_the_launcher_sets(two_ranks: TwoRanks) -> None:
    assert two_ranks.run(_environment_of_rank) == [("0", "0", "2", "1"), ("1", "1", "2", "1")]


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_exception_names_the_rank_and_keeps_the_pair(
    two_ranks: TwoRanks, failing: tuple[int, ...]
) -> None:
    two_ranks.run(_sum_of_ranks, 0)
    before = two_ranks.process_ids()
    with pytest.raises(RankError, match="wrong on purpose") as caught:
        two_ranks.run(_fail_on, failing)
    assert set(caught.value.errors) == set(failing)
    for rank in failing:
        assert caught.value.errors[rank] == f"ValueError: wrong on purpose on rank {rank}"
    assert "in _fail_on" in str(caught.value)
    assert two_ranks.run(_sum_of_ranks, 0)[0] == (0, 2, 1)
    assert two_ranks.process_ids() == before


def test_rank_left_in_a_collective_is_ended_and_the_pair_replaced(two_ranks: TwoRanks) -> None:
    two_ranks.run(_sum_of_ranks, 0)
    before = two_ranks.process_ids()
    with pytest.raises(RankError, match="rank 1 never comes") as caught:
        two_ranks.run(_fail_before_collective)
    assert "rank 0: was still running when the other rank had failed" in str(caught.value)
    assert "in _fail_before_collective" in str(caught.value)
    assert two_ranks.run(_sum_of_ranks, 0)[0] == (0, 2, 1)
    assert not set(two_ranks.process_ids()) & set(before)


def test_timeout_ends_the_pair_and_shows_the_stack(two_ranks: TwoRanks) -> None:
    two_ranks.run(_sum_of_ranks, 0)
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 0: did not finish within 1 s") as caught:
        two_ranks.run(_sleep_on_rank_0, timeout_seconds=1.0)
    assert time.monotonic() - started < 10
    assert "_sleep_on_rank_0" in str(caught.value)
    assert two_ranks.process_ids() == []


@pytest.mark.parametrize("case", [_destroy_group, _leave_collective_behind])
def test_group_broken_by_a_case_is_replaced_before_the_next(two_ranks: TwoRanks, case) -> None:
    two_ranks.run(case)
    assert two_ranks.run(_sum_of_ranks, 5)[1] == (1, 2, 11)


def test_dead_rank_is_reported_with_its_exit_code(two_ranks: TwoRanks) -> None:
    with pytest.raises(RankError, match="rank 1: the process died with exit code 7"):
        two_ranks.run(_die)
    assert two_ranks.run(_sum_of_ranks, 0)[0] == (0, 2, 1)


def test_state_of_one_case_does_not_reach_the_next(two_ranks: TwoRanks) -> None:
    fresh = two_ranks.run(_look_around)
    two_ranks.run(_leave_state_behind)
    assert two_ranks.run(_look_around) == fresh
    assert fresh[0][:5] == ("torch.float32", True, None, False, 1)


def test_local_function_is_refused_by_name(two_ranks: TwoRanks) -> None:
    with pytest.raises(TypeError, match="module-level function"):
        two_ranks.run(lambda rank, world_size: rank)


def test_run_command_returns_status_and_output() -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    result = run_command([sys.executable, "-c", script])
    assert (result.returncode, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert result.processes_left == 0


def _child_in_its_own_session(then: str) -> str:
    """A script whose child leaves its process group, as torchrun's workers do."""
    child = "import time; time.sleep(600)"
    return (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        f"print(child.pid, flush=True)\n{then}"
    )


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="children are found through /proc")
def test_run_command_counts_and_ends_children_that_stay() -> None:
    result = run_command([sys.executable, "-c", _child_in_its_own_session("")])
    assert result.processes_left == 1
    time.sleep(0.1)
    assert not _is_running(int(result.stdout))


@pytest.mark.skipif(sys.platform != "linux", reason="children are found through /proc")
def test_run_command_timeout_ends_the_whole_tree() -> None:
    script = _child_in_its_own_session("time.sleep(600)")
    with pytest.raises(CommandTimeoutError, match="was not done after 2 s") as caught:
        run_command([sys.executable, "-c", script], timeout_seconds=2.0)
    time.sleep(0.1)
    assert not _is_running(int(re.findall(r"^\d+$", str(caught.value), re.MULTILINE)[0]))
