"""Raw files as a user has them: plain, or inside a zip or tar archive."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from data.progress import Advance, stage

CHUNK_BYTES = 1 << 20
_ZIP_SUFFIXES = (".zip", ".whl")
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
# What the standard library raises for an archive that is cut or has bits flipped.
_DAMAGE = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError)


@dataclasses.dataclass(frozen=True)
class RawFile:
    """A raw file; as text it is what the user knows it by."""

    path: Path
    """The file, or the archive that it is in."""

    member: str | None = None
    """Its name in the archive."""

    unpacked: Path | None = None
    """Where a copy of the member lies, for archives that can only be read from the front."""

    def __str__(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}/{self.member}"

    @contextlib.contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """A binary stream.

        Raises:
            ValueError: the archive is cut or damaged.
        """
        if self.member is None or self.unpacked is not None:
            with (self.unpacked or self.path).open("rb") as stream:
                yield stream
            return
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as stream:
                yield stream
        except _DAMAGE as error:
            raise damaged(self.path, error) from None

    def num_bytes(self) -> int:
        """Size of the content."""
        if self.member is None or self.unpacked is not None:
            return (self.unpacked or self.path).stat().st_size
        with zipfile.ZipFile(self.path) as archive:
            return archive.getinfo(self.member).file_size

    def sha256(self, advance: Advance) -> str:
        """Of the content, so that an archive and its unpacked folder agree."""
        with self.open() as stream:
            digest = hashlib.sha256()
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
                advance(len(chunk))
        return digest.hexdigest()

    def release(self) -> None:
        """Gives back the disk space of the unpacked copy; the file is not read again."""
        if self.unpacked is not None:
            self.unpacked.unlink()


def damaged(path: Path, error: object) -> ValueError:
    """What to tell the user about an archive that cannot be read to its end."""
    reason = str(error).partition("\n")[0].rstrip(":")
    return ValueError(f"{path} is cut or damaged ({reason}); download it again")


def is_archive(path: Path) -> bool:
    """Whether a file is a zip or tar archive, by its name or its content."""
    # By name as well: the index that makes a zip file one lies at its end, so a cut one has none.
    named = path.name.endswith((*_ZIP_SUFFIXES, *_TAR_SUFFIXES))
    return named or zipfile.is_zipfile(path) or tarfile.is_tarfile(path)


def index(source: Path, wanted: Collection[str], work: Path) -> dict[str, RawFile]:
    """Files of a folder (at most two folders down) or archive by base name; the shallowest wins.

    Args:
        source: a folder or an archive.
        wanted: base names that will be read; of a tar archive these are unpacked.
        work: where to.

    Raises:
        ValueError: the archive is cut or damaged.
    """
    if source.is_dir():
        paths = [*source.glob("*/*/*"), *source.glob("*/*"), *source.glob("*")]
        return {path.name: RawFile(path) for path in paths if path.is_file()}
    try:
        if source.name.endswith(_ZIP_SUFFIXES) or zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                members = sorted(archive.namelist(), key=lambda name: -name.count("/"))
            return {Path(member).name: RawFile(source, member) for member in members}
        with stage(f"unpacking {source}", source.stat().st_size, unit="bytes") as advance:
            return _unpack_tar(source, wanted, work, advance)
    except _DAMAGE as error:
        raise damaged(source, error) from None
    except OSError as error:
        if error.filename is None and error.errno is None:  # a gzip stream with a bad head or sum
            raise damaged(source, error) from None
        raise


def _unpack_tar(
    source: Path, wanted: Collection[str], work: Path, advance: Advance
) -> dict[str, RawFile]:
    """Reads up to the last wanted member: what follows may be most of the archive."""
    found: dict[str, RawFile] = {}
    missing = set(wanted)
    position = 0
    with source.open("rb") as raw, tarfile.open(fileobj=raw) as archive:
        for member in archive:
            name = Path(member.name).name
            stream = archive.extractfile(member) if member.isfile() else None
            if stream is None or name in found:
                continue
            found[name] = RawFile(source, member.name)
            if name in missing:
                target = work / name
                with stream, target.open("wb") as file:
                    while chunk := stream.read(CHUNK_BYTES):
                        file.write(chunk)
                        advance(raw.tell() - position)
                        position = raw.tell()
                found[name] = dataclasses.replace(found[name], unpacked=target)
                missing.remove(name)
            if not missing:
                break
    return found
