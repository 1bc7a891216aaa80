"""How far a long stage is, on standard error: a bar on a terminal, one line in a log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Literal

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

logger = logging.getLogger(__name__)

Advance = Callable[[int], None]


@contextlib.contextmanager
def stage(what: str, total: int | None, *, unit: Literal["bytes", "rows"]) -> Iterator[Advance]:
    """A function that is called with the bytes or rows done since its last call.

    Args:
        what: the verb and its object, for instance "reading u.data".
        total: bytes or rows of the whole stage; None where nobody knows.
        unit: what is counted.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        logger.info("%s%s", what, "" if total is None else f" ({_amount(total, unit)})")
    columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
    if unit == "bytes":
        columns += [DownloadColumn(), TransferSpeedColumn()]
    else:
        columns.append(MofNCompleteColumn())
    columns.append(TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def _amount(total: int, unit: str) -> str:
    return decimal(total) if unit == "bytes" else f"{total:,} {unit}"
