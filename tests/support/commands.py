"""Run a whole command in a test, an entry above all, without leaving anything behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT_ROOT = Path(__file__).resolve().parents[2]
_MARK = "OCTET_TEST_COMMAND"


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """What a command left: exit status, output, and the processes that outlived it."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    processes_left: int
    """Children still alive half a second after the command had ended (they are killed then)."""


class CommandTimeoutError(AssertionError):
    """A command had to be killed; the text holds the end of its output."""


def run_command(
    args: Sequence[str | os.PathLike[str]],
    *,
    timeout_seconds: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = PROJECT_ROOT,
) -> CommandResult:
    """Run `args` from the project root and return its result, whatever its exit status.

    `env` is added to this environment. Raises CommandTimeoutError after `timeout_seconds`.
    When it returns or raises, the command and everything it started have ended, also children
    that made themselves a new session, as torchrun's do.
    """
    mark = uuid.uuid4().hex
    full_env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), _MARK: mark}
    started = time.monotonic()
    # Files, not pipes: a child that outlives the command would keep a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [os.fspath(arg) for arg in args],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=full_env,
            cwd=cwd,
            start_new_session=True,
        )
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            _end(process, mark)
            raise CommandTimeoutError(
                f"{' '.join(map(str, args))} was not done after {timeout_seconds:g} s\n"
                f"{_text(out)[-4000:]}\n{_text(err)[-4000:]}"
            ) from None
        except BaseException:
            _end(process, mark)
            raise
        seconds = time.monotonic() - started
        left = _wait_for_children(mark)
        _end(process, mark)
        return CommandResult(
            returncode=process.returncode,
            stdout=_text(out),
            stderr=_text(err),
            seconds=seconds,
            processes_left=left,
        )


def bindings(values: Mapping[str, Any]) -> list[str]:
    """Command-line overrides of settings, by "Class.field"."""
    return [f"--gin-binding={name} = {value!r}" for name, value in values.items()]


def start_entry(
    script: str | os.PathLike[str],
    config: str | os.PathLike[str],
    values: Mapping[str, Any],
    *flags: str,
    processes: int | None = None,
) -> CommandResult:
    """An entry with settings on top of a gin file: plain python, or torchrun when a number of
    processes is given."""
    launcher = [sys.executable]
    if processes is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*launcher, script, "--gin-config-file", config, *bindings(values), *flags]
    return run_command(command, timeout_seconds=150)


def metric_records(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run folder's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _text(file: tempfile._TemporaryFileWrapper[str]) -> str:
    file.seek(0)
    return file.read()


def _wait_for_children(mark: str) -> int:
    deadline = time.monotonic() + 0.5
    while (left := len(_marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in _marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _marked(mark: str) -> list[int]:
    """Ids of the processes that inherited the mark (none where there is no /proc)."""
    needle = f"{_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if needle in entry.read_bytes():
                found.append(int(entry.parent.name))
    return found
