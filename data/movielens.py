"""MovieLens in its publisher's formats: ratings and users, checked line by line."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from configs.datasets import DatasetFacts
from data.archives import RawFile
from data.events import EventBlock
from data.raw_lines import decode, finite_number, header_columns, identifiers, whole_number
from data.sources import Layout
from data.users import UserTable, user_table

_SEX = ("F", "M")
_AGE_CODES = ("1", "18", "25", "35", "45", "50", "56")  # ml-1m: lower ends of age groups
_MAX_AGE_YEARS = 150


class MovieLensFormat:
    """Ratings: user, item, rating and seconds since 1970, one a line."""

    ticks_per_second = 1

    def __init__(self, layout: Layout, facts: DatasetFacts) -> None:
        assert facts.first_rating is not None and facts.rating_step is not None
        self.separator, self.has_header = layout.separator, layout.has_header
        kinds = (int, int, float, int)
        self.numbers: dict[str, type] = dict(zip(layout.events_columns, kinds, strict=True))
        self._first, self._step = facts.first_rating, facts.rating_step
        self._ratings = facts.ratings

    def block(self, columns: Mapping[str, np.ndarray]) -> EventBlock | None:
        """Events from clean numbers; None if one is negative or a rating off its scale."""
        users_N, items_N, ratings_N, times_N = (columns[name] for name in self.numbers)
        steps_N = (ratings_N - self._first) / self._step
        fine_N = (steps_N == np.round(steps_N)) & (steps_N >= 0) & (steps_N < len(self._ratings))
        fine_N &= (users_N >= 0) & (items_N >= 0) & (times_N >= 0)
        if not fine_N.all():
            return None
        labels_N = steps_N.astype(np.int16)
        return EventBlock(users_N=users_N, items_N=items_N, labels_N=labels_N, times_N=times_N)

    def event(self, where: str, fields: Mapping[str, str], line: str) -> tuple[int, int, int, int]:
        """User, item, class and seconds of one line.

        Raises:
            ValueError: an id, a rating or a time that breaks its rule.
        """
        user_name, item_name, rating_name, time_name = self.numbers
        user, item = identifiers(where, fields, (user_name, item_name), line)
        rating = finite_number(fields[rating_name])
        if rating not in self._ratings:
            grid = ", ".join(f"{rating:g}" for rating in self._ratings)
            raise ValueError(f"{where}: rating must be one of {grid}, got {fields[rating_name]!r}")
        seconds = whole_number(fields[time_name])
        if seconds is None:  # some publishers write 881250949.0
            value = finite_number(fields[time_name])
            if value is None or value != round(value) or abs(value) >= 1 << 63:
                raise ValueError(
                    f"{where}: timestamp must be whole seconds since 1970, "
                    f"got the line {line[:80]!r}"
                )
            seconds = int(value)
        if seconds < 0:
            raise ValueError(f"{where}: timestamp must be >= 0, got {fields[time_name]!r}")
        return user, item, self._ratings.index(rating), seconds


def read_users(dataset_name: str, file: RawFile, layout: Layout) -> UserTable:
    """The users with sex, age, occupation and zip code.

    Args:
        dataset_name: decides how ages are read.
        file: to read.
        layout: its format.

    Raises:
        ValueError: a line that breaks the format, with its number; a user twice; no users.
    """
    texts: dict[str, list[str]] = {name: [] for name in ("sex", "age", "occupation", "zip")}
    lines: dict[int, int] = {}
    for line, fields in _user_lines(file, layout):
        where = f"{file}:{line}"
        user = _count(where, "user id", fields["user_id"])
        if user in lines:
            raise ValueError(f"{where}: user {user} was already on line {lines[user]}")
        lines[user] = line
        for name, column in texts.items():
            column.append(_checked(dataset_name, where, name, fields[name]))
    if not lines:
        raise ValueError(f"{file} holds no users; it is cut or the wrong file")
    vocabularies = {
        "sex": list(_SEX),
        "occupation": sorted(set(texts["occupation"])),
        "zip": sorted(set(texts["zip"])),
    }
    if dataset_name == "ml-1m":
        vocabularies["age"] = list(_AGE_CODES)
    return user_table(list(lines), texts, vocabularies)


def _user_lines(file: RawFile, layout: Layout) -> list[tuple[int, dict[str, str]]]:
    columns = layout.users_columns
    with file.open() as stream:
        lines = [decode(raw).rstrip() for raw in stream]
    if layout.has_header:
        header = lines[0].lstrip("\ufeff") if lines else ""
        columns = header_columns(f"{file}:1", header, layout.users_separator, columns)
    ours = {"gender": "sex", "zip_code": "zip"}
    names = [ours.get(name, name) for name in columns]
    rows = []
    for line_number, line in enumerate(lines, start=1):
        if not line or (layout.has_header and line_number == 1):
            continue
        fields = line.split(layout.users_separator)
        if len(fields) != len(names):
            raise ValueError(
                f"{file}:{line_number} must have the columns {', '.join(columns)} separated by "
                f"{layout.users_separator!r}, got {line[:80]!r}"
            )
        rows.append((line_number, dict(zip(names, fields, strict=True))))
    return rows


def _count(where: str, what: str, text: str) -> int:
    value = whole_number(text)
    if value is None or value < 0:
        raise ValueError(f"{where}: {what} must be a whole number >= 0, got {text!r}")
    return value


def _checked(dataset_name: str, where: str, name: str, text: str) -> str:
    """`text` if it is a legal value of a user's attribute."""
    allowed: tuple[str, ...] | None = None
    if name == "sex":
        allowed = _SEX
    elif name == "age" and dataset_name == "ml-1m":
        allowed = _AGE_CODES
    elif name == "age" and _count(where, "age", text) > _MAX_AGE_YEARS:
        raise ValueError(f"{where}: age must be <= {_MAX_AGE_YEARS} years, got {text}")
    if allowed is not None and text not in allowed:
        raise ValueError(f"{where}: {name} must be one of {', '.join(allowed)}, got {text!r}")
    return text
