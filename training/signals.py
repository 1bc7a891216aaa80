"""SIGTERM and SIGUSR1 to a training: save after the present step, then end or go on.

A handler only notes what was asked for. All ranks learn of it with the figures of the next step
(`training.step`), so that they stop at the same one whichever of them the signal reached.
"""

import enum
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Request(enum.IntEnum):
    """What was asked of a run; the larger one wins."""

    NONE = 0
    SAVE = 1
    SAVE_AND_END = 2


_REQUESTS = {signal.SIGUSR1: Request.SAVE, signal.SIGTERM: Request.SAVE_AND_END}

# What a shell reports of a process that SIGTERM, or Ctrl-C, ended.
TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT


class EndedBySignalError(RuntimeError):
    """A run was asked to end before its last step; all of it is saved."""


class SaveRequests:
    """The requests of this process that the run has not met yet."""

    def __init__(self) -> None:
        self._pending = Request.NONE

    def add(self, request: Request) -> None:
        """Notes a request beside what is pending."""
        self._pending = max(self._pending, request)

    def take(self) -> Request:
        """What is pending; from now on it is met."""
        taken, self._pending = self._pending, Request.NONE
        return taken


@contextmanager
def save_requests(*, limit_seconds: float) -> Iterator[SaveRequests]:
    """Turns SIGTERM and SIGUSR1 into requests, in the main thread only.

    Args:
        limit_seconds: after SIGTERM; a process that is still here then ends without saving.
    """
    requests = SaveRequests()
    timers: list[threading.Timer] = []

    def handle(number: int, frame: FrameType | None) -> None:
        request = _REQUESTS[signal.Signals(number)]
        requests.add(request)
        if request is Request.SAVE_AND_END and not timers:
            timers.append(threading.Timer(limit_seconds, _give_up, (limit_seconds,)))
            timers[0].daemon = True
            timers[0].start()

    before = {number: signal.signal(number, handle) for number in _REQUESTS}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for timer in timers:
            timer.cancel()


def _give_up(limit_seconds: float) -> None:
    sys.stderr.write(
        f"error: rank {os.environ.get('RANK', '0')}: had not saved and ended within "
        f"TrainerArgs.ckpt_signal_seconds = {limit_seconds:g} of SIGTERM, and ends without; resume "
        "from the newest checkpoint, which is whole, and allow more time if the launcher does\n"
    )
    sys.stderr.flush()
    os._exit(TERMINATED)
