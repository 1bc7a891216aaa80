"""MovieLens in its publisher's formats: raw files in, checked and ordered tables out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import polars as pl

from configs.datasets import DatasetFacts
from data.sources import Layout, RawFile, RawFiles

logger = logging.getLogger(__name__)

_SEX = ("F", "M")
_AGE_CODES = ("1", "18", "25", "35", "45", "50", "56")  # ml-1m: lower ends of age groups
_MAX_AGE_YEARS = 150
_RATING_FIELDS = ("user", "item", "label", "timestamp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """A data set ready to be written.

    events: item_id (int64), label (int16), timestamp (int64, seconds since 1970); users in
        ascending order of their ids, a user's events by time, equal times in file order.
    users: one int64 column per contextual feature, user_id, event_offset, event_count.
    """

    events: pl.DataFrame
    users: pl.DataFrame
    num_items: int
    vocabularies: dict[str, list[str]]


def read_movielens(dataset_name: str, raw: RawFiles, facts: DatasetFacts, work: Path) -> Tables:
    """The tables of a MovieLens data set.

    Args:
        dataset_name: decides how ages are read.
        raw: its files.
        facts: its rating scale.
        work: an empty folder on a disk with room for the unpacked files.

    Raises:
        ValueError: a line that breaks the format or the rating scale (with its number), a rating
            of an unknown user, no ratings at all.
    """
    users: pl.DataFrame | None = None
    vocabularies: dict[str, list[str]] = {}
    if raw.users is not None:
        users, vocabularies = _read_users(dataset_name, raw.users, raw.layout)
    ratings = _read_ratings(raw.ratings, raw.layout, facts, work, users)
    # Equal times keep the order of the file: not that of the item ids, nor of the reader's threads.
    ratings = ratings.sort("user", "timestamp", "line_number")
    counts = ratings.group_by("user", maintain_order=True).len().rename({"user": "user_id"})
    if users is None:
        users = counts.select("user_id")
    users = users.sort("user_id").join(counts, on="user_id", how="left", maintain_order="left")
    count = pl.col("len").fill_null(0).cast(pl.Int64)
    users = users.with_columns(event_offset=count.cum_sum() - count, event_count=count).drop("len")
    num_items = ratings["item"].n_unique()
    events = ratings.select(pl.col("item").alias("item_id"), "label", "timestamp")
    return Tables(events=events, users=users, num_items=num_items, vocabularies=vocabularies)


def _read_ratings(
    file: RawFile, layout: Layout, facts: DatasetFacts, work: Path, users: pl.DataFrame | None
) -> pl.DataFrame:
    """Columns user, item, label, timestamp, line_number."""
    path = file.unpacked(work)
    columns = _rating_columns(file, path, layout)
    parsed = _parse_ratings(path, layout, columns, facts)
    known = pl.lit(True) if users is None else pl.col("user").is_in(users["user_id"].implode())
    fine = pl.all_horizontal(
        *(pl.col(name).is_not_null() for name in _RATING_FIELDS),
        pl.col("user") >= 0,
        pl.col("item") >= 0,
        known,
    )
    try:
        columns_read = parsed.select(*_RATING_FIELDS, "line_number", fine.alias("fine"))
        table = columns_read.collect(engine="streaming")
    except pl.exceptions.ComputeError as error:
        raise ValueError(_undecodable(file, path, error)) from None
    if table.is_empty():
        raise ValueError(f"{file} holds no ratings; it is cut or the wrong file")
    if not table["fine"].all():
        bad = parsed.filter(~fine).head(1).collect(engine="streaming").row(0, named=True)
        raise ValueError(_explain(file, bad, layout, columns, facts))
    return table.drop("fine")


def _rating_columns(file: RawFile, path: Path, layout: Layout) -> tuple[str, ...]:
    """The columns that the file has, in its order."""
    if not layout.has_header:
        return layout.ratings_columns
    with path.open("rb") as stream:
        header = _decode(stream.readline()).lstrip("\ufeff").rstrip()
    return _header_columns(file, header, layout.separator, layout.ratings_columns)


def _header_columns(
    file: RawFile, header: str, separator: str, wanted: tuple[str, ...]
) -> tuple[str, ...]:
    columns = tuple(name.partition(":")[0] for name in header.split(separator))
    missing = [name for name in wanted if name not in columns]
    if missing:
        raise ValueError(
            f"{file}:1 must be a header with the columns {', '.join(wanted)} separated by "
            f"{separator!r}, got {header[:80]!r}"
        )
    return columns


def _parse_ratings(
    path: Path, layout: Layout, columns: tuple[str, ...], facts: DatasetFacts
) -> pl.LazyFrame:
    """Lazy: line_number, text, the four fields (null where they break their rule), rating."""
    assert facts.first_rating is not None and facts.rating_step is not None
    text = pl.col("line").str.strip_chars_end()
    first_line = 2 if layout.has_header else 1
    # One field more than there are columns: it must stay empty.
    parts = pl.col("text").str.split_exact(layout.separator, len(columns))
    at = {name: parts.struct.field(f"field_{columns.index(name)}") for name in columns}
    user, item, rating, timestamp = (at[name] for name in layout.ratings_columns)
    excess = parts.struct.field(f"field_{len(columns)}").is_not_null()
    stars = rating.cast(pl.Float64, strict=False)
    steps = (stars - facts.first_rating) / facts.rating_step
    on_grid = (steps == steps.round()) & steps.is_between(0, facts.num_classes - 1)
    seconds = timestamp.cast(pl.Float64, strict=False)  # some publishers write 881250949.0
    whole = pl.when(seconds == seconds.round()).then(seconds.cast(pl.Int64, strict=False))
    return (
        pl.scan_lines(path, row_index_name="line_number", row_index_offset=1)
        .filter(pl.col("line_number") >= first_line)
        .select("line_number", text.alias("text"))
        .filter(pl.col("text") != "")
        .select(
            "line_number",
            "text",
            pl.when(~excess).then(user.cast(pl.Int64, strict=False)).alias("user"),
            item.cast(pl.Int64, strict=False).alias("item"),
            pl.when(on_grid).then(steps.cast(pl.Int16, strict=False)).alias("label"),
            pl.coalesce(timestamp.cast(pl.Int64, strict=False), whole).alias("timestamp"),
            rating.alias("rating"),
            stars.is_not_null().alias("is_number"),
        )
    )


def _explain(
    file: RawFile,
    bad: Mapping[str, object],
    layout: Layout,
    columns: tuple[str, ...],
    facts: DatasetFacts,
) -> str:
    """What is wrong with the first bad line."""
    where, line = f"{file}:{bad['line_number']}", str(bad["text"])
    text = line[:80]
    if len(line.split(layout.separator)) != len(columns):
        return (
            f"{where} must have the columns {', '.join(columns)} separated by "
            f"{layout.separator!r}, got {text!r}; the file may be cut"
        )
    for name in ("user", "item"):
        value = bad[name]
        if value is None or not isinstance(value, int) or value < 0:
            return f"{where}: {name} id must be a whole number >= 0, got the line {text!r}"
    if bad["label"] is None:
        grid = ", ".join(f"{rating:g}" for rating in facts.ratings)
        return f"{where}: rating must be one of {grid}, got {bad['rating']!r}"
    if bad["timestamp"] is None:
        return f"{where}: timestamp must be whole seconds since 1970, got the line {text!r}"
    return f"{where}: user {bad['user']} is not in {layout.users}; the files do not match"


def _undecodable(file: RawFile, path: Path, error: Exception) -> str:
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                raw.decode()
            except UnicodeDecodeError as problem:
                byte = raw[problem.start]
                return f"{file}:{number} must be numbers as plain text, got the byte 0x{byte:02X}"
    return f"{file} cannot be read: {error}"


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")  # what the publisher used before 2010; never fails


def _read_users(
    dataset_name: str, file: RawFile, layout: Layout
) -> tuple[pl.DataFrame, dict[str, list[str]]]:
    """User rows with contextual ids, ascending by id, and the vocabularies behind the ids."""
    texts: dict[str, list[str]] = {name: [] for name in ("sex", "age", "occupation", "zip")}
    lines: dict[int, int] = {}
    for number, fields in _user_lines(file, layout):
        where = f"{file}:{number}"
        user = _whole_number(where, "user id", fields["user_id"])
        if user in lines:
            raise ValueError(f"{where}: user {user} was already on line {lines[user]}")
        lines[user] = number
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
    columns = {"user_id": list(lines)}
    for name, column in texts.items():
        index: Callable[[str], int] = int
        if name in vocabularies:
            index = {text: position for position, text in enumerate(vocabularies[name])}.__getitem__
        columns[name] = [index(text) for text in column]
    return pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.Int64)), vocabularies


def _user_lines(file: RawFile, layout: Layout) -> list[tuple[int, dict[str, str]]]:
    columns = layout.users_columns
    with file.open() as stream:
        lines = [_decode(raw).rstrip() for raw in stream]
    if layout.has_header:
        header = lines[0].lstrip("\ufeff") if lines else ""
        columns = _header_columns(file, header, layout.users_separator, columns)
    ours = {"gender": "sex", "zip_code": "zip"}
    names = [ours.get(name, name) for name in columns]
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line or (layout.has_header and number == 1):
            continue
        fields = line.split(layout.users_separator)
        if len(fields) != len(names):
            raise ValueError(
                f"{file}:{number} must have the columns {', '.join(columns)} separated by "
                f"{layout.users_separator!r}, got {line[:80]!r}"
            )
        rows.append((number, dict(zip(names, fields, strict=True))))
    return rows


def _whole_number(where: str, what: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{where}: {what} must be a whole number >= 0, got {text!r}")
    return int(text)


def _checked(dataset_name: str, where: str, name: str, text: str) -> str:
    """`text` if it is a legal value of a user's attribute."""
    allowed: tuple[str, ...] | None = None
    if name == "sex":
        allowed = _SEX
    elif name == "age" and dataset_name == "ml-1m":
        allowed = _AGE_CODES
    elif name == "age" and _whole_number(where, "age", text) > _MAX_AGE_YEARS:
        raise ValueError(f"{where}: age must be <= {_MAX_AGE_YEARS} years, got {text}")
    if allowed is not None and text not in allowed:
        raise ValueError(f"{where}: {name} must be one of {', '.join(allowed)}, got {text!r}")
    return text
