"""Text files of events, a block of lines at a time: fast where all is well, exact where not.

Every block first goes through a CSV reader that knows only clean numbers. What it does not take
(a blank line, 881250949.0 for a time, a wrong value) is read again line by line in Python, which
either accepts the line or says what is wrong with it, and where.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from typing import IO, Protocol

import numpy as np
import polars as pl

from data.archives import RawFile
from data.events import EventBlock
from data.progress import Advance

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 24
_MAX_LINE_BYTES = 1 << 20
_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")
_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")


class EventFormat(Protocol):
    """How a data set writes its events."""

    @property
    def separator(self) -> str: ...

    @property
    def has_header(self) -> bool: ...

    @property
    def numbers(self) -> Mapping[str, type]:
        """The columns that are read, int or float each; without a header, in file order."""
        ...

    def block(self, columns: Mapping[str, np.ndarray]) -> EventBlock | None:
        """Events from clean numbers; None if any breaks a rule."""
        ...

    def event(self, where: str, fields: Mapping[str, str], line: str) -> tuple[int, int, int, int]:
        """User, item, label and time of one line.

        Raises:
            ValueError: the line breaks a rule.
        """
        ...


class EventReader:
    """Reads the events of one file.

    Args:
        file: to read.
        layout: its format.
        known_users: ascending ids of all users; None accepts any.
        users_file: where these come from.
    """

    def __init__(
        self,
        file: RawFile,
        layout: EventFormat,
        *,
        known_users: np.ndarray | None = None,
        users_file: str | None = None,
    ) -> None:
        self._file, self._layout = file, layout
        self._known_users, self._users_file = known_users, users_file
        self._names = tuple(layout.numbers)

    def blocks(self, advance: Advance) -> Iterator[EventBlock]:
        """The events in file order; `advance` is told the bytes read.

        Raises:
            ValueError: a line that breaks the format, with its number.
        """
        line_number, data = 1, b"\n"
        with self._file.open() as stream:
            if self._layout.has_header:
                header = stream.readline()
                advance(len(header))
                self._names = header_columns(
                    f"{self._file}:1",
                    decode(header).lstrip("\ufeff").rstrip(),
                    self._layout.separator,
                    self._names,
                )
                line_number = 2
            for data in _line_blocks(stream, self._file):
                events = self._fast(data)
                yield self._exact(data, line_number) if events is None else events
                advance(len(data))
                line_number += data.count(b"\n")
        if not data.endswith(b"\n"):
            logger.warning(
                "%s:%d does not end its line: if the file is cut, this last event is wrong",
                self._file,
                line_number,
            )

    def _fast(self, data: bytes) -> EventBlock | None:
        """The events of clean lines, else None."""
        frame = _csv(data, self._layout, self._names)
        if frame is None:
            return None
        events = self._layout.block({name: frame[name].to_numpy() for name in self._layout.numbers})
        known = self._known_users
        if events is None or known is None:
            return events
        rows_N = np.minimum(np.searchsorted(known, events.users_N), len(known) - 1)
        return events if np.array_equal(known[rows_N], events.users_N) else None

    def _exact(self, data: bytes, first_line: int) -> EventBlock:
        """The events of any lines; the first bad one is told."""
        known = None if self._known_users is None else set(self._known_users.tolist())
        names, separator = self._names, self._layout.separator
        rows = []
        for number, text in enumerate(_text_lines(data, first_line, self._file), start=first_line):
            line = text.rstrip()
            if not line:
                continue
            where = f"{self._file}:{number}"
            fields = line.split(separator)
            if len(fields) != len(names):
                raise ValueError(
                    f"{where} must have the columns {', '.join(names)} separated by "
                    f"{separator!r}, got {line[:80]!r}; the file may be cut"
                )
            event = self._layout.event(where, dict(zip(names, fields, strict=True)), line)
            if known is not None and event[0] not in known:
                raise ValueError(
                    f"{where}: user {event[0]} is not in {self._users_file}; the files do not match"
                )
            rows.append(event)
        users_N, items_N, labels_N, times_N = np.array(rows, np.int64).reshape(-1, 4).T
        return EventBlock(
            users_N=users_N, items_N=items_N, labels_N=labels_N.astype(np.int16), times_N=times_N
        )


def header_columns(
    where: str, header: str, separator: str, wanted: tuple[str, ...]
) -> tuple[str, ...]:
    """The columns that a file has, in its order.

    Raises:
        ValueError: one of `wanted` is missing.
    """
    columns = tuple(name.partition(":")[0] for name in header.split(separator))
    if any(name not in columns for name in wanted):
        raise ValueError(
            f"{where} must be a header with the columns {', '.join(wanted)} separated by "
            f"{separator!r}, got {header[:80]!r}"
        )
    for name in wanted:
        if columns.count(name) > 1:
            raise ValueError(f"{where} must name each column once, got {name!r} twice")
    return columns


def decode(raw: bytes) -> str:
    """Text of any bytes: UTF-8, else Latin-1."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")  # what GroupLens used before 2010; never fails


