"""Writes the Arrow files of a data set, each with one record batch: a reader maps whole columns."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from data.events import EventBlock
from data.progress import Advance

_EVENTS = pa.schema([("item_id", pa.int64()), ("label", pa.int16()), ("timestamp", pa.int64())])


def write_events(
    path: Path,
    parts: Iterable[EventBlock],
    *,
    num_events: int,
    ticks_per_second: int,
    advance: Advance,
) -> None:
    """Writes item_id, label and timestamp (whole seconds) of ordered events, a part at a time.

    The file is laid out first, full of zeros, and its columns are filled in afterwards: memory
    holds one part, and a full disk shows before the work is done.

    Args:
        path: file to write.
        parts: the events in their final order, `num_events` in all (at least one).
        num_events: rows of the file.
        ticks_per_second: unit of the times of the parts.
        advance: told the rows written.
    """
    offsets = _lay_out(path, num_events)
    row = 0
    with path.open("r+b") as file:
        for part in parts:
            values = (part.items_N, part.labels_N, part.times_N // ticks_per_second)
            for field, offset, values_N in zip(_EVENTS, offsets, values, strict=True):
                typed_N = np.ascontiguousarray(values_N, field.type.to_pandas_dtype())
                file.seek(offset + row * typed_N.itemsize)
                file.write(typed_N.data)
            row += len(part)
            advance(len(part))
        file.flush()
        os.fsync(file.fileno())
    assert row == num_events


def _lay_out(path: Path, num_events: int) -> list[int]:
    """Writes the file without its values; where in it the values of each column begin."""
    # Untouched private memory: every page of it is the one page of zeros that the kernel keeps.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    zeros = mmap.mmap(-1, 8 * num_events, flags=private, prot=mmap.PROT_READ)
    buffer = pa.py_buffer(zeros)
    arrays = [
        pa.Array.from_buffers(t, num_events, [None, buffer.slice(0, num_events * t.byte_width)])
        for t in _EVENTS.types
    ]
    with path.open("wb") as file, pa.ipc.new_file(file, _EVENTS) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=_EVENTS))
    with pa.memory_map(str(path)) as source:
        start = source.read_buffer(source.size()).address
        batch = pa.ipc.open_file(source).get_batch(0)
        return [column.buffers()[1].address - start for column in batch.columns]


def write_users(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Writes int64 columns of equal length in this order."""
    table = pa.table({name: pa.array(values_U, pa.int64()) for name, values_U in columns.items()})
    with path.open("wb") as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        file.flush()
        os.fsync(file.fileno())
