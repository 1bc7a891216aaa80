"""Small raw data sets, written to disk and preprocessed for real."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from configs.schema import DatasetArgs
from data.preprocess import preprocess

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"

Rating = tuple[int, int, int, int]


@pytest.fixture
def raw(tmp_path: Path) -> Callable[[str], Path]:
    """`raw("ml-1m")`: a private copy of the fixture of that name, to be changed at will."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(FIXTURES / name, tmp_path / "raw" / name))

    return copy


def write_ml_100k(folder: Path, ratings: Iterable[Rating], *, users: Iterable[int]) -> Path:
    """A folder in the publisher's ml-100k format."""
    folder.mkdir(parents=True)
    lines = ["\t".join(map(str, rating)) for rating in ratings]
    (folder / "u.data").write_text("\n".join(lines) + "\n")
    people = [f"{user}|{20 + user % 40}|M|writer|{90000 + user}" for user in users]
    (folder / "u.user").write_text("\n".join(people) + "\n")
    return folder


def events_of(user: int, count: int) -> list[Rating]:
    """`count` events in time order: items 1, 2, ... with ratings 1, 2, ..., 5, 1, ..."""
    return [(user, n, (n - 1) % 5 + 1, 1_000_000 + 10 * n) for n in range(1, count + 1)]


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., DatasetArgs]:
    """`make_dataset([0, 1, 20, 21], max_num_candidates=20)`: users 1.. with so many events."""

    def make(counts: list[int], **args: object) -> DatasetArgs:
        ratings = [e for user, n in enumerate(counts, start=1) for e in events_of(user, n)]
        users = range(1, len(counts) + 1)
        source = write_ml_100k(tmp_path / "source", ratings, users=users)
        preprocess("ml-100k", source=source, output=tmp_path / "ml-100k")
        return DatasetArgs(
            dataset_name="ml-100k",
            dataset_path=str(tmp_path / "ml-100k"),
            **{"max_history_seqlen": 100, **args},
        )

    return make
