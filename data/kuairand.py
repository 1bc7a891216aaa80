"""KuaiRand in its publisher's format: logs of shown videos, and what is known about the users.

The label of an event is a mask of its feedback flags, bit k for task k in the order of
KUAIRAND_FLAGS. Only the standard logs are read: the random log has the 0.4% of videos that were
drawn by lot and put into the feed, and public trainers leave it out. Video features are not read
either: the model knows an item by its id.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

import numpy as np

from data.archives import RawFile
from data.events import EventBlock
from data.raw_lines import decode, header_columns, identifiers, whole_number
from data.sources import KUAIRAND_FLAGS, Layout
from data.users import UserTable, user_table

_USER, _ITEM, _TIME = "user_id", "video_id", "time_ms"


class KuaiRandFormat:
    """Logs: user, video, milliseconds since 1970 and the flags of one shown video a line."""

    ticks_per_second = 1000

    def __init__(self, layout: Layout) -> None:
        self.separator, self.has_header = layout.separator, layout.has_header
        self.numbers: dict[str, type] = dict.fromkeys(layout.events_columns, int)

    def block(self, columns: Mapping[str, np.ndarray]) -> EventBlock | None:
        """Events from clean numbers; None if an id or a time is negative or a flag not 0 or 1."""
        users_N, items_N, times_N = (columns[name] for name in (_USER, _ITEM, _TIME))
        if users_N.min() < 0 or items_N.min() < 0 or times_N.min() < 0:
            return None
        labels_N = np.zeros(len(users_N), np.int16)
        for bit, name in enumerate(KUAIRAND_FLAGS):
            flags_N = columns[name]
            if flags_N.min() < 0 or flags_N.max() > 1:
                return None
            labels_N |= flags_N.astype(np.int16) << bit
        return EventBlock(users_N=users_N, items_N=items_N, labels_N=labels_N, times_N=times_N)

    def event(self, where: str, fields: Mapping[str, str], line: str) -> tuple[int, int, int, int]:
        """User, item, mask and milliseconds of one line.

        Raises:
            ValueError: an id, a time or a flag that breaks its rule.
        """
        user, item = identifiers(where, fields, (_USER, _ITEM), line)
        milliseconds = whole_number(fields[_TIME])
        if milliseconds is None or milliseconds < 0:
            raise ValueError(
                f"{where}: {_TIME} must be whole milliseconds since 1970, got {fields[_TIME]!r}"
            )
        mask = 0
        for bit, name in enumerate(KUAIRAND_FLAGS):
            flag = whole_number(fields[name])
            if flag not in (0, 1):
                raise ValueError(f"{where}: {name} must be 0 or 1, got {fields[name]!r}")
            mask |= flag << bit
        return user, item, mask, milliseconds


def read_users(file: RawFile, layout: Layout) -> UserTable:
    """The users with their range features, each an index into its sorted vocabulary.

    Args:
        file: to read: CSV whose ranges are quoted where they hold a comma, as in "(0,10]".
        layout: names its columns.

    Raises:
        ValueError: a line that breaks the format, with its number; a user twice; no users.
    """
    names = [name for name in layout.users_columns if name != _USER]
    texts: dict[str, list[str]] = {name: [] for name in names}
    lines: dict[int, int] = {}
    with file.open() as stream:
        text = decode(stream.read())
    header, _, body = text.lstrip("\ufeff").partition("\n")
    columns = header_columns(
        f"{file}:1", header.rstrip(), layout.users_separator, layout.users_columns
    )
    # One line at a time: a quote that is never closed must not swallow the lines after it.
    for number, line in enumerate(io.StringIO(body), start=2):
        if not line.rstrip():
            continue
        where = f"{file}:{number}"
        try:
            values = next(csv.reader([line.rstrip()], strict=True))
        except csv.Error as error:
            raise ValueError(
                f"{where} must quote whole values ({error}), got {line[:80].rstrip()!r}"
            ) from None
        if len(values) != len(columns):
            raise ValueError(
                f"{where} must have {len(columns)} columns, {columns[0]} to {columns[-1]}, got "
                f"{len(values)} in {line[:80].rstrip()!r}; the file may be cut"
            )
        fields = dict(zip(columns, values, strict=True))
        user = whole_number(fields[_USER])
        if user is None or user < 0:
            raise ValueError(f"{where}: user id must be a whole number >= 0, got {fields[_USER]!r}")
        if user in lines:
            raise ValueError(f"{where}: user {user} was already on line {lines[user]}")
        lines[user] = number
        for name, column in texts.items():
            column.append(fields[name])
    if not lines:
        raise ValueError(f"{file} holds no users; it is cut or the wrong file")
    return user_table(
        list(lines), texts, {name: sorted(set(column)) for name, column in texts.items()}
    )
