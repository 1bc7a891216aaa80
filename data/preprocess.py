"""Turns a raw data set into memory-mappable columns: python data/preprocess.py --dataset NAME.

Writes three files: the events, the users, and last the manifest that makes them a data set.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a file: its folder is on the path, the root is not
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import polars as pl
import pyarrow as pa

from configs.datasets import DATASETS, DatasetFacts
from data.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    FileFacts,
    Manifest,
    default_folder,
    read_manifest,
)
from data.movielens import Tables, read_movielens
from data.sources import LAYOUTS, fetch, locate

logger = logging.getLogger(__name__)

_PARTIAL = ".partial-"
_CHUNK_BYTES = 1 << 20


def preprocess(
    dataset_name: str, *, source: Path | None = None, output: Path | None = None
) -> tuple[Path, Manifest, bool]:
    """Makes the output folder hold the data set.

    Everything is written aside and published by renaming, the manifest last: whatever goes wrong,
    an earlier good output stays as it was.

    Args:
        dataset_name: a key of DATASETS.
        source: folder or archive with the raw files; None fetches them.
        output: folder to fill; None = datasets/<dataset_name> of this project.

    Returns:
        The folder, its manifest, and whether anything had to be written.

    Raises:
        NotImplementedError: a data set that is not built yet.
        ValueError: raw files that are missing, cut or break their format.
        RuntimeError: the network or the output folder does not let us.
    """
    if dataset_name not in LAYOUTS:
        built = ", ".join(LAYOUTS)
        raise NotImplementedError(
            f"--dataset {dataset_name}: preprocessing is not built yet; built are {built}"
        )
    folder = default_folder(dataset_name) if output is None else output
    existing = _intact_manifest(folder, dataset_name)
    if source is None and existing is not None:
        return folder, existing, False
    with _output_errors(folder), _workspace(folder) as work:
        raw = locate(dataset_name, fetch(dataset_name, work) if source is None else source)
        checksums = raw.sha256()
        if existing is not None and existing.source == checksums:
            return folder, existing, False
        logger.info("reading %s", raw.ratings)
        facts = DATASETS[dataset_name]
        tables = read_movielens(dataset_name, raw, facts, work)
        logger.info("writing %d events of %d users", tables.events.height, tables.users.height)
        files = {
            "events": _write(tables.events, work, "events"),
            "users": _write(tables.users, work, "users"),
        }
        manifest = _manifest(dataset_name, facts, tables, checksums, files)
        _publish(manifest, work, folder)
    return folder, manifest, True


def _intact_manifest(folder: Path, dataset_name: str) -> Manifest | None:
    """The manifest in `folder` if it and its files are complete and unchanged."""
    try:
        manifest = read_manifest(folder, dataset_name=dataset_name)
    except ValueError:
        return None
    intact = all(_sha256(folder / f.name) == f.sha256 for f in manifest.files.values())
    return manifest if intact else None


@contextlib.contextmanager
def _output_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        path = Path(error.filename or folder)
        if path.exists() and folder not in (path, *path.parents):
            raise RuntimeError(f"cannot read {path} ({error.strerror}); check --source") from error
        hint = "choose another folder with --output"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = f"free some space or {hint}"
        raise RuntimeError(
            f"cannot write the output folder {folder} ({error.strerror or error}); {hint}"
        ) from error


@contextlib.contextmanager
def _workspace(folder: Path) -> Iterator[Path]:
    """A folder on the disk of the output that is gone afterwards, as is an output it created."""
    with contextlib.ExitStack() as undo:
        for path in reversed((folder, *folder.parents)):  # undone last to first: deepest first
            if not path.exists():
                undo.callback(_remove_if_empty, path)
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        undo.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another process is writing to {folder}; wait for it") from None
        for left_over in folder.glob(f"{_PARTIAL}*"):  # of a killed run: we hold the lock
            shutil.rmtree(left_over, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder))
        undo.callback(shutil.rmtree, work, ignore_errors=True)
        yield work


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not empty: that is a success
        folder.rmdir()


def _write(frame: pl.DataFrame, work: Path, role: str) -> FileFacts:
    """Writes one record batch, so that a reader maps each column as one array."""
    path = work / f"{role}.arrow"
    table = frame.rechunk().to_arrow()
    with path.open("wb") as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        file.flush()
        os.fsync(file.fileno())
    digest = _sha256(path)
    # The content names the file: a new version never overwrites what a manifest points to.
    path = path.rename(work / f"{role}-{digest[:12]}.arrow")
    return FileFacts(name=path.name, num_bytes=path.stat().st_size, sha256=digest)


def _publish(manifest: Manifest, work: Path, folder: Path) -> None:
    draft = work / MANIFEST_NAME
    with draft.open("w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    names = {facts.name for facts in manifest.files.values()}
    for name in names:
        os.replace(work / name, folder / name)
    os.replace(draft, folder / MANIFEST_NAME)
    for role in manifest.files:
        for path in folder.glob(f"{role}-*.arrow"):
            if path.name not in names:
                path.unlink()


def _manifest(
    dataset_name: str,
    facts: DatasetFacts,
    tables: Tables,
    checksums: dict[str, str],
    files: dict[str, FileFacts],
) -> Manifest:
    events, users = tables.events, tables.users
    max_ids = {
        facts.item_feature_name: _maximum(events, "item_id"),
        facts.action_feature_name: facts.num_classes - 1,
    }
    for name in facts.contextual_feature_names:
        max_ids[name] = _maximum(users, name)
        if name in tables.vocabularies:
            max_ids[name] = len(tables.vocabularies[name]) - 1
    return Manifest(
        format_version=FORMAT_VERSION,
        dataset_name=dataset_name,
        item_feature_name=facts.item_feature_name,
        action_feature_name=facts.action_feature_name,
        contextual_feature_names=facts.contextual_feature_names,
        num_users=users.height,
        num_users_without_events=int((users["event_count"] == 0).sum()),
        num_items=tables.num_items,
        num_events=events.height,
        max_ids=max_ids,
        vocab_sizes={name: max_id + 1 for name, max_id in max_ids.items()},
        vocabularies=tables.vocabularies,
        num_classes=facts.num_classes,
        label_kind=facts.label_kind,
        source=checksums,
        options={"first_rating": facts.first_rating, "rating_step": facts.rating_step},
        files=files,
    )


def _maximum(frame: pl.DataFrame, column: str) -> int:
    maximum = frame[column].max()
    assert isinstance(maximum, int)
    return maximum


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: exit status 0, or 2 after one message on standard error."""
    parser = argparse.ArgumentParser(prog="preprocess.py", description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", required=True, choices=sorted(DATASETS))
    parser.add_argument("--source", type=Path, help="folder or archive; default: fetch it")
    parser.add_argument("--output", type=Path, help="default: datasets/<dataset>")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        folder, manifest, written = preprocess(
            arguments.dataset, source=arguments.source, output=arguments.output
        )
    except (ValueError, RuntimeError, NotImplementedError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    state = "written" if written else "up to date"
    sys.stdout.write(
        f"{folder}: {state} ({manifest.num_events} events, {manifest.num_users} users, "
        f"{manifest.num_items} items)\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
