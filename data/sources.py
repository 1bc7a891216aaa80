"""Finds the raw files of a data set: in a folder, in an archive, or on the network."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import logging
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

logger = logging.getLogger(__name__)

_URL = "https://files.grouplens.org/datasets/movielens/{name}.zip"
_CONNECT_TIMEOUT_SECONDS = 15
_PIP_TIMEOUT_SECONDS = 600
_WHEEL = "recbole==1.2.1"  # publishes ml-100k as example data; nothing of it is imported
_CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How one publisher names and formats the files of a data set."""

    ratings: str
    users: str | None
    separator: str
    users_separator: str = ""
    ratings_columns: tuple[str, ...]
    """Columns in file order; with a header, the names that it must contain."""
    users_columns: tuple[str, ...] = ()
    has_header: bool = False


_TAGGED = ("user_id", "item_id", "rating", "timestamp")
LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "ml-100k": (
        Layout(
            ratings="u.data",
            users="u.user",
            separator="\t",
            users_separator="|",
            ratings_columns=_TAGGED,
            users_columns=("user_id", "age", "sex", "occupation", "zip"),
        ),
        Layout(
            ratings="ml-100k.inter",
            users="ml-100k.user",
            separator="\t",
            users_separator="\t",
            ratings_columns=_TAGGED,
            users_columns=("user_id", "age", "gender", "occupation", "zip_code"),
            has_header=True,
        ),
    ),
    "ml-1m": (
        Layout(
            ratings="ratings.dat",
            users="users.dat",
            separator="::",
            users_separator="::",
            ratings_columns=_TAGGED,
            users_columns=("user_id", "sex", "age", "occupation", "zip"),
        ),
    ),
    "ml-20m": (
        Layout(
            ratings="ratings.csv",
            users=None,
            separator=",",
            ratings_columns=("userId", "movieId", "rating", "timestamp"),
            has_header=True,
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class RawFile:
    """A raw file as the user sees it, plain or inside an archive."""

    path: Path
    member: str | None = None

    def __str__(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}/{self.member}"

    @contextlib.contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """A binary stream.

        Raises:
            ValueError: the archive is cut or damaged.
        """
        if self.member is None:
            with self.path.open("rb") as stream:
                yield stream
            return
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as stream:
                yield stream
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise damaged(self.path, error) from None

    def sha256(self) -> str:
        """Of the content, so that an archive and its unpacked folder agree."""
        with self.open() as stream:
            digest = hashlib.sha256()
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def unpacked(self, folder: Path) -> Path:
        """The path of a plain file with this content, in `folder` if it has to be unpacked."""
        if self.member is None:
            return self.path
        target = folder / Path(self.member).name
        with self.open() as stream, target.open("wb") as file:
            shutil.copyfileobj(stream, file, _CHUNK_BYTES)
        return target


@dataclasses.dataclass(frozen=True, kw_only=True)
class RawFiles:
    """The raw files of one data set."""

    layout: Layout
    ratings: RawFile
    users: RawFile | None

    def sha256(self) -> dict[str, str]:
        """Checksums by role."""
        files = {"ratings": self.ratings, "users": self.users}
        return {role: file.sha256() for role, file in files.items() if file is not None}


def damaged(path: Path, error: object) -> ValueError:
    """What to tell the user about an archive that cannot be read to its end."""
    return ValueError(f"{path} is cut or damaged ({error}); download it again")


def locate(dataset_name: str, source: Path) -> RawFiles:
    """The raw files of `dataset_name` in `source`: a folder, an archive, or the ratings file.

    Raises:
        ValueError: nothing there, a damaged archive, another data set, or a file short.
    """
    if not source.exists():
        raise ValueError(f"--source {source} does not exist; {_expected(dataset_name)}")
    if source.is_file() and not _is_archive(source):
        source = source.parent
    found = _index(source)
    for layout in LAYOUTS[dataset_name]:
        if layout.ratings not in found:
            continue
        if layout.users is not None and layout.users not in found:
            raise ValueError(f"{source} has {layout.ratings} but no {layout.users}; add that file")
        users = None if layout.users is None else found[layout.users]
        return RawFiles(layout=layout, ratings=found[layout.ratings], users=users)
    for other, layouts in LAYOUTS.items():
        if any(layout.ratings in found for layout in layouts):
            raise ValueError(
                f"{source} looks like {other}, not {dataset_name}; use --dataset {other} or "
                f"another --source ({_expected(dataset_name)})"
            )
    raise ValueError(f"{source} holds no {dataset_name}; {_expected(dataset_name)}")


def _expected(dataset_name: str) -> str:
    names = [
        " and ".join(filter(None, (layout.ratings, layout.users)))
        for layout in LAYOUTS[dataset_name]
    ]
    return f"expected a folder or zip with {', or '.join(names)}"


def _is_archive(path: Path) -> bool:
    # By name as well: the index that makes a zip file one lies at its end, so a cut one has none.
    return path.suffix in (".zip", ".whl") or zipfile.is_zipfile(path)


def _index(source: Path) -> dict[str, RawFile]:
    """Files by base name, at most one folder down; the shallowest wins."""
    if source.is_dir():
        paths = [*source.glob("*/*"), *source.glob("*")]
        return {path.name: RawFile(path) for path in paths if path.is_file()}
    try:
        with zipfile.ZipFile(source) as archive:
            members = sorted(archive.namelist(), key=lambda name: -name.count("/"))
    except (zipfile.BadZipFile, OSError) as error:
        raise damaged(source, error) from None
    return {Path(member).name: RawFile(source, member) for member in members}


def fetch(dataset_name: str, folder: Path) -> Path:
    """Downloads a data set into `folder` and says where it lies there.

    From its publisher; where that cannot be reached, ml-100k comes out of a published Python
    package through the user's own pip configuration.

    Raises:
        RuntimeError: it cannot be had, with what to do by hand.
    """
    url = _URL.format(name=dataset_name)
    try:
        return _download(url, folder / f"{dataset_name}.zip")
    except (
        urllib.error.URLError,
        http.client.HTTPException,
        ssl.SSLError,
        TimeoutError,
        ConnectionError,
    ) as error:
        reason = getattr(error, "reason", error)
        logger.info("%s cannot be reached (%s)", url, reason)
        by_hand = f"download {url} elsewhere and pass it with --source"
        if dataset_name != "ml-100k":
            raise RuntimeError(f"cannot fetch {url} ({reason}); {by_hand}") from None
    return _download_wheel(folder, by_hand)


def _download(url: str, target: Path) -> Path:
    with (
        urllib.request.urlopen(url, timeout=_CONNECT_TIMEOUT_SECONDS) as response,
        target.open("wb") as file,
    ):
        num_bytes = int(response.headers.get("Content-Length") or 0)
        logger.info("downloading %s (%.1f MB)", url, num_bytes / 1e6)
        _copy_with_progress(response, file, num_bytes)
        received = file.tell()
    if num_bytes and received != num_bytes:
        raise ConnectionError(f"the connection ended after {received} of {num_bytes} bytes")
    if not zipfile.is_zipfile(target):  # a proxy's login page, for instance
        raise ConnectionError("what came back is no zip archive")
    return target


def _copy_with_progress(stream: IO[bytes], file: BinaryIO, num_bytes: int) -> None:
    console = Console(stderr=True)
    columns = (TextColumn("download"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("download", total=num_bytes or None)
        while chunk := stream.read(_CHUNK_BYTES):
            file.write(chunk)
            progress.advance(task, len(chunk))


def _download_wheel(folder: Path, by_hand: str) -> Path:
    logger.info("taking ml-100k from the published package %s instead", _WHEEL)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), _WHEEL]
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_PIP_TIMEOUT_SECONDS
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        raise RuntimeError(f"pip cannot fetch {_WHEEL} ({lines[-1]}); {by_hand}") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"pip did not fetch {_WHEEL} within {_PIP_TIMEOUT_SECONDS} seconds; {by_hand}"
        ) from None
    return next(folder.glob("recbole-*.whl"))
