"""One persistent gloo pair for all two-process cases.

A case is a module-level function `fn(rank, world_size, *args)`. `TwoRanks.run` runs it on both
ranks of one default gloo group and returns `[result_of_rank_0, result_of_rank_1]`, so a case costs
milliseconds instead of two interpreter starts. Nothing here may hang: a call that takes too long,
or leaves one rank stuck, costs the pair, which the next call starts anew.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

WORLD_SIZE = 2
START_SECONDS = 120.0
CHECK_SECONDS = 10.0
# How long the other rank may still run once one has failed: it is usually stuck in a collective.
GRACE_SECONDS = 3.0


class RankError(RuntimeError):
    """A case failed; the text holds each failing rank's traceback.

    Attributes: `errors`, {rank: "ExceptionType: message"} of the ranks that raised.
    """

    def __init__(self, text: str, errors: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.errors = dict(errors or {})


@dataclass
class _Rank:
    process: Any
    channel: connection.Connection
    stack_file: Path


class TwoRanks:
    """Two processes in one gloo group, started at the first call and again after a broken one."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="two-ranks-")
        self._starts = 0

    def run(self, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0) -> list[Any]:
        """[fn(0, 2, *args), fn(1, 2, *args)], one from each rank.

        `fn` is a module-level function; arguments and results travel pickled (tensors by value).
        Raises RankError when a rank raises, dies, or is not done after `timeout_seconds`.
        """
        try:
            case = pickle.dumps((fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"a case is a module-level function with picklable arguments, got {fn!r}: {error}"
            ) from error
        self._ensure_usable()
        replies = self._exchange(case, timeout_seconds)
        failed = {rank: reply for rank, reply in replies.items() if not reply["ok"]}
        if failed:
            raise RankError(
                "\n".join(f"rank {rank}: {reply['traceback']}" for rank, reply in failed.items()),
                {rank: reply["error"] for rank, reply in failed.items()},
            )
        return [replies[rank]["result"] for rank in range(WORLD_SIZE)]

    def process_ids(self) -> list[int]:
        """The two process ids, so that a test can see whether the pair was kept."""
        return [rank.process.pid for rank in self._ranks]

    def close(self) -> None:
        """Ask both ranks to leave, then end what is still there."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.channel.send_bytes(pickle.dumps(None))
        deadline = time.monotonic() + 5.0
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        self._folder.cleanup()

    def _ensure_usable(self) -> None:
        """Start the pair if there is none, or if its group no longer answers correctly."""
        if self._ranks:
            try:
                replies = self._exchange(pickle.dumps((_check_group, ())), CHECK_SECONDS)
                if all(reply["ok"] for reply in replies.values()):
                    return
            except RankError:
                pass  # _exchange has already ended the pair
            self._kill()
        self._start()

    def _start(self) -> None:
        context = get_context("spawn")  # fork is unsafe once torch has started threads
        self._starts += 1
        store = Path(self._folder.name) / f"store-{self._starts}"
        for rank in range(WORLD_SIZE):
            here, there = context.Pipe()
            stack_file = Path(self._folder.name) / f"stack-{self._starts}-{rank}"
            process = context.Process(
                target=_serve,
                args=(rank, there, str(store), str(stack_file)),
                daemon=True,
                name=f"two-ranks-{rank}",
            )
            with _environment(OMP_NUM_THREADS="1"):
                process.start()
            there.close()
            self._ranks.append(_Rank(process, here, stack_file))
        self._collect(START_SECONDS, "start")

    def _exchange(self, case: bytes, timeout_seconds: float) -> dict[int, dict[str, Any]]:
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                rank.channel.send_bytes(case)  # a dead rank is reported by _collect
        return self._collect(timeout_seconds, "finish")

    def _collect(self, timeout_seconds: float, what: str) -> dict[int, dict[str, Any]]:
        """One reply from each rank. Ends the pair and raises when one never comes."""
        deadline = time.monotonic() + timeout_seconds
        replies: dict[int, dict[str, Any]] = {}
        waiting = {rank.channel: index for index, rank in enumerate(self._ranks)}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for channel in ready:
                index = waiting.pop(channel)
                try:
                    replies[index] = pickle.loads(channel.recv_bytes())
                except (EOFError, ConnectionResetError):
                    replies[index] = self._obituary(index)
                if not replies[index]["ok"]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if waiting:
            self._give_up(replies, sorted(waiting.values()), timeout_seconds, what)
        if any(reply.get("dead") for reply in replies.values()):
            self._kill()
        return replies

    def _obituary(self, index: int) -> dict[str, Any]:
        process = self._ranks[index].process
        process.join(5.0)
        text = f"the process died with exit code {process.exitcode}"
        return {"ok": False, "dead": True, "error": text, "traceback": text}

    def _give_up(
        self, replies: dict[int, Any], stuck: list[int], timeout_seconds: float, what: str
    ) -> None:
        failed = {rank: reply for rank, reply in replies.items() if not reply["ok"]}
        lines = [f"rank {rank}: {reply['traceback']}" for rank, reply in failed.items()]
        for rank in stuck:
            reason = (
                "was still running when the other rank had failed"
                if failed
                else f"did not {what} within {timeout_seconds:g} s"
            )
            lines.append(f"rank {rank}: {reason}, at\n{self._stack(rank)}")
        self._kill()
        raise RankError("\n".join(lines), {rank: reply["error"] for rank, reply in failed.items()})

    def _stack(self, index: int) -> str:
        """Where a stuck rank stands now, from its own faulthandler."""
        rank = self._ranks[index]
        if not rank.stack_file.exists():
            return "(no stack: the process has not come up)"
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return rank.stack_file.read_text(errors="replace") or "(no stack: no answer)"

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join(10.0)
            rank.channel.close()
        self._ranks = []


@contextlib.contextmanager
def _environment(**values: str) -> Any:
    """Set environment variables for as long as a child starts, so that it inherits them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _serve(rank: int, channel: connection.Connection, store: str, stack_file: str) -> None:
    """Life of one rank: join the group, answer cases until told to leave."""
    import faulthandler

    stack = open(stack_file, "w", encoding="utf-8")  # noqa: SIM115 (open for the process's life)
    faulthandler.register(signal.SIGUSR1, file=stack)
    os.environ.update(_launcher_environment(rank))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(minutes=5),
    )
    channel.send_bytes(pickle.dumps({"ok": True, "result": None}))
    clean_environment, home = dict(os.environ), os.getcwd()
    while True:
        try:
            message = channel.recv_bytes()
        except EOFError:  # the test process is gone
            return
        case = _load(message)
        if case is None:
            break
        channel.send_bytes(_answer(case, rank))
        _tidy(clean_environment, home)
    if dist.is_initialized():
        dist.destroy_process_group()