def whole_number(text: str) -> int | None:
    """The int64 that `text` spells without a fraction, else None."""
    if _INTEGER.fullmatch(text) is None:
        return None
    number = int(text)
    return number if -(1 << 63) <= number < 1 << 63 else None


def finite_number(text: str) -> float | None:
    """The number that `text` spells, else None."""
    value = math.nan if _NUMBER.fullmatch(text) is None else float(text)
    return value if math.isfinite(value) else None


def identifiers(
    where: str, fields: Mapping[str, str], names: tuple[str, str], line: str
) -> tuple[int, int]:
    """The user and the item id of a line.

    Raises:
        ValueError: one of them is no whole number >= 0.
    """
    found = []
    for what, name in zip(("user", "item"), names, strict=True):
        value = whole_number(fields[name])
        if value is None or value < 0:
            raise ValueError(
                f"{where}: {what} id must be a whole number >= 0, got the line {line[:80]!r}"
            )
        found.append(value)
    return found[0], found[1]


def _line_blocks(stream: IO[bytes], file: RawFile) -> Iterator[bytes]:
    """Whole lines, about _BLOCK_BYTES at a time; the last may lack its line end."""
    rest = b""
    while chunk := stream.read(_BLOCK_BYTES):
        data = rest + chunk
        end = data.rfind(b"\n") + 1
        if end:
            yield data[:end]
        elif len(data) > _MAX_LINE_BYTES:
            raise ValueError(f"{file} must hold lines of text, got {len(data)} bytes without one")
        rest = data[end:]
    if rest:
        yield rest


def _csv(data: bytes, layout: EventFormat, names: tuple[str, ...]) -> pl.DataFrame | None:
    """The columns that are read, if every line has them all as clean numbers, else None."""
    separator = layout.separator
    if not data.isascii():
        return None
    if len(separator) > 1:  # the CSV reader takes one character
        if b"\t" in data:
            return None
        data, separator = data.replace(separator.encode(), b"\t"), "\t"
    types = {int: pl.Int64(), float: pl.Float64()}
    numbers = {name: types[kind] for name, kind in layout.numbers.items()}
    # The last column as well: it is null in a line that is too short.
    wanted = [k for k, name in enumerate(names) if name in numbers or k == len(names) - 1]
    try:
        frame = pl.read_csv(
            data,
            has_header=False,
            schema={name: numbers.get(name, pl.String()) for name in names},
            columns=wanted,
            separator=separator,
            quote_char=None,
        )
    except pl.exceptions.PolarsError:
        return None
    # No line is too short, so with this many separators none is too long, either.
    num_separators = np.count_nonzero(np.frombuffer(data, np.uint8) == ord(separator))
    has_gap = any(frame[name].null_count() for name in frame.columns)
    if has_gap or not frame.height or num_separators != frame.height * (len(names) - 1):
        return None
    return frame


def _text_lines(data: bytes, first_line: int, file: RawFile) -> list[str]:
    try:
        return data.decode().split("\n")
    except UnicodeDecodeError as problem:
        line = first_line + data.count(b"\n", 0, problem.start)
        byte = data[problem.start]
        raise ValueError(
            f"{file}:{line} must be numbers as plain text, got the byte 0x{byte:02X}"
        ) from None