def _launcher_environment(rank: int) -> dict[str, str]:
    """What torchrun would have set; gloo is bound to the loopback device where there is one."""
    values = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD_SIZE),
        "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
    }
    if sys.platform == "linux":
        values["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return values


def _load(message: bytes) -> Any:
    """The case, or the error that its import raised, to be reported as the case's own."""
    try:
        return pickle.loads(message)
    except BaseException as error:
        return (_raise, (error,))


def _raise(rank: int, world_size: int, error: BaseException) -> None:
    raise error


def _answer(case: tuple[Callable[..., Any], tuple[Any, ...]], rank: int) -> bytes:
    fn, args = case
    try:
        _seed()
        return pickle.dumps({"ok": True, "result": fn(rank, WORLD_SIZE, *args)})
    except BaseException as error:
        lines = "".join(traceback.format_exception(error))
        name = f"{type(error).__name__}: {error}"
        return pickle.dumps({"ok": False, "error": name, "traceback": lines})


def _seed() -> None:
    """The same generators for a case whatever ran before it."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _tidy(clean_environment: dict[str, str], home: str) -> None:
    """Undo what a case leaves in the process; a lost default group shows in _check_group."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(clean_environment)
    os.chdir(home)
    if "megatron.core.parallel_state" in sys.modules:
        importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()
    if dist.is_initialized():
        for group in list(distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


def _check_group(rank: int, world_size: int) -> None:
    """Raise unless the default group is whole and both ranks are at the same collective."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() != world_size:
        raise RuntimeError("the case before has taken the default group down")
    token = torch.tensor([rank + 1, 10 * (rank + 1)])
    dist.all_reduce(token)
    if token.tolist() != [3, 30]:
        raise RuntimeError("the case before has left a collective behind")
